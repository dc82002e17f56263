"""A forked child and its parent's connections to stores: the child never sends anything on them."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import Any, Protocol

import psycopg


class Forgets(Protocol):
    """An object that has connections."""

    def forget(self) -> None:
        """After a fork, forget the parent's connections. Their sockets were detached before."""


def register(one: Forgets) -> None:
    """Have `one` forget its connections in every child."""
    _forgetting.add(one)


def note_open(connection: psycopg.Connection[Any]) -> None:
    """Note an open connection, which every child must leave alone."""
    _open.add(connection)


def note_closed(connection: psycopg.Connection[Any]) -> None:
    """Stop tracking a connection: it is about to be closed."""
    _open.discard(connection)


_open: weakref.WeakSet[psycopg.Connection[Any]] = weakref.WeakSet()
_forgetting: weakref.WeakSet[Forgets] = weakref.WeakSet()
_inherited: list[Any] = []


def _after_fork() -> None:
    """In a forked child: detach the parent's sockets without sending anything to the server.

    A child that kept a copy would keep the parent's advisory lock alive after the parent's death. A child that closed
    it through libpq would end the session in the parent's name. The descriptor is therefore pointed at /dev/null.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for connection in list(_open):
        with suppress(psycopg.Error, OSError):  # it may already be closed
            os.dup2(null, connection.fileno())
        _inherited.append(connection)  # kept for ever: its destructor would write to the descriptor
    os.close(null)
    _open.clear()
    for one in list(_forgetting):
        one.forget()


os.register_at_fork(after_in_child=_after_fork)
