"""Making jobs with unique keys: while a transaction makes a job, no other can make a job with the same key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...model.changes import NewJob
from ...model.errors import DuplicateError
from ...model.unique import Unique
from ...store import asks
from ...store.statement import Transaction
from ..hold import BeginsAgainError
from ..lock_set import LockSet


class KeysTakenError(BeginsAgainError):
    """Other jobs than expected have the keys of the jobs to be made, {key: the job that has it}; wrote nothing."""

    def __init__(self, holders: Mapping[str, Any]) -> None:
        shown = ", ".join(f"job {holder.job_id} has {key!r}" for key, holder in holders.items())
        super().__init__(f"The unique keys of new jobs have changed hands meanwhile ({shown or 'they are free'}).")
        self.holders = holders


def take_turn(executor: Transaction, new: Iterable[NewJob]) -> None:
    """Wait until no other transaction makes a job with one of these keys; must come before any lock.

    The other transaction may be a caller's own, which is open for long; no third transaction should wait for us then.
    """
    keys = [job.unique.key for job in new if job.unique is not None]
    if keys:
        asks.take_turn_for_keys(executor, keys)


def check_replaced(lock_set: LockSet) -> None:
    """Raise KeysTakenError if a job that a new job was to replace has ended, so that its key is free."""
    if any(job.replaces is not None and job.replaces not in lock_set.rows for job in lock_set.new.values()):
        raise KeysTakenError({})


def take(executor: Transaction, new: Sequence[NewJob]) -> None:
    """Take the keys of new jobs, also from locked jobs that they replace. Raises KeysTakenError for taken keys.

    `take_turn` was called before, so all other commits are seen. The job that has a key may be this very job, made by
    an earlier try whose answer was lost: the caller finds it by its task id.
    """
    keyed = {job.unique.key: job for job in new if job.unique is not None}
    if not keyed:
        return
    taken = {}
    to_replace = {job.replaces for job in keyed.values()} - {None}
    for holder in asks.key_holders(executor, keyed):
        job = keyed[holder.key]
        if holder.job_id == job.replaces and holder.waits:
            asks.free_key(executor, holder.job_id)
            to_replace.remove(holder.job_id)
        else:
            taken[holder.key] = holder
    if taken or to_replace:  # a job that will be replaced, and so terminated, may have ended
        raise KeysTakenError(taken)


class KeyHeldError(Exception):
    """An unfinished durable task has the key of a call, and nothing was written; `waits`: no run has begun."""

    job_id = None

    def __init__(self, task_id: str, *, waits: bool) -> None:
        super().__init__(task_id)
        self.task_id = task_id
        self.waits = waits


def is_replaced(unique: Unique, holder: Any) -> bool:
    """Tell whether the work that has a key (`task_id`, `job_id`, `waits`) is replaced, rather than used instead.

    Raises DuplicateError if neither is allowed.
    """
    if unique.on_duplicate == "return":
        return False
    if unique.on_duplicate == "replace" and holder.waits:
        return True
    what = f"Task {holder.task_id} is not done" if holder.job_id is None else f"Job {holder.job_id} is open"
    why = "" if unique.on_duplicate == "refuse" else ", and its first run has begun: it cannot be replaced any more"
    raise DuplicateError(
        f"{what} and has the unique key {unique.key!r}{why}.",
        holder.job_id,
        holder.task_id if holder.job_id is None else None,
    )
