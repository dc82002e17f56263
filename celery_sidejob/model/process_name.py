"""The name of this process, by which workers and consumers are named everywhere."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
from collections.abc import Iterator
from functools import cache


def new_name() -> str:
    """Return a name that no process has or had: host:process:random, and from the second name on a number."""
    number = next(_numbers(os.getpid()))
    return f"{_of_process(os.getpid())}{f'.{number}' if number > 1 else ''}"


@cache
def _of_process(pid: int) -> str:
    return f"{socket.gethostname()}:{pid}:{secrets.token_hex(6)}"


@cache
def _numbers(pid: int) -> Iterator[int]:
    return itertools.count(1)
