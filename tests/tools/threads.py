"""Threads of a test whose errors are the test's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def in_thread(call: Callable[[], object]) -> Iterator[None]:
    """Have another thread make a call beside the block; waits for it, and raises what it raised."""
    raised: list[BaseException] = []

    def work() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if raised:
        raise raised[0]
