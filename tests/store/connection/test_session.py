"""A role, a database or a server may have other defaults than Postgres: our own connections do not have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from kombu import Connection

from celery_sidejob import CapacityPool, RunningJob, SchemaError
from celery_sidejob.store.connection.opening import Opener
from celery_sidejob.store.connection.own_executor import NEEDED, read_settings
from tests.tools.brokers import in_postgres
from tests.tools.databases import SCHEMA, defaults
from tests.tools.in_process import EMPTY, Stage
from tests.tools.pgbouncer import direct
from tests.tools.roles import a_role
from tests.transport.consuming import Consuming, publish

DEFAULTS = [
    ("default_transaction_isolation", "serializable"),
    ("default_transaction_isolation", "'repeatable read'"),
    ("default_transaction_deferrable", "on"),
    ("datestyle", "German"),
    ("datestyle", "'SQL, DMY'"),
    ("datestyle", "'Postgres, MDY'"),
    ("intervalstyle", "sql_standard"),
    ("intervalstyle", "iso_8601"),
    ("timezone", "'Asia/Kathmandu'"),
    ("timezone", "'<+03>-3'"),
    ("client_encoding", "LATIN1"),
    ("client_encoding", "SQL_ASCII"),
    ("search_path", "nowhere, public, pg_catalog"),
    ("standard_conforming_strings", "off"),
    ("array_nulls", "off"),
    ("transform_null_equals", "on"),
    ("quote_all_identifiers", "on"),
    ("bytea_output", "escape"),
    ("extra_float_digits", "-10"),
    ("row_security", "off"),
    ("session_replication_role", "replica"),
    ("exit_on_error", "on"),
    ("statement_timeout", "'2s'"),
    ("lock_timeout", "'2s'"),
    ("idle_in_transaction_session_timeout", "'2s'"),
    ("idle_session_timeout", "'2s'"),
    ("transaction_timeout", "'2s'"),
    ("synchronous_commit", "off"),
    ("client_min_messages", "debug5"),
    ("plan_cache_mode", "force_custom_plan"),
    ("debug_parallel_query", "on"),
    ("plpgsql.extra_errors", "'all'"),
]
"""Settings, each with a value that Postgres does not have by itself."""

IDS = [f"{name}={value}" for name, value in DEFAULTS]
SOON = datetime(2039, 2, 3, 4, 5, 6, 789000, tzinfo=UTC)
TEXTS = ["NULL", "a\\b", '"', "'", "\N{SNOWMAN}", "{,}"]


@pytest.fixture(params=[])
def default(
    request: pytest.FixtureRequest, stage_database_url: str, store_url: Callable[[str], str],
    stage_looking: Callable[[], psycopg.Connection[Any]],
) -> Iterator[str]:  # fmt: skip
    """The URL of a store with other defaults."""
    url, looking = store_url(stage_database_url), stage_looking()
    with defaults(url, request.param):
        yield url
    looking.execute(f"{EMPTY}; DELETE FROM broker_messages; DELETE FROM broker_queues")


@pytest.fixture
def connect(default: str) -> Iterator[Callable[[], Connection]]:
    """Opens connections to the broker that is in this store."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(Connection(in_postgres(default)))


@pytest.mark.parametrize("default", [{name: value} for name, value in DEFAULTS], ids=IDS, indirect=True)
def test_no_default_changes_what_a_store_and_a_broker_do(
    default: str, connect: Callable[[], Connection], stage_looking: Callable[[], psycopg.Connection[Any]]
) -> None:
    send_and_consume(connect)
    stage = Stage(default, looking=stage_looking(), sidejob_durable_tasks=["kept.*"])
    try:
        work(stage)
        assert stage.broken_rules() == []
        assert direct(default) != default or stage.runtime.connections.read(read_settings)[1] == ["lock_timeout"], (
            "ours"
        )
    finally:
        stage.close()


class TestThroughPgBouncer:
    """Its sessions are others' too, so nothing is set for a session. Postgres ends those that are idle for too long."""

    @pytest.fixture
    def pooled(self) -> bool:
        return True

    @pytest.mark.parametrize("default", [dict(DEFAULTS[1:]) | {"idle_session_timeout": "0"}], indirect=True)
    def test_all_defaults_together_change_nothing(
        self, default: str, connect: Callable[[], Connection], stage_looking: Callable[[], psycopg.Connection[Any]]
    ) -> None:
        test_no_default_changes_what_a_store_and_a_broker_do(default, connect, stage_looking)


@pytest.mark.pooled_too
@pytest.mark.parametrize("default", [{"default_transaction_isolation": "serializable"}], indirect=True)
def test_consumers_in_each_others_way_lose_no_connection_and_double_nothing(connect: Callable[[], Connection]) -> None:
    with ThreadPoolExecutor(4) as pool:
        publish(connect(), "queue", *range(120))
        taken = pool.map(consumed, [connect() for _ in range(4)])
        assert sorted(number for numbers in taken for number in numbers) == list(range(120))


def test_a_default_that_the_role_may_not_change_is_refused(database_url: str) -> None:
    with a_role(database_url) as (role, url), psycopg.connect(direct(database_url), autocommit=True) as owner:
        owner.execute(f"ALTER ROLE {role} SET session_replication_role = replica")
        with pytest.raises(SchemaError, match=r'to set parameter "session_replication_role".*RESET'):
            Opener(url, SCHEMA).connect()


def test_the_page_lists_what_is_set() -> None:
    page = Path("docs/settings.md").read_text()
    assert [name for name in ["client_encoding", *NEEDED] if f"`{name}`" not in page] == []


def consumed(connection: Connection) -> list[int]:
    """Take and acknowledge messages, until none is left for a second."""
    consuming = Consuming(connection, "queue", prefetch=2)
    while consuming.drain_once(timeout=1.0):
        for message in consuming.messages:
            if not message.acknowledged:
                message.ack()
    return consuming.bodies


def send_and_consume(connect: Callable[[], Connection]) -> None:
    """Send texts, acknowledge some, and return one: what arrives is what was sent."""
    consuming = Consuming(connect(), "queue", prefetch=3)
    publish(connect(), "queue", *TEXTS)
    assert consuming.take(3) == TEXTS[:3]
    for message in consuming.messages:
        message.ack()
    assert consuming.take(3) == TEXTS[3:]
    consuming.messages[-1].requeue()
    assert consuming.take(1) == TEXTS[-1:]
    consuming.close()


def nothing(job: RunningJob) -> None:
    """Do nothing."""


def work(stage: Stage) -> None:
    """Do work of each kind: what comes back is what was given."""
    sidejob, seen = stage.sidejob, {}

    def body(job: RunningJob) -> None:
        if not job.get("ran"):
            seen.update(packets=job.input("in").read_many(10), state=job.state)
            job.set(ran=True)
            job.output("out").write(seen["packets"])
            job.suspend()

    job = stage.job(body, aliases=["NULL"], tags=TEXTS, unique="it's \\", state={"f": 0.1 + 0.2, "at": SOON})
    job.input("in").write_many(TEXTS)
    assert stage.run(job) == "suspended"
    assert seen == {"packets": TEXTS, "state": {"f": 0.1 + 0.2, "at": SOON}}
    assert job.output("out").read() == TEXTS
    assert (job.aliases, sorted(job.tags)) == (["NULL"], sorted(TEXTS))

    job.run(eta=SOON)
    (timer,) = job.timers
    assert (timer.due_at, job.cancel_timer(timer)) == (SOON, True)
    job.run(countdown=0.0)
    stage.drain()
    assert job.refresh().status == "completed"
    now = datetime.now(UTC)
    assert job.created_at is not None
    assert abs(job.created_at - now) < timedelta(minutes=5)
    assert [one.id for one in sidejob.jobs(since=now - timedelta(hours=1), tag="NULL")] == [job.id]
    assert sidejob.jobs(since=now + timedelta(hours=1)) == []
    assert {entry.what for entry in job.history} >= {"claimed", "suspended", "completed"}

    failing = stage.job(lambda job: 1 / 0)
    limited = stage.task(nothing, name="limited", capacity=CapacityPool("one", 1)).enqueue()
    assert stage.sql("SELECT used FROM capacity_shards") == [(1,)]
    stage.drain()
    assert [failing.refresh().status, limited.refresh().status] == ["failed", "completed"]
    assert stage.sql("SELECT used FROM capacity_shards") == [(0,)]
    assert sidejob.dead.list()[0].error is not None

    sidejob.schedule("daily", stage.idle, cron="0 4 * * *", start=SOON)
    assert sidejob.get_schedule("daily").next_times()[0] > SOON
    stage.app.send_task("kept.task", TEXTS, task_id="one", eta=SOON)
    stage.app.send_task("kept.task", TEXTS, task_id="two")
    assert stage.sql("SELECT due_at FROM messages WHERE task_id = 'one'") == [(SOON,)]
    sidejob.send_many([stage.app.signature("kept.task", (n,)) for n in range(2)])
    stage.runtime.connections.write_behind_now()
    sidejob.poll()
    sidejob.stats()
