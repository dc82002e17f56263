"""Checks that the store's two URLs lead to one database: upgrades bypass the proxy; workers and clients use it."""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import replace

import psycopg

from ...model.errors import SettingsError, StoreUnavailableError
from ..connection.connections import Connections
from ..meta import Database, cluster, database


def check(url: str, direct_url: str) -> str | None:
    """Raise SettingsError if the URLs lead to two databases; only reads.

    If `url` does not answer, returns the reason, and agreement stays unknown: a proxy may be started after the upgrade.
    If `direct_url` does not answer, raises StoreUnavailableError.
    """
    direct = _look(direct_url, "sidejob_direct_url")
    try:
        usual = _look(url, "sidejob_database_url")
    except StoreUnavailableError as error:
        return str(error)
    if not usual.is_same_as(direct):
        raise SettingsError(
            f"sidejob_direct_url leads to the database {direct.name!r}, and sidejob_database_url to another one, "
            f"{usual.name!r}: the schema would be where no worker looks for it. Nothing was changed; correct one of "
            "them."
        )
    return None


def _look(url: str, setting: str) -> Database:
    with closing(Connections(url, "sidejob", prepare=False, setting=setting)) as connections:
        found = connections.transact("identity", database)
        with suppress(psycopg.errors.InsufficientPrivilege):
            found = replace(found, cluster=connections.transact("identity", cluster))
    return found
