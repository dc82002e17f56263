"""The fence: what a run that is no longer its job's current one asks to be committed is refused, all of it.

A run is named by its job, its number and its worker, and its units are counted. Each of the three is compared under
the job's lock before anything is tried, and once more by the statement that moves the row; each test here fails when
one comparison is left out. How a run is lost is done with the package's own operations where they can do it; where a
single mark is to differ, the row is changed by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from celery_sidejob import Job, LeaseLostError, RunningJob
from celery_sidejob.model.changes import SetState
from celery_sidejob.model.status import RunEnd
from celery_sidejob.operations.hold import Hold
from celery_sidejob.operations.runs import endings, recovery, runs
from celery_sidejob.operations.runs.endings import Ending
from celery_sidejob.operations.runs.runs import Unit
from celery_sidejob.store import claims, run_ends
from tests.tools.crash_points import Arm, lost
from tests.tools.in_process import Stage
from tests.tools.waiting import wait_until

pytestmark = pytest.mark.pooled_too

REFUSED = "is no longer its current run"
UNITS = 1
"""How many units the zombie has committed: a heir who has committed as many differs by nothing else."""

# -- ways in which a run is lost --------------------------------------------------------------------------------------

Usurp = Callable[[Stage, Hold], Hold | None]
"""Takes the run away; returns the heir, if there is one."""


def rescued(stage: Stage, zombie: Hold) -> None:
    """Its worker was declared dead, and nobody has begun anew: the run's number is still the zombie's."""
    stage.declare_dead(zombie.worker_id)
    assert stage.sidejob.poll().rescued == 1


def running_elsewhere(stage: Stage, zombie: Hold) -> Hold:
    """It was rescued, and another worker has begun anew and committed as many units as the zombie."""
    rescued(stage, zombie)
    return succeed(stage, zombie, stage.worker_id)


def running_here_again(stage: Stage, zombie: Hold) -> Hold:
    """Its own worker gave it back and began anew in another process: only the run's number differs."""
    assert recovery.rescue(stage.runtime, zombie.job_id, run_no=zombie.run_no, worker_id=zombie.worker_id, own=True)
    return succeed(stage, zombie, zombie.worker_id)


def succeed(stage: Stage, zombie: Hold, worker_id: int) -> Hold:
    """Begin the next run, and commit a unit that reads the packet."""
    heir = stage.claim(Job(zombie.job_id, runtime=stage.runtime), worker_id=worker_id)
    assert heir is not None
    read = [
        (port, packet) for port, packet in stage.sql(
            "SELECT p.port_id, p.id FROM packets p JOIN ports o ON o.id = p.port_id WHERE o.job_id = %s", heir.job_id
        )
    ]  # fmt: skip
    runs.commit(stage.runtime, heir, Unit([SetState(heir.job_id, {"heir": "true"})], read))
    return heir


def worker_alone(stage: Stage, zombie: Hold) -> None:
    """Another worker is in the row, by hand; a heir has read the packet."""
    other = stage.new_worker()
    stage.sql("DELETE FROM packets")
    stage.sql("UPDATE messages SET locked_by = %s WHERE job_id = %s", other, zombie.job_id)
    stage.sql("UPDATE jobs SET worker_id = %s WHERE id = %s", other, zombie.job_id)


def unit_alone(stage: Stage, zombie: Hold) -> None:
    """The same unit was applied before: a copy of this run has committed it."""
    assert zombie.unit_no == UNITS
    stage.sql("DELETE FROM packets")
    passed = claims.fence(
        stage.runtime.connections, zombie.job_id, run_no=zombie.run_no, unit_no=UNITS, worker_id=zombie.worker_id
    )
    assert passed is not None


def deleted(stage: Stage, zombie: Hold) -> None:
    """The job was given up, terminated and deleted."""
    rescued(stage, zombie)
    job = Job(zombie.job_id, runtime=stage.runtime)
    job.terminate()
    stage.drain()
    assert job.delete()


WAYS: list[Usurp] = [rescued, running_elsewhere, running_here_again, worker_alone, unit_alone, deleted]

# -- what the zombie then asks ----------------------------------------------------------------------------------------


def commits(job: RunningJob) -> None:
    job.checkpoint()


def completes(job: RunningJob) -> None:
    """Return."""


def suspends(job: RunningJob) -> None:
    job.suspend()


def fails(job: RunningJob) -> None:
    raise ZeroDivisionError


def retries(job: RunningJob) -> None:
    raise job.retry(countdown=0)


ENDS = [completes, suspends, fails, retries]


@pytest.fixture
def ledger(stage: Stage) -> Iterator[psycopg.Connection[Any]]:
    """The user's own connection, in a transaction, with a table of his own."""
    stage.sql("CREATE TABLE public.ledger (what text)")
    own = stage.connect(autocommit=False)
    yield own
    own.close()
    stage.sql("DROP TABLE public.ledger")


def ask_everything(job: RunningJob, other: Job) -> None:
    """Have the unit read, write, create and ask."""
    assert job.input("a").read() == 1
    job.output("o").write("zombie")
    job.set(zombie=True)
    job.enqueue("stage.idle", child_name="zombie", aliases=["zombie"])
    job.run()
    job.run(countdown=3600)
    other.run()
    other.input("a").write("zombie")


def zombie_of(stage: Stage, usurp: Usurp, then: Callable[[RunningJob], Any]) -> tuple[Hold, list[Any], list[Any]]:
    """A run that has committed `UNITS` units, asks everything, is usurped and then goes on.

    Returns it claimed, and lists for the heir and for what the store held when it was usurped.
    """
    other = stage.job()
    stage.run(other)
    heirs: list[Any] = []
    before: list[Any] = []

    def body(job: RunningJob) -> None:
        for number in range(UNITS):
            job.set(before=number)
            job.checkpoint()
        ask_everything(job, other)
        stage.outside(lambda: heirs.append(usurp(stage, zombie)))
        stage.outside(stage.runtime.connections.write_behind_now)  # or a mark comes between, on a slow machine
        before.append(stage.everything())
        then(job)

    job = stage.job(body)
    with stage.sidejob.port_options(notify=False):
        job.input("a").write(1)
    zombie = stage.claim(job, worker_id=stage.new_worker())
    assert zombie is not None
    return zombie, heirs, before


def goes_on(stage: Stage, heir: Hold | None) -> None:
    """The heir, if there is one, commits and ends as if the zombie had never been."""
    if heir is not None:
        runs.commit(stage.runtime, heir, Unit([SetState(heir.job_id, {"heir": "2"})]))
        assert endings.end(stage.runtime, heir, Unit(), Ending(RunEnd.COMPLETED)) == "completed"
        job = stage.sidejob.get(heir.job_id)
        assert (job.state, len(job.input("a")), list(job.output("o"))) == ({"before": 0, "heir": 2}, 0, [])


@pytest.mark.parametrize("usurp", WAYS)
def test_a_zombies_unit_changes_nothing(stage: Stage, usurp: Usurp) -> None:
    def then(job: RunningJob) -> None:
        with pytest.raises(LeaseLostError):
            job.checkpoint()
        assert stage.everything() == before[0]
        job.checkpoint()  # nor when it is tried again

    zombie, heirs, before = zombie_of(stage, usurp, then)
    stage.perform(zombie)

    assert REFUSED in stage.ignored[zombie.job_id]
    assert stage.everything() == before[0]
    goes_on(stage, heirs[0])


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("usurp", WAYS)
def test_a_zombies_end_changes_nothing(stage: Stage, usurp: Usurp, how: Callable[[RunningJob], Any]) -> None:
    zombie, heirs, before = zombie_of(stage, usurp, how)
    stage.perform(zombie)

    assert REFUSED in stage.ignored[zombie.job_id]
    assert stage.everything() == before[0]
    goes_on(stage, heirs[0])


@pytest.mark.parametrize("usurp", WAYS)
def test_the_users_own_rows_are_rolled_back_with_a_zombies_unit(
    stage: Stage, ledger: psycopg.Connection[Any], usurp: Usurp
) -> None:
    def then(job: RunningJob) -> None:
        with ledger.transaction():
            ledger.execute("INSERT INTO public.ledger VALUES ('zombie')")
            with job.unit(transaction=ledger):
                job.set(zombie="in the block")

    zombie, heirs, before = zombie_of(stage, usurp, then)
    stage.perform(zombie)

    assert REFUSED in stage.ignored[zombie.job_id]
    assert stage.sql("SELECT * FROM public.ledger") == []
    assert stage.everything() == before[0]
    goes_on(stage, heirs[0])


@pytest.mark.parametrize("usurp", WAYS)
def test_a_user_who_swallows_the_refusal_commits_his_own_rows_alone(
    stage: Stage, ledger: psycopg.Connection[Any], usurp: Usurp
) -> None:
    def then(job: RunningJob) -> None:
        with ledger.transaction():
            ledger.execute("INSERT INTO public.ledger VALUES ('his own decision')")
            with pytest.raises(LeaseLostError), job.unit(transaction=ledger):
                job.set(zombie="in the block")

    zombie, heirs, before = zombie_of(stage, usurp, then)
    stage.perform(zombie)

    assert REFUSED in stage.ignored[zombie.job_id]  # of its end
    assert stage.sql("SELECT * FROM public.ledger") == [("his own decision",)]
    assert stage.everything() == before[0]
    goes_on(stage, heirs[0])


def by_one_more(stage: Stage, usurp: Usurp, zombie: Hold) -> None:
    """Take the run away, and have one unit more committed: as many as if the zombie's last one had been."""
    heir = usurp(stage, zombie)
    if heir is not None:
        runs.commit(stage.runtime, heir, Unit())
    elif usurp is worker_alone:
        stage.sql("UPDATE jobs SET unit_no = unit_no + 1 WHERE id = %s", zombie.job_id)


@pytest.mark.parametrize("usurp", [running_elsewhere, running_here_again, worker_alone, deleted])
def test_a_unit_that_was_rolled_back_is_not_taken_for_the_heirs(
    stage: Stage, ledger: psycopg.Connection[Any], usurp: Usurp
) -> None:
    """The zombie learns at once that its run is over, and does not go on from a unit that was never applied."""

    def then(job: RunningJob) -> None:
        with job.unit(transaction=ledger):
            job.set(zombie="in the block")
        ledger.rollback()
        stage.outside(lambda: by_one_more(stage, usurp, zombie))
        before.append(stage.everything())
        with pytest.raises(LeaseLostError):
            job.set(zombie="after the block")

    zombie, _, before = zombie_of(stage, lambda stage, zombie: None, then)
    stage.perform(zombie)

    assert REFUSED in stage.ignored[zombie.job_id]
    assert stage.everything() == before[-1]


def test_a_unit_that_was_rolled_back_is_done_again(stage: Stage, ledger: psycopg.Connection[Any]) -> None:
    seen: list[Any] = []

    def body(job: RunningJob) -> None:
        for last in (False, True):
            with job.unit(transaction=ledger):
                job.output("o").write(job.input("a").read())
            ledger.commit() if last else ledger.rollback()
            seen.append((len(job.input("a")), stage.sql("SELECT unit_no FROM jobs WHERE id = %s", job.id)[0][0]))

    job = stage.job(body)
    with stage.sidejob.port_options(notify=False):
        job.input("a").write(1)
    assert stage.run(job) == "completed"
    assert seen == [(1, 0), (0, 1)]
    assert (list(job.output("o")), len(job.input("a"))) == ([1], 0)


@pytest.mark.parametrize("usurp", [way for way in WAYS if way is not unit_alone])
def test_a_zombie_hears_of_it_at_its_next_heartbeat(stage: Stage, usurp: Usurp) -> None:
    """Whatever there is of units: those are counted for commits alone."""
    told: list[str] = []

    def then(job: RunningJob) -> None:
        with pytest.raises(LeaseLostError) as refused:
            job.heartbeat()
        told.append(str(refused.value))

    zombie, _, before = zombie_of(stage, usurp, then)
    stage.perform(zombie)
    assert REFUSED in told[0]
    assert stage.everything() == before[0]


# -- each mark by itself ----------------------------------------------------------------------------------------------

MARKS = {"run_no": 1, "unit_no": 1, "worker_id": 1}
"""What is added to each mark of a run to make it another one."""


@pytest.fixture
def hold(stage: Stage) -> Hold:
    """A run that is under way."""
    claimed = stage.claim(stage.job())
    assert claimed is not None
    return claimed


def marks(hold: Hold, **other: Any) -> dict[str, Any]:
    return {"run_no": hold.run_no, "unit_no": hold.unit_no, "worker_id": hold.worker_id, **other}


@pytest.mark.parametrize("mark", MARKS)
def test_the_statement_of_a_unit_compares_each_mark(stage: Stage, hold: Hold, mark: str) -> None:
    store = stage.runtime.connections
    before = stage.everything()
    right = marks(hold)

    assert claims.fence(store, hold.job_id, **{**right, mark: right[mark] + MARKS[mark]}) is None
    assert claims.fence(store, hold.job_id + 1, **right) is None
    assert stage.everything() == before
    passed = claims.fence(store, hold.job_id, **right)
    assert passed is not None
    assert passed.consumed == 0
    assert claims.fence(store, hold.job_id, **right) is None, "the same unit twice"


@pytest.mark.parametrize("quiet", [True, False])
@pytest.mark.parametrize("mark", MARKS)
def test_the_statement_of_an_end_compares_each_mark(stage: Stage, hold: Hold, mark: str, quiet: bool) -> None:
    store = stage.runtime.connections
    ending = {
        "outcome": "completed", "result": "null", "unwanted": True, "applied": True, "retry": False, "error": None,
        "quiet": quiet,
    }  # fmt: skip
    before = stage.everything()
    right = marks(hold)

    assert run_ends.end(store, hold.job_id, **{**right, mark: right[mark] + MARKS[mark]}, **ending) is None
    assert run_ends.end(store, hold.job_id + 1, **right, **ending) is None
    assert stage.everything() == before


@pytest.mark.parametrize("mark", MARKS)
def test_an_end_from_outside_counts_no_units_and_compares_the_rest(stage: Stage, hold: Hold, mark: str) -> None:
    """The worker ends a run whose process it has stopped; it cannot know how many units that has committed."""
    before = stage.everything()
    other = replace(hold, **{mark: marks(hold)[mark] + MARKS[mark]})

    if mark == "unit_no":
        assert endings.end(stage.runtime, other, None, Ending(RunEnd.COMPLETED), from_outside=True) == "completed"
    else:
        with pytest.raises(LeaseLostError):
            endings.end(stage.runtime, other, None, Ending(RunEnd.COMPLETED), from_outside=True)
        assert stage.everything() == before


@pytest.mark.parametrize("what", ["a unit", "an end", "a unit in the user's transaction"])
def test_the_statements_of_the_fence_refuse_by_themselves(
    stage: Stage, ledger: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """As if what was read with the lock had not been compared: the statement that moves the row finds none."""

    def then(job: RunningJob) -> None:
        for module in (runs, endings):
            monkeypatch.setattr(module, "check_fence", lambda *_, **__: None)
        if what == "a unit":
            job.checkpoint()
        elif what == "a unit in the user's transaction":
            with ledger.transaction(), job.unit(transaction=ledger):
                ledger.execute("INSERT INTO public.ledger VALUES ('zombie')")

    zombie, _, before = zombie_of(stage, rescued, then)
    stage.perform(zombie)
    assert REFUSED in stage.ignored[zombie.job_id]
    assert stage.everything() == before[0]
    assert stage.sql("SELECT * FROM public.ledger") == []


def test_an_end_from_outside_after_a_rescue_is_refused(stage: Stage) -> None:
    zombie, _, before = zombie_of(stage, rescued, lambda job: endings.end(
        stage.runtime, replace(zombie), None, Ending(RunEnd.FAILED), from_outside=True
    ))  # fmt: skip
    stage.perform(zombie)
    assert REFUSED in stage.ignored[zombie.job_id]
    assert stage.everything() == before[0]


@pytest.mark.parametrize("mark", ["run_no", "worker_id"])
def test_a_rescue_compares_each_mark(stage: Stage, hold: Hold, mark: str) -> None:
    """What a look without locks had found may be over when it is acted upon, and another run begun."""
    marked = {"run_no": hold.run_no, "worker_id": hold.worker_id}
    before = stage.everything()

    other = {**marked, mark: marked[mark] + 1}
    assert not recovery.rescue(stage.runtime, hold.job_id, **other, own=True)
    assert not recovery.release(stage.runtime, hold.job_id, **other)
    assert not recovery.rescue(stage.runtime, hold.job_id, **marked), "it lives"
    assert stage.everything() == before
    assert recovery.rescue(stage.runtime, hold.job_id, **marked, own=True)


# -- answers that are lost --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("what", ["checkpoint", "end"])
def test_a_lost_answer_is_a_unit_once(stage: Stage, at: Arm, what: str, side: str) -> None:
    """Before the commit it is repeated; after it, it is recognised by the number of units or of the ended run."""

    def body(job: RunningJob) -> str:
        job.output("o").write("one")
        if what == "checkpoint":
            at(f"checkpoint:{side}-commit", lost)
            job.checkpoint()
        job.output("o").write("two")
        at(f"end:{side}-commit", lost)
        return "done"

    job = stage.job(body)
    hold = stage.claim(job)
    assert hold is not None
    assert stage.perform(hold) == "done"
    assert (list(job.output("o")), hold.unit_no) == (["one", "two"], 1 if what == "checkpoint" else 0)
    assert stage.sql("SELECT status, run_no FROM jobs WHERE id = %s", job.id) == [("completed", 1)]


@pytest.mark.parametrize("what", ["checkpoint", "end"])
@pytest.mark.parametrize("usurp", WAYS)
def test_a_unit_without_an_answer_is_not_taken_for_the_heirs(stage: Stage, at: Arm, usurp: Usurp, what: str) -> None:
    """It was not applied, and when it asks, the heir has as many units as if it had been."""

    def happens() -> None:
        by_one_more(stage, usurp, zombie)
        before.append(stage.everything())

    def then(job: RunningJob) -> None:
        at(f"{what}:before-commit", lambda: (at("read:before-commit", happens), lost()))
        if what == "checkpoint":
            try:
                job.checkpoint()
            except Exception as error:  # whatever it is, the end that follows is refused
                told.append(type(error))

    told: list[type[Exception]] = []
    if usurp is unit_alone:  # one unit more of the very same run: that it was applied is what it must believe
        return
    zombie, _, before = zombie_of(stage, lambda stage, zombie: None, then)
    stage.perform(zombie)

    assert len(before) == 2
    assert told == [LeaseLostError] * (what == "checkpoint")
    assert REFUSED in stage.ignored[zombie.job_id]
    assert stage.everything() == before[-1]


def test_a_unit_without_an_answer_whose_run_was_ended_from_outside_was_not_applied(stage: Stage, at: Arm) -> None:
    def end_it() -> None:
        endings.end(stage.runtime, replace(zombie), None, Ending(RunEnd.FAILED), from_outside=True)
        before.append(stage.everything())

    def then(job: RunningJob) -> None:
        at("checkpoint:before-commit", lambda: (at("read:before-commit", end_it), lost()))
        with pytest.raises(LeaseLostError):
            job.checkpoint()
        raise LeaseLostError("as it is told")

    zombie, _, before = zombie_of(stage, lambda stage, zombie: None, then)
    stage.perform(zombie)
    assert stage.everything() == before[-1]


def test_an_end_from_outside_without_an_answer_is_repeated(stage: Stage, at: Arm, hold: Hold) -> None:
    """The run has one unit more than the worker knew when it asked; that does not mean that it has ended."""
    runs.commit(stage.runtime, replace(hold), Unit())
    at("end:before-commit", lost)
    assert endings.end(stage.runtime, hold, None, Ending(RunEnd.FAILED), from_outside=True) == "failed"
    assert stage.sql("SELECT status, ended_run FROM jobs WHERE id = %s", hold.job_id) == [("failed", 1)]


@pytest.mark.parametrize("mark", [None, *MARKS, "process"])
def test_a_claim_without_an_answer_is_recognised_by_each_mark(stage: Stage, at: Arm, mark: str | None) -> None:
    """Ours is only this run with no unit yet, claimed by our worker in this process."""
    job = stage.job()
    other = stage.new_worker()

    def happens() -> None:
        if mark == "run_no":
            marked = {"run_no": 1, "worker_id": stage.worker_id}
            assert recovery.release(stage.runtime, job.id, **marked)
            assert stage.claim(job) is not None
        elif mark == "worker_id":
            stage.sql("UPDATE messages SET locked_by = %s", other)
            stage.sql("UPDATE jobs SET worker_id = %s", other)
        elif mark == "unit_no":
            stage.sql("UPDATE jobs SET unit_no = 1")
        elif mark == "process":  # of the same worker, with a copy of the message
            stage.sql("UPDATE messages SET locked_pid = locked_pid + 1")
        lost()

    at("claim:after-commit", happens)
    hold = stage.claim(job, for_run=1)
    if mark is None:
        assert hold is not None
        assert marks(hold) == {"run_no": 1, "unit_no": 0, "worker_id": stage.worker_id}
    else:
        assert hold is None


def test_a_claim_without_an_answer_is_recognised_after_further_trouble(stage: Stage, at: Arm) -> None:
    """The next try certainly does nothing, which says nothing of the first."""
    job = stage.job()

    def happens() -> None:
        at("claim:before-commit", lost)
        lost()

    at("claim:after-commit", happens)
    assert stage.claim(job, for_run=1) is not None


def test_a_unit_still_open_when_the_run_was_lost_does_not_keep_the_rescue_waiting(
    stage: Stage, ledger: psycopg.Connection[Any]
) -> None:
    """The fence is written in the user's transaction, and locks the job there: the rescue ends that session.

    Waiting for that transaction could take for ever, since its process may be frozen (docs/reference.md).
    """

    def then(job: RunningJob) -> None:
        with job.unit(transaction=ledger):
            job.set(zombie="in the block")
        stage.declare_dead(zombie.worker_id)
        stage.outside(lambda: wait_until(lambda: stage.sidejob.poll().rescued == 1))
        with pytest.raises(psycopg.OperationalError):
            ledger.commit()

    zombie, _, _ = zombie_of(stage, lambda stage, zombie: None, then)
    stage.perform(zombie)

    job = stage.sidejob.get(zombie.job_id)
    assert (job.status, job.get("zombie"), len(job.input("a"))) == ("queued", None, 1)
    assert REFUSED in stage.ignored[zombie.job_id]
