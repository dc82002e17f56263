"""The migrated schema keeps its promises: illegal rows are refused, foreign keys are indexed, updates can be HOT."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from celery_sidejob.model.status import Gate, Status
from celery_sidejob.store.meta import REVISION
from celery_sidejob.store.schema import migrate
from celery_sidejob.store.schema.tables import TABLES
from tests.tools.databases import Databases
from tests.tools.pgbouncer import direct
from tests.tools.statements import assignments, numbered, statements

SCHEMA = "sidejob"

# What runs, asks and rescues change in a job. An index on one of these, or one that only names it in its WHERE, would
# turn each of their updates into a row in every index of the table.
CHANGED = {
    "status", "run_no", "unit_no", "worker_id", "run_kind", "ended_run", "rate_opens_at", "wakes", "wakes_taken",
    "changes", "timer_in_run", "terminate_tree", "losses", "retries", "started", "ran_at", "ended_at", "error",
    "inputs_memo", "blocked", "has_dependents", "has_steps", "failed_by",
}  # fmt: skip
CHANGED_OUTSIDE_RUNS = {
    "parent_id", "name", "priority", "task", "queue", "args", "kwargs", "max_losses", "retention_s", "retention_keep",
    "rate_interval_s", "rate_burst", "rate_terminates", "pool", "pool_weight", "pool_runs",
}  # fmt: skip

UTILITY = re.compile(r"SET LOCAL\b", re.IGNORECASE)
"""Statements that Postgres runs and does not prepare."""


@pytest.fixture
def connection(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(direct(database_url)) as connection:
        yield connection
        connection.rollback()


def test_the_tables_are_those_of_the_migrations(connection: psycopg.Connection[Any]) -> None:
    found = connection.execute(
        "SELECT table_name::text, column_name::text FROM information_schema.columns WHERE table_schema = %s", [SCHEMA]
    ).fetchall()
    assert sorted(found) == sorted((name, column) for name, table in TABLES.items() for column in table.columns.split())


# --- statements ---------------------------------------------------------------------------------------------------


RUN_ON = [f"{revision:04}" for revision in range(max(1, int(REVISION) - 1), int(REVISION) + 1)]
"""Our own revision, and the one before, on which this version runs too."""


@pytest.mark.parametrize("revision", RUN_ON)
def test_every_statement_fits_the_schema(databases: Databases, revision: str) -> None:
    failures = {}
    with databases.fresh() as name:
        migrate.upgrade(databases.url_of(name), to=revision)
        with psycopg.connect(databases.url_of(name)) as connection:
            connection.execute("SET search_path = ''")  # a session's own belongs to its owner: names say their schema
            for where, statement in statements().items():
                try:
                    with connection.transaction(force_rollback=True):
                        if UTILITY.match(statement.text):
                            connection.execute(statement.render(SCHEMA))
                        else:
                            connection.execute(f"PREPARE probe AS {numbered(statement, SCHEMA)[0]}")
                            connection.execute("DEALLOCATE probe")
                except psycopg.Error as error:
                    failures[where] = str(error)
    assert failures == {}


TOLD = {"eta", "etas", "expires", "expires_at", "due_at", "since", "seen", "seen_at"}
"""Times that a statement is told: what users have named, where a page goes on, what was read from the store before."""
TOLD |= {"start_at", "end_at", "anchor_at", "next_at", "last_at", "nominal_at"}
"""Of a schedule: what users have named, and what follows from that and the time of the store."""
TOLD |= {"at", "held_at", "claim"}
"""The number of a hold, or of a claim of a chord: a time of the store's, which is only compared for being the same."""


def test_what_decides_about_lateness_is_the_clock_of_the_database(connection: psycopg.Connection[Any]) -> None:
    told: dict[str, set[str]] = {}
    for where, statement in statements().items():
        if UTILITY.match(statement.text):
            continue
        text, _ = numbered(statement, SCHEMA)
        connection.execute(f"PREPARE probe AS {text}")
        (kinds,) = connection.execute(
            "SELECT parameter_types::text[] FROM pg_prepared_statements WHERE name = 'probe'"
        ).fetchone()  # type: ignore[misc]
        connection.execute("DEALLOCATE probe")
        names = list(dict.fromkeys(re.findall(r"%\((\w+)\)s", statement.text)))
        times = {name for name, kind in zip(names, kinds, strict=True) if kind.startswith("timestamp")}
        if times:
            told[where] = times

    assert {where: times - TOLD for where, times in told.items() if times - TOLD} == {}
    assert {where.partition(".")[0] for where in told} >= {"outbox"}


SESSIONS = re.compile(
    r"\bSET\s+(?!LOCAL\b)(SESSION\b|\w+\s*(=|TO)\s)|\bLISTEN\b|\bUNLISTEN\b|\bNOTIFY\b|\bTEMP(ORARY)?\b|\bPREPARE\b|"
    r"\bDECLARE\b|set_config\([^()]*false\)|pg_(try_)?advisory_lock\(",
    re.IGNORECASE,
)
"""What would be kept in a session, and lost or left to another behind a pooling proxy."""
GIVEN_BACK = re.compile(r"pg_try_advisory_lock\((.*)\) THEN NOT pg_catalog\.pg_advisory_unlock\(\1\)")
"""A lock that the same expression gives back at once."""


def test_nothing_is_kept_in_a_session_but_the_liveness_locks() -> None:
    assigning = re.compile(r"\bDO UPDATE\s+SET\b|\bUPDATE\b.*?\bSET\b", re.IGNORECASE | re.DOTALL)
    found = {
        where for where, one in statements().items() if SESSIONS.search(GIVEN_BACK.sub("", assigning.sub("", one.text)))
    }

    assert found == {"workers._TAKE_LOCK", "broker.consumers._LOCK"}


@pytest.mark.parametrize(
    "text",
    [
        "SET search_path = x",
        "SET SESSION x = 1",
        "LISTEN jobs",
        "CREATE TEMP TABLE x (y int)",
        "SELECT set_config('x', 'y', false)",
        "SELECT pg_advisory_lock(1)",
    ],
)
def test_what_is_kept_in_a_session_would_be_seen(text: str) -> None:
    assert SESSIONS.search(text)


# --- indexes ------------------------------------------------------------------------------------------------------


def test_every_foreign_key_has_an_index(connection: psycopg.Connection[Any]) -> None:
    keys = connection.execute(
        """
        SELECT c.conrelid::regclass::text, c.conname, EXISTS (
            SELECT FROM pg_index i WHERE i.indrelid = c.conrelid AND i.indisvalid AND i.indpred IS NULL
              AND (i.indkey::int2[])[0:cardinality(c.conkey) - 1] @> c.conkey)
        FROM pg_constraint c WHERE c.contype = 'f' AND c.connamespace = %s::regnamespace""",
        [SCHEMA],
    ).fetchall()

    assert keys
    assert [key for key in keys if not key[-1]] == []  # a delete would read the whole table for each row


def columns_named_by_indexes(connection: psycopg.Connection[Any], table: str) -> set[str]:
    """The columns that any index of the table has as a key, includes, computes with, or names in its predicate."""
    found = connection.execute(
        """
        SELECT DISTINCT a.attname FROM pg_index i
          JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum > 0
          LEFT JOIN pg_depend d ON d.classid = 'pg_class'::regclass AND d.objid = i.indexrelid
            AND d.refclassid = 'pg_class'::regclass AND d.refobjid = i.indrelid AND d.refobjsubid = a.attnum
        WHERE i.indrelid = %s::regclass AND (a.attnum = ANY(i.indkey) OR d.objid IS NOT NULL)""",
        [f"{SCHEMA}.{table}"],
    )
    return {name for (name,) in found}


def test_what_a_run_changes_is_in_no_index(connection: psycopg.Connection[Any]) -> None:
    assert columns_named_by_indexes(connection, "jobs") == {"id", "parent_id", "name", "created_at"}


@pytest.mark.parametrize(
    "index",
    [
        "(status)",
        "(id) WHERE status = 'queued'",
        "((losses + 1))",
        "(id) INCLUDE (error_code)",
    ],
)
def test_an_index_on_what_a_run_changes_would_be_seen(connection: psycopg.Connection[Any], index: str) -> None:
    connection.execute("ALTER TABLE sidejob.jobs ADD COLUMN error_code int")
    connection.execute(f"CREATE INDEX ON sidejob.jobs {index}")

    assert columns_named_by_indexes(connection, "jobs") & (CHANGED | {"error_code"})


def test_what_a_run_changes_is_in_no_foreign_key(connection: psycopg.Connection[Any]) -> None:
    keys = connection.execute("""
        SELECT a.attname FROM pg_constraint c
          JOIN pg_attribute a ON a.attrelid = c.conrelid AND a.attnum = ANY(c.conkey)
        WHERE c.contype = 'f' AND c.conrelid = 'sidejob.jobs'::regclass""")

    assert {name for (name,) in keys} == {"parent_id"}


def test_the_columns_that_a_run_changes_are_those_of_the_statements() -> None:
    changed = set().union(*map(assignments, statements().values()))

    assert changed == CHANGED | CHANGED_OUTSIDE_RUNS


# --- constraints --------------------------------------------------------------------------------------------------


def test_every_constraint_has_the_name_we_gave_it(connection: psycopg.Connection[Any]) -> None:
    written = io.StringIO()
    migrate.upgrade_sql(SCHEMA, written)
    given = set(re.findall(r"CONSTRAINT (?:TRIGGER )?(\w+)", written.getvalue()))

    found = connection.execute(
        "SELECT conname FROM pg_constraint WHERE connamespace = %s::regnamespace AND contype <> 'n'",  # not NOT NULL
        [SCHEMA],
    )

    # One block gives every table its bounds, and names them after the table.
    assert {name for (name,) in found if not name.endswith("_bounds_check")} == given


def test_statuses_are_those_of_the_model(connection: psycopg.Connection[Any]) -> None:
    (rule,) = connection.execute(
        "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = 'jobs_status_check'"
    ).fetchone() or ("",)

    assert set(re.findall(r"'(\w+)'", rule)) == {str(status) for status in Status}


IN_RUN = {"status": "running", "run_no": 1, "unit_no": 0, "worker_id": 1, "run_kind": "run"}
SHUTTING_DOWN = {**IN_RUN, "status": "terminating", "run_kind": "shutdown"}
RATE = {"rate_interval_s": 0.1, "rate_burst": 600, "rate_terminates": False}
POOLED = {"pool": "p", "pool_weight": 1}
DOORBELL = {"job_id": 1, "for_run": 1}
CONTINUATION = {"publication": "{}"}
DURABLE = {**CONTINUATION, "task": "t", "body": b"[]", "generation": 1}
NOW = "2026-01-01 00:00+00"

OF_SCHEDULE = {"schedule": "s", "schedule_no": 1, "nominal_at": NOW}
EVERY = {"every_s": 60, "overlap": "skip", "jitter_s": 0, "anchor_at": NOW, "plan": "[]"}
CRON = {"every_s": None, "cron": "* * * * *", "timezone": "UTC"}

# For each table: what every row has here, and rows as they may be.
LEGAL = {
    "jobs": (
        {"id": 2, "task": "t", "queue": "q"},
        [
            {},
            IN_RUN,
            SHUTTING_DOWN,
            {**IN_RUN, "status": "queued", "wakes": 2, "wakes_taken": 1},
            {**IN_RUN, "status": "terminating"},
            {"status": "terminating", "wakes": 1},
            {"parent_id": 1, "name": "child"},
            {**RATE, "rate_opens_at": NOW},
            POOLED,
            OF_SCHEDULE,
            *({"status": status} for status in Status if status is not Status.RUNNING),
        ],
    ),
    "schedules": (
        {"name": "s", "task": "t", "args": "[]", "kwargs": "{}", "options": "{}", **EVERY},
        [
            {},
            CRON,
            {"next_at": NOW, "due_at": NOW},
            {"next_at": NOW, "paused_at": NOW, "pause_reason": "why"},
            {"count": 1, "last_at": NOW, "last_task_id": "t"},
        ],
    ),
    "messages": (
        {"task_id": "m", "queue": "q", "check_interval": "30 s"},
        [
            DOORBELL,
            CONTINUATION,
            {**DOORBELL, "locked_by": 1, "locked_at": NOW},
            {**DOORBELL, "suspected_at": NOW},
            DURABLE,
            {**DURABLE, "locked_by": 1, "locked_at": NOW, "on_lost": "dead", "max_losses": 3},
            {**DOORBELL, **POOLED, "pool_rank": 0},
            {**DURABLE, **POOLED, "pool_rank": 0, "pool_shard": 0},
            *({**DOORBELL, **POOLED, "pool_rank": 0, "gate": gate} for gate in Gate),
            {**DURABLE, "doom": "revoked", "gate": Gate.WORKER},
            *({**DURABLE, "doom": doom} for doom in ("lost", "expired")),
        ],
    ),
    "askings": (
        {"task_id": "a", "job_id": 1},
        [
            {},
            *({"closed_at": NOW, "outcome": outcome} for outcome in ("completed", "failed", "terminated")),
            {"closed_at": NOW, "outcome": "completed", "stored_at": NOW},
        ],
    ),
}  # fmt: skip

# For each CHECK: rows that nothing else would refuse.
ILLEGAL: dict[str, list[dict[str, Any]]] = {
    "jobs_bounds_check": [
        {"id": 0},
        {"id": 2**63 - 1},
        {"created_at": "infinity"},
        {"ran_at": "0044-03-15 BC"},
        {"ended_at": "10000-01-01"},
        {"retention_s": "NaN"},
    ],
    "schedules_bounds_check": [{"anchor_at": "-infinity"}, {"jitter_s": "infinity"}],
    "messages_bounds_check": [{**DOORBELL, "due_at": "infinity"}, {**DOORBELL, "expires_at": "-infinity"}],
    "askings_bounds_check": [{"opened_at": "infinity"}],
    "jobs_status_check": [{"status": "asleep"}],
    "jobs_in_run_check": [
        {**IN_RUN, "worker_id": None},
        {**IN_RUN, "run_kind": None},
        {"worker_id": 1},
        {"run_kind": "run"},
    ],
    "jobs_run_kind_check": [{**IN_RUN, "run_kind": "walk"}],
    "jobs_unit_no_check": [{**IN_RUN, "unit_no": -1}, {**IN_RUN, "run_no": 0}],
    "jobs_in_run_status_check": [
        {**IN_RUN, "status": status} for status in ("suspended", "completed", "failed", "terminated")
    ],
    "jobs_running_check": [{"status": "running"}],
    "jobs_shutdown_check": [{**SHUTTING_DOWN, "status": "running"}],
    "jobs_wakes_check": [{"wakes": 1, "wakes_taken": 2}],
    "jobs_no_parked_wake_check": [
        {"status": status, "wakes": 1} for status in ("suspended", "completed", "failed", "terminated")
    ]
    + [{**IN_RUN, "wakes": 1}],
    "jobs_queued_in_run_check": [{**IN_RUN, "status": "queued", "wakes": 1, "wakes_taken": 1}],
    "jobs_child_name_check": [{"parent_id": 1}, {"name": "child"}],
    "jobs_own_parent_check": [{"parent_id": 2, "name": "child"}],
    "jobs_rate_check": [
        {**RATE, "rate_interval_s": 0},
        {**RATE, "rate_burst": 0},
        *({name: value for name, value in RATE.items() if name != lacking} for lacking in RATE),
    ],
    "jobs_schedule_check": [
        {name: value for name, value in OF_SCHEDULE.items() if name != lacking} for lacking in OF_SCHEDULE
    ],
    "schedules_timing_check": [
        {"cron": "* * * * *", "timezone": "UTC"},
        {"every_s": 0},
        {**CRON, "timezone": None},
        {**CRON, "cron": None},
        {"timezone": "UTC"},
    ],
    "schedules_rules_check": [{"catch_up": 0}, {"overlap": "kill"}, {"jitter_s": -1}],
    "schedules_due_check": [
        {"next_at": NOW},
        {"due_at": NOW},
        {"next_at": NOW, "due_at": NOW, "paused_at": NOW},
        {"next_at": NOW, "due_at": "2025-01-01 00:00+00"},
    ],
    "schedules_last_check": [{"count": 1}, {"last_at": NOW}, {"count": 1, "last_at": NOW}, {"last_task_id": "t"}],
    "schedules_pause_check": [{"pause_reason": "why"}],
    "jobs_pool_check": [{"pool": "p"}, {"pool_weight": 1}, {"pool": "p", "pool_weight": 0}],
    "messages_pool_check": [
        {**DOORBELL, "pool": "p"},
        {**DOORBELL, "pool_weight": 1},
        {**DOORBELL, "pool": "p", "pool_weight": 0, "pool_rank": 0},
        {**DOORBELL, **POOLED},
        {**DOORBELL, "pool_shard": 0},
    ],
    "messages_gate_check": [
        {**DOORBELL, "gate": -1},
        {**DOORBELL, "gate": max(Gate) + 1},
        *({**DOORBELL, "gate": gate, "locked_by": 1, "locked_at": NOW} for gate in (Gate.QUEUE, Gate.WORKER)),
        *({**DOORBELL, "gate": gate, "published_at": NOW} for gate in (Gate.QUEUE, Gate.JOBS)),
    ],
    "messages_job_check": [
        {},
        {"job_id": 1},
        {**CONTINUATION, "for_run": 1},
        {**DOORBELL, **CONTINUATION},
    ],
    "messages_lock_check": [{**DOORBELL, "locked_by": 1}, {**DOORBELL, "locked_at": NOW}],
    "messages_suspected_check": [{**DOORBELL, "locked_by": 1, "locked_at": NOW, "suspected_at": NOW}],
    "messages_body_check": [
        {**CONTINUATION, "task": "t"},
        {**CONTINUATION, "generation": 1},
        {**DURABLE, "task": None},
        {**DURABLE, "generation": None},
        {**DOORBELL, "task": "t", "body": b"[]", "generation": 1},
    ],
    "messages_on_lost_check": [{**DURABLE, "on_lost": "retry"}],
    "messages_doom_check": [
        {**DURABLE, "doom": "sealed"},
        {**DURABLE, "doom": "lost", "locked_by": 1, "locked_at": NOW},
        {**DOORBELL, "doom": "lost"},
    ],
    "askings_outcome_check": [{"closed_at": NOW, "outcome": "suspended"}],
    "askings_closed_check": [
        {"closed_at": NOW},
        {"outcome": "completed"},
        {"stored_at": NOW},
    ],
}


def insert(connection: psycopg.Connection[Any], table: str, row: dict[str, Any]) -> None:
    row = {**LEGAL[table][0], **row}
    places = ", ".join(f"%({column})s" for column in row)
    connection.execute(f"INSERT INTO sidejob.{table} ({', '.join(row)}) VALUES ({places})", row)


@pytest.fixture
def with_a_job(connection: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    """A connection in whose transaction there is a job with the id 1."""
    connection.execute("INSERT INTO sidejob.jobs (id, task, queue) VALUES (1, 't', 'q')")
    return connection


@pytest.mark.parametrize("table", LEGAL)
def test_legal_rows_are_accepted(with_a_job: psycopg.Connection[Any], table: str) -> None:
    for row in LEGAL[table][1]:
        with with_a_job.transaction(force_rollback=True):
            insert(with_a_job, table, row)


@pytest.mark.parametrize("check", ILLEGAL)
def test_illegal_rows_are_refused_by_their_check_alone(with_a_job: psycopg.Connection[Any], check: str) -> None:
    table = check.partition("_")[0]
    for row in ILLEGAL[check]:
        with pytest.raises(psycopg.errors.CheckViolation) as refused:
            with with_a_job.transaction():
                insert(with_a_job, table, row)
        assert refused.value.diag.constraint_name == check, row
        with with_a_job.transaction(force_rollback=True):
            with_a_job.execute(f"ALTER TABLE sidejob.{table} DROP CONSTRAINT {check}")
            insert(with_a_job, table, row)


def test_each_check_of_these_tables_has_its_rows(connection: psycopg.Connection[Any]) -> None:
    found = connection.execute(
        "SELECT conname FROM pg_constraint WHERE contype = 'c' AND conrelid = ANY(%s::regclass[])",
        [[f"{SCHEMA}.{table}" for table in LEGAL]],
    )

    assert {name for (name,) in found} == set(ILLEGAL)


def test_every_number_and_time_is_one_that_statements_can_go_on_with(connection: psycopg.Connection[Any]) -> None:
    """`next_check_at` is infinity while a message is held."""
    unbounded = connection.execute(
        """
        SELECT c.relname || '.' || a.attname FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
        WHERE c.relnamespace = %s::regnamespace AND c.relkind = 'r' AND a.attnum > 0
          AND (a.attidentity <> '' OR a.atttypid = 'timestamptz'::regtype
            OR a.atttypid = 'float8'::regtype AND right(a.attname, 2) = '_s')
          AND NOT EXISTS (SELECT FROM pg_constraint k WHERE k.conrelid = c.oid AND a.attnum = ANY(k.conkey)
            AND k.conname = c.relname || '_bounds_check')""",
        [SCHEMA],
    ).fetchall()
    assert unbounded == [("messages.next_check_at",)]


@pytest.mark.parametrize("row", [{"id": 2**31}, {"silence_s": "NaN"}, {"silence_s": 1e300}, {"beat_at": "infinity"}])
def test_a_consumer_that_no_heart_could_judge_is_refused(
    connection: psycopg.Connection[Any], row: dict[str, Any]
) -> None:
    """The next beat of every other consumer would end with an error, and with it their connections."""
    columns, values = zip(*{"ident": "odd", "silence_s": 1, **row}.items(), strict=True)
    with pytest.raises(psycopg.errors.CheckViolation, match="broker_consumers_bounds_check"):
        connection.execute(
            f"INSERT INTO sidejob.broker_consumers ({', '.join(columns)}) OVERRIDING SYSTEM VALUE VALUES "
            f"({', '.join(['%s'] * len(values))})",
            values,
        )
