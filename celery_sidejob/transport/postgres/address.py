"""Where a connection of kombu's leads, and how it is shown: with no password."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote

from ...model import store_url
from ...model.errors import SettingsError

SCHEME = "sidejobpg"
_ALONE = re.compile(rf"\s*{SCHEME}:/*\s*")
_PASSWORD = re.compile(r"^(\w+://[^/@:]*:)[^/@]*@|((?:[?&])\w*password=)[^&]*")


def is_alone(url: str) -> bool:
    """Tell whether a URL names no host and no database: it stands for the app's store."""
    return _ALONE.fullmatch(url) is not None


def hide_password(client: Any) -> None:
    """Keep the whole URL as the connection's password: Celery's `inspect stats` shows all but that.

    Raises SettingsError if the password in it might be shown as something else.
    """
    given = client.hostname or ""
    if "://" in given and not store_url.are_clear_for_broker(given):
        raise SettingsError(f"broker_url cannot be read: {store_url.NOT_CLEAR}")
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


ALONE = (
    f"{SCHEME}:// alone stands for the store of the app's SideJob, and this connection has none: call SideJob(app) and "
    f"set sidejob_database_url, or name the database: {SCHEME}://user:password@host:5432/database."
)
