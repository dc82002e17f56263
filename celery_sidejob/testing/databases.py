"""Databases of one Postgres: made for one run of tests, cloned from a template, and dropped."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from ..model.checks import SECONDS, in_seconds, is_seconds, shown
from ..model.errors import InvalidValueError, SettingsError
from ..model.recurrence import Plan, Window
from ..store.errors import first_line
from .subject import sidejob_of

OWN = "sidejob_test_"
"""What the names of the databases begin with that are made here."""
XDIST = "PYTEST_XDIST_WORKER"
"""The variable that names a process of pytest-xdist."""


class Databases:
    """Makes and drops databases on the server of an administrator's URL."""

    def __init__(self, admin_url: str) -> None:
        self.admin_url = admin_url

    def url_of(self, name: str) -> str:
        """Return the administrator's URL with another database."""
        return urlsplit(self.admin_url)._replace(path=f"/{name}").geturl()

    @contextmanager
    def fresh(self, *, template: str = "template1") -> Iterator[str]:
        """Make a database that exists within the block, cloned from `template`; yields its name."""
        name = f"{OWN}{secrets.token_hex(6)}"
        try:
            self._execute("CREATE DATABASE {} TEMPLATE {}", name, template)
        except psycopg.errors.InsufficientPrivilege as error:
            raise SettingsError(
                f"The tests cannot make a database: {first_line(error)}. Grant the user CREATEDB, or let the fixture "
                "sidejob_database_url return the URL of a database of tests that is there."
            ) from error
        try:
            yield name
        finally:
            # FORCE: what a test has left connected, even frozen, must not keep the database.
            self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)

    def close_for_cloning(self, name: str) -> None:
        """Let nobody connect to `name` from now on: a database that is in use cannot be cloned."""
        self._execute("ALTER DATABASE {} WITH ALLOW_CONNECTIONS false", name)
        with psycopg.connect(self.admin_url, autocommit=True) as connection:
            connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])

    def _execute(self, statement: str, *names: str) -> None:
        with psycopg.connect(self.admin_url, autocommit=True) as connection:
            connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


KEPT = frozenset({"meta", "alembic_version", "registry", "leases", "broker_queues", "broker_bindings"})
"""Tables that are not of a test: what the schema is, the tasks that exist, and the queues that are declared."""


def check_is_for_tests(url: str) -> None:
    """Raise SettingsError for a database whose name does not say that it is one of tests: it is going to be emptied."""
    name = str(conninfo_to_dict(url).get("dbname", ""))
    if "test" not in name.lower():
        raise SettingsError(
            f"The tests would delete all jobs in the database {name!r}, whose name has no 'test' in it. Let "
            "sidejob_database_url return the URL of a database of tests, or do not override it."
        )


def refuse_tables_elsewhere() -> None:
    """Have SQLAlchemy's `create_all` and `drop_all` raise SettingsError for a database that is not one of tests."""
    from sqlalchemy import MetaData, Table, event

    def check(target: Any, connection: Any, **_: Any) -> None:
        name = connection.engine.url.database
        if name and name != ":memory:" and "test" not in name.lower():
            raise SettingsError(
                f"The tests would make or drop tables in the database {name!r}, whose name has no 'test' in it. Make "
                "the engine of the URL that the fixture sidejob_database_url returns, after the fixture sidejob_app."
            )

    for kind in (MetaData, Table):
        for moment in ("before_create", "before_drop"):
            event.listen(kind, moment, check)


def check_can_be_reached(url: str, what: str, *, remedy: str) -> None:
    """Raise SettingsError if no connection can be made; `what` is the server, and `remedy` says what else to do."""
    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.Error as error:
        raise SettingsError(
            f"The tests cannot reach {what}: {first_line(error)}. Start it, correct the URL, or {remedy}."
        ) from error


def own_schema(schema: str, url: str) -> str:
    """Return the schema of this process in a database: one of its own where processes of pytest-xdist share that.

    They do if a fixture of the user's gives all of them one URL. Ours are made by each process, and pytest-django has
    the name of the process in its own.
    """
    name, process = str(conninfo_to_dict(url).get("dbname", "")), os.environ.get(XDIST, "")
    return schema if name.startswith(OWN) or process in name else f"{schema}_{process}"


def drop_schema(url: str, schema: str) -> None:
    """Remove what an earlier run of tests has left: a schema belongs to the broker of its run."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema)))


def empty(url: str, schema: str) -> None:
    """Delete all jobs, messages and workers; nobody may be using the store."""
    with psycopg.connect(url, autocommit=True) as connection, connection.transaction():
        rows = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", [schema]).fetchall()
        for name in sorted({name for (name,) in rows} - KEPT, key=lambda name: name != "jobs"):  # it takes most along
            connection.execute(sql.SQL("DELETE FROM {}").format(sql.Identifier(schema, name)))
        connection.execute(
            sql.SQL("UPDATE {} SET holder = NULL, expires_at = now()").format(sql.Identifier(schema, "leases"))
        )


def declare_dead(url: str, schema: str, worker_id: int) -> None:
    """Declare a worker dead whose process only seems to have died: what it holds is lost, and will be rescued."""
    statement = """
        UPDATE {} SET suspect_at = coalesce(suspect_at, clock_timestamp()), suspect_by = coalesce(suspect_by, 'lock'),
          dead_at = coalesce(dead_at, now())
        WHERE id = %s"""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL(statement).format(sql.Identifier(schema, "workers")), [worker_id])


STILL = frozenset({"meta", "alembic_version", "workers", "served", "leases", "broker_consumers"})
"""Tables whose times do not move: a worker that lives would seem to be dead."""
NEVER = "9000-01-01"
"""Times beyond this one are no times: a row that is held back is due in the year 9000 (`NEVER`)."""
MOVES = 10
"""How often a move of the clock begins: it ends at a deadlock with workers that write the same rows."""


def move_back(url: str, schema: str, seconds: float) -> None:
    """Move all times of jobs, messages, results and schedules into the past.

    It locks every row, in no order that workers know: where Postgres ends it for a deadlock, it begins again.
    """
    with psycopg.connect(url, autocommit=True) as connection:
        for left in reversed(range(MOVES)):
            try:
                with connection.transaction():
                    return _move_back(connection, schema, seconds)
            except psycopg.errors.DeadlockDetected:
                if not left:
                    raise


def _move_back(connection: psycopg.Connection[Any], schema: str, seconds: float) -> None:
    columns = """
        SELECT c.table_name::text, array_agg(c.column_name::text) FROM information_schema.columns c
        JOIN information_schema.tables t USING (table_schema, table_name)
        WHERE c.table_schema = %s AND c.data_type = 'timestamp with time zone' AND t.table_type = 'BASE TABLE'
        GROUP BY c.table_name"""
    one = sql.SQL("{0} = CASE WHEN {0} < {1} THEN {0} - make_interval(secs => {2}) ELSE {0} END")
    for table, names in connection.execute(columns, [schema]).fetchall():
        if table not in STILL:
            moved = sql.SQL(", ").join(one.format(sql.Identifier(name), NEVER, seconds) for name in names)
            connection.execute(sql.SQL("UPDATE {} SET {}").format(sql.Identifier(schema, table), moved))
    _move_plans(connection, sql.Identifier(schema, "schedules"), timedelta(seconds=seconds))


def _move_plans(connection: psycopg.Connection[Any], schedules: sql.Identifier, by: timedelta) -> None:
    """Move what is still to come of schedules, whose rows are locked already, into the past."""
    read = sql.SQL("SELECT name, plan, jitter_s, paused_at IS NOT NULL FROM {}").format(schedules)
    write = sql.SQL("UPDATE {} SET plan = %s, next_at = %s, due_at = %s, revision = revision + 1 WHERE name = %s")
    for name, windows, jitter_s, is_paused in connection.execute(read).fetchall():
        plan = Plan(name, tuple(map(Window.of_json, windows)), jitter_s).moved_back(by)
        due_at = None if plan.next is None or is_paused else plan.made_at(plan.next)  # the jitter depends on the time
        connection.execute(write.format(schedules), [json.dumps(plan.as_json()), plan.next, due_at, name])


def empty_store(sidejob: Any = None) -> None:
    """Delete all jobs, messages, dead entries and workers; the broker keeps its messages, which then mean nothing.

    SettingsError, and nothing is deleted, if the database's name does not say that it is one for tests.
    """
    settings = sidejob_of(sidejob).settings
    url = settings.require_database_url()
    check_is_for_tests(url)
    empty(url, settings.schema)


def move_clock(by: timedelta | float, *, sidejob: Any = None) -> None:
    """Have this time pass (a timedelta, or seconds): for jobs, messages, timers, schedules, retention and the dead set.

    All times in the store move into the past, so nothing in a production process asks for a clock. Workers do not seem
    silent: `kill` and `freeze` are for that. Messages that a worker has in its memory, as those with an `eta` within
    `sidejob_timer_horizon`, wait as long as before. The `nominal_time` of what a schedule makes is as much earlier.
    A cron expression that is given, changed or resumed afterwards goes by the calendar of today.
    """
    seconds = in_seconds(by)
    if not is_seconds(seconds):
        raise InvalidValueError(f"move_clock() takes {SECONDS}, or a timedelta, not {shown(by)}.")
    settings = sidejob_of(sidejob).settings
    check_is_for_tests(settings.require_database_url())
    move_back(settings.require_database_url(), settings.schema, float(seconds))
