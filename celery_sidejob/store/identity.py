"""Tells to which database a connection leads: to that of our store, or to another that also has a schema of ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import registry
from .statement import Reader, Statement

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
        pairs: Sequence[tuple[Any, Any]] = (
            (self.oid, other.oid),
            (self.identity, other.identity),
            (self.cluster, other.cluster),
        )
        return all(one == two for one, two in pairs if one is not None and two is not None)


def database(executor: Reader) -> Database:
    """Identify this database, whatever it contains; the cluster is not read yet."""
    found = executor.run(_LOOK, table="jobs")[0]
    return Database(found.name, found.oid, None, None)


def look(executor: Reader, schema: str) -> Database | None:
    """Identify this database; None if it has no schema of ours. The cluster is not read yet."""
    found = executor.run(_LOOK, table=f'"{schema}".jobs')[0]
    if not found.found:
        return None
    return Database(found.name, found.oid, registry.identity(executor), None)


def cluster(executor: Reader) -> int:
    """Read the cluster's number. Any role may, unless an administrator has revoked this right."""
    return int(executor.run(_CLUSTER)[0].cluster)
