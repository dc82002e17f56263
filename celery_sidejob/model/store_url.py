"""A store's URL: whether libpq reads it as it was meant, and where it leads."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl

ESCAPED = (
    "in a name or a password `/`, `#`, `?`, `@`, `[`, `]` and `%` are written as %2F, %23, %3F, %40, %5B, %5D and %25"
)
"""The remedy for a URL that is not clear."""

_HOST = r"(\[[^\]/?#@]*\]|[^][:,/?#@]*)(:\d*)?"
_PARAMETER = r"(\w*password=[^&]*|\w+=[^&#]*)"
_CLEAR = re.compile(
    rf"postgresql(\+\w+)?://([^@/]*@)?(?P<hosts>{_HOST}(,{_HOST})*)(/(?P<database>[^?#@]*))?"
    rf"(\?(?P<query>({_PARAMETER}(&{_PARAMETER})*)?))?"
)
_BARE_PERCENT = re.compile(r"%(?!(?!00)[0-9a-fA-F]{2})")


def spelled_out(url: str) -> str:
    """Return a URL in the form that SQLAlchemy accepts; libpq also accepts postgres://."""
    return re.sub(r"^postgres://", "postgresql://", url)


def is_clear(url: str) -> bool:
    """Tell whether libpq reads each part of a URL as it was meant.

    An unescaped `/` or `#` in a password turns the rest of it into a port or a database. libpq, or the server, then
    reveals it in an error.
    """
    return _CLEAR.fullmatch(url) is not None and _BARE_PERCENT.search(url) is None


def address(url: str) -> tuple[str, str]:
    """Return the address in a clear URL, as written: hosts with ports, and the database."""
    parts = _CLEAR.fullmatch(url)
    assert parts is not None
    query = dict(parse_qsl(parts["query"] or ""))
    hosts = parts["hosts"].lower() or query.get("host", "")
    ports = query.get("port", "5432")
    with_ports = ",".join(host if re.search(r":\d+$", host) else f"{host}:{ports}" for host in hosts.split(","))
    return with_ports, (parts["database"] or "").strip("/") or query.get("dbname", "")
