"""The caller's own commit, applied or not, whose answer is lost: what the body of the run may do then."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import django.db
import psycopg
import pytest
import sqlalchemy.exc

from celery_sidejob import CommitInDoubtError, Job, RunningJob
from tests.acceptance.lenders import LENDERS, Lender
from tests.tools.in_process import Stage
from tests.tools.proxy import TcpProxy
from tests.tools.waiting import wait_until

BROKEN: dict[str, type[Exception]] = {
    "connection-psycopg": sqlalchemy.exc.DBAPIError,
    "connection-psycopg2": sqlalchemy.exc.DBAPIError,
    "session-psycopg": sqlalchemy.exc.DBAPIError,
    "session-psycopg2": sqlalchemy.exc.DBAPIError,
    "psycopg": psycopg.OperationalError,
    "django": django.db.Error,
    "django-manual": django.db.Error,
}
"""What each kind raises for a connection that broke."""
KINDS = list(BROKEN)
ORDERS = [300, 301, 302]


@pytest.fixture
def proxy(stage: Stage) -> Iterator[TcpProxy]:
    """Between the body's own connections and the database; the store's lead past it."""
    with TcpProxy.to(stage.database_url) as made:
        yield made


@pytest.fixture(autouse=True)
def invoices(stage: Stage) -> Iterator[None]:
    stage.sql("CREATE TABLE public.invoices (n bigint GENERATED ALWAYS AS IDENTITY, id int)")
    yield
    stage.sql("DROP TABLE public.invoices")


def billed(stage: Stage) -> list[int]:
    return [number for (number,) in stage.sql("SELECT id FROM public.invoices ORDER BY n")]


def waiting(job: Job) -> list[Any]:
    return [packet.value for packet in job.input("orders").peek()]


def with_orders(stage: Stage, body: Any) -> Job:
    job = stage.job(body)
    with stage.sidejob.port_options(notify=False):
        job.input("orders").write_many(ORDERS)
    return job


@contextmanager
def lent(stage: Stage, kind: str, proxy: TcpProxy) -> Iterator[Lender]:
    """A connection of the body's own; leaving the block after the connection broke raises nothing more."""
    opened = LENDERS[kind](proxy.url_for(stage.database_url))
    lender = opened.__enter__()
    try:
        yield lender
    finally:
        with suppress(Exception):
            lender.rollback()
        with suppress(Exception):
            opened.__exit__(None, None, None)


def bill(stage: Stage, job: RunningJob, kind: str, proxy: TcpProxy, order: int) -> None:
    with lent(stage, kind, proxy) as lender:
        with job.unit(transaction=lender.transaction):
            lender.sql(f"INSERT INTO public.invoices (id) VALUES ({order})")
            job.output("receipts").write(order)
        lender.commit()


def answer_lost(proxy: TcpProxy) -> None:
    proxy.cut_after(b"COMMIT")


def try_again(job: RunningJob, call: Callable[[], Any], most: int = 3) -> None:
    """As bodies do it that know of connections which break."""
    for attempt in range(most):
        try:
            call()
        except Exception:
            if attempt == most - 1:
                raise
        else:
            return


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_not_repeated_after_its_commit_was_applied(stage: Stage, proxy: TcpProxy, kind: str) -> None:
    def body(job: RunningJob) -> None:
        for order in job.for_inputs("orders"):
            if order == 301 and job.run_no == 1:
                answer_lost(proxy)
            try_again(job, lambda order=order: bill(stage, job, kind, proxy, order))

    job = with_orders(stage, body)
    assert stage.run(job) == "queued", "the run was lost, and the job did not fail"
    assert (billed(stage), waiting(job)) == ([300, 301], [302])
    assert stage.run(job) == "completed"
    assert (billed(stage), waiting(job), list(job.output("receipts"))) == (ORDERS, [], ORDERS)
    assert job.info["losses"] == 0


@pytest.mark.parametrize(
    ("kind", "how"), [*[(kind, "checkpoint") for kind in KINDS], ("psycopg", "turn"), ("session-psycopg", "turn")]
)
def test_a_body_that_knows_of_it_goes_on(stage: Stage, proxy: TcpProxy, kind: str, how: str) -> None:
    def body(job: RunningJob) -> None:
        for order in job.for_inputs("orders"):
            if order == 301:
                answer_lost(proxy)
                with pytest.raises(BROKEN[kind]):
                    bill(stage, job, kind, proxy, order)
                if how == "checkpoint":
                    for _ in range(2):
                        with pytest.raises(CommitInDoubtError, match="is committed, although"):
                            bill(stage, job, kind, proxy, order)
                    job.checkpoint()
                    bill(stage, job, kind, proxy, 3010)
            else:
                bill(stage, job, kind, proxy, order)

    job = with_orders(stage, body)
    assert stage.run(job) == "completed"
    assert (billed(stage), waiting(job)) == ([300, 301, *([3010] if how == "checkpoint" else []), 302], [])


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_repeated_after_its_commit_finds_its_record(stage: Stage, proxy: TcpProxy, kind: str) -> None:
    new: list[bool] = []

    def invoice(job: RunningJob, number: int) -> None:
        with lent(stage, kind, proxy) as lender:
            with job.step("invoice", transaction=lender.transaction) as step:
                new.append(step.is_new)
                if step.is_new:
                    lender.sql(f"INSERT INTO public.invoices (id) VALUES ({number})")
                    step.value = number
            lender.commit()
            assert step.value == number

    def body(job: RunningJob) -> None:
        answer_lost(proxy)
        try_again(job, lambda: invoice(job, 300))
        invoice(job, 301)

    assert stage.run(stage.job(body)) == "completed"
    assert (billed(stage), new) == ([300, 301], [True, False, True])


def test_a_further_packet_of_the_turn_is_no_sign_that_the_body_knows_of_it(stage: Stage, proxy: TcpProxy) -> None:
    def body(job: RunningJob) -> None:
        for order in job.for_inputs("orders"):
            answer_lost(proxy)
            with pytest.raises(BROKEN["psycopg"]):
                bill(stage, job, "psycopg", proxy, order)
            job.input("details").read()
            with pytest.raises(CommitInDoubtError, match="is committed, although"):
                bill(stage, job, "psycopg", proxy, order)
            break

    job = with_orders(stage, body)
    job.input("details").write(1)
    stage.run(job)
    assert billed(stage) == [300]


def test_after_the_last_turn_the_next_block_is_another(stage: Stage, proxy: TcpProxy) -> None:
    def body(job: RunningJob) -> None:
        for order in job.for_inputs("orders"):
            if order == ORDERS[-1]:
                answer_lost(proxy)
                with pytest.raises(BROKEN["psycopg"]):
                    bill(stage, job, "psycopg", proxy, order)
            else:
                bill(stage, job, "psycopg", proxy, order)
        bill(stage, job, "psycopg", proxy, 4000)

    job = with_orders(stage, body)
    assert stage.run(job) == "completed"
    assert billed(stage) == [*ORDERS, 4000]


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_repeated_after_a_commit_that_was_not_applied(stage: Stage, proxy: TcpProxy, kind: str) -> None:
    """The connection broke before the commit was sent."""
    broken: list[bool] = []

    def once(job: RunningJob, order: int) -> None:
        with lent(stage, kind, proxy) as lender:
            with job.unit(transaction=lender.transaction):
                lender.sql(f"INSERT INTO public.invoices (id) VALUES ({order})")
            if order == 301 and not broken:
                broken.append(True)
                proxy.cut()
                gone(stage)
            lender.commit()

    def body(job: RunningJob) -> None:
        for order in job.for_inputs("orders"):
            try_again(job, lambda order=order: once(job, order))

    job = with_orders(stage, body)
    assert stage.run(job) == "completed"
    assert (billed(stage), waiting(job)) == (ORDERS, [])


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        *[(kind, "after it") for kind in KINDS],
        *[(kind, "in the block") for kind in ("psycopg", "session-psycopg2", "django")],
    ],
)
def test_a_connection_that_broke_before_the_commit_is_not_the_jobs_failure(
    stage: Stage, proxy: TcpProxy, kind: str, where: str
) -> None:
    """The body catches it and goes on with the next order: the run is lost, and begins again with this one."""

    def body(job: RunningJob) -> None:
        for order in job.for_inputs("orders"):
            with suppress(Exception), lent(stage, kind, proxy) as lender:
                with job.unit(transaction=lender.transaction):
                    if order == 301 and job.run_no == 1 and where == "in the block":
                        lender.sql("SELECT 1")
                        proxy.cut()
                    lender.sql(f"INSERT INTO public.invoices (id) VALUES ({order})")
                if order == 301 and job.run_no == 1:
                    proxy.cut()
                    gone(stage)
                lender.commit()

    job = with_orders(stage, body)
    assert stage.run(job) == "queued"
    assert (billed(stage), waiting(job)) == ([300], [301, 302])
    assert stage.run(job) == "completed"
    assert (billed(stage), waiting(job)) == (ORDERS, [])


def gone(stage: Stage) -> None:
    """Wait until the server has seen that the body's connection is gone, and has rolled its transaction back."""
    wait_until(
        lambda: (
            not stage.sql(
                "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'"
            )
        )
    )


@contextmanager
def commits_waiting(stage: Stage) -> Iterator[None]:
    """Have commits of invoices wait for the end of the block."""
    stage.sql(
        "CREATE FUNCTION public.wait() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN NULL; END $$"
    )
    stage.sql(
        "CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON public.invoices DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION public.wait()"
    )
    with stage.connect() as holding:
        holding.execute("SELECT pg_advisory_lock(4711)")
        yield
    stage.sql("DROP FUNCTION public.wait CASCADE")


@pytest.mark.parametrize("kind", ["connection-psycopg2", "session-psycopg", "psycopg", "django", "django-manual"])
def test_nothing_is_repeated_while_postgres_has_not_decided(stage: Stage, proxy: TcpProxy, kind: str) -> None:
    """The connection is gone, and the server is in the middle of the commit."""

    def cut() -> None:
        wait_until(lambda: stage.sql("SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"))
        proxy.cut()

    def body(job: RunningJob) -> None:
        for order in job.for_inputs("orders"):
            if job.run_no > 1:
                bill(stage, job, kind, proxy, order)
                continue
            with commits_waiting(stage):
                cutting = threading.Thread(target=cut)
                cutting.start()
                with pytest.raises(BROKEN[kind]):
                    bill(stage, job, kind, proxy, order)
                cutting.join()
                with pytest.raises(CommitInDoubtError, match="has not decided yet"):
                    bill(stage, job, kind, proxy, order)
            wait_until(lambda: billed(stage))
            bill(stage, job, kind, proxy, order)

    job = with_orders(stage, body)
    assert stage.run(job) == "queued"
    assert (billed(stage), waiting(job)) == ([300], [301, 302])
    assert stage.run(job) == "completed"
    assert (billed(stage), waiting(job)) == (ORDERS, [])
