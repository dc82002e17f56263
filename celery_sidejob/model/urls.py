"""The URLs of the store and of the broker: whether they are read as they were meant, and where they lead.

One of them may be the other: `sidejobpg://` names a database as a broker, and alone it stands for the app's store.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qsl, quote

from .errors import SettingsError

SCHEME = "sidejobpg"
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
_ALONE = re.compile(rf"\s*{SCHEME}:/*\s*")
_PASSWORD = re.compile(r"^(\w+://[^/@:]*:)[^/@]*@|((?:[?&])\w*password=)[^&]*")
_UNESCAPED = re.compile(r"\s|%(?!(?!00)[0-9a-fA-F]{2})")


ALONE = (
    f"{SCHEME}:// alone stands for the store of the app's SideJob, and this connection has none: call SideJob(app) and "
    f"set sidejob_database_url, or name the database: {SCHEME}://user:password@host:5432/database."
)
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
    if scheme == SCHEME:
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


# -- a connection of kombu's, by sidejobpg:// --------------------------------------------------------------------------


def is_alone(url: str) -> bool:
    """Tell whether a URL names no host and no database: it stands for the app's store."""
    return _ALONE.fullmatch(url) is not None


def hide_password(client: Any) -> None:
    """Keep the whole URL as the connection's password: Celery's `inspect stats` shows all but that.

    Raises SettingsError if the password in it might be shown as something else.
    """
    given = client.hostname or ""
    if "://" in given and not are_clear_for_broker(given):
        raise SettingsError(f"broker_url cannot be read: {NOT_CLEAR}")
    if "://" in given and not _is_whole(client.password):
        client.hostname, client.password = without_password(given, ""), given


def database_url(client: Any) -> str:
    """Return the URL of the database that a connection names; SettingsError if it names none."""
    given = client.password if _is_whole(client.password) else client.hostname or ""
    if "://" in given:
        if is_alone(given):
            raise SettingsError(ALONE)
        scheme, _, rest = given.partition("://")
        if scheme != SCHEME:
            raise SettingsError(f"The URL of a broker in Postgres begins with {SCHEME}://, not with {scheme}://.")
        return f"postgresql://{rest}"
    account = quote(client.userid or "", safe="")
    if client.password:
        account += f":{quote(client.password, safe='')}"
    port = f":{client.port}" if client.port else ""
    return f"postgresql://{account}{'@' if account else ''}{given}{port}/{(client.virtual_host or '').strip('/')}"


def without_password(url: str, mask: str) -> str:
    """Return a URL that has `mask` for its passwords."""
    return _PASSWORD.sub(lambda found: f"{found[1]}{mask}@" if found[1] else f"{found[2]}{mask}", url)


def _is_whole(password: Any) -> bool:
    return isinstance(password, str) and password.startswith(f"{SCHEME}://")
