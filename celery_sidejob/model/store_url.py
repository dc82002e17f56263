"""A store's URL: whether libpq reads it as it is meant, and where it leads."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl

ESCAPED = (
    "in a name or a password `/`, `#`, `?`, `@`, `[`, `]` and `%` are written as %2F, %23, %3F, %40, %5B, %5D and %25"
)
"""What to do about a URL that is not clear."""

_HOST = r"(\[[^\]/?#@]*\]|[^][:,/?#@]*)(:\d*)?"
_PARAMETER = r"(\w*password=[^&]*|\w+=[^&#]*)"
_CLEAR = re.compile(
    rf"postgresql(\+\w+)?://([^@/]*@)?(?P<hosts>{_HOST}(,{_HOST})*)(/(?P<database>[^?#@]*))?"
    rf"(\?(?P<query>({_PARAMETER}(&{_PARAMETER})*)?))?"
)
_BARE_PERCENT = re.compile(r"%(?!(?!00)[0-9a-fA-F]{2})")


def spelled_out(url: str) -> str:
    """Return a URL that libpq takes too, postgres://, as what SQLAlchemy takes alone."""
    return re.sub(r"^postgres://", "postgresql://", url)


def is_clear(url: str) -> bool:
    """Tell whether libpq takes each part of a URL for what it is.

    A `/` or `#` that stands in a password as it is makes the rest of it a port or a database, which libpq, or the
    server, then names in its complaint.
    """
    return _CLEAR.fullmatch(url) is not None and _BARE_PERCENT.search(url) is None


def place(url: str) -> tuple[str, str]:
    """Return where a clear URL leads as it is written, whoever goes there: hosts with ports, and the database."""
    parts = _CLEAR.fullmatch(url)
    assert parts is not None
    query = dict(parse_qsl(parts["query"] or ""))
    hosts = parts["hosts"].lower() or query.get("host", "")
    ports = query.get("port", "5432")
    with_ports = ",".join(host if re.search(r":\d+$", host) else f"{host}:{ports}" for host in hosts.split(","))
    return with_ports, (parts["database"] or "").strip("/") or query.get("dbname", "")
