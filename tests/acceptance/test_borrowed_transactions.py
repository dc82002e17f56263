"""`transaction=`: the caller's rows and the job are both there after the commit, or neither is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psycopg
import psycopg2
import pytest
from celery.contrib.django.task import DjangoTask
from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

from celery_sidejob import (
    AliasTakenError,
    ChildNameTakenError,
    IllegalMoveError,
    InvalidValueError,
    Job,
    JobNotFoundError,
    PortNotFoundError,
    SchemaError,
    Status,
    UnknownTaskError,
    job_status_changed,
)
from tests.acceptance.borrowing_shop import HOOK_S, Rolled, Shop
from tests.acceptance.lenders import LENDERS, Lender, django_database
from tests.acceptance.scene import Scene
from tests.tools.databases import Databases
from tests.tools.pgbouncer import direct
from tests.tools.waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # Celery's backend with redis-py 8


@pytest.fixture(scope="module")
def shared_url(databases: Databases, database_template: str) -> Iterator[str]:
    """One database for all these many tests; each finds it empty."""
    with databases.fresh(template=database_template) as name:
        yield databases.url_of(name)


@pytest.fixture
def shop(shared_url: str, redis_url: str, store_url: Callable[[str], str]) -> Iterator[Shop]:
    made = Shop(store_url(shared_url), redis_url)
    yield made
    made.close()


@pytest.fixture(params=LENDERS)
def lender(request: pytest.FixtureRequest, shop: Shop) -> Iterator[Lender]:
    """Each kind of connection that can be lent to us, with no transaction begun where it need not be."""
    with LENDERS[request.param](shop.url) as lent:
        yield lent
        with suppress(Exception):
            lent.rollback()


# -- making jobs ------------------------------------------------------------------------------------------------------


def test_row_and_job_are_there_after_the_commit(shop: Shop, lender: Lender) -> None:
    lender.sql("INSERT INTO orders VALUES (1)")
    job = shop.sidejob.enqueue(
        shop.add, (3,), aliases=["order-1"], state={"total": 9}, inports={"c": {"default": 1}},
        transaction=lender.transaction,
    )  # fmt: skip
    assert (job.status, job.task, job.args, job.exists) == (Status.QUEUED, "shop.add", [3], False)
    assert (shop.orders(), shop.count("jobs"), shop.rung()) == ([], 0, 0)
    lender.commit()

    assert shop.orders() == [1]
    assert shop.sidejob.get("order-1") == job
    assert job.refresh().state == {"total": 9}
    assert [port.name for port in job.inports] == ["a", "b", "c"]
    shop.wait_rung(lender)


def test_neither_row_nor_job_is_there_after_a_rollback(shop: Shop, lender: Lender) -> None:
    lender.sql("INSERT INTO orders VALUES (1)")
    shop.add.enqueue((3,), aliases=["order-1"], transaction=lender.transaction)
    lender.rollback()
    lender.sql("INSERT INTO orders VALUES (2)")
    lender.commit()

    assert shop.orders() == [2]
    assert [shop.count(table) for table in ("jobs", "messages", "askings", "ports", "aliases")] == [0] * 5
    assert shop.sidejob.find("order-1") is None
    shop.sidejob.poll()
    assert shop.rung() == 0


def test_ours_may_be_the_first_statement_of_a_transaction(shop: Shop, lender: Lender) -> None:
    job = shop.add.enqueue(transaction=lender.transaction)
    assert shop.count("jobs") == 0
    lender.sql("INSERT INTO orders VALUES (1)")
    lender.rollback()
    assert (shop.orders(), job.exists) == ([], False)


def test_a_savepoint_that_is_rolled_back_takes_its_job_along(shop: Shop, lender: Lender) -> None:
    lender.sql("INSERT INTO orders VALUES (1)")
    kept = shop.add.enqueue(transaction=lender.transaction)
    with suppress(Rolled), lender.savepoint():
        lender.sql("INSERT INTO orders VALUES (2)")
        gone = shop.add.enqueue(transaction=lender.transaction)
        raise Rolled
    with lender.savepoint():
        lender.sql("INSERT INTO orders VALUES (3)")
        inner = shop.add.enqueue(transaction=lender.transaction)
    assert shop.rung() == 0, "the end of a savepoint is no commit"
    lender.commit()

    assert shop.orders() == [1, 3]
    assert (kept.exists, gone.exists, inner.exists) == (True, False, True)
    shop.wait_rung(lender, 2)
    wait_until(lambda: shop.count("messages WHERE published_at IS NULL") == 0)


def test_many_are_all_there_or_none(shop: Shop, lender: Lender) -> None:
    items = [shop.add.s(1), {"task": shop.add, "args": (2,), "aliases": ["second"]}, shop.add.s(3)]
    shop.sidejob.enqueue_many(items, transaction=lender.transaction)
    lender.rollback()
    assert shop.count("jobs") == 0
    made = shop.sidejob.enqueue_many(items, transaction=lender.transaction)
    lender.commit()

    assert [job.refresh().args for job in made] == [[1], [2], [3]]
    assert shop.sidejob.get("second") == made[1]
    shop.wait_rung(lender, 3)


def test_many_leave_nothing_when_one_of_them_is_refused(shop: Shop, lender: Lender) -> None:
    shop.add.enqueue(aliases=["taken"])
    items = [shop.add.s(1), {"task": shop.add, "aliases": ["taken"]}]
    lender.sql("INSERT INTO orders VALUES (1)")
    with pytest.raises(AliasTakenError):
        shop.sidejob.enqueue_many(items, transaction=lender.transaction)
    lender.commit()
    assert (shop.orders(), shop.count("jobs")) == ([1], 1)


def test_children_and_packets_of_a_job_made_in_the_same_transaction(shop: Shop, lender: Lender) -> None:
    parent = shop.add.enqueue((1,), aliases=["parent"], transaction=lender.transaction)
    child = parent.enqueue(shop.add, (2,), child_name="x", transaction=lender.transaction)
    other = shop.add.enqueue(parent="parent", child_name="y", transaction=lender.transaction)
    parent.input("a").write(1, transaction=lender.transaction)
    parent.set(seen=True, transaction=lender.transaction)
    parent.run(transaction=lender.transaction)
    with pytest.raises(PortNotFoundError):
        parent.input("nothing").write(1, transaction=lender.transaction)
    with pytest.raises(ChildNameTakenError):
        parent.enqueue(shop.add, child_name="x", transaction=lender.transaction)
    lender.commit()
    shop.follow(lender)

    assert parent.children == {"x": child, "y": other}
    assert child.parent == parent
    assert [packet.value for packet in parent.input("a").peek()] == [1]
    assert parent.get("seen") is True
    wait_until(lambda: shop.count("timers") == 0, timeout=HOOK_S, message="the asks to be applied")


def test_delay_and_apply_async_return_a_result_with_the_job(shop: Shop, lender: Lender) -> None:
    result = shop.add.apply_async((3,), transaction=lender.transaction)
    assert shop.count("jobs") == 0
    lender.commit()
    assert shop.sidejob.for_task_id(result.id) == result.job
    assert result.job.refresh().task_id == result.id


# -- asking existing jobs ---------------------------------------------------------------------------------------------


def test_run_is_asked_at_the_commit(shop: Shop, lender: Lender) -> None:
    job = shop.completed()
    assert job.run(transaction=lender.transaction) == job
    lender.rollback()
    shop.sidejob.poll()
    assert job.refresh().status == Status.COMPLETED

    assert job.run(transaction=lender.transaction) == job
    assert job.refresh().status == Status.COMPLETED
    lender.commit()
    shop.follow(lender)
    wait_until(lambda: job.refresh().status == Status.QUEUED, timeout=HOOK_S)
    wait_until(lambda: shop.rung() == 1, timeout=HOOK_S)


def test_run_is_judged_when_it_is_applied(shop: Shop, lender: Lender) -> None:
    job = shop.completed()
    job.run(transaction=lender.transaction)
    job.terminate()
    lender.commit()
    shop.sidejob.poll()
    assert job.refresh().status == Status.TERMINATING


def test_run_later_and_of_the_parent(shop: Shop, lender: Lender) -> None:
    parent = shop.completed()
    child = parent.enqueue(shop.add, child_name="x", eta=None)
    assert shop.completed().run(parent=True, transaction=lender.transaction) is None
    assert child.run(parent=True, transaction=lender.transaction) == parent
    assert child.run(countdown=3600, transaction=lender.transaction) == child
    lender.commit()
    shop.follow(lender)
    wait_until(lambda: parent.refresh().status == Status.QUEUED, timeout=HOOK_S)
    assert shop.outside.execute("SELECT job_id, due_at > now() + interval '59 min' FROM sidejob.timers").fetchall() == [
        (child.id, True)
    ]


@pytest.mark.parametrize("recursive", [False, True])
def test_terminate_is_asked_at_the_commit(shop: Shop, lender: Lender, recursive: bool) -> None:
    job = shop.completed()
    job.terminate(recursive=recursive, transaction=lender.transaction)
    lender.rollback()
    shop.sidejob.poll()
    assert job.refresh().status == Status.COMPLETED

    assert job.terminate(recursive=recursive, transaction=lender.transaction) == job
    assert job.refresh().status == Status.COMPLETED
    lender.commit()
    shop.follow(lender)
    wait_until(lambda: job.refresh().status == Status.TERMINATING, timeout=HOOK_S)


def test_packets_are_there_at_the_commit_and_ask_the_reader(shop: Shop, lender: Lender) -> None:
    job = shop.completed()
    job.input("a").write(0, transaction=lender.transaction)
    lender.rollback()
    lender.sql("INSERT INTO orders VALUES (1)")
    job.input("a").write(1, transaction=lender.transaction)
    job.input("a").write_many([2, 3], transaction=lender.transaction)
    assert len(job.input("a")) == 0
    lender.commit()
    shop.follow(lender)

    assert [packet.value for packet in job.input("a").peek()] == [1, 2, 3]
    wait_until(lambda: job.refresh().status == Status.QUEUED, timeout=HOOK_S)


def test_an_output_asks_the_parent(shop: Shop, lender: Lender) -> None:
    parent = shop.completed()
    child = parent.enqueue(shop.add, child_name="x")
    child.output("sum").write(1, transaction=lender.transaction)
    lender.commit()
    shop.follow(lender)
    wait_until(lambda: parent.refresh().status == Status.QUEUED, timeout=HOOK_S)


def test_state_is_set_and_unset_at_the_commit(shop: Shop, lender: Lender) -> None:
    job = shop.add.enqueue(state={"a": 1, "b": 2})
    job.set(a=3, transaction=lender.transaction)
    job.unset("b", transaction=lender.transaction)
    assert job.state == {"a": 1, "b": 2}
    lender.rollback()
    assert job.state == {"a": 1, "b": 2}

    job.set({"a": 3}, c=None, transaction=lender.transaction)
    job.unset("b", "nothing", transaction=lender.transaction)
    lender.commit()
    assert job.state == {"a": 3, "c": None}


def test_a_message_is_published_at_the_commit(shop: Shop, lender: Lender) -> None:
    job: Job = shop.listen.apply().job
    assert shop.sidejob.publish("/news/today", "gone", transaction=lender.transaction) == 1
    lender.rollback()
    assert shop.sidejob.publish("/news/today", "rain", transaction=lender.transaction) == 1
    assert len(job.input("news")) == 0
    lender.commit()
    shop.follow(lender)

    assert [packet.value for packet in job.input("news").peek()] == ["rain"]
    wait_until(lambda: job.refresh().status == Status.QUEUED, timeout=HOOK_S)


@pytest.mark.parametrize("verb", ["run", "terminate", "write"])
def test_no_job_is_locked_until_the_commit(shop: Shop, lender: Lender, verb: str) -> None:
    job = shop.completed()
    if verb == "write":
        job.input("a").write(1, transaction=lender.transaction)
    else:
        getattr(job, verb)(transaction=lender.transaction)
    shop.outside.execute("SELECT FROM sidejob.jobs WHERE id = %s FOR NO KEY UPDATE NOWAIT", [job.id])
    lender.rollback()


# -- what is not touched ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LENDERS)
def test_the_session_of_the_connection_stays_as_it_was(shop: Shop, name: str) -> None:
    with LENDERS[name](direct(shop.url)) as lender:  # behind a PgBouncer there is no session to speak of
        leave_the_session_alone(shop, lender)


def leave_the_session_alone(shop: Shop, lender: Lender) -> None:
    lender.sql("SET SESSION search_path = pg_temp")
    lender.sql("SET SESSION statement_timeout = '4321ms'")
    lender.sql("SET SESSION lock_timeout = '1234ms'")
    lender.sql("SET SESSION synchronous_commit = local")
    lender.commit()

    def settings() -> list[Any]:
        names = "search_path statement_timeout lock_timeout synchronous_commit transaction_isolation application_name"
        shown = [lender.sql(f"SHOW {name}")[0][0] for name in names.split()]
        return [*shown, lender.sql("SELECT txid_current(), pg_backend_pid()")[0]]

    before = settings()
    for number in range(8):
        job = shop.add.enqueue((number,), transaction=lender.transaction)
        job.set(number=number, transaction=lender.transaction)
        job.input("a").write(number, transaction=lender.transaction)
    with pytest.raises(JobNotFoundError):
        Job(10**9, runtime=shop.sidejob.runtime).run(transaction=lender.transaction)
    assert settings() == before, "a setting, or the transaction itself, is another one"
    assert shop.count("jobs") == 0
    lender.commit()
    assert shop.count("jobs") == 8


def test_a_psycopg_connection_keeps_what_its_owner_has_set(shop: Shop) -> None:
    with psycopg.connect(direct(shop.url), row_factory=psycopg.rows.dict_row, prepare_threshold=0) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.cursor_factory = psycopg.ClientCursor
        for _ in range(3):
            shop.add.enqueue(transaction=connection)
        prepared = connection.execute("SELECT count(*) AS n FROM pg_prepared_statements").fetchone()
        assert prepared == {"n": 0}
        assert connection.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
        assert connection.isolation_level == psycopg.IsolationLevel.REPEATABLE_READ
        assert connection.cursor_factory is psycopg.ClientCursor
        assert (connection.autocommit, connection.prepare_threshold) == (False, 0)
        connection.rollback()
    assert shop.count("jobs") == 0


def test_a_connection_that_streams_its_results(shop: Shop) -> None:
    engine = create_engine(shop.url.replace("postgresql://", "postgresql+psycopg2://"), poolclass=NullPool)
    with engine.connect().execution_options(stream_results=True) as connection:
        shop.add.enqueue(transaction=connection)
        assert connection.get_execution_options()["stream_results"] is True
        connection.commit()
    assert shop.count("jobs") == 1


# -- errors -----------------------------------------------------------------------------------------------------------


def test_errors_leave_the_transaction_as_it_was(shop: Shop, lender: Lender) -> None:
    parent = shop.add.enqueue(aliases=["taken"])
    parent.enqueue(shop.add, child_name="x")
    nobody = Job(10**9, runtime=shop.sidejob.runtime)
    before = {table: shop.count(table) for table in ("jobs", "messages", "ports", "state", "packets", "timers")}
    lent = lender.transaction

    def refused() -> Iterator[tuple[type[Exception], Any]]:
        yield UnknownTaskError, lambda: shop.sidejob.enqueue("shop.nothing", transaction=lent)
        yield InvalidValueError, lambda: shop.add.enqueue((float("nan"),), transaction=lent)
        yield TypeError, lambda: shop.add.enqueue((1, 2, 3), transaction=lent)
        yield ChildNameTakenError, lambda: parent.enqueue(shop.add, child_name="x", transaction=lent)
        yield AliasTakenError, lambda: shop.add.enqueue(aliases=["new", "taken"], transaction=lent)
        yield JobNotFoundError, lambda: shop.add.enqueue(parent=nobody, child_name="x", transaction=lent)
        yield JobNotFoundError, lambda: nobody.run(transaction=lent)
        yield JobNotFoundError, lambda: nobody.terminate(transaction=lent)
        yield JobNotFoundError, lambda: nobody.set(a=1, transaction=lent)
        yield PortNotFoundError, lambda: parent.input("nothing").write(1, transaction=lent)

    lender.sql("INSERT INTO orders VALUES (1)")
    for kind, call in refused():
        with pytest.raises(kind):
            call()
    lender.sql("INSERT INTO orders VALUES (2)")
    lender.commit()

    assert shop.orders() == [1, 2]
    assert {table: shop.count(table) for table in before} == before


def test_a_terminated_parent_takes_no_child(shop: Shop, lender: Lender) -> None:
    parent = shop.completed()
    parent.terminate()
    lender.sql("INSERT INTO orders VALUES (1)")
    with pytest.raises(IllegalMoveError):
        parent.enqueue(shop.add, child_name="x", transaction=lender.transaction)
    lender.commit()
    assert (shop.orders(), shop.count("jobs")) == ([1], 1)


@pytest.mark.parametrize("name", LENDERS)
def test_a_database_without_our_schema(shop: Shop, empty_database_url: str, name: str) -> None:
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id int)")
    with LENDERS[name](empty_database_url) as lender:
        lender.sql("INSERT INTO orders VALUES (1)")
        with pytest.raises(SchemaError, match="database of"):
            shop.add.enqueue(transaction=lender.transaction)
        lender.commit()
        assert lender.sql("SELECT id FROM orders") == [(1,)]
        lender.rollback()


@pytest.mark.parametrize("name", LENDERS)
def test_a_database_with_a_schema_of_its_own(
    shop: Shop, databases: Databases, database_template: str, name: str
) -> None:
    """Even a copy: what would be written there no worker of this store would ever find."""
    with databases.fresh(template=database_template) as copy:
        for _ in range(2):
            with LENDERS[name](databases.url_of(copy)) as lender:
                lender.sql("CREATE TABLE IF NOT EXISTS orders (id int)")
                lender.sql("INSERT INTO orders VALUES (1)")
                with pytest.raises(
                    SchemaError, match=f"leads to the database '{copy}', which has a schema 'sidejob' of"
                ):
                    shop.add.enqueue(transaction=lender.transaction)
                lender.commit()
                assert lender.sql("SELECT count(*) FROM sidejob.jobs") == [(0,)]
                lender.rollback()


@pytest.mark.parametrize("name", LENDERS)
def test_where_a_connection_leads_is_asked_once(shop: Shop, name: str) -> None:
    with LENDERS[name](shop.url) as lender:
        shop.add.enqueue(transaction=lender.transaction)
        lender.commit()
    with LENDERS[name](shop.url) as lender:
        borrowed = shop.sidejob.runtime.connections.borrow(lender.transaction)
        assert borrowed.address is not None
        said: list[str] = []
        borrowed._execute = lambda text, parameters=None: said.append(text)  # type: ignore[assignment]
        shop.sidejob.runtime.connections.borrow(lender.transaction)
        assert said == []
        lender.rollback()


def test_another_way_to_the_same_database_is_the_same(shop: Shop, databases: Databases) -> None:
    """By another name of the host, or past a proxy."""
    url = direct(shop.url)
    other = url.replace("127.0.0.1", "localhost") if "127.0.0.1" in url else url.replace("localhost", "127.0.0.1")
    for way in (url, other):
        with psycopg.connect(way) as connection:
            shop.add.enqueue(transaction=connection)
            connection.commit()
    assert shop.count("jobs") == 2


def test_a_child_name_that_is_taken_by_a_transaction_not_yet_committed(shop: Shop, lender: Lender) -> None:
    parent = shop.add.enqueue()
    lender.sql("INSERT INTO orders VALUES (1)")
    with psycopg.connect(shop.url) as rival:
        parent.enqueue(shop.add, child_name="x", transaction=rival)

        def let_the_rival_win() -> None:
            blocked = (
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
            with psycopg.connect(direct(shop.url), autocommit=True) as watch:
                wait_until(lambda: watch.execute(blocked).fetchone() == (1,), message="somebody to wait for the rival")
            rival.commit()

        thread = threading.Thread(target=let_the_rival_win)
        thread.start()
        try:
            with pytest.raises(ChildNameTakenError):
                parent.enqueue(shop.add, child_name="x", transaction=lender.transaction)
        finally:
            thread.join()
    lender.sql("INSERT INTO orders VALUES (2)")
    lender.commit()
    assert shop.orders() == [1, 2]
    assert len(parent.children) == 1


def test_what_is_no_transaction_is_a_type_error(shop: Shop) -> None:
    job = shop.add.enqueue()
    sqlite = create_engine("sqlite://")
    engine = create_engine(shop.url.replace("postgresql://", "postgresql+psycopg://"), poolclass=NullPool)
    raw = psycopg2.connect(shop.url)
    loop = asyncio.new_event_loop()
    asynchronous = loop.run_until_complete(psycopg.AsyncConnection.connect(shop.url))
    with sqlite.connect() as lite, Session(sqlite) as lite_session:
        wrong = [
            asynchronous, engine, lite, lite_session, raw, raw.cursor(), sessionmaker(engine), 1, True, {}, b"default",
        ]  # fmt: skip
        for value in wrong:
            for call in (
                lambda value=value: shop.add.enqueue(transaction=value),
                lambda value=value: shop.sidejob.enqueue_many([shop.add.s()], transaction=value),
                lambda value=value: job.run(transaction=value),
                lambda value=value: job.set(a=1, transaction=value),
                lambda value=value: job.input("a").write(1, transaction=value),
                lambda value=value: shop.sidejob.publish("/news", 1, transaction=value),
            ):
                with pytest.raises(TypeError, match="transaction="):
                    call()
    raw.close()
    loop.run_until_complete(asynchronous.close())
    loop.close()
    sqlite.dispose()
    assert (shop.count("jobs"), shop.count("packets"), shop.count("state")) == (1, 0, 0)


# -- commits ----------------------------------------------------------------------------------------------------------


def test_a_commit_that_fails_brings_nothing(shop: Shop, lender: Lender) -> None:
    shop.outside.execute("ALTER TABLE orders ADD FOREIGN KEY (same) REFERENCES orders DEFERRABLE INITIALLY DEFERRED")
    lender.sql("INSERT INTO orders VALUES (1, 2)")
    shop.add.enqueue(transaction=lender.transaction)
    with pytest.raises(Exception, match="foreign key"):
        lender.commit()
    with suppress(Exception):
        lender.rollback()
    shop.sidejob.poll()
    assert (shop.orders(), shop.count("jobs"), shop.rung()) == ([], 0, 0)


def test_one_connection_lends_many_transactions(shop: Shop, lender: Lender) -> None:
    for number in range(4):
        shop.add.enqueue((number,), transaction=lender.transaction)
        lender.rollback() if number % 2 else lender.commit()
    assert [job.args for job in shop.sidejob.jobs()] == [[0], [2]]
    shop.wait_rung(lender, 2)


def test_the_move_is_told_after_the_commit(shop: Shop, lender: Lender) -> None:
    moves: list[tuple[int, Any, str]] = []

    def moved(job_id: int, before: Any, after: str, **_: Any) -> None:
        moves.append((job_id, before, after))

    job_status_changed.connect(moved)
    try:
        shop.add.enqueue(transaction=lender.transaction)
        lender.rollback()
        job = shop.add.enqueue(transaction=lender.transaction)
        assert moves == []
        lender.commit()
        if lender.tells_of_commits:
            wait_until(lambda: moves == [(job.id, None, "queued")], timeout=HOOK_S)
    finally:
        job_status_changed.disconnect(moved)


def test_autocommit_dispatches_at_once(shop: Shop) -> None:
    url = shop.url
    with psycopg.connect(url, autocommit=True) as connection:
        shop.add.enqueue(transaction=connection)
        assert (shop.count("jobs"), shop.rung()) == (1, 1)
        with pytest.raises(AliasTakenError):
            shop.sidejob.enqueue_many(
                [{"task": shop.add, "aliases": ["one"]}, {"task": shop.add, "aliases": ["one"]}], transaction=connection
            )
        assert (shop.count("jobs"), connection.autocommit) == (1, True)
        with connection.transaction():
            job = shop.add.enqueue(transaction=connection)
            assert not job.exists
        assert job.exists
    for driver in ("psycopg", "psycopg2"):
        rung = shop.rung()
        engine = create_engine(url.replace("postgresql://", f"postgresql+{driver}://"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection, Session(engine) as session:
            shop.add.enqueue(transaction=connection)
            assert shop.rung() == rung + 1
            shop.add.enqueue(transaction=session)
            assert shop.rung() == rung + 2
        engine.dispose()
    with django_database(url) as connection:
        rung = shop.rung()
        shop.add.enqueue(transaction="default")
        assert (shop.rung(), connection.get_autocommit()) == (rung + 1, True)


def test_a_session_inside_a_transaction_that_is_not_its_own(shop: Shop) -> None:
    engine = create_engine(shop.url.replace("postgresql://", "postgresql+psycopg://"), poolclass=NullPool)
    for ends in ("rollback", "commit"):
        with engine.connect() as connection:
            outermost = connection.begin()
            with Session(connection, join_transaction_mode="create_savepoint") as session:
                job = shop.add.enqueue(transaction=session)
                session.commit()
            assert (job.exists, shop.rung()) == (False, 0)
            getattr(outermost, ends)()
            assert job.exists == (ends == "commit")


def test_a_scoped_session(shop: Shop) -> None:
    engine = create_engine(shop.url.replace("postgresql://", "postgresql+psycopg://"), poolclass=NullPool)
    sessions = scoped_session(sessionmaker(engine))
    shop.add.enqueue(transaction=sessions)
    assert shop.count("jobs") == 0
    sessions.commit()
    sessions.remove()
    wait_until(lambda: shop.rung() == 1, timeout=HOOK_S)


def test_a_transaction_that_has_failed_already_says_so(shop: Shop) -> None:
    engine = create_engine(shop.url.replace("postgresql://", "postgresql+psycopg://"), poolclass=NullPool)
    with engine.connect() as connection:
        with pytest.raises(DBAPIError):
            connection.exec_driver_sql("SELECT 1/0")
        with pytest.raises(
            InvalidValueError, match="was aborted by an error before: nothing more can be done in it, so roll it back"
        ):
            shop.add.enqueue(transaction=connection)


@pytest.mark.parametrize("of", ["connection", "proxy"])
def test_djangos_connection_by_each_of_its_names(shop: Shop, of: str) -> None:
    from django.db import connection as proxy
    from django.db import transaction

    with django_database(shop.url) as connection:
        with suppress(Rolled), transaction.atomic():
            shop.add.enqueue(transaction=connection if of == "connection" else proxy)
            raise Rolled
        with transaction.atomic():
            shop.add.enqueue(transaction=connection if of == "connection" else proxy)
            assert shop.count("jobs") == 0
        assert (shop.count("jobs"), shop.rung()) == (1, 1)


# -- Django's own verbs -----------------------------------------------------------------------------------------------


def test_on_commit_of_celerys_task_for_django(database_url: str, redis_url: str) -> None:
    from django.db import transaction

    shop = Shop(database_url, redis_url, task_cls="celery.contrib.django.task:DjangoTask")
    assert isinstance(shop.add, DjangoTask)
    with django_database(database_url) as connection:
        with suppress(Rolled), transaction.atomic():
            shop.add.delay_on_commit(1)
            raise Rolled
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute("INSERT INTO orders VALUES (1)")
            shop.add.delay_on_commit(2)
            job = shop.add.apply_async_on_commit((3,), queue="other").job
            assert connection.run_on_commit, "nothing was asked of Django's commit"
            assert (shop.count("jobs"), shop.rung()) == (0, 0)
        assert [job.args for job in shop.sidejob.jobs()] == [[2], [3]]
        assert (shop.orders(), shop.rung(), job.queue) == ([1], 1, "other")
        shop.add.delay_on_commit(4)  # in autocommit: at once
        assert shop.rung() == 2
    shop.close()


def test_on_commit_where_djangos_database_is_not_the_store(
    database_url: str, empty_database_url: str, redis_url: str
) -> None:
    from django.db import transaction

    shop = Shop(database_url, redis_url, task_cls="celery.contrib.django.task:DjangoTask")
    with django_database(empty_database_url):
        with transaction.atomic():
            shop.add.delay_on_commit(2)
            assert shop.count("jobs") == 0
        assert [job.args for job in shop.sidejob.jobs()] == [[2]]
    shop.close()


def test_on_commit_is_for_tasks_of_django(shop: Shop) -> None:
    with pytest.raises(AttributeError, match="Django"):
        shop.add.delay_on_commit(1)


# -- a worker runs it -------------------------------------------------------------------------------------------------


def test_a_worker_runs_it_soon_after_the_commit(scene: Scene) -> None:
    scene.worker(pool="solo")
    for name, lend in LENDERS.items():
        with lend(scene.database_url) as lender:
            job = scene.enqueue("adder", transaction=lender.transaction)
            lender.commit()
            job.input("a").write(1, transaction=lender.transaction)
            job.input("b").write(2, transaction=lender.transaction)
            lender.commit()
            wait_until(lambda job=job: job.output("sum").has_data, timeout=5.0, message=f"the sum of {name}")
            lender.rollback()
    assert [entry[2:] for entry in scene.ledger()] == [("sum", 3)] * len(LENDERS)
