"""The schema's migrations: bringing it up to date, and telling whether it is ours and fits this version.

One upgrade at a time per schema; each migration is a transaction of its own, so that one may build its indexes
concurrently. An upgrade that dies leaves a schema at one of the revisions, and the next goes on from there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import psycopg
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from psycopg import errors as pg
from psycopg import sql
from sqlalchemy import create_engine, event
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from ..model.errors import SchemaError, SideJobError, StoreUnavailableError
from . import registry
from .connection import Connections, OwnExecutor, connection_parameters
from .statement import Statement

SUPPORTED = range(0, 1)
"""The revisions this version runs on, counted from its own: `range(-1, 2)` as soon as there is another one."""

FORMAT = "1"
"""The version of what rows hold as JSON; recorded in `meta` when the schema is made."""

UPGRADE_LOCK = 0x53_4A_55_50 - 0x40_00_00_00
"""The first half of the advisory lock's key ("SJUP", made to fit as `workers.LOCK_CLASS` is)."""

UPGRADE_WAIT_S = 300.0
"""How long an upgrade waits for another one of the same schema."""

LOCK_TIMEOUT_S = 2.0
"""How long a migration waits for a table, because everybody else then waits behind it."""

LOCK_ATTEMPTS, LOCK_PAUSE_S = 10, 1.0
"""How often a migration tries to get its tables, and how long it lets the others pass in between."""

_REMEDY = "run `celery -A <app> sidejob db upgrade`"


def head() -> str:
    """Return the newest revision this version knows: the one `upgrade` leads to."""
    revision = ScriptDirectory.from_config(_config("")).get_current_head()
    assert revision is not None
    return revision


def upgrade(url: str, schema: str = "sidejob", *, owner: Mapping[str, str] | None = None) -> str:
    """Create the schema if it is missing, migrate it, record whose it is, and return its revision.

    `owner` is {"app": …, "broker": …}; what is recorded first stays. A schema that is another's, or newer than this
    version, is refused with SchemaError before anything is changed.
    """
    with closing(Connections(url, schema, prepare=False)) as connections, _explained(schema), _alone(connections):
        connections.transact("upgrade:look", partial(_check_upgradable, schema=schema, owner=owner))
        _migrate(url, schema)
        # If we die here, the schema is nobody's until the next upgrade: `check` lets everybody in.
        return connections.transact("upgrade:note", partial(_note_owner, schema=schema, owner=owner))


def upgrade_sql(schema: str, out: TextIO, *, owner: Mapping[str, str] | None = None) -> None:
    """Write the SQL that `upgrade` would run on an empty database, for those who run it by hand."""
    out.write(f"CREATE SCHEMA IF NOT EXISTS {_quoted(schema)};\n\n")
    config = _config(schema)
    config.output_buffer = out
    with _alembic:
        command.upgrade(config, "head", sql=True)
    note = sql.SQL("INSERT INTO {} (key, value) VALUES ({}, {}) ON CONFLICT (key) DO NOTHING;\n")
    for key, value in _facts(owner).items():
        out.write(note.format(sql.Identifier(schema, "meta"), sql.Literal(key), sql.Literal(value)).as_string(None))


def current(url: str, schema: str = "sidejob") -> str | None:
    """Return the schema's revision, None if it was never migrated."""
    with closing(Connections(url, schema, prepare=False)) as connections, _explained(schema):
        return connections.transact("current", partial(_revision, schema=schema))


def check(store: Connections | str, schema: str = "sidejob", *, owner: Mapping[str, str] | None = None) -> None:
    """Raise SchemaError if the schema is missing, too old, too new, or another app's or broker's.

    `store` is its URL, or connections to it. The message says what is wrong and what to do.
    """
    if isinstance(store, str):
        with closing(Connections(store, schema, prepare=False)) as connections:
            check(connections, schema, owner=owner)
        return
    with _explained(schema):
        store.transact("check", partial(_check_usable, schema=schema, owner=owner))


def _check_usable(executor: OwnExecutor, *, schema: str, owner: Mapping[str, str] | None) -> None:
    revision = _revision(executor, schema)
    if revision is None:
        raise SchemaError(f"Schema {schema!r} is missing, or it has no tables of ours: {_REMEDY}.")
    if _distance(revision) < SUPPORTED.start:
        raise SchemaError(
            f"Schema {schema!r} is at revision {revision}, older than this version of celery_sidejob needs "
            f"({head()}): {_REMEDY}."
        )
    _check_not_newer(revision, schema)
    _check_owner(executor, schema, owner)


def _check_upgradable(executor: OwnExecutor, *, schema: str, owner: Mapping[str, str] | None) -> None:
    revision = _revision(executor, schema)
    if revision is not None:
        _check_not_newer(revision, schema)
        _check_owner(executor, schema, owner)


def _check_not_newer(revision: str, schema: str) -> None:
    if _distance(revision) >= SUPPORTED.stop:
        raise SchemaError(
            f"Schema {schema!r} is at revision {revision}, newer than this version of celery_sidejob knows "
            f"({head()}): upgrade the package celery-sidejob here."
        )


def _check_owner(executor: OwnExecutor, schema: str, owner: Mapping[str, str] | None) -> None:
    recorded = registry.read_meta(executor)
    if recorded.get("format", FORMAT) != FORMAT:
        raise SchemaError(
            f"Schema {schema!r} holds rows of format {recorded['format']}, this version of celery_sidejob reads "
            f"{FORMAT}: upgrade the package celery-sidejob here."
        )
    wrong = [key for key, value in (owner or {}).items() if recorded.get(key, value) != value]
    if owner and wrong:
        theirs = " and ".join(f"the {key} {recorded[key]!r}" for key in wrong)
        ours = " and ".join(f"the {key} {owner[key]!r}" for key in wrong)
        correct = " and ".join(_WHERE.get(key, key) for key in wrong)
        raise SchemaError(
            f"Schema {schema!r} belongs to {theirs}, but here is {ours}. One schema serves one app and one broker: set "
            f"sidejob_schema to another name and {_REMEDY}, or correct {correct}."
        )


_WHERE = {
    "app": "the app's name, as in Celery('shop')",
    "broker": "the broker (the family, virtual host or database number of broker_url, and its global_keyprefix)",
}


def _note_owner(executor: OwnExecutor, *, schema: str, owner: Mapping[str, str] | None) -> str:
    for key, value in _facts(owner).items():
        registry.note_meta(executor, key, value)
    revision = _revision(executor, schema)
    assert revision is not None
    return revision


def _facts(owner: Mapping[str, str] | None) -> dict[str, str]:
    return {**(owner or {}), "format": FORMAT}


_EXISTS = Statement("SELECT to_regclass(%(table)s) IS NOT NULL AS found")
_REVISION = Statement("SELECT version_num AS revision FROM {alembic_version}")


def _revision(executor: OwnExecutor, schema: str) -> str | None:
    """Read the schema's revision; SchemaError if the migrations recorded there are another program's."""

    def exists(table: str) -> bool:
        return bool(executor.run(_EXISTS, table=f"{_quoted(schema)}.{table}")[0].found)

    # The table comes before the first migration, and `meta` in it: asked for in this order nothing looks half-made.
    found = executor.run(_REVISION) if exists("alembic_version") else []
    if not found:
        return None
    revision: str = found[0].revision
    if not revision.isdecimal() or not exists("meta"):
        raise SchemaError(
            f"Schema {schema!r} holds another program's migrations (revision {revision!r}): set sidejob_schema to a "
            f"name that nothing else uses and {_REMEDY}."
        )
    return revision


def _distance(revision: str) -> int:
    """Tell by how many revisions a schema is newer than this version: they are numbers without gaps."""
    return int(revision) - int(head())


@contextmanager
def _alone(connections: Connections) -> Iterator[None]:
    """Keep other upgrades of this schema out while the block runs.

    The lock is a transaction's, on a connection of its own: it outlasts the migrations' transactions and needs no
    session, so a pooling proxy does no harm. CREATE INDEX CONCURRENTLY waits for the end of every transaction that
    holds a snapshot, so here nobody holds one: those who wait ask again and again, each time in a new transaction,
    and the simple protocol leaves no portal open.
    """
    gate = connections.connect()
    try:
        cursor = psycopg.ClientCursor(gate.connection)
        deadline = time.monotonic() + UPGRADE_WAIT_S
        while not _take(cursor, connections.schema):
            if time.monotonic() >= deadline:
                raise SchemaError(
                    f"Another upgrade of schema {connections.schema!r} has been running for {UPGRADE_WAIT_S:g} s; "
                    f"nothing was changed by this one. When that one has ended, {_REMEDY} again."
                )
            time.sleep(0.1)
        yield
    finally:
        gate.close()  # and with it the transaction and the lock; the same happens if this process dies


def _take(cursor: psycopg.ClientCursor[Any], schema: str) -> bool:
    cursor.execute("BEGIN")
    cursor.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
    cursor.execute("SELECT pg_try_advisory_xact_lock(%s, hashtext(%s))", (UPGRADE_LOCK, schema))
    ((taken,),) = cursor.fetchall()
    if not taken:
        cursor.execute("ROLLBACK")
    return bool(taken)


_alembic = threading.Lock()
"""Alembic's `context` and `op` are globals of the process: one migration run at a time."""


def _migrate(url: str, schema: str) -> None:
    connect = partial(psycopg.connect, prepare_threshold=None, **connection_parameters(url))
    engine = create_engine("postgresql+psycopg://", creator=connect, poolclass=NullPool)
    event.listen(engine, "begin", _limit_waits)
    with engine.begin() as connection:
        # IF NOT EXISTS alone would want the right to create schemas where a DBA has made this one.
        if not connection.exec_driver_sql("SELECT to_regnamespace(%s)", (_quoted(schema),)).scalar():
            connection.exec_driver_sql(f"CREATE SCHEMA {_quoted(schema)}")
    for attempt in range(1, LOCK_ATTEMPTS + 1):
        try:
            with engine.connect() as connection, _alembic:
                config = _config(schema)
                config.attributes["connection"] = connection
                command.upgrade(config, "head")
            return
        except DBAPIError as error:
            if attempt == LOCK_ATTEMPTS or not isinstance(error.orig, pg.LockNotAvailable | pg.DeadlockDetected):
                raise
        time.sleep(LOCK_PAUSE_S)


def _limit_waits(connection: Connection) -> None:
    """At the begin of each transaction; in a block that autocommits it has no effect, as it should be there."""
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = {round(LOCK_TIMEOUT_S * 1000)}")
    connection.exec_driver_sql("SET LOCAL statement_timeout = 0")  # a role's own limit is not meant for migrations


@contextmanager
def _explained(schema: str) -> Iterator[None]:
    """Say what an error of Postgres means for whoever upgrades or checks the schema."""
    try:
        yield
    except (DBAPIError, psycopg.Error) as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        explanation = _explain(schema, cause)
        if explanation is None:
            raise
        raise explanation from cause


def _explain(schema: str, cause: BaseException | None) -> SideJobError | None:
    reason = str(cause).strip().partition("\n")[0]
    match cause:
        case pg.LockNotAvailable() | pg.DeadlockDetected():
            return SchemaError(
                f"Schema {schema!r} could not be migrated, {LOCK_ATTEMPTS} times ({reason}): a long transaction holds "
                f"a table. The schema is as it was before that migration; end the transaction and {_REMEDY}."
            )
        case pg.InsufficientPrivilege():
            return SchemaError(
                f"The user in sidejob_database_url lacks a right that schema {schema!r} needs ({reason}): grant it, or "
                "run the output of `celery -A <app> sidejob db upgrade --sql` as its owner."
            )
        case pg.DuplicateTable() | pg.DuplicateObject():
            return SchemaError(
                f"Schema {schema!r} holds tables of something else ({reason}): set sidejob_schema to a name that "
                f"nothing else uses and {_REMEDY}."
            )
        case psycopg.OperationalError():
            return StoreUnavailableError(
                f"The store failed while schema {schema!r} was looked at or migrated: {reason}"
            )
    return None


def _quoted(schema: str) -> str:
    return sql.Identifier(schema).as_string(None)


def _config(schema: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(_scripts()).replace("%", "%%"))
    config.attributes["schema"] = schema
    return config


def _scripts() -> Path:
    """Find the migrations: a wheel carries them in the package, a checkout beside it."""
    package = Path(__file__).parent.parent
    inside = package / "alembic"
    return inside if inside.is_dir() else package.parent / "alembic"
