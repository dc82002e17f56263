"""Interleavings by which SideJob loses a job's next run, or its end, held at crash points: others do their part there.

The others of its list that concern the life of jobs are elsewhere: the zombie of a run that is over in test_fence,
children that end around their parent's claim in test_first_children, circles in test_circles, and what a client does
between another's look and its lock in test_two_clients.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from celery_sidejob import (
    AliasTakenError,
    ChildNameTakenError,
    IllegalMoveError,
    Job,
    JobNotFoundError,
    RunningJob,
    StoreUnavailableError,
)
from celery_sidejob.operations.changes.follow_up import apply_due_timers
from celery_sidejob.operations.runs import recovery
from tests.tools.crash_points import Arm, lost
from tests.tools.in_process import Stage
from tests.tools.pgbouncer import direct

pytestmark = pytest.mark.pooled_too


def is_pooled(stage: Stage) -> bool:
    """Tell whether a proxy is between: a statement alone has a BEGIN then, and locks its rows before its COMMIT."""
    return direct(stage.database_url) != stage.database_url


Aside = Callable[..., Future[Any]]


class Life:
    """A job of a task that notes what is called."""

    def __init__(self, stage: Stage) -> None:
        self.calls: list[str] = []
        self.body: Callable[[RunningJob], Any] = lambda job: None
        task = stage.task(self._run, name="stage.life", inports=["*"])
        task.on_shutdown(lambda job: self.calls.append("shutdown"))
        self.job: Job = task.enqueue()
        self._stage = stage

    def _run(self, job: RunningJob) -> None:
        self.calls.append("run")
        self.body(job)

    @property
    def status(self) -> str:
        return str(self.job.refresh().status)

    def settle(self) -> list[str]:
        """Do all that is owed, and return what was called."""
        self._stage.drain()
        return self.calls


@pytest.fixture
def life(stage: Stage) -> Life:
    return Life(stage)


def pass_time(stage: Stage) -> None:
    stage.sql("UPDATE timers SET due_at = now()")


# -- a termination beside a run (WS-06, WS-09) -----------------------------------------------------------------------


@pytest.mark.parametrize("locks", [False, True], ids=["one_statement", "under_the_lock"])
@pytest.mark.parametrize("held_at", ["end:before-commit", "end:after-commit"])
def test_a_termination_as_a_run_ends_survives_deliveries_to_others(
    stage: Stage, life: Life, at: Arm, aside: Aside, held_at: str, locks: bool
) -> None:
    """WS-06: a second worker finds the job held, asks for a later try, which is refused, and nothing is pending."""
    asked: list[Future[Any]] = []
    stale: list[Any] = []
    holds = locks or is_pooled(stage)

    def terminate() -> None:
        asked.append(aside(life.job.terminate))
        if holds and held_at == "end:before-commit":
            stage.wait_for_waiters()
        else:
            asked[0].result(10)
        if not holds and held_at == "end:before-commit":
            stale.extend(stage.claim(life.job, worker_id=stage.new_worker(), for_run=number) for number in (1, 2))

    life.body = lambda job: job.set(x=1) if locks else None
    at(held_at, terminate)
    stage.run(life.job)
    asked[0].result(10)

    assert life.status == "terminating"
    assert (stale, stage.claim(life.job, for_run=1)) == ([] if holds or "after" in held_at else [None, None], None)
    assert (life.settle(), life.status) == (["run", "shutdown"], "terminated")


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("first", ["run", "terminate"])
def test_a_run_and_a_termination_at_once_are_as_one_by_one(
    stage: Stage, life: Life, at: Arm, aside: Aside, first: str, force: bool
) -> None:
    """WS-09: one client reads `completed`, another stores `terminating`, the first stores `queued`: it never ends."""
    stage.drain()
    life.calls.clear()
    calls = {"run": lambda: life.job.run(force=force), "terminate": life.job.terminate}
    second = "terminate" if first == "run" else "run"
    asked: list[Future[Any]] = []

    def others() -> None:
        asked.append(aside(calls[second]))
        stage.wait_for_waiters()

    at(f"{first}:before-commit", others)
    calls[first]()
    follows = asked[0].result(10)

    assert life.status == "terminating"
    if first == "run":
        assert (life.settle(), life.status) == (["shutdown"], "terminated")
    elif force:
        assert (life.settle(), life.status) == (["shutdown", "run"], "completed")
    else:
        assert follows is None
        assert (life.settle(), life.status) == (["shutdown"], "terminated")


# -- timers beside runs (WS-08) --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held_at", "runs"),
    [
        ("claim:before-commit", 1),
        ("claim:after-commit", 2),
        ("end:before-commit", 2),
        ("end:after-commit", 2),
    ],
)
@pytest.mark.parametrize("sweeps", [False, True], ids=["due", "due_and_swept"])
def test_a_timer_that_is_due_beside_a_run_is_answered_by_a_run_that_begins_after_it(
    stage: Stage, life: Life, at: Arm, held_at: str, runs: int, sweeps: bool
) -> None:
    """WS-08: another run has come in between, and the scheduled message finds a job that is not queued."""
    life.body = lambda job: job.suspend()
    life.job.run(countdown=3600)
    if is_pooled(stage) and held_at == "claim:before-commit":
        runs = 2  # the claim has been made, and is not committed

    def matures() -> None:
        pass_time(stage)
        if sweeps:
            stage.outside(lambda: apply_due_timers(stage.runtime, life.job.id))

    at(held_at, matures)
    hold = stage.claim(life.job)
    assert hold is not None
    stage.perform(hold)

    assert life.settle() == ["run"] * runs
    assert (life.status, stage.row_counts()["timers"]) == ("suspended", 0)


@pytest.mark.parametrize("held_at", ["mature:before-commit", "mature:after-commit"])
def test_a_termination_beside_a_timer_that_fires_is_not_undone(
    stage: Stage, life: Life, at: Arm, aside: Aside, held_at: str
) -> None:
    life.job.run(countdown=3600)
    stage.drain()
    pass_time(stage)
    asked: list[Future[Any]] = []

    def terminate() -> None:
        asked.append(aside(life.job.terminate))
        if held_at == "mature:before-commit":
            stage.wait_for_waiters()
        else:
            asked[0].result(10)

    at(held_at, terminate)
    apply_due_timers(stage.runtime, life.job.id)
    asked[0].result(10)

    assert (life.settle(), life.status) == (["run", "shutdown"], "terminated")


# -- runs that are given back, or taken (WS-05, WS-10) ---------------------------------------------------------------


@pytest.mark.parametrize("held_at", ["release:before-commit", "release:after-commit"])
@pytest.mark.parametrize("terminates", [False, True], ids=["again", "terminated"])
def test_a_run_that_a_stopping_worker_gives_back_is_begun_by_another(
    stage: Stage, life: Life, at: Arm, aside: Aside, held_at: str, terminates: bool
) -> None:
    """WS-05: the other worker has the message before the status says that the run may begin, and drops it."""
    hold = stage.claim(life.job)
    assert hold is not None
    if terminates:
        life.job.terminate()
    tried: list[Future[Any]] = []

    def other_worker() -> None:
        tried.append(aside(stage.claim, life.job, worker_id=stage.new_worker(), for_run=2))
        stage.wait_until(tried[0].done, message="the claim, which waits for nothing: there is no such run yet")

    at(held_at, other_worker)
    assert recovery.release(stage.runtime, hold.job_id, run_no=1, worker_id=hold.worker_id, wait=True)

    heir = tried[0].result(10) or stage.claim(life.job)
    stage.perform(hold)
    stage.perform(heir)
    assert stage.broken_rules() == []
    kind, status = ("shutdown", "terminated") if terminates else ("run", "completed")
    assert (life.calls[-1], life.status, life.job.info["losses"]) == (kind, status, 0)


@pytest.mark.parametrize("locks", [False, True], ids=["one_statement", "under_the_lock"])
def test_a_run_that_is_taken_as_it_ends_counts_or_begins_again(stage: Stage, life: Life, at: Arm, locks: bool) -> None:
    """WS-10: a second run begins beside the first, whose outcome is stored over that of the second."""
    hold = stage.claim(life.job, worker_id=stage.new_worker())
    assert hold is not None
    taken: list[bool] = []
    heirs: list[Any] = []

    def take() -> None:
        stage.declare_dead(hold.worker_id)
        rescue = {"run_no": hold.run_no, "worker_id": hold.worker_id}
        stage.outside(lambda: taken.append(recovery.rescue(stage.runtime, hold.job_id, **rescue)))
        heirs.append(stage.claim(life.job))

    life.body = lambda job: job.set(runs=job.run_no) if locks else None
    at("end:before-commit", take)
    stage.perform(hold)

    holds = locks or is_pooled(stage)
    assert taken == [not holds]
    if holds:
        assert (heirs, life.status, life.job.get("runs")) == ([None], "completed", 1 if locks else None)
        return
    assert "no longer its current run" in stage.ignored[hold.job_id]
    assert life.status == "running"
    stage.perform(heirs[0])
    assert (life.status, life.job.info["run_no"]) == ("completed", 2)


# -- askings (WS-02) -------------------------------------------------------------------------------------------------


def test_two_clients_that_ask_at_once_have_one_run(stage: Stage, life: Life, at: Arm, aside: Aside) -> None:
    """WS-02: both look into the queue, find no message, and push one each."""
    stage.drain()
    asked: list[Future[Any]] = []

    def other() -> None:
        asked.append(aside(life.job.run))
        stage.wait_for_waiters()

    at("run:before-commit", other)
    assert life.job.run() == asked[0].result(10) == life.job
    assert stage.row_counts()["messages"] == 1
    assert life.settle() == ["run", "run"]


# -- families and names (WS-16, WS-17, WS-18, WS-23) -----------------------------------------------------------------


@pytest.mark.parametrize("lost_at", ["enqueue:before-commit", "enqueue:after-commit"])
def test_a_job_whose_making_has_no_answer_is_there_whole_or_not_at_all(stage: Stage, at: Arm, lost_at: str) -> None:
    """WS-16: the job has a number, and perhaps a parent and ports, and nothing will ever run it."""
    parent = stage.job()
    before = stage.row_counts()

    def make() -> Job:
        made: Job = stage.idle.enqueue(
            parent=parent, child_name="kid", aliases=["kid"], state={"x": 1}, inports={"a": {"channels": ["/news"]}}
        )
        return made

    at(lost_at, lost)
    if lost_at == "enqueue:before-commit":
        with pytest.raises(StoreUnavailableError):
            make()
        assert stage.row_counts() == before
    made = make()  # after the commit a second try has found what the first has made
    assert parent.children == {"kid": made}
    assert (made.aliases, made.state, [port.name for port in made.inports]) == (["kid"], {"x": 1}, ["a"])
    assert stage.run(made) == "completed"


@pytest.mark.parametrize("name", ["alias", "child"])
def test_of_two_who_want_one_name_at_once_one_has_it(stage: Stage, at: Arm, aside: Aside, name: str) -> None:
    """WS-17: both have looked, and both take it."""
    parent, one, other = (stage.job() for _ in range(3))
    tried: list[Future[Any]] = []
    if name == "alias":
        at("alias:before-commit", lambda: _begin(stage, tried, aside, lambda: other.add_alias("name")))
        one.add_alias("name")
        with pytest.raises(AliasTakenError, match=f"belongs to job {one.id}"):
            tried[0].result(10)
        assert (one.aliases, other.aliases) == (["name"], [])
        return
    at(
        "adopt:before-commit",
        lambda: _begin(stage, tried, aside, lambda: parent.enqueue(stage.idle, child_name="name")),
    )
    parent.adopt(one, "name")
    with pytest.raises(ChildNameTakenError):
        tried[0].result(10)
    assert parent.children == {"name": one}


@pytest.mark.parametrize("what", ["a child", "a forced run", "an alias"])
def test_a_job_that_is_being_deleted_is_given_nothing_more(stage: Stage, at: Arm, aside: Aside, what: str) -> None:
    """WS-18: a child that is made between the look and the deletion outlives its parent."""
    job = stage.job()
    job.terminate()
    stage.drain()
    calls: dict[str, Callable[[], Any]] = {
        "a child": lambda: job.enqueue(stage.idle, child_name="kid"),
        "a forced run": lambda: job.run(force=True),
        "an alias": lambda: job.add_alias("late"),
    }
    tried: list[Future[Any]] = []
    at("delete:before-commit", lambda: _begin(stage, tried, aside, calls[what]))
    assert job.delete()

    with pytest.raises(JobNotFoundError):
        tried[0].result(10)
    assert all(stage.row_counts()[table] == 0 for table in ("jobs", "messages", "aliases", "askings"))


@pytest.mark.parametrize("held_at", ["terminate:before-commit", "terminate:after-commit"])
def test_nobody_is_born_below_a_tree_that_is_being_terminated(
    stage: Stage, at: Arm, aside: Aside, held_at: str
) -> None:
    """WS-23: a tree is visited node by node, and children come where the visit has been."""
    root = stage.job()
    leaf = root.enqueue(stage.idle, child_name="a").enqueue(stage.idle, child_name="b")
    orphan = stage.job()
    stage.drain()
    tried: list[Future[Any]] = []

    def others() -> None:
        waits = held_at == "terminate:before-commit"
        _begin(stage, tried, aside, lambda: leaf.enqueue(stage.idle, child_name="late"), waits=waits)
        _begin(stage, tried, aside, lambda: leaf.adopt(orphan, "late"), waits=waits)

    at(held_at, others)
    root.terminate(recursive=True)
    for refused in tried:
        with pytest.raises(IllegalMoveError, match="takes no more children"):
            refused.result(10)

    stage.drain()
    assert root.terminated
    assert (root.delete(), orphan.refresh().status) == (True, "completed")


def _begin(
    stage: Stage, tried: list[Future[Any]], aside: Aside, call: Callable[[], Any], *, waits: bool = True
) -> None:
    """Have a call made beside this one, which holds what it needs."""
    tried.append(aside(call))
    if waits:
        stage.wait_for_waiters(len(tried))
