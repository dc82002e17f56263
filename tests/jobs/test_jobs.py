"""Jobs: making, finding, asking, ending and deleting them."""

from __future__ import annotations

import json
import pickle
import re
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import pytest

from celery_sidejob import (
    FINISHED,
    AliasTakenError,
    ChildNameTakenError,
    IllegalMoveError,
    InvalidValueError,
    Job,
    JobNotFoundError,
    RunningJob,
    Status,
    UnknownTaskError,
    current_job,
    job_status_changed,
    task_buried,
    task_lost,
    task_recovered,
)
from celery_sidejob.model import values
from celery_sidejob.model.status import ASKABLE, MOVES
from celery_sidejob.operations.runs import recovery
from tests.tools.crash_points import Arm, lost
from tests.tools.in_process import Stage

ALL = tuple(Status)


# -- making ----------------------------------------------------------------------------------------------------------


def test_a_new_job_is_queued_and_shows_what_it_was_made_of(stage: Stage) -> None:
    job = stage.sidejob.enqueue(
        "stage.call", (7,), queue="maths", created_by="me", aliases=["first"], state={"a": [1]}, priority=3,
        inports={"x": {"default": 1}}, outports=["y"],
    )  # fmt: skip
    found = stage.sidejob.get(job.id)

    assert (found.status, found.task, found.queue, found.args, found.kwargs) == (
        "queued", "stage.call", "maths", [7], {},
    )  # fmt: skip
    assert (found.created_by, found.aliases, found.state, found.parent, found.children) == (
        "me", ["first"], {"a": [1]}, None, {},
    )  # fmt: skip
    assert found.created_at is not None
    assert found.created_at.tzinfo is not None
    assert found.ran_at is None
    assert found.exists
    assert not found.terminated
    assert found.input("x").default == 1
    assert [port.name for port in found.outports] == ["y"]
    info = found.info
    assert (info["priority"], info["run_no"], info["in_run"], info["error"]) == (3, 0, False, None)


def test_a_job_that_has_nothing_but_an_alias_is_found_by_it(stage: Stage) -> None:
    @stage.task(name="stage.plain")
    def plain(job: RunningJob) -> None:
        pass

    job = stage.sidejob.enqueue(plain, aliases=["plain-one"])
    assert stage.sidejob.get("plain-one") == job


@pytest.mark.parametrize(
    "options", [{}, {"aliases": ["only"], "state": {"a": 1}, "inports": ["x"]}], ids=["one statement", "several"]
)
def test_a_job_whose_making_was_not_answered_is_made_once(stage: Stage, at: Arm, options: dict[str, Any]) -> None:
    at("enqueue:after-commit", lost)
    job = stage.sidejob.enqueue("stage.call", (7,), **options)

    assert [found.id for found in stage.sidejob.jobs()] == [job.id]
    assert job.refresh().args == [7]
    assert stage.sidejob.get("only").id == job.id if options else True


def test_many_jobs_whose_making_was_not_answered_are_made_once(stage: Stage, at: Arm) -> None:
    parent = stage.job()
    at("enqueue:after-commit", lost)
    items = [{"task": stage.idle, "parent": parent, "child_name": name} for name in "abc"]
    made = stage.sidejob.enqueue_many(items)

    assert {name: child.id for name, child in parent.children.items()} == dict(
        zip("abc", (job.id for job in made), strict=True)
    )


def test_a_job_can_be_made_of_a_task_its_name_or_a_signature(stage: Stage) -> None:
    @stage.task(name="add", queue="sums")
    def add(job: RunningJob, a: int, b: int = 0) -> int:
        return a + b

    made = [
        stage.sidejob.enqueue(add, (1,), {"b": 2}),
        stage.sidejob.enqueue("add", [1], {"b": 2}),
        stage.sidejob.enqueue(add.s(1, b=2)),
        stage.sidejob.enqueue(add.s(1).set(queue="sums"), kwargs={"b": 2}),
        add.enqueue((1,), {"b": 2}),
        add.delay(1, b=2).job,
        add.apply_async((1,), {"b": 2}).job,
    ]

    assert [(job.args, job.kwargs, job.queue) for job in made] == [([1], {"b": 2}, "sums")] * len(made)
    assert [job.id for job in made] == sorted({job.id for job in made})


def test_enqueue_of_loose_arguments_names_the_right_call(stage: Stage) -> None:
    with pytest.raises(TypeError, match=r"enqueue\(\(2, 3\)\).*delay\(2, 3\)"):
        stage.idle.enqueue(2, 3)


def test_arguments_are_checked_like_celerys_and_without_the_job(stage: Stage) -> None:
    with pytest.raises(TypeError, match=r"stage\.call"):
        stage.call.delay()
    with pytest.raises(TypeError, match=r"stage\.call"):
        stage.call.delay(1, 2)


def test_calling_the_task_runs_the_body_and_says_what_it_wants(stage: Stage) -> None:
    called: list[Any] = []

    def adding(job: Any, number: int, *, twice: bool = False) -> int:
        called.append(job)
        return number * 2 if twice else number

    add = stage.task(adding, name="jobs.adding")
    job = stage.job()

    assert add(job, 7, twice=True) == 14
    assert called == [job]
    assert job.info["run_no"] == 0, "nothing was run in the store"
    with pytest.raises(TypeError, match="first argument is a job"):
        add(2)
    assert called == [job]


@pytest.mark.parametrize("kwargs", [[("start", 1)], "start", 7, {"start"}], ids=str)
def test_keywords_that_are_no_mapping_are_refused(stage: Stage, kwargs: Any) -> None:
    def starting(job: Any, start: int = 0) -> None:
        pass

    starting_task = stage.task(starting, name="jobs.starting")
    for name in (starting_task, "jobs.starting", starting_task.s()):
        with pytest.raises(TypeError, match=f"kwargs takes a mapping, not {type(kwargs).__name__}"):
            stage.sidejob.enqueue(name, (), kwargs)
    for given in (None, {}, {"start": 1}, MappingProxyType({"start": 1})):
        assert stage.sidejob.enqueue(starting_task, (), given).kwargs == dict(given or {})


@pytest.mark.parametrize("when", ["eta", "naive eta", "countdown"])
def test_a_job_of_later_is_queued_and_not_owed_yet(stage: Stage, when: str) -> None:
    stage.app.conf.timezone = "Asia/Tokyo"
    at = datetime.now(UTC) + timedelta(hours=1)
    options: dict[str, Any] = {
        "eta": {"eta": at},
        "naive eta": {"eta": at.astimezone(stage.app.timezone).replace(tzinfo=None)},
        "countdown": {"countdown": 3600},
    }[when]
    job = stage.job(**options)

    assert job.status == "queued"
    assert stage.drain() == 0
    (due_in,) = stage.sql("SELECT extract(epoch FROM due_at - now())::float FROM timers WHERE job_id = %s", job.id)[0]
    assert 3590 < due_in <= 3600
    stage.sql("UPDATE timers SET due_at = now()")
    assert stage.drain() == 1
    assert job.refresh().status == "completed"


def test_an_eta_that_has_passed_and_a_countdown_of_nothing_are_now(stage: Stage) -> None:
    past = stage.job(eta=datetime(2020, 1, 1, tzinfo=UTC))
    nothing = stage.job(countdown=0)
    negative = stage.job(countdown=-5)

    assert stage.drain() == 3
    assert {past.refresh().status, nothing.refresh().status, negative.refresh().status} == {"completed"}


# -- many at once ----------------------------------------------------------------------------------------------------


def test_enqueue_many_makes_jobs_in_order(stage: Stage) -> None:
    parent = stage.job()
    made = stage.sidejob.enqueue_many(
        [stage.idle.s(), {"task": "stage.idle", "parent": parent, "child_name": "kid", "state": {"n": 2}}]
        + [{"task": stage.idle, "created_by": str(n)} for n in range(3)]
    )

    assert [job.id for job in made] == sorted(job.id for job in made)
    assert parent.children == {"kid": made[1]}
    assert [job.created_by for job in made[2:]] == ["0", "1", "2"]
    assert stage.drain() == 7  # the parent is asked once more by its child's end
    assert stage.sidejob.enqueue_many([]) == []


@pytest.mark.parametrize(("name", "hint"), [("stage.idel", " Did you mean 'stage.idle'?"), ("stage.mail", "")])
def test_a_task_that_nobody_knows_is_refused_with_a_remedy(stage: Stage, name: str, hint: str) -> None:
    remedy = "Import its module here, or start a worker that serves it."
    with pytest.raises(UnknownTaskError) as refused:
        stage.sidejob.enqueue(name)
    assert str(refused.value) == f"No sidejob task {name!r} is registered. {remedy}{hint}"


def test_enqueue_many_is_all_or_nothing(stage: Stage) -> None:
    parent = stage.job(aliases=["mine"])
    stage.idle.enqueue(parent=parent, child_name="kid")
    before = stage.row_counts()
    child = {"task": "stage.idle", "parent": parent, "child_name": "kid"}
    good: dict[str, Any] = {"task": "stage.idle"}

    bad: list[tuple[list[Any], type[Exception]]] = [
        ([good, {"task": "no.such"}], UnknownTaskError),
        ([good, {"task": "stage.idle", "args": (float("nan"),)}], TypeError),
        ([good, {"task": "stage.call", "args": (float("nan"),)}], InvalidValueError),
        ([good, child], ChildNameTakenError),
        ([{**child, "child_name": "new"}, {**child, "child_name": "new"}], ChildNameTakenError),
        ([good, {**good, "aliases": ["mine"]}], AliasTakenError),
        ([{**good, "aliases": ["twice"]}, {**good, "aliases": ["twice"]}], AliasTakenError),
        ([good, 3], InvalidValueError),
        ([good, {"task": "stage.idle", "parent": 10**9, "child_name": "x"}], JobNotFoundError),
    ]
    for items, error in bad:
        with pytest.raises(error):
            stage.sidejob.enqueue_many(items)
        assert stage.row_counts() == before


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"task": "no.such"}, UnknownTaskError, "No sidejob task 'no.such' is registered"),
        ({"task": "stage.call", "args": (float("nan"),)}, InvalidValueError, "args[0]: nan is not a JSON value"),
        ({"task": "stage.idle", "args": (1,)}, TypeError, "stage.idle: too many positional arguments"),
        (
            {"task": "stage.idle", "parent": 7, "child_name": "x"},
            JobNotFoundError,
            "There is no job 7 to be the parent",
        ),
    ],
)
def test_an_item_that_is_refused_is_named_by_its_place(
    stage: Stage, bad: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(f"items[2] of enqueue_many(): {message}")):
        stage.sidejob.enqueue_many([{"task": "stage.idle"}, stage.idle.s(), bad])


def test_enqueue_many_draws_ids_and_inserts_once_per_batch(stage: Stage) -> None:
    made = stage.sidejob.enqueue_many({"task": "stage.idle"} for _ in range(1000))

    assert [job.id for job in made] == list(range(made[0].id, made[0].id + 1000))
    assert stage.row_counts()["messages"] == 1000


# -- finding ---------------------------------------------------------------------------------------------------------


def test_jobs_are_found_by_id_alias_and_task_id(stage: Stage) -> None:
    job = stage.job(aliases=["höhe 7"])

    find = stage.sidejob.find
    assert [find(job.id), find(str(job.id)), find("höhe 7"), find(job)] == [job] * 4
    assert stage.sidejob.for_task_id(str(job.task_id)) == job
    assert stage.sidejob.for_task_id(str(uuid4())) is None
    for unknown in (job.id + 1, -1, 2**70, "9" * 5000, "nobody", "", "a\0b", "\ud800", str(uuid4())):
        assert find(unknown) is None
        with pytest.raises(JobNotFoundError):
            stage.sidejob.get(unknown)
    for nonsense in (None, 1.5, True):
        with pytest.raises(InvalidValueError):
            find(nonsense)  # type: ignore[arg-type]


def test_jobs_are_listed_iterated_and_counted(stage: Stage) -> None:
    parent = stage.job(created_by="a", queue="q1")
    children = [stage.idle.enqueue(parent=parent, child_name=str(n), created_by="b", queue="q2") for n in range(3)]
    failing = stage.job(lambda job: 1 / 0, created_by="c", queue="q1")
    with pytest.raises(ZeroDivisionError):
        stage.run(failing)

    listed = stage.sidejob.jobs
    everything = [parent, *children, failing]
    assert listed() == everything
    assert listed(status="queued") == [parent, *children]
    assert listed(status=["queued", Status.FAILED]) == everything
    assert listed(status="failed") == [failing]
    assert listed(status="failed", queue="q2") == []
    assert listed(task=stage.call) == [failing]
    assert listed(task="stage.idle", queue="q2", limit=2) == children[:2]
    assert listed(queue="q2", after=children[0]) == children[1:]
    assert listed(after=children[1].id) == [children[2], failing]
    assert listed(created_by="b", parent=parent) == children
    assert list(stage.sidejob.iter_jobs(page=2, parent=parent)) == children
    assert list(stage.sidejob.iter_jobs(page=2)) == everything
    assert stage.sidejob.count_jobs() == {"queued": 4, "failed": 1}
    assert stage.sidejob.count_jobs(by="task") == {"stage.idle": 4, "stage.call": 1}
    assert stage.sidejob.count_jobs(by="queue") == {"q1": 2, "q2": 3}
    assert stage.sidejob.count_jobs(by="created_by") == {"a": 1, "b": 3, "c": 1}
    with pytest.raises(InvalidValueError, match="not by 'args'"):
        stage.sidejob.count_jobs(by="args")


def test_a_filter_that_there_is_not_is_refused_at_the_call(stage: Stage) -> None:
    iterate, count = stage.sidejob.iter_jobs, stage.sidejob.count_jobs
    with pytest.raises(TypeError, match=r"iter_jobs\(\) takes no limit="):
        iterate(limit=5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"count_jobs\(\) takes no newest_first="):
        count(newest_first=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"count_jobs\(\) takes no statsu=, .* Did you mean 'status'\?"):
        count(statsu="failed")  # type: ignore[call-arg]


# -- handles ---------------------------------------------------------------------------------------------------------


def test_handles_are_equal_hashable_picklable_and_json_by_their_id(stage: Stage) -> None:
    job, other = stage.job(), stage.job()
    again = stage.sidejob.get(job.id)

    assert job == again
    assert job is not again
    assert job != other
    assert job != job.id
    assert len({job, again, other}) == 2
    revived = pickle.loads(pickle.dumps(job))
    assert (revived, revived.status) == (job, "queued")
    assert values.decode(values.encode({"job": job})) == {"job": job.id}
    assert (str(job), repr(job)) == (f"job:{job.id}", f"<Job {job.id}>")
    assert stage.sidejob.enqueue("stage.call", (job,)).args == [job.id]


def test_a_handle_shows_the_row_as_it_was_read(stage: Stage) -> None:
    job = stage.job()
    held = stage.sidejob.get(job.id)
    assert held.status == "queued"
    stage.drain()

    assert held.status == "queued"
    assert held.refresh().status == "completed"
    held.terminate()
    stage.drain()
    assert job.refresh().terminated
    assert job.delete() is True
    with pytest.raises(JobNotFoundError):
        held.refresh()
    assert not job.exists


def test_wait_returns_the_job_in_one_of_the_statuses(stage: Stage) -> None:
    job = stage.job()
    with pytest.raises(TimeoutError, match="still queued"):
        job.wait(timeout=0.01)
    assert job.wait("queued", timeout=0) == job
    runner = threading.Thread(target=stage.drain)
    runner.start()
    assert job.wait(timeout=10).status in FINISHED
    runner.join()
    assert job.wait([Status.COMPLETED, "failed"]).status == "completed"


def test_wait_says_that_the_job_was_deleted(stage: Stage) -> None:
    with pytest.raises(JobNotFoundError):
        Job(10**9, runtime=stage.runtime).wait(timeout=5)


# -- asking ----------------------------------------------------------------------------------------------------------


def in_status(stage: Stage, status: str) -> Job:
    """Make a job that is in this status."""
    if status == "queued":
        return stage.job()
    if status == "running":
        job = stage.job()
        stage.claim(job)
        return job.refresh()
    if status == "failed":
        job = stage.job(lambda job: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            stage.run(job)
        return job.refresh()
    if status == "suspended":
        return stage.inside(lambda job: job.suspend())
    job = stage.inside(lambda job: None)
    if status in ("terminating", "terminated"):
        job.terminate()
    if status == "terminated":
        stage.drain()
    return job.refresh()


@pytest.mark.parametrize("status", ALL)
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("when", [{}, {"countdown": 3600}])
def test_run_is_allowed_from_each_status_as_the_moves_say(
    stage: Stage, status: Status, force: bool, when: dict[str, Any]
) -> None:
    moves = watch_moves(stage)
    job = in_status(stage, status)
    assert job.status == status
    before = stage.row_counts()
    asked = job.run(force=force, **when)

    if not (force or status in ASKABLE):
        assert asked is None
        assert (job.refresh().status, stage.row_counts()) == (status, before)
        return
    assert asked == job
    assert asked is not None
    expected = {"terminating": "terminating", "running": "running" if when else "queued"}.get(status, "queued")
    assert asked.status == expected
    if expected != status:
        assert moves[-1][1:] == (status, expected)
    if when:
        assert stage.row_counts()["timers"] == 1
    else:
        assert asked.info["asked_again"]
    stage.sql("UPDATE timers SET due_at = now()")
    if status == "running":
        stage.perform(stage.holds[job.id])
    stage.drain()
    ends = "failed" if status == "failed" else "suspended" if status == "suspended" else "completed"
    assert job.refresh().status == ends
    assert stage.row_counts()["messages"] == 0


@pytest.mark.parametrize("status", ALL)
def test_terminate_is_allowed_from_each_status(stage: Stage, status: Status) -> None:
    moves = watch_moves(stage)
    job = in_status(stage, status)
    job.terminate()

    after = "terminated" if status == "terminated" else "terminating"
    assert job.refresh().status == after
    if status == "running":
        stage.perform(stage.holds[job.id])
        assert job.refresh().status == "terminating"
    stage.drain()
    assert job.refresh().status == "terminated"
    assert job.terminated
    assert job.run() is None
    assert moves[-1][2] == "terminated"
    assert len(stage.sidejob.dead) == 0


def watch_moves(stage: Stage) -> list[tuple[int, str | None, str]]:
    """Collect the moves that are announced; each must be legal and follow the last one of its job."""
    moves: list[tuple[int, str | None, str]] = []
    last: dict[int, str] = {}
    changes: dict[int, int] = {}

    def note(sender: str, job_id: int, before: str | None, after: str, change: int, **_: Any) -> None:
        assert Status(after) in MOVES[None if before is None else Status(before)], (before, after)
        if before is not None and before != "running":  # a claim is announced by nobody but the run's first move
            assert last.get(job_id, before) == before
        assert change > changes.get(job_id, -1)
        last[job_id], changes[job_id] = after, change
        moves.append((job_id, before, after))

    job_status_changed.connect(note, weak=False)
    stage.watching = note  # type: ignore[attr-defined]
    return moves


@pytest.fixture(autouse=True)
def _no_receivers_left() -> Any:
    yield
    for signal in (job_status_changed, task_buried, task_lost, task_recovered):
        signal.receivers = []


def test_run_with_parent_asks_the_parent(stage: Stage) -> None:
    parent = stage.inside(lambda job: None)
    child = stage.idle.enqueue(parent=parent, child_name="kid", countdown=3600)
    orphan = stage.job()

    assert child.run(parent=True) == parent
    assert parent.refresh().status == "queued"
    assert orphan.run(parent=True) is None


def test_several_runs_asked_for_before_it_runs_are_one(stage: Stage) -> None:
    ran: list[int] = []
    job = stage.job(lambda job: ran.append(job.run_no))
    for _ in range(5):
        assert job.run() == job

    assert stage.drain() == 1
    assert ran == [1]


def test_a_run_asked_for_during_the_run_follows_it(stage: Stage) -> None:
    ran: list[int] = []

    def body(job: RunningJob) -> None:
        ran.append(job.run_no)
        if len(ran) == 1:
            thread = threading.Thread(target=lambda: Job(job.id, runtime=stage.runtime).run())  # a client, elsewhere
            thread.start()
            thread.join()

    job = stage.job(body)
    assert stage.drain() == 2
    assert ran == [1, 2]
    assert job.refresh().status == "completed"


def test_each_asking_has_its_own_task_id_that_lives_through_suspends(stage: Stage) -> None:
    job = stage.job(lambda job: job.suspend() if job.run_no == 1 else None)
    first = job.task_id
    assert stage.run(job) == "suspended"
    job.run()
    assert job.refresh().task_id == first
    assert stage.run(job) == "completed"
    assert job.task_id == first
    job.run()
    assert job.refresh().task_id != first
    assert stage.sidejob.for_task_id(str(job.task_id)) == job
    assert job.result.id == job.task_id


# -- terminating and deleting ----------------------------------------------------------------------------------------


def test_recursive_terminate_reaches_all_below_also_what_comes_meanwhile(stage: Stage) -> None:
    def has_one_more(job: RunningJob) -> None:
        job.enqueue(stage.idle, child_name="late")

    root = stage.inside(lambda job: None)
    middle = stage.sidejob.enqueue(stage.idle, parent=root, child_name="middle")
    stage._bodies[99] = has_one_more
    working = stage.sidejob.enqueue(stage.call, (99,), parent=middle, child_name="working")
    hold = stage.claim(working)
    aside = stage.job()

    root.terminate(recursive=True)
    assert {job.refresh().status for job in (root, middle, working)} == {"terminating"}
    assert hold is not None
    stage.perform(hold)  # its commit makes a child below a terminating job
    late = working.child("late")
    assert late is not None
    stage.drain()

    assert {job.refresh().status for job in (root, middle, working, late)} == {"terminated"}
    assert root.terminated
    assert aside.refresh().status == "completed"
    assert root.delete() is True
    assert not any(job.exists for job in (root, middle, working, late))
    assert stage.sidejob.jobs() == [aside]


def test_a_plain_terminate_leaves_the_children(stage: Stage) -> None:
    root = stage.job()
    child = stage.idle.enqueue(parent=root, child_name="kid")
    root.terminate()
    stage.drain()

    assert (root.refresh().status, child.refresh().status) == ("terminated", "completed")
    assert not root.terminated
    assert root.delete() is False
    assert root.exists
    with pytest.raises(IllegalMoveError, match="takes no more children"):
        root.enqueue(stage.idle, child_name="more")


def test_delete_takes_everything_of_the_job_with_it(stage: Stage) -> None:
    before = stage.row_counts()
    job = stage.job(aliases=["a"], state={"k": 1}, inports={"in1": {"channels": ["/x"]}})
    job.input("in1").write(1)
    assert job.delete() is False
    job.terminate()
    stage.drain()

    assert job.delete() is True
    assert stage.row_counts() == before
    with pytest.raises(JobNotFoundError):
        job.delete()


def test_delete_and_wait_have_no_place_in_a_run(stage: Stage) -> None:
    other = stage.job()
    with pytest.raises(IllegalMoveError, match="inside a run"):
        stage.inside(lambda job: other.delete())
    with pytest.raises(IllegalMoveError, match="inside a run"):
        stage.inside(lambda job: other.wait())


def test_a_raising_shutdown_terminates_all_the_same(stage: Stage) -> None:
    @stage.task(name="fragile")
    def fragile(job: RunningJob) -> None:
        pass

    @fragile.on_shutdown
    def _(job: RunningJob) -> None:
        job.set(touched=True)
        raise RuntimeError("no")

    job = fragile.enqueue()
    job.terminate()
    stage.drain()

    assert job.refresh().status == "terminated"
    assert job.state == {}


# -- hooks -----------------------------------------------------------------------------------------------------------


def test_startup_runs_once_in_the_first_commit_and_shutdown_at_the_end(stage: Stage) -> None:
    happened: list[str] = []

    @stage.task(name="hooked")
    def hooked(job: RunningJob, fail: bool = False) -> None:
        happened.append("run")
        if fail and job.run_no == 1:
            raise ValueError

    @hooked.on_startup
    def _(job: RunningJob) -> None:
        happened.append("startup")
        job.set(started=True)

    @hooked.on_shutdown
    def _(job: RunningJob) -> None:
        happened.append("shutdown")
        job.set(ended=True)

    job = hooked.enqueue((True,))
    stage.drain()
    assert (job.refresh().status, job.state, happened) == ("failed", {}, ["startup", "run"])
    job.run(force=True)
    stage.drain()
    job.run()
    stage.drain()
    assert happened == ["startup", "run"] * 2 + ["run"]
    assert job.state == {"started": True}
    job.terminate()
    stage.drain()
    assert happened[-1] == "shutdown"
    assert job.state == {"started": True, "ended": True}
    job.run(force=True)
    stage.drain()
    assert happened[-1] == "run"  # and not started anew


def test_a_task_can_be_a_class(stage: Stage) -> None:
    from celery_sidejob import SideJobTask

    class Add(SideJobTask):
        name = "Add"
        inports = ("a",)
        outports = ("sum",)

        def startup(self, job: RunningJob) -> None:
            job.set(started=self.name)

        def run(self, job: RunningJob, plus: int = 1) -> int:
            return int(job.input("a").read()) + plus

        def shutdown(self, job: RunningJob) -> None:
            job.set(ended=True)

    stage.task(Add)
    job = stage.sidejob.enqueue("Add", kwargs={"plus": 2})
    job.input("a").write(40)
    hold = stage.claim(job)
    assert hold is not None
    assert stage.perform(hold) == 42
    assert job.state == {"started": "Add"}
    job.terminate()
    stage.drain()
    assert job.get("ended") is True


# -- inside a run ----------------------------------------------------------------------------------------------------


def test_a_unit_reads_its_own_writes_and_is_committed_at_the_end(stage: Stage) -> None:
    outsider = stage.job(aliases=["known"])

    def body(job: RunningJob) -> None:
        made = stage.sidejob.enqueue(stage.idle, created_by=None, aliases=["new"], state={"n": 1})
        child = job.enqueue(stage.idle, child_name="kid")
        assert made.id > job.id
        assert child.id > made.id
        assert (made.status, made.created_by, made.created_at) == ("queued", f"job:{job.id}", None)
        assert (made.exists, made.task, made.args, made.state) == (True, "stage.idle", [], {"n": 1})
        assert (job.children, job.child("kid"), child.parent) == ({"kid": child}, child, job)
        assert (stage.sidejob.find(made.id), stage.sidejob.find("new"), made.aliases) == (made, made, ["new"])
        made.remove_alias("new")
        assert stage.sidejob.find("new") is None
        made.add_alias("other")
        assert (stage.sidejob.find("other"), stage.sidejob.find("known")) == (made, outsider)
        job.set(a=1, b=2).unset("a")
        assert (job.state, job.get("a"), job.get("b")) == ({"b": 2}, None, 2)
        child.input("x").write("hello")
        assert (len(child.input("x")), [packet.value for packet in child.input("x").peek()]) == (1, ["hello"])
        child.input("x").default = 5
        assert child.input("x").default == 5
        child.input("x").channels = ["/here"]
        assert child.input("x").channels == ["/here"]
        # Nobody else sees any of it.
        assert stage.sql("SELECT count(*) FROM jobs") == [(2,)]
        assert stage.sql("SELECT count(*) FROM state") == [(0,)]

    job = stage.inside(body)
    child = job.child("kid")
    assert child is not None
    assert (job.status, job.state) == ("completed", {"b": 2})
    assert (child.created_by, child.created_at is not None) == (f"job:{job.id}", True)
    made = stage.sidejob.get("other")
    assert (made.aliases, made.state) == (["other"], {"n": 1})
    port = child.input("x")
    assert (port.default, port.channels, port.read(), port.read()) == (5, ["/here"], "hello", 5)
    assert stage.drain() > 0
    assert {child.refresh().status, made.refresh().status} == {"completed"}


def test_a_failed_run_leaves_nothing_behind(stage: Stage) -> None:
    other = stage.inside(lambda job: None)
    before = stage.row_counts()

    def body(job: RunningJob) -> None:
        job.set(a=1)
        job.enqueue(stage.idle, child_name="kid")
        other.run()
        other.input("x").write(1)
        job.run()
        raise RuntimeError("no")

    job = stage.job(body)
    with pytest.raises(RuntimeError):
        stage.run(job)
    assert job.refresh().status == "failed"
    assert other.refresh().status == "completed"
    assert (job.state, job.children) == ({}, {})
    assert {**stage.row_counts(), "workers": 1} == {
        **before, "workers": 1, "jobs": 2, "askings": before["askings"] + 1, "dead": 1,
        "ports": before["ports"] + 2, "run_history": before["run_history"] + 1,
    }  # fmt: skip


def test_a_checkpoint_commits_what_was_done_so_far(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        job.set(a=1)
        job.checkpoint()
        assert stage.sql("SELECT count(*) FROM state") == [(1,)]
        job.set(a=2, b=2)
        raise RuntimeError("after the checkpoint")

    job = stage.job(body)
    with pytest.raises(RuntimeError):
        stage.run(job)
    assert job.state == {"a": 1}


def test_suspend_commits_and_rests(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        job.set(runs=job.get("runs", 0) + 1)
        try:
            job.suspend()
        except Exception:  # what a careless body does
            raise AssertionError("suspend is no Exception") from None

    job = stage.inside(body)
    assert (job.status, job.state) == ("suspended", {"runs": 1})
    job.run()
    assert stage.run(job) == "suspended"
    assert job.state == {"runs": 2}


def test_what_a_commit_refuses_fails_the_run(stage: Stage) -> None:
    """Found out only at the commit: the run ends as failed like one whose body raised it."""
    taken = stage.job()

    def claims_a_name(job: RunningJob) -> None:
        stage.sidejob.enqueue(stage.idle, aliases=["dup"])
        stage.sql("INSERT INTO aliases VALUES ('dup', %s)", taken.id)

    job = stage.job(claims_a_name)
    with pytest.raises(AliasTakenError):
        stage.run(job)
    assert job.refresh().status == "failed"
    assert stage.sidejob.count_jobs() == {"failed": 1, "queued": 1}

    job = stage.job(lambda job: [claims_a_name(job), job.suspend()])
    stage.sql("DELETE FROM aliases")
    with pytest.raises(AliasTakenError):
        stage.run(job)
    assert job.refresh().status == "failed"


def test_what_the_commit_of_a_shutdown_refuses_does_not_stop_it(stage: Stage) -> None:
    taken = stage.job()

    @stage.task(name="leaver")
    def leaver(job: RunningJob) -> None:
        pass

    @leaver.on_shutdown
    def _(job: RunningJob) -> None:
        job.set(gone=True)
        stage.sidejob.enqueue(stage.idle, aliases=["dup"])
        stage.sql("INSERT INTO aliases VALUES ('dup', %s)", taken.id)

    job = leaver.enqueue()
    job.terminate()
    stage.drain()
    assert (job.refresh().status, job.state) == ("terminated", {})


def test_a_child_name_that_is_taken_is_refused_at_the_call(stage: Stage) -> None:
    refused: list[str] = []

    def body(job: RunningJob) -> None:
        for _ in range(2):
            try:
                job.enqueue(stage.idle, child_name="kid")
            except ChildNameTakenError as error:
                refused.append(str(error))

    job = stage.inside(body)
    assert len(refused) == 1
    job.run()
    assert stage.drain() >= 1
    assert len(refused) == 3
    with pytest.raises(ChildNameTakenError) as outside:
        job.enqueue(stage.idle, child_name="kid")
    assert set(refused) == {str(outside.value)}, "as it is said outside of a run"
    assert job.refresh().status == "completed"


def test_many_children_of_one_name_in_one_unit_are_refused(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        child = {"task": "stage.idle", "parent": job, "child_name": "kid"}
        stage.sidejob.enqueue_many([child, child])

    with pytest.raises(ChildNameTakenError):
        stage.inside(body)
    assert stage.sidejob.count_jobs() == {"failed": 1}


def test_a_run_can_end_other_jobs_and_itself(stage: Stage) -> None:
    other = stage.job()

    def body(job: RunningJob) -> None:
        other.terminate()
        job.terminate()

    job = stage.job(body)
    hold = stage.claim(job)
    assert hold is not None
    stage.perform(hold)
    assert (job.refresh().status, other.refresh().status) == ("terminating", "terminating")
    stage.drain()
    assert (job.refresh().status, other.refresh().status) == ("terminated", "terminated")


def test_a_job_may_ask_itself_to_run_again(stage: Stage) -> None:
    job = stage.job(lambda job: job.run() if job.run_no < 3 else None)

    assert stage.drain() == 3
    assert job.refresh().status == "completed"


def test_a_job_may_set_itself_a_timer(stage: Stage) -> None:
    job = stage.inside(lambda job: job.run(countdown=3600) and None)
    assert job.status == "queued"
    stage.sql("UPDATE timers SET due_at = now()")
    assert stage.drain() == 1


def test_retry_is_a_backoff_that_force_and_terminate_cut_short(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        job.set(seen=job.run_no)
        if job.run_no == 1:
            raise job.retry(countdown=3600)

    job = stage.inside(body)
    first = job.task_id
    assert (job.status, job.state, job.info["retries"]) == ("queued", {}, 1)
    job.run()
    assert stage.claim(job) is None  # a plain run() waits for the retry
    job.run(force=True)
    assert stage.run(job) == "completed"
    assert (job.state, job.task_id, job.info["retries"]) == ({"seen": 2}, first, 0)

    job = stage.inside(body)
    job.terminate()
    assert stage.run(job) == "terminated"


def test_retries_are_used_up(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        raise job.retry(ValueError("still no"), countdown=0, max_retries=2)

    job = stage.job(body)
    assert stage.drain() == 3
    assert job.refresh().status == "failed"
    assert isinstance(stage.raised[job.id], ValueError)
    (entry,) = stage.sidejob.dead
    assert (entry.job_id, entry.reason, entry.task_id) == (job.id, "failed", job.task_id)
    assert entry.retries == 2

    stage.sidejob.dead.retry(entry.id)
    assert stage.drain() == 3
    (again,) = stage.sidejob.dead
    assert again.retries == 2, "it had begun to count anew"


def test_current_job_is_the_running_one(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        assert current_job == job
        assert current_job.run_no == job.run_no == 1
        assert current_job
        assert job.request.id == job.task_id
        assert not job.stopping
        job.heartbeat()

    stage.inside(body)
    assert not current_job
    with pytest.raises(IllegalMoveError):
        _ = current_job.id


# -- signals, the dead set -------------------------------------------------------------------------------------------


def test_the_signals_tell_what_happened_and_a_raising_receiver_stops_nothing(stage: Stage) -> None:
    told: list[tuple[str, Any]] = []

    def receiver(signal: Any, **given: Any) -> None:
        told.append((signal.name, {k: v for k, v in given.items() if k in ("before", "after", "reason", "run_no")}))
        raise RuntimeError("a receiver of the user's")

    for signal in (job_status_changed, task_buried, task_lost, task_recovered):
        signal.connect(receiver, weak=False)
    job = stage.job(lambda job: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        stage.run(job)
    assert told == [
        ("job_status_changed", {"before": None, "after": "queued"}),
        ("job_status_changed", {"before": "queued", "after": "running"}),
        ("job_status_changed", {"before": "running", "after": "failed"}),
        ("task_buried", {"reason": "failed"}),
    ]

    told.clear()
    job.run(force=True)
    hold = stage.claim(job)
    assert hold is not None
    assert recovery.rescue(stage.runtime, job.id, run_no=hold.run_no, worker_id=hold.worker_id, own=True)
    assert told == [
        ("job_status_changed", {"before": "failed", "after": "queued"}),
        ("job_status_changed", {"before": "running", "after": "queued"}),
        ("task_lost", {"run_no": 2}),
        ("task_recovered", {"run_no": 2}),
    ]


def test_the_dead_set_holds_failed_jobs_until_they_are_asked_again(stage: Stage) -> None:
    dead = stage.sidejob.dead
    assert (len(dead), list(dead), bool(dead)) == (0, [], True)
    jobs = [stage.job(lambda job: 1 / 0 if job.run_no == 1 else None) for _ in range(3)]
    stage.drain()

    assert len(dead) == 3
    entries = list(dead)
    assert [entry.job_id for entry in entries] == [job.id for job in jobs]
    entry = dead.get(entries[0].id)
    assert (entry.task, entry.queue, entry.reason, entry.retries) == ("stage.call", "celery", "failed", 0)
    assert entry.error == "ZeroDivisionError: division by zero"
    assert "1 / 0" in str(entry.traceback)
    assert (entry.group, entry.task_id) == ("ZeroDivisionError", jobs[0].task_id)
    assert entry.died_at.tzinfo is not None

    assert dead.retry(entry.id) == jobs[0]
    assert len(dead) == 2
    stage.drain()
    assert jobs[0].refresh().status == "completed"
    jobs[1].terminate()
    assert len(dead) == 1
    with pytest.raises(JobNotFoundError, match="no entry"):
        dead.get(entry.id)
    with pytest.raises(JobNotFoundError):
        dead.retry(entry.id)


def test_a_forced_timer_takes_a_failed_job_out_of_the_dead_set(stage: Stage) -> None:
    job = in_status(stage, "failed")
    job.run(force=True, countdown=3600)
    assert job.refresh().status == "queued"
    assert len(stage.sidejob.dead) == 0


def test_too_many_losses_in_a_row_end_in_the_dead_set(stage: Stage) -> None:
    @stage.task(name="poison", max_losses=2)
    def poison(job: RunningJob) -> None:
        pass

    job = poison.enqueue()
    stage.sql("UPDATE jobs SET retries = 3")
    for losses in (1, 2):
        hold = stage.claim(job)
        assert hold is not None
        recovery.rescue(stage.runtime, job.id, run_no=hold.run_no, worker_id=hold.worker_id, own=True)
        assert job.refresh().info["losses"] == losses
    assert job.status == "failed"
    (entry,) = stage.sidejob.dead
    assert (entry.reason, entry.error) == (
        "lost", "WorkerLostError: worker died. 2 runs in a row were lost; this is the last one."
    )  # fmt: skip
    assert entry.retries == 3
    assert entry.loss == {"why": "worker died", "kind": "unknown"}


@pytest.mark.parametrize(
    "revive",
    [
        lambda stage, job: stage.sidejob.dead.retry(next(iter(stage.sidejob.dead)).id),
        lambda stage, job: job.run(force=True),
        lambda stage, job: job.run(force=True, countdown=3600).run(force=True),
        lambda stage, job: job.terminate(),
    ],
    ids=["retry of the entry", "forced run", "forced timer", "termination"],
)
def test_who_takes_a_job_out_of_the_dead_set_gives_it_all_its_losses_again(
    stage: Stage, revive: Callable[[Stage, Job], object]
) -> None:
    @stage.task(name="poison", max_losses=2)
    def poison(job: RunningJob) -> None:
        pass

    job = poison.enqueue()
    for _ in range(2):
        lose(stage, job)
    assert job.refresh().status == "failed"

    revive(stage, job)

    status = job.refresh().status
    assert job.info["losses"] == 0
    lose(stage, job)
    assert (job.refresh().status, len(stage.sidejob.dead)) == (status, 0)


def lose(stage: Stage, job: Job) -> None:
    """Have the next run of a job be lost with its worker."""
    hold = stage.claim(job)
    assert hold is not None
    recovery.rescue(stage.runtime, job.id, run_no=hold.run_no, worker_id=hold.worker_id, own=True)


# -- priority --------------------------------------------------------------------------------------------------------


def test_a_higher_priority_is_sooner_on_redis(database_url: str, redis_url: str) -> None:
    stage = Stage(database_url, broker=redis_url)
    try:
        made = {priority: stage.job(priority=priority) for priority in (0, 9, 3, 6)}
        with stage.app.connection_for_read() as connection:
            order = []
            queue = connection.SimpleQueue("celery")
            for _ in made:
                message = queue.get(timeout=5)
                order.append(message.headers["sidejob"]["job"])
                message.ack()
            queue.close()
        assert order == [made[priority].id for priority in (9, 6, 3, 0)]
    finally:
        stage.close()


def test_a_message_carries_what_a_worker_needs_and_nothing_of_the_user(database_url: str, redis_url: str) -> None:
    import redis

    stage = Stage(database_url, broker=redis_url)
    try:
        job = stage.sidejob.enqueue("stage.call", (12345,), state={"secret": 1})
        with redis.Redis.from_url(redis_url) as client:
            (text,) = client.lrange("celery", 0, -1)
        message = json.loads(text)
        assert message["headers"]["sidejob"] == {"v": 1, "job": job.id, "for_run": 1}
        assert message["headers"]["id"] == job.task_id
        assert b"12345" not in text
        stage.runtime.connections.write_behind_now()
        assert stage.sql("SELECT published_at IS NOT NULL FROM messages") == [(True,)]
    finally:
        stage.close()
