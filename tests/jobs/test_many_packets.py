"""Many packets at once: `read_many` and `write_many`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from celery_sidejob import IllegalMoveError, InvalidValueError, Job, LeaseLostError, PortNotFoundError, RunningJob
from celery_sidejob.store.connection.own_executor import OwnExecutor
from tests.tools.in_process import Stage


@pytest.fixture
def resting(stage: Stage) -> Job:
    """A completed job with any port."""
    return stage.inside(lambda job: None)


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements about packets that are run on connections of ours, oldest first."""
    noted: list[str] = []
    run = OwnExecutor.run

    def noting(self: OwnExecutor, statement: Any, **parameters: Any) -> Any:
        if "packets" in statement.text:  # others are of threads, and of what is asked once a second
            noted.append(statement.text)
        return run(self, statement, **parameters)

    monkeypatch.setattr(OwnExecutor, "run", noting)
    return noted


def test_a_client_reads_the_oldest_in_order_and_never_the_default(resting: Job) -> None:
    port = resting.input("a")
    port.write_many([1, None, 3, 4])
    port.default = 0

    assert port.read_many(3) == [1, None, 3]
    assert port.read_many(3) == [4]
    assert port.read_many(3) == []
    assert port.read() == 0


@pytest.mark.parametrize("how", ["a client", "a run"])
def test_twenty_thousand_packets_take_as_many_statements_as_one(
    stage: Stage, resting: Job, statements: list[str], how: str
) -> None:
    counts: list[int] = []

    def reads(job: Job) -> None:
        for count in (1, 20_000):
            statements.clear()
            assert len(job.input("a").read_many(count)) == count
            counts.append(len(statements))

    job = resting if how == "a client" else stage.job(reads)
    job.input("a").write_many(range(20_001))
    if how == "a client":
        reads(job)
    else:
        assert stage.run(job) == "completed"
    assert counts == [1, 1]


def test_a_run_reads_what_is_at_hand_then_what_is_behind_then_what_it_has_written(stage: Stage) -> None:
    seen: list[Any] = []

    def body(job: RunningJob) -> None:
        port = job.input("a")
        port.write_many([1, 2, 3, 4])
        seen.extend([port.read(), port.read_many(2), port.read_many(1)])
        seen.append(port.read_many(9))

    job = stage.job(body)
    job.input("a").write_many(["x", "y"])
    stage.run(job)
    assert seen == ["x", ["y", 1], [2], [3, 4]]
    assert len(job.input("a")) == 0


def test_a_run_takes_of_another_port_only_what_it_reads_and_gives_it_back_when_it_fails(stage: Stage) -> None:
    child = stage.inside(lambda job: None)
    child.output("x").write_many(range(5))
    left: list[int] = []

    def body(job: RunningJob) -> None:
        port = stage.sidejob.get(child.id).output("x")
        assert port.read_many(3) == [0, 1, 2]
        stage.outside(lambda: left.append(len(child.output("x"))))
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        stage.run(stage.job(body))
    assert left == [2]
    assert child.output("x").read_many(9) == [0, 1, 2, 3, 4]


def test_with_a_transaction_all_is_consumed_by_the_commit(stage: Stage, resting: Job) -> None:
    port = resting.input("a")
    port.write_many([1, 2, 3])
    with psycopg.connect(stage.database_url) as mine:
        assert port.read_many(2, transaction=mine) == [1, 2]
        assert port.read_many(2) == [3], "others read what is behind"
        mine.rollback()
        assert port.read_many(2, transaction=mine) == [1, 2]
    assert port.read_many(9) == []


def test_a_port_that_is_not_there_and_a_transaction_in_a_run_are_refused(stage: Stage) -> None:
    @stage.task(name="ported", inports=["a"])
    def ported(job: RunningJob) -> None:
        pass

    job = ported.enqueue()
    with pytest.raises(PortNotFoundError, match="it has: a"):
        job.input("b").read_many(1)
    with psycopg.connect(stage.database_url) as mine, pytest.raises(PortNotFoundError, match="it has: a"):
        job.input("b").read_many(1, transaction=mine)

    def in_run(running: RunningJob) -> None:
        with psycopg.connect(stage.database_url) as mine, pytest.raises(IllegalMoveError, match="inside a run"):
            running.input("a").read_many(1, transaction=mine)

    stage.inside(in_run)


@pytest.mark.parametrize("limit", [0, -1, "3", None, 1.5, True])
def test_the_limit_is_a_number_of_packets(resting: Job, limit: Any) -> None:
    with pytest.raises(InvalidValueError, match="limit is a number of packets"):
        resting.input("a").read_many(limit)


@pytest.mark.parametrize("values", ["abc", b"abc", bytearray(b"a"), {"a": 1}, 7, None], ids=repr)
def test_what_is_no_list_of_values_is_not_taken_apart(resting: Job, values: Any) -> None:
    with pytest.raises(InvalidValueError, match=r"write_many\(\) takes a list of values"):
        resting.input("a").write_many(values)
    assert len(resting.input("a")) == 0


@pytest.mark.parametrize(
    ("write", "named"),
    [
        (lambda port: port.write_many(iter([1, {"a": [float("nan")]}])), r"^values\[1\]\[\"a\"\]\[0\]: "),
        (lambda port: port.write({"a": {1: 2}}), r"^value\[\"a\"\]"),
    ],
)
def test_a_value_that_is_refused_is_named_by_its_place(resting: Job, write: Callable[[Any], None], named: str) -> None:
    with pytest.raises(InvalidValueError, match=named):
        write(resting.input("a"))
    assert len(resting.input("a")) == 0


READS: dict[str, Callable[[Any, Any], Any]] = {
    "one": lambda port, _: port.read(),
    "a packet": lambda port, _: port.read_packet(),
    "many": lambda port, _: port.read_many(3),
    "all": lambda port, _: list(port),
    "many in a transaction": lambda port, mine: port.read_many(3, transaction=mine),
    "one in a transaction": lambda port, mine: port.read(transaction=mine),
    "moved": lambda port, _: port.connect_to(port.job.input("b")),
    "moved in a transaction": lambda port, mine: port.connect_to(port.job.input("b"), transaction=mine),
}


@pytest.mark.parametrize(
    "text",
    ['{"__type__":"later","__value__":1}', '{"__type__":"uuid","__value__":5}', "1" * 5000],
    ids=lambda t: t[:20],
)
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_client_takes_nothing_with_a_packet_that_it_cannot_decode(
    stage: Stage, resting: Job, text: str, read: Callable[[Any, Any], Any]
) -> None:
    port = resting.input("a")
    port.write_many([1, 2, 3])
    [(poison,)] = stage.sql("UPDATE packets SET value = %s WHERE id = (SELECT min(id) FROM packets) RETURNING id", text)
    with psycopg.connect(stage.database_url) as mine:
        with pytest.raises(InvalidValueError, match=f"Packet {poison} of input port 'a' of job {resting.id} cannot be"):
            read(port, mine)
        mine.commit()
    assert len(port) == 3
    stage.sql("DELETE FROM packets WHERE id = %s", poison)
    assert port.read_many(3) == [2, 3]


def test_a_context_is_no_larger_than_a_value_may_be(stage: Stage, resting: Job) -> None:
    limit = stage.runtime.settings.max_value_bytes
    with stage.sidejob.context(big="x" * limit):
        for write in (
            lambda: resting.input("a").write(1),
            lambda: stage.sidejob.publish("/a", 1),
            lambda: resting.publish(1),
        ):
            with pytest.raises(InvalidValueError, match=rf'^context\["big"\]: .* exceed the limit of {limit}'):
                write()
    assert len(resting.input("a")) == 0


@pytest.mark.parametrize("how", ["a run", "a run, of another job's port"])
def test_iterating_takes_few_statements(stage: Stage, resting: Job, statements: list[str], how: str) -> None:
    def reads(job: Job) -> None:
        statements.clear()
        assert list(job.input("x")) == list(range(20_000))
        assert len(statements) < 100

    job = stage.job(reads) if how == "a run" else resting
    job.input("x").write_many(range(20_000))
    if how == "a run":
        assert stage.run(job) == "completed"
    else:
        stage.inside(lambda job: reads(stage.sidejob.get(resting.id)))


def test_a_run_that_reads_one_by_one_takes_few_statements(stage: Stage, statements: list[str]) -> None:
    def reads(job: RunningJob) -> None:
        statements.clear()
        assert [job.input("a").read() for _ in range(20_000)] == list(range(20_000))
        assert len(statements) < 100

    job = stage.job(reads)
    job.input("a").write_many(range(20_000))
    assert stage.run(job) == "completed"


def test_reading_several_leaves_the_context_as_it_is(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        with stage.sidejob.context(own=2):
            assert job.input("a").read_many(9) == [1, 2]
            job.output("b").write(3)

    job = stage.job(body)
    for number in (1, 2):
        with stage.sidejob.context(sender=number):
            job.input("a").write(number)
    stage.run(job)
    assert [packet.context for packet in job.output("b").peek()] == [{"own": 2, "job": job.id}]


@pytest.mark.parametrize("whose", ["its own", "another job's"])
def test_a_lost_run_cannot_commit_and_the_next_reads_the_same_in_order(stage: Stage, resting: Job, whose: str) -> None:
    read: list[Any] = []

    def body(job: RunningJob) -> None:
        read.append((job if whose == "its own" else stage.sidejob.get(resting.id)).input("x").read_many(3))
        job.output("b").write(1)
        if len(read) == 1:  # the worker is taken for dead, and goes on
            stage.outside(lambda: stage.declare_dead(doomed))
            stage.outside(stage.sidejob.poll)
            with pytest.raises(LeaseLostError):
                job.checkpoint()

    job, doomed = stage.job(body), stage.new_worker()
    source = (job if whose == "its own" else resting).input("x")
    source.write_many(range(5))
    hold = stage.claim(job, worker_id=doomed)
    assert hold is not None
    stage.perform(hold)
    assert (len(source), len(job.output("b"))) == (5, 0)
    assert stage.run(job) == "completed"
    assert read == [[0, 1, 2]] * 2
    assert (list(source), list(job.output("b"))) == ([3, 4], [1])
