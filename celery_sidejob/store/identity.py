"""Which database a connection leads to: the one of our store, or another that happens to have our schema too."""

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
    """What tells a database from others: its schema's random name, its own number, and its cluster's.

    The name is copied with a dump or by CREATE DATABASE, the number is not; a cluster's number is not copied with a
    dump. A copy of a whole cluster, as for a standby, cannot be told from it.
    """

    name: str
    oid: int
    identity: str | None
    cluster: int | None

    def is_same_as(self, other: Database) -> bool:
        """Whether both are one database, as far as both could be asked."""
        pairs: Sequence[tuple[Any, Any]] = (
            (self.oid, other.oid), (self.identity, other.identity), (self.cluster, other.cluster),
        )  # fmt: skip
        return all(one == two for one, two in pairs if one is not None and two is not None)


def place(executor: Reader) -> Database:
    """Tell which database this is, whatever is in it; the cluster is not asked for yet."""
    found = executor.run(_LOOK, table="jobs")[0]
    return Database(found.name, found.oid, None, None)


def look(executor: Reader, schema: str) -> Database | None:
    """Tell which database this is; None if it has no schema of ours. The cluster is not asked for yet."""
    found = executor.run(_LOOK, table=f'"{schema}".jobs')[0]
    if not found.found:
        return None
    return Database(found.name, found.oid, registry.identity(executor), None)


def cluster(executor: Reader) -> int:
    """Tell which cluster this is. Everybody may ask, unless an administrator has revoked it."""
    number: int = executor.run(_CLUSTER)[0].cluster
    return number
