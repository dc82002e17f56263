"""One RabbitMQ for all processes of pytest-xdist, since a start takes ten seconds of processor time.

The process that deals out the tests starts it when another first asks, and ends it with the run.
"""

from __future__ import annotations

import secrets
import threading
from contextlib import ExitStack, suppress
from multiprocessing.connection import Client, Listener
from typing import Any

import pytest

from tests.tools.rabbitmq import Node, RabbitMQ

INPUT = "sidejob_rabbitmq"
"""Where a process of pytest-xdist is told whom it asks."""


class Lender:
    """Tells those who ask, one after the other, of a node that is started for the first."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)
        self._listener = Listener(authkey=self._key)
        self._started = ExitStack()
        self._node: Node | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, bytes]:
        """What `borrowed` needs to know."""
        return str(self._listener.address), self._key

    def close(self) -> None:
        """End the node; nobody asks any more."""
        with Client(self.address[0], authkey=self._key) as last:
            last.send(False)
        self._thread.join()
        self._listener.close()
        self._started.close()

    def _serve(self) -> None:
        while True:
            # Who asks may be killed meanwhile.
            with suppress(EOFError, OSError), self._listener.accept() as asker:
                if not asker.recv():
                    return
                asker.send(self._running())

    def _running(self) -> Node | Exception:
        try:
            self._node = self._node or self._started.enter_context(RabbitMQ()).node
        except Exception as error:
            return error
        return self._node


def borrowed(config: pytest.Config) -> Node | None:
    """Return the node of all processes; None in a run of one process."""
    if not hasattr(config, "workerinput"):
        return None
    where, key = config.workerinput[INPUT]
    with Client(where, authkey=key) as lender:
        lender.send(True)
        node: Node | Exception = lender.recv()
    if isinstance(node, Exception):
        raise node
    return node


LENDER = pytest.StashKey[Lender]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process of pytest-xdist whom it asks."""
    stash = node.config.stash
    if LENDER not in stash:
        stash[LENDER] = Lender()
    node.workerinput[INPUT] = stash[LENDER].address


def pytest_unconfigure(config: pytest.Config) -> None:
    lender = config.stash.get(LENDER, None)
    if lender is not None:
        lender.close()
