"""Views of batches: how their members have ended, and the calls that follow."""

from __future__ import annotations

import json
from typing import Any

from ..model import values
from ..model.errors import batch_not_found
from ..operations.runtime import Runtime
from ..store import batches
from ..store.statement import Transaction, picked

COUNTED = 10_000
"""The most members of a batch that a list of batches counts."""


class BatchViews:
    """Read-only views of the batches of one store; an end is counted once the sweeper has noted it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def page(self, *, before: int | None, limit: int) -> list[dict[str, Any]]:
        """Return the batches before an id, newest first; the members of each are counted up to `COUNTED`."""
        rows = batches.page(self._runtime.connections, before=before, limit=limit, most=COUNTED + 1)
        return [_batch(row, COUNTED) for row in rows]

    def one(self, name: str, *, limit: int) -> dict[str, Any]:
        """Return a batch with all members counted, its calls, and its first members that are `open` or `failed`."""

        def work(executor: Transaction) -> tuple[Any, dict[str, Any]]:
            row = batches.counted(executor, name)
            if row is None:
                raise batch_not_found(name)
            lists = ("failed", "open")
            return row, {which: batches.members(executor, row.id, which=which, limit=limit) for which in lists}

        row, members = self._runtime.connections.transact("inspect", work)
        hide = self._runtime.settings.redacted
        calls = {
            when: {
                "task": call["task"],
                "options": json.loads(call["options"]),
                **{given: hide(values.decode(call[given])) for given in ("args", "kwargs")},
            }
            for when, call in json.loads(row.calls).items()
        }
        shown = {which: [each._asdict() for each in rows] for which, rows in members.items()}
        return {**_batch(row), "calls": calls, "members": shown}


def _batch(row: Any, most: int | None = None) -> dict[str, Any]:
    state = "ended" if row.ended_at is not None else "closed" if row.closed_at is not None else "takes members"
    return {
        **picked(row, "id", "name"),
        "state": state,
        **picked(row, "created_at", "ended_at"),
        "is_more": most is not None and row.total > most,
        "total": min(row.total, most or row.total),
        **picked(row, "completed", "failed", "terminated"),
        "done": min(row.completed + row.failed + row.terminated, most or row.total),
    }
