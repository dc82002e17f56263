"""The hot statements use their indexes, also when Postgres turns to a generic plan."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from psycopg import sql

from celery_sidejob.model.status import Gate
from celery_sidejob.store import (
    asks,
    batches,
    chords,
    claims,
    dead,
    deletions,
    dependencies,
    duplicates,
    health,
    history,
    job_lists,
    jobs,
    measured,
    packets,
    parked,
    permits,
    ports,
    registry,
    results,
    room,
    run_ends,
    stats,
    steps,
    trees,
    waiting,
    web_tokens,
)
from celery_sidejob.store.broker import messages, queues
from celery_sidejob.store.connection.connections import Connections
from celery_sidejob.store.connection.own_executor import PREPARE_AFTER, OwnExecutor
from celery_sidejob.store.outbox import arming, burials, doorbells, holds, publishing, tasks
from celery_sidejob.store.outbox.kinds import JOBS, TASKS
from celery_sidejob.store.results import Ended
from celery_sidejob.store.statement import Statement
from tests.tools.databases import SCHEMA, Databases
from tests.tools.waiting import wait_until

pytestmark = [pytest.mark.first, pytest.mark.few(1000)]  # to fill its stores takes a while, and each row a moment

MODULES = (
    arming, asks, batches, burials, chords, claims, doorbells, measured, dead, dependencies, waiting, holds,
    job_lists, jobs, packets, ports, publishing, results, tasks, room, registry, stats, steps, trees, deletions,
    duplicates, messages, queues, history, web_tokens,
)  # fmt: skip

READS_ALL = {
    "batches._ALL": "lists",
    "batches._COUNTS": "counts",
    "batches._COUNTED": "counts",
    "dead._COUNT": "counts",
    "dead._COUNT_MATCHING": "counts",
    "waiting._COUNT": "counts",
    "waiting._LIST": "sorts",
    "dead._GROUPS": "counts",
    **{f"job_lists._COUNT[{column}]": "counts" for column in job_lists._COUNT},
    "job_lists._KNOWS_QUEUE": "a person's question: reads all where nothing is found",
    "job_lists._KNOWS_TASK": "a person's question: reads all where nothing is found",
    **{
        f"job_lists.{name}[{order}]": why
        for name, why in {
            "_LIST_QUEUED": "a person's question: reads the queue and the timers",
            "_LIST_QUEUED_ALONG": "a person's question: walks along the queue's messages until `limit` match",
            "_LIST_OF_PARENT": "of what is known to be small",
        }.items()
        for order in ("oldest", "newest")
    },
    **{
        f"doorbells.{name}": "asked by celery_sidejob.testing, of the few rows of a user's test"
        for name in ("_DUE", "_DOOMED", "_UNDONE")
    },
    "waiting._IS_ANY_SOON": "a question before `drain` ends: reads the queue",
    "room._UNREAD": "reads up to a bound who waits for room; see below",
    "jobs._TAG_COUNTS": "a person's question: counts up to a bound",
    "stats._SUSPENDED": "counts what is not finished, where that is little; see below",
    "stats._UNFINISHED": "counts what is not finished, where that is little; see below",
}
"""What reads a table as a whole, and why it may."""

SAMPLES = {
    "date": "2026-01-01", "numeric[]": "{1}",
    "bytea": "x", "bytea[]": "{x}", "integer[]": "{7}", "timestamp with time zone[]": "{2026-01-01}",
    "smallint[]": "{7}", "bigint": "7", "bigint[]": "{7,8,9}", "integer": "7", "smallint": "7", "text": "x",
    "text[]": "{x,y}", "boolean": "true", "boolean[]": "{t}",
    "json": "[]", "double precision": "1", "double precision[]": "{1,2}",
    "real": "1",
    "timestamp with time zone": "2026-01-01", "interval": "1 s",
}  # fmt: skip

FILL = """
INSERT INTO workers (ident, revision) VALUES ('one', '0001'), ('two', '0001');
INSERT INTO jobs (id, task, queue, status) SELECT n, 'task', 'q' || n % 3, 'queued' FROM generate_series(1, 100000) n;
INSERT INTO jobs (id, task, queue, status, parent_id, name)
  SELECT n, 'task', 'q', 'completed', n - 100000, 'kid' FROM generate_series(100001, 120000) n;
INSERT INTO messages (task_id, job_id, for_run, queue, next_check_at, check_interval)
  SELECT 'm' || n, n, 1, 'q' || n % 3, now() + interval '1 hour', '30 s' FROM generate_series(1, 30000) n;
INSERT INTO messages (task_id, task, generation, queue, body, publication, gate, declined_at, next_check_at,
    check_interval)
  SELECT 'p' || n, 'task', 1, 'q', '', '{}', 3, now(), 'infinity', '30 s'
  FROM generate_series(1, 15000) n;
INSERT INTO askings (task_id, job_id) SELECT 'm' || n, n FROM generate_series(1, 30000) n;
INSERT INTO askings (task_id, job_id, closed_at, outcome, result, stored_at)
  SELECT 'm' || n, n, now(), 'completed', '1', now() FROM generate_series(100001, 106000) n;
INSERT INTO timers (job_id, due_at, ask, accepted)
  SELECT n, now() + interval '1 hour', 'run', true FROM generate_series(1, 15000) n;
INSERT INTO dependencies (job_id, depends_on, on_failure, state)
  SELECT n, n + 50000, 'wait', 'kept' FROM generate_series(1, 50000) n;
INSERT INTO batches (name, calls, closed_at, ended_at)
  SELECT 'b' || n, '{}', now(), now() FROM generate_series(1, 6000) n;
INSERT INTO batch_members (batch_id, job_id, outcome)
  SELECT b.id, n, 'completed' FROM batches b, generate_series(1, 5) n;
INSERT INTO progress (job_id, run_no, done) SELECT n, 1, 1 FROM generate_series(1, 15000) n;
INSERT INTO steps (job_id, turn, name, number, kind, run_no, done, tries)
  SELECT n, '', 's', 1, 'step', 1, true, 1 FROM generate_series(1, 15000) n;
INSERT INTO ports (job_id, direction, name) SELECT n, 'in', 'a' FROM generate_series(1, 60000) n;
INSERT INTO port_waiters SELECT id, job_id, 1, 1 FROM ports;
INSERT INTO subscriptions (channel, job_id, port_id) SELECT '/c' || id % 1000, job_id, id FROM ports;
INSERT INTO packets (port_id, value) SELECT id, '1' FROM ports, generate_series(1, 3);
INSERT INTO state SELECT n, 'k', '1' FROM generate_series(1, 15000) n;
INSERT INTO aliases SELECT 'a' || n, n FROM generate_series(1, 15000) n;
INSERT INTO dead (job_id, task, queue, reason, payload)
  SELECT n, 'task', 'q', 'failed', '{}' FROM generate_series(1, 6000) n;
INSERT INTO tags (tag, job_id) SELECT 't' || n % 1000, n FROM generate_series(1, 30000) n;
INSERT INTO run_history SELECT n, 0, 1, 'w', now(), now(), 'completed' FROM generate_series(1, 30000) n;
INSERT INTO job_log (job_id, at, what) SELECT n, now(), 'x' FROM generate_series(1, 30000) n;
INSERT INTO tracked (job_id) SELECT n FROM generate_series(1, 15000) n;
INSERT INTO duplicates (task_id, call, tried, kept_until)
  SELECT 'm' || n, 'c', '{}', now() + n * interval '1 s' FROM generate_series(1, 15000) n;
INSERT INTO results SELECT 'task:' || n, 'SUCCESS', '', now() + n * interval '1 s' FROM generate_series(1, 30000) n;
INSERT INTO web_answers SELECT 'token', 'k' || n, 'r', 'c' FROM generate_series(1, 15000) n;
INSERT INTO chords (key, size, counted, call, send_at, expires_at)
  SELECT 'c' || n, 2, 2, CASE WHEN n % 100 = 0 THEN ''::bytea END,
    CASE WHEN n % 100 = 0 THEN now() + n * interval '1 s' END, now() + n * interval '1 s'
  FROM generate_series(1, 15000) n;
ANALYZE chords;  -- the check of a foreign key is planned once
INSERT INTO chord_parts SELECT 'c' || n / 2 + 1, 't' || n, n, '' FROM generate_series(1, 29000) n;
INSERT INTO broker_messages (queue, priority, due_at, headers, properties, body)
  SELECT 'q' || n % 3, n % 10, CASE WHEN n % 10 = 0 THEN now() + n * interval '1 s' END, '{}', '{}', ''
  FROM generate_series(1, 30000) n;
ANALYZE"""


SMALL = {
    "workers", "leases", "counters", "served", "registry", "meta", "broker_queues", "broker_bindings",
    "broker_consumers", "broker_broadcasts", "tree_deletions", "tree_terminations", "queues", "tallies", "task_history",
    "run_samples", "web_tokens",
}  # fmt: skip
"""Tables that do not grow with the number of jobs."""


def hot_statements() -> dict[str, Statement]:
    """Every statement of the modules whose tables grow."""
    found = {}
    for module in MODULES:
        for name, value in vars(module).items():
            for kind, statement in value.items() if isinstance(value, dict) else [("", value)]:
                if isinstance(statement, Statement):
                    found[f"{module.__name__.rpartition('.')[2]}.{name}{kind and f'[{kind}]'}"] = statement
    return found


HOT = {name: statement for name, statement in hot_statements().items() if name not in READS_ALL}


@contextmanager
def filled(databases: Databases, template: str, fill: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection to a store with these rows, on which statements are planned for any parameters."""
    with databases.fresh(template=template) as name:
        with psycopg.connect(
            databases.url_of(name),
            autocommit=True,
            prepare_threshold=None,
            options=f"-c search_path={SCHEMA} -c jit=off",
        ) as connection:
            connection.execute(fill)
            connection.execute("SET plan_cache_mode = force_generic_plan")
            yield connection


@pytest.fixture(scope="module")
def large_store(databases: Databases, database_template: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection to a store with tens of thousands of rows in each table that grows."""
    with filled(databases, database_template, FILL) as connection:
        yield connection


def plan_of(connection: psycopg.Connection[Any], statement: Statement) -> Any:
    """Return the generic plan of a statement."""
    text, names = statement.positional(SCHEMA)
    connection.execute("DEALLOCATE ALL")
    connection.execute(b"PREPARE hot AS " + text)
    found = connection.execute("SELECT parameter_types::text[] FROM pg_prepared_statements WHERE name = 'hot'")
    values = sql.SQL(", ").join(sql.Literal(SAMPLES[kind]) for kind in found.fetchone()[0])  # type: ignore[index]
    call = sql.SQL("EXECUTE hot ({})").format(values) if names else sql.SQL("EXECUTE hot")
    return connection.execute(sql.SQL("EXPLAIN (FORMAT JSON) ") + call).fetchone()[0][0]["Plan"]  # type: ignore[index]


def scans(plan: Any) -> Iterator[str]:
    """The tables that a plan reads from their beginning to their end."""
    if plan["Node Type"] == "Seq Scan":
        yield plan["Relation Name"]
    for below in plan.get("Plans", ()):
        yield from scans(below)


@pytest.mark.parametrize("name", HOT)
def test_a_hot_statement_reads_no_large_table_as_a_whole(large_store: psycopg.Connection[Any], name: str) -> None:
    plan = plan_of(large_store, HOT[name])
    assert set(scans(plan)) <= SMALL, json.dumps(plan, indent=1)


@pytest.mark.parametrize(
    "statement",
    [health._OF_MESSAGES, room._UNREAD],
    ids=["rules", "room"],
)
def test_what_waits_is_read_without_all_jobs(large_store: psycopg.Connection[Any], statement: Statement) -> None:
    plan = plan_of(large_store, statement)
    assert set(scans(plan)) - SMALL <= {"messages", "port_waiters"}, json.dumps(plan, indent=1)


def test_no_workers_are_started_for_a_page_of_jobs(large_store: psycopg.Connection[Any]) -> None:
    with large_store.transaction(force_rollback=True):
        large_store.execute("SET LOCAL parallel_setup_cost = 0; SET LOCAL min_parallel_table_scan_size = 0;"
                            "SET LOCAL min_parallel_index_scan_size = 0")  # fmt: skip
        plans = [plan_of(large_store, statement) for statement in job_lists._LIST.values()]
    assert "Gather" not in json.dumps(plans)


def test_the_exceptions_are_still_there() -> None:
    assert READS_ALL.keys() <= hot_statements().keys()


# -- what is asked every few seconds ---------------------------------------------------------------------------------

FINISHED = """
INSERT INTO workers (ident, revision) VALUES ('one', '0001'), ('two', '0001');
INSERT INTO jobs (id, task, queue, status, ended_at)
  SELECT n, 'task', 'q' || n % 3, 'completed', now() FROM generate_series(1, 60000) n;
INSERT INTO askings (task_id, job_id, closed_at, outcome, result, stored_at)
  SELECT 'm' || n, n, now(), 'completed', '1', now() FROM generate_series(1, 60000) n;
INSERT INTO jobs (id, task, queue, status) SELECT n, 'task', 'q', 'queued' FROM generate_series(60001, 60100) n;
INSERT INTO messages (task_id, job_id, for_run, queue, next_check_at, check_interval)
  SELECT 'm' || n, n, 1, 'q' || n % 3, now() + interval '1 hour', '30 s' FROM generate_series(60001, 60100) n;
INSERT INTO askings (task_id, job_id) SELECT 'm' || n, n FROM generate_series(60001, 60100) n;
INSERT INTO dead (job_id, task, queue, reason, payload)
  SELECT n, 'task', 'q', 'failed', '{}' FROM generate_series(1, 10000) n;
ANALYZE"""


@pytest.fixture(scope="module")
def finished_store(databases: Databases, database_template: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection to a store where nearly everything is finished."""
    with filled(databases, database_template, FINISHED) as connection:
        yield connection


WATCHED = {
    name: value for name, value in hot_statements().items() if name.startswith(("stats.", "counters.", "depths."))
}


@pytest.mark.parametrize("name", WATCHED)
def test_a_monitor_reads_nothing_that_is_finished(finished_store: psycopg.Connection[Any], name: str) -> None:
    plan = plan_of(finished_store, WATCHED[name])

    assert set(scans(plan)) <= {*SMALL, "messages", "timers"}, json.dumps(plan, indent=1)


# -- what Postgres takes for empty -----------------------------------------------------------------------------------

KEYS, ROWS = 100, 1000
FILL_AGAIN = f"""
INSERT INTO jobs (task, queue, status) SELECT 'task', 'q', 'queued' FROM generate_series(1, {ROWS});
INSERT INTO messages (task_id, job_id, for_run, queue, next_check_at, check_interval)
  SELECT 'job' || id, id, 1, 'q', now(), '30 s' FROM jobs;
INSERT INTO messages (task_id, task, generation, queue, body, publication, next_check_at, check_interval, published_at)
  SELECT 'm' || n, 'task', 1, 'q', '', repeat('x', 700), now(), '30 s', CASE WHEN n % 2 = 0 THEN now() END
  FROM generate_series(1, {ROWS}) n"""
EMPTIED = f"""
ALTER TABLE messages SET (autovacuum_enabled = off);
ALTER TABLE jobs SET (autovacuum_enabled = off);
{FILL_AGAIN};
DELETE FROM jobs;
DELETE FROM messages"""


@pytest.fixture(scope="module")
def emptied_store(databases: Databases, database_template: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection to a store whose full tables Postgres takes for empty: a VACUUM found them so, and cut off nothing.

    It cuts off nothing where anybody wants the table just then.
    """
    with filled(databases, database_template, EMPTIED) as connection:
        connection.execute("VACUUM (TRUNCATE off, ANALYZE) messages, jobs")
        connection.execute(FILL_AGAIN)
        yield connection


TASK_IDS = [f"m{n}" for n in range(1, KEYS + 1)]
OF_TASKS = {"keys": TASK_IDS, "generations": [1] * KEYS}
OF_JOBS = {"keys": list(range(ROWS + 1, ROWS + KEYS + 1)), "generations": [1] * KEYS}
IN_PAGES: dict[str, tuple[Statement, dict[str, Any]]] = {
    "mark": (publishing._MARK[TASKS], {**OF_TASKS, "again": False}),
    "vouch": (publishing._VOUCH[TASKS], {**OF_TASKS, "wait_s": 30.0}),
    "give back": (
        holds._GIVE_BACK,
        {"task_ids": TASK_IDS, "worker_id": 1, "loss": 1, "begun": True, "last_loss": None},
    ),
    "postpone": (publishing._POSTPONE, {"task_ids": TASK_IDS, "longest_s": 9.0, "are_there": True}),
    "republish": (publishing._REPUBLISH[TASKS], {"task_ids": TASK_IDS, "seen_at": datetime.now(UTC)}),
    "reserve": (
        publishing._RESERVE[TASKS],
        {"task_ids": TASK_IDS, "strike_s": 1.0, "reserve_s": 1.0, "longest_s": 9.0},
    ),
    "mark of jobs": (publishing._MARK[JOBS], {**OF_JOBS, "again": True}),
    "vouch for jobs": (publishing._VOUCH[JOBS], {**OF_JOBS, "wait_s": 30.0}),
    "reserve of jobs": (
        publishing._RESERVE[JOBS],
        {"task_ids": [f"job{n}" for n in OF_JOBS["keys"]], "strike_s": 0.0, "reserve_s": 1.0, "longest_s": 9.0},
    ),
}
"""What does something with rows of many keys, and locks them first."""


def rows_read(plan: Any) -> float:
    """How many rows the steps of a plan have dealt with, those that they left out included."""
    here = plan["Actual Rows"] + sum(plan.get(f"Rows Removed by {what}", 0) for what in ("Filter", "Join Filter"))
    return float(here * plan["Actual Loops"] + sum(rows_read(below) for below in plan.get("Plans", ())))


@pytest.mark.parametrize("name", IN_PAGES)
def test_a_page_takes_no_more_steps_where_a_full_table_is_taken_for_empty(
    emptied_store: psycopg.Connection[Any], name: str
) -> None:
    statement, parameters = IN_PAGES[name]
    for table in ("messages", "jobs"):
        tuples = emptied_store.execute("SELECT reltuples FROM pg_class WHERE oid = %s::regclass", [table]).fetchone()
        assert tuples == (0,)

    with emptied_store.transaction(force_rollback=True):
        emptied_store.execute("SET LOCAL statement_timeout = '30 s'")
        (found,) = emptied_store.execute(
            "EXPLAIN (ANALYZE, FORMAT JSON) " + statement.render(SCHEMA), parameters
        ).fetchone()  # type: ignore[misc]

    # Each key met with each row is a hundred thousand; this statement alone reads the table once or twice.
    assert rows_read(found[0]["Plan"]) < 20 * (ROWS + KEYS), json.dumps(found[0]["Plan"], indent=1)


def test_what_is_parked_takes_no_more_steps_to_release_where_nothing_was_parked_at_the_last_analyze(
    emptied_store: psycopg.Connection[Any],
) -> None:
    with emptied_store.transaction(force_rollback=True):
        emptied_store.execute(
            f"UPDATE messages SET gate = {Gate.WORKER}, next_check_at = 'infinity', published_at = NULL"
        )
        (found,) = emptied_store.execute(
            "EXPLAIN (ANALYZE, FORMAT JSON) " + parked._RELEASE.render(SCHEMA), {"queues": ["q"], "tasks": ["task"]}
        ).fetchone()  # type: ignore[misc]

        gates = emptied_store.execute("SELECT gate, count(*) FROM messages GROUP BY 1").fetchall()
    assert gates == [(Gate.OPEN, 2 * ROWS)]
    assert rows_read(found[0]["Plan"]) < 100 * ROWS, json.dumps(found[0]["Plan"], indent=1)


AT_REST = f"""
ALTER TABLE askings SET (autovacuum_enabled = off);
INSERT INTO workers (ident, revision) VALUES ('one', '0001');
INSERT INTO jobs (task, queue, status, ended_at)
  SELECT 'task', 'q', 'completed', now() FROM generate_series(1, {20 * ROWS});
INSERT INTO askings (task_id, job_id, closed_at, outcome, result, stored_at)
  SELECT 'job' || id, id, now(), 'completed', '1', now() FROM jobs;
ANALYZE;
INSERT INTO jobs (task, queue, status, run_no, unit_no, worker_id, run_kind)
  SELECT 'task', 'q', 'running', 1, 0, (SELECT id FROM workers), 'run' FROM generate_series(1, {ROWS});
INSERT INTO askings (task_id, job_id) SELECT 'job' || id, id FROM jobs WHERE status = 'running'"""


class Noting:
    """Takes a statement instead of running it."""

    def run(self, statement: Statement, /, **parameters: Any) -> list[Any]:
        self.taken = statement, parameters
        return []


def test_a_page_of_ends_reads_no_other_open_askings_where_all_were_closed_at_the_last_analyze(
    databases: Databases, database_template: str
) -> None:
    with filled(databases, database_template, AT_REST) as connection:
        ids = connection.execute("SELECT id FROM jobs WHERE status = 'running' ORDER BY id LIMIT 8").fetchall()
        executor = Noting()
        ended = [Ended((job_id, 1, "null"), None) for (job_id,) in ids]
        run_ends.end_page(executor, ended, worker_id=1, history=0)  # type: ignore[arg-type]
        statement, parameters = executor.taken

        (found,) = connection.execute(
            "EXPLAIN (ANALYZE, FORMAT JSON) " + statement.render(SCHEMA), parameters
        ).fetchone()  # type: ignore[misc]

        assert connection.execute("SELECT count(*) FROM jobs WHERE unit_no IS NULL AND run_no = 1").fetchone() == (8,)
    assert rows_read(found[0]["Plan"]) < ROWS, json.dumps(found[0]["Plan"], indent=1)


FILL_PORTS = (
    f"INSERT INTO packets (port_id, value) SELECT id, '1' FROM ports, generate_series(1, {ROWS}) WHERE name = 'a'"
)
EMPTIED_PORTS = f"""
ALTER TABLE packets SET (autovacuum_enabled = off);
INSERT INTO jobs (id, task, queue, status) VALUES (1, 'task', 'q', 'suspended');
INSERT INTO ports (job_id, direction, name) VALUES (1, 'in', 'a'), (1, 'in', 'b');
{FILL_PORTS};
DELETE FROM packets"""


@pytest.fixture(scope="module")
def emptied_ports(databases: Databases, database_template: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection to a store with a thousand packets on port 1, where Postgres takes `packets` for empty."""
    with filled(databases, database_template, EMPTIED_PORTS) as connection:
        connection.execute("ANALYZE jobs, ports")
        connection.execute("VACUUM (TRUNCATE off, ANALYZE) packets")
        connection.execute(FILL_PORTS)
        yield connection


PORT_A = {"owner_id": 1, "direction": "in", "name": "a"}
THOSE = packets.those([(1, n) for n in range(ROWS + 1, 2 * ROWS + 1)])
OF_PACKETS: dict[str, tuple[Statement, dict[str, Any]]] = {
    "consume": (packets._CONSUME, {**THOSE, "id": 1, "run_no": 1}),
    "fence": (claims._FENCE, {**THOSE, "id": 1, "run_no": 1, "unit_no": 1, "worker_id": 1}),
    "take": (packets._TAKE, {**PORT_A, "job_id": 1, "run_no": 1, "limit": ROWS, "again": False, "seen": []}),
    "pop": (packets._POP_MANY, {**PORT_A, "limit": ROWS}),
    "move": (packets._MOVE, {"source": 1, "targets": [2]}),
    "read": (packets._READ_AHEAD, {**PORT_A, "seen": [], "limit": ROWS, "job_id": 1, "run_no": 1}),
}
"""What does something with many packets of a port."""


@pytest.mark.parametrize("name", OF_PACKETS)
def test_a_packet_takes_no_more_steps_where_the_full_table_is_taken_for_empty(
    emptied_ports: psycopg.Connection[Any], name: str
) -> None:
    statement, parameters = OF_PACKETS[name]
    with emptied_ports.transaction(force_rollback=True):
        emptied_ports.execute("SET LOCAL statement_timeout = '30 s'")
        text, names = statement.positional(SCHEMA)
        emptied_ports.execute("DEALLOCATE ALL")
        emptied_ports.execute(b"PREPARE many AS " + text)
        values = sql.SQL(", ").join(sql.Literal(parameters[name]) for name in names)
        (found,) = emptied_ports.execute(
            sql.SQL("EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE many ({})").format(values)
        ).fetchone()  # type: ignore[misc]

    assert rows_read(found[0]["Plan"]) < 20 * ROWS, json.dumps(found[0]["Plan"], indent=1)


# -- what was planned while the tables were empty ---------------------------------------------------------------------


def plan_in_use(connections: Connections, statement: Statement) -> Any:
    """Return the plan that a process's connection has for a statement which it has prepared."""

    def explain(executor: OwnExecutor) -> Any:
        beginning = statement.positional(SCHEMA)[0].decode()[:40]
        (found,) = executor.run(_PREPARED, beginning=beginning)
        values = ", ".join(f"'{SAMPLES[kind]}'" for kind in found.kinds)
        explained = executor.connection.execute(f"EXPLAIN (FORMAT JSON) EXECUTE {found.name} ({values})").fetchone()
        return explained[0][0]["Plan"]  # type: ignore[index]

    return connections.transact("explain", explain)


_PREPARED = Statement(
    """
SELECT name, parameter_types::text[] AS kinds FROM pg_prepared_statements
WHERE starts_with(statement, %(beginning)s)"""
)
FILL_MESSAGES = """
INSERT INTO messages (task_id, task, generation, queue, body, publication, next_check_at, check_interval)
SELECT 'm' || n, 'task', 1, 'q', '', '{}', now(), '30 s' FROM generate_series(1, 20000) n"""
RUN_OFTEN = {
    "by libpq": (publishing._MARK[TASKS], {"keys": ["a"], "generations": [1], "again": False}),
    "by a cursor": (doorbells._WAITING, {"job_ids": [1], "unpublished": True}),
}


@pytest.mark.parametrize("how", RUN_OFTEN)
def test_a_busy_connection_forgets_plans_for_empty_tables(
    databases: Databases, database_template: str, how: str
) -> None:
    statement, parameters = RUN_OFTEN[how]
    with databases.fresh(template=database_template) as name:
        url = databases.url_of(name)
        connections = Connections(url, SCHEMA)

        def reads_all() -> bool:
            connections.transact("mark", lambda executor: executor.run(statement, **parameters))
            return "messages" in scans(plan_in_use(connections, statement))

        with psycopg.connect(url, autocommit=True) as other:
            other.execute(sql.SQL("SET search_path = {}").format(sql.Identifier(SCHEMA)))
            other.execute("ALTER TABLE messages SET (autovacuum_enabled = off); ANALYZE messages, jobs")
            for _ in range(PREPARE_AFTER + 1):
                connections.transact("mark", lambda executor: executor.run(statement, **parameters))
            assert reads_all()
            other.execute(FILL_MESSAGES)
            wait_until(lambda: not reads_all(), timeout=20, message="plans for full tables")
        connections.close()


# -- where one has very many ------------------------------------------------------------------------------------------

MANY = 50_000
SKEWED = f"""
INSERT INTO jobs (id, task, queue, status) VALUES (1, 'task', 'q', 'suspended');
INSERT INTO jobs (id, task, queue, status, parent_id, name)
  SELECT n + 1, 'task', 'q', 'completed', 1, 'kid' || n FROM generate_series(1, {MANY}) n;
INSERT INTO jobs (id, task, queue, status)
  SELECT {MANY} + 1 + n, 'task', 'q', 'completed' FROM generate_series(1, 100) n;
INSERT INTO messages (task_id, job_id, for_run, queue, published_at, next_check_at, check_interval)
  SELECT 'm' || id, id, 1, 'q', now(), now() + interval '1 hour', '30 s' FROM jobs;
INSERT INTO messages (task_id, task, generation, queue, body, publication, published_at, next_check_at, check_interval)
  SELECT 't' || n, 'task', 1, 'q', convert_to(repeat('x', 700), 'utf8'), '{{}}', now(), now() + interval '1 hour',
    '30 s' FROM generate_series(1, {MANY}) n;
INSERT INTO askings (task_id, job_id, closed_at, outcome, stored_at)
  SELECT 'm' || n, 1, now(), 'completed', now() FROM generate_series(1, {MANY}) n;
INSERT INTO timers (job_id, due_at, ask, accepted)
  SELECT 1, now() - interval '1 hour', 'run', true FROM generate_series(1, {MANY}) n;
INSERT INTO dependencies (job_id, depends_on, on_failure, state)
  SELECT 1, n + 1, 'wait', 'kept' FROM generate_series(1, {MANY}) n
  UNION ALL SELECT n + 1, {MANY} + 2, 'wait', 'kept' FROM generate_series(1, {MANY}) n;
INSERT INTO batches (name, calls) SELECT 'b' || n, '{{}}' FROM generate_series(1, {MANY}) n;
INSERT INTO batch_members (batch_id, job_id)
  SELECT (SELECT min(id) FROM batches), n FROM generate_series(1, {MANY}) n;
INSERT INTO progress (job_id, run_no, done) SELECT id, 1, 1 FROM jobs;
INSERT INTO ports (job_id, direction, name) SELECT id, 'in', 'a' FROM jobs;
INSERT INTO packets (port_id, value) SELECT 1, '1' FROM generate_series(1, {MANY}) n;
INSERT INTO port_waiters SELECT id, 1, 1, 1 FROM ports;
INSERT INTO subscriptions (channel, job_id, port_id) SELECT '/c' || n, 1, 1 FROM generate_series(1, {MANY}) n;
INSERT INTO state SELECT 1, 'k' || n, '1' FROM generate_series(1, {MANY}) n;
INSERT INTO steps (job_id, turn, name, number, kind, run_no, done, tries)
  SELECT 1, '', 's' || n, 1, 'step', 1, true, 1 FROM generate_series(1, {MANY}) n;
INSERT INTO aliases SELECT 'a' || n, 1 FROM generate_series(1, {MANY}) n;
INSERT INTO dead (job_id, task_id, task, queue, reason, payload, error)
  SELECT 1, 'm' || n, 'task' || n % 10, 'q', 'failed', '{{}}', 'E' || n % 10 || ': it'
  FROM generate_series(1, {MANY}) n;
INSERT INTO tags (tag, job_id) SELECT 'common', id FROM jobs;
INSERT INTO tags (tag, job_id) SELECT 'own' || n, 1 FROM generate_series(1, {MANY}) n;
INSERT INTO run_history SELECT 1, n, 1, 'w', now(), now(), 'completed' FROM generate_series(1, {MANY}) n;
INSERT INTO job_log (job_id, at, what) SELECT 1, now(), 'x' FROM generate_series(1, {MANY}) n;
INSERT INTO tracked (job_id) SELECT id FROM jobs;
INSERT INTO duplicates (task_id, call, tried, kept_until)
  SELECT 't' || n, 'c', '{{}}', now() FROM generate_series(1, {MANY}) n;
INSERT INTO broker_messages (queue, priority, headers, properties, body)
  SELECT 'q', 0, '{{}}', '{{}}', repeat('x', 700) FROM generate_series(1, {MANY}) n;
INSERT INTO results (key, state, body, expires_at)
  SELECT 'k' || n, 'SUCCESS', '', now() + interval '1 day' FROM generate_series(1, {MANY}) n;
INSERT INTO web_answers SELECT 'token', 'k' || n, 'r', 'c' FROM generate_series(1, {MANY}) n;
INSERT INTO chords (key, size, counted, expires_at)
  SELECT 'c' || n, {MANY}, 1, now() + interval '1 day' FROM generate_series(1, {MANY}) n;
ANALYZE chords;
INSERT INTO chord_parts SELECT 'c' || 1 + n % 100, 't' || n, n, '' FROM generate_series(1, {MANY}) n;
ANALYZE"""


@pytest.fixture(scope="module")
def skewed_store(databases: Databases, database_template: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection to a store in which one job, and one port, has nearly all that there is."""
    with filled(databases, database_template, SKEWED) as connection:
        yield connection


@pytest.mark.parametrize("name", HOT)
def test_one_with_very_many_makes_nobody_read_a_whole_table(skewed_store: psycopg.Connection[Any], name: str) -> None:
    plan = plan_of(skewed_store, HOT[name])
    assert set(scans(plan)) <= SMALL, json.dumps(plan, indent=1)


TASKS_OF_NONE = {"task": "none", "queue": None, "statuses": ["queued"], "text": "none", "limit": 100}
ENTRIES = {
    "all": {"failure_group": None, "task": None},
    "task": {"failure_group": None, "task": "task7"},
    "group": {"failure_group": "E7", "task": None},
}
OTHER = MANY + 50
FIRST = 1
"""The batch that has all members."""
ROOT = MANY + 60
COUNTED = {"counted": trees.TOO_MANY}
BOUNDED: dict[str, tuple[Statement, dict[str, Any], int]] = {
    "below another": (trees._SUBTREE, {"ids": [OTHER], "most": None}, 20),
    "the first below that is not terminated": (trees._REST, {"ids": [1], "status": "terminated"}, 20),
    "one below that is not terminated": (trees._OTHER, {"ids": [1], "status": "terminated"}, 20),
    "a page of those who are terminated": (
        trees._FIND,
        {"job_id": [1], "root": [1], "itself": [False], "after": ["kid2"], "most": 100},
        1000,
    ),
    "what a page of those has left": (
        trees._GO_ON,
        {"ids": [1, OTHER], "roots": [1, 1], "first": ["kid2", ""], "last": ["kid20", ""], "places": [1]},
        1000,
    ),
    "packets of another": (
        packets._TAKE,
        {
            **{"owner_id": OTHER, "direction": "in", "name": "a"},
            **{"job_id": ROOT, "run_no": 1, "limit": 100, "again": False, "seen": []},
        },
        20,
    ),
    "timers that are due": (asks._DUE_TIMERS, {"limit": 200}, 10 * asks.SOONEST),
    "a queue that is gone": (publishing._REPUBLISH_IN, {"queue": "q"}, 20 * publishing.CHECK_PAGE),
    "who is dead": (holds._TAKE_FROM_THE_DEAD, {}, 20),
    "old notes on copies": (duplicates._PRUNE, {}, 10 * duplicates.PAGE),
    "old entries of jobs": (
        dead._OLD_JOBS,
        {"after": 0, "limit": 1000, **dead.Bounds(1e6, 5, {"task7": (60.0, 3)}).parameters},
        10 * 1000,
    ),
    "an entry by its task id": (dead._OF_TASK, {"task_id": "m7"}, 20),
    "entries of a task": (
        dead._OLDEST["task"],
        {"before": 2**60, "after": 0, **ENTRIES["task"], "queue": None, "reason": None, "limit": 100},
        1000,
    ),
    **{
        f"the newest entries, by {name}": (
            dead._NEWEST[name],
            {"before": 2**60, "after": MANY - 1000, **ENTRIES[name], "queue": None, "reason": "lost", "limit": 100},
            2500,
        )
        for name in dead._NEWEST
    },
    **{
        f"how far to look for entries, by {name}": (
            dead._REACH[name],
            {"before": 2**60, **ENTRIES[name]},
            3 * dead.LOOKED,
        )
        for name in dead._REACH
    },
    **{
        f"how far to look for jobs {of}, {order} first": (
            reach[order],
            job_lists.Filters(tag="common", batch_id=FIRST).parameters,
            4 * job_lists.LOOKED,
        )
        for of, reach in (
            ("of all", job_lists._REACH),
            ("of a tag", job_lists._REACH_TAGGED),
            ("that failed", job_lists._REACH_FAILED),
            ("of a batch", job_lists._REACH_OF_BATCH),
        )
        for order in reach
    },
    **{
        f"no job of a task among some, {order} first": (
            statement,
            {**job_lists.Filters(task="none", text="none", after=MANY - 2000).parameters, "limit": 100},
            2500,
        )
        for order, statement in job_lists._LIST.items()
    },
    **{
        f"jobs of a batch, {order} first": (
            statement,
            {**job_lists.Filters(batch_id=FIRST, tag="common", after=1).parameters, "limit": 100},
            2000,
        )
        for order, statement in job_lists._LIST_OF_BATCH.items()
    },
    "whether a queue is short": (waiting._IS_SHORT, {"queue": "q"}, 3 * waiting.SHORT),
    "how far to look for durable tasks": (waiting._REACH, {"after": ""}, 3 * waiting.LOOKED),
    "no durable task among some": (waiting._LIST_NEXT, {**TASKS_OF_NONE, "after": ""}, 4 * waiting.LOOKED),
    "no durable task of a short queue": (waiting._LIST_OF_QUEUE, {**TASKS_OF_NONE, "queue": "q"}, 4 * waiting.SHORT),
    "durable tasks that run": (waiting._LIST_RUNNING, TASKS_OF_NONE, 20),
    "packets of a port, up to a bound": (
        packets._COUNT_FEW,
        {"owner_id": 1, "direction": "in", "name": "a"},
        5 * packets.COUNTED,
    ),
    "entries of a group as they failed": (
        dead._OLDEST["group"],
        {"before": 2**60, "after": 0, **ENTRIES["group"], "queue": None, "reason": None, "limit": 100},
        1000,
    ),
    **{
        f"jobs of a tag, {order} first": (
            statement,
            {**job_lists.Filters(tag="common", after=1).parameters, "limit": 100},
            2000,
        )
        for order, statement in job_lists._LIST_TAGGED.items()
    },
    **{
        f"jobs that are {age}, {order} first": (
            statement,
            {**job_lists.Filters(older_s=0.0, since_s=1e6, after=1).parameters, "limit": 100},
            10 * job_lists.FEW,
        )
        for age, listing in (("old", job_lists._LIST_OLD), ("young", job_lists._LIST_YOUNG))
        for order, statement in listing.items()
    },
    "whether many jobs are young": (
        job_lists._ARE_MANY_YOUNG,
        {"since": None, "since_s": 1e6},
        3 * job_lists.FEW,
    ),
    "the newest of all jobs": (
        job_lists._LIST["newest"],
        {**job_lists.Filters().parameters, "limit": 100},
        2000,
    ),
    "whether many jobs are old": (job_lists._ARE_MANY_OLD, {"older_s": 0.0}, 3 * job_lists.FEW),
    "tracked jobs": (jobs._TRACKED, {"limit": 100}, 2000),
    "a run that goes on after all": (
        burials._TAKE_BACK,
        {"task_id": "m7", "generation": 1, "task": "task7", "digest": "d", "entry_too": True},
        40,
    ),
    "old jobs": (
        deletions._OLD_PAGE,
        {"after": 0, "limit": 1000, "age_s": 1e6, "kinds": ["task"], "surplus": [5]},
        10 * 1000,
    ),
    "the newest jobs": (deletions._NEWEST_PAGE, {"before": MANY, "limit": 1000, "all_others": True}, 10 * 1000),
    "children, as a tree shows them": (
        trees._TREE,
        {"id": 1, "depth": 1, "limit": 100, "counted": trees.TOO_MANY},
        10 * trees.COUNTED,
    ),
    "the tree of another": (
        trees._TREE,
        {"id": OTHER, "depth": 10_000, "limit": 10_000, "counted": trees.TOO_MANY},
        20,
    ),
}
"""What reads at most so many rows, whoever has how many."""


@pytest.mark.parametrize("name", BOUNDED)
def test_no_more_rows_are_read_than_are_wanted(skewed_store: psycopg.Connection[Any], name: str) -> None:
    statement, parameters, most = BOUNDED[name]
    with skewed_store.transaction(force_rollback=True):
        found = skewed_store.execute(
            "EXPLAIN (ANALYZE, FORMAT JSON) " + statement.render(SCHEMA), parameters, prepare=True
        ).fetchone()
    assert rows_read(found[0][0]["Plan"]) <= most, json.dumps(found[0], indent=1)  # type: ignore[index]


@pytest.mark.parametrize(("job_id", "most"), [(1, 3 * 501), (OTHER, 25)], ids=["the parent of all", "another"])
def test_a_claim_reads_no_more_children_than_it_wants(
    skewed_store: psycopg.Connection[Any], job_id: int, most: int
) -> None:
    with skewed_store.transaction(force_rollback=True):
        skewed_store.execute("UPDATE jobs SET status = 'queued' WHERE id = %s", [job_id])
        skewed_store.execute("DELETE FROM timers")  # a claim takes those that are due
        (worker_id,) = skewed_store.execute(  # type: ignore[misc]
            "INSERT INTO workers (ident, revision) VALUES ('w', '0001') RETURNING id"
        ).fetchone()
        parameters = {
            "id": job_id,
            "task": "task",
            "for_run": 1,
            "worker_id": worker_id,
            "pid": 1,
            "most": 500,
            "leaves": False,
            "passes": False,
            "schema": SCHEMA,
        }
        found = skewed_store.execute(
            "EXPLAIN (ANALYZE, FORMAT JSON) " + claims._CLAIM.render(SCHEMA), parameters, prepare=True
        ).fetchone()
    plan = found[0][0]["Plan"]  # type: ignore[index]
    assert 0 < rows_read(plan) <= most, json.dumps(plan, indent=1)
    assert plan["Actual Rows"] == 1, "of very many children the index was read, and none is returned"


FILL_KEYS = """
INSERT INTO queues (name, key_limit) VALUES ('keyed', 5);
INSERT INTO jobs (id, task, queue, status, wakes, limit_key, priority) OVERRIDING SYSTEM VALUE
  SELECT 1000000 + n, 'task', 'keyed', 'queued', 1, CASE WHEN n > 1 THEN 'k' || n % 10 END, 5
  FROM generate_series(1, 5000) n;
INSERT INTO messages (task_id, job_id, for_run, queue, check_interval, rank, limit_key, published_at, next_check_at)
  SELECT 'keyed' || id, id, 1, queue, '1 h', priority, limit_key, now(), now() + interval '1 h'
  FROM jobs WHERE queue = 'keyed'"""


def test_a_claim_by_keys_reads_the_first_of_each_key_and_the_first_without_one(
    skewed_store: psycopg.Connection[Any],
) -> None:
    with skewed_store.transaction(force_rollback=True):
        for statement in FILL_KEYS.split(";"):
            skewed_store.execute(statement)  # type: ignore[arg-type]
        (worker_id,) = skewed_store.execute(  # type: ignore[misc]
            "INSERT INTO workers (ident, revision) VALUES ('w', '0001') RETURNING id"
        ).fetchone()
        parameters = {
            "id": 0, "queue": "keyed", "task": "task", "tasks": ["task"], "worker_id": worker_id, "pid": 1, "most": 500,
            "schema": SCHEMA,
        }  # fmt: skip
        found = skewed_store.execute(
            "EXPLAIN (ANALYZE, FORMAT JSON) " + permits._CLAIM_OF_KEYS.render(SCHEMA), parameters, prepare=True
        ).fetchone()
    plan = found[0][0]["Plan"]  # type: ignore[index]
    assert plan["Actual Rows"] == 1
    assert rows_read(plan) <= 600, json.dumps(plan, indent=1)


def test_a_deletion_reads_no_whole_table_for_its_foreign_keys(skewed_store: psycopg.Connection[Any]) -> None:
    def read() -> dict[str, int]:
        return dict(
            skewed_store.execute(
                "SELECT relname, seq_tup_read FROM pg_stat_xact_user_tables WHERE seq_tup_read > 0"
            ).fetchall()
        )

    with skewed_store.transaction(force_rollback=True):
        before = read()
        skewed_store.execute(deletions._DELETE.render(SCHEMA), {"ids": [OTHER]})
        assert {name: rows for name, rows in read().items() if rows != before.get(name)} == {}
