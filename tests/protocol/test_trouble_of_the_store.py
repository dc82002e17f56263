"""The store's own trouble, as a body sees it through its own connection, is a lost run and no failure of the job."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from celery_sidejob import Job, RunningJob, StoreUnavailableError
from celery_sidejob.store.borrowed.borrowed import Borrowed
from celery_sidejob.store.borrowed.of_sqlalchemy import AFTER_COMMIT
from tests.acceptance.lenders import LENDERS, Lender
from tests.tools.in_process import Stage
from tests.tools.pgbouncer import direct
from tests.tools.proxy import TcpProxy

NOWHERE = "postgresql://nobody@127.0.0.1:1/nothing"
BROKEN = ["in the block", "on leaving the block", "at the commit"]


class Ledger:
    """A table of the user's own in the store's database, and what ends the connections that lead to it."""

    def __init__(self, stage: Stage, kind: str) -> None:
        self._stage = stage
        self._url = direct(stage.database_url)
        self._kind = kind
        self._pids: list[int] = []
        stage.sql("CREATE TABLE public.ledger (value int)")

    def lender(self) -> Any:
        """Return a connection of the body's own, which `break_it` ends."""
        return LENDERS[self._kind](self._url)

    def begin(self, lender: Lender) -> None:
        """Begin a transaction on it."""
        self._pids = [lender.sql("SELECT pg_backend_pid()")[0][0]]

    def break_it(self) -> None:
        """End the connection of the last transaction that was begun, as an administrator does, or a failover."""
        self._stage.sql("SELECT pg_terminate_backend(%s, 5000)", *self._pids)

    def rows(self) -> list[int]:
        return [value for (value,) in self._stage.sql("SELECT value FROM public.ledger ORDER BY value")]


@pytest.fixture(params=list(LENDERS))
def ledger(stage: Stage, request: pytest.FixtureRequest) -> Iterator[Ledger]:
    yield Ledger(stage, request.param)
    for thread in threading.enumerate():
        if thread.name == AFTER_COMMIT:
            thread.join()
    stage.sql("DROP TABLE public.ledger")


def bill(ledger: Ledger, when: str | None) -> Callable[[RunningJob], Any]:
    """The README's loop, whose connection breaks once."""
    left = [when] if when else []

    def body(job: RunningJob) -> None:
        for value in job.for_inputs("orders"):
            with ledger.lender() as lender:
                ledger.begin(lender)
                breaks = left.pop() if left and value == 2 else None
                with job.unit(transaction=lender.transaction):
                    if breaks == "in the block":
                        ledger.break_it()
                    lender.sql(f"INSERT INTO public.ledger VALUES ({value})")
                    job.output("receipts").write(value)
                    if breaks == "on leaving the block":
                        ledger.break_it()
                if breaks == "at the commit":
                    ledger.break_it()
                lender.commit()

    return body


def billed(stage: Stage, body: Callable[[RunningJob], Any], **options: Any) -> Job:
    """Make a job with three orders."""
    job = stage.job(body, **options)
    with stage.sidejob.port_options(notify=False):
        job.input("orders").write_many([1, 2, 3])
    return job


@pytest.mark.parametrize("when", BROKEN)
def test_a_connection_that_is_lost_is_a_lost_run(stage: Stage, ledger: Ledger, when: str) -> None:
    job = billed(stage, bill(ledger, when))

    stage.drain()

    assert stage.raised == {}
    assert job.refresh().status == "completed"
    assert (ledger.rows(), list(job.output("receipts"))) == ([1, 2, 3], [1, 2, 3])
    assert (job.info["run_no"], len(stage.sidejob.dead)) == (2, 0)


@pytest.mark.few(2)
def test_a_connection_lost_before_any_statement_of_ours_is_a_lost_run(
    stage: Stage, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before those of the first look at where the connection leads, which a process takes once."""
    with ledger.lender() as lender:
        stage.runtime.connections.borrow(lender.transaction)  # so that its library's adapter is imported
    breaks = Break(ledger)
    breaks.patch(monkeypatch)
    for at in itertools.count(1):
        breaks.arm(at)
        stage.runtime.connections._seen.clear()
        job = stage.job(bill(ledger, None))
        job.input("orders").write(at)
        stage.drain()
        assert (stage.raised, job.refresh().status) == ({}, "completed"), breaks.text
        assert list(job.output("receipts")) == [at]
        if breaks.text is None:
            break
        assert job.info["run_no"] == 2, breaks.text
    assert ledger.rows() == [*range(1, at + 1)]
    assert at > 10


def test_a_body_that_goes_on_after_a_lost_connection_is_lost_as_well(stage: Stage, ledger: Ledger) -> None:
    """What it sees then is another error of its library: of a transaction that it has to roll back first."""
    left = [True]

    def body(job: RunningJob) -> None:
        with ledger.lender() as lender:
            ledger.begin(lender)
            with job.unit(transaction=lender.transaction):
                if left and left.pop():
                    ledger.break_it()
                    with suppress(Exception):
                        lender.sql("SELECT 1")
                lender.sql("INSERT INTO public.ledger VALUES (1)")
            lender.commit()

    job = stage.job(body)
    assert (stage.drain(), stage.raised, job.refresh().status) == (2, {}, "completed")
    assert ledger.rows() == [1]


class Break:
    """Ends the connection of the body before one of the statements that we execute on it."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._left = 0
        self.text: str | None = None
        """The statement, once it is reached."""

    def arm(self, at: int) -> None:
        """Break before the statement of this number from now on."""
        self._left, self.text = at, None

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Watch the adapters of all libraries."""
        for adapter in Borrowed.__subclasses__():
            monkeypatch.setattr(adapter, "_execute", self._breaking(adapter._execute))

    def _breaking(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        def breaking(borrowed: Borrowed, text: str, *parameters: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                self.text = text
                self._ledger.break_it()
            return execute(borrowed, text, *parameters)

        return breaking


def test_a_commit_whose_answer_is_lost_is_not_done_again(stage: Stage) -> None:
    """The server has the row and the unit; the next run begins with what they have left."""
    stage.sql("CREATE TABLE public.ledger (value int)")
    parts = urlsplit(direct(stage.database_url))
    with TcpProxy(parts.hostname or "", parts.port or 5432) as proxy:
        left = [True]

        def body(job: RunningJob) -> None:
            for value in job.for_inputs("orders"):
                with psycopg.connect(proxy.url_for(direct(stage.database_url))) as connection:
                    with job.unit(transaction=connection):
                        connection.execute("INSERT INTO public.ledger VALUES (%s)", [value])
                    if value == 2 and left.pop():
                        proxy.cut_after(b"COMMIT")
                    connection.commit()

        job = billed(stage, body)
        stage.drain()

    assert (stage.raised, job.refresh().status, job.info["run_no"]) == ({}, "completed", 2)
    assert stage.sql("DELETE FROM public.ledger RETURNING value") == [(1,), (2,), (3,)]
    stage.sql("DROP TABLE public.ledger")


def test_trouble_without_end_is_lost_often_enough(stage: Stage, ledger: Ledger) -> None:
    """It counts as any loss, so that a body which brings it about does not run for ever."""

    def body(job: RunningJob) -> None:
        with ledger.lender() as lender:
            ledger.begin(lender)
            with job.unit(transaction=lender.transaction):
                job.set(begun=True)
            ledger.break_it()
            lender.commit()

    job = stage.job(body)
    assert stage.drain() == 3

    assert (job.refresh().status, job.state) == ("failed", {})
    assert [entry.reason for entry in stage.sidejob.dead] == ["lost"]


def refused(lender: Lender) -> None:
    lender.sql("INSERT INTO public.ledger VALUES ('no number')")


def timed_out(lender: Lender) -> None:
    lender.sql("SET LOCAL statement_timeout = '10ms'; SELECT pg_sleep(60)")


def of_its_own(lender: Lender) -> None:
    raise ConnectionError("of another server")


@pytest.mark.parametrize("fails", [refused, timed_out, of_its_own])
def test_what_the_body_brings_about_is_its_failure(
    stage: Stage, ledger: Ledger, fails: Callable[[Lender], None]
) -> None:
    def body(job: RunningJob) -> None:
        with ledger.lender() as lender, job.unit(transaction=lender.transaction):
            fails(lender)

    job = stage.job(body)
    assert stage.drain() == 1

    assert job.refresh().status == "failed"
    assert not isinstance(stage.raised[job.id], StoreUnavailableError)


def test_a_serialization_failure_at_the_commit_is_the_bodys_to_repeat(stage: Stage, ledger: Ledger) -> None:
    """The connection is as well as before, and nothing was committed."""
    others = [1]

    def body(job: RunningJob) -> None:
        with ledger.lender() as lender:
            lender.sql("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
            seen = lender.sql("SELECT count(*) FROM public.ledger")[0][0]
            with job.unit(transaction=lender.transaction):
                job.set(seen=seen)
                lender.sql("INSERT INTO public.ledger VALUES (0)")
            with psycopg.connect(direct(stage.database_url)) as other:
                other.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
                other.execute("SELECT count(*) FROM public.ledger")
                other.execute("INSERT INTO public.ledger SELECT n FROM unnest(%s::int[]) n", [others])
                others.clear()
            lender.commit()

    job = stage.job(body)
    assert stage.drain() == 1

    assert (job.refresh().status, job.state, ledger.rows()) == ("failed", {}, [1])
    assert "could not serialize access" in str(stage.raised[job.id])
    job.run(force=True)
    assert stage.drain() == 1
    assert (job.refresh().status, job.state, ledger.rows()) == ("completed", {"seen": 1}, [0, 1])


def test_another_servers_trouble_after_the_commit_is_the_bodys_failure(stage: Stage, ledger: Ledger) -> None:
    def body(job: RunningJob) -> None:
        with ledger.lender() as lender:
            with job.unit(transaction=lender.transaction):
                job.set(done=True)
            lender.commit()
            psycopg.connect(NOWHERE)

    job = stage.job(body)
    assert stage.drain() == 1

    assert (job.refresh().status, job.state) == ("failed", {"done": True})


@pytest.mark.parametrize("how", ["in a unit", "alone"])
def test_a_shutdown_is_tried_again(stage: Stage, ledger: Ledger, how: str) -> None:
    """Also where its connection has nothing to do with a unit: otherwise its cleanup would be skipped."""
    left = [True]

    def body(job: RunningJob) -> None:
        pass

    task = stage.task(body, name="trouble.tidy", shared=False)

    @task.on_shutdown
    def clean(job: RunningJob) -> None:
        with ledger.lender() as lender:
            ledger.begin(lender)
            lender.sql(f"INSERT INTO public.ledger VALUES ({job.id})")
            if how == "in a unit":
                with job.unit(transaction=lender.transaction):
                    job.set(clean=True)
            if left and left.pop():
                ledger.break_it()
            lender.commit()

    job = task.enqueue()
    stage.drain()
    job.terminate()
    stage.drain()

    assert job.refresh().status == "terminated"
    assert ledger.rows() == [job.id]
    assert len(stage.sidejob.dead) == 0


@pytest.mark.parametrize("commits", [False, True])
def test_a_shutdown_is_not_tried_for_ever(stage: Stage, commits: bool) -> None:
    def body(job: RunningJob) -> None:
        pass

    task = stage.task(body, name="trouble.tidy", shared=False)

    @task.on_shutdown
    def clean(job: RunningJob) -> None:
        if commits:
            job.set(tried=True)
            job.checkpoint()
        psycopg.connect(NOWHERE)

    job = task.enqueue()
    stage.drain()
    job.terminate()

    assert stage.drain() == (1 if commits else 3)
    assert job.refresh().status == "terminated"
    assert [entry.reason for entry in stage.sidejob.dead] == ([] if commits else ["shutdown lost"])


def test_a_transaction_that_is_left_open_over_a_lost_connection_holds_nobody_up(stage: Stage) -> None:
    """Whatever the body then raises."""

    def body(job: RunningJob) -> None:
        with psycopg.connect(direct(stage.database_url)) as connection:
            with job.unit(transaction=connection):
                job.set(done=True)
            stage.sql("SELECT pg_terminate_backend(%s, 5000)", connection.info.backend_pid)
            raise LookupError("a body that does not know")

    job = stage.job(body)
    assert stage.drain() == 1
    assert (job.refresh().status, job.state) == ("failed", {})
    assert isinstance(stage.raised[job.id], LookupError)
