"""A job with a `run_rate` begins no more runs than that: further ones wait, or end the job."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from celery_sidejob import Job, RunningJob, SettingsError
from celery_sidejob.model.crash_points import AnswerLost
from celery_sidejob.operations.runs import recovery
from celery_sidejob.testing import move_clock
from tests.tools.apps import make_app
from tests.tools.crash_points import Arm
from tests.tools.in_process import Stage

HALF_AN_HOUR = 1800
"""The seconds in which a bucket of "2/h" gets one token."""


def rated(stage: Stage, body: Callable[[RunningJob], Any] | None = None, rate: Any = "2/h", **options: Any) -> Job:
    """A job whose runs have a rate."""

    def call(job: RunningJob) -> Any:
        return None if body is None else body(job)

    task = stage.task(call, name="stage.rated", shared=False, run_rate=rate, inports=["*"], **options)
    made: Job = task.enqueue()
    return made


def pass_time(stage: Stage, seconds: float) -> None:
    """Have this time pass for the job and its message."""
    move_clock(seconds, sidejob=stage.sidejob)


def due_in_s(stage: Stage) -> float:
    ((seconds,),) = stage.sql("SELECT extract(epoch FROM due_at - now())::float FROM messages")
    return float(seconds)


def run(stage: Stage, job: Job, **options: Any) -> int:
    """Ask, and return how many runs begin."""
    assert job.run(**options) is not None
    return stage.drain()


def is_delayed(job: Job) -> bool:
    return job.waiting_for == ["rate"]


# -- runs that wait --------------------------------------------------------------------------------------------------


def test_as_many_runs_as_the_bucket_holds_begin_at_once_and_the_next_one_waits(stage: Stage) -> None:
    job = rated(stage)
    assert stage.drain() == 1
    assert run(stage, job) == 1
    assert not is_delayed(job)

    assert run(stage, job) == 0

    assert job.refresh().status == "queued"
    assert is_delayed(job)
    assert due_in_s(stage) == pytest.approx(HALF_AN_HOUR, abs=30)


def test_it_begins_when_its_time_has_come(stage: Stage) -> None:
    job = rated(stage)
    stage.drain()
    run(stage, job)
    run(stage, job)

    pass_time(stage, HALF_AN_HOUR - 60)
    assert stage.drain() == 0
    pass_time(stage, 60)
    assert stage.drain() == 1

    assert (job.refresh().status, is_delayed(job)) == ("completed", False)
    assert run(stage, job) == 0


def test_tokens_come_with_time_and_no_more_than_the_bucket_holds(stage: Stage) -> None:
    job = rated(stage)
    assert [stage.drain(), run(stage, job)] == [1, 1]
    pass_time(stage, 100 * HALF_AN_HOUR)
    assert [run(stage, job) for _ in range(3)] == [1, 1, 0]


def test_runs_that_come_in_time_are_never_delayed(stage: Stage) -> None:
    job = rated(stage)
    stage.drain()
    for _ in range(5):
        pass_time(stage, HALF_AN_HOUR + 1)
        assert run(stage, job) == 1


def test_asks_that_come_meanwhile_change_nothing_and_none_is_lost(stage: Stage) -> None:
    job = rated(stage)
    stage.drain()
    run(stage, job)
    run(stage, job)
    ((due,),) = stage.sql("SELECT due_at FROM messages")

    for _ in range(3):
        job.run()
    job.input("a").write(1)
    assert stage.sql("SELECT due_at FROM messages") == [(due,)]
    assert stage.drain() == 0

    pass_time(stage, HALF_AN_HOUR)
    assert stage.drain() == 1
    assert job.refresh().info["asked_again"] is False


def test_an_ask_during_a_run_is_delayed_as_its_next_run_is(stage: Stage) -> None:
    job = rated(stage, lambda job: job.run() if job.run_no < 9 else None)
    assert stage.drain() == 2
    assert (job.refresh().status, is_delayed(job)) == ("queued", True)
    pass_time(stage, HALF_AN_HOUR)
    assert stage.drain() == 1


def test_a_suspended_job_that_is_woken_waits_too(stage: Stage) -> None:
    job = rated(stage, lambda job: job.suspend())
    stage.drain()
    run(stage, job)
    job.input("a").write(1)
    assert (stage.drain(), job.refresh().status) == (0, "queued")


def test_a_forced_run_waits_too(stage: Stage) -> None:
    job = rated(stage)
    stage.drain()
    run(stage, job)
    assert run(stage, job, force=True) == 0
    assert run(stage, job, force=True) == 0
    assert is_delayed(job)
    pass_time(stage, HALF_AN_HOUR)
    assert stage.drain() == 1


def test_a_retry_waits_for_its_backoff_and_for_the_rate(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        raise job.retry(countdown=60 if job.run_no == 1 else 2 * HALF_AN_HOUR)

    job = rated(stage, body)
    stage.drain()
    assert due_in_s(stage) == pytest.approx(60, abs=30)
    assert job.waiting_for == ["retry"]
    pass_time(stage, 60)
    assert stage.drain() == 1
    assert due_in_s(stage) == pytest.approx(2 * HALF_AN_HOUR, abs=30)
    assert job.waiting_for == ["retry", "rate"]

    job.run(force=True)  # it cuts the backoff short, and no more

    assert job.waiting_for == ["rate"]
    assert due_in_s(stage) == pytest.approx(HALF_AN_HOUR - 60, abs=30)
    assert stage.drain() == 0


def test_a_timer_that_fires_waits_too(stage: Stage) -> None:
    job = rated(stage)
    stage.drain()
    run(stage, job)
    job.run(countdown=60)
    stage.sql("UPDATE timers SET due_at = now()")
    assert (stage.drain(), is_delayed(job)) == (0, True)


def test_a_termination_waits_for_nothing_and_takes_no_token(stage: Stage) -> None:
    job = rated(stage)
    stage.drain()
    run(stage, job)
    run(stage, job)
    ((opens,),) = stage.sql("SELECT rate_opens_at FROM jobs")

    job.terminate()

    assert not is_delayed(job)
    assert (stage.drain(), job.refresh().status) == (1, "terminated")
    assert stage.sql("SELECT rate_opens_at FROM jobs") == [(opens,)]
    assert run(stage, job, force=True) == 0
    assert is_delayed(job)


def test_a_forced_run_after_the_shutdown_waits_for_the_rate(stage: Stage) -> None:
    job = rated(stage)
    stage.drain()
    run(stage, job)
    job.terminate()
    job.run(force=True)
    assert (stage.drain(), job.refresh().status, is_delayed(job)) == (1, "queued", True)


def test_each_job_has_a_bucket_of_its_own(stage: Stage) -> None:
    job = rated(stage)
    other = stage.sidejob.enqueue("stage.rated")
    stage.drain()
    assert [run(stage, job), run(stage, job)] == [1, 0]
    assert run(stage, other) == 1


def test_a_job_without_a_rate_is_never_delayed_and_keeps_nothing(stage: Stage) -> None:
    job = stage.job()
    stage.drain()
    for _ in range(5):
        assert run(stage, job) == 1
    assert stage.sql("SELECT rate_interval_s, rate_burst, rate_terminates, rate_opens_at FROM jobs") == [(None,) * 4]


def test_a_fast_rate_lets_runs_through_as_fast_as_they_come(stage: Stage) -> None:
    job = rated(stage, rate="600/m")
    stage.drain()
    assert [run(stage, job) for _ in range(20)] == [1] * 20


# -- deaths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("give_back", [recovery.rescue, recovery.release])
def test_a_run_that_is_taken_from_its_worker_gives_its_token_back(stage: Stage, give_back: Callable[..., bool]) -> None:
    """It begins again, and is counted once."""
    job = rated(stage, max_losses=9)
    options: dict[str, Any] = {"own": True} if give_back is recovery.rescue else {}
    for _ in range(4):
        hold = stage.claim(job)
        assert hold is not None
        assert give_back(stage.runtime, job.id, run_no=hold.run_no, worker_id=hold.worker_id, **options)
    assert stage.drain() == 1
    assert [run(stage, job), run(stage, job)] == [1, 0]


def test_a_delayed_run_whose_worker_dies_at_its_claim_is_delayed_no_longer(stage: Stage) -> None:
    job = rated(stage)
    stage.drain()
    run(stage, job)
    run(stage, job)
    pass_time(stage, HALF_AN_HOUR)
    worker_id = stage.new_worker()
    hold = stage.claim(job, worker_id=worker_id)
    assert hold is not None
    job.run()

    stage.declare_dead(worker_id)
    assert recovery.rescue(stage.runtime, job.id, run_no=hold.run_no, worker_id=worker_id)

    assert stage.drain() == 1
    assert job.refresh().status == "completed"
    assert run(stage, job) == 0


def test_a_lost_shutdown_gives_back_no_token(stage: Stage) -> None:
    job = rated(stage)
    stage.drain()
    job.terminate()
    ((opens,),) = stage.sql("SELECT rate_opens_at FROM jobs")
    hold = stage.claim(job)
    assert hold is not None
    recovery.rescue(stage.runtime, job.id, run_no=hold.run_no, worker_id=hold.worker_id, own=True)
    assert stage.sql("SELECT rate_opens_at FROM jobs") == [(opens,)]
    assert (stage.drain(), job.refresh().status) == (1, "terminated")


def test_a_claim_whose_answer_was_lost_takes_one_token(stage: Stage, at: Arm) -> None:
    def lose() -> None:
        raise AnswerLost("no answer")

    job = rated(stage)
    at("claim:after-commit", lose)
    assert stage.drain() == 1
    assert [run(stage, job), run(stage, job)] == [1, 0]


def test_a_stale_delivery_takes_none(stage: Stage) -> None:
    job = rated(stage)
    stage.drain()
    ((opens,),) = stage.sql("SELECT rate_opens_at FROM jobs")
    assert stage.claim(job, for_run=1) is None
    run(stage, job)
    run(stage, job)
    assert stage.claim(job, for_run=3) is None, "a message that was published too early"
    assert stage.sql("SELECT rate_opens_at - %s = interval '30 min' FROM jobs", opens) == [(True,)]


# -- runs that end the job -------------------------------------------------------------------------------------------


class Ended:
    """A job of "2/h" that a run beyond its rate terminates, and what it has done."""

    def __init__(self, stage: Stage, **options: Any) -> None:
        self.stage = stage
        self.runs = self.shutdowns = 0

        def body(job: RunningJob) -> None:
            self.runs += 1

        def shutdown(job: RunningJob) -> None:
            self.shutdowns += 1

        task = stage.task(
            body, name="stage.ended", shared=False, run_rate="2/h", on_run_rate="terminate", inports=["*"], **options
        )
        task.on_shutdown(shutdown)
        self.job: Job = task.enqueue()
        stage.drain()
        run(stage, self.job)

    @property
    def became(self) -> tuple[str, int, int]:
        return str(self.job.refresh().status), self.runs, self.shutdowns


def test_a_run_beyond_the_rate_ends_the_job(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    ended = Ended(stage)
    ran_at = ended.job.refresh().ran_at
    assert ended.became == ("completed", 2, 0)

    ended.job.run()
    assert due_in_s(stage) <= 0
    with caplog.at_level(logging.WARNING, "celery_sidejob"):
        hold = stage.claim(ended.job)
        assert hold is not None
        stage.perform(hold)

    assert ended.became == ("terminating", 2, 0)
    told = f"Job {ended.job.id} was terminated: it was asked to run more often than its run_rate allows."
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [told]
    assert stage.drain() == 1
    assert ended.became == ("terminated", 2, 1)
    assert ended.job.ran_at == ran_at
    assert ended.job.delete()


def test_it_is_told_in_the_log_in_the_same_commit(stage: Stage) -> None:
    keeper = stage.job(inports={"log": {"channels": ["/sidejob/log"]}})
    ended = Ended(stage)
    run(stage, ended.job)
    entries = [packet.value for packet in keeper.input("log").peek(10)]
    (entry,) = [entry for entry in entries if "error" in entry]
    assert entry["job"] == ended.job.id
    assert "run_rate" in entry["error"]


def test_what_is_announced_is_that_it_is_terminating(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Ended(stage)
    told: list[str] = []
    monkeypatch.setattr(stage.runtime.observer, "tell", lambda event: told.append(getattr(event, "after", "")))
    run(stage, ended.job)
    assert list(filter(None, told)) == ["queued", "terminating", "terminated"]


def test_the_rate_ends_no_job_that_keeps_to_it(stage: Stage) -> None:
    ended = Ended(stage)
    for _ in range(3):
        pass_time(stage, HALF_AN_HOUR + 1)
        assert run(stage, ended.job) == 1
    assert ended.became == ("completed", 5, 0)


def test_a_run_that_was_asked_too_early_and_begins_in_time_is_no_reason(stage: Stage) -> None:
    """It waited in the queue."""
    ended = Ended(stage)
    ended.job.run()
    pass_time(stage, HALF_AN_HOUR + 1)
    stage.drain()
    assert ended.became == ("completed", 3, 0)


def test_many_asks_for_one_run_are_no_reason(stage: Stage) -> None:
    ended = Ended(stage)
    pass_time(stage, HALF_AN_HOUR + 1)
    for _ in range(9):
        ended.job.run()
    stage.drain()
    assert ended.became == ("completed", 3, 0)


def test_a_lost_run_is_no_reason(stage: Stage) -> None:
    ended = Ended(stage)
    pass_time(stage, HALF_AN_HOUR + 1)
    ended.job.run()
    hold = stage.claim(ended.job)
    assert hold is not None
    recovery.rescue(stage.runtime, ended.job.id, run_no=hold.run_no, worker_id=hold.worker_id, own=True)
    stage.drain()
    assert ended.became == ("completed", 3, 0)


def test_asks_and_timers_that_came_before_do_not_revive_it_and_force_does(stage: Stage) -> None:
    ended = Ended(stage)
    ended.job.run(countdown=60)
    ended.job.run()
    stage.drain()
    assert ended.became == ("terminated", 2, 1)
    assert ended.job.timers == []
    pass_time(stage, HALF_AN_HOUR + 1)
    run(stage, ended.job, force=True)
    assert ended.became == ("completed", 3, 1)


def test_a_forced_run_beyond_the_rate_ends_it_again(stage: Stage) -> None:
    """SideJob counts forced runs as others."""
    ended = Ended(stage)
    run(stage, ended.job)
    run(stage, ended.job, force=True)
    assert ended.became == ("terminated", 2, 2)


def test_its_parent_is_asked_when_it_has_ended(stage: Stage) -> None:
    runs: list[int] = []
    parent = stage.job(lambda job: runs.append(job.run_no) or job.suspend())
    ended = Ended(stage)
    parent.adopt(ended.job, "child")
    stage.drain()
    before = len(runs)
    run(stage, ended.job)
    assert len(runs) > before
    assert ended.became == ("terminated", 2, 1)


class Died(BaseException):
    """The process ends here."""


def die() -> None:
    raise Died


@pytest.mark.parametrize("point", ["terminate:before-commit", "terminate:after-commit"])
def test_a_death_on_the_way_loses_neither_the_ask_nor_the_termination(stage: Stage, at: Arm, point: str) -> None:
    """Before the commit it is a lost run, which is judged anew; after it the run is over, and the shutdown is owed."""
    ended = Ended(stage)
    worker_id = stage.new_worker()
    ended.job.run()
    hold = stage.claim(ended.job, worker_id=worker_id)
    assert hold is not None
    at(point, die)
    with pytest.raises(Died):
        stage.perform(hold)
    stage.declare_dead(worker_id)
    rescued = recovery.rescue(stage.runtime, ended.job.id, run_no=hold.run_no, worker_id=worker_id)
    assert rescued is (point == "terminate:before-commit")

    stage.drain()

    assert ended.became == ("terminated", 2, 1)


def test_a_death_before_the_termination_is_judged_by_the_time_that_has_passed(stage: Stage, at: Arm) -> None:
    ended = Ended(stage)
    worker_id = stage.new_worker()
    ended.job.run()
    hold = stage.claim(ended.job, worker_id=worker_id)
    assert hold is not None
    stage.declare_dead(worker_id)
    recovery.rescue(stage.runtime, ended.job.id, run_no=hold.run_no, worker_id=worker_id)
    pass_time(stage, HALF_AN_HOUR + 1)
    stage.drain()
    assert ended.became == ("completed", 3, 0)


# -- the options -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["600/min", "fast", "0/s", -1, True, ["1/s"]])
def test_a_wrong_rate_is_refused_with_what_is_right(stage: Stage, wrong: Any) -> None:
    with pytest.raises(SettingsError, match=r'run_rate is runs per second, minute or hour, such as "600/m"'):
        rated(stage, rate=wrong)


def test_a_wrong_policy_is_refused(stage: Stage) -> None:
    with pytest.raises(SettingsError, match="on_run_rate is 'delay' or 'terminate', not 'drop'"):
        rated(stage, on_run_rate="drop")


def test_a_policy_without_a_rate_is_refused(stage: Stage) -> None:
    with pytest.raises(SettingsError, match="needs a rate: give run_rate= too"):
        rated(stage, rate=None, on_run_rate="terminate")


def test_a_client_without_the_code_makes_jobs_with_the_rate(stage: Stage) -> None:
    """It has the options with which a worker has registered the task."""
    job = rated(stage, on_run_rate="terminate")
    stage.sidejob.register_tasks()
    app = make_app("elsewhere", broker="memory://", sidejob_database_url=stage.database_url)
    made = app.sidejob.enqueue("stage.rated")
    app.sidejob.close()
    app.close()
    rates = "SELECT rate_interval_s, rate_burst, rate_terminates FROM jobs WHERE id = ANY(%s) ORDER BY id"
    assert stage.sql(rates, [job.id, made.id]) == [(1800.0, 2, True)] * 2


def test_the_registry_shows_no_rate_where_there_is_none(stage: Stage) -> None:
    stage.sidejob.register_tasks()
    rows = [json.dumps(options) for (options,) in stage.sql("SELECT options FROM registry")]
    assert rows
    assert not any("rate" in row for row in rows)


def test_an_eager_run_beyond_the_rate_stays_in_the_store(stage: Stage) -> None:
    """As a timer does: what is called eagerly waits for nothing."""
    stage.app.conf.task_always_eager = True

    @stage.task(name="stage.eager", shared=False, run_rate="2/h")
    def eager(job: RunningJob) -> None:
        job.run()

    job = eager.delay().job
    assert (job.refresh().info["run_no"], job.status, is_delayed(job)) == (2, "queued", True)
    job.terminate()
    stage.drain()
