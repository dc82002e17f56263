"""Steps: a body goes on behind its last finished step, whatever ends its runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import chain, group
from celery.exceptions import SoftTimeLimitExceeded
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from celery_sidejob import (
    NO_DATA,
    ChildFailedError,
    IllegalMoveError,
    InvalidValueError,
    Job,
    PortFullError,
    RunningJob,
    SettingsError,
    Status,
    StepFailedError,
    StepNameError,
    UnitNotCommittedError,
    UnknownTaskError,
)
from celery_sidejob.model.changes import KeepStep
from celery_sidejob.model.crash_points import AnswerLost, Died, acting
from celery_sidejob.model.steps import MOST_STEPS
from celery_sidejob.operations.runs import measuring, recovery
from celery_sidejob.store.connection.own_executor import OwnExecutor
from celery_sidejob.store.statement import Statement
from celery_sidejob.store.steps import keep_alone
from tests.tools.in_process import EMPTY, Stage


class Calls:
    """Functions for steps, which count how often they were called."""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()

    def __call__(self, name: str, value: Any = None) -> Any:
        self.of[name] += 1
        return value

    def fails(self, name: str, times: int, error: type[Exception] = ValueError) -> str:
        self.of[name] += 1
        if self.of[name] <= times:
            raise error(f"{name} {self.of[name]}")
        return f"{name} {self.of[name]}"


def generating() -> Iterator[None]:
    """Do nothing, if its values are asked for."""
    yield


def nothing() -> None:
    """Do nothing."""


@pytest.fixture
def calls() -> Calls:
    return Calls()


def dies_at(point: str, count: int = 1) -> Callable[[str], None]:
    """An actor that has this process "die" when it comes there."""
    left = count

    def act(name: str) -> None:
        nonlocal left
        left -= name == point
        if not left:
            raise Died(point)

    return act


def killed_at(stage: Stage, job: Job, point: str, count: int = 1) -> None:
    """Do a run that dies at this point, and have it rescued."""
    hold = stage.claim(job, worker_id=stage.new_worker())
    assert hold is not None
    with pytest.raises(Died), acting(dies_at(point, count)):
        stage.perform(hold)
    assert recovery.rescue(
        stage.runtime, job.id, run_no=hold.run_no, worker_id=hold.worker_id, own=True, has_begun=True
    )


def pass_time(stage: Stage, job: Job) -> None:
    """Have all that waits for a time wait no longer."""
    stage.sql("UPDATE steps SET due_at = due_at - interval '1 year' WHERE due_at IS NOT NULL")
    stage.sql("UPDATE timers SET due_at = due_at - interval '1 year' WHERE job_id = %s", job.id)


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_a_step_is_done_once(stage: Stage, calls: Calls) -> None:
    seen = []

    def body(job: RunningJob) -> Any:
        first = job.step("first", calls, "first", (1, "a"))
        seen.append(first)
        second = job.step("second", calls.fails, "second", 1)
        return [first, second]

    job = stage.job(body)
    with pytest.raises(ValueError, match="second 1"):
        stage.run(job)
    assert [(str(step), step.value) for step in job.steps] == [("first", [1, "a"])]

    job.run(force=True)
    assert stage.run(job) == Status.COMPLETED
    assert calls.of == {"first": 1, "second": 2}
    assert seen == [[1, "a"], [1, "a"]], "a value is what it will be read as"
    assert job.steps == []


def test_the_same_name_again_is_another_step(stage: Stage, calls: Calls) -> None:
    def body(job: RunningJob) -> None:
        for number in range(3):
            assert job.step("item", calls, f"item {number}", number) == number
        job.step("last", calls.fails, "last", 1)

    job = stage.job(body)
    with pytest.raises(ValueError, match="last 1"):
        stage.run(job)
    assert [str(step) for step in job.steps] == ["item", "item#2", "item#3"]

    job.run(force=True)
    assert stage.run(job) == Status.COMPLETED
    assert calls.of == {"item 0": 1, "item 1": 1, "item 2": 1, "last": 2}


@pytest.mark.parametrize("does", [False, True])
@pytest.mark.parametrize("point", ["before", "after"])
def test_a_death_around_the_record(stage: Stage, calls: Calls, point: str, does: bool) -> None:
    def charge(job: RunningJob) -> int:
        calls("charge")
        if does:
            job.output("paid").write(job.get("paid", 0) + 1)
            job.set(paid=job.get("paid", 0) + 1)
        return 7

    def body(job: RunningJob) -> None:
        job.output("body").write("once")
        assert job.step("charge", charge, job) == 7

    job = stage.job(body)
    killed_at(stage, job, f"step:{point}-commit")
    assert len(job.output("body")) == 0
    assert job.refresh().status == Status.QUEUED

    assert stage.run(job) == Status.COMPLETED
    assert calls.of["charge"] == (2 if point == "before" else 1)
    assert [packet.value for packet in job.output("body").peek()] == ["once"]
    assert job.state == ({"paid": 1} if does else {})
    assert len(job.output("paid")) == int(does)


# -- what is committed when -------------------------------------------------------------------------------------------


def test_outside_of_steps_all_is_committed_at_the_end(stage: Stage, calls: Calls) -> None:
    def body(job: RunningJob) -> None:
        job.set(outside=job.get("outside", 0) + 1)
        job.output("outside").write(1)
        job.step("inside", job.set, inside=1)
        job.sleep("rest", seconds=60)
        job.step("later", calls, "later")

    job = stage.job(body)
    assert stage.run(job) == Status.SUSPENDED
    assert (job.state, len(job.output("outside"))) == ({"inside": 1}, 0)
    pass_time(stage, job)
    assert stage.drain() == 1
    assert job.refresh().status == Status.COMPLETED
    assert (job.state, len(job.output("outside"))) == ({"inside": 1, "outside": 1}, 1)


def test_a_step_reads_what_the_body_has_done(stage: Stage) -> None:
    seen = []

    def body(job: RunningJob) -> None:
        job.set(number=1)
        job.step("look", lambda: seen.append(job.get("number")))

    stage.inside(body)
    assert seen == [1]


def test_a_step_may_not_change_what_the_body_changes_after_it(stage: Stage) -> None:
    def key(job: RunningJob) -> None:
        job.set(number=1)
        job.step("set", job.set, number=2)

    def made(job: RunningJob) -> None:
        child = job.enqueue(stage.call, (1,), child_name="child")
        job.step("write", child.input("a").write, 1)

    with pytest.raises(IllegalMoveError, match="'number' in the state"):
        stage.inside(key)
    with pytest.raises(IllegalMoveError, match="was made outside of steps"):
        stage.inside(made)


@pytest.mark.parametrize("does", ["sets", "reads"])
def test_the_startup_is_committed_before_the_first_step(stage: Stage, calls: Calls, does: str) -> None:
    @stage.task(name="starting", inports=["a"])
    def starting(job: RunningJob) -> None:
        job.sleep("rest", seconds=60)

    @starting.on_startup
    def _(job: RunningJob) -> None:
        calls("startup")
        if does == "sets":
            job.set(begun=True)
        else:
            assert job.input("a").read() == 1

    job = starting.enqueue()
    job.input("a").write(1)
    assert stage.run(job) == Status.SUSPENDED
    assert (job.state, len(job.input("a"))) == (({"begun": True}, 1) if does == "sets" else ({}, 0))
    pass_time(stage, job)
    stage.drain()
    assert (job.refresh().status, calls.of) == (Status.COMPLETED, {"startup": 1})


def test_a_startup_that_does_nothing_is_not_repeated_behind_a_step(stage: Stage, calls: Calls) -> None:
    @stage.task(name="starting")
    def starting(job: RunningJob) -> None:
        job.step("first", calls, "first")

    @starting.on_startup
    def _(job: RunningJob) -> None:
        calls("startup")

    job = starting.enqueue()
    killed_at(stage, job, "step:after-commit")
    assert stage.run(job) == Status.COMPLETED
    assert calls.of == {"startup": 1, "first": 1}


def test_a_packet_that_was_read_outside_is_refused(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        job.input("a").read()
        job.step("step", str)

    job = stage.job(body)
    job.input("a").write(1)
    with pytest.raises(IllegalMoveError, match=r"job.receive\(port\)"):
        stage.run(job)


def test_steps_in_turns(stage: Stage, calls: Calls) -> None:
    def body(job: RunningJob) -> None:
        job.step("before", calls, "before")
        for number in job.for_inputs("a"):
            job.output("b").write(job.step("square", calls, f"square {number}", number**2))
            job.step("check", calls.fails, f"check {number}", int(number == 3))
        job.step("behind", calls, "behind")

    job = stage.job(body)
    job.input("a").write_many([2, 3, 4])
    with pytest.raises(ValueError, match="check 3 1"):
        stage.run(job)
    assert ([packet.value for packet in job.input("a").peek()], len(job.output("b"))) == ([3, 4], 1)
    assert [str(step) for step in job.steps] == ["before", "square"]

    job.run(force=True)
    assert stage.run(job) == Status.COMPLETED
    assert [packet.value for packet in job.output("b").peek()] == [4, 9, 16]
    assert calls.of == {"square 2": 1, "check 2": 1, "square 3": 1, "check 3": 2, "square 4": 1, "check 4": 1,
                        "before": 1, "behind": 1}  # fmt: skip
    assert stage.sql("SELECT count(*) FROM steps") == [(0,)]


def test_steps_of_another_packet_are_not_taken(stage: Stage, calls: Calls) -> None:
    def body(job: RunningJob) -> None:
        for number in job.for_inputs("a", commit_every=2):
            assert job.step("square", calls, f"square {number}", number**2) == number**2
            job.step("check", calls.fails, "check", 1)

    job = stage.job(body)
    job.input("a").write_many([2, 3, 4])
    with pytest.raises(ValueError, match="check 1"):
        stage.run(job)
    assert job.input("a").read() == 2, "a person takes the packet off the port"
    job.run(force=True)
    assert stage.run(job) == Status.COMPLETED
    assert calls.of == {"square 2": 1, "square 3": 1, "square 4": 1, "check": 3}


def test_a_run_of_many_turns_keeps_nothing_of_past_turns(stage: Stage) -> None:
    sizes = []

    def body(job: RunningJob) -> None:
        for number in job.for_inputs("a"):
            job.step("square", str, number, was="root")
            kept = vars(job._unit.steps).values()
            sizes.append(sum(len(one) for one in kept if isinstance(one, dict | set | list)))

    job = stage.job(body)
    job.input("a").write_many(range(6))
    assert stage.run(job) == Status.COMPLETED
    assert sizes[1:] == sizes[1:2] * 5


def test_a_later_turn_counts_its_calls_anew(stage: Stage, calls: Calls) -> None:
    def body(job: RunningJob) -> None:
        for number in job.for_inputs("a"):
            assert job.step("square", calls, f"a {number}", "of a") == "of a"
        job.step("between", calls, "between")
        for number in job.for_inputs("b"):
            assert job.step("square", calls, f"b {number}", "of b") == "of b"
            job.step("check", calls.fails, "check", 1)

    job = stage.job(body, inports={"a": {"default": 2}, "b": {"default": 2}})
    with pytest.raises(ValueError, match="check 1"):
        stage.run(job)
    job.run(force=True)
    assert stage.run(job) == Status.COMPLETED
    assert calls.of == {"a 2": 1, "b 2": 1, "between": 1, "check": 2}


def test_steps_of_another_default_are_not_taken(stage: Stage, calls: Calls) -> None:
    def body(job: RunningJob) -> None:
        for number in job.for_inputs("a"):
            assert job.step("square", calls, "square", number**2) == number**2
            job.step("check", calls.fails, "check", 1)

    job = stage.job(body, inports={"a": {"default": 2}})
    with pytest.raises(ValueError, match="check 1"):
        stage.run(job)
    job.input("a").default = 3
    job.run(force=True)
    assert stage.run(job) == Status.COMPLETED
    assert calls.of == {"square": 2, "check": 2}


@pytest.mark.parametrize("first", [{"a": 1}, {}], ids=["a packet and a default", "only defaults"])
def test_a_packet_in_the_place_of_a_default_begins_no_turn_anew(
    stage: Stage, calls: Calls, first: dict[str, int]
) -> None:
    def body(job: RunningJob) -> None:
        for both in job.for_inputs("a", "b"):
            job.step("charge", calls, f"charge {both}")
            job.sleep("rest", seconds=60)
            job.step("ship", calls, f"ship {both}")

    job = stage.job(body)
    for name in ("a", "b"):
        job.input(name).default = 0
    for name, value in first.items():
        job.input(name).write(value)
    assert stage.run(job) == Status.SUSPENDED
    job.input("b").write(2)
    stage.drain()
    assert len(job.refresh().steps) == 2, "the turn goes on"
    for _ in range(3):
        pass_time(stage, job)
        stage.drain()
    turns = [(first.get("a", 0), 0), (0, 2)] + ([(0, 0)] if first else [])
    assert job.refresh().status == Status.COMPLETED
    assert calls.of == {f"{what} {turn}": 1 for what in ("charge", "ship") for turn in turns}


def test_turns_that_read_what_the_body_wrote(stage: Stage, calls: Calls) -> None:
    def body(job: RunningJob) -> None:
        for number in job.for_inputs("a", commit_every=2):
            job.step("square", calls, f"square {number}")
            if number < 4:
                job.input("a").write(number + 1)
            else:
                job.step("check", calls.fails, "check", 1)

    job = stage.job(body)
    job.input("a").write(1)
    with pytest.raises(ValueError, match="check 1"):
        stage.run(job)
    job.run(force=True)
    stage.drain()
    assert job.refresh().status == Status.COMPLETED
    assert calls.of == {**{f"square {number}": 1 for number in (1, 2, 3, 4)}, "check": 2}


@pytest.mark.few(0)
def test_a_turn_of_very_many_ports(stage: Stage, calls: Calls) -> None:
    ports = [f"p{number}" for number in range(900)]

    def body(job: RunningJob) -> None:
        for _ in job.for_inputs(*ports):
            job.step("add", calls, "add")
            job.step("check", calls.fails, "check", 1)

    job = stage.job(body)
    for name in ports:
        job.input(name).write(1)
    with pytest.raises(ValueError, match="check 1"):
        stage.run(job)
    job.run(force=True)
    assert stage.run(job) == Status.COMPLETED
    assert calls.of == {"add": 1, "check": 2}


def test_a_failure_in_a_turn_forgets_no_step_of_the_body(stage: Stage, calls: Calls) -> None:
    def body(job: RunningJob) -> None:
        job.step("charge", calls, "of the body")
        for _ in job.for_inputs("a"):
            job.step("charge", calls.fails, "of the turn", 2, retries=1, backoff=30)

    job = stage.job(body)
    job.input("a").write(1)
    assert stage.run(job) == Status.SUSPENDED
    pass_time(stage, job)
    stage.drain()
    assert job.refresh().status == Status.FAILED
    job.run(force=True)
    assert stage.run(job) == Status.COMPLETED
    assert calls.of == {"of the body": 1, "of the turn": 3}


def test_a_caught_failure_and_an_answer_go_with_their_turn(stage: Stage, calls: Calls) -> None:
    def body(job: RunningJob) -> None:
        for _ in job.for_inputs("a"):
            with suppress(ValueError):
                job.step("charge", calls.fails, "charge", 1000)
            job.since("new pricing")
        job.sleep("rest", seconds=60)

    job = stage.job(body)
    job.input("a").write_many([1, 2])
    assert stage.run(job) == Status.SUSPENDED
    assert ([str(step) for step in job.steps], calls.of["charge"]) == (["rest"], 2)


@pytest.mark.parametrize("in_transaction", [False, True])
def test_what_the_job_is_asked_meanwhile_does_not_begin_its_steps_anew(
    stage: Stage, calls: Calls, in_transaction: bool
) -> None:
    def write(job_id: int) -> None:
        port = stage.sidejob.get(job_id).input("a")
        if in_transaction:
            with stage.connect() as connection, connection.transaction():
                port.write(1, transaction=connection)
        else:
            port.write(1)

    def body(job: RunningJob) -> str:
        job.step("charge", calls, "charge")
        stage.outside(lambda: write(job.id)) if calls.of["body"] == 0 else None
        job.output("b").write(calls("body") or 1)
        return "done"

    job = stage.job(body)
    assert stage.run(job) == Status.QUEUED
    assert len(job.output("b")) == 0
    task_id = job.task_id
    assert stage.run(job) == Status.COMPLETED
    assert job.task_id == task_id, "it is one asking"
    assert calls.of == {"charge": 1, "body": 2}
    assert len(job.output("b")) == 1


# -- errors -----------------------------------------------------------------------------------------------------------


def test_a_step_is_tried_again_later(stage: Stage, calls: Calls) -> None:
    def body(job: RunningJob) -> str:
        job.step("first", calls, "first")
        value: str = job.step("charge", calls.fails, "charge", 2, retries=2, backoff=30, retry_on=(ValueError, OSError))
        return value

    job = stage.job(body)
    assert stage.run(job) == Status.SUSPENDED
    [_, waiting] = job.steps
    assert (waiting.done, waiting.tries, waiting.error) == (False, 1, {"type": "ValueError", "message": "charge 1"})

    job.run()  # by somebody else: it changes nothing
    assert stage.run(job) == Status.SUSPENDED
    assert calls.of["charge"] == 1
    pass_time(stage, job)
    assert stage.drain() == 1
    pass_time(stage, job)
    killed = stage.drain()
    assert (killed, job.refresh().status, calls.of) == (1, Status.COMPLETED, {"first": 1, "charge": 3})


def test_each_try_waits_twice_as_long_up_to_ten_minutes(stage: Stage, calls: Calls) -> None:
    job = stage.job(lambda job: job.step("charge", calls.fails, "charge", 4, retries=4, backoff=200))
    waits = []
    for _ in range(4):
        assert stage.run(job) == Status.SUSPENDED
        [step] = job.steps
        assert [timer.due_at for timer in job.timers] == [step.due_at]
        assert step.due_at is not None
        waits.append((step.due_at - step.began_at).total_seconds())
        pass_time(stage, job)
        stage.sidejob.poll()
    assert waits == pytest.approx([200, 400, 600, 600], abs=5)
    assert stage.run(job) == Status.COMPLETED


def test_another_error_than_those_of_retry_on_is_not_tried_again(stage: Stage, calls: Calls) -> None:
    errors = iter([OSError("late"), ValueError("no")])

    def charge() -> None:
        calls("charge")
        raise next(errors)

    job = stage.job(lambda job: job.step("charge", charge, retries=5, backoff=30, retry_on=(KeyError, OSError)))
    assert stage.run(job) == Status.SUSPENDED
    pass_time(stage, job)
    stage.drain()
    assert (job.refresh().status, calls.of["charge"]) == (Status.FAILED, 2)


def test_the_tries_begin_anew_after_a_failure(stage: Stage, calls: Calls) -> None:
    def body(job: RunningJob) -> None:
        job.step("charge", calls.fails, "charge", 3, retries=1, backoff=30)

    job = stage.job(body)
    assert stage.run(job) == Status.SUSPENDED
    pass_time(stage, job)
    stage.drain()
    assert (job.refresh().status, job.steps) == (Status.FAILED, [])
    for entry in stage.sidejob.dead.list():
        stage.sidejob.dead.retry(entry.id)
    assert stage.run(job) == Status.SUSPENDED
    pass_time(stage, job)
    stage.drain()
    assert (job.refresh().status, calls.of["charge"]) == (Status.COMPLETED, 4)


def test_a_failure_forgets_no_other_step_of_its_name(stage: Stage, calls: Calls) -> None:
    def body(job: RunningJob) -> None:
        job.step("item", calls, "first")
        job.step("item", calls.fails, "second", 2, retries=1)

    job = stage.job(body)
    assert stage.run(job) == Status.SUSPENDED
    pass_time(stage, job)
    stage.drain()
    assert (job.refresh().status, [str(step) for step in job.steps]) == (Status.FAILED, ["item"])


class Declined(Exception):
    """An error that can be made again from its arguments."""

    def __init__(self, card: str, code: int) -> None:
        super().__init__(card, code)
        self.code = code


class Obscure(Exception):
    """An error that cannot."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


class Detailed(Exception):
    """An error that says more than its arguments do."""

    detail = ""

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.detail}"


@pytest.mark.parametrize("kind", [Declined, Obscure, Detailed])
def test_a_saga_takes_the_same_way_again(stage: Stage, calls: Calls, kind: type[Exception]) -> None:
    seen: list[BaseException] = []

    def charge() -> None:
        calls("charge")
        error = Detailed("visa")
        error.detail = "code 7"
        raise {Declined: Declined("visa", 7), Obscure: Obscure(code=7), Detailed: error}[kind]

    def body(job: RunningJob) -> str:
        job.step("reserve", calls, "reserve")
        try:
            job.step("charge", charge)
        except (Declined, StepFailedError) as error:
            seen.append(error)
            job.step("release", calls.fails, "release", 1)
            job.sleep("rest", seconds=60)
            return "declined"
        return "shipped"

    job = stage.job(body)
    with pytest.raises(ValueError, match="release 1"):
        stage.run(job)
    assert [str(step) for step in job.steps] == ["reserve", "charge"], "the failure is kept: the body has gone on"
    job.run(force=True)
    assert stage.run(job) == Status.SUSPENDED
    pass_time(stage, job)
    assert stage.drain() == 1
    assert job.refresh().status == Status.COMPLETED
    assert calls.of == {"reserve": 1, "charge": 1, "release": 2}
    expected = Declined if kind is Declined else StepFailedError
    assert [type(error) for error in seen] == [expected] * 3
    assert kind is Declined or isinstance(seen[0].__cause__, kind)
    assert kind is not Declined or [error.code for error in seen] == [7, 7, 7]  # type: ignore[attr-defined]


def test_a_failed_call_behind_a_failed_step_keeps_both(stage: Stage, calls: Calls) -> None:
    @stage.task(name="packs")
    def packs(_: RunningJob) -> None:
        raise ValueError("no box")

    is_new = False

    def body(job: RunningJob) -> None:
        if is_new:
            try:
                job.step("charge", calls.fails, "charge", 1)
            except ValueError:
                calls("declined")
        try:
            job.call("pack", packs)
        except ChildFailedError:
            job.step("last", calls.fails, "last", 1)

    job = stage.job(body)
    assert stage.run(job) == Status.SUSPENDED
    is_new = True
    stage.drain()
    assert job.refresh().status == Status.FAILED
    job.run(force=True)
    assert stage.run(job) == Status.COMPLETED
    assert calls.of == {"charge": 1, "declined": 2, "last": 2}


@pytest.mark.parametrize("wait", ["sleep", "call", "receive"])
def test_a_caught_failure_is_kept_by_the_wait_behind_it(stage: Stage, calls: Calls, wait: str) -> None:
    is_new = False

    def body(job: RunningJob) -> None:
        if is_new:
            with suppress(ValueError):
                job.step("charge", calls.fails, "charge", 1000)
        if wait == "sleep":
            job.sleep("rest", seconds=60)
        elif wait == "call":
            job.call("child", stage.idle)
        else:
            job.receive("answers", timeout=60)

    job = stage.job(body)
    assert stage.run(job) == Status.SUSPENDED
    is_new = True
    for _ in range(2):
        job.run()
        assert stage.run(job) == Status.SUSPENDED
    assert calls.of["charge"] == 1


@pytest.mark.parametrize("suspends", [True, False])
def test_a_caught_failure_is_kept_by_the_body_s_own_commit(stage: Stage, calls: Calls, suspends: bool) -> None:
    def body(job: RunningJob) -> None:
        try:
            job.step("charge", calls.fails, "charge", 1)
        except ValueError:
            job.output("way").write("declined")
            job.suspend() if suspends else job.checkpoint()
            return
        job.output("way").write("charged")

    job = stage.job(body)
    if suspends:
        assert stage.run(job) == Status.SUSPENDED
        job.run()
    else:
        killed_at(stage, job, "checkpoint:after-commit")
    stage.run(job)
    assert {packet.value for packet in job.output("way").peek()} == {"declined"}


def test_a_death_in_the_undo_step_leaves_the_way(stage: Stage, calls: Calls) -> None:
    def body(job: RunningJob) -> None:
        try:
            job.step("charge", calls.fails, "charge", 1)
        except ValueError:
            job.step("release", calls, "release")

    job = stage.job(body)
    killed_at(stage, job, "step:before-commit", 2)  # the failure of the first is the first
    assert stage.run(job) == Status.COMPLETED
    assert calls.of == {"charge": 1, "release": 2}


@pytest.mark.parametrize("retries", [0, 1])
def test_what_a_failed_step_did_leaves_no_trace(stage: Stage, retries: int) -> None:
    def charge(job: RunningJob) -> None:
        assert job.input("cards").read() == "visa"
        job.set(half=True)
        job.log("tried", card="visa")
        raise ValueError("no")

    def body(job: RunningJob) -> None:
        try:
            job.step("charge", charge, job, retries=retries)
        except ValueError:
            job.set(declined=True)

    job = stage.job(body)
    job.input("cards").write("visa")
    assert stage.run(job) == (Status.SUSPENDED if retries else Status.COMPLETED)
    assert (job.state, len(job.input("cards"))) == ({} if retries else {"declined": True}, 1)
    assert [entry.what for entry in job.history].count("tried") == 1
    pass_time(stage, job)
    stage.drain()
    assert (job.refresh().status, job.state, len(job.input("cards"))) == (Status.COMPLETED, {"declined": True}, 1)


def test_what_a_failed_step_has_read_is_read_again(stage: Stage) -> None:
    got = []

    def charge(job: RunningJob) -> None:
        got.append(job.input("cards").read())
        if len(got) == 1:
            raise ValueError("no")

    def body(job: RunningJob) -> None:
        with suppress(ValueError):
            job.step("charge", charge, job)
        job.step("charge again", charge, job)

    job = stage.job(body)
    job.input("cards").write_many(["visa", "other"])
    assert stage.run(job) == Status.COMPLETED
    assert (got, len(job.input("cards"))) == (["visa", "visa"], 1)


# -- in the caller's transaction --------------------------------------------------------------------------------------


class Ledger:
    """Own rows of a body, in a database that is the store's too."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.engine = create_engine(stage.database_url.replace("postgresql://", "postgresql+psycopg://"))

    def enter(self, session: Session, what: str) -> None:
        session.execute(text("INSERT INTO public.step_ledger VALUES (:what)"), {"what": what})

    @property
    def rows(self) -> list[str]:
        return [what for (what,) in self._stage.sql("SELECT what FROM public.step_ledger ORDER BY what")]


@pytest.fixture
def ledger(stage: Stage) -> Iterator[Ledger]:
    stage.sql("CREATE TABLE public.step_ledger (what text)")
    made = Ledger(stage)
    yield made
    made.engine.dispose()
    stage.sql("DROP TABLE public.step_ledger")


@pytest.mark.parametrize("inside", [True, False])
def test_own_rows_and_the_record_are_one_commit(stage: Stage, ledger: Ledger, calls: Calls, inside: bool) -> None:
    def body(job: RunningJob) -> str:
        job.set(outside=True)
        with Session(ledger.engine) as session:
            with job.step("invoice", transaction=session) as step:
                if step.is_new:
                    ledger.enter(session, "invoice")
                    job.set(inside=True)
                    step.value = {"number": (1, 2)}
                    if inside:
                        session.commit()
            if not inside:
                session.commit()
        assert step.value == {"number": [1, 2]}
        job.step("last", calls.fails, "last", 1)
        return "done"

    job = stage.job(body)
    with pytest.raises(ValueError, match="last 1"):
        stage.run(job)
    assert (ledger.rows, job.state, [step.value for step in job.steps]) == (
        ["invoice"], {"inside": True}, [{"number": [1, 2]}],
    )  # fmt: skip
    job.run(force=True)
    assert stage.run(job) == Status.COMPLETED
    assert (ledger.rows, job.state) == (["invoice"], {"inside": True, "outside": True})


@pytest.mark.parametrize("point", ["unit:before-commit", "unit:after-commit"])
def test_a_death_around_the_caller_s_commit(stage: Stage, ledger: Ledger, point: str) -> None:
    def body(job: RunningJob) -> None:
        with Session(ledger.engine) as session, job.step("invoice", transaction=session) as step:
            if step.is_new:
                ledger.enter(session, "invoice")
                step.value = 1
                session.commit()
        job.step("next", str)

    job = stage.job(body)
    killed_at(stage, job, point)
    assert stage.run(job) == Status.COMPLETED
    assert ledger.rows == ["invoice"]


def test_after_a_rollback_the_same_step_is_repeated(stage: Stage, ledger: Ledger) -> None:
    tries = []

    def body(job: RunningJob) -> None:
        for attempt in range(3):
            with Session(ledger.engine) as session, job.step("invoice", transaction=session) as step:
                assert step.is_new
                tries.append(attempt)
                ledger.enter(session, f"invoice {attempt}")
                step.value = attempt
                if attempt == 2:
                    session.commit()
        job.set(done=True)
        job.step("next", str)

    job = stage.job(body)
    assert stage.run(job) == Status.COMPLETED
    assert (tries, ledger.rows, job.state) == ([0, 1, 2], ["invoice 2"], {"done": True})


def test_a_turn_whose_block_is_repeated_leaves_no_steps(stage: Stage, ledger: Ledger, calls: Calls) -> None:
    def body(job: RunningJob) -> None:
        for number in job.for_inputs("a"):
            job.step("square", calls, "square")
            for commits in (False, True):
                with Session(ledger.engine) as session:
                    with job.unit(transaction=session):
                        ledger.enter(session, str(number))
                    session.commit() if commits else session.rollback()

    job = stage.job(body)
    job.input("a").write(1)
    assert stage.run(job) == Status.COMPLETED
    assert (ledger.rows, calls.of, stage.sql("SELECT count(*) FROM steps")) == (["1"], {"square": 1}, [(0,)])


@pytest.mark.parametrize("ends", [True, False])
def test_a_step_that_was_not_committed_stops_the_body(stage: Stage, ledger: Ledger, ends: bool) -> None:
    def body(job: RunningJob) -> None:
        with Session(ledger.engine) as session, job.step("invoice", transaction=session) as step:
            step.value = 1
        if not ends:
            job.step("next", str)

    job = stage.job(body)
    with pytest.raises(UnitNotCommittedError, match="step 'invoice'"):
        stage.run(job)
    assert job.steps == []


def test_an_error_in_the_block_of_a_step(stage: Stage, ledger: Ledger, calls: Calls) -> None:
    def body(job: RunningJob) -> None:
        try:
            with Session(ledger.engine) as session, job.step("invoice", transaction=session):
                ledger.enter(session, "invoice")
                job.set(half=True)
                calls.fails("invoice", 1)
        except ValueError:
            job.step("undo", calls, "undo")
        job.step("last", calls.fails, "last", 1)

    job = stage.job(body)
    with pytest.raises(ValueError, match="last 1"):
        stage.run(job)
    job.run(force=True)
    assert stage.run(job) == Status.COMPLETED
    assert (ledger.rows, job.state, calls.of) == ([], {}, {"invoice": 1, "undo": 1, "last": 2})


def test_a_value_is_set_once(stage: Stage, ledger: Ledger) -> None:
    def body(job: RunningJob) -> None:
        with Session(ledger.engine) as session, job.step("invoice", transaction=session) as step:
            step.value = 1
            step.value = 2

    with pytest.raises(IllegalMoveError, match="is set already"):
        stage.inside(body)


# -- waits ------------------------------------------------------------------------------------------------------------


def test_sleep_holds_no_run_and_begins_once(stage: Stage, calls: Calls) -> None:
    def body(job: RunningJob) -> None:
        job.sleep("a while", timedelta(days=3))
        job.sleep("nothing", seconds=0)
        job.sleep_until("then", datetime.now(UTC) + timedelta(days=1))
        calls("over")

    job = stage.job(body)
    assert stage.run(job) == Status.SUSPENDED
    [until] = [step.due_at for step in job.steps if not step.done]
    assert [timer.due_at for timer in job.timers] == [until]
    job.run()
    assert stage.run(job) == Status.SUSPENDED
    assert [timer.due_at for timer in job.timers] == [until] == [step.due_at for step in job.steps]
    pass_time(stage, job)
    assert stage.drain() == 1
    assert [(str(step), step.done) for step in job.steps] == [("a while", True), ("nothing", True), ("then", False)]
    pass_time(stage, job)
    assert stage.drain() == 1
    assert (job.refresh().status, calls.of["over"]) == (Status.COMPLETED, 1)


def test_sleep_until_a_time_without_a_zone_means_that_of_the_app(stage: Stage) -> None:
    stage.app.conf.timezone = "Asia/Tokyo"
    job = stage.job(lambda job: job.sleep_until("then", datetime(2040, 1, 1, 12)))
    assert stage.run(job) == Status.SUSPENDED
    assert [step.due_at for step in job.steps] == [datetime(2040, 1, 1, 3, tzinfo=UTC)]


def test_receive_takes_the_next_packet(stage: Stage) -> None:
    got = []

    def body(job: RunningJob) -> None:
        got.append([job.receive("answers"), job.receive("answers", timeout=60), job.receive("answers", timeout=60)])

    job = stage.job(body)
    assert stage.run(job) == Status.SUSPENDED
    assert job.steps == []
    job.input("answers").write_many([{"a": 1}, None])
    assert stage.run(job) == Status.SUSPENDED
    assert [(str(step), step.value, step.done) for step in job.steps] == [
        ("answers", {"a": 1}, True), ("answers#2", None, True), ("answers#3", None, False),
    ]  # fmt: skip
    assert len(job.input("answers")) == 0
    pass_time(stage, job)
    assert stage.drain() == 1
    assert (job.refresh().status, got) == (Status.COMPLETED, [[{"a": 1}, None, NO_DATA]])


def test_a_wait_begins_anew_only_if_it_was_over(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        if job.receive("answers", timeout=60) == "wrong":
            job.forget("answers")
            job.receive("answers", timeout=60)
        job.call_all("all", [stage.idle.s(), stage.idle.s()], limit=1)

    def waited_s() -> float:
        waiting = next(step for step in job.steps if not step.done)
        return (datetime.now(UTC) - waiting.began_at).total_seconds()

    def begin_earlier() -> None:
        stage.sql("UPDATE steps SET began_at = began_at - interval '1 hour'")

    job = stage.job(body)
    assert stage.run(job) == Status.SUSPENDED
    begin_earlier()
    job.input("answers").write("wrong")
    assert stage.run(job) == Status.SUSPENDED
    assert waited_s() < 60, "the second packet is awaited since now"
    job.input("answers").write("right")
    assert stage.run(job) == Status.SUSPENDED
    begin_earlier()
    assert stage.run(job.child("all/0")) == Status.COMPLETED  # type: ignore[arg-type]
    assert stage.run(job) == Status.SUSPENDED
    assert waited_s() > 3600, "the first child was awaited in this step too"


def test_receive_without_time_to_wait_does_not_rest(stage: Stage) -> None:
    got = []

    def body(job: RunningJob) -> None:
        got.append(job.receive("answers", timeout=0))
        job.receive("more")

    job = stage.job(body)
    assert stage.run(job) == Status.SUSPENDED
    job.input("answers").write("late")
    job.input("more").write(1)
    stage.drain()
    assert (job.refresh().status, got) == (Status.COMPLETED, [NO_DATA, NO_DATA]), "what was decided stays decided"


def test_what_a_step_receives_elsewhere_is_no_matter_of_the_other_job(stage: Stage) -> None:
    """Only a job's own steps tell that a late packet begins nothing anew."""
    other = stage.job(lambda job: job.step("first", str))
    assert stage.run(other) == Status.COMPLETED
    reader = stage.job(lambda job: job.receive(stage.sidejob.get(other.id).input("in")))
    other.input("in").write(1)
    assert stage.run(other) == Status.COMPLETED
    assert stage.run(reader) == Status.COMPLETED
    other.input("in").write(2)
    assert other.refresh().status == Status.QUEUED
    stage.drain()


def test_a_packet_that_comes_too_late_begins_nothing_anew(stage: Stage, calls: Calls) -> None:
    @stage.task(name="asking", inports={"answers": {"channels": ["/answers"]}, "more": {}})
    def asking(job: RunningJob) -> None:
        calls("charge")
        assert job.step("charge", calls, "step") is None
        assert job.receive("answers", timeout=60) is NO_DATA

    job = asking.enqueue()
    assert stage.run(job) == Status.SUSPENDED
    pass_time(stage, job)
    stage.drain()
    job.input("answers").write("late")
    assert job.refresh().status == Status.COMPLETED
    with stage.connect() as connection, connection.transaction():
        job.input("answers").write("later", transaction=connection)
    stage.drain()
    assert (job.refresh().status, calls.of["step"]) == (Status.COMPLETED, 1)
    assert stage.sidejob.publish("/answers", "last") == 1
    stage.drain()
    assert (job.refresh().status, calls.of["step"]) == (Status.COMPLETED, 1)
    assert len(job.input("answers")) == 3
    job.input("more").write(1)
    assert job.refresh().status == Status.QUEUED
    job.run()


def test_a_later_asking_without_steps_is_asked_again_by_what_comes_late(stage: Stage, calls: Calls) -> None:
    def body(job: RunningJob) -> None:
        calls("body")
        if calls.of["body"] == 1:
            job.step("charge", calls, "charge")

    job = stage.job(body)
    assert stage.run(job) == Status.COMPLETED
    job.run()
    assert stage.run(job) == Status.COMPLETED
    child = stage.job(lambda job: None, parent=job, child_name="late")
    assert stage.run(child) == Status.COMPLETED
    assert job.refresh().status == Status.QUEUED, "the asking that completed last had no steps to be done again"


@pytest.mark.parametrize("returns", [False, True])
def test_a_job_whose_steps_are_those_of_turns_is_asked_again_by_what_comes_late(
    stage: Stage, calls: Calls, returns: bool
) -> None:
    def body(job: RunningJob) -> None:
        for number in job.for_inputs("a"):
            job.step("square", calls, f"square {number}")
            if returns:
                return

    job = stage.job(body)
    job.input("a").write(1)
    assert stage.run(job) == Status.COMPLETED
    child = stage.job(lambda job: None, parent=job, child_name="late")
    assert stage.run(child) == Status.COMPLETED
    assert job.refresh().status == Status.QUEUED, "a further run would do none of its steps again"


def test_a_wait_that_is_swallowed_is_a_wait_all_the_same(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        try:
            job.sleep("rest", seconds=60)
        except BaseException:
            job.set(swallowed=True)

    job = stage.job(body)
    assert stage.run(job) == Status.SUSPENDED
    assert job.state == {}


def test_a_body_that_terminates_its_job_and_waits_is_terminated(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        job.set(outside=True)
        job.terminate()
        job.sleep("rest", seconds=60)

    job = stage.job(body)
    stage.run(job)
    stage.drain()
    assert (job.refresh().status, job.state) == (Status.TERMINATED, {})


def test_a_late_packet_for_the_parent_begins_nothing_anew(stage: Stage, calls: Calls) -> None:
    def body(job: RunningJob) -> None:
        job.step("charge", calls, "charge")

    job = stage.job(body)
    assert stage.run(job) == Status.COMPLETED
    child = stage.job(parent=job, child_name="child", outports=["out"])
    child.output("out").write(1)
    assert job.refresh().status == Status.COMPLETED


# -- children ---------------------------------------------------------------------------------------------------------


def test_call_waits_for_the_value_of_a_child(stage: Stage, calls: Calls) -> None:
    @stage.task(name="pack")
    def pack(job: RunningJob, order: int) -> dict[str, int]:
        calls("child")
        return {"parcel": order}

    def body(job: RunningJob) -> None:
        assert job.call("pack", pack, (7,)) == {"parcel": 7}
        assert job.call("pack", "pack", kwargs={"order": 8}, priority=3) == {"parcel": 8}
        calls("over")

    job = stage.job(body)
    assert stage.run(job) == Status.SUSPENDED
    assert [(str(step), step.kind, step.done, step.value) for step in job.steps] == [("pack", "call", False, None)]
    stage.drain()
    assert (job.refresh().status, calls.of) == (Status.COMPLETED, {"child": 2, "over": 1})
    assert sorted(job.children) == ["pack", "pack#2"]


def test_a_death_around_a_call(stage: Stage, calls: Calls) -> None:
    @stage.task(name="child")
    def child(job: RunningJob) -> int:
        calls("child")
        return 5

    def body(job: RunningJob) -> None:
        assert job.call("child", child) == 5
        calls("over")

    job = stage.job(body)
    killed_at(stage, job, "end:before-commit")
    assert job.children == {}
    stage.run(job)
    assert stage.run(job.child("child")) == Status.COMPLETED  # type: ignore[arg-type]
    killed_at(stage, job, "step:before-commit")
    killed_at(stage, job, "step:after-commit")
    stage.drain()
    assert (job.refresh().status, calls.of) == (Status.COMPLETED, {"child": 1, "over": 1})


def test_a_child_that_fails(stage: Stage, calls: Calls) -> None:
    @stage.task(name="child")
    def child(job: RunningJob) -> str:
        return calls.fails("child", 1)

    def body(job: RunningJob) -> str:
        value: str = job.call("child", child)
        return value

    job = stage.job(body)
    stage.drain()
    assert isinstance(stage.raised[job.id], ChildFailedError)
    assert job.refresh().status == Status.FAILED
    assert "ValueError: child 1" in job.info["error"]["message"]

    job.run(force=True)
    stage.drain()
    assert (job.refresh().status, calls.of["child"]) == (Status.COMPLETED, 2), "the child is asked again"


@pytest.mark.parametrize("retried", ["by its caller", "before its caller"])
def test_a_failed_child_that_is_run_again_has_a_value(stage: Stage, calls: Calls, retried: str) -> None:
    """Also if its caller alone wants the value, because the app has no result backend."""

    @stage.task(name="child", ignore_result=True)
    def child(job: RunningJob, name: str, failures: int) -> str:
        return calls.fails(name, failures)

    values: list[str] = []
    job = stage.job(lambda job: values.extend(job.call_all("all", [child.s("a", 0), child.s("b", 1)])))
    stage.drain()
    assert job.refresh().status == Status.FAILED

    if retried == "before its caller":
        job.child("all/1").run(force=True)  # type: ignore[union-attr]
        stage.drain()
    job.run(force=True)
    stage.drain()
    assert (job.refresh().status, values) == (Status.COMPLETED, ["a 1", "b 2"])


def test_a_child_that_is_asked_during_its_run_has_the_value_of_its_last_run(stage: Stage, calls: Calls) -> None:
    @stage.task(name="child", ignore_result=True)
    def child(job: RunningJob) -> str:
        if not calls.of["child"]:
            stage.outside(job.run)
        return calls.fails("child", 0)

    values: list[str] = []
    job = stage.job(lambda job: values.append(job.call("child", child)))
    stage.drain()
    assert (job.refresh().status, values) == (Status.COMPLETED, ["child 2"])


def test_a_child_that_fails_and_is_caught(stage: Stage, calls: Calls) -> None:
    @stage.task(name="child")
    def child(job: RunningJob) -> str:
        return calls.fails("child", 1)

    caught: list[list[int]] = []

    def body(job: RunningJob) -> str:
        try:
            job.call("child", child)
        except ChildFailedError as error:
            caught.append(error.children)
            job.sleep("rest", seconds=60)
            return "caught"
        return "fine"

    job = stage.job(body)
    stage.drain()
    stage.sidejob.dead.retry_all()
    pass_time(stage, job)
    stage.drain()
    assert job.refresh().status == Status.COMPLETED
    assert caught == [[job.child("child").id]] * 2  # type: ignore[union-attr]
    assert calls.of["child"] == 2
    assert job.info["run_no"] == 3, "the late end of the child does not begin a completed job anew"


def test_a_child_that_is_disowned_has_no_value_for_its_caller(stage: Stage, calls: Calls) -> None:
    @stage.task(name="child")
    def child(job: RunningJob, number: int) -> int:
        return number

    def body(job: RunningJob) -> None:
        try:
            job.call("child", child, (1,))
        except ChildFailedError as error:
            calls(str(error))
            job.sleep("rest", seconds=60)

    job = stage.job(body)
    assert stage.run(job) == Status.SUSPENDED
    disowned = job.child("child")
    assert disowned is not None
    job.disown(disowned)
    assert stage.run(job) == Status.SUSPENDED, "it is told so at once"
    assert job.timers
    pass_time(stage, job)
    stage.drain()
    assert (job.refresh().status, disowned.refresh().status) == (Status.COMPLETED, Status.COMPLETED)
    (told,) = calls.of
    assert f"job {disowned.id}: it was disowned" in told
    assert calls.of[told] == 2, "it has failed in each run"


@pytest.mark.parametrize("has_steps", [False, True])
def test_a_job_that_waits_for_no_child_is_not_asked_when_one_is_disowned(stage: Stage, has_steps: bool) -> None:
    job = stage.job(lambda job: job.step("first", str) if has_steps else None)
    assert stage.run(job) == Status.COMPLETED
    job.disown(stage.job(parent=job, child_name="child"))
    assert job.refresh().status == Status.COMPLETED


def test_a_disowned_child_is_not_asked_again(stage: Stage) -> None:
    job = stage.job(lambda job: job.call("child", stage.idle))
    stage.run(job)
    child = job.child("child")
    assert child is not None
    job.disown(child)
    for _ in range(2):
        with pytest.raises(ChildFailedError, match="it was disowned"):
            stage.run(job)
        job.run(force=True)


@pytest.mark.parametrize("limit", [None, 2])
def test_call_all(stage: Stage, calls: Calls, limit: int | None) -> None:
    busy: set[int] = set()

    @stage.task(name="measure")
    def measure(job: RunningJob, number: int) -> int:
        calls(f"measure {number}")
        busy.add(len(stage.sql("SELECT id FROM jobs WHERE parent_id IS NOT NULL AND status <> 'completed'")))
        return number * 10

    def body(job: RunningJob) -> None:
        assert job.call_all("none", []) == []
        assert job.call_all("all", [measure.s(number) for number in range(5)], limit=limit) == [0, 10, 20, 30, 40]
        calls("over")

    job = stage.job(body)
    stage.drain()
    assert job.refresh().status == Status.COMPLETED, job.info["error"]
    assert calls.of == {f"measure {number}": 1 for number in range(5)} | {"over": 1}
    assert sorted(job.children) == [f"all/{number}" for number in range(5)]
    assert max(busy) == (limit or 5)


def test_call_all_raises_once_all_have_ended(stage: Stage, calls: Calls) -> None:
    @stage.task(name="measure")
    def measure(job: RunningJob, number: int) -> int:
        if number == 1:
            calls.fails("measure", 1)
        return number

    def body(job: RunningJob) -> None:
        job.call_all("all", [measure.s(number) for number in range(3)])

    job = stage.job(body)
    stage.drain()
    assert job.refresh().status == Status.FAILED
    failed = stage.raised[job.id]
    assert isinstance(failed, ChildFailedError)
    assert failed.children == [job.child("all/1").id]  # type: ignore[union-attr]
    assert [child.status for child in job.children.values()] == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]
    job.run(force=True)
    stage.drain()
    assert job.refresh().status == Status.COMPLETED


def test_call_all_asks_no_more_failed_children_again_than_its_limit(stage: Stage, calls: Calls) -> None:
    busy: list[int] = []

    @stage.task(name="measure")
    def measure(job: RunningJob, number: int) -> int:
        busy.append(stage.sql("SELECT count(*) FROM jobs WHERE parent_id IS NOT NULL AND status = 'queued'")[0][0] + 1)
        calls.fails(f"measure {number}", 2 if number in (1, 5) else 1)
        return number

    job = stage.job(lambda job: job.call_all("all", [measure.s(number) for number in range(7)], limit=2))
    stage.drain()
    for again in (7, 2):
        assert job.refresh().status == Status.FAILED
        failed = stage.raised[job.id]
        assert isinstance(failed, ChildFailedError)
        assert len(failed.children) == again
        busy.clear()
        job.run(force=True)
        stage.drain()
        assert (len(busy), max(busy)) == (again, 2)
    assert job.refresh().status == Status.COMPLETED


def test_call_all_is_given_the_same_children_in_each_run(stage: Stage) -> None:
    numbers = [1, 2, 3]
    job = stage.job(lambda job: job.call_all("all", [stage.idle.s() for _ in numbers], limit=1))
    assert stage.run(job) == Status.SUSPENDED
    numbers.pop()
    stage.drain()
    assert job.refresh().status == Status.FAILED
    assert f"job {job.id} has called 2 of 3 children and is given 2 now" in str(stage.raised[job.id])


def test_the_error_of_many_children_names_ten(stage: Stage) -> None:
    @stage.task(name="measure")
    def measure(job: RunningJob) -> float:
        return 1 / 0

    job = stage.job(lambda job: job.call_all("all", [measure.s() for _ in range(12)]))
    stage.drain()
    failed = stage.raised[job.id]
    assert isinstance(failed, ChildFailedError)
    assert len(failed.children) == 12
    assert str(failed).count("ZeroDivisionError") == 10
    assert str(failed).endswith("; and 2 more")


@pytest.mark.parametrize("limit", [None, 1])
def test_what_is_called_is_checked_before_a_child_is_made(stage: Stage, limit: int | None) -> None:
    plain = stage.app.task(nothing, name="plain", shared=False)
    durable = stage.app.task(nothing, name="durable", durable=True, shared=False)
    for wrong, error, says in (
        (plain, UnknownTaskError, "'plain' is an ordinary task: decorate it with @sidejob_task"),
        ("plain", UnknownTaskError, "'plain' is an ordinary task"),
        (plain.s(), UnknownTaskError, "'plain' is an ordinary task"),
        (durable, UnknownTaskError, "'durable' is a durable task: decorate it with @sidejob_task"),
        ("durable", UnknownTaskError, "'durable' is a durable task"),
        ("no.such", UnknownTaskError, "No sidejob task 'no.such' is registered"),
        (chain(stage.idle.s(), stage.idle.s()), UnknownTaskError, "A chain makes no job: make one of each"),
        (group(stage.idle.s(), stage.idle.s()), UnknownTaskError, "A group makes no job"),
        (nothing, UnknownTaskError, "is not a task: give a sidejob task, its name, or a signature of it"),
        (stage.idle.s().set(unique="key"), InvalidValueError, "calls a job with unique="),
    ):
        for call in (
            lambda job, wrong=wrong: job.call("pack", wrong),
            lambda job, wrong=wrong: job.call_all("pack", [stage.idle.s(), wrong], limit=limit),
        ):
            job = stage.job(call)
            with pytest.raises(error, match=says):
                stage.run(job)
            assert (job.children, job.steps) == ({}, [])
    with pytest.raises(InvalidValueError, match=r"args\[0\]: a value of type object"):
        stage.inside(lambda job: job.call("pack", stage.call, (object(),)))


def test_what_is_called_is_a_child_of_its_own(stage: Stage) -> None:
    with pytest.raises(InvalidValueError, match="calls a job with unique="):
        stage.inside(lambda job: job.call("child", stage.idle, unique="key"))
    other = stage.job()
    with pytest.raises(InvalidValueError, match="calls a job with unique="):
        stage.inside(lambda job: job.call("child", stage.idle, parent=other.id, child_name="mine"))


def test_a_step_that_finds_a_port_full_waits_for_room(stage: Stage, calls: Calls) -> None:
    reader = stage.job(inports={"in": {"limit": 1}})
    reader.input("in").write(1)

    def write() -> None:
        calls("write")
        reader.input("in").write(2)

    def body(job: RunningJob) -> None:
        job.step("first", calls, "first")
        job.step("write", write)

    job = stage.job(body)
    assert stage.run(job) == Status.SUSPENDED
    assert [str(step) for step in job.steps] == ["first"]
    assert reader.input("in").read() == 1
    stage.drain()
    assert (job.refresh().status, calls.of) == (Status.COMPLETED, {"first": 1, "write": 2})
    assert reader.input("in").read() == 2


@pytest.mark.parametrize("in_transaction", [True, False])
def test_a_step_that_can_never_fit_into_a_port_fails(stage: Stage, ledger: Ledger, in_transaction: bool) -> None:
    reader = stage.job(inports={"in": {"limit": 1}})

    def body(job: RunningJob) -> None:
        if not in_transaction:
            job.step("write", reader.input("in").write_many, [1, 2])
        with Session(ledger.engine) as session, job.step("write", transaction=session) as step:
            reader.input("in").write_many([1, 2])
            step.value = 1
            session.commit()

    job = stage.job(body)
    with pytest.raises(PortFullError, match="never fit"):
        stage.run(job)
    assert job.refresh().status == Status.FAILED


def test_a_step_that_is_refused_as_its_block_ends_has_failed(stage: Stage, ledger: Ledger, calls: Calls) -> None:
    reader = stage.job(inports={"in": {"limit": 1}})

    def body(job: RunningJob) -> None:
        with suppress(PortFullError), Session(ledger.engine) as session, job.step("write", transaction=session):
            calls("write")
            reader.input("in").write_many([1, 2])
        job.step("last", calls.fails, "last", 1)

    job = stage.job(body)
    with pytest.raises(ValueError, match="last 1"):
        stage.run(job)
    job.run(force=True)
    assert stage.run(job) == Status.COMPLETED
    assert calls.of == {"write": 1, "last": 2}, "the body takes the same way in each run"


def test_a_recursive_termination_ends_what_was_called(stage: Stage) -> None:
    job = stage.job(lambda job: job.call("child", stage.idle))
    assert stage.run(job) == Status.SUSPENDED
    job.terminate(recursive=True)
    stage.drain()
    assert job.terminated


# -- whose ------------------------------------------------------------------------------------------------------------


def test_a_completed_asking_leaves_its_steps_in_the_history(stage: Stage, calls: Calls) -> None:
    def body(job: RunningJob) -> None:
        job.step("charge", calls, "charge")
        job.sleep("rest", seconds=0)

    job = stage.inside(body)
    [entry] = [entry for entry in job.history if entry.what == "steps"]
    assert entry.detail is not None
    assert [step["name"] for step in entry.detail["steps"]] == ["charge", "rest"]
    job.run()
    stage.run(job)
    assert calls.of["charge"] == 2, "another asking begins anew"


def test_the_history_names_a_hundred_steps(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        for _ in range(101):
            job.step("item", str)

    [entry] = [entry for entry in stage.inside(body).history if entry.what == "steps"]
    assert entry.detail is not None
    assert (entry.detail["count"], len(entry.detail["steps"])) == (101, 100)


@pytest.mark.parametrize("keep", [0, 3])
def test_the_steps_of_an_asking_are_one_of_the_kept_entries(stage_database_url: str, keep: int) -> None:
    def body(job: RunningJob) -> None:
        for _ in job.for_inputs("a"):
            job.step("charge", str)
        if job.get("last"):
            job.step("charge", str)

    def kept() -> list[str]:
        return [entry.what for entry in job.history if entry.what in ("note", "steps")]

    stage = Stage(stage_database_url, sidejob_history=keep)
    try:
        job = stage.job(body)
        for _ in range(4):
            job.log("note")
        job.input("a").write(1)
        stage.run(job)
        assert kept() == ["note"] * keep, "what belongs to turns is gone with them"
        job.set(last=True)
        job.run()
        stage.run(job)
        assert kept() == ["note", "note", "steps"][:keep]
    finally:
        stage.sql(EMPTY)
        stage.close()


def test_run_fresh_begins_anew(stage: Stage, calls: Calls) -> None:
    @stage.task(name="child")
    def child(job: RunningJob) -> int:
        return calls("child", 1)  # type: ignore[no-any-return]

    def body(job: RunningJob) -> None:
        job.step("charge", calls, "charge")
        job.call("child", child)
        job.step("last", calls.fails, "last", 1)

    job = stage.job(body)
    stage.drain()
    assert job.refresh().status == Status.FAILED
    assert job.run(fresh=True) is None, "a failed job is asked with force"
    assert [str(step) for step in job.steps] == ["charge", "child"]
    assert job.run(fresh=True, force=True) is not None
    assert job.steps == []
    stage.drain()
    assert job.refresh().status == Status.COMPLETED
    assert calls.of == {"charge": 2, "child": 2, "last": 2}
    assert sorted(job.children)[0] == "child"
    assert len(job.children) == 2


@pytest.mark.parametrize("number", [0, 1])
def test_run_fresh_during_a_run(stage: Stage, calls: Calls, number: int) -> None:
    """What that run finishes after it does not count, be it the first step of the job."""

    def body(job: RunningJob) -> None:
        for index, name in enumerate(("charge", "behind")):
            if calls.of[name] == 0 and index == number:
                stage.outside(lambda: stage.sidejob.get(job.id).run(fresh=True))
            job.step(name, calls, name)

    job = stage.job(body)
    assert stage.run(job) == Status.QUEUED
    assert job.steps == []
    assert stage.run(job) == Status.COMPLETED
    assert calls.of == {"charge": 2, "behind": 2}


def test_run_fresh_of_a_job_without_steps_leaves_nothing(stage: Stage) -> None:
    job = stage.job()
    job.run(fresh=True)
    assert stage.run(job) == Status.COMPLETED
    assert stage.sql("SELECT count(*) FROM steps") == [(0,)]


def test_a_moved_job_goes_on(stage: Stage, calls: Calls) -> None:
    def body(job: RunningJob) -> None:
        job.step("charge", calls, "charge")
        job.sleep("rest", seconds=60)

    job = stage.job(body)
    stage.run(job)
    job.move(queue="elsewhere", countdown=0)
    pass_time(stage, job)
    stage.drain()
    assert (job.refresh().status, calls.of["charge"]) == (Status.COMPLETED, 1)


def test_forget(stage: Stage, calls: Calls) -> None:
    def body(job: RunningJob) -> None:
        first = job.step("first", calls, f"first {calls.of['body']}", calls.of["body"])
        if calls.of["mended"] and first == 0:
            job.forget("first")
            assert job.step("first", calls, "first again", 1) == 1
        job.step("item", calls, "item")
        job.step("item", calls, "item")
        calls("body")
        job.step("last", calls.fails, "last", 1)

    job = stage.job(body)
    with pytest.raises(ValueError, match="last 1"):
        stage.run(job)
    calls("mended")
    job.forget("item#2")
    assert [str(step) for step in job.steps] == ["first", "item"]
    job.run(force=True)
    assert stage.run(job) == Status.COMPLETED
    assert calls.of == {"first 0": 1, "first again": 1, "item": 3, "body": 2, "last": 2, "mended": 1}


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_body_that_forgets_all_of_its_steps_has_had_steps(stage: Stage, calls: Calls, *, is_asked: bool) -> None:
    def body(job: RunningJob) -> None:
        job.step("charge", calls, "charge")
        job.forget("charge")
        with suppress(ValueError):
            job.step("charge", calls.fails, "fails", 1000)
        if is_asked and calls.of["fails"] == 1:
            stage.outside(lambda: stage.sidejob.get(job.id).run())

    job = stage.job(body)
    if is_asked:
        killed_at(stage, job, "step:after-commit")
    assert stage.run(job) == (Status.QUEUED if is_asked else Status.COMPLETED)
    stage.drain()
    assert (job.refresh().status, job.steps) == (Status.COMPLETED, [])
    assert calls.of == {"charge": 1, "fails": 1 + is_asked}
    job.run()
    stage.drain()
    assert calls.of["charge"] == 2, "the next asking begins anew"


def test_forget_a_record_that_has_an_earlier_name(stage: Stage, calls: Calls) -> None:
    code = "old"

    def body(job: RunningJob) -> None:
        if code == "old":
            job.step("charge", calls, "charge", 1)
        else:
            form = job.step("charge card", calls, "never", was="charge")
            if form == 1:
                job.forget("charge card")
                form = job.step("charge card", calls, "again", 2, was="charge")
            assert form == 2
        job.sleep("rest", seconds=60)

    job = stage.job(body)
    stage.run(job)
    code = "new"
    job.run()
    stage.drain()
    assert {str(step) for step in job.steps} == {"charge", "charge card", "rest"}
    pass_time(stage, job)
    stage.drain()
    assert (job.refresh().status, calls.of) == (Status.COMPLETED, {"charge": 1, "again": 1})


def test_since_and_was(stage: Stage, calls: Calls) -> None:
    code = "old"
    answers = []

    def body(job: RunningJob) -> None:
        if code == "old":
            job.step("charge", calls, "charge")
        else:
            answers.append(job.since("check"))
            job.step("charge card", calls, "charge", was="charge")
            answers.append(job.since("pricing"))
        job.sleep("rest", seconds=60)

    old = stage.job(body)
    stage.run(old)
    code = "new"
    new = stage.job(body)
    stage.run(new)
    for job in (old, new):
        pass_time(stage, job)
    stage.drain()
    assert (old.refresh().status, new.refresh().status) == (Status.COMPLETED, Status.COMPLETED)
    assert answers == [True, True, *[False, False], *[True, True]]
    assert calls.of == {"charge": 2}


@pytest.mark.parametrize("first", ["old", "new"])
def test_an_earlier_name_that_another_step_has_is_refused(stage: Stage, calls: Calls, first: str) -> None:
    def body(job: RunningJob) -> None:
        for name in sorted(["old", "new"], reverse=first == "old"):
            job.step(name, calls, name, was="old" if name == "new" else None)

    with pytest.raises(StepNameError, match="are in one run, and was= says that one is the earlier name of the other"):
        stage.run(stage.job(body))
    assert calls.of == {first: 1}


def test_a_name_of_another_kind_in_an_earlier_run_is_refused(stage: Stage) -> None:
    code = "old"

    def body(job: RunningJob) -> None:
        if code == "old":
            job.step("rest", str)
        job.sleep("rest" if code == "new" else "pause", seconds=60)

    job = stage.job(body)
    assert stage.run(job) == Status.SUSPENDED
    code = "new"
    job.run()
    with pytest.raises(StepNameError, match="is a 'sleep' here, and a 'step' elsewhere or in an earlier run"):
        stage.run(job)


def test_a_name_has_one_kind_inside_of_turns_and_outside(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        for number in job.for_inputs("in"):
            job.step("rest", str, number)
        job.sleep("rest", seconds=60)

    job = stage.job(body, inports=["in"])
    job.input("in").write(1)
    with pytest.raises(StepNameError, match="is a 'sleep' here, and a 'step' elsewhere"):
        stage.run(job)


def test_since_before_a_failure_that_is_caught_is_kept_with_it(stage: Stage, calls: Calls) -> None:
    answers = []

    def body(job: RunningJob) -> None:
        answers.append(job.since("pricing"))
        with suppress(ValueError):
            job.step("charge", calls.fails, "charge", 1)
        job.step("last", calls, "last")

    job = stage.job(body)
    killed_at(stage, job, "step[last]:before-commit")  # the failure is kept as the body comes to the last step
    assert stage.run(job) == Status.COMPLETED
    assert (answers, calls.of) == ([True, True], {"charge": 1, "last": 2})


def test_since_is_true_behind_the_last_step_that_is_done(stage: Stage, calls: Calls) -> None:
    answers = []

    def body(job: RunningJob) -> None:
        job.step("charge", calls, "charge")
        if calls.of["last"]:
            answers.append(job.since("check"))
        job.step("last", calls.fails, "last", 1)

    job = stage.job(body)
    with pytest.raises(ValueError, match="last 1"):
        stage.run(job)
    job.run(force=True)
    assert stage.run(job) == Status.COMPLETED
    assert (answers, calls.of["charge"]) == ([True], 1)


def test_fork(stage: Stage, calls: Calls) -> None:
    mended = False

    def body(job: RunningJob) -> None:
        job.step("charge", calls, "charge")
        job.step("pack", calls, "pack")
        if not mended:
            raise ValueError("no")
        job.step("ship", calls, f"ship {job.get('to')}")

    job = stage.job(body, state={"to": "Rome"})
    with pytest.raises(ValueError, match="no"):
        stage.run(job)
    with pytest.raises(StepNameError, match="it has finished: charge, pack"):
        stage.sidejob.fork(job, before="ship")
    mended = True
    fork = stage.sidejob.fork(job, before="pack")
    assert (fork.created_by, fork.args) == (f"fork:{job.id}", job.args)
    assert [str(step) for step in fork.steps] == ["charge"]
    whole = stage.sidejob.fork(job, state={"to": "Oslo"})
    stage.drain()
    assert {one.refresh().status for one in (fork, whole)} == {Status.COMPLETED}
    assert calls.of == {"charge": 1, "pack": 2, "ship Rome": 1, "ship Oslo": 1}
    assert [str(step) for step in job.steps] == ["charge", "pack"]
    assert job.refresh().status == Status.FAILED


def test_a_fork_has_what_is_finished(stage: Stage, calls: Calls) -> None:
    def body(job: RunningJob) -> None:
        for _ in range(2):
            job.step("item", calls, "item")
        with suppress(ValueError):
            job.step("declined", calls.fails, "declined", 1000)
        job.sleep("rest", seconds=60)

    job = stage.job(body, queue="mail", priority=3)
    assert stage.run(job) == Status.SUSPENDED
    with pytest.raises(StepNameError, match=r"has not finished a step 'rest'; it has finished: declined, item, item#2"):
        stage.sidejob.fork(job, before="rest")
    assert [str(step) for step in stage.sidejob.fork(job, before="item#2", queue="elsewhere").steps] == ["item"]
    fork = stage.sidejob.fork(job)
    assert [str(step) for step in fork.steps] == ["item", "item#2", "declined"]
    assert stage.sql("SELECT queue, priority FROM jobs WHERE id = %s", fork.id) == [("mail", 3)]
    assert stage.run(fork) == Status.SUSPENDED
    assert calls.of == {"item": 2, "declined": 1}
    assert [timer.due_at for timer in fork.timers] == [fork.steps[-1].due_at], "it sleeps as long as the first"


def test_a_fork_waits_for_no_child_of_the_other_job(stage: Stage, calls: Calls) -> None:
    @stage.task(name="pack")
    def pack(job: RunningJob) -> str:
        return calls.fails("pack", 1)

    job = stage.job(lambda job: job.call("pack", pack))
    stage.drain()
    assert (job.refresh().status, [step.done for step in job.steps]) == (Status.FAILED, [False])
    fork = stage.sidejob.fork(job)
    assert fork.steps == []
    stage.drain()
    assert (fork.refresh().status, list(fork.children)) == (Status.COMPLETED, ["pack"])


def test_a_fork_has_no_step_of_a_turn(stage: Stage, calls: Calls) -> None:
    def body(job: RunningJob) -> None:
        job.step("open", str)
        for _ in job.for_inputs("a"):
            job.step("square", str)
            job.step("check", calls.fails, "check", 1)

    job = stage.job(body)
    job.input("a").write(1)
    with pytest.raises(ValueError, match="check 1"):
        stage.run(job)
    assert [str(step) for step in job.steps] == ["open", "square"]
    assert [str(step) for step in stage.sidejob.fork(job).steps] == ["open"]


def test_a_fork_of_a_job_that_has_begun_anew(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        job.step("charge", str)
        job.sleep("rest", seconds=60)

    job = stage.job(body)
    assert stage.run(job) == Status.SUSPENDED
    job.run(fresh=True)
    assert stage.run(job) == Status.SUSPENDED
    assert [str(step) for step in stage.sidejob.fork(job).steps] == ["charge"]


def test_a_value_that_cannot_be_kept_is_not_made_again(stage: Stage, calls: Calls) -> None:
    def body(job: RunningJob) -> None:
        job.step("charge", calls, "charge", object(), retries=5)

    job = stage.job(body)
    with pytest.raises(InvalidValueError, match="the value of step 'charge'"):
        stage.run(job)
    assert (calls.of["charge"], job.refresh().status) == (1, Status.FAILED)


def test_a_value_that_is_too_large_is_not_kept(stage_database_url: str) -> None:
    stage = Stage(stage_database_url, sidejob_max_value_bytes=10)
    try:
        with pytest.raises(InvalidValueError, match="the value of step 'charge': 11 bytes of JSON exceed the limit"):
            stage.inside(lambda job: job.step("charge", str, "a" * 9))
        stage.inside(lambda job: job.step("charge", str, "a" * 8))
    finally:
        stage.sql(EMPTY)
        stage.close()


def test_what_steps_tell_is_redacted(stage_database_url: str) -> None:
    def body(job: RunningJob) -> None:
        job.step("charge", str, "hunter2")
        with suppress(ValueError):
            job.step("pack", Calls().fails, "hunter2", 1)
        job.sleep("rest", days=1)

    stage = Stage(stage_database_url, sidejob_redact=lambda value: str(value).replace("hunter2", "***"))
    try:
        job = stage.job(body)
        stage.run(job)
        [charge, pack, _] = job.steps
        assert (charge.value, pack.error) == ("***", {"type": "ValueError", "message": "*** 1"})
    finally:
        stage.sql(EMPTY)
        stage.close()


def test_a_decorated_function_must_do_its_work_when_it_is_called(stage: Stage) -> None:
    with pytest.raises(SettingsError, match="Step 'generating' is a generator: a worker that calls it runs nothing"):
        stage.sidejob.step(generating)


def test_a_decorated_function(stage: Stage, calls: Calls) -> None:
    @stage.sidejob.step
    def charge(card: str) -> str:
        return calls(f"charge {card}", card)  # type: ignore[no-any-return]

    @stage.sidejob.step(name="parcel", retries=1)
    def pack() -> None:
        calls.fails("pack", 1)

    def body(job: RunningJob) -> None:
        assert charge("visa") == "visa"
        pack()

    assert charge("plain") == "plain"
    job = stage.job(body)
    assert stage.run(job) == Status.SUSPENDED
    assert [str(step) for step in job.steps] == ["charge", "parcel"]
    pass_time(stage, job)
    stage.drain()
    assert (job.refresh().status, calls.of["charge visa"]) == (Status.COMPLETED, 1)


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.few(1000)
@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda job: job.step("", str), StepNameError, "it is empty"),
        (lambda job: job.step("a#2", str), StepNameError, "'#' stands before the number"),
        (lambda job: job.step(7, str), StepNameError, "is a text, not 7"),
        (lambda job: job.step("a" * 256, str), StepNameError, "255 are allowed"),
        (lambda job: job.step("a"), InvalidValueError, "takes a function to call, not None; or transaction="),
        (lambda job: job.step("a", str, was=5), StepNameError, "is a text, not 5"),
        (lambda job: job.step("a", generating), InvalidValueError, "of step 'a' has returned what a generator"),
        (lambda job: job.step("a", lambda: (n for n in range(3))), InvalidValueError, "what a generator makes"),
        (lambda job: job.step("a", transaction=object()).is_new, IllegalMoveError, "Step 'a' of job 1 has not begun"),
        (lambda job: job.step("a", transaction=object()).value, IllegalMoveError, "has not begun: do it in the block"),
        (lambda job: setattr(job.step("a", transaction=object()), "value", 1), IllegalMoveError, "has not begun"),
        (lambda job: job.step("a", str, retries=-1), InvalidValueError, "retries"),
        (lambda job: job.step("a", str, backoff="x"), InvalidValueError, "backoff"),
        (lambda job: job.step("a", str, retry_on=3), InvalidValueError, "retry_on"),
        (lambda job: job.step("a", lambda: {1: 2}), InvalidValueError, "the value of step 'a'"),
        (lambda job: job.step("a", lambda: [0, {"b": object()}]), InvalidValueError, r"'a'\[1\]\[\"b\"\]"),
        (lambda job: (job.step("a", str), job.sleep("a", seconds=1)), StepNameError, "is a 'sleep' here"),
        (lambda job: job.step("a", lambda: job.step("b", str)), IllegalMoveError, "inside a step"),
        (lambda job: job.step("a", job.checkpoint), IllegalMoveError, r"checkpoint\(\) of job"),
        (lambda job: job.step("a", job.suspend), IllegalMoveError, r"suspend\(\) of job"),
        (lambda job: job.sleep(5), StepNameError, "is a text, not 5"),
        (lambda job: job.sleep("a"), InvalidValueError, r"sleep\('a', …\) takes a timedelta, .*, not nothing\."),
        (lambda job: job.sleep("a", 3), InvalidValueError, r"or seconds=10, not 3\."),
        (lambda job: job.sleep("a", days="x"), InvalidValueError, r"or seconds=10, not days='x'\."),
        (lambda job: job.sleep("a", timedelta(1), days=2), InvalidValueError, "not datetime.timedelta.* with days=2"),
        (lambda job: job.sleep("a", dayz=3, hours=1), InvalidValueError, "not dayz=3 with hours=1"),
        (lambda job: job.sleep("a", seconds=-1), InvalidValueError, "lasts from 0 to .* not seconds=-1"),
        (lambda job: job.sleep("a", seconds=float("nan")), InvalidValueError, "takes a timedelta, .* not seconds=nan"),
        (lambda job: job.sleep_until("a", 3), InvalidValueError, "takes a datetime"),
        (lambda job: job.receive("a", timeout=-1), InvalidValueError, "timeout"),
        (lambda job: job.call_all("a", "measure"), InvalidValueError, "a list of signatures"),
        (lambda job: job.call_all("a", [], limit=0), InvalidValueError, "limit"),
        (lambda job: job.call_all("a", "stage.idle", [1, 2]), InvalidValueError, "a list of signatures"),
        (lambda job: job.call("a", "stage.idle", 1, 2), TypeError, r"args takes a list .* not 1: write \(1,\)"),
        (lambda job: job.call("a", "stage.idle", transaction=object()), InvalidValueError, "transaction=: leave"),
        (lambda job: job.step("a", str, transaction=object()), InvalidValueError, "takes no function"),
        (lambda job: job.step("a", transaction=object(), retries=2), InvalidValueError, "and no retries"),
        (lambda job: job.step("a", transaction=object(), retry_on=OSError), InvalidValueError, "and no retries"),
        (lambda job: job.forget("a#x"), StepNameError, "names no step"),
        (lambda job: job.forget("a#10001"), StepNameError, "names no step"),
    ],
)  # fmt: skip
def test_bad_input(stage: Stage, call: Callable[[Any], Any], error: type[Exception], says: str) -> None:
    job = stage.job(call)
    with pytest.raises(error, match=says):
        stage.run(job)


def test_a_step_in_a_thread_of_its_own(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        stage.outside(lambda: job.step("a", str))

    with pytest.raises(IllegalMoveError, match="without the run's context"):
        stage.inside(body)


def test_a_step_in_a_hook(stage: Stage) -> None:
    @stage.task(name="starting")
    def starting(job: RunningJob) -> None:
        pass

    @starting.on_startup
    def _(job: RunningJob) -> None:
        job.step("a", str)

    with pytest.raises(IllegalMoveError, match="on_startup or on_shutdown"):
        stage.run(starting.enqueue())


def test_too_many_steps(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_STEPS == 10_000, "as the docs say"
    monkeypatch.setattr("celery_sidejob.unit.steps.MOST_STEPS", 3)
    numbers = range(4)

    def body(job: RunningJob) -> None:
        for _ in numbers:
            job.step("a", str)

    job = stage.job(body)
    with pytest.raises(IllegalMoveError, match="has 3 steps, and 'a' would be one more"):
        stage.run(job)
    numbers = range(3)
    job.run(force=True)
    assert stage.run(job) == Status.COMPLETED, "each of the three has a record"


# -- elsewhere --------------------------------------------------------------------------------------------------------


def test_a_stage_ends_the_steps(stage: Stage, calls: Calls) -> None:
    def body(job: RunningJob) -> None:
        job.step("charge", calls, "charge")
        if calls.of["charge"] == 1:
            job.then()

    job = stage.job(body)
    stage.drain()
    assert (job.refresh().status, calls.of["charge"]) == (Status.COMPLETED, 2)


def test_a_deleted_job_leaves_no_steps(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        job.step("charge", str)
        job.sleep("rest", seconds=60)

    job = stage.job(body)
    stage.run(job)
    job.terminate()
    stage.drain()
    assert [str(step) for step in job.steps] == ["charge", "rest"], "a forced run would go on behind them"
    assert job.delete()
    assert stage.sql("SELECT count(*) FROM steps") == [(0,)]


def test_steps_in_eager_mode(stage: Stage, calls: Calls) -> None:
    stage.app.conf.task_always_eager = True

    @stage.task(name="eager.child")
    def child(job: RunningJob, number: int) -> int:
        return number * 10

    @stage.task(name="eager.parent", inports=["answers"])
    def parent(job: RunningJob) -> None:
        job.step("charge", calls, "charge")
        values = job.call_all("all", [child.s(number) for number in range(3)])
        job.set(values=values, answer=job.receive("answers"))

    result = parent.apply()
    job = result.job
    assert (result.state, job.status) == ("SUSPENDED", Status.SUSPENDED)
    job.input("answers").write("yes")
    stage.drain()
    assert job.refresh().status == Status.COMPLETED
    assert job.state == {"values": [0, 10, 20], "answer": "yes"}
    assert calls.of == {"charge": 1}


def test_a_run_without_steps_asks_nothing_of_them(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a run without steps asks for them")

    for name in ("read", "apply", "keep_alone"):
        monkeypatch.setattr(f"celery_sidejob.store.steps.{name}", never)
    job = stage.job(lambda job: job.set(done=True))
    assert stage.run(job) == Status.COMPLETED


def test_a_zombie_keeps_no_step(stage: Stage, calls: Calls) -> None:
    def body(job: RunningJob) -> None:
        if calls.of["charge"] == 0:
            hold = stage.holds[job.id]
            stage.outside(lambda: rescued(hold))
        job.step("charge", calls, "charge")

    def rescued(hold: Any) -> None:
        assert recovery.rescue(stage.runtime, hold.job_id, run_no=hold.run_no, worker_id=hold.worker_id, own=True)

    job = stage.job(body)
    hold = stage.claim(job)
    assert hold is not None
    stage.perform(hold)
    assert "is no longer its current run" in stage.ignored[job.id]
    assert job.steps == []
    assert stage.run(job) == Status.COMPLETED
    assert calls.of["charge"] == 2


def test_an_older_run_of_the_same_worker_keeps_no_step(stage: Stage, calls: Calls) -> None:
    """Its number tells it from the run that the worker has now."""
    newer: list[Any] = []

    def body(job: RunningJob) -> None:
        if not newer:
            stage.outside(lambda: newer.append(rescued_and_claimed(stage.holds[job.id])))
        job.step("charge", calls, "charge")

    def rescued_and_claimed(hold: Any) -> Any:
        assert recovery.rescue(stage.runtime, hold.job_id, run_no=hold.run_no, worker_id=hold.worker_id, own=True)
        return stage.claim(job)

    job = stage.job(body)
    older = stage.claim(job)
    assert older is not None
    stage.perform(older)
    assert "is no longer its current run" in stage.ignored[job.id]
    assert newer[0].worker_id == older.worker_id
    assert job.steps == []
    stage.perform(newer[0])
    assert (job.refresh().status, calls.of["charge"]) == (Status.COMPLETED, 2)


def test_the_commit_of_a_step_counts_once(stage: Stage) -> None:
    """A commit whose answer was lost is repeated: the unit's number refuses the second."""
    hold = stage.claim(stage.job(lambda job: None))
    assert hold is not None
    record = KeepStep(
        job_id=hold.job_id, turn="", name="charge", number=1, kind="step", run_no=hold.run_no, worker_id=hold.worker_id
    )
    kept = [
        stage.runtime.connections.transact(
            "step", lambda executor: keep_alone(executor, record, unit_no=hold.unit_no), single=True
        )
        for _ in range(2)
    ]
    assert kept == [True, False]


@pytest.mark.parametrize("does", [False, True])
def test_a_step_whose_commit_got_no_answer(stage: Stage, calls: Calls, does: bool) -> None:
    lost: list[str] = []

    def lose(name: str) -> None:
        if name == "step:after-commit" and not lost:
            lost.append(name)
            raise AnswerLost("lost")

    def body(job: RunningJob) -> None:
        job.step("charge", job.set if does else calls, **({"paid": 1} if does else {"name": "charge"}))
        job.step("next", calls, "next")

    job = stage.job(body)
    with acting(lose):
        assert stage.run(job) == Status.COMPLETED
    assert (lost, calls.of["next"], calls.of["charge"]) == (["step:after-commit"], 1, int(not does))


@pytest.mark.parametrize("point", ["step:before-commit", "step:after-commit"])
@pytest.mark.parametrize("commits", [False, True])
def test_a_time_limit_in_the_commit_of_the_startup(stage: Stage, calls: Calls, point: str, commits: bool) -> None:
    @stage.task(name="starting")
    def starting(job: RunningJob) -> None:
        try:
            job.step("first", calls, "first")
        except SoftTimeLimitExceeded:
            if commits:
                job.checkpoint()
            job.step("clean up", calls, "clean up")

    @starting.on_startup
    def _(job: RunningJob) -> None:
        job.set(begun=job.get("begun", 0) + 1)

    job = starting.enqueue()
    with acting(strikes(point)):
        assert stage.run(job) == Status.COMPLETED
    assert (job.state, calls.of) == ({"begun": 1}, {"clean up": 1})


@pytest.mark.parametrize("point", ["step:before-commit", "step:after-commit"])
@pytest.mark.parametrize("kind", ["step", "alone", "receive"])
def test_a_time_limit_in_the_commit_of_a_step_that_the_body_catches(
    stage: Stage, calls: Calls, point: str, kind: str
) -> None:
    ways: list[str] = []

    def body(job: RunningJob) -> None:
        try:
            if kind == "receive":
                job.receive("in")
            elif kind == "step":
                job.step("first", job.set, paid=1)
            else:
                job.step("first", calls, "first")
        except SoftTimeLimitExceeded:
            ways.append("limited")
        else:
            ways.append("fine")
        job.sleep("rest", seconds=60)

    job = stage.job(body, inports=["in"])
    job.input("in").write(1)
    with acting(strikes(point)):
        assert stage.run(job) == Status.SUSPENDED
    pass_time(stage, job)
    stage.drain()
    assert job.refresh().status == Status.COMPLETED
    assert ways == ["limited"] * 2, "the body takes the same way in each run"


@pytest.mark.parametrize("caught", [True, False])
def test_a_time_limit_while_a_step_is_reported(
    stage: Stage, calls: Calls, monkeypatch: pytest.MonkeyPatch, caught: bool
) -> None:
    ways: list[str] = []

    def strike(*given: Any) -> None:
        monkeypatch.undo()
        raise SoftTimeLimitExceeded

    def body(job: RunningJob) -> None:
        job.set(before=1)
        try:
            job.step("first", calls, "first", retries=3)
        except SoftTimeLimitExceeded:
            ways.append("limited")
            if not caught:
                raise
        else:
            ways.append("fine")
        job.step("second", calls, "second")

    job = stage.job(body)
    monkeypatch.setattr(measuring, "step_ended", strike)
    if caught:
        assert stage.run(job) == Status.COMPLETED
    else:
        with pytest.raises(SoftTimeLimitExceeded):
            stage.run(job)
        job.run(force=True)
        assert stage.run(job) == Status.COMPLETED
    assert ways == (["limited"] if caught else ["limited", "fine"])
    assert (calls.of, job.state) == ({"first": 1, "second": 1}, {"before": 1}), "what is committed is not done again"


@pytest.mark.parametrize("point", ["step:before-commit", "step:after-commit"])
def test_a_time_limit_in_the_commit_of_a_step_that_fails_the_run(stage: Stage, calls: Calls, point: str) -> None:
    job = stage.job(lambda job: job.step("first", calls, "first"))
    with acting(strikes(point)), pytest.raises(SoftTimeLimitExceeded):
        stage.run(job)
    job.run(force=True)
    assert stage.run(job) == Status.COMPLETED
    assert calls.of["first"] == (2 if point == "step:before-commit" else 1), "what is committed is not done again"


def strikes(point: str) -> Callable[[str], None]:
    """An actor by which a time limit strikes at this point, once."""
    struck = []

    def act(name: str) -> None:
        if name == point and not struck:
            struck.append(name)
            raise SoftTimeLimitExceeded

    return act


def test_a_step_that_only_keeps_its_value_is_one_statement(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []

    def body(job: RunningJob) -> None:
        job.step("first", str)
        with monkeypatch.context() as patched:
            run, command = OwnExecutor.run, OwnExecutor._command

            def noted_run(self: OwnExecutor, statement: Statement, /, **given: Any) -> list[Any]:
                sent.append(statement.text)
                return run(self, statement, **given)

            def noted_command(self: OwnExecutor, text: str) -> None:
                sent.append(text)
                command(self, text)

            patched.setattr(OwnExecutor, "run", noted_run)
            patched.setattr(OwnExecutor, "_command", noted_command)
            for _ in range(3):
                job.step("item", str)

    stage.inside(body)
    assert [text for text in sent if "steps" in text] == sent
    assert len(sent) == 3


def test_turns_that_are_over_are_committed_before_a_wait(stage: Stage) -> None:
    """Also where more turns go into one commit: their packets would be on the port again after the wait."""
    seen: list[int] = []

    def body(job: RunningJob) -> None:
        for number in job.for_inputs("numbers", commit_every=10):
            seen.append(number)
            job.output("seen").write(number)
        job.sleep("nap", seconds=3600)

    job = stage.job(body)
    job.input("numbers").write_many([1, 2, 3])
    assert stage.run(job) == "suspended"
    assert list(job.output("seen")) == [1, 2, 3]
    pass_time(stage, job)
    stage.drain()
    assert (job.refresh().status, seen) == ("completed", [1, 2, 3])
