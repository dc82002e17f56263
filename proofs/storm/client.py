"""A client of a storm: calls tasks in all forms, and notes with fsync what it was promised before it goes on.

python -m proofs.storm.client NUMBER SEED RATE
"""

from __future__ import annotations

import random
import sys
import traceback
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import psycopg
from celery import chain, chord, group

from proofs.storm import tasks
from proofs.storm.tasks import app
from proofs.trial.calls import AWAY, call_until_stopped
from tests.tools.recorder import Record

SINGLE = ("once", "late", "unwatched", "again")


class Client:
    """Calls one thing after the other."""

    def __init__(self, number: int, seed: int, record: Record) -> None:
        self._dice = random.Random(f"{seed}-{number}")
        self._record = record

    def call(self) -> bool:
        """Call something; False if a server was away."""
        form = self._dice.choice(list(FORMS))
        try:
            promised = FORMS[form](self)
        except AWAY as error:
            self._record.note("unknown", form=form, error=f"{type(error).__name__}: {error}"[:200])
            return False
        except Exception:
            self._record.note("surprise", form=form, traceback=traceback.format_exc())
            return True
        self._record.note("accepted", form=form, **promised)
        return True

    # -- forms ---------------------------------------------------------------------------------------------------

    def _delay(self) -> dict[str, Any]:
        return {"ids": [self._any().delay(1).id]}

    def _send_task(self) -> dict[str, Any]:
        name = f"{tasks.__name__}.{self._dice.choice(SINGLE)}"
        return {"ids": [app.send_task(name, (1,), compression=self._dice.choice((None, "zlib"))).id]}

    def _later(self) -> dict[str, Any]:
        seconds = self._dice.choice((0.5, 2, 8))
        eta = datetime.now(UTC) + timedelta(seconds=seconds)
        when: dict[str, Any] = self._dice.choice(({"countdown": seconds}, {"eta": eta}))
        return {"ids": [self._any().apply_async((1,), **when).id]}

    def _priority(self) -> dict[str, Any]:
        return {"ids": [self._any().apply_async((1,), priority=self._dice.choice((0, 3, 9))).id]}

    def _expiring(self) -> dict[str, Any]:
        task_id = self._to_be("expired")
        return {"ids": [tasks.once.apply_async((1,), task_id=task_id, expires=self._dice.choice((0.3, 2, 60))).id]}

    def _revoked(self) -> dict[str, Any]:
        result = self._any().apply_async((1,), task_id=self._to_be("revoked"))
        result.revoke(terminate=self._dice.random() < 0.5, signal="SIGKILL")
        return {"ids": [result.id]}

    def _to_be(self, outcome: str) -> str:
        """Return the id of a task that may end so, noted before: this client may be killed before it is promised."""
        task_id = str(uuid.uuid4())
        self._record.note("meant", ids=[task_id], outcome=outcome)
        return task_id

    def _retrying(self) -> dict[str, Any]:
        task = self._dice.choice((tasks.retrying, tasks.stubborn))
        return {"ids": [task.delay(self._dice.randint(1, 3)).id]}

    def _failing(self) -> dict[str, Any]:
        return {"ids": [tasks.failing.apply_async((), link_error=tasks.told.s()).id]}

    def _nesting(self) -> dict[str, Any]:
        return {"ids": [tasks.nesting.delay(1).id]}

    def _replaced(self) -> dict[str, Any]:
        return {"ids": [tasks.replaced.delay(1).id]}

    def _chain(self) -> dict[str, Any]:
        last = chain(self._any().s(1), self._any().s(), tasks.again.s()).apply_async()
        ids = [last.parent.parent.id, last.parent.id, last.id]
        return {"ids": ids[:1], "then": list(pairwise(ids))}

    def _linked(self) -> dict[str, Any]:
        links = [self._any().s().set(task_id=str(uuid.uuid4())) for _ in range(2)]
        result = self._any().apply_async((1,), link=links)
        return {"ids": [result.id], "then": [(result.id, link.options["task_id"]) for link in links]}

    def _group(self) -> dict[str, Any]:
        result = group(self._any().s(number) for number in range(3)).apply_async()
        return {"ids": [child.id for child in result.children]}

    def _chord(self) -> dict[str, Any]:
        task = self._dice.choice((tasks.once, tasks.again))
        result = chord([task.s(number) for number in range(3)])(tasks.total.s())
        return {"ids": [child.id for child in result.parent.children], "chord": result.id}

    def _transaction(self) -> dict[str, Any]:
        task_ids = [str(uuid.uuid4()) for _ in range(2)]
        with psycopg.connect(app.sidejob.settings.database_url, connect_timeout=5) as connection:
            for task_id in task_ids:
                self._any().apply_async((1,), task_id=task_id, transaction=connection)
            if self._dice.random() < 0.3:
                connection.rollback()
                return {"ids": [], "never": task_ids}
        return {"ids": task_ids}

    def _any(self) -> Any:
        return getattr(tasks, self._dice.choice(SINGLE[:2] + SINGLE[3:]))


FORMS: dict[str, Callable[[Client], dict[str, Any]]] = {
    "delay": Client._delay,
    "send_task": Client._send_task,
    "countdown, eta": Client._later,
    "priority": Client._priority,
    "expires": Client._expiring,
    "revoked": Client._revoked,
    "retry": Client._retrying,
    "failing": Client._failing,
    "nesting": Client._nesting,
    "replace": Client._replaced,
    "chain": Client._chain,
    "link": Client._linked,
    "group": Client._group,
    "chord": Client._chord,
    "transaction": Client._transaction,
}
"""By name; each returns what it was promised."""


def main(arguments: list[str]) -> None:
    """Call until SIGTERM."""
    number, seed, rate = int(arguments[0]), int(arguments[1]), float(arguments[2])
    client = Client(number, seed, Record.from_env())
    call_until_stopped(client.call, rate=rate, dice=client._dice)
    app.sidejob.close()


if __name__ == "__main__":
    main(sys.argv[1:])
