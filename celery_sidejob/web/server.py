"""Serves the web page alone, with uvicorn."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable, Mapping
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..model.errors import SettingsError
from .app import asgi_app, site_app
from .site import Site
from .users import Role, Users, hashed

KEEP_ALIVE_S = 20
HEAD_S = 10.0
"""How many seconds a client has for the head of a request."""
MOST_CONNECTIONS = 500
"""How many connections are served at once; further ones get 503."""


class Protocol(H11Protocol):
    """Hangs up on a client that does not come to the end of a request's head: it would hold its connection for ever."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def serve(
    sidejob: Any, host: str, port: int, *, users: Mapping[str, str] | None, said: Callable[[str], object]
) -> None:
    """Serve until SIGINT or SIGTERM. `users` are names with passwords, in place of `sidejob_web_users`."""
    if users is None:
        app = asgi_app(sidejob)
    else:
        entries = {name: hashed(password, Role.OPERATE) for name, password in users.items()}
        app = site_app(Site(sidejob, Users(entries), None))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise SettingsError(f"The web page cannot listen at {host}, port {port}: {error}. Give --port.") from error
        listener.listen()  # before the address is said: who reads it may connect at once
        shown = f"[{host}]" if ":" in host else host
        said(f"The web page of {sidejob.app.main or 'celery'}: http://{shown}:{listener.getsockname()[1]}/")
        settle()
        uvicorn.Server(config_of(app)).run(sockets=[listener])


def settle() -> None:
    """Have the garbage collector pass over what is loaded by now: to look through it took a page 0.2 s now and then."""
    gc.collect()
    gc.freeze()


def config_of(app: ASGIApp) -> uvicorn.Config:
    """Return how uvicorn serves the page. No access log: a URL has names and ids of users."""
    return uvicorn.Config(
        app,
        http=Protocol,
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=5,
    )
