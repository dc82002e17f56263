"""Another client changes ports between two turns of a run, which keeps the rows of ports that it has read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_sidejob import Job, JobNotFoundError, PortNotFoundError, RunningJob
from celery_sidejob.operations.runs import runs
from celery_sidejob.store import ports
from tests.tools.in_process import Stage

CHANGED_BEFORE = 3
"""The turn in which the other client makes its change: the rows were read in the first, and kept in the second."""

Turn = Callable[[RunningJob, int], Any]
Turns = Callable[..., None]


@pytest.fixture
def turns(stage: Stage) -> Turns:
    """Runs a job whose body does four turns, and has another client make a change in between."""

    def run(turn: Turn, change: Callable[[], Any], **options: Any) -> None:
        def body(job: RunningJob) -> None:
            for value in job.for_inputs("i"):
                if value == CHANGED_BEFORE:
                    stage.outside(change)
                turn(job, value)

        job = stage.job(body, **options)
        job.input("i").write_many([1, 2, 3, 4])
        stage.run(job)

    return run


@pytest.fixture
def target(stage: Stage) -> Job:
    """A job to whose ports the turns write; its task has none."""

    @stage.task(name="without.ports")
    def without_ports(job: RunningJob) -> None:
        pass

    return without_ports.enqueue(inports=["known", "*"], outports=["known", "*"])  # type: ignore[no-any-return]


def found(job: Job, name: str) -> list[Any]:
    return [packet.value for packet in job.input(name).peek()]


@pytest.mark.parametrize("name", ["known", "any"])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([[], ["known", "any"]], [3, 4]),
        ([["*"]], [3, 4]),
        ([["known", "any"]], {"known": [1, 2, 3, 4], "any": [1, 2, 3, 4]}),
        ([["known", "any", "*"]], [1, 2, 3, 4]),
    ],
    ids=["made anew", "made by a pattern", "the pattern goes", "the same"],
)
def test_a_turn_writes_to_the_port_that_is_there(
    turns: Turns, target: Job, name: str, changes: list[list[str]], expected: Any
) -> None:
    def change() -> None:
        for inports in changes:
            target.configure_ports(inports=inports)

    turns(lambda _, value: target.input(name).write(value), change)
    assert found(target, name) == (expected[name] if isinstance(expected, dict) else expected)


def test_a_turn_writes_to_a_port_that_was_made_since(turns: Turns, target: Job) -> None:
    target.configure_ports(inports=["old"])
    turns(
        lambda _, value: target.input("old" if value < CHANGED_BEFORE else "new").write(value),
        lambda: target.configure_ports(inports=["old", "new"]),
    )
    assert (found(target, "old"), found(target, "new")) == ([1, 2], [3, 4])


def test_a_turn_writes_to_a_port_that_another_client_has_made_by_the_pattern(turns: Turns, target: Job) -> None:
    turns(
        lambda _, value: target.input("known" if value < CHANGED_BEFORE else "any").write(value),
        lambda: target.input("any").write(0),
    )
    assert (found(target, "known"), found(target, "any")) == ([1, 2], [0, 3, 4])


@pytest.mark.parametrize("name", ["known", "any"])
def test_a_turn_is_refused_whose_port_is_gone(stage: Stage, turns: Turns, target: Job, name: str) -> None:
    with pytest.raises(PortNotFoundError, match="has no input port"):
        turns(
            lambda _, value: target.input(name).write(value),
            lambda: target.configure_ports(inports=["other"]),
        )
    assert stage.sql("SELECT value::text FROM packets ORDER BY id") == [("3",), ("4",)], "the turns that are left"


@pytest.mark.parametrize("owner", ["run", "target"])
@pytest.mark.parametrize(
    ("before", "after", "expected"), [([], ["/sums"], [3, 4]), (["/sums"], [], [1, 2]), (["/old"], ["/sums"], [3, 4])]
)
def test_a_turn_publishes_to_the_channels_that_the_port_has(
    stage: Stage, turns: Turns, target: Job, owner: str, before: list[str], after: list[str], expected: list[int]
) -> None:
    subscriber = stage.job(inports={"i": {"channels": ["/sums"]}})
    written: list[Job] = [target]

    def turn(job: RunningJob, value: int) -> None:
        if owner == "run":
            written[0] = Job(job.id, runtime=stage.runtime)
        if value == 1:
            written[0].output("known").channels = before
        written[0].output("known").write(value)

    turns(turn, lambda: setattr(written[0].output("known"), "channels", after))
    assert found(subscriber, "i") == expected
    assert [packet.value for packet in written[0].output("known").peek()] == [1, 2, 3, 4]


def test_a_turn_publishes_to_channels_that_the_run_itself_has_set(stage: Stage, turns: Turns) -> None:
    subscriber = stage.job(inports={"i": {"channels": ["/sums"]}})

    def turn(job: RunningJob, value: int) -> None:
        job.output("o").write(value)
        if value == CHANGED_BEFORE:
            job.output("o").channels = ["/sums"]

    turns(turn, lambda: None)
    assert found(subscriber, "i") == [3, 4]


def test_what_was_written_by_then_wakes_the_parent_that_a_job_has_by_then(stage: Stage, turns: Turns) -> None:
    before, after = stage.job(), stage.job()
    stage.drain()
    asked: list[Any] = []

    def turn(job: RunningJob, value: int) -> None:
        asked.append([wakes for (wakes,) in stage.sql("SELECT wakes FROM jobs ORDER BY id LIMIT 2")])
        job.output("o").write(value)

    def move() -> None:
        child = before.children["c"]
        before.disown("c")
        after.adopt(child, "c")

    turns(turn, move, parent=before, child_name="c")
    first = asked[0]
    assert [[now - then for now, then in zip(wakes, first, strict=True)] for wakes in asked] == [
        [0, 0], [1, 0], [2, 0], [2, 1],
    ]  # fmt: skip


@pytest.mark.parametrize("change", ["default", "made anew", "nothing"])
def test_a_turn_sets_the_default_of_the_port_that_is_there(turns: Turns, target: Job, change: str) -> None:
    def make_anew() -> None:
        target.configure_ports()
        target.configure_ports(inports=["known"])

    changes = {
        "default": lambda: setattr(target.input("known"), "default", 0),
        "made anew": make_anew,
        "nothing": lambda: None,
    }
    turns(lambda _, value: setattr(target.input("known"), "default", value), changes[change])
    assert target.input("known").default == 4


def test_a_default_that_another_client_sets_stays(turns: Turns, target: Job) -> None:
    turns(lambda _, value: target.input("known").write(value), lambda: setattr(target.input("known"), "default", 0))
    assert (found(target, "known"), target.input("known").default) == ([1, 2, 3, 4], 0)


def test_a_job_that_is_deleted_refuses_the_turn(turns: Turns, stage: Stage) -> None:
    target = stage.job(inports=["known"])
    stage.drain()
    with pytest.raises(JobNotFoundError):
        turns(
            lambda _, value: target.input("known").write(value),
            lambda: (target.terminate(), stage.drain(), target.delete()),
        )


@pytest.mark.parametrize(("most", "reads"), [(4, 2), (3, 5)])
def test_a_run_keeps_few_rows(
    turns: Turns, target: Job, monkeypatch: pytest.MonkeyPatch, most: int, reads: int
) -> None:
    """The body reads the four ports once to know that they are there, and then the commits read them."""
    real, read = ports.of_jobs, []

    def of_jobs(executor: Any, ids: Any) -> Any:
        read.extend(job_id for job_id in ids if job_id == target.id)
        return real(executor, ids)

    monkeypatch.setattr(ports, "of_jobs", of_jobs)
    monkeypatch.setattr(runs, "KEPT_PORTS", most)
    turns(lambda _, value: target.input("known").write(value), lambda: None)
    assert (len(read), found(target, "known")) == (reads, [1, 2, 3, 4])
