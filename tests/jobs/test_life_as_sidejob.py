"""What jobs of SideJob do in their life, and ours do as well, where no other test tells it; by the SJ numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from celery_sidejob import (
    ChildNameTakenError,
    InvalidPortError,
    InvalidValueError,
    Job,
    JobNotFoundError,
    RunningJob,
    StoreUnavailableError,
    UnknownTaskError,
    job_status_changed,
)
from tests.tools.in_process import Stage
from tests.tools.proxy import TcpProxy


@pytest.fixture
def moves() -> Iterator[list[tuple[int, str | None, str]]]:
    """The changes of status that are told from now on: (job, before, after)."""
    told: list[tuple[int, str | None, str]] = []

    def note(sender: str, job_id: int, before: str | None, after: str, **_: Any) -> None:
        told.append((job_id, before, after))

    job_status_changed.connect(note, weak=False)
    yield told
    job_status_changed.disconnect(note)


def raises(job: RunningJob) -> None:
    raise ValueError("no")


# -- making and finding ----------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "an unknown task": (UnknownTaskError, {"task": "no.such"}),
    "a parent and no name": (InvalidValueError, {"child_name": None}),
    "a name and no parent": (InvalidValueError, {"parent": None}),
    "a name that is taken": (ChildNameTakenError, {"child_name": "taken"}),
    "a parent that is not there": (JobNotFoundError, {"parent": 10**9}),
    "a port's bad name": (InvalidPortError, {"inports": {"a.b": {}}}),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_job_that_is_refused_leaves_nothing_behind(stage: Stage, why: str) -> None:
    """SJ-010, SJ-016, SJ-017, SJ-023: neither the job nor a part of it, nor a message."""
    error, options = REFUSED[why]
    parent = stage.job()
    parent.enqueue(stage.idle, child_name="taken")
    before = stage.everything(without=("published_at", "next_check_at"))

    with pytest.raises(error):
        stage.sidejob.enqueue(**{
            "task": stage.idle, "parent": parent, "child_name": "new", "inports": ["a"], "state": {"a": 1}, **options,
        })  # fmt: skip

    assert stage.everything(without=("published_at", "next_check_at")) == before


@pytest.mark.parametrize("ports", [(), ("a",)], ids=["made in one statement", "in several"])
def test_a_call_that_is_refused_draws_no_id_and_an_id_is_never_used_again(stage: Stage, ports: Sequence[str]) -> None:
    """SJ-010, SJ-012."""

    @stage.task(name="stage.numbered", inports=ports)
    def numbered(job: RunningJob) -> None:
        pass

    first = numbered.enqueue()
    with pytest.raises(UnknownTaskError):
        stage.sidejob.enqueue("no.such")
    second = numbered.enqueue()
    assert second.id == first.id + 1

    second.terminate()
    stage.drain()
    assert second.delete()
    assert numbered.enqueue().id == second.id + 1


def test_each_run_is_given_the_arguments(stage: Stage) -> None:
    """SJ-014."""
    given: list[Any] = []

    @stage.task(name="stage.noting")
    def noting(job: RunningJob, *args: Any, **kwargs: Any) -> None:
        given.append((args, kwargs))

    job = noting.enqueue((1, [2]), {"a": {"b": 3}})
    stage.run(job)
    job.run()
    stage.run(job)
    noting.enqueue()
    stage.drain()

    assert given == [((1, [2]), {"a": {"b": 3}})] * 2 + [((), {})]
    assert (job.info["args"], job.info["kwargs"]) == ([1, [2]], {"a": {"b": 3}})


def test_who_made_a_job_is_nobody_unless_a_job_made_it_or_it_is_said(stage: Stage) -> None:
    """SJ-022, SJ-211."""
    parent = stage.inside(lambda job: job.enqueue(stage.idle, child_name="by a run"))
    parent.enqueue(stage.idle, child_name="by a client")
    parent.enqueue(stage.idle, child_name="as is said", created_by="user:7")

    made_by = {name: child.created_by for name, child in parent.children.items()}
    assert made_by == {"by a run": f"job:{parent.id}", "by a client": None, "as is said": "user:7"}
    with pytest.raises(TypeError, match="parent"):
        parent.enqueue(stage.idle, child_name="of another", parent=stage.job())


def test_only_a_whole_number_is_an_id(stage: Stage) -> None:
    """SJ-033."""
    job = stage.job()
    for text in (f"{job.id}abc", f" {job.id}", f"+{job.id}", f"{job.id}.0", "abc", "0"):
        assert stage.sidejob.find(text) is None


def test_a_store_that_is_away_is_not_a_job_that_is_not_there(database_url: str) -> None:
    """SJ-034, WS-15."""
    with TcpProxy.to(database_url) as proxy:
        stage = Stage(proxy.url_for(database_url), outside=database_url)
        try:
            job = stage.job(aliases=["name"])
            proxy.refuse()
            for key in (job.id, "name", job.id + 1, "nobody"):
                with pytest.raises(StoreUnavailableError):
                    stage.sidejob.find(key)
        finally:
            stage.close()


VERBS: dict[str, Callable[[Stage, Job], Any]] = {
    "run": lambda stage, job: job.run(),
    "run by force": lambda stage, job: job.run(force=True),
    "run later": lambda stage, job: job.run(countdown=60),
    "run the parent": lambda stage, job: job.run(parent=True),
    "terminate": lambda stage, job: job.terminate(),
    "terminate all": lambda stage, job: job.terminate(recursive=True),
    "delete": lambda stage, job: job.delete(),
    "enqueue": lambda stage, job: job.enqueue(stage.idle, child_name="a"),
    "adopt": lambda stage, job: job.adopt(stage.sidejob.get("orphan"), "a"),
    "be adopted": lambda stage, job: stage.sidejob.get("orphan").adopt(job, "a"),
    "disown": lambda stage, job: job.disown("a"),
    "add_alias": lambda stage, job: job.add_alias("a"),
    "remove_alias": lambda stage, job: job.remove_alias("a"),
    "set": lambda stage, job: job.set(a=1),
    "unset": lambda stage, job: job.unset("a"),
    "configure_ports": lambda stage, job: job.configure_ports(inports=["a"]),
    "write": lambda stage, job: job.input("a").write(1),
    "set a default": lambda stage, job: setattr(job.input("a"), "default", 1),
    "set channels": lambda stage, job: setattr(job.input("a"), "channels", ["/a"]),
    "info": lambda stage, job: stage.sidejob.get(job.id).info,
}


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_finds_a_job_that_is_deleted_or_leaves_anything_of_it(stage: Stage, verb: str) -> None:
    """SJ-044, SJ-088, SJ-211, SJ-235, SJ-236; with a handle that was there before."""
    stage.job(aliases=["orphan"])
    job = stage.job(inports=["a"])
    job.terminate()
    stage.drain()
    assert job.delete()
    before = stage.everything()

    with pytest.raises(JobNotFoundError, match=rf"no job {job.id}\b"):
        VERBS[verb](stage, job)

    assert stage.everything() == before


# -- status ----------------------------------------------------------------------------------------------------------


def test_a_status_is_changed_by_verbs_alone(stage: Stage) -> None:
    """SJ-053."""
    job: Any = stage.job()
    with pytest.raises(AttributeError):
        job.status = "completed"
    assert job.refresh().status == "queued"


def test_a_status_that_stays_is_not_told_again(stage: Stage, moves: list[Any]) -> None:
    """SJ-055, SJ-107: and a termination needs no second one."""
    job = stage.job()
    job.run()
    assert moves == [(job.id, None, "queued")]
    job.terminate()
    job.terminate()
    assert moves[1:] == [(job.id, "queued", "terminating")]
    assert stage.row_counts()["messages"] == 1
    stage.drain()
    assert moves[2:] == [(job.id, "terminating", "terminated")]
    job.terminate()
    assert len(moves) == 3
    assert stage.row_counts()["messages"] == 0


def test_a_status_change_is_written_to_no_port(stage: Stage) -> None:
    """SJ-057: so no log and no job of users can be fed by it."""
    job = stage.job()
    ears = [f"/sidejob/job/{job.id}", "/"]
    listener = stage.inside(lambda running: None, inports={"ear": {"channels": ears}})
    stage.run(job)
    job.terminate()
    stage.drain()
    assert len(listener.input("ear")) == 0
    assert listener.refresh().status == "completed"


# -- asking ----------------------------------------------------------------------------------------------------------


def test_what_is_asked_of_the_parent_has_its_force_and_its_time(stage: Stage) -> None:
    """SJ-085, SJ-086: and the child stays as it is."""
    parent = stage.job(raises)
    stage.drain()
    child = stage.idle.enqueue(parent=parent, child_name="kid", countdown=3600)
    before = stage.sql("SELECT * FROM jobs WHERE id = %s", child.id)

    assert child.run(parent=True) is None
    assert parent.refresh().status == "failed"
    asked = child.run(parent=True, force=True, countdown=60)
    assert (asked, parent.refresh().status) == (parent, "queued")
    assert stage.sql("SELECT ask, due_at > now() FROM timers WHERE job_id = %s", parent.id) == [("force", True)]
    assert stage.sql("SELECT * FROM jobs WHERE id = %s", child.id) == before


def test_an_eta_goes_before_a_countdown_and_one_that_has_passed_is_now(stage: Stage) -> None:
    """SJ-087."""
    job = stage.inside(lambda job: None)
    in_an_hour = datetime.now(UTC) + timedelta(hours=1)
    job.run(eta=in_an_hour, countdown=1)
    assert stage.sql("SELECT due_at FROM timers") == [(in_an_hour,)]
    assert job.refresh().status == "queued"
    assert stage.drain() == 0

    job.run(eta=datetime(2020, 1, 1, tzinfo=UTC))
    assert stage.drain() == 1
    assert stage.sql("SELECT due_at FROM timers") == [(in_an_hour,)]


# -- terminating and deleting ----------------------------------------------------------------------------------------


def test_a_recursive_termination_goes_on_below_what_is_terminated(stage: Stage) -> None:
    """SJ-105."""
    root = stage.job()
    middle = root.enqueue(stage.idle, child_name="middle")
    leaf = middle.enqueue(stage.idle, child_name="leaf")
    middle.terminate()
    stage.drain()
    assert (middle.refresh().status, leaf.refresh().status) == ("terminated", "completed")

    root.terminate(recursive=True)
    stage.drain()
    assert {job.refresh().status for job in (root, middle, leaf)} == {"terminated"}


def test_a_deleted_child_leaves_its_parent_and_frees_its_names(stage: Stage) -> None:
    """SJ-067, SJ-115, SJ-116: the parent is not asked."""
    parent = stage.job()
    child = parent.enqueue(stage.idle, child_name="kid", aliases=["first", "second"])
    child.terminate()
    stage.drain()
    runs = parent.refresh().info["run_no"]

    assert child.delete()

    assert parent.children == {}
    assert stage.drain() == 0
    assert (parent.refresh().status, parent.info["run_no"]) == ("completed", runs)
    assert stage.sidejob.find("first") is None
    again = parent.enqueue(stage.idle, child_name="kid", aliases=["first", "second"])
    assert stage.sidejob.get("second") == again


# -- deliveries and runs ---------------------------------------------------------------------------------------------


def resting(stage: Stage, status: str) -> Job:
    """A job in this status, for which no run is owed."""
    if status == "failed":
        job = stage.job(raises)
        stage.drain()
    elif status == "running":
        job = stage.job()
        stage.claim(job)
    else:
        job = stage.inside((lambda job: job.suspend()) if status == "suspended" else (lambda job: None))
    if status in ("terminated", "deleted"):
        job.terminate()
        stage.drain()
    if status == "deleted":
        assert job.refresh().delete()
    return job


@pytest.mark.parametrize("status", ["running", "suspended", "completed", "failed", "terminated", "deleted"])
def test_a_delivery_begins_nothing_where_no_run_is_owed(stage: Stage, status: str) -> None:
    """SJ-150, SJ-151: a copy of an older message, and one for the next run that nobody has asked for."""
    parent = stage.job()
    stage.drain()
    job = resting(stage, status)
    if status != "deleted":
        assert job.refresh().status == status
        parent.adopt(job, "kid")
    before = stage.everything(without=("published_at", "next_check_at"))

    for for_run in (1, 2, 3):
        assert stage.claim(Job(job.id, runtime=stage.runtime, row=job._row), for_run=for_run) is None

    assert stage.everything(without=("published_at", "next_check_at")) == before


def test_during_a_run_the_job_is_running_and_has_begun(stage: Stage) -> None:
    """SJ-152, SJ-154, SJ-166: `ran_at` is this run's beginning, and the run publishes nothing."""
    begun: list[datetime] = []

    def body(job: RunningJob) -> None:
        shown = job.info
        begun.append(shown["ran_at"])
        assert stage.sql("SELECT status, ran_at FROM jobs") == [("running", begun[-1])]
        assert (shown["status"], job.ran_at) == ("running", begun[-1])

    job = stage.job(body)
    assert (job.status, job.ran_at) == ("queued", None)
    with stage.app.connection() as connection:
        published = connection.default_channel._size("celery")
        assert stage.run(job) == "completed"
        assert connection.default_channel._size("celery") == published
    job.run()
    assert stage.run(job) == "completed"
    assert begun[1] > begun[0]
    assert job.refresh().ran_at == begun[1]


ENDS: dict[str, Callable[[RunningJob], Any]] = {
    "completed": lambda job: None,
    "suspended": lambda job: job.suspend(),
    "failed": raises,
    "terminated": lambda job: None,
}


@pytest.mark.parametrize("end", ENDS)
def test_each_end_of_a_run_asks_the_parent(stage: Stage, end: str) -> None:
    """SJ-153, SJ-177, SJ-181."""
    parent = stage.job()
    stage.drain()
    child = stage.job(ENDS[end], parent=parent, child_name="kid")
    if end == "terminated":
        child.terminate()
    hold = stage.claim(child)
    assert hold is not None
    assert parent.refresh().status == "completed"

    stage.perform(hold)

    assert (child.refresh().status, parent.refresh().status) == (end, "queued")


def test_a_run_that_is_tried_again_asks_no_parent(stage: Stage) -> None:
    """SJ-153."""

    def body(job: RunningJob) -> None:
        raise job.retry(countdown=3600)

    parent = stage.job()
    stage.drain()
    stage.run(stage.job(body, parent=parent, child_name="kid"))
    assert parent.refresh().status == "completed"


def test_a_run_that_is_asked_for_again_is_not_left_suspended(stage: Stage) -> None:
    """SJ-179."""

    def body(job: RunningJob) -> None:
        if job.run_no == 1:
            stage.outside(lambda: Job(job.id, runtime=stage.runtime).run())
        job.suspend()

    job = stage.job(body)
    assert stage.run(job) == "queued"
    assert stage.run(job) == "suspended"


def test_a_startup_that_raises_or_suspends_is_done_again_and_leaves_nobody_stuck(stage: Stage) -> None:
    """SJ-167, SJ-168, WS-24."""
    happened: list[str] = []

    @stage.task(name="stage.starting")
    def starting(job: RunningJob) -> None:
        happened.append("run")

    @starting.on_startup
    def _(job: RunningJob) -> None:
        happened.append(f"startup {len(happened)}")
        if len(happened) == 1:
            job.set(lost=True)
            raise ValueError("no")
        if len(happened) == 2:
            job.set(kept=True)
            job.suspend()

    job = starting.enqueue()
    with pytest.raises(ValueError, match="no"):
        stage.run(job)
    assert (job.refresh().status, job.state) == ("failed", {})
    job.run(force=True)
    assert stage.run(job) == "suspended"
    assert job.state == {"kept": True}
    job.run()
    assert stage.run(job) == "completed"
    assert happened == ["startup 0", "startup 1", "run"]


# -- family and state ------------------------------------------------------------------------------------------------


def test_adoption_and_disowning_ask_nobody(stage: Stage) -> None:
    """SJ-215, SJ-216."""
    parent, child = stage.job(), stage.job()
    stage.drain()
    parent.adopt(child, "kid")
    parent.disown("kid")
    assert {job.refresh().status for job in (parent, child)} == {"completed"}
    assert stage.drain() == 0


def test_fibonacci_by_two_children_for_each_job(stage: Stage) -> None:
    """SJ-218: the ends of children and what they write wake their parents, and a sum is written once."""

    @stage.task(name="stage.fibonacci", outports=["sum"])
    def fibonacci(job: RunningJob, number: int) -> None:
        if number < 3:
            job.output("sum").write(1)
            return
        if not job.children:
            for before in (1, 2):
                job.enqueue(fibonacci, (number - before,), child_name=f"{before} before")
        below = job.children.values()
        if not all(child.status == "completed" for child in below):
            job.suspend()
        if not job.get("done"):
            job.set(done=True)
            job.output("sum").write(sum(child.output("sum").read() for child in below))

    root = fibonacci.enqueue((6,))
    stage.drain()
    assert root.refresh().status == "completed"
    assert list(root.output("sum")) == [8]
    assert stage.sidejob.count_jobs() == {"completed": 15}


def test_a_parent_feeds_its_child_in_two_phases(stage: Stage) -> None:
    """SJ-219: it spawns a child and suspends, feeds it and asks it again, suspends, and collects."""

    def doubling(job: RunningJob) -> None:
        for number in job.input("in"):
            job.output("out").write(2 * number)
        if not job.get("done"):
            job.set(done=True)
            job.suspend()

    def parent(job: RunningJob) -> None:
        phase = job.get("phase", 0)
        job.set(phase=phase + 1)
        if phase == 0:
            stage.job(doubling, parent=job, child_name="double")
            job.suspend()
        child = job.child("double")
        assert child is not None
        if phase == 1:
            child.input("in").write_many([1, 2, 3])
            job.suspend()
        if child.status != "completed":
            job.suspend()
        job.set(sums=list(child.output("out")))

    job = stage.job(parent)
    stage.drain()
    assert (job.refresh().status, job.get("sums")) == ("completed", [2, 4, 6])


def test_a_handle_keeps_no_state_of_its_own(stage: Stage) -> None:
    """SJ-233, SJ-234."""
    one, other = stage.job(), None
    other = stage.sidejob.get(one.id)
    for value in (1, None, [1, {"a": 2}], "text"):
        one.set(a=value)
        assert (other.get("a", "nothing"), other.state) == (value, {"a": value})
    other.unset("a")
    assert one.state == {}
