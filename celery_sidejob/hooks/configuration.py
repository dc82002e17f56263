"""Reading our settings from a Celery app, at their first use: importing must not read any configuration."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

from celery import Celery
from kombu import Connection

from ..model.errors import SettingsError
from ..model.settings import Settings, read_settings


def settings_of(app: Celery) -> Settings:
    """Read, check and freeze the settings of an app: its configuration, then the environment, then defaults."""
    return read_settings(_ours(app), os.environ, namespace=app.namespace)


def _ours(app: Celery) -> dict[str, Any]:
    """Return every configuration key that could be one of ours, in the spelling found, nearest map first."""
    app.conf.get("broker_url")  # loads a configuration that is still pending
    found: dict[str, Any] = {}
    for layer in app.conf.maps:
        for key in list(layer):
            if isinstance(key, str) and "sidejob_" in key.lower() and key not in found:
                found[key] = layer[key]
    return found


def broker_identity(app: Celery) -> str:
    """Return what makes this the same broker: family, virtual host or database number, key prefix; never the host.

    All nodes and failover URLs, and those for writing and reading, must agree: else a doorbell might be rung where no
    worker listens. Raises SettingsError if they do not.
    """
    found = {}
    for use, connect in (("to write to", app.connection_for_write), ("to read from", app.connection_for_read)):
        with _reading_urls():
            connection = connect()
            for place, url in enumerate(connection.alt or [None], 1):
                one = connect(url) if url is not None else connection
                found[f"number {place} {use}" if connection.alt else f"the one {use}"] = _identity(app, one)
    first, *others = found.items()
    for name, identity in others:
        if identity != first[1]:
            raise SettingsError(
                f"broker_url (or broker_read_url, broker_write_url) names several brokers that are not one: {first[0]} "
                f"is {first[1]!r}, {name} is {identity!r}. Name nodes of one broker, with one virtual host or database."
            )
    return first[1]


def broker_family(app: Celery) -> str:
    """Return the kind of broker by kombu's name: "redis", "amqp"; SettingsError if its URL cannot be read."""
    with _reading_urls():
        family: str = app.connection_for_write().transport.driver_type
        return family


def broker_errors(app: Celery) -> tuple[type[BaseException], ...]:
    """Return what the broker's connections raise when they break; SettingsError if its URL cannot be read."""
    with _reading_urls():
        return (*app.connection_for_write().connection_errors, OSError)


@contextmanager
def _reading_urls() -> Iterator[None]:
    """Say what is wrong with a broker's URL without showing it: Python's own words have parts of a password."""
    try:
        yield
    except (KeyError, ImportError) as error:  # of a transport that is not known, or not installed
        raise SettingsError(f"broker_url cannot be used: {error.args[0] if error.args else error!r}.") from None
    except ValueError:
        raise SettingsError(
            "broker_url (or broker_read_url, broker_write_url) cannot be read: its port is no number, or its brackets "
            "do not match. In a name or a password `/`, `#`, `?`, `@`, `[` and `]` are written as %2F, %23, %3F, %40, "
            "%5B and %5D."
        ) from None


def _identity(app: Celery, connection: Connection) -> str:
    family, place = connection.transport.driver_type, connection.virtual_host or "/"
    if family == "redis":
        of_socket = parse_qs(urlsplit(connection.hostname or "").query).get("virtual_host")
        place = (of_socket[0] if of_socket else place).strip("/") or "0"
    prefix = app.conf.broker_transport_options.get("global_keyprefix", "")
    return f"{family} {place} {prefix}".rstrip()
