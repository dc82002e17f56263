"""Reading our settings from a Celery app, at their first use: importing must not read any configuration."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from ..model.errors import SettingsError
from ..model.settings import Settings, read_settings


def settings_of(app: Celery) -> Settings:
    """Read, check and freeze the settings of an app: its configuration, then the environment, then defaults."""
    settings = read_settings(_ours(app), os.environ, namespace=app.namespace)
    for name in ("durable_tasks", "failover_urls"):
        if getattr(settings, name):  # a promise that is not kept yet must not look kept
            raise SettingsError(f"sidejob_{name} is for durable tasks, which this version does not have yet")
    return settings


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
    """Return what makes this the same broker: family, virtual host or database number, key prefix; never the host."""
    connection = app.connection_for_write()
    prefix = app.conf.broker_transport_options.get("global_keyprefix", "")
    return f"{connection.transport.driver_type} {connection.virtual_host or '/'} {prefix}".rstrip()
