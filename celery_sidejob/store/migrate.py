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

from ..model import messages as formats
from ..model.errors import SchemaError, SideJobError, StoreUnavailableError
from . import grants, messages, registry, revisions, shape, workers
from .connection import Connections, LacksRights, OwnExecutor, connection_parameters
from .statement import Statement

SUPPORTED = range(-1, 2)
"""The revisions this version runs on, counted from its own: the one before, its own, the one after."""

FORMAT = str(formats.FORMAT)
"""The version of what rows hold as JSON; recorded in `meta` when the schema is made.

A version that could write a newer one goes on writing the recorded one until a contracting migration, which no older
worker survives, has raised it.
"""

UPGRADE_LOCK = 0x53_4A_55_50 - 0x40_00_00_00
"""The first half of the advisory lock's key ("SJUP", made to fit as `workers.LOCK_CLASS` is)."""

UPGRADE_WAIT_S = 300.0
"""How long an upgrade waits for another one of the same schema."""

LOCK_TIMEOUT_S = 2.0
"""How long a migration waits for a table, because everybody else then waits behind it."""

LOCK_ATTEMPTS, LOCK_PAUSE_S = 10, 1.0
"""How often a migration tries to get its tables, and how long it lets the others pass in between."""

_REMEDY = "run `celery -A <app> sidejob db upgrade`"


class NotUpgraded(SchemaError):
    """The schema is missing or too old: an upgrade mends it."""


class NotOurs(SchemaError):
    """The schema is another app's, another broker's or another program's."""


class Damaged(SchemaError):
    """The schema lacks what its revision has: no upgrade makes it again."""


class TooNew(SchemaError):
    """The schema is newer than this version knows: an upgrade of the package mends it."""


def head() -> str:
    """Return the newest revision this version knows: the one `upgrade` leads to."""
    revision = ScriptDirectory.from_config(_config("")).get_current_head()
    assert revision is not None
    return revision


def upgrade(
    url: str, schema: str = "sidejob", *, owner: Mapping[str, str] | None = None, to: str | None = None,
    setting: str = "sidejob_database_url",
) -> str:  # fmt: skip
    """Create the schema if it is missing, migrate it, record whose it is, and return its revision.

    `owner` is {"app": …, "broker": …}; what is recorded first stays. A schema that is another's, or newer than this
    version, is refused with SchemaError before anything is changed, and so is a step that would take from workers
    which run what they still need. `to` is the revision to go to, by default the newest. The URL comes from `setting`.
    """
    with _explained(schema, setting), _connected(url, schema, setting) as connections, _alone(connections):
        before = connections.transact("upgrade:look", partial(_check_upgradable, schema=schema, owner=owner, to=to))
        with _explained(schema, setting, fresh=before is None):
            _migrate(url, schema, to or "head", fresh=before is None)
        # If we die here, the schema is nobody's until the next upgrade: `check` lets everybody in.
        return connections.transact("upgrade:note", partial(_note_owner, schema=schema, owner=owner))


def upgrade_sql(schema: str, out: TextIO, *, owner: Mapping[str, str] | None = None, since: str | None = None) -> None:
    """Write the SQL that `upgrade` would run, for those who run it by hand: on an empty database, or from `since` on.

    Statements outside of BEGIN and COMMIT must stay outside: give it to psql as a file.
    """
    known = [script.revision for script in ScriptDirectory.from_config(_config(schema)).walk_revisions()]
    if since is not None and since not in known:
        raise SchemaError(f"There is no revision {since!r}: there are {', '.join(sorted(known))}.")
    if since is None:
        out.write(f"CREATE SCHEMA IF NOT EXISTS {_quoted(schema)};\n\n")
    config = _config(schema, fresh=since is None)
    config.output_buffer = out
    with _alembic:
        command.upgrade(config, f"{since}:head" if since is not None else "head", sql=True)
    note = sql.SQL("INSERT INTO {} (key, value) VALUES ({}, {}) ON CONFLICT (key) DO NOTHING;\n")
    meta = sql.Identifier(schema, "meta")
    for key, value in _facts(owner).items():
        out.write(note.format(meta, sql.Literal(key), sql.Literal(value)).as_string(None))
    out.write(note.format(meta, sql.Literal("identity"), sql.SQL("gen_random_uuid()::text")).as_string(None))


def reassign(
    url: str, schema: str = "sidejob", *, owner: Mapping[str, str], setting: str = "sidejob_database_url"
) -> dict[str, str]:
    """Record another owner, for an app or a broker that has moved on purpose; returns the one recorded before.

    Refused with SchemaError while workers are registered that live. What waits is published again, for the broker may
    be another one. The URL comes from `setting`.
    """

    def change(executor: OwnExecutor) -> dict[str, str]:
        if _revision(executor, schema) is None:
            raise NotUpgraded(f"Schema {schema!r} is missing, or it has no tables of ours: {_REMEDY}.")
        before = registry.read_meta(executor)
        running = workers.live(executor)
        if running and any(before.get(key, value) != value for key, value in owner.items()):
            raise SchemaError(
                f"Schema {schema!r} has workers that run ({_some(running)}): stop them before it is given to another "
                "app or broker. One that has died is forgotten within sidejob_lease, while another sweeps."
            )
        for key, value in owner.items():
            registry.change_meta(executor, key, value)
        return {key: before[key] for key in owner if key in before}

    with _explained(schema, setting), _connected(url, schema, setting) as connections, _alone(connections):
        before = connections.transact("reassign", change)
        after: int | None = 0
        while after is not None:  # if we die here, the sweeper misses them one by one; run again, we begin anew
            after = connections.transact("look-now", partial(messages.look_now, after=after, limit=1000))
        return before


def current(store: Connections | str, schema: str = "sidejob", *, setting: str = "sidejob_database_url") -> str | None:
    """Return the schema's revision, None if it was never migrated; `store` and `setting` as for `check`."""
    if isinstance(store, str):
        with _connected(store, schema, setting) as connections:
            return current(connections, schema)
    with _explained(schema, store.setting):
        return store.transact("current", partial(_revision, schema=schema))


def check(
    store: Connections | str, schema: str = "sidejob", *, owner: Mapping[str, str] | None = None,
    oldest: str | None = None, setting: str = "sidejob_database_url",
) -> None:  # fmt: skip
    """Raise SchemaError if the schema is missing, too old, too new, or another app's or broker's.

    `store` is its URL, which comes from `setting`, or connections to it. `oldest` is the revision that what is
    configured needs, if that is newer than what this version needs. The message says what is wrong and what to do.
    """
    if isinstance(store, str):
        with _connected(store, schema, setting) as connections:
            check(connections, schema, owner=owner, oldest=oldest)
        return
    with _explained(schema, store.setting):
        store.transact(
            "check", partial(_check_usable, schema=schema, owner=owner, oldest=oldest, setting=store.setting)
        )


def _check_usable(
    executor: OwnExecutor, *, schema: str, owner: Mapping[str, str] | None, oldest: str | None, setting: str
) -> None:
    revision = _revision(executor, schema)
    if revision is None:
        raise NotUpgraded(f"Schema {schema!r} is missing, or it has no tables of ours: {_REMEDY}.")
    if _distance(revision) < SUPPORTED.start:
        raise NotUpgraded(
            f"Schema {schema!r} is at revision {revision}, older than this version of celery_sidejob runs on "
            f"({int(head()) + SUPPORTED.start:04} or newer): {_REMEDY}."
        )
    if oldest is not None and revision < oldest:
        raise NotUpgraded(
            f"Schema {schema!r} is at revision {revision}, and sidejob_failover_urls needs {oldest}: {_REMEDY}."
        )
    _check_not_newer(revision, schema)
    _check_whole(executor, schema, revision)
    _check_owner(executor, schema, owner)
    lacking = grants.missing(executor, schema)
    if lacking:
        raise LacksRights(
            f"The user in {setting} lacks rights in schema {schema!r}: {', '.join(lacking)}. As the "
            "schema's owner run what `celery -A <app> sidejob db grants <user>` prints."
        )
    if executor.run(_READS_ONLY)[0].found:
        raise StoreUnavailableError(
            f"Schema {schema!r} fits, but the store takes no writes: it is a standby, or default_transaction_read_only "
            "is on for its server, database or user. Workers can start when that is over."
        )


def _check_upgradable(
    executor: OwnExecutor, *, schema: str, owner: Mapping[str, str] | None, to: str | None
) -> str | None:
    revision = _revision(executor, schema)
    if revision is not None:
        _check_not_newer(revision, schema)
        _check_whole(executor, schema, revision)
        _check_owner(executor, schema, owner)
        _check_no_older_workers(executor, schema, revision, to or "head")
    return revision


def _check_no_older_workers(executor: OwnExecutor, schema: str, revision: str, to: str) -> None:
    """A migration that takes something away names, as `oldest_worker`, the revision whose code does without it."""
    for script in ScriptDirectory.from_config(_config(schema)).iterate_revisions(to, revision):
        oldest = getattr(script.module, "oldest_worker", None)
        older = workers.older_than(executor, oldest) if oldest is not None else []
        if older:
            raise SchemaError(
                f"Revision {script.revision} takes away what workers of a version before revision {oldest} need, and "
                f"of those some run: {_some(older)}. Deploy a newer version to them and {_REMEDY} again; nothing was "
                "changed."
            )


def _some(idents: list[str]) -> str:
    """Name workers by their host and process id, a few of many."""
    shown = [" pid ".join(ident.split(":")[:2]) for ident in idents[:3]]
    return ", ".join(shown) + (f" and {len(idents) - 3} more" if len(idents) > 3 else "")


def _check_not_newer(revision: str, schema: str) -> None:
    if _distance(revision) >= SUPPORTED.stop:
        raise TooNew(
            f"Schema {schema!r} is at revision {revision}, newer than this version of celery_sidejob knows "
            f"({head()}): upgrade the package celery-sidejob here."
        )


def _check_whole(executor: OwnExecutor, schema: str, revision: str) -> None:
    lacking = shape.missing(executor, schema, revision) if _distance(revision) <= 0 else []
    if lacking:
        raise Damaged(
            f"Schema {schema!r} is at revision {revision} and lacks {', '.join(lacking)}: it was restored in part, or "
            "something was dropped. An upgrade does not make that again: restore the whole schema from a backup."
        )


def _check_owner(executor: OwnExecutor, schema: str, owner: Mapping[str, str] | None) -> None:
    recorded = registry.read_meta(executor)
    if int(recorded.get("format", FORMAT)) > int(FORMAT):
        raise TooNew(
            f"Schema {schema!r} holds rows of format {recorded['format']}, this version of celery_sidejob reads "
            f"{FORMAT}: upgrade the package celery-sidejob here."
        )
    wrong = [key for key, value in (owner or {}).items() if recorded.get(key, value) != value]
    if owner and wrong:
        theirs = " and ".join(f"the {key} {recorded[key]!r}" for key in wrong)
        ours = " and ".join(f"the {key} {owner[key]!r}" for key in wrong)
        correct = " and ".join(_WHERE.get(key, key) for key in wrong)
        raise NotOurs(
            f"Schema {schema!r} belongs to {theirs}, but here is {ours}. One schema serves one app and one broker: set "
            f"sidejob_schema to another name and {_REMEDY}, or correct {correct}. If it has moved on purpose, stop all "
            "workers and run `celery -A <app> sidejob db reassign`."
        )


_WHERE = {
    "app": "the app's name, as in Celery('shop')",
    "broker": "the broker (the family, virtual host or database number of broker_url, and its global_keyprefix)",
}


def _note_owner(executor: OwnExecutor, *, schema: str, owner: Mapping[str, str] | None) -> str:
    for key, value in _facts(owner).items():
        registry.note_meta(executor, key, value)
    registry.give_identity(executor)
    revision = _revision(executor, schema)
    assert revision is not None
    return revision


def _facts(owner: Mapping[str, str] | None) -> dict[str, str]:
    return {**(owner or {}), "format": FORMAT}


_READS_ONLY = Statement("SELECT current_setting('transaction_read_only')::boolean AS found")  # on a standby too

_EXISTS = Statement("SELECT to_regclass(%(table)s) IS NOT NULL AS found")


def _revision(executor: OwnExecutor, schema: str) -> str | None:
    """Read the schema's revision; SchemaError if the migrations recorded there are another program's."""

    def exists(table: str) -> bool:
        return bool(executor.run(_EXISTS, table=f"{_quoted(schema)}.{table}")[0].found)

    # The table comes before the first migration, and `meta` in it: asked for in this order nothing looks half-made.
    revision = revisions.read(executor) if exists("alembic_version") else None
    if revision is None:
        return None
    if not revision.isdecimal() or not exists("meta"):
        raise NotOurs(
            f"Schema {schema!r} holds another program's migrations (revision {revision!r}): set sidejob_schema to a "
            f"name that nothing else uses and {_REMEDY}."
        )
    return revision


def _distance(revision: str) -> int:
    """Tell by how many revisions a schema is newer than this version: they are numbers without gaps."""
    return int(revision) - int(head())


def _connected(url: str, schema: str, setting: str) -> closing[Connections]:
    """Connections of our own, past a proxy or through it: nothing is prepared on them."""
    return closing(Connections(url, schema, prepare=False, setting=setting))


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


def _migrate(url: str, schema: str, to: str, *, fresh: bool) -> None:
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
                config = _config(schema, fresh=fresh)
                config.attributes["connection"] = connection
                command.upgrade(config, to)
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
def _explained(schema: str, setting: str, *, fresh: bool = False) -> Iterator[None]:
    """Say what an error of Postgres means for whoever upgrades or checks the schema, or makes it: `fresh`."""
    try:
        yield
    except (DBAPIError, psycopg.Error) as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        explanation = _explain(schema, setting, cause, fresh=fresh)
        if explanation is None:
            raise
        raise explanation from cause


def _explain(schema: str, setting: str, cause: BaseException | None, *, fresh: bool) -> SideJobError | None:
    reason = str(cause).strip().partition("\n")[0]
    match cause:
        case pg.LockNotAvailable() | pg.DeadlockDetected():
            return SchemaError(
                f"Schema {schema!r} could not be migrated, {LOCK_ATTEMPTS} times ({reason}): a long transaction holds "
                f"a table. The schema is as it was before that migration; end the transaction and {_REMEDY}."
            )
        case pg.InsufficientPrivilege() if fresh:
            return LacksRights(
                f"Schema {schema!r} is not there yet, and the user in {setting} may not make it ({reason}): {_REMEDY} "
                "as a role that may create schemas in this database, or give psql what `… db upgrade --sql` prints as "
                "one."
            )
        case pg.InsufficientPrivilege():
            return LacksRights(
                f"The user in {setting} lacks a right that schema {schema!r} needs ({reason}): as its owner "
                "run what `celery -A <app> sidejob db grants <user>` prints, or for an upgrade `… db upgrade --sql`."
            )
        case pg.DuplicateTable() | pg.DuplicateObject():
            return NotOurs(
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


def _config(schema: str, *, fresh: bool = False) -> Config:
    """`fresh`: the schema is only being made, so that nobody can be in the way of its indexes."""
    config = Config()
    config.set_main_option("script_location", str(_scripts()).replace("%", "%%"))
    config.attributes.update(schema=schema, fresh=fresh)
    return config


def _scripts() -> Path:
    """Find the migrations: a wheel carries them in the package, a checkout beside it."""
    package = Path(__file__).parent.parent
    inside = package / "alembic"
    return inside if inside.is_dir() else package.parent / "alembic"
