"""The dead set: failed jobs, and messages of durable tasks, until a person decides.

Each store has its own dead set. `DeadSet` shows them as one, the primary's entries first. Entries of other stores have
the store's name in their id, because two stores may use the same numbers.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from .awaiting import AioOf
from .jobs.job import Job
from .model.checks import check_age, check_number, check_texts, did_you_mean, is_keepable, shown, text_of
from .model.durable import headers_of
from .model.errors import InvalidValueError, JobNotFoundError, SideJobError, StoreUnavailableError
from .model.logger import logger
from .model.loss import Loss
from .model.retention import Retention
from .model.status import FINISHED
from .operations.changes.deletion import delete_finished_tree
from .operations.ledger import burials
from .operations.runtime import Runtime
from .operations.stores import Store
from .store import dead
from .store.statement import Transaction, picked

if TYPE_CHECKING:
    from .aio import AioDeadSet

T = TypeVar("T")
Progress = Callable[[int], object]
Skipped = Callable[[int | str, SideJobError], object]

REASONS = ("failed", "lost", "revoked", "expired", "unsendable", "shutdown lost")
"""The reasons why work dies; the table allows no others."""
PAGE = 200
MOST_DIGITS = 18
"""The most digits of an entry's number: every number with this many fits into Postgres' bigint."""


@dataclass(frozen=True, slots=True)
class DeadEntry:
    """One entry: the dead work, the reason, and the time."""

    id: int | str
    """Its number; for an entry of another store than the primary ``"<store>:<number>"``."""
    job_id: int | None
    """The job; None for a durable task, whose message the entry contains."""
    task_id: str | None
    task: str
    queue: str
    group: str
    """The failure group: the group that a `JobFailed` has named, else the class of the exception."""
    reason: str
    error: str
    traceback: str | None = field(repr=False)
    died_at: datetime
    retries: int
    store: str | None = None
    """The name of its store; None for the primary."""
    losses: int = 0
    """How many runs of a durable task were lost with their workers."""
    loss: Mapping[str, Any] | None = None
    """Why the last lost run was lost: `why`, a sentence, and its facts, such as `host`, `signal`, `out_of_memory`.

    None if no run was lost. `Loss` lists the possible facts.
    """
    arguments: str | None = None
    """A durable task's arguments as Celery shows them; a job's are in `Job.info`."""
    history: tuple[Mapping[str, Any], ...] = ()
    """`at`, `reason` and `error` of each earlier death of a durable task that was retried since."""


class DeadSet:
    """A view of the dead set, which reads the store at each call.

    A call for many entries skips a store that does not answer, with a warning, and raises only if no store answers. It
    returns the entries that a store gave before it stopped answering.
    """

    aio: AioOf[AioDeadSet] = AioOf("AioDeadSet")
    """The verbs as coroutines."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._stores = runtime.stores

    def __len__(self) -> int:
        """Return the number of entries; reads them all, a million in a fifth of a second."""
        return sum(self._of_each(lambda store: [self._ask(store, dead.count)]))

    def __bool__(self) -> bool:
        """True, even if the dead set is empty."""
        return True

    def __iter__(self) -> Iterator[DeadEntry]:
        """Iterate over all entries, the oldest of each store first, a page at a time."""
        return self._of_each(self._all)

    def list(
        self,
        *,
        group: str | None = None,
        task: str | None = None,
        queue: str | None = None,
        reason: str | None = None,
        limit: int = 100,
        after: int | str = 0,
    ) -> Sequence[DeadEntry]:
        """Return up to `limit` entries that match, the oldest of each store first, after the id `after`.

        The entries of a failure group are returned newest first, and `after` is the id of the last entry of the page
        before. A page of a group, or of a task, takes the same time in any dead set. With a queue or a reason, or with
        a task and a group, entries are read one by one until `limit` match: a million takes a second.
        """
        check_number("limit", limit, least=1, of="entries")
        which = which_of(group, task, queue, reason)
        first, number = self._place_of(after)
        found: list[DeadEntry] = []

        def read(store: Store) -> Sequence[DeadEntry]:
            place, rest = number if store is first else 0, limit - len(found)
            if group is None:
                page = partial(dead.page, after=place, limit=rest, which=which)
            else:
                page = partial(dead.newest, before=place or None, limit=rest, which=which)
            return [self._entry(store, row) for row in self._ask(store, page)]

        for entry in self._of_each(read, lambda store: store.place >= first.place and len(found) < limit):
            found.append(entry)  # separately: the rest is computed from their number
        return found

    def groups(self) -> dict[str, int]:
        """Count all entries by their failure group, the largest first; reads a million in a second."""
        counts: Counter[str] = Counter()
        for found in self._of_each(lambda store: [self._ask(store, dead.groups)]):
            counts.update(found)
        return dict(sorted(counts.items(), key=lambda one: (-one[1], one[0])))

    def count(
        self, *, group: str | None = None, task: str | None = None, queue: str | None = None, reason: str | None = None
    ) -> int:
        """Count the entries that match; reads all entries, a million in a second."""
        count = partial(dead.count_matching, which=which_of(group, task, queue, reason))
        return sum(self._of_each(lambda store: [self._ask(store, count)]))

    def get(self, entry_id: int | str) -> DeadEntry:
        """Return one entry; raises JobNotFoundError if it does not exist."""
        store, number = self._place_of(entry_id)
        row = self._ask(store, lambda executor: dead.get(executor, number))
        if row is None:
            raise JobNotFoundError(f"The dead set has no entry {entry_id}: it was retried or deleted, or never was.")
        return self._entry(store, row)

    def for_task_id(self, task_id: str) -> DeadEntry | None:
        """Return the newest entry of a durable task, or of a job's asking, by its Celery id; None if there is none."""
        task_id = text_of(task_id)
        if not is_keepable(task_id):
            return None

        def read(store: Store) -> Sequence[DeadEntry]:
            row = self._ask(store, lambda executor: dead.of_task(executor, task_id))
            return [] if row is None else [self._entry(store, row)]

        return next(iter(self._of_each(read)), None)

    def retry(self, entry_id: int | str) -> Any:
        """Try an entry again, which takes it out of the dead set.

        A job is forced to run, and returned. The message of a durable task is published again with its task id,
        with its losses set to zero and without its `expires`; returns its Celery result.
        """
        entry = self.get(entry_id)
        if entry.job_id is None:
            store, number = self._place_of(entry_id)
            if not self._revive(store, [number]):
                raise burials.not_revived(entry_id, entry.task_id)
            return self._runtime.tasks.result(str(entry.task_id))
        return self._force(entry.job_id)

    def retry_all(  # noqa: PLR0913 - what entries are chosen by, and who is told of them
        self,
        *,
        group: str | None = None,
        task: str | None = None,
        queue: str | None = None,
        reason: str | None = None,
        limit: int | None = None,
        progress: Progress | None = None,
        skipped: Skipped | None = None,
    ) -> int:
        """Try up to `limit` matching entries again, in the order in which they failed; returns how many were retried.

        Messages of durable tasks go a page at a time, each in one statement. An entry that was buried after the call
        began is not retried, so that a task that fails again is not tried for ever. `progress` is called with the
        number of entries retried since its last call; `skipped` with the id of each entry that cannot be retried, and
        the error that says why.
        """
        which = which_of(group, task, queue, reason)
        if limit is not None:
            check_number("limit", limit, least=1, of="entries")
        left = math.inf if limit is None else limit

        def retry(store: Store) -> Iterator[int]:
            nonlocal left
            for number in self._retry_in(store, left, skipped, which):
                left -= number
                yield number

        return _total(self._of_each(retry, lambda store: left > 0), progress)

    def delete(self, entry_id: int | str) -> bool:
        """Remove an entry for good, a job with all jobs below it; False if one of these jobs is not finished."""
        store, number = self._place_of(entry_id)
        return self._delete(store, number, self.get(entry_id).job_id)

    def purge(  # noqa: PLR0913 - what entries are chosen by, and who is asked and told of them
        self,
        *,
        older_than: timedelta | float | None = None,
        keep: int | None = None,
        group: str | None = None,
        task: str | None = None,
        queue: str | None = None,
        reason: str | None = None,
        progress: Progress | None = None,
        confirm: Callable[[int, int], object] | None = None,
    ) -> int:
        """Remove entries older than this (a timedelta or seconds), and all but the newest `keep`; returns how many.

        A job is removed with all jobs below it, and stays if one of them is not finished. With a group, task, queue or
        reason only matching entries are removed; without `older_than` and `keep`, all that match. `keep` counts all
        entries of a store. An entry that was buried after the call began stays. Reads the whole dead set if no entry is
        old enough, a million entries in a second.

        `confirm` is called before anything is removed, with the number of entries and of jobs among them; to keep them,
        it raises. `progress` is called with the number of entries removed since its last call.
        """
        which = which_of(group, task, queue, reason)
        if older_than is None and keep is None and not any(value is not None for value in which.values()):
            raise InvalidValueError(
                "purge() needs older_than=, keep=, group=, task=, queue= or reason=: say which entries are to be "
                "deleted."
            )
        if keep is not None:
            check_number("keep", keep, of="entries")
        age_s = check_age("older_than", older_than)
        if age_s is None and keep is None:
            age_s = 0.0
        retention = Retention.of({"older_than": age_s, "keep": keep})

        def chosen(store: Store) -> list[tuple[Store, dict[str, Any]]]:
            bounds = self._ask(store, partial(dead.Bounds.read, retention=retention))
            return [(store, {"which": which, "bounds": bounds, "last": self._ask(store, dead.last_id)})]

        in_stores = dict(self._of_each(chosen))
        if confirm is not None:
            counts = [self._ask(store, partial(dead.count_old, **old)) for store, old in in_stores.items()]
            confirm(sum(count.entries for count in counts), sum(count.jobs for count in counts))
        purge = self._of_each(lambda store: self._purge_in(store, in_stores[store]), lambda store: store in in_stores)
        return _total(purge, progress)

    def tasks(self) -> Sequence[str]:
        """Return the names of the tasks that have entries, in order; the time that it takes grows with their number."""
        return sorted(set(self._of_each(lambda store: self._ask(store, dead.tasks))))

    # ------------------------------------------------------------------------------------------------------------

    def _all(self, store: Store) -> Iterator[DeadEntry]:
        after = 0
        while rows := self._ask(store, partial(dead.page, after=after, limit=PAGE)):
            after = rows[-1].id
            yield from [self._entry(store, row) for row in rows]

    def _ask(self, store: Store, ask: Callable[[Transaction], T]) -> T:
        """Ask one store, and wait for its answer as long as commands do."""
        return store.connections.read(ask, within_s=self._stores.look_s(store))

    def _of_each(
        self, do: Callable[[Store], Iterable[T]], where: Callable[[Store], bool] = lambda store: True
    ) -> Iterator[T]:
        """Yield the results of one store after the other; if a store stops answering, its results until then.

        Raises StoreUnavailableError if no store answered to the end.
        """
        answered = False
        failure: StoreUnavailableError | None = None
        for store in self._stores:
            if not where(store):
                continue
            try:
                yield from do(store)
                answered = True
            except StoreUnavailableError as error:
                failure = error
                if self._stores.several:
                    logger.warning("The dead set of this store is passed over. %s: %s", store.where, error)
        if failure is not None and not answered:
            raise failure

    def _place_of(self, entry_id: int | str) -> tuple[Store, int]:
        """Return an entry's store, and its number there."""
        name, _, number = ("" if isinstance(entry_id, bool) else text_of(entry_id)).rpartition(":")
        if not number.isascii() or not number.isdecimal() or len(number) > MOST_DIGITS:
            raise InvalidValueError(f"{shown(entry_id)} is no id of the dead set: a number, or a store's name:number.")
        return self._stores.named(name) if name else self._stores[0], int(number)

    def _retry_in(self, store: Store, limit: float, skipped: Skipped | None, which: dead.Which) -> Iterator[int]:
        """Yield, page by page, how many entries were retried."""
        retried, after, last = 0, 0, self._ask(store, dead.last_id)
        while after < last and retried < limit:
            page = int(min(PAGE, limit - retried))
            rows = self._ask(store, partial(dead.page, after=after, limit=page, which=which))
            if not rows:
                break
            after = rows[-1].id
            rows = [row for row in rows if row.id <= last]
            messages = [row.id for row in rows if row.job_id is None]
            if messages:
                revived = self._revive(store, messages)
                retried += revived
                yield revived
                if revived < len(messages) and skipped is not None:
                    self._tell_of_stuck(store, messages, skipped)
            for row in rows:
                if row.job_id is not None and self._forced(store, row, skipped):
                    retried += 1
                    yield 1

    def _tell_of_stuck(self, store: Store, numbers: Sequence[int], skipped: Skipped) -> None:
        """Report each of these messages that is still in the dead set to `skipped`."""
        for row in self._ask(store, partial(dead.there, entry_ids=numbers)):
            entry_id = burials.entry_id_of(self._stores.label_of(store), row.id)
            skipped(entry_id, burials.not_revived(entry_id, row.task_id))

    def _forced(self, store: Store, row: Any, skipped: Skipped | None) -> bool:
        """Force the job of an entry to run; False if it refuses, so that the other entries are still retried."""
        try:
            self._force(row.job_id)
        except StoreUnavailableError:
            raise
        except SideJobError as error:
            entry_id = burials.entry_id_of(self._stores.label_of(store), row.id)
            logger.warning("Entry %s of the dead set was not retried: %s", entry_id, error)
            if skipped is not None:
                skipped(entry_id, error)
            return False
        return True

    def _purge_in(self, store: Store, old: Mapping[str, Any]) -> Iterator[int]:
        """Yield for each old entry whether it was removed."""
        after = 0
        page = partial(dead.old_page, limit=PAGE, **old)
        while rows := self._ask(store, partial(page, after=after)):
            after = rows[-1].id
            yield from (self._delete(store, row.id, row.job_id) for row in rows)

    def _revive(self, store: Store, numbers: Sequence[int]) -> int:
        """Publish messages again; if a store does not answer in time (StoreUnavailableError), it may still do so."""
        with store.connections.talking(within_s=self._stores.look_s(store)):
            return burials.revive(self._runtime.at(store), numbers)

    def _force(self, job_id: int) -> Job:
        job = Job(job_id, runtime=self._runtime)
        asked = job.run(force=True)
        return asked if asked is not None else job

    def _delete(self, store: Store, number: int, job_id: int | None) -> bool:
        if job_id is None:
            return self._ask(store, lambda executor: dead.delete_message(executor, number))
        return delete_finished_tree(self._runtime, job_id, FINISHED)

    def _entry(self, store: Store, row: Any) -> DeadEntry:
        hide, label = self._runtime.settings.redacted, self._stores.label_of(store)
        return DeadEntry(
            id=burials.entry_id_of(label, row.id),
            **picked(row, "job_id", "task_id", "task", "queue", "reason", "died_at", "retries"),
            group=row.failure_group,
            error=str(hide(row.error or "")),
            traceback=None if row.traceback is None else str(hide(row.traceback)),
            store=label,
            loss=_loss_of(row.payload, hide),
            **(_of_message(row.payload, hide) if row.job_id is None else {}),
        )


def which_of(
    group: str | None = None, task: str | None = None, queue: str | None = None, reason: str | None = None
) -> dead.Which:
    """Return filters; raises InvalidValueError for an unknown reason, and for other texts that no row can contain."""
    check_texts(group=group, task=task, queue=queue)
    if reason is not None and reason not in REASONS:
        near = did_you_mean(reason, REASONS) if isinstance(reason, str) else ""
        raise InvalidValueError(f"reason is one of {', '.join(REASONS)}; not {shown(reason)}.{near}")
    return {"failure_group": group, "task": task, "queue": queue, "reason": reason}


def _total(numbers: Iterable[int], progress: Progress | None) -> int:
    """Add up the numbers, and report each to `progress` as it comes."""
    total = 0
    for number in numbers:
        total += number
        if progress is not None:
            progress(number)
    return total


def _loss_of(payload: str, hide: Callable[[Any], Any]) -> Mapping[str, Any] | None:
    """Return the facts of the loss in an entry; None if there was none, or this version cannot read it."""
    try:
        kept = json.loads(payload).get("loss")
        return None if kept is None else Loss.of_facts(kept).redacted(hide).facts
    except (ValueError, TypeError, AttributeError):
        return None


def _of_message(payload: str, hide: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the visible parts of a kept message without decoding its body; none if this version cannot read it."""
    try:
        kept = json.loads(payload)
        publication = json.loads(kept["publication"])
    except (ValueError, LookupError, TypeError):
        return {}
    headers = headers_of(kept["publication"])
    if not headers:
        return {}
    shown = [str(hide(text)) for text in (headers.get("argsrepr"), headers.get("kwargsrepr")) if text]
    return {
        "losses": kept.get("losses", 0),
        "arguments": " ".join(shown) or None,
        "history": tuple(publication.get("deaths") or ()),
    }
