"""The URLs of the store and of the broker: whether they are read as they were meant, and the store's address."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl

ESCAPED = (
    "in a name or a password `/`, `#`, `?`, `@`, `[`, `]`, `%` and a blank are written as "
    "%2F, %23, %3F, %40, %5B, %5D, %25 and %20"
)
"""The remedy for an ambiguous URL."""

_HOST = r"(\[[^\]/?#@]*\]|[^][:,/?#@]*)(:\d*)?"
_PARAMETER = r"([a-z_]*password=[^&]*|[a-z_]+=[^&#]*)"
_CLEAR = re.compile(
    rf"postgresql(\+\w+)?://([^@/]*@)?(?P<hosts>{_HOST}(,{_HOST})*)(/(?P<database>[^?#@]*))?"
    rf"(\?(?P<query>({_PARAMETER}(&{_PARAMETER})*)?))?"
)
_READ_BY_KOMBU = re.compile(r"(sidejob(s|-sentinel)?|rediss?|sentinel|amqps?|pyamqp|librabbitmq)(\+\w+)?")
"""The schemes of brokers whose URLs kombu parses; other transports have URL formats of their own."""
_CLEAR_TO_KOMBU = re.compile(
    r"([^][@/?#\s]*@)?(\[[^]/?#@]*\]|[^][:/?#@]*)(:\d*)?(/[^?#@]*)?(\?(\w+=[^#@&]*(&\w+=[^#@&]*)*)?)?"
)
_UNESCAPED = re.compile(r"\s|%(?!(?!00)[0-9a-fA-F]{2})")


NOT_CLEAR = f"its form is not clear: {ESCAPED}. In libpq's parameters all letters of a name are small."


def spelled_out(url: str) -> str:
    """Return a URL in the form that SQLAlchemy accepts; libpq also accepts postgres://."""
    return re.sub(r"^postgres://", "postgresql://", url)


def is_clear(url: str) -> bool:
    """Tell whether libpq reads each part of a URL as it was meant.

    An unescaped `/` or `#` in a password turns the rest of it into a port or a database. libpq, or the server, then
    reveals it in an error. libpq also shows a value with a blank.
    """
    return _CLEAR.fullmatch(url) is not None and _UNESCAPED.search(url) is None


def are_clear_for_broker(urls: str) -> bool:
    """Tell whether each part of a broker's URLs, with `;` between them, is read as it was meant.

    Kombu shows all parts of a URL but its password. It takes a text that is no URL for a host.
    """
    return all(_is_clear_for_broker(url.strip()) for url in urls.split(";"))


def _is_clear_for_broker(url: str) -> bool:
    scheme, mark, rest = url.partition("://")
    if not mark:
        return "@" not in url
    if scheme == "sidejobpg":
        return is_clear(f"postgresql://{rest}")
    return _READ_BY_KOMBU.fullmatch(scheme) is None or _CLEAR_TO_KOMBU.fullmatch(rest) is not None


def address(url: str) -> tuple[str, str]:
    """Return the address in a clear URL, as written: hosts with ports, and the database."""
    parts = _CLEAR.fullmatch(url)
    assert parts is not None
    query = dict(parse_qsl(parts["query"] or ""))
    hosts = parts["hosts"].lower() or query.get("host", "")
    ports = query.get("port", "5432")
    with_ports = ",".join(host if re.search(r":\d+$", host) else f"{host}:{ports}" for host in hosts.split(","))
    return with_ports, (parts["database"] or "").strip("/") or query.get("dbname", "")
