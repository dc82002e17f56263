"""The identity of a schema: rows of `meta`, its revision, and the database in which it is.

A version runs on its own revision, the previous and the next, so that a rolling deploy needs no pause. A connection may
lead to the database of our store, or to another that also has a schema of ours: their marks tell them apart.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from .statement import Reader, Statement, Transaction, first_value

_NOTE = Statement("""
INSERT INTO {meta} (key, value) VALUES (%(key)s, %(value)s) ON CONFLICT (key) DO NOTHING""")
_READ = Statement("SELECT key, value FROM {meta}")
_CHANGE = Statement("""
INSERT INTO {meta} (key, value) VALUES (%(key)s, %(value)s) ON CONFLICT (key) DO UPDATE SET value = excluded.value""")
_FORGET = Statement("DELETE FROM {meta} WHERE key = %(key)s")


def change(executor: Transaction, key: str, value: str) -> None:
    """Record a fact about the schema, replacing an earlier record."""
    executor.run(_CHANGE, key=key, value=value)


def forget(executor: Transaction, key: str) -> None:
    """Forget a fact about the schema."""
    executor.run(_FORGET, key=key)


def note(executor: Transaction, key: str, value: str) -> None:
    """Record a fact about the schema, unless it is recorded already."""
    executor.run(_NOTE, key=key, value=value)


def read(executor: Reader) -> dict[str, str]:
    """Read the recorded facts about the schema."""
    return {row.key: row.value for row in executor.run(_READ)}


def identity(executor: Reader) -> str | None:
    """Read the schema's random name, which distinguishes it from other schemas of this package."""
    return read(executor).get("identity")


REVISION = "0001"
"""The newest revision this code knows; the head of the migrations."""

_REVISION = Statement("SELECT version_num AS revision FROM {alembic_version}")


def revision(executor: Reader) -> str | None:
    """Read the schema's revision; None if there are no migrations in it yet."""
    return first_value(executor.run(_REVISION), str)


_LOOK = Statement("""
SELECT to_regclass(%(table)s) IS NOT NULL AS found, current_database() AS name,
  (SELECT d.oid::bigint FROM pg_database d WHERE d.datname = current_database()) AS oid""")
_CLUSTER = Statement("SELECT system_identifier AS cluster FROM pg_control_system()")


@dataclass(frozen=True, slots=True)
class Database:
    """The marks that tell databases apart: the schema's random name, the database's number, and its cluster's.

    A dump or CREATE DATABASE copies the name, but not the database's number; a dump does not copy the cluster's number.
    A copy of a whole cluster, for example a standby, cannot be told from the original.
    """

    name: str
    oid: int
    identity: str | None
    cluster: int | None

    def is_same_as(self, other: Database) -> bool:
        """Whether both are the same database, as far as both could be asked."""
        _, *ours = astuple(self)
        _, *theirs = astuple(other)
        return all(one == two for one, two in zip(ours, theirs, strict=True) if None not in (one, two))


def database(executor: Reader) -> Database:
    """Identify this database, whatever it contains; the cluster is not read yet."""
    found = executor.run(_LOOK, table="jobs")[0]
    return Database(found.name, found.oid, None, None)


def look(executor: Reader, schema: str) -> Database | None:
    """Identify this database; None if it has no schema of ours. The cluster is not read yet."""
    found = executor.run(_LOOK, table=f'"{schema}".jobs')[0]
    if not found.found:
        return None
    return Database(found.name, found.oid, identity(executor), None)


def cluster(executor: Reader) -> int:
    """Read the cluster's number. Any role may, unless an administrator has revoked this right."""
    return int(executor.run(_CLUSTER)[0].cluster)
