"""Replaces `Celery._connection` of one app; read in Celery 5.5.0 and 5.7.0.

``app.connection()``, `connection_for_read` and `connection_for_write` end in ``_connection(url, …)``, and with them
workers, beat, remote control, the pools of producers and monitors. Ours puts the store's own URL in the place of
`sidejobpg://` alone. If a later Celery connects in another way, the transport is given that URL as it stands, and
refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from celery import Celery

from .wrapping import wrap


def install(app: Celery, resolve: Callable[[Celery, Any], tuple[Any, Mapping[str, Any]]]) -> None:
    """Have the app connect to what `resolve` makes of a URL, with its transport options; reads no configuration."""
    wrap(app, "_connection", partial(_connect, app, resolve))


def _connect(
    app: Celery,
    resolve: Callable[[Celery, Any], tuple[Any, Mapping[str, Any]]],
    connect: Callable[..., Any],
    url: Any,
    *args: Any,
    transport_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    resolved, found = resolve(app, url)
    return connect(resolved, *args, transport_options={**found, **(transport_options or {})}, **options)
