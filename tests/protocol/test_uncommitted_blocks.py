"""What was read for a block that the caller did not commit is on its port again, in order, and the body is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from celery_sidejob import IllegalMoveError, Job, RunningJob, UnitNotCommittedError
from tests.acceptance.lenders import LENDERS, Lender
from tests.tools.in_process import Stage

KINDS = ["connection-psycopg", "session-psycopg", "session-psycopg2", "psycopg", "django", "django-manual"]
ORDERS = [300, 301, 302]


class Refused(Exception):
    """Raised by bodies."""


@pytest.fixture
def invoices(stage: Stage) -> Iterator[None]:
    stage.sql("CREATE TABLE public.invoices (n bigint GENERATED ALWAYS AS IDENTITY, id int)")
    yield
    stage.sql("DROP TABLE public.invoices")


pytestmark = pytest.mark.usefixtures("invoices")


def billed(stage: Stage) -> list[int]:
    return [number for (number,) in stage.sql("SELECT id FROM public.invoices ORDER BY n")]


def waiting(job: Job, port: str = "orders") -> list[Any]:
    return [packet.value for packet in job.input(port).peek()]


@contextmanager
def lent(stage: Stage, kind: str) -> Iterator[Lender]:
    """A connection of the body's own, which is rolled back at the end of the block unless it was committed."""
    with LENDERS[kind](stage.database_url) as lender:
        try:
            yield lender
        finally:
            lender.rollback()


def add(lender: Lender, order: int) -> None:
    lender.sql(f"INSERT INTO public.invoices (id) VALUES ({order})")


def with_orders(stage: Stage, body: Any, orders: list[int] = ORDERS) -> Job:
    job = stage.job(body)
    with stage.sidejob.port_options(notify=False):
        job.input("orders").write_many(orders)
    return job


def is_told(stage: Stage, job: Job) -> None:
    """The body was told that what it had read was not committed, and did not catch it."""
    with pytest.raises(UnitNotCommittedError, match="rolled back, or not committed afterwards"):
        stage.run(job)
    assert job.refresh().status == "failed"


def goes_on(stage: Stage, job: Job) -> None:
    """The code was mended: nothing was lost, and nothing comes twice."""
    job.run(force=True)
    assert stage.run(job) == "completed"
    assert (billed(stage), waiting(job)) == (ORDERS, [])


# -- turns ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "number", "options"),
    [
        *[(kind, number, {}) for kind in KINDS for number in (1, 2)],
        ("psycopg", 0, {}),
        *[("psycopg", number, {"commit_every": 10}) for number in (1, 2)],
        *[("psycopg", number, {"commit_every": 10, "commit_within": 0}) for number in (1, 2)],
    ],
)
def test_an_order_whose_commit_was_forgotten_is_there_again(
    stage: Stage, kind: str, number: int, options: dict[str, Any]
) -> None:
    forgotten = ORDERS[number : number + 1]

    def body(job: RunningJob) -> None:
        for order in job.for_inputs("orders", **options):
            with lent(stage, kind) as lender:
                with job.unit(transaction=lender.transaction):
                    add(lender, order)
                    job.output("receipts").write(order)
                if order not in forgotten:
                    lender.commit()

    job = with_orders(stage, body)
    is_told(stage, job)
    assert (billed(stage), waiting(job)) == (ORDERS[:number], ORDERS[number:])
    forgotten.clear()
    goes_on(stage, job)
    assert list(job.output("receipts")) == ORDERS


@pytest.mark.parametrize("kind", KINDS)
def test_a_commit_inside_the_block_keeps_the_rows_alone(stage: Stage, kind: str) -> None:
    def body(job: RunningJob) -> None:
        for order in job.for_inputs("orders"):
            with lent(stage, kind) as lender, job.unit(transaction=lender.transaction):
                add(lender, order)
                lender.commit()

    job = with_orders(stage, body)
    is_told(stage, job)
    assert (billed(stage), waiting(job)) == (ORDERS[:1], ORDERS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_packets_come_again_to_a_body_that_catches_the_error(stage: Stage, kind: str) -> None:
    seen: list[int] = []

    def turns(job: RunningJob) -> None:
        for order in job.for_inputs("orders"):
            seen.append(order)
            with lent(stage, kind) as lender:
                with job.unit(transaction=lender.transaction):
                    add(lender, order)
                if seen != [300, 301]:
                    lender.commit()

    def body(job: RunningJob) -> None:
        with pytest.raises(UnitNotCommittedError):
            turns(job)
        turns(job)

    job = with_orders(stage, body)
    assert stage.run(job) == "completed"
    assert (seen, billed(stage), waiting(job)) == ([300, 301, 301, 302], ORDERS, [])


@contextmanager
def in_savepoint(stage: Stage, kind: str, wrong: bool) -> Iterator[Lender]:
    """A transaction that is committed, and whose savepoint was rolled back behind a block that is wrong."""
    with lent(stage, kind) as lender:
        lender.sql("SELECT 1")
        with suppress(Refused), lender.savepoint():
            yield lender
            if wrong:
                raise Refused
        lender.commit()


@contextmanager
def in_all(stage: Stage, kind: str, wrong: bool) -> Iterator[Lender]:
    """A transaction that is committed, unless the block is left by an error, which the body catches."""
    with suppress(Refused), lent(stage, kind) as lender:
        yield lender
        lender.commit()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("within", "raises"), [(in_savepoint, False), (in_all, True)], ids=["savepoint", "error"])
def test_a_block_that_is_rolled_back_and_passed_over_consumes_no_order(
    stage: Stage, kind: str, within: Any, raises: bool
) -> None:
    """By a savepoint around it, or by an error within it that the body catches."""
    wrong = [301]

    def body(job: RunningJob) -> None:
        for order in job.for_inputs("orders"):
            with within(stage, kind, order in wrong) as lender, job.unit(transaction=lender.transaction):
                add(lender, order)
                if raises and order in wrong:
                    raise Refused

    job = with_orders(stage, body)
    is_told(stage, job)
    assert (billed(stage), waiting(job)) == ([300], [301, 302])
    wrong.clear()
    goes_on(stage, job)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_that_is_repeated_in_its_turn_takes_the_order_with_it(stage: Stage, kind: str) -> None:
    def body(job: RunningJob) -> None:
        for order in job.for_inputs("orders"):
            with lent(stage, kind) as lender:
                for attempt in range(3):
                    with job.unit(transaction=lender.transaction):
                        add(lender, order)
                    if order != 301 or attempt == 2:
                        lender.commit()
                        break
                    lender.rollback()

    job = with_orders(stage, body)
    assert stage.run(job) == "completed"
    assert (billed(stage), waiting(job)) == (ORDERS, [])


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_without_rows_leaves_an_order_out(stage: Stage, kind: str) -> None:
    def body(job: RunningJob) -> None:
        for order in job.for_inputs("orders"):
            with lent(stage, kind) as lender:
                try:
                    with job.unit(transaction=lender.transaction):
                        add(lender, order)
                        if order == 301:
                            raise Refused
                except Refused:
                    lender.rollback()
                    with job.unit(transaction=lender.transaction):
                        job.output("rejected").write(order)
                lender.commit()

    job = with_orders(stage, body)
    assert stage.run(job) == "completed"
    assert (billed(stage), waiting(job), list(job.output("rejected"))) == ([300, 302], [], [301])


@pytest.mark.parametrize("how", ["suspends", "breaks off", "reads on"])
def test_a_body_cannot_leave_an_uncommitted_block_behind(stage: Stage, how: str) -> None:
    def body(job: RunningJob) -> None:
        for order in job.for_inputs("orders"):
            with lent(stage, "psycopg") as lender, job.unit(transaction=lender.transaction):
                add(lender, order)
            if how == "suspends":
                job.suspend()
            elif how == "reads on":
                job.input("orders").read()
            else:
                break

    job = with_orders(stage, body)
    is_told(stage, job)
    assert (billed(stage), waiting(job)) == ([], ORDERS)


@pytest.mark.parametrize("forgotten", [True, False])
def test_a_startup_that_suspends_settles_its_block_first(stage: Stage, forgotten: bool) -> None:
    @stage.task(name="stage.bill", inports=["orders"], outports=["receipts"])
    def bill(job: RunningJob) -> None:
        pass

    @bill.on_startup
    def _(job: RunningJob) -> None:
        with lent(stage, "psycopg") as lender:
            with job.unit(transaction=lender.transaction):
                add(lender, 300)
                job.output("receipts").write(300)
            if not forgotten:
                lender.commit()
        job.suspend()

    job = stage.sidejob.enqueue(bill)
    if forgotten:
        is_told(stage, job)
    else:
        assert stage.run(job) == "suspended"
    done = [] if forgotten else [300]
    assert (billed(stage), [packet.value for packet in job.output("receipts").peek()]) == (done, done)


def test_a_retry_of_the_run_needs_no_commit(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        for order in job.for_inputs("orders"):
            with lent(stage, "psycopg") as lender:
                with job.unit(transaction=lender.transaction):
                    add(lender, order)
                if job.run_no == 1:
                    raise job.retry(countdown=0)
                lender.commit()

    job = with_orders(stage, body)
    assert stage.run(job) == "queued"
    assert (billed(stage), waiting(job)) == ([], ORDERS)
    assert stage.run(job) == "completed"
    assert billed(stage) == ORDERS


# -- without turns ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["unit", "checkpoint"])
def test_packets_that_were_read_before_the_block_are_there_again(stage: Stage, kind: str, how: str) -> None:
    forgotten = [301]

    def body(job: RunningJob) -> None:
        for order in job.input("orders"):
            with lent(stage, kind) as lender:
                if how == "unit":
                    with job.unit(transaction=lender.transaction):
                        add(lender, order)
                else:
                    add(lender, order)
                    job.checkpoint(transaction=lender.transaction)
                if order not in forgotten:
                    lender.commit()

    job = with_orders(stage, body)
    is_told(stage, job)
    assert (billed(stage), waiting(job)) == ([300], [301, 302])
    forgotten.clear()
    goes_on(stage, job)


@pytest.mark.parametrize("kind", KINDS)
def test_packets_that_were_read_in_the_block_are_there_again_in_order(stage: Stage, kind: str) -> None:
    """Beside that of the turn; of another port and of the same one."""
    forgotten = True

    def body(job: RunningJob) -> None:
        for order in job.for_inputs("orders"):
            with lent(stage, kind) as lender:
                with job.unit(transaction=lender.transaction):
                    for number in (order, job.input("orders").read(), job.input("more").read()):
                        add(lender, number)
                    job.input("more").peek()
                if not forgotten:
                    lender.commit()

    job = with_orders(stage, body, [300, 301, 303, 304])
    with stage.sidejob.port_options(notify=False):
        job.input("more").write_many([302, 305])
    is_told(stage, job)
    assert (billed(stage), waiting(job), waiting(job, "more")) == ([], [300, 301, 303, 304], [302, 305])
    forgotten = False
    job.run(force=True)
    assert stage.run(job) == "completed"
    assert billed(stage) == [300, 301, 302, 303, 304, 305]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_does_not_end_well_with_a_block_that_was_not_committed(stage: Stage, kind: str) -> None:
    """All that it read, it read in the block, or it read nothing."""
    forgotten = True

    def body(job: RunningJob) -> None:
        with lent(stage, kind) as lender:
            with job.unit(transaction=lender.transaction):
                for order in job.input("orders"):
                    add(lender, order)
            if not forgotten:
                lender.commit()

    job = with_orders(stage, body)
    is_told(stage, job)
    assert (billed(stage), waiting(job)) == ([], ORDERS)
    forgotten = False
    goes_on(stage, job)


def test_a_rollback_costs_nothing_where_nothing_was_read_for_the_block(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        with lent(stage, "psycopg") as lender, job.unit(transaction=lender.transaction):
            job.set(inside=True)
        job.set(after=True)

    job = stage.job(body)
    assert stage.run(job) == "completed"
    assert job.state == {"after": True}


# -- blocks and what is in them ---------------------------------------------------------------------------------------


def test_a_block_in_a_block_is_refused_before_it_can_take_the_packets_along(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        for order in job.for_inputs("orders"):
            with lent(stage, "psycopg") as outer, lent(stage, "psycopg") as inner:
                with job.unit(transaction=outer.transaction):
                    add(outer, order)
                    with job.unit(transaction=inner.transaction):
                        add(inner, order)
                    inner.commit()

    job = with_orders(stage, body)
    with pytest.raises(IllegalMoveError, match="inside another"):
        stage.run(job)
    assert (billed(stage), waiting(job)) == ([], ORDERS)


@pytest.mark.parametrize("forgotten", [False, True])
def test_turns_inside_a_block_are_committed_with_it(stage: Stage, forgotten: bool) -> None:
    def body(job: RunningJob) -> None:
        with lent(stage, "psycopg") as lender:
            with job.unit(transaction=lender.transaction):
                for order in job.for_inputs("orders"):
                    add(lender, order)
                    left.append(stage.sql("SELECT count(*) FROM packets")[0][0])
            if not forgotten:
                lender.commit()

    left: list[int] = []
    job = with_orders(stage, body)
    if forgotten:
        is_told(stage, job)
    else:
        assert stage.run(job) == "completed"
    assert left == [3, 3, 3]
    assert (billed(stage), waiting(job)) == (([], ORDERS) if forgotten else (ORDERS, []))


# -- turns of defaults alone ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["raises", "dies", "breaks off"])
def test_a_turn_of_defaults_that_was_committed_does_not_come_again(stage: Stage, then: str) -> None:
    """The body has committed it, with its row; what becomes of the rest of the run changes nothing."""

    def body(job: RunningJob) -> None:
        for order in job.for_inputs("orders"):
            with lent(stage, "psycopg") as lender:
                with job.unit(transaction=lender.transaction):
                    add(lender, order)
                lender.commit()
            if then == "breaks off":
                break
            if job.run_no == 1:
                raise KeyboardInterrupt if then == "dies" else Refused

    job = stage.job(body, inports={"orders": {"default": 7}})
    hold = stage.claim(job)
    assert hold is not None
    with suppress(KeyboardInterrupt):
        stage.perform(hold)
    if then == "dies":
        stage.declare_dead(stage.worker_id)
        assert stage.sidejob.poll().rescued == 1
        stage.worker_id = stage.new_worker()
    else:
        job.run(force=True)
    assert stage.run(job) == "completed"
    assert billed(stage) == [7]


def test_a_turn_of_defaults_that_was_not_committed_comes_again(stage: Stage) -> None:
    forgotten = True

    def body(job: RunningJob) -> None:
        for order in job.for_inputs("orders"):
            with lent(stage, "psycopg") as lender:
                with job.unit(transaction=lender.transaction):
                    add(lender, order)
                if not forgotten:
                    lender.commit()

    job = stage.job(body, inports={"orders": {"default": 7}})
    is_told(stage, job)
    assert billed(stage) == []
    forgotten = False
    for _ in range(2):
        job.run(force=True)
        assert stage.run(job) == "completed"
        assert billed(stage) == [7]


def test_a_turn_of_defaults_whose_block_has_failed_comes_again(stage: Stage) -> None:
    """The body has caught the block's error, and goes on as if it had read nothing."""
    failing = True

    def body(job: RunningJob) -> None:
        for order in job.for_inputs("orders"):
            with lent(stage, "psycopg") as lender, suppress(Refused):
                with job.unit(transaction=lender.transaction):
                    add(lender, order)
                    if failing:
                        raise Refused
                lender.commit()

    job = stage.job(body, inports={"orders": {"default": 7}})
    with pytest.raises(UnitNotCommittedError):
        stage.run(job)
    assert (job.refresh().status, billed(stage)) == ("failed", [])
    failing = False
    job.run(force=True)
    assert (stage.run(job), billed(stage)) == ("completed", [7])
