"""`port.read(transaction=…)`: a packet is consumed if and only if the caller's transaction is committed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from celery_sidejob import NO_DATA, IllegalMoveError, Job, RunningJob
from tests.acceptance.lenders import LENDERS, Lender
from tests.tools.in_process import Stage
from tests.tools.threads import in_thread
from tests.tools.waiting import wait_until

BLOCKED = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


@pytest.fixture(params=[kind for kind in LENDERS if kind != "connection-psycopg2"])
def lender(request: pytest.FixtureRequest, stage: Stage) -> Iterator[Lender]:
    with LENDERS[request.param](stage.database_url) as made:
        try:
            yield made
        finally:
            made.rollback()


def waiting(job: Job, port: str = "a") -> list[Any]:
    return [packet.value for packet in job.input(port).peek()]


def with_packets(stage: Stage, body: Any = None, values: tuple[int, ...] = (1, 2, 3)) -> Job:
    job = stage.job(body, inports=["a", "b"])
    with stage.sidejob.port_options(notify=False):
        job.input("a").write_many(values)
    return job


def test_packets_are_consumed_by_the_commit_and_stay_after_a_rollback(stage: Stage, lender: Lender) -> None:
    job = with_packets(stage)
    port = job.input("a")
    port.default = "empty"

    def read() -> list[Any]:
        packet = port.read_packet(transaction=lender.transaction)
        return [packet and packet.value, port.read(transaction=lender.transaction)]

    assert read() == [1, 2]
    assert waiting(job) == [1, 2, 3], "nothing is committed yet"
    lender.rollback()
    assert read() == [1, 2]
    lender.commit()
    assert waiting(job) == [3]
    assert read() == [3, "empty"]
    assert read() == [None, "empty"]
    assert job.input("b").read(transaction=lender.transaction) is NO_DATA
    lender.rollback()
    assert waiting(job) == [3]


def test_a_savepoint_that_is_rolled_back_gives_its_packets_back(stage: Stage, lender: Lender) -> None:
    job = with_packets(stage)
    assert job.input("a").read(transaction=lender.transaction) == 1
    with suppress(ZeroDivisionError), lender.savepoint():
        assert job.input("a").read(transaction=lender.transaction) == 2
        raise ZeroDivisionError
    assert job.input("a").read(transaction=lender.transaction) == 2
    lender.commit()
    assert waiting(job) == [3]


def test_what_the_same_transaction_has_written_is_read_back(stage: Stage, lender: Lender) -> None:
    job = stage.job(transaction=lender.transaction, inports=["a"])
    job.input("a").write_many([1, 2], transaction=lender.transaction)
    assert job.input("a").read(transaction=lender.transaction) == 1
    assert job.input("other").read(transaction=lender.transaction) is NO_DATA
    lender.commit()
    assert waiting(job) == [2]


def test_in_autocommit_a_packet_is_consumed_at_once(stage: Stage) -> None:
    job = with_packets(stage)
    with stage.connect() as connection:
        assert job.input("a").read(transaction=connection) == 1
    assert waiting(job) == [2, 3]


def test_other_clients_read_the_packets_behind(stage: Stage, lender: Lender) -> None:
    job = with_packets(stage)
    assert job.input("a").read(transaction=lender.transaction) == 1
    assert job.input("a").read() == 2
    lender.rollback()
    assert waiting(job) == [1, 3]


# -- runs that come to the same packet --------------------------------------------------------------------------------


@pytest.mark.parametrize("committed", [True, False])
def test_a_run_that_has_looked_at_the_packet_waits_with_its_commit(stage: Stage, committed: bool) -> None:
    def decide() -> None:
        wait_until(lambda: stage.sql(BLOCKED))
        connection.commit() if committed else connection.rollback()

    def body(job: RunningJob) -> None:
        for value in job.for_inputs("a"):
            if value == 1:
                stage.outside(lambda: stage.sidejob.get(job.id).input("a").read(transaction=connection))
            job.output("o").write(value)

    job = with_packets(stage, body)
    with stage.connect(autocommit=False) as connection:
        with in_thread(decide):
            after = stage.run(job)
        assert after == ("queued" if committed else "completed")
    if committed:
        assert stage.run(job) == "completed"
    assert list(job.output("o")) == ([2, 3] if committed else [1, 2, 3])


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("which", ["its own, which it takes", "its child's"])
def test_a_run_that_takes_waits_for_the_packet(stage: Stage, committed: bool, which: str) -> None:
    """It does not pass over it: nobody would ask for a run again if the transaction is rolled back."""

    def body(job: RunningJob) -> None:
        if which == "its child's":
            seen.extend(job.child("c").output("o"))
        elif job.run_no == 1:
            job.input("a").read()
            stage.sql("DELETE FROM packets WHERE value::text = '0'")  # as a client's read does
        else:
            seen.extend(job.for_inputs("a"))

    seen: list[int] = []
    job = with_packets(stage, body, (0, 1))
    port = job.input("a")
    if which == "its child's":
        port = job.enqueue("stage.idle", child_name="c").output("o")
        with stage.sidejob.port_options(notify=False):
            port.write(1)
    else:
        assert stage.run(job) == "queued"
    with stage.connect(autocommit=False) as connection:
        assert port.read(transaction=connection) == 1
        looked = threading.Event()

        def decide() -> None:
            assert looked.wait(10)
            connection.commit() if committed else connection.rollback()

        take = stage.runtime.connections.transact

        def transact(name: str, *args: Any, **options: Any) -> Any:
            found = take(name, *args, **options)
            if name == "take" and not found:
                looked.set()
            return found

        with pytest.MonkeyPatch.context() as patch, in_thread(decide):
            patch.setattr(stage.runtime.connections, "transact", transact)
            assert stage.run(job) == "completed"
    assert seen == ([] if committed else [1])
    assert (len(port), len(waiting(job))) == (0, 2 if which == "its child's" else 0)


@pytest.mark.parametrize("which", ["its own", "another's"])
def test_inside_a_run_it_is_refused_before_anything_is_read(stage: Stage, which: str) -> None:
    other = with_packets(stage)

    def body(job: RunningJob) -> None:
        with stage.connect(autocommit=False) as connection:
            (job if which == "its own" else stage.sidejob.get(other.id)).input("a").read(transaction=connection)

    job = with_packets(stage, body)
    with pytest.raises(IllegalMoveError, match="read it inside of"):
        stage.run(job)
    assert (waiting(job), waiting(other)) == ([1, 2, 3], [1, 2, 3])
