"""Databases of one Postgres: made for one run of tests, cloned from a template, and dropped."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import quote, urlsplit

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from ..model.checks import SECONDS, in_seconds, is_seconds, shown
from ..model.errors import InvalidValueError, SettingsError
from ..model.schedule import Plan, Window
from ..store.errors import first_line
from .subject import sidejob_of


def names() -> Mapping[str, str]:
    """Return the names of the databases by their aliases; none in a process without Django."""
    return {alias: str(connection.settings_dict["NAME"]) for alias, connection in _connections().items()}


def alias_of_store(app: Any) -> str | None:
    """Return the alias of the Django database that contains the app's store; None if none does."""
    url = app.sidejob.settings.database_url
    if url is None:
        return None
    store = conninfo_to_dict(url)
    for alias, connection in _connections().items():
        found = connection.settings_dict
        if connection.vendor == "postgresql" and str(found["NAME"]) == store.get("dbname"):
            return alias
    return None


def url_of(alias: str) -> str:
    """Return the present URL of an alias's database."""
    found = _connections()[alias].settings_dict
    user, password, host, port, name = (
        quote(str(found[key] or ""), safe="") for key in ("USER", "PASSWORD", "HOST", "PORT", "NAME")
    )
    login = f"{user}:{password}@" if password else f"{user}@" if user else ""
    return f"postgresql://{login}{host}{f':{port}' if port else ''}/{name}"


def _connections() -> Mapping[str, Any]:
    settings, database = sys.modules.get("django.conf"), sys.modules.get("django.db")
    if settings is None or database is None or not settings.settings.configured:
        return {}
    return {alias: database.connections[alias] for alias in database.connections}


OWN = "sidejob_test_"
"""The prefix of the names of databases that are made here."""
XDIST = "PYTEST_XDIST_WORKER"
"""The variable that names a process of pytest-xdist."""


class Databases:
    """Makes and drops databases on the server of an administrator's URL."""

    clone = "CREATE DATABASE {} TEMPLATE {}"

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
            self._execute(self.clone, name, template)
        except psycopg.errors.InsufficientPrivilege as error:
            raise SettingsError(
                f"The tests cannot make a database: {first_line(error)}. Grant the user CREATEDB, or let the fixture "
                "sidejob_database_url return the URL of a database of tests that is there."
            ) from error
        try:
            yield name
        finally:
            # FORCE: a connection that a test has left open, even in a frozen process, must not keep the database.
            self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)

    def _execute(self, statement: str, *names: str) -> None:
        with psycopg.connect(self.admin_url, autocommit=True) as connection:
            connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


KEPT = frozenset({"meta", "alembic_version", "registry", "leases", "broker_queues", "broker_bindings"})
"""Tables that no test owns: the schema's revision, the known tasks, and the declared queues."""


def check_is_for_tests(url: str) -> None:
    """Raise SettingsError unless the database's name says that it is for tests: it is going to be emptied."""
    name = str(conninfo_to_dict(url).get("dbname", ""))
    if "test" not in name.lower():
        raise SettingsError(
            f"The tests would delete all jobs in the database {name!r}, whose name has no 'test' in it. Let "
            "sidejob_database_url return the URL of a database of tests, or do not override it."
        )


def refuse_tables_elsewhere() -> None:
    """Make SQLAlchemy's `create_all` and `drop_all` raise SettingsError for a database that is not for tests."""
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


@contextmanager
def reaching(what: str, *errors: type[Exception], remedy: str) -> Iterator[None]:
    """Raise SettingsError for one of these errors; `what` names the server, `remedy` suggests a way out."""
    try:
        yield
    except errors as error:
        raise SettingsError(f"The tests cannot reach {what}: {first_line(error)}. Start it, {remedy}.") from error


def check_can_be_reached(url: str, what: str, *, remedy: str) -> None:
    """Raise SettingsError if no connection to this Postgres can be made."""
    with reaching(what, psycopg.Error, remedy=f"correct the URL, or {remedy}"):
        psycopg.connect(url, connect_timeout=5).close()


def own_schema(schema: str, url: str) -> str:
    """Return the schema of this process in a database: its own schema if processes of pytest-xdist share the database.

    They do if a user's fixture gives all of them one URL. Our fixtures make a database for each process, and
    pytest-django puts the name of the process into the database's name.
    """
    name, process = str(conninfo_to_dict(url).get("dbname", "")), os.environ.get(XDIST, "")
    return schema if name.startswith(OWN) or process in name else f"{schema}_{process}"


def drop_schema(url: str, schema: str) -> None:
    """Remove the schema of an earlier test run: a schema belongs to the broker of its run."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema)))


def declare_dead(url: str, schema: str, worker_id: int) -> None:
    """Declare a worker dead whose process only seems to have died: its runs are lost, and will be rescued."""
    statement = """
        UPDATE {} SET suspect_at = coalesce(suspect_at, clock_timestamp()), suspect_by = coalesce(suspect_by, 'lock'),
          dead_at = coalesce(dead_at, now())
        WHERE id = %s"""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL(statement).format(sql.Identifier(schema, "workers")), [worker_id])


STILL = frozenset({"meta", "alembic_version", "workers", "served", "leases", "broker_consumers"})
"""Tables whose times do not move: otherwise a live worker would seem to be dead."""
MOVES = 10
"""How often a move of the clock is tried: it fails at a deadlock with workers, which lock rows in another order."""


def _move_back(connection: psycopg.Connection[Any], schema: str, seconds: float) -> None:
    """Move all times of jobs, messages, results and schedules into the past."""
    columns = """
        SELECT c.table_name::text, array_agg(c.column_name::text) FROM information_schema.columns c
        JOIN information_schema.tables t USING (table_schema, table_name)
        WHERE c.table_schema = %s AND c.data_type = 'timestamp with time zone' AND t.table_type = 'BASE TABLE'
        GROUP BY c.table_name"""
    one = sql.SQL("{0} = {0} - make_interval(secs => {1})")
    for table, names in connection.execute(columns, [schema]).fetchall():
        if table not in STILL:
            moved = sql.SQL(", ").join(one.format(sql.Identifier(name), seconds) for name in names)
            connection.execute(sql.SQL("UPDATE {} SET {}").format(sql.Identifier(schema, table), moved))
    _move_plans(connection, sql.Identifier(schema, "schedules"), timedelta(seconds=seconds))


def _move_plans(connection: psycopg.Connection[Any], schedules: sql.Identifier, by: timedelta) -> None:
    """Move the remaining times of schedules, whose rows are locked already, into the past."""
    read = sql.SQL("SELECT name, plan, jitter_s, paused_at IS NOT NULL FROM {}").format(schedules)
    write = sql.SQL("UPDATE {} SET plan = %s, next_at = %s, due_at = %s, revision = revision + 1 WHERE name = %s")
    for name, windows, jitter_s, is_paused in connection.execute(read).fetchall():
        plan = Plan(name, tuple(map(Window.of_json, windows)), jitter_s).moved_back(by)
        due_at = None if plan.next is None or is_paused else plan.made_at(plan.next)  # the jitter depends on the time
        connection.execute(write.format(schedules), [json.dumps(plan.as_json()), plan.next, due_at, name])


def empty_store(sidejob: Any = None) -> None:
    """Delete all jobs, messages, dead entries and workers; the broker keeps its messages, without effect.

    No process may be using the store.
    Raises SettingsError, and deletes nothing, unless the database's name says that it is for tests.
    """
    settings = sidejob_of(sidejob).settings
    url, schema = settings.require_database_url(), settings.schema
    check_is_for_tests(url)
    with psycopg.connect(url, autocommit=True) as connection, connection.transaction():
        rows = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", [schema]).fetchall()
        for name in sorted({name for (name,) in rows} - KEPT, key=lambda name: name != "jobs"):  # most go with them
            connection.execute(sql.SQL("DELETE FROM {}").format(sql.Identifier(schema, name)))
        connection.execute(
            sql.SQL("UPDATE {} SET holder = NULL, expires_at = now()").format(sql.Identifier(schema, "leases"))
        )


def move_clock(by: timedelta | float, *, sidejob: Any = None) -> None:
    """Let this time pass (a timedelta, or seconds) for jobs, messages, timers, schedules, retention and the dead set.

    It moves all times in the store into the past, so production code needs no clock for tests. Workers do not become
    silent: use `kill` and `freeze` for that. Messages in a worker's memory, such as those with an `eta` within
    `sidejob_timer_horizon`, wait as long as before. The `nominal_time` of a schedule's jobs is earlier by the same
    time. A cron expression that is given, changed or resumed afterwards follows today's calendar.
    """
    seconds = in_seconds(by)
    if not is_seconds(seconds):
        raise InvalidValueError(f"move_clock() takes {SECONDS}, or a timedelta, not {shown(by)}.")
    settings = sidejob_of(sidejob).settings
    url = settings.require_database_url()
    check_is_for_tests(url)
    with psycopg.connect(url, autocommit=True) as connection:
        for left in reversed(range(MOVES)):
            try:
                with connection.transaction():
                    return _move_back(connection, settings.schema, float(seconds))
            except psycopg.errors.DeadlockDetected:
                if not left:
                    raise
