"""The connection of a transport: rings that nobody waits for, and how its statements commit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from kombu import Connection, Exchange, Queue

from celery_sidejob import SettingsError
from celery_sidejob.store.connection import own_executor
from celery_sidejob.store.statement import Statement
from celery_sidejob.transport.postgres.link import Link
from tests.tools.freezing import frozen
from tests.tools.pgbouncer import direct
from tests.tools.waiting import wait_until
from tests.transport.consuming import Consuming, publish
from tests.transport.postgres.conftest import Tables

Connect = Callable[..., Connection]


@pytest.fixture
def link(connect: Connect) -> Link:
    """The link of an open connection."""
    found: Link = connect().default_channel.link
    return found


@pytest.fixture
def heard(database_url: str, link: Link) -> Iterator[Callable[[], list[str]]]:
    """All rings since the test has begun."""
    with psycopg.connect(database_url, autocommit=True) as listening:
        listening.execute(f'LISTEN "{link.channel}"')
        rings: list[str] = []
        listening.add_notify_handler(lambda notify: rings.append(notify.payload))

        def look() -> list[str]:
            listening.execute("SELECT 1")
            return rings

        yield look


# -- rings -----------------------------------------------------------------------------------------------------------


def session_of(link: Link) -> int:
    pid: int = link.run("read", lambda executor: executor.run(Statement("SELECT pg_backend_pid() AS pid")))[0].pid
    return pid


def in_time(work: Callable[[], Any]) -> None:
    """Do something that would never end if it waited for a frozen server."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    wait_until(lambda: not thread.is_alive(), message="it to end without an answer")


def test_a_ring_is_heard_though_nobody_waits_for_it(link: Link, heard: Callable[[], list[str]]) -> None:
    for number in range(8):  # the first ones are not prepared
        link.ring(f"{number}")
    session = session_of(link)  # all before was answered
    with frozen(session):
        in_time(lambda: link.ring("last"))
        assert "last" not in heard()
    wait_until(lambda: heard() == [*map(str, range(8)), "last"], message="the ring to be heard")
    assert session_of(link) == session


def test_a_ring_is_heard_though_its_connection_is_closed(
    link: Link, heard: Callable[[], list[str]], tables: Tables
) -> None:
    tables.one("SELECT pg_advisory_lock(1)")
    executor = link.open_session()
    slow = Statement("SELECT pg_advisory_xact_lock(1), pg_notify(%(channel)s, 'slow')")
    executor.post(slow, channel=link.channel)
    waits = "SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    wait_until(lambda: tables.one(waits), message="the server to be in the middle of it")
    executor.close()
    tables.one("SELECT pg_advisory_unlock(1)")
    wait_until(lambda: heard() == ["slow"], message="the ring to be heard")


def test_a_connection_that_is_lost_with_a_ring_is_opened_anew(link: Link, tables: Tables) -> None:
    session = session_of(link)
    with frozen(session):
        link.ring("lost")
        tables.one("SELECT pg_terminate_backend(%s)", session)
    wait_until(
        lambda: tables.one("SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = %s", session),
        message="the server to end the session",
    )
    assert session_of(link) != session


# -- statements that Postgres gives up -----------------------------------------------------------------------------


def cancel_what_waits(tables: Tables) -> None:
    """Have Postgres give up the statement that waits for a lock, once there is one."""
    waits = """
        SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity
        WHERE datname = current_database() AND wait_event_type = 'Lock'"""
    wait_until(lambda: tables.one(waits) == 1, message="a statement to wait for a lock")


@pytest.mark.parametrize("table", ["broker_messages", "broker_consumers"])
def test_a_statement_that_was_given_up_is_run_again_over_the_same_connection(
    connect: Connect, database_url: str, tables: Tables, table: str
) -> None:
    """A consumer that took its connection for lost would lose what it holds: others would run that once more."""
    connection = connect(consumer_timeout=60.0)
    consuming = Consuming(connection, "queue")
    publish(connection, "queue", 1)
    assert consuming.take(1) == [1]
    link, transport = connection.default_channel.link, connection.transport
    session = session_of(link)
    with psycopg.connect(direct(database_url)) as other:
        other.execute(f"LOCK TABLE sidejob.{table} IN EXCLUSIVE MODE")
        consuming.messages[0].ack()  # the heart carries it out soon, or beats
        cancel_what_waits(tables)
    wait_until(lambda: consuming.drain_once() or tables.all == 0, message="the message to be removed")
    assert (session_of(link), transport._heart.error, tables.consumers) == (session, None, 1)


# -- how statements commit -------------------------------------------------------------------------------------------


@pytest.fixture
def commits(database_url: str) -> Iterator[Callable[[], dict[str, set[str]]]]:
    """With which `synchronous_commit` rows of the broker's tables were written."""
    with psycopg.connect(database_url, autocommit=True) as looking:
        looking.execute("""
            CREATE TABLE public.commits (written text, mode text);
            CREATE FUNCTION public.note_commit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
              INSERT INTO public.commits
              VALUES (lower(TG_OP) || ' ' || TG_TABLE_NAME, current_setting('synchronous_commit'));
              RETURN NULL;
            END $$""")
        for table in ("messages", "queues", "bindings"):
            looking.execute(f"""
                CREATE TRIGGER note_commit AFTER INSERT OR UPDATE OR DELETE ON sidejob.broker_{table}
                FOR EACH STATEMENT EXECUTE FUNCTION public.note_commit()""")

        def noted() -> dict[str, set[str]]:
            found: dict[str, set[str]] = {}
            for written, mode in looking.execute("SELECT written, mode FROM public.commits"):
                found.setdefault(written, set()).add(mode)
            return found

        yield noted
        looking.execute("DROP FUNCTION public.note_commit CASCADE; DROP TABLE public.commits")


@pytest.mark.parametrize("options", [{}, {"synchronous_commit": "on"}])
def test_all_is_on_disk_when_it_is_answered(
    connect: Connect, commits: Callable[[], dict[str, set[str]]], options: dict[str, str]
) -> None:
    use(connect, **options)
    assert set().union(*commits().values()) == {"on"}


def test_messages_may_be_committed_late_and_never_what_routes_them(
    connect: Connect, commits: Callable[[], dict[str, set[str]]]
) -> None:
    use(connect, synchronous_commit="off")
    assert commits() == {
        "insert broker_messages": {"off"},
        "update broker_messages": {"off"},
        "delete broker_messages": {"off"},
        "insert broker_queues": {"on"},
        "update broker_queues": {"on"},
        "insert broker_bindings": {"on"},
    }


def use(connect: Connect, **options: str) -> None:
    """Route, send, send in a batch, fetch, give back, and acknowledge."""
    direct = Exchange("direct", type="direct")
    queue = Queue("queue", direct, routing_key="key")
    queue(connect(**options).default_channel).declare()
    publish(connect(**options), "queue", 1)
    with connect(**options).Producer() as producer, producer.batch():
        producer.publish(2, exchange=direct, routing_key="key", declare=[queue])
    consuming = Consuming(connect(**options), "queue", prefetch=2)
    assert consuming.take(2) == [1, 2]
    consuming.messages[0].reject(requeue=True)
    assert consuming.take(1) == [1]
    for message in consuming.messages[1:]:
        message.ack()
    consuming.close()


def test_sessions_of_a_proxy_are_not_changed(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        own_executor, "read_settings", lambda executor: (0, [])
    )  # another process than the connect has reported
    with pytest.raises(SettingsError, match="Set it for the broker's role"):
        connect(synchronous_commit="off").connect()
    connect(synchronous_commit="on").connect()


# -- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["jit", "enable_seqscan"])
def test_statements_go_by_indexes_and_are_not_compiled(link: Link, setting: str) -> None:
    """A beat took a quarter of a second on Postgres 15: a table without an index's way in seemed to cost 10 billion."""
    show = Statement(f"SELECT current_setting('{setting}') AS value")
    assert link.run("read", lambda executor: executor.run(show))[0].value == "off"
