"""Schedules: declares, pauses and deletes them, and makes their jobs, once for each time.

The transaction that makes jobs or messages has locked the schedule's row and moves it on. If the process dies before
the commit, nothing was made, and another sweeper makes the jobs; after the commit, no sweeper finds them due.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any

from ..model.errors import ScheduleNotFoundError
from ..model.schedule import Plan, Spec
from ..store import schedules
from ..store.errors import Moved
from ..store.schedules import Row
from ..store.statement import Transaction
from .runtime import Runtime
from .works import Works, Written, follow_works, write


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledWorks(Works):
    """The works that a schedule makes in one transaction; `task_id` is that of the last."""

    count: int
    last_at: datetime
    task_id: str


def make(runtime: Runtime, row: Row, plan: Plan, works: ScheduledWorks, *, wait: bool = False) -> int | None:
    """Make works of a schedule, unless it has changed since its `row` was read; `plan` has the times that remain.

    Returns the id of the last job, 0 for messages; None if nothing was made. With `wait` it waits for a transaction
    that has locked the row.
    """

    def work(executor: Transaction) -> Written | None:
        if schedules.lock_at(executor, row.name, row.revision, wait=wait) is None:
            return None
        written = write(runtime, executor, works)
        schedules.go_on(
            executor,
            plan,
            paused=row.paused_at is not None,
            made=works.count,
            last_at=works.last_at,
            last_job_id=written.last_id or None,
            last_task_id=works.task_id,
        )
        return written

    written = runtime.connections.transact("schedule", work)
    if written is None:
        return None
    follow_works(runtime, works, written)
    return written.last_id


def pass_over(runtime: Runtime, row: Row, plan: Plan) -> bool:
    """Pass over the due times; False if the schedule has changed since its `row` was read, or is locked."""

    def work(executor: Transaction) -> bool:
        if schedules.lock_at(executor, row.name, row.revision) is None:
            return False
        schedules.go_on(executor, plan, paused=False)
        return True

    return runtime.connections.transact("schedule", work)


def declare(runtime: Runtime, name: str, spec: Spec, *, declared: Mapping[str, Any] | None = None) -> bool:
    """Make a schedule, or change it to this; returns whether that changed anything.

    `declared`: its declaration in the configuration, which is applied if it differs from the last one. Times until now
    follow the old timing, and due ones still get their jobs. Later times follow the new timing.
    """

    def work(executor: Transaction) -> bool:
        row = schedules.lock(executor, name)
        now = schedules.clock(executor)
        if row is None:
            anchor = spec.start_at or now
            plan = spec.first_plan(name, anchor=anchor)
            if not schedules.insert(executor, plan, spec, anchor_at=anchor, declared=declared):
                raise Moved(f"schedule {name!r} was made meanwhile")
            return True
        last = row.declared if declared is None else declared
        if row.declared == last and (declared is not None or row.spec == spec):
            return False
        anchor, plan = row.anchor_at, replace(row.plan, jitter_s=spec.jitter_s)
        paused = row.paused_at is not None
        if spec.origin != row.spec.origin:
            anchor = spec.start_at or now
        if spec.timing != row.spec.timing:
            plan = plan.closed(now)
            if not paused:
                plan = plan.then(spec.window(anchor=anchor, after=_later_than(row, now)))
        schedules.change(executor, plan, spec, paused=paused, anchor_at=anchor, declared=last)
        return True

    return runtime.connections.transact("declare-schedule", work)


def get(runtime: Runtime, name: str) -> Row:
    """Return a schedule; raises ScheduleNotFoundError."""
    found = schedules.read(runtime.connections, [name]).get(name)
    if found is None:
        raise not_found(name)
    return found


def not_found(name: str) -> ScheduleNotFoundError:
    """Return the error for a schedule that does not exist."""
    return ScheduleNotFoundError(f"There is no schedule {name!r}: it was never made, or was deleted.")


def pause(runtime: Runtime, name: str, reason: str | None) -> None:
    """Stop making a schedule's jobs. Times that pass during the pause never get one; due jobs wait for its end."""

    def work(executor: Transaction) -> None:
        row = _locked(executor, name)
        plan = row.plan if row.paused_at is not None else row.plan.closed(schedules.clock(executor))
        schedules.pause(executor, plan, reason)

    runtime.connections.transact("pause-schedule", work)


def resume(runtime: Runtime, name: str) -> bool:
    """Continue a schedule, from now; returns whether it was paused."""

    def work(executor: Transaction) -> bool:
        row = _locked(executor, name)
        if row.paused_at is None:
            return False
        window = row.spec.window(anchor=row.anchor_at, after=_later_than(row, schedules.clock(executor)))
        schedules.resume(executor, row.plan.then(window))
        return True

    return runtime.connections.transact("resume-schedule", work)


def delete(runtime: Runtime, name: str) -> bool:
    """Delete a schedule, with its due times; the jobs that it has made stay. Returns whether it existed."""
    return runtime.connections.transact("delete-schedule", partial(schedules.delete, name=name), single=True)


def delete_declared(runtime: Runtime, *, but: Iterable[str]) -> Sequence[str]:
    """Delete the schedules that the configuration once declared, except these."""
    delete = partial(schedules.delete_declared, but=list(but))
    return runtime.connections.transact("delete-schedule", delete, single=True)


def _later_than(row: Row, now: datetime) -> datetime:
    """Return the moment after which new times begin: the store's clock may have been put back behind earlier times."""
    return now if row.last_at is None else max(now, row.last_at)


def _locked(executor: Transaction, name: str) -> Row:
    row = schedules.lock(executor, name)
    if row is None:
        raise not_found(name)
    return row
