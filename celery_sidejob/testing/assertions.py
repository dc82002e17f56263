"""Assertions about the store; each message lists what the store has instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..deadset import DeadEntry
from ..hooks.messages.kept_message import decoded, delivered
from ..jobs.job import Job
from ..jobs.port import Port
from ..jobs.steps import Step
from ..model.durable import Message
from ..model.status import Status
from ..store import job_lists
from ..store.outbox.doorbells import undone
from .subject import call_of, shown, sidejob_of

MOST = 1000
"""The most jobs, messages, entries or packets that an assertion reads."""
LISTED = 20


@dataclass(frozen=True, slots=True)
class Waiting:
    """A durable task that was called and is not finished."""

    task_id: str
    task: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    queue: str

    def __str__(self) -> str:
        return f"durable task {call_of(self.task, self.args, self.kwargs)} [queue {self.queue}]"


def assert_enqueued(
    task: Any,
    args: Iterable[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    queue: str | None = None,
    transaction: Any = None,
    sidejob: Any = None,
) -> Job | Waiting:
    """Return the first queued job or unfinished durable task that matches; AssertionError if there is none.

    `task` is a task or its name. A parameter that is not given is not compared. Work that is not due yet counts too.
    With `transaction` (as everywhere: a connection, or the alias of a Django database) the uncommitted work of that
    transaction counts too: inside Django's `TestCase`, which never commits, there is no other.
    """
    there, found = _enqueued(task, args, kwargs, queue, transaction, sidejob)
    if not found:
        raise AssertionError(f"{_wanted(task, args, kwargs, queue)} is not enqueued; {_listed(there)}")
    return found[0]


def refute_enqueued(
    task: Any,
    args: Iterable[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    queue: str | None = None,
    transaction: Any = None,
    sidejob: Any = None,
) -> None:
    """Raise AssertionError if `assert_enqueued` would find a job or task."""
    _, found = _enqueued(task, args, kwargs, queue, transaction, sidejob)
    if found:
        raise AssertionError(f"{_wanted(task, args, kwargs, queue)} is enqueued; {_listed(found)}")


def assert_dead(
    task: Any = None, *, error: str | None = None, job: Job | None = None, sidejob: Any = None
) -> DeadEntry:
    """Return the newest entry of the dead set of a task, or of a job, whose error contains this text.

    AssertionError if there is none.
    """
    name = getattr(task, "name", task)
    entries: Sequence[DeadEntry] = sidejob_of(sidejob or job or task).dead.list(limit=MOST)
    for entry in reversed(entries):
        of_job = job is None or entry.job_id == job.id
        if of_job and name in (None, entry.task) and (error is None or error in entry.error):
            return entry
    wanted = [name, f"of job {job.id}" if job is not None else None, f"with {error!r}" if error is not None else None]
    there = [f"{entry.task} [{entry.reason}: {entry.error}]" for entry in entries]
    raise AssertionError(f"No entry {' '.join(filter(None, wanted))} is in the dead set; {_listed(there)}")


def assert_step(job: Job, name: str, value: Any = ..., *, error: str | None = None) -> Step:
    """Return a step of an uncompleted job, by its name, or by name and number as ``"charge#2"``.

    AssertionError unless it is done, with this `value`, if given, or with an error that contains this text.
    """
    there = job.steps
    found = next((step for step in there if str(step) == name), None)
    listed = "; ".join(f"{step} [{_state_of(step)}]" for step in there) or "none"
    if found is None:
        over = " Its steps went into its history when it completed." if job.refresh().status == Status.COMPLETED else ""
        raise AssertionError(f"{shown(job)} has no step {name!r}; it has: {listed}.{over}")
    failed = found.error if found.done else None
    wrong = not found.done or (failed is None) != (error is None) or (value is not ... and found.value != value)
    if wrong or (failed is not None and str(error) not in f"{failed['type']}: {failed['message']}"):
        wanted = f"failed with {error!r}" if error is not None else "done" if value is ... else f"done with {value!r}"
        raise AssertionError(f"Step {name!r} of {shown(job)} is not {wanted}; the steps are: {listed}.")
    return found


def _state_of(step: Step) -> str:
    if step.error is not None:
        return f"{'failed' if step.done else 'tried again'}: {step.error['type']}: {step.error['message']}"
    return f"done: {step.value!r}" if step.done else "waits"


def assert_packets(port: Port, values: Iterable[Any]) -> None:
    """Raise AssertionError unless exactly these values wait on a port, in this order; the packets stay on the port."""
    wanted = list(values)
    there = [packet.value for packet in port.peek(MOST + len(wanted))]
    if there != wanted:
        differs = next((n for n, (a, b) in enumerate(zip(there, wanted, strict=False)) if a != b), None)
        first = min(len(there), len(wanted)) if differs is None else differs
        raise AssertionError(f"{port!r} has {there!r}, not {wanted!r}; they differ from number {first} on.")


def _enqueued(
    task: Any, args: Any, kwargs: Any, queue: str | None, transaction: Any, sidejob: Any
) -> tuple[list[Job | Waiting], list[Job | Waiting]]:
    """Return all enqueued work, and the work that matches."""
    owner = sidejob_of(sidejob or task)
    name = getattr(task, "name", task)
    connections = owner.runtime.connections
    reader = connections if transaction is None else connections.borrow(transaction)
    rows = job_lists.page(reader, job_lists.Filters(statuses=[str(Status.QUEUED)]), limit=MOST)
    jobs: list[Job | Waiting] = [Job(row.id, runtime=owner.runtime, row=row) for row in rows]
    there = jobs + [_waiting(owner.app, row) for row in undone(reader, MOST)]
    wanted = None if args is None else list(args)
    found = [
        one
        for one in there
        if one.task == name
        and queue in (None, one.queue)
        and (wanted is None or list(one.args) == wanted)
        and (kwargs is None or one.kwargs == kwargs)
    ]
    return there, found


def _waiting(app: Any, row: Any) -> Waiting:
    given = delivered(Message.of_row(row))
    args, kwargs, _ = decoded(app, given["body"], given["headers"], given["content-type"], given["content-encoding"])
    return Waiting(row.task_id, row.task, args, kwargs, row.queue)


def _wanted(task: Any, args: Any, kwargs: Any, queue: str | None) -> str:
    name = str(getattr(task, "name", task))
    call = name if args is None and kwargs is None else call_of(name, list(args or ()), kwargs or {})
    return call if queue is None else f"{call} in queue {queue!r}"


def _listed(there: Sequence[Any]) -> str:
    lines = [shown(one) if isinstance(one, Job) else str(one) for one in there[:LISTED]]
    if len(there) > LISTED:
        lines.append(f"… and {len(there) - LISTED} more")
    return "there are:\n  " + "\n  ".join(lines) if lines else "there is nothing."
