"""Reads our settings from a Celery app at their first use, and masks passwords in the settings that are shown.

An import must not read any configuration.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

from celery import Celery
from celery.app.utils import HIDDEN_SETTINGS
from kombu import Connection
from kombu.transport import TRANSPORT_ALIASES
from kombu.utils.encoding import safe_repr

from ..model import urls
from ..model.checks import nearest, shown
from ..model.errors import SettingsError
from ..model.settings import NO_STORE, SETTINGS, Settings, read_settings
from ..store.connection.opening import database_name, lead_to_same_database

NAMES = "broker_url (or broker_read_url, broker_write_url)"


def settings_of(app: Celery) -> Settings:
    """Read, check and freeze the settings of an app: its configuration, then the environment, then defaults."""
    return read_settings(_ours(app), os.environ, namespace=app.namespace)


def _ours(app: Celery) -> dict[str, Any]:
    """Return every configuration key that could be one of ours, in the spelling found.

    As in Celery, a value in `app.conf` takes precedence over the loaded configuration, in whatever spelling. Two
    spellings in the same source are both returned.
    """
    app.conf.get("broker_url")  # loads a pending configuration
    found: dict[str, Any] = {}
    for layer in app.conf.maps:
        nearer = {_setting_of(key) for key in found}
        for key in list(layer):
            if isinstance(key, str) and "sidejob_" in key.lower() and _setting_of(key) not in nearer:
                found[key] = layer[key]
    return found


def _setting_of(key: str) -> str:
    """Return a key without the namespace: the part that can be one of our settings."""
    return key.lower()[key.lower().index("sidejob_") :]


def broker_identity(app: Celery) -> str:
    """Return the identity of the broker: family, virtual host or database number, key prefix; never the host.

    All nodes and failover URLs, for writing and reading, must agree: otherwise a doorbell might ring where no worker
    listens. Raises SettingsError if they do not.
    """
    with _reading_urls():
        first, *others = [(name, _identity(app, connection)) for name, connection in _brokers(app)]
    for name, identity in others:
        if identity != first[1]:
            raise SettingsError(
                f"broker_url (or broker_read_url, broker_write_url) names several brokers that are not one: {first[0]} "
                f"is {first[1]!r}, {name} is {identity!r}. Name nodes of one broker, with one virtual host or database."
            )
    return first[1]


def broker_in_store(app: Celery, url: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return a broker's URL, with the store's own URL for each bare `sidejobpg://`, and its transport options.

    Raises SettingsError if a URL could show its password, if its scheme resembles one of ours, or if the store is
    needed and has no URL.
    """
    nodes = url.split(";") if isinstance(url, str) else url if isinstance(url, list | tuple) else ()
    if not all(urls.are_clear_for_broker(node) for node in nodes if isinstance(node, str)):
        raise SettingsError(f"{NAMES} cannot be read: {urls.NOT_CLEAR}")
    ours = [scheme for scheme in TRANSPORT_ALIASES if scheme.startswith("sidejob")]
    for scheme in (node.partition("://")[0] for node in nodes if isinstance(node, str)):
        if scheme not in TRANSPORT_ALIASES and (near := nearest(scheme, ours)):
            raise SettingsError(f"{NAMES} has the unknown scheme {shown(scheme)}. Did you mean {near}://?")
    alone = [isinstance(node, str) and urls.is_alone(node) for node in nodes]
    if not any(alone):
        return url, {}
    settings = settings_of(app)
    if settings.database_url is None:
        raise SettingsError(f"broker_url is {urls.SCHEME}:// alone, for the store's own URL, and {NO_STORE}")
    own = f"{urls.SCHEME}://" + settings.database_url.partition("://")[2].replace(";", "%3B")
    options = {"schema": settings.schema, **app.conf.broker_transport_options}
    if all(alone):
        options["direct_url"] = settings.direct_url
    found = [own if is_alone else node for node, is_alone in zip(nodes, alone, strict=True)]
    return found if len(found) > 1 else own, options


def broker_is_store(app: Celery) -> bool:
    """Tell whether the broker's messages are in the only store: in its database and schema.

    Compares URLs (all nodes of the broker with the store's two URLs), and asks no server. If a URL uses another name
    for the store's host, it counts as another broker.
    """
    if getattr(app, "sidejob", None) is None:
        return False
    settings = settings_of(app)
    stores = {"sidejob_database_url": settings.database_url, "sidejob_direct_url": settings.direct_url}
    ways = {setting: url for setting, url in stores.items() if url is not None}
    if not settings.store_may_be_broker:
        return False
    with _reading_urls():
        return all(
            transport.driver_type == "postgres"
            and transport.link.schema == settings.schema
            and any(
                lead_to_same_database(transport.link.url, url, settings=("broker_url", setting))
                for setting, url in ways.items()
            )
            for transport in (connection.transport for _, connection in _brokers(app))
        )


def broker_family(app: Celery) -> str:
    """Return kombu's name for the broker's family: "redis", "amqp"; SettingsError if its URL cannot be read."""
    with _reading_urls():
        return str(app.connection_for_write().transport.driver_type)


def broker_errors(app: Celery) -> tuple[type[BaseException], ...]:
    """Return the errors of the broker's broken connections; SettingsError if its URL cannot be read."""
    with _reading_urls():
        return (*app.connection_for_write().connection_errors, OSError)


def _brokers(app: Celery) -> Iterator[tuple[str, Connection]]:
    """Yield a connection to each node in the broker's URLs, and the node's name for errors."""
    for use, connect in (("to write to", app.connection_for_write), ("to read from", app.connection_for_read)):
        connection = connect()
        for number, url in enumerate(connection.alt or [None], 1):
            one = connect(url) if url is not None else connection
            yield f"number {number} {use}" if connection.alt else f"the one {use}", one


@contextmanager
def _reading_urls() -> Iterator[None]:
    """Report an invalid broker URL without showing it: Python's own message contains parts of a password."""
    try:
        yield
    except SettingsError:  # from our own transport, which shows no password
        raise
    except (KeyError, ImportError) as error:  # from an unknown transport, or one that is not installed
        raise SettingsError(f"broker_url cannot be used: {error.args[0] if error.args else error!r}.") from None
    except ValueError:
        raise SettingsError(
            f"{NAMES} cannot be read: its port is no number, or its brackets do not match; {urls.ESCAPED}."
        ) from None


def _identity(app: Celery, connection: Connection) -> str:
    family, virtual_host = connection.transport.driver_type, connection.virtual_host or "/"
    if family == "redis":
        of_socket = parse_qs(urlsplit(connection.hostname or "").query).get("virtual_host")
        virtual_host = (of_socket[0] if of_socket else virtual_host).strip("/") or "0"
    if family == "postgres":
        link = connection.transport.link
        virtual_host = f"{database_name(link.url, setting='broker_url')} {link.schema}"
    prefix = app.conf.broker_transport_options.get("global_keyprefix", "")
    return f"{family} {virtual_host} {prefix}".rstrip()


MASK = "********"

_USER = re.compile(r"(?<=://)(?:(?![;,\s][\w+.-]*://)[^\n])*@")
"""From a URL's scheme to the last @ before the next URL: an unescaped password may contain anything."""
_MASKED = re.compile(r"[^:@/]*:\*+@")
"""A user and a password after Celery's masking."""
_PARAMETER = re.compile(r"(?i)([\w-]*(?:pass|pwd|secret|token|api_?key|credential)[\w-]*\s*=\s*)('[^']*'|[^&;,\s]+)")
_SECRET = tuple(setting.key for setting in SETTINGS if setting.kind.secret)
_BROKERS = ("broker_url", "broker_read_url", "broker_write_url")
_PLAIN = (bool, int, float, datetime, timedelta, type(None))


def masked(value: Any, key: Any = None) -> Any:
    """Return a setting's value in a form that may be shown, by `inspect conf` and `stats`, or in a bug report.

    Celery masks a setting by its name: the name `sidejob_direct_url` does not suggest a password, and of several URLs
    Celery masks only the first. Here a value is masked by its contents.
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(key, str) and (key.lower().endswith(_SECRET) or HIDDEN_SETTINGS.search(key)):
        return MASK
    if isinstance(value, str) and str(key).lower().endswith(_BROKERS) and not urls.are_clear_for_broker(value):
        return MASK
    if isinstance(value, str):
        return masked_text(value)
    if isinstance(value, bytes):
        return masked_text(value.decode(errors="replace"))
    if isinstance(value, Mapping):
        return {masked(name): masked(one, name) for name, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [masked(one) for one in value]
    text = safe_repr(value)
    return value if masked_text(text) == text else masked_text(text)


def masked_text(text: str) -> str:
    """Return a text without the users and passwords of its URLs; parts masked by Celery stay as they are."""
    return _PARAMETER.sub(rf"\1{MASK}", _USER.sub(_masked_user, text))


def _masked_user(found: re.Match[str]) -> str:
    return found.group() if _MASKED.fullmatch(found.group()) else f"{MASK}@"
