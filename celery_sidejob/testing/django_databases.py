"""Django's databases as they are now: in a run of tests they are not those of the settings."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from psycopg.conninfo import conninfo_to_dict


def names() -> Mapping[str, str]:
    """Return the names of the databases by their aliases; none in a process without Django."""
    return {alias: str(connection.settings_dict["NAME"]) for alias, connection in _connections().items()}


def alias_of_store(app: Any) -> str | None:
    """Return the alias of the database that the app's store is in; None if it is in none of Django's."""
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
    """Return the URL of the database that an alias leads to now."""
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
