"""Checks that the schema exists, is ours, is complete, and is at a revision that this code runs on.

Imports neither Alembic nor SQLAlchemy: only an upgrade (`migrate`) needs them, and they are a third of a process's
imports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial

import psycopg
from psycopg import errors as pg
from psycopg import sql

from ...model import messages
from ...model.errors import SchemaError, SettingsError, SideJobError, StoreUnavailableError
from .. import meta
from ..connection.connections import Connections
from ..errors import LacksRights
from ..meta import Database, database
from ..statement import Statement, Transaction
from . import tables

SUPPORTED = range(-1, 2)
"""The revisions on which this version runs, relative to its own: the previous, its own, the next."""

FORMAT = str(messages.FORMAT)
"""The version of the JSON in rows; recorded in `meta` when the schema is made.

A version that could write a newer format keeps writing the recorded format, until a contracting migration, which no
older worker survives, has raised it.
"""

BESIDE = "broker_beside"
"""The key in `meta` of a second broker, whose workers may run beside the workers of the owner's broker."""

REMEDY = "run `celery -A <app> sidejob db upgrade`"


class NotUpgraded(SchemaError):
    """The schema is missing or too old: an upgrade fixes it."""


class NotOurs(SchemaError):
    """The schema belongs to another app, another broker or another program."""


class Damaged(SchemaError):
    """The schema lacks a part of its revision, which no upgrade makes again."""


class TooNew(SchemaError):
    """The schema is newer than this version knows: an upgrade of the package fixes it."""


def current(store: Connections | str, schema: str = "sidejob", *, setting: str = "sidejob_database_url") -> str | None:
    """Return the schema's revision, None if it was never migrated; `store` and `setting` as for `check`."""
    with connected(store, schema, setting) as connections, explained(schema, connections.setting):
        return connections.transact("current", partial(revision_of, schema=schema))


def check(
    store: Connections | str,
    schema: str = "sidejob",
    *,
    owner: Mapping[str, str] | None = None,
    setting: str = "sidejob_database_url",
) -> None:
    """Raise SchemaError if the schema is missing, too old, too new, or belongs to another app or broker.

    `store` is its URL, which comes from `setting`, or connections to it. The message says what is wrong and what to do.
    """
    with connected(store, schema, setting) as connections, explained(schema, connections.setting):
        connections.transact("check", partial(_check_usable, schema=schema, owner=owner, setting=connections.setting))


def _check_usable(executor: Transaction, *, schema: str, owner: Mapping[str, str] | None, setting: str) -> None:
    revision = known_revision(executor, schema)
    if _distance(revision) < SUPPORTED.start:
        raise NotUpgraded(
            f"Schema {schema!r} is at revision {revision}, older than this version of celery_sidejob runs on "
            f"({int(meta.REVISION) + SUPPORTED.start:04} or newer): {REMEDY}."
        )
    check_ours(executor, schema, revision, owner=owner)
    lacking = tables.lacking_rights(executor, schema)
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


def check_ours(executor: Transaction, schema: str, revision: str, *, owner: Mapping[str, str] | None) -> None:
    """Raise SchemaError if the schema is too new for this version, incomplete, or belongs to another owner."""
    _check_not_newer(revision, schema)
    _check_whole(executor, schema, revision)
    _check_owner(executor, schema, owner)


def _check_not_newer(revision: str, schema: str) -> None:
    if _distance(revision) >= SUPPORTED.stop:
        raise TooNew(
            f"Schema {schema!r} is at revision {revision}, newer than this version of celery_sidejob knows "
            f"({meta.REVISION}): upgrade the package celery-sidejob here."
        )


def _check_whole(executor: Transaction, schema: str, revision: str) -> None:
    lacking = tables.missing(executor, schema) if revision == meta.REVISION else []
    if lacking:
        raise Damaged(
            f"Schema {schema!r} is at revision {revision} and lacks {', '.join(lacking)}: it was restored in part, or "
            "something was dropped. An upgrade does not make that again: restore the whole schema from a backup."
        )


def _check_owner(executor: Transaction, schema: str, owner: Mapping[str, str] | None) -> None:
    recorded = meta.read(executor)
    if int(recorded.get("format", FORMAT)) > int(FORMAT):
        raise TooNew(
            f"Schema {schema!r} holds rows of format {recorded['format']}, this version of celery_sidejob reads "
            f"{FORMAT}: upgrade the package celery-sidejob here."
        )
    wrong = [key for key, value in (owner or {}).items() if recorded.get(key, value) != value]
    if owner and wrong == ["broker"] and recorded.get(BESIDE) == owner["broker"]:
        return
    if owner and wrong:
        theirs = " and ".join(f"the {key} {recorded[key]!r}" for key in wrong)
        ours = " and ".join(f"the {key} {owner[key]!r}" for key in wrong)
        correct = " and ".join(_WHERE.get(key, key) for key in wrong)
        raise NotOurs(
            f"Schema {schema!r} belongs to {theirs}, but here is {ours}. One schema serves one app and one broker: set "
            f"sidejob_schema to another name and {REMEDY}, or correct {correct}. If it has moved on purpose, stop all "
            "workers and run `celery -A <app> sidejob db reassign`. To change the broker without a stop, begin with "
            "`… db reassign --beside`."
        )


_WHERE = {
    "app": "the app's name, as in Celery('shop')",
    "broker": "the broker (the family, virtual host or database number of broker_url, and its global_keyprefix)",
}


_READS_ONLY = Statement("SELECT current_setting('transaction_read_only')::boolean AS found")  # on a standby too

_EXISTS = Statement("SELECT to_regclass(%(relation)s) IS NOT NULL AS found")


def revision_of(executor: Transaction, schema: str) -> str | None:
    """Read the schema's revision; SchemaError if the migrations recorded there are another program's."""

    def exists(relation: str) -> bool:
        return bool(executor.run(_EXISTS, relation=f"{quoted(schema)}.{relation}")[0].found)

    # The table is made before the first migration, and `meta` in it: read in this order no schema looks half-made.
    revision = meta.revision(executor) if exists("alembic_version") else None
    if revision is None:
        return None
    if not revision.isdecimal() or not exists("meta"):
        raise NotOurs(
            f"Schema {schema!r} holds another program's migrations (revision {revision!r}): set sidejob_schema to a "
            f"name that nothing else uses and {REMEDY}."
        )
    if exists("messages_queue_look_at_idx"):
        raise SchemaError(
            f"Schema {schema!r} is of a version before the first release, and no upgrade leads on from there: let its "
            f"work end with that version, drop it (DROP SCHEMA {quoted(schema)} CASCADE), and {REMEDY}."
        )
    return revision


def known_revision(executor: Transaction, schema: str) -> str:
    """Read the schema's revision as `revision_of` does; NotUpgraded if it has none."""
    revision = revision_of(executor, schema)
    if revision is None:
        raise NotUpgraded(f"Schema {schema!r} is missing, or it has no tables of ours: {REMEDY}.")
    return revision


def _distance(revision: str) -> int:
    """Return by how many revisions a schema is newer than this version; revisions are numbered without gaps."""
    return int(revision) - int(meta.REVISION)


def connected(store: Connections | str, schema: str, setting: str) -> AbstractContextManager[Connections]:
    """Return connections to a store; new ones to a URL, with or without a proxy: they prepare no statements."""
    if isinstance(store, Connections):
        return nullcontext(store)
    return closing(Connections(store, schema, prepare=False, setting=setting))


@contextmanager
def explained(schema: str, setting: str, *, fresh: bool = False) -> Iterator[None]:
    """Explain an error of Postgres to the person who upgrades, checks or (`fresh`) creates the schema."""
    try:
        yield
    except Exception as error:
        cause = getattr(error, "orig", None) or error  # SQLAlchemy wraps the errors of a migration
        explanation = _explain(schema, setting, cause, fresh=fresh)
        if explanation is None:
            raise
        raise explanation from cause


def _explain(schema: str, setting: str, cause: BaseException | None, *, fresh: bool) -> SideJobError | None:
    reason = str(cause).strip().partition("\n")[0]
    match cause:
        case pg.LockNotAvailable() | pg.DeadlockDetected():
            return SchemaError(
                f"Schema {schema!r} could not be migrated, after several attempts ({reason}): a long transaction holds "
                f"a table. The schema is as it was before that migration; end the transaction and {REMEDY}."
            )
        case pg.InsufficientPrivilege() if fresh:
            return LacksRights(
                f"Schema {schema!r} is not there yet, and the user in {setting} may not make it ({reason}): {REMEDY} "
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
                f"nothing else uses and {REMEDY}."
            )
        case psycopg.OperationalError():
            return StoreUnavailableError(
                f"The store failed while schema {schema!r} was looked at or migrated: {reason}"
            )
    return None


def quoted(schema: str) -> str:
    return sql.Identifier(schema).as_string(None)


def check_urls(url: str, direct_url: str) -> str | None:
    """Raise SettingsError if the URLs lead to two databases; only reads.

    If `url` does not answer, returns the reason, and agreement stays unknown: a proxy may be started after the upgrade.
    If `direct_url` does not answer, raises StoreUnavailableError.
    """
    direct = _database_of(direct_url, "sidejob_direct_url")
    try:
        usual = _database_of(url, "sidejob_database_url")
    except StoreUnavailableError as error:
        return str(error)
    if not usual.is_same_as(direct):
        raise SettingsError(
            f"sidejob_direct_url leads to the database {direct.name!r}, and sidejob_database_url to another one, "
            f"{usual.name!r}: the schema would be where no worker looks for it. Nothing was changed; correct one of "
            "them."
        )
    return None


def _database_of(url: str, setting: str) -> Database:
    with connected(url, "sidejob", setting) as connections:
        return connections.identify(database)
