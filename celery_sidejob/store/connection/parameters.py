"""Turns a store's URL into libpq's parameters."""

from __future__ import annotations

import re
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Conninfo

from ...model.errors import SettingsError
from ..errors import first_line

_REFUSED = re.compile(r'invalid (port number|"?\w+"? value)\b.*|could not match \d+ port numbers.*')
_SCHEME = re.compile(r"^postgres(ql)?(\+\w+)?://")


def connection_parameters(
    url: str, *, setting: str = "sidejob_database_url", application: str = "celery_sidejob"
) -> dict[str, Any]:
    """Return libpq's parameters for a `postgresql://` URL, also for one in SQLAlchemy's spelling.

    `application` is the name under which the server lists the connection, unless the URL has another.

    Keep-alives and `tcp_user_timeout` detect half-open connections within about ten seconds, not hours.
    """
    plain = _SCHEME.sub("postgresql://", url)
    try:
        given = conninfo_to_dict(plain)
    except psycopg.ProgrammingError as error:
        reason = first_line(error).replace(plain, "…")
        raise SettingsError(f"{setting} cannot be read: {reason}") from None
    if not str(given.get("connect_timeout", "5")).lstrip("-").isdecimal():
        raise SettingsError(f'{setting} cannot be read: invalid connect_timeout value: "{given["connect_timeout"]}"')
    return {
        "application_name": application,
        "connect_timeout": "5",
        "keepalives_idle": "5",
        "keepalives_interval": "2",
        "keepalives_count": "3",
        "tcp_user_timeout": "10000",
        **given,
        "client_encoding": "UTF8",
    }


def refused(error: psycopg.OperationalError, setting: str) -> SettingsError | None:
    """Return the error for a URL that libpq refuses before it asks any server; None for other errors."""
    found = _REFUSED.search(first_line(error))
    return None if found is None else SettingsError(f"{setting} cannot be read: {found[0]}")


def lead_to_same_database(url: str, other: str, *, settings: tuple[str, str]) -> bool:
    """Tell whether two URLs name one database on the same hosts and ports, as libpq reads them; asks no server.

    Another name of a host, or a proxy before it, counts as another host. `settings` names the URLs, for errors.
    """
    return _place(url, settings[0]) == _place(other, settings[1])


def database_name(url: str, *, setting: str) -> str:
    """Return the name of the database that a URL leads to, as libpq reads it."""
    known = _with_defaults(url, setting)
    return str(known.get("dbname") or known.get("user") or "")


def _place(url: str, setting: str) -> tuple[Any, ...]:
    known = _with_defaults(url, setting)
    hosts = str(known.get("hostaddr") or known.get("host") or "").lower().split(",")
    ports = str(known["port"]).split(",")
    nodes = zip(hosts, ports * len(hosts) if len(ports) == 1 else ports, strict=False)
    return frozenset(nodes), known.get("service"), database_name(url, setting=setting)


def _with_defaults(url: str, setting: str) -> dict[str, Any]:
    """Return libpq's parameters for a URL, including its defaults from the environment and from its build."""
    defaults = {one.keyword.decode(): one.val.decode() for one in Conninfo.get_defaults() if one.val}
    return {**defaults, **connection_parameters(url, setting=setting)}
