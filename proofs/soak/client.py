"""A client of a soak: asks for this and that at a bounded rate, and notes what it was promised before it goes on.

    python -m proofs.soak.client NUMBER SEED RATE

It is killed now and then; the next one has another NUMBER, so that no key is used twice.
"""

from __future__ import annotations

import itertools
import random
import sys
import traceback
from collections.abc import Callable
from typing import Any

import psycopg

from celery_sidejob import Job
from proofs.soak.load import KINDS
from proofs.soak.tasks import app, engine, sidejob
from proofs.trial.calls import AWAY, call_until_stopped
from tests.tools.recorder import Record

KEYS = 1_000_000
"""Keys of one client."""


class Client:
    """Asks one thing after the other."""

    def __init__(self, number: int, seed: int, record: Record) -> None:
        self.app = app
        self.sidejob = sidejob
        self.dice = random.Random(f"{seed}-{number}")
        self._record = record
        self._keys = itertools.count(number * KEYS)

    def ask(self) -> bool:
        """Ask for one of some kind; False if a server was away."""
        (name,) = self.dice.choices(list(KINDS), [kind.weight for kind in KINDS.values()])
        key = next(self._keys)
        try:
            KINDS[name].ask(self, key)
        except AWAY as error:
            self._record.note("unknown", kind=name, key=key, error=f"{type(error).__name__}: {error}"[:200])
            return False
        except Exception:
            self._record.note("surprise", kind=name, key=key, traceback=traceback.format_exc())
        return True

    def promise(self, kind: str, key: int, ask: Callable[[], Any], **more: Any) -> None:
        """Call, and note before and after it; who dies in between was promised nothing."""
        self._record.note("asking", kind=kind, key=key, **more)
        answer = ask()
        more |= {"job": answer.id} if isinstance(answer, Job) else {}
        self._record.note("promised", kind=kind, key=key, **more)

    def enqueue(self, task: str, args: tuple[Any, ...], **options: Any) -> Job:
        """Make a job."""
        return self.sidejob.enqueue(task, args, **options)

    def connect(self, *, autocommit: bool = True) -> psycopg.Connection[Any]:
        """A connection of our own to the store."""
        url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
        return psycopg.connect(url, autocommit=autocommit, connect_timeout=5)


def main(arguments: list[str]) -> None:
    """Ask until SIGTERM."""
    number, seed, rate = int(arguments[0]), int(arguments[1]), float(arguments[2])
    client = Client(number, seed, Record.from_env())
    call_until_stopped(client.ask, rate=rate, dice=client.dice)
    sidejob.runtime.connections.close()


if __name__ == "__main__":
    main(sys.argv[1:])
