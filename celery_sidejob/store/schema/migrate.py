"""The schema's migrations: upgrading it, and giving it to another owner.

One upgrade runs at a time per schema. Each migration is its own transaction, because a migration may build its indexes
concurrently. An upgrade that dies leaves the schema at one of the revisions, and the next continues from there.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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

from ...model.errors import SchemaError
from .. import advisory, meta, workers
from ..connection.connections import Connections
from ..connection.opening import Opener
from ..connection.own_executor import NEEDED
from ..outbox import publishing
from ..statement import Transaction
from .schema_check import BESIDE, FORMAT, REMEDY, check_ours, connected, explained, known_revision, quoted, revision_of

UPGRADE_LOCK = 0x53_4A_55_50 - 0x40_00_00_00
"""The first half of the advisory lock's key ("SJUP", made to fit as `workers.LOCK_CLASS` is)."""

UPGRADE_WAIT_S = 300.0
"""Seconds that an upgrade waits for another upgrade of the same schema."""

LOCK_TIMEOUT_S = 2.0
"""Seconds that a migration waits for a table's lock: meanwhile all other statements wait behind it."""

LOCK_ATTEMPTS, LOCK_PAUSE_S = 10, 1.0
"""How often a migration tries to lock its tables, and the seconds for which it lets others pass in between."""


def upgrade(
    url: str,
    schema: str = "sidejob",
    *,
    owner: Mapping[str, str] | None = None,
    to: str | None = None,
    setting: str = "sidejob_database_url",
) -> str:
    """Create the schema if it is missing, migrate it, record its owner, and return its revision.

    `owner` is {"app": …, "broker": …}; an owner recorded before stays. SchemaError is raised, before anything is
    changed, if the schema belongs to another owner or is newer than this version, or if a step would remove something
    that running workers still need. `to` is the target revision, by default the newest. The URL comes from `setting`.
    """
    with explained(schema, setting), connected(url, schema, setting) as connections, _alone(connections):
        before = connections.transact("upgrade:look", partial(_check_upgradable, schema=schema, owner=owner, to=to))
        with explained(schema, setting, fresh=before is None):
            _migrate(url, schema, to or "head")
        # If we die here, the schema has no owner until the next upgrade, and `check` accepts every app and broker.
        return connections.transact("upgrade:note", partial(_note_owner, schema=schema, owner=owner))


def upgrade_sql(schema: str, out: TextIO, *, owner: Mapping[str, str] | None = None, since: str | None = None) -> None:
    """Write the SQL that `upgrade` would run, to be run by hand: on an empty database, or from revision `since` on.

    Statements outside of BEGIN and COMMIT must stay outside: give it to psql as a file.
    """
    known = [script.revision for script in ScriptDirectory.from_config(_config(schema)).walk_revisions()]
    if since is not None and since not in known:
        raise SchemaError(f"There is no revision {since!r}: there are {', '.join(sorted(known))}.")
    out.write(f"SET search_path = {NEEDED['search_path']};\n\n")  # for functions that the CHECKs call
    if since is None:
        out.write(f"CREATE SCHEMA IF NOT EXISTS {quoted(schema)};\n\n")
    config = _config(schema)
    config.output_buffer = out
    with _alembic:
        command.upgrade(config, f"{since}:head" if since is not None else "head", sql=True)
    note = sql.SQL("INSERT INTO {} (key, value) VALUES ({}, {}) ON CONFLICT (key) DO NOTHING;\n")
    table = sql.Identifier(schema, "meta")
    for key, value in _facts(owner).items():
        out.write(note.format(table, sql.Literal(key), sql.Literal(value)).as_string(None))
    out.write(note.format(table, sql.Literal("identity"), sql.SQL("gen_random_uuid()::text")).as_string(None))


def reassign(
    url: str, schema: str = "sidejob", *, owner: Mapping[str, str], setting: str = "sidejob_database_url"
) -> dict[str, str]:
    """Record another owner, for an app or a broker that has moved on purpose; returns the previous one.

    Raises SchemaError while live workers are registered; after `admit`, only while workers of the other broker are.
    Waiting messages are published again, because some may be in that broker. The URL comes from `setting`.
    """

    def change(executor: Transaction) -> dict[str, str]:
        known_revision(executor, schema)
        before = meta.read(executor)
        moves = {key for key, value in owner.items() if before.get(key, value) != value}
        if BESIDE in before and moves <= {"broker"} and owner["broker"] in (before[BESIDE], before["broker"]):
            running = workers.live(executor, not_of=owner["broker"])
        else:
            running = workers.live(executor) if moves else []
        if running:
            raise SchemaError(
                f"Schema {schema!r} has workers that run ({_some(running)}): stop them before it is given to another "
                "app or broker. One that has died is forgotten within sidejob_lease, while another sweeps."
            )
        for key, value in owner.items():
            meta.change(executor, key, value)
        meta.forget(executor, BESIDE)
        return {key: before[key] for key in owner if key in before}

    with explained(schema, setting), connected(url, schema, setting) as connections, _alone(connections):
        before = connections.transact("reassign", change)
        # If we die here, the sweeper finds the missing messages one by one; the next call of this begins anew.
        for queue in publishing.queues_in_broker(connections):
            republish = partial(publishing.republish_in, queue=queue)
            while connections.transact("check-now", republish) == publishing.CHECK_PAGE:
                pass
        return before


def admit(url: str, schema: str = "sidejob", *, owner: Mapping[str, str], setting: str = "sidejob_database_url") -> str:
    """Let workers of a second broker run beside those of the owner's broker, until `reassign`; returns the latter.

    Raises SchemaError for another app, and for a third broker. The URL comes from `setting`.
    """

    def change(executor: Transaction) -> str:
        revision = known_revision(executor, schema)
        before = meta.read(executor)
        check_ours(executor, schema, revision, owner={"app": owner["app"]})
        ours, theirs = owner["broker"], before.get("broker", owner["broker"])
        if ours != theirs and before.get(BESIDE, ours) != ours:
            raise SchemaError(
                f"Schema {schema!r} has workers of two brokers already, {theirs!r} and {before[BESIDE]!r}: end that by "
                "`celery -A <app> sidejob db reassign` with the one of them that stays."
            )
        if ours != theirs:
            meta.change(executor, BESIDE, ours)
        return theirs

    with explained(schema, setting), connected(url, schema, setting) as connections, _alone(connections):
        return connections.transact("admit", change)


def _check_upgradable(
    executor: Transaction, *, schema: str, owner: Mapping[str, str] | None, to: str | None
) -> str | None:
    revision = revision_of(executor, schema)
    if revision is not None:
        check_ours(executor, schema, revision, owner=owner)
        _check_no_older_workers(executor, schema, revision, to or "head")
    return revision


def _check_no_older_workers(executor: Transaction, schema: str, revision: str, to: str) -> None:
    """Refuse a migration while older workers run: `oldest_worker` names the first revision that can run after it."""
    for script in ScriptDirectory.from_config(_config(schema)).iterate_revisions(to, revision):
        oldest = getattr(script.module, "oldest_worker", None)
        older = workers.live(executor, before=oldest) if oldest is not None else []
        if older:
            raise SchemaError(
                f"Revision {script.revision} takes away what workers of a version before revision {oldest} need, and "
                f"of those some run: {_some(older)}. Deploy a newer version to them and {REMEDY} again; nothing was "
                "changed."
            )


def _some(idents: list[str]) -> str:
    """Name some workers by their host and process id."""
    shown = [" pid ".join(ident.split(":")[:2]) for ident in idents[:3]]
    return ", ".join(shown) + (f" and {len(idents) - 3} more" if len(idents) > 3 else "")


def _note_owner(executor: Transaction, *, schema: str, owner: Mapping[str, str] | None) -> str:
    for key, value in {**_facts(owner), "identity": str(uuid.uuid4())}.items():
        meta.note(executor, key, value)
    return known_revision(executor, schema)


def _facts(owner: Mapping[str, str] | None) -> dict[str, str]:
    return {**(owner or {}), "format": FORMAT}


@contextmanager
def _alone(connections: Connections) -> Iterator[None]:
    """Keep other upgrades of this schema out while the block runs.

    The lock belongs to a transaction on a separate connection. It outlasts the migrations' transactions and needs no
    session, so a pooling proxy does no harm. CREATE INDEX CONCURRENTLY waits for the end of every transaction that has
    a snapshot. No transaction here has one for long: waiting upgrades ask again and again, each time in a new
    transaction, and the simple protocol leaves no portal open.
    """
    gate = connections.connect()
    try:
        cursor = psycopg.ClientCursor(gate.connection)
        deadline = time.monotonic() + UPGRADE_WAIT_S
        while not _take(cursor, connections.schema):
            if time.monotonic() >= deadline:
                holder = advisory.holder(connections, UPGRADE_LOCK, [connections.schema])
                raise SchemaError(
                    f"Another upgrade of schema {connections.schema!r} has been running for {UPGRADE_WAIT_S:g} s, by "
                    f"{holder}; nothing was changed by this one. When that one has ended, {REMEDY} again."
                )
            time.sleep(0.1)
        yield
    finally:
        gate.close()  # this ends the transaction and the lock, and so does the death of this process


def _take(cursor: psycopg.ClientCursor[Any], schema: str) -> bool:
    cursor.execute("BEGIN")
    cursor.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
    cursor.execute("SELECT pg_catalog.pg_try_advisory_xact_lock(%s, pg_catalog.hashtext(%s))", (UPGRADE_LOCK, schema))
    ((taken,),) = cursor.fetchall()
    if not taken:
        cursor.execute("ROLLBACK")
    return bool(taken)


_alembic = threading.Lock()
"""Alembic's `context` and `op` are globals of the process: one migration run at a time."""


def _migrate(url: str, schema: str, to: str) -> None:
    opener = Opener(url, schema, prepare=False)

    def connect() -> psycopg.Connection[Any]:
        connection = opener.connect().connection
        connection.autocommit = False
        return connection

    engine = create_engine("postgresql+psycopg://", creator=connect, poolclass=NullPool)
    event.listen(engine, "begin", _begin)
    with engine.begin() as connection:
        # IF NOT EXISTS alone would need the right to create schemas even if a DBA has made this schema.
        if not connection.exec_driver_sql("SELECT pg_catalog.to_regnamespace(%s)", (quoted(schema),)).scalar():
            connection.exec_driver_sql(f"CREATE SCHEMA {quoted(schema)}")
    for attempt in range(1, LOCK_ATTEMPTS + 1):
        try:
            with engine.connect() as connection, _alembic:
                config = _config(schema)
                config.attributes["connection"] = connection
                command.upgrade(config, to)
            return
        except DBAPIError as error:
            if attempt == LOCK_ATTEMPTS or not isinstance(error.orig, pg.LockNotAvailable | pg.DeadlockDetected):
                raise
        time.sleep(LOCK_PAUSE_S)


def _begin(connection: Connection) -> None:
    """Set up each transaction; in a block that autocommits this has no effect, as intended.

    Statements of SQLAlchemy and Alembic do not qualify functions and operators, and this role is the owner.
    """
    connection.exec_driver_sql(f"SET LOCAL search_path = {NEEDED['search_path']}")
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = {round(LOCK_TIMEOUT_S * 1000)}")
    connection.exec_driver_sql("SET LOCAL statement_timeout = 0")  # a role's own limit is not meant for migrations


def _config(schema: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(_scripts()).replace("%", "%%"))
    config.attributes["schema"] = schema
    return config


def _scripts() -> Path:
    """Find the migrations: in a wheel they are in the package, in a checkout beside it."""
    package = Path(__file__).parents[2]
    inside = package / "alembic"
    return inside if inside.is_dir() else package.parent / "alembic"
