"""Views of durable tasks, in all stores."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ..model.checks import check_texts
from ..model.durable import headers_of
from ..model.errors import InvalidValueError, StoreUnavailableError
from ..model.loss import Loss
from ..operations.runtime import Runtime
from ..store import history, job_lists, waiting
from ..store.statement import picked

LOOK_S = 0.06
"""For how many seconds a page looks through messages."""
MOST_DIGITS = 6
"""The most digits of a number in the cursor of a page."""


class TaskViews:
    """Read-only views of durable tasks."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def task(self, task_id: str) -> dict[str, Any] | None:
        """Return everything about a durable task that waits or runs; None if there is no such task.

        `status` is queued, scheduled (for its `eta` or a retry), gated (`waits_for` says whether by a pause, a limit, a
        rate or a pool), running, or the reason why it will be in the dead set.
        `store` is the name of the failover store that has it. Raises StoreUnavailableError if a store that may have it
        does not answer.
        """
        stores = self._runtime.stores
        failure: StoreUnavailableError | None = None
        for store in stores:
            try:
                row = store.connections.read(
                    lambda executor: waiting.of_task(executor, task_id), within_s=stores.wait_s
                )
                if row is not None:
                    return self._task(row, stores.label_of(store))
            except StoreUnavailableError as error:
                failure = error
        if failure is not None:
            raise failure
        return None

    def tasks(self, *, limit: int, **which: Any) -> list[dict[str, Any]]:
        """Return the first of the tasks that `count_tasks` counts, in the form of `task`, the primary store's first.

        Running tasks come first, the longest first; then the others, in the order in which they are due. Reads all
        tasks that wait or run.
        """
        found: list[dict[str, Any]] = []
        for store in self._runtime.stores:
            read = partial(waiting.list_tasks, limit=limit - len(found), **which)
            rows = store.connections.read(read, within_s=self._runtime.stores.look_s(store))
            found += [self._task(row, self._runtime.stores.label_of(store)) for row in rows]
        return found

    def page(
        self,
        *,
        limit: int,
        after: str = "",
        task: str | None = None,
        queue: str | None = None,
        text: str | None = None,
        statuses: Sequence[str] | None = None,
    ) -> tuple[list[dict[str, Any]], str | None]:
        """Return the first of the matching tasks, in the order of `tasks`, among some of the messages in all stores.

        Messages are looked through for `LOOK_S`, or until some match. Also returns where the next page goes on, to be
        its `after`; None if all messages have been looked through.
        `text` is a part of the arguments as Celery shows them. Text that `sidejob_redact` hides is not found.
        """
        check_texts(text=text, task=task, queue=queue)
        first, skipped, last = _cursor(after)
        kept_as = None if text is None else json.dumps(json.dumps(text)[1:-1])[1:-1]
        look = partial(waiting.look_at_tasks, task=task, queue=queue, statuses=statuses, text=kept_as)
        until = time.monotonic() + LOOK_S
        for store in list(self._runtime.stores)[first:]:
            while True:
                # As in a page of jobs, the end of a page does not tell of text that is hidden.
                most = skipped + limit + 1 if text is None else waiting.LOOKED
                read = partial(look, after=last, limit=most)
                rows, goes_on = store.connections.read(read, within_s=self._runtime.stores.look_s(store))
                found = [self._task(row, self._runtime.stores.label_of(store)) for row in rows]
                if text is not None:
                    found = [one for one in found if text in f"{one['args']} {one['kwargs']}"]
                shown = found[skipped : skipped + limit]
                if len(found) > skipped + limit:
                    return shown, f"{store.place}:{skipped + limit}:{last}"
                skipped, last = 0, goes_on or ""
                if goes_on is None:
                    break
                if shown or time.monotonic() > until:
                    return shown, f"{store.place}:0:{goes_on}"
            if shown or time.monotonic() > until:
                is_last = store.place + 1 == len(self._runtime.stores)
                return shown, None if is_last else f"{store.place + 1}:0:"
        return [], None

    def finished_tasks(self, *, limit: int, **which: Any) -> list[dict[str, Any]]:
        """Return the durable tasks that ended last, the newest first, as kept by `sidejob_task_history`."""
        read = partial(history.tasks, limit=limit, **which)
        return [row._asdict() for row in self._runtime.connections.transact("inspect", read)]

    def count_tasks(self, **which: Any) -> Counter[str]:
        """Count the durable tasks in all stores that wait or run and were not revoked, by status.

        Reads the messages of all tasks that wait or run, even if a `task`, a `queue` or `statuses` choose only a few.
        """
        counts: Counter[str] = Counter()
        read = partial(waiting.count_tasks, **which)
        for store in self._runtime.stores:
            counts.update(store.connections.read(read, within_s=self._runtime.stores.look_s(store)))
        return counts

    def task_ids(self, *, page: int, **which: Any) -> Iterator[list[str]]:
        """Iterate over the ids of the tasks that `count_tasks` counts, a page at a time."""
        read = partial(waiting.page_of_tasks, limit=page, **which)
        for store in self._runtime.stores:
            after, look_s = "", self._runtime.stores.look_s(store)
            while found := store.connections.read(partial(read, after=after), within_s=look_s):
                yield found
                after = found[-1]

    def knows_task(self, task: str) -> bool:
        """Tell whether a job, or a waiting or running durable task, has this task.

        If none has, all jobs are read, a million in a second.
        """
        return job_lists.knows_task(self._runtime.connections, task)

    def _task(self, row: Any, store: str | None) -> dict[str, Any]:
        headers, hide = headers_of(row.publication), self._runtime.settings.redacted
        return {
            **picked(row, "task_id", "task", "status", "waits_for", "queue"),
            "store": store,
            "unique": hide(row.unique_key),
            "args": hide(headers.get("argsrepr")),
            "kwargs": hide(headers.get("kwargsrepr")),
            **picked(row, "due_at", "declined_at", "expires_at", "published_at"),
            "running_since": row.locked_at,
            **picked(row, "runs_s", "worker"),
            "retries": headers.get("retries") or 0,
            "losses": row.losses,
            "last_loss": None if row.last_loss is None else Loss.of_json(row.last_loss).redacted(hide).facts,
            "revoked": row.doom == "revoked",
        }


def _cursor(after: str) -> tuple[int, int, str]:
    """Return where a page goes on: the place of the store, how many tasks to pass over there, after which task id."""
    place, _, rest = (after or "0:0:").partition(":")
    skipped, colon, last = rest.partition(":")
    numbers = all(part.isascii() and part.isdecimal() and len(part) <= MOST_DIGITS for part in (place, skipped))
    if not colon or not numbers:
        raise InvalidValueError("A page of durable tasks goes on at the `next` of the page before, unchanged.")
    return int(place), int(skipped), last
