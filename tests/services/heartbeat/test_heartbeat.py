"""A worker gives back what it does not run, counts as lost only what was lost, and leaves the rest alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from celery_sidejob import Job, LeaseLostError, RunningJob, StoreUnavailableError
from celery_sidejob.model.loss import Loss
from celery_sidejob.operations.hold import Hold
from celery_sidejob.operations.runs import recovery, runs
from celery_sidejob.operations.runs.runs import Unit
from celery_sidejob.services.duty import Report
from celery_sidejob.services.heartbeat import heartbeat as heartbeats
from celery_sidejob.services.heartbeat.deliveries import ENDED, RELEASED
from celery_sidejob.services.heartbeat.heartbeat import TRY_S, Heartbeat
from celery_sidejob.services.heartbeat.run_ends import Stop, end_from_outside
from celery_sidejob.store import workers
from tests.tools.databases import SCHEMA
from tests.tools.in_process import Stage

pytestmark = pytest.mark.pooled_too

DEAD_PID = 2**22 + 1
"""No process has this id: it is above what Linux gives."""


class Pool:
    """Stands for the processes of a pool: says which have died."""

    def __init__(self) -> None:
        self.dead: list[int] = []

    def died(self, busy: Any = ()) -> dict[int, int]:
        dead, self.dead = self.dead, []
        return dict.fromkeys(dead, -signal.SIGKILL)


@pytest.fixture
def pool() -> Pool:
    """The processes of the worker's pool."""
    return Pool()


@pytest.fixture
def heartbeat(stage: Stage, pool: Pool) -> Iterator[Heartbeat]:
    """A worker's heartbeat, which beats and looks when the test says so."""
    made = Heartbeat(stage.runtime, pool)  # type: ignore[arg-type]
    made.register()
    yield made
    made.leave()
    made.close()


def claimed(stage: Stage, heartbeat: Heartbeat, body: Any = None, *, worker_id: int | None = None) -> Hold:
    """A run that this worker (or another one) has claimed."""
    hold = stage.claim(stage.job(body), worker_id=worker_id or heartbeat.worker_id)
    assert hold is not None
    return hold


def row(stage: Stage, hold: Hold) -> tuple[Any, ...]:
    """Status, run and losses of the job."""
    return stage.sql("SELECT status, run_no, losses FROM jobs WHERE id = %s", hold.job_id)[0]


def key(hold: Hold) -> tuple[int, int]:
    return hold.job_id, hold.run_no


def age(stage: Stage, *holds: Hold, seconds: float = 3600) -> None:
    """Have the runs begun, or heard of, so long ago."""
    stage.sql(
        "UPDATE messages SET locked_at = now() - make_interval(secs => %s) WHERE job_id = ANY(%s)",
        seconds, [hold.job_id for hold in holds],
    )  # fmt: skip


def reconcile(heartbeat: Heartbeat) -> int:
    """Look now whether this worker runs what it holds; returns how many runs it rescued."""
    heartbeat.jobs._strays_at = float("-inf")
    return heartbeat.run_once()["rescued"]


# -- what is held and not run -----------------------------------------------------------------------------------------


def test_a_worker_says_which_broker_it_takes_messages_from(stage: Stage, heartbeat: Heartbeat) -> None:
    brokers = {worker["id"]: worker["broker"] for worker in stage.sidejob.stats()["workers"]}
    assert brokers[heartbeat.worker_id] == stage.sidejob.owner["broker"]


def test_a_worker_that_watches_the_sweeper_tries_again_and_again_to_take_its_place(
    stage: Stage, heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(heartbeats, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def due_after(*seconds: float) -> list[bool]:
        found = []
        for each in seconds:
            now[0] += each
            found.append(heartbeat.sweep_is_due())
        return found

    heartbeat.beat()
    assert due_after(0, TRY_S / 2, TRY_S / 2, TRY_S / 2) == [True, False, True, False]
    holders = [stage.new_worker() for _ in range(2)]
    assert workers.hold_sweeper_lease(stage.runtime.connections, holders[0], schema=SCHEMA, lease_s=1000)
    heartbeat.beat()
    assert due_after(0, TRY_S, 1000) == [False, False, False], "another watches"


def test_what_is_held_and_not_run_is_rescued(stage: Stage, heartbeat: Heartbeat) -> None:
    forgotten, running, others, young = (
        claimed(stage, heartbeat), claimed(stage, heartbeat), claimed(stage, heartbeat, worker_id=stage.worker_id),
        claimed(stage, heartbeat),
    )  # fmt: skip
    age(stage, forgotten, running, others)
    heartbeat.runs.received(key(running))

    assert heartbeat.run_once()["rescued"] == 0, "it is not time yet"
    assert reconcile(heartbeat) == 1
    assert row(stage, forgotten) == ("queued", 1, 1)
    for untouched in (running, others, young):
        assert row(stage, untouched) == ("running", 1, 0)
    with pytest.raises(LeaseLostError):
        runs.commit(stage.runtime, forgotten, Unit())


def test_a_worker_looks_at_what_it_holds_once_per_lease(
    stage: Stage, heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten = claimed(stage, heartbeat)
    age(stage, forgotten)
    jobs = heartbeat.jobs
    monkeypatch.setattr(jobs, "_strays_at", jobs._strays_at - stage.sidejob.settings.lease)
    assert heartbeat.run_once()["rescued"] == 1


def end(heartbeat: Heartbeat, run: tuple[int, int], task: str) -> None:
    """End a run as its worker does that has stopped it."""
    stop = Stop("TimeLimitExceeded", "too long")
    end_from_outside(heartbeat.runtime, run, task, stop, worker_id=heartbeat.worker_id)


def test_what_is_to_be_ended_from_outside_is_not_rescued_before(stage: Stage, heartbeat: Heartbeat) -> None:
    stopped = claimed(stage, heartbeat)
    age(stage, stopped)
    heartbeat.errands.soon(lambda: end(heartbeat, key(stopped), stopped.row.task))
    assert reconcile(heartbeat) == 0
    heartbeat.errands.run_once()
    assert row(stage, stopped) == ("failed", 1, 0)
    assert reconcile(heartbeat) == 0


@pytest.mark.parametrize("which", ["run_no", "worker_id", "task"])
def test_another_run_is_not_ended_from_outside(stage: Stage, heartbeat: Heartbeat, which: str) -> None:
    """The news of a time limit or a revocation may be about a run that is over."""
    other = claimed(stage, heartbeat, worker_id=stage.worker_id if which == "worker_id" else None)
    before = stage.everything()
    run_no = other.run_no - (which == "run_no")
    end(heartbeat, (other.job_id, run_no), "stage.other" if which == "task" else other.row.task)
    assert stage.everything() == before


# -- processes that die -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "after"), [(None, ("queued", 1, 1)), (RELEASED, ("queued", 1, 0)), (ENDED, ("running", 1, 0))]
)
def test_only_a_death_that_was_not_planned_is_a_loss(
    stage: Stage, heartbeat: Heartbeat, pool: Pool, plan: str | None, after: tuple[Any, ...]
) -> None:
    hold, other = claimed(stage, heartbeat), claimed(stage, heartbeat)
    stage.sql("UPDATE messages SET locked_pid = %s WHERE job_id = %s", DEAD_PID, hold.job_id)
    heartbeat.runs.accepted(heartbeat.runs.received(key(hold)), DEAD_PID)
    heartbeat.runs.received(key(other))
    if plan is not None:
        heartbeat.runs.planned(key(hold), plan)
    pool.dead.append(DEAD_PID)

    assert heartbeat.run_once()["orphans"] == (plan != ENDED)
    assert row(stage, hold) == after
    assert row(stage, other) == ("running", 1, 0), "another process runs it"


def test_a_rescue_that_somebodys_lock_prevents_is_tried_again(stage: Stage, heartbeat: Heartbeat, pool: Pool) -> None:
    hold = claimed(stage, heartbeat)
    stage.sql("UPDATE messages SET locked_pid = %s", DEAD_PID)
    heartbeat.runs.accepted(heartbeat.runs.received(key(hold)), DEAD_PID)
    pool.dead.append(DEAD_PID)
    with stage.connect(autocommit=False) as shell:
        shell.execute("SELECT 1 FROM jobs FOR UPDATE")
        assert heartbeat.run_once()["orphans"] == 0
        shell.rollback()
    assert heartbeat.run_once()["orphans"] == 1
    assert row(stage, hold) == ("queued", 1, 1)


def test_what_was_rescued_before_the_store_went_away_is_counted(
    stage: Stage, heartbeat: Heartbeat, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    holds = [claimed(stage, heartbeat) for _ in range(2)]
    stage.sql("UPDATE messages SET locked_pid = %s", DEAD_PID)
    for hold in holds:
        heartbeat.runs.accepted(heartbeat.runs.received(key(hold)), DEAD_PID)
    pool.dead.append(DEAD_PID)
    rescue = recovery.rescue

    def away_for_the_second(runtime: Any, job_id: int, **run: Any) -> bool:
        if job_id == holds[1].job_id:
            raise StoreUnavailableError("injected")
        return rescue(runtime, job_id, **run)

    report = Report()
    monkeypatch.setattr(recovery, "rescue", away_for_the_second)
    heartbeat.jobs.died[DEAD_PID] = Loss()
    with pytest.raises(StoreUnavailableError):
        heartbeat.jobs.run_once(report)
    assert report == Report(orphans=1)

    monkeypatch.undo()
    assert heartbeat.run_once()["orphans"] == 1
    assert [row(stage, hold) for hold in holds] == [("queued", 1, 1)] * 2


def test_after_a_rescue_other_runs_that_are_held_and_not_run_are_looked_for(
    stage: Stage, heartbeat: Heartbeat, pool: Pool
) -> None:
    hold, forgotten = claimed(stage, heartbeat), claimed(stage, heartbeat)
    stage.sql("UPDATE messages SET locked_pid = %s WHERE job_id = %s", DEAD_PID, hold.job_id)
    heartbeat.runs.accepted(heartbeat.runs.received(key(hold)), DEAD_PID)
    age(stage, forgotten)
    assert heartbeat.run_once()["rescued"] == 0, "it is not time yet"

    pool.dead.append(DEAD_PID)
    report = heartbeat.run_once()

    assert (report["orphans"], report["rescued"]) == (1, 1)
    assert row(stage, forgotten) == ("queued", 1, 1)


def test_what_a_process_took_and_had_not_begun_is_rung_again(stage: Stage, heartbeat: Heartbeat, pool: Pool) -> None:
    """Its message was acknowledged, and nothing but its row says that a run is owed."""
    job = stage.job()
    stage.sql("UPDATE messages SET published_at = now(), next_check_at = now() + interval '1 hour'")
    heartbeat.runs.accepted(heartbeat.runs.received((job.id, 1)), DEAD_PID)
    pool.dead.append(DEAD_PID)

    heartbeat.run_once()

    assert stage.sql("SELECT published_at IS NULL, next_check_at <= now() FROM messages") == [(True, True)]


@pytest.mark.parametrize("name", ["jobs", "tasks"])
def test_a_death_is_not_forgotten_where_the_store_was_away(
    heartbeat: Heartbeat, pool: Pool, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    duty = getattr(heartbeat, name)
    told: list[set[int]] = []
    do = duty._do

    def away_at_first(report: Report) -> None:
        told.append(set(duty.died))
        if len(told) == 1:
            raise StoreUnavailableError("injected")
        do(report)

    monkeypatch.setattr(duty, "_do", away_at_first)
    pool.dead.append(DEAD_PID)
    with pytest.raises(StoreUnavailableError):
        heartbeat.run_once()
    for _ in range(2):
        heartbeat.run_once()
    assert told == [{DEAD_PID}, {DEAD_PID}, set()]


# -- stopping and being declared dead ---------------------------------------------------------------------------------


def test_a_worker_that_leaves_gives_back_without_a_loss(stage: Stage, heartbeat: Heartbeat) -> None:
    hold, others = claimed(stage, heartbeat), claimed(stage, heartbeat, worker_id=stage.worker_id)

    assert heartbeat.leave() == 1

    assert row(stage, hold) == ("queued", 1, 0)
    assert row(stage, others) == ("running", 1, 0)
    assert stage.claim(stage.job(), worker_id=heartbeat.worker_id) is None, "it is gone for good"
    with pytest.raises(LeaseLostError):
        runs.commit(stage.runtime, hold, Unit())


def test_a_beat_after_the_leave_does_not_bring_the_worker_back(
    stage: Stage, heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop may be in the midst of one."""
    alive = "SELECT id FROM workers WHERE dead_at IS NULL AND id <> %s"
    others = stage.sql(alive, heartbeat.worker_id)
    heartbeat.leave()
    monkeypatch.setattr(heartbeat, "_beat_at", float("-inf"))

    heartbeat.run_once()

    assert stage.sql(alive, 0) == others


def test_a_worker_that_was_declared_dead_goes_on_as_another(
    stage: Stage, heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = heartbeat.worker_id
    hold = claimed(stage, heartbeat)
    waiting = stage.job()
    for job_id in (hold.job_id, waiting.id):
        heartbeat.runs.received((job_id, 1))
    stage.sql(
        "UPDATE messages SET published_at = now(), next_check_at = now() + interval '1 hour' WHERE locked_by IS NULL"
    )
    stage.declare_dead(before)
    monkeypatch.setattr(heartbeat, "_beat_at", float("-inf"))

    assert heartbeat.run_once()["beaten"]

    assert heartbeat.worker_id != before
    assert heartbeat.may_claim
    assert not heartbeat.runs.knows(key(hold))
    assert stage.sql("SELECT next_check_at <= now() FROM messages WHERE locked_by IS NULL") == [(True,)]
    assert row(stage, hold) == ("running", 1, 0), "rescuing it is the sweeper's"
    assert stage.sidejob.poll().rescued == 1
    assert stage.claim(waiting, worker_id=heartbeat.worker_id) is not None


def test_a_worker_that_could_not_beat_for_a_lease_claims_nothing(
    stage: Stage, heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert heartbeat.may_claim
    monkeypatch.setattr(heartbeat, "_beat_at", heartbeat._beat_at - stage.sidejob.settings.lease)
    assert not heartbeat.may_claim


# -- runs that renew their own lease ----------------------------------------------------------------------------------


def test_a_run_that_should_renew_its_own_lease_and_does_not_is_rescued(stage: Stage, heartbeat: Heartbeat) -> None:
    overdue, in_time, others, renewed_by_us = (
        claimed(stage, heartbeat), claimed(stage, heartbeat), claimed(stage, heartbeat, worker_id=stage.worker_id),
        claimed(stage, heartbeat),
    )  # fmt: skip
    age(stage, overdue, others, renewed_by_us, seconds=11)
    age(stage, in_time, seconds=5)
    for hold, lease_s in ((overdue, 10.0), (in_time, 10.0), (others, 10.0), (renewed_by_us, None)):
        heartbeat.runs.accepted(heartbeat.runs.received(key(hold), lease_s), os.getpid())

    assert heartbeat.run_once()["rescued"] == 1

    assert row(stage, overdue) == ("queued", 1, 1)
    for hold in (in_time, others, renewed_by_us):
        assert row(stage, hold) == ("running", 1, 0)
    with pytest.raises(LeaseLostError):
        runs.commit(stage.runtime, overdue, Unit())


def test_a_run_that_renews_its_own_lease_keeps_it(stage: Stage, heartbeat: Heartbeat) -> None:
    seen: list[int] = []

    def body(job: RunningJob) -> None:
        age(stage, hold, seconds=11)
        job.heartbeat()
        seen.append(heartbeat.run_once()["rescued"])

    hold = claimed(stage, heartbeat, body)
    heartbeat.runs.accepted(heartbeat.runs.received(key(hold), 10.0), os.getpid())
    stage.perform(hold)
    assert seen == [0]
    assert Job(hold.job_id, runtime=stage.runtime).status == "completed"
