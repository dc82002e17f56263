"""`port.connect_to(*ports)`: everything on a port moves to others, in one transaction or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_sidejob import (
    NO_DATA,
    IllegalMoveError,
    InvalidPortError,
    Job,
    Port,
    PortNotFoundError,
    RunningJob,
    StoreUnavailableError,
)
from celery_sidejob.jobs import port as port_module
from celery_sidejob.store import audience, packets
from celery_sidejob.store.connection.own_executor import OwnExecutor
from celery_sidejob.store.errors import Moved
from celery_sidejob.store.outbox.kinds import SOON
from celery_sidejob.store.statement import Statement
from tests.acceptance.lenders import LENDERS
from tests.tools.crash_points import Arm, lost
from tests.tools.in_process import Stage

Connect = Callable[..., list[Any]]


@pytest.fixture(params=["client", "run"])
def connect(request: pytest.FixtureRequest, stage: Stage) -> Connect:
    """Connects ports as a client, or as the one thing that a run of another job does."""

    def by_client(source: Port, *targets: Port) -> list[Any]:
        return source.connect_to(*targets)

    def by_run(source: Port, *targets: Port) -> list[Any]:
        moved: list[Any] = []
        stage.inside(lambda job: moved.extend(source.connect_to(*targets)))
        return moved

    return by_client if request.param == "client" else by_run


@pytest.fixture
def resting(stage: Stage) -> Callable[[], Job]:
    """Makes a completed job that has any port."""
    return lambda: stage.inside(lambda job: None)


def quietly(stage: Stage, port: Port, *values: Any) -> None:
    with stage.sidejob.port_options(notify=False):
        port.write_many(values)


def portless(stage: Stage) -> Any:
    @stage.task(name="portless")
    def task(job: RunningJob) -> None:
        pass

    return task


def on(port: Port) -> list[Any]:
    return [packet.value for packet in port.peek(1000)]


def test_everything_moves_in_order_to_each_target(stage: Stage, resting: Any, connect: Connect) -> None:
    source, first, second = resting().output("x"), resting().input("a"), resting().output("y")
    first.default, second.default = "own", None
    quietly(stage, first, 0)
    quietly(stage, source, 1, None, {"b": [2]})

    assert connect(source, first, second) == [1, None, {"b": [2]}]

    assert on(source) == []
    assert on(first) == [0, 1, None, {"b": [2]}]
    assert on(second) == [1, None, {"b": [2]}]
    assert (first.default, second.default) == ("own", None), "the source has none"


def test_an_empty_port_changes_nothing_and_asks_nobody(stage: Stage, resting: Any, connect: Connect) -> None:
    target = resting()
    subscriber = stage.inside(lambda job: None, inports={"in": {"channels": ["/c"]}})
    target.input("a").default = 1
    target.output("x").channels = ["/c"]

    assert connect(resting().input("a"), target.input("a"), target.output("x")) == []

    assert (target.input("a").default, on(target.input("a")), on(target.output("x"))) == (1, [], [])
    assert (target.refresh().status, subscriber.refresh().status) == ("completed", "completed")


def test_a_default_is_copied_and_wakes_only_where_it_is_another(stage: Stage, resting: Any, connect: Connect) -> None:
    parent = resting()
    child = stage.inside(lambda job: None, parent=parent, child_name="kid")
    stage.drain()
    source, same, other = resting().input("a"), resting(), resting()
    source.default = {"n": 1}
    same.input("a").default = {"n": 1}

    assert connect(source, same.input("a"), other.input("a"), child.output("x")) == []

    assert [port.default for port in (same.input("a"), other.input("a"), child.output("x"))] == [{"n": 1}] * 3
    assert source.default == {"n": 1}
    assert [job.refresh().status for job in (same, other, parent, child)] == [
        "completed", "queued", "queued", "completed",
    ]  # fmt: skip
    stage.drain()
    connect(source, other.input("a"), child.output("x"))
    assert [job.refresh().status for job in (other, parent)] == ["completed", "completed"]


def test_each_reader_is_woken_once(stage: Stage, resting: Any, connect: Connect) -> None:
    parent = resting()
    child = stage.inside(lambda job: None, parent=parent, child_name="kid")
    stage.drain()
    source, target = resting().input("a"), resting()
    source.default = "d"
    quietly(stage, source, *range(5))
    before = {job.id: wakes(stage, job) for job in (parent, child, target)}

    connect(source, target.input("a"), target.input("b"), child.output("x"))

    assert {job.id: wakes(stage, job) - before[job.id] for job in (parent, child, target)} == {
        parent.id: 1, child.id: 0, target.id: 1,
    }  # fmt: skip
    assert target.input("b").default == "d"


def wakes(stage: Stage, job: Job) -> int:
    return int(stage.sql("SELECT wakes FROM jobs WHERE id = %s", job.id)[0][0])


def test_notify_false_asks_nobody(stage: Stage, resting: Any, connect: Connect) -> None:
    source, target = resting().input("a"), resting()
    source.default = 1
    quietly(stage, source, 2)

    with stage.sidejob.port_options(notify=False):
        connect(source, target.input("a"))

    assert (on(target.input("a")), target.input("a").default, target.refresh().status) == ([2], 1, "completed")


def test_packets_keep_their_contexts_and_options(stage: Stage, resting: Any, connect: Connect) -> None:
    source, target = resting().input("a"), resting().input("a")
    with stage.sidejob.context(user="ann"), stage.sidejob.port_options(log=False):
        source.write(1)
    source.write(2)

    with stage.sidejob.context(user="bob"):
        connect(source, target)

    assert [(packet.value, packet.context, packet.options) for packet in target.peek()] == [
        (1, {"user": "ann"}, {"log": False}),
        (2, {}, {}),
    ]


def test_what_comes_to_an_output_port_is_published_on_its_channels(
    stage: Stage, resting: Any, connect: Connect
) -> None:
    subscriber = stage.inside(lambda job: None, inports={"in": {"channels": ["/c"]}})
    source, target = resting().input("a"), resting().output("x")
    target.channels = ["/c/d"]
    with stage.sidejob.context(user="ann"):
        quietly(stage, source, 1, 2)

    connect(source, target)

    assert (on(source), on(target)) == ([], [1, 2])
    assert [(packet.value, packet.context) for packet in subscriber.input("in").peek()] == [
        (1, {"user": "ann", "channel": "/c/d"}),
        (2, {"user": "ann", "channel": "/c/d"}),
    ]
    assert subscriber.refresh().status == "queued"


def test_bad_input_is_refused_before_anything_happens(stage: Stage, resting: Any, connect: Connect) -> None:
    source, target = resting().input("a"), portless(stage).enqueue()
    source.write(1)
    cases: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((), InvalidPortError, "needs the ports"),
        ((source,), InvalidPortError, "itself"),
        (("a",), InvalidPortError, "takes ports"),
        ((target.input("b"), target.input("b")), InvalidPortError, "twice"),
        ((resting().input("a"), target.input("b")), PortNotFoundError, "has no input port 'b'"),
    ]
    for targets, error, words in cases:
        with pytest.raises(error, match=words):
            connect(source, *targets)
    assert on(source) == [1]


def test_it_takes_as_many_statements_for_many_packets_as_for_one(
    stage: Stage, resting: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, counts, real = list[str](), list[int](), OwnExecutor.run

    def noting(self: OwnExecutor, statement: Statement, /, **parameters: Any) -> Any:
        if statement is not audience._ASK and SOON not in statement.text:  # both come at times of their own
            sent.append(statement.text)
        return real(self, statement, **parameters)

    monkeypatch.setattr(OwnExecutor, "run", noting)
    for many in (1, 350):
        source, target = resting().output("x"), resting().input("a")
        quietly(stage, source, *range(many))
        sent.clear()
        assert connect(source, target) == list(range(many))
        counts.append(len(sent))
    assert counts[0] == counts[1] > 0


def test_a_wildcard_port_is_made_by_being_connected(stage: Stage, connect: Connect) -> None:
    job = stage.inside(lambda job: None, inports={"*": {"default": 7}})
    source = stage.inside(lambda job: None).input("a")
    quietly(stage, source, 1)

    connect(source, job.input("made"))

    assert (on(job.input("made")), job.input("made").default) == ([1], 7)


def test_a_run_that_fails_has_connected_nothing_and_one_that_goes_on_has(stage: Stage, resting: Any) -> None:
    source, target = resting().output("x"), resting().input("a")
    source.default = "d"
    quietly(stage, source, *range(3))

    def body(job: RunningJob) -> None:
        assert source.connect_to(target) == [0, 1, 2]
        assert (len(source), list(target), target.default) == (0, [0, 1, 2], "d")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stage.inside(body)
    assert (on(source), on(target), target.has_default) == ([0, 1, 2], [], False)


def test_a_run_connects_what_it_has_written_and_read_ahead(stage: Stage, resting: Any) -> None:
    target = resting().input("a")

    def body(job: RunningJob) -> None:
        own = job.input("in")
        assert own.read() == 0
        own.write(3)
        with stage.sidejob.context(user="ann"):
            own.write(4)
        assert own.connect_to(target) == [1, 2, 3, 4]
        assert own.read() is NO_DATA

    job = stage.job(body)
    quietly(stage, job.input("in"), 0, 1, 2)
    stage.run(job)
    assert (on(job.input("in")), on(target)) == ([], [1, 2, 3, 4])
    assert target.peek()[3].context == {"job": job.id, "user": "ann"}


def test_a_run_that_has_read_what_a_client_moves_begins_again(stage: Stage, resting: Any) -> None:
    target, moved = resting().input("a"), list[Any]()

    def body(job: RunningJob) -> list[Any]:
        found = list(job.input("in"))
        if found:
            stage.outside(lambda: moved.extend(Job(job.id, runtime=stage.runtime).input("in").connect_to(target)))
        return found

    job = stage.job(body)
    quietly(stage, job.input("in"), 1, 2)
    stage.drain()
    assert moved == [1, 2]
    assert (on(target), job.refresh().status) == ([1, 2], "completed")


# -- at every instant -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["connect:before-commit", "connect:after-commit"])
def test_an_answer_that_is_lost_has_moved_all_or_nothing(stage: Stage, resting: Any, at: Arm, point: str) -> None:
    source, targets = resting().output("x"), [resting().input("a"), resting().output("y")]
    source.default = "d"
    quietly(stage, source, 1, 2)
    at(point, lost)

    with pytest.raises(StoreUnavailableError):
        source.connect_to(*targets)

    moved = point.endswith("after-commit")
    assert [on(port) for port in (source, *targets)] == ([[], [1, 2], [1, 2]] if moved else [[1, 2], [], []])
    assert [port.has_default for port in targets] == [moved, moved]


def test_a_port_that_goes_before_the_lock_refuses_all(
    stage: Stage, resting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = portless(stage).enqueue(inports=["a"])
    source = resting().output("x")
    quietly(stage, source, 1)
    real = port_module.carry_out

    def other_first(*given: Any) -> Any:
        stage.outside(lambda: Job(target.id, runtime=stage.runtime).configure_ports(inports=["b"]))
        return real(*given)

    monkeypatch.setattr(port_module, "carry_out", other_first)
    with pytest.raises(PortNotFoundError):
        source.connect_to(target.input("a"))
    assert on(source) == [1]


def test_it_is_tried_again_if_something_moves_under_it(
    stage: Stage, resting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = resting().output("x"), resting().input("a")
    quietly(stage, source, 1)
    real, tries = packets.move, list[int]()

    def first_refused(*given: Any) -> Any:
        found = real(*given)
        tries.append(len(found))
        if len(tries) == 1:
            raise Moved("for the test")
        return found

    monkeypatch.setattr(packets, "move", first_refused)
    assert source.connect_to(target) == [1]
    assert (tries, on(target)) == ([1, 1], [1])


# -- in the caller's transaction --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["session-psycopg", "psycopg", "django"])
def test_it_shares_the_fate_of_the_callers_transaction(stage: Stage, resting: Any, kind: str) -> None:
    source, target = resting().output("x"), resting()
    source.default, before = "d", wakes(stage, target)
    quietly(stage, source, 1, 2)
    with LENDERS[kind](stage.database_url) as lender:
        assert source.connect_to(target.input("a"), transaction=lender.transaction) == [1, 2]
        assert on(target.input("a")) == []
        lender.rollback()
        assert (on(source), target.input("a").has_default) == ([1, 2], False)
        assert source.connect_to(target.input("a"), transaction=lender.transaction) == [1, 2]
        lender.commit()
    assert (on(source), on(target.input("a")), target.input("a").default) == ([], [1, 2], "d")
    stage.drain()
    assert wakes(stage, target) == before + 1


def test_a_run_does_not_connect_in_the_callers_transaction(stage: Stage, resting: Any) -> None:
    source, target = resting().output("x"), resting().input("a")

    def body(job: RunningJob) -> None:
        with LENDERS["psycopg"](stage.database_url) as lender:
            source.connect_to(target, transaction=lender.transaction)

    with pytest.raises(IllegalMoveError, match=r"job\.unit"):
        stage.inside(body)
