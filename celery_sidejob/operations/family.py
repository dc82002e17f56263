"""New jobs, their parents and their further names, as the changes of one transaction make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..model.changes import AddAlias, Adopt, Disown, NewJob, RemoveAlias
from ..model.errors import (
    AliasTakenError,
    ChildNameTakenError,
    CycleError,
    HasParentError,
    IllegalMoveError,
    InvalidAliasError,
    InvalidValueError,
    NotAChildError,
)
from ..model.messages import Doorbell
from ..model.status import Status
from ..store import aliases, jobs, ports, state, trees
from ..store.errors import Moved
from ..store.statement import Executor, violated
from .mailboxes import port_row
from .runtime import Aftermath, Move, Runtime
from .touched import FAN_OUT, Touched


class Family:
    """The jobs that a transaction makes and those whose parents or aliases it changes. `own`: the run's own job."""

    def __init__(
        self, runtime: Runtime, executor: Executor, touched: Touched, aftermath: Aftermath, *, own: int | None = None
    ) -> None:
        self._look_after_s = runtime.settings.lost_after
        self._executor = executor
        self._touched = touched
        self._aftermath = aftermath
        self._own = own

    def create(self) -> None:
        """Create the new jobs, with their ports, aliases and state."""
        new = list(self._touched.new.values())
        if not new:
            return
        executor = self._executor
        for job in new:
            self._check_parent(job)
        for row in insert(executor, new, look_after_s=self._look_after_s):
            if row.for_run is not None:
                job = self._touched.new[row.job_id]
                self._aftermath.doorbells.append(Doorbell.of(job.id, job, row, job.options))
        for job in new:
            self._touched.statuses[job.id] = Status.QUEUED
            self._aftermath.moves.append(Move(job.id, job.task, None, Status.QUEUED))
        rows = [port_row(job.id, port) for job in new for port in job.ports]
        if rows:
            for row in ports.put(executor, rows):
                self._touched.ports[row.job_id, row.direction, row.name] = row
        named = [(alias, job.id) for job in new for alias in job.aliases]
        if named:
            self._add_aliases(named)
        initial = {(job.id, key): value for job in new for key, value in job.state.items()}
        if initial:
            state.put(executor, initial)

    def add_alias(self, change: AddAlias) -> None:
        """Give a job a further name."""
        self._add_aliases([(change.name, change.job_id)])

    def remove_alias(self, change: RemoveAlias) -> None:
        """Take a name from its job."""
        if not aliases.remove(self._executor, change.name, change.job_id):
            raise InvalidAliasError(f"Job {change.job_id} has no alias {change.name!r}; see job.aliases.")

    def adopt(self, change: Adopt) -> None:
        """Make a job without a parent a child."""
        parent, child = change.parent_id, change.child_id
        if (above := self._touched.parents[child]) is not None:
            raise HasParentError(f"Job {child} is a child of job {above}; disown it there first.")
        if self._touched.statuses[parent] in (Status.TERMINATING, Status.TERMINATED):
            raise IllegalMoveError(f"Job {parent} is {self._touched.statuses[parent]}: it takes no more children.")
        if child in trees.ancestors(self._executor, parent):
            raise CycleError(f"Job {parent} cannot adopt job {child}, which is itself or one of its ancestors.")
        if jobs.child(self._executor, parent, change.name) is not None:
            raise child_name_taken((parent, change.name))
        jobs.set_parent(self._executor, child, parent_id=parent, name=change.name)
        self._touched.parents[child] = parent

    def disown(self, change: Disown) -> None:
        """Make a child a job without a parent."""
        child, parent_id = change.child, change.parent_id
        if isinstance(child, str):
            child_id = jobs.child(self._executor, parent_id, child)
        else:
            child_id = child if jobs.parents(self._executor, [child]).get(child) == parent_id else None
        if child_id is None:
            raise NotAChildError(f"Job {parent_id} has no child {child!r}; see job.children.")
        if child_id not in self._touched.statuses:
            raise Moved(f"another job became child {child!r} of job {parent_id}")
        jobs.set_parent(self._executor, child_id, parent_id=None, name=None)
        self._touched.parents[child_id] = None

    def _check_parent(self, job: NewJob) -> None:
        if job.parent_id is None or job.parent_id in self._touched.new:
            return
        status = self._touched.statuses[job.parent_id]
        if status in (Status.TERMINATING, Status.TERMINATED) and job.parent_id != self._own:
            raise IllegalMoveError(
                f"Job {job.parent_id} is {status}: it takes no more children. "
                "Force a run of it first, or create the job without a parent."
            )

    def _add_aliases(self, named: Sequence[tuple[str, int]]) -> None:
        wanted: dict[str, int] = {}
        for name, job_id in named:
            wanted.setdefault(name, job_id)
        owners = aliases.add(self._executor, wanted.items())
        for name, job_id in named:
            if owners[name] != job_id:
                raise alias_taken(name, owners[name])


def insert(executor: Executor, new: Sequence[NewJob], *, look_after_s: float) -> Sequence[Any]:
    """Write the rows of new jobs, and return what `jobs.insert` does."""
    try:
        return jobs.insert(
            executor, map(_job_row, new), look_after_s=look_after_s,
            first_look_s=jobs.FIRST_LOOK_S if len(new) < FAN_OUT else 10.0,
        )  # fmt: skip
    except Exception as error:
        taken = _taken(violated(error), new)
        if taken is None:
            raise
        raise taken from error


def child_name_taken(*children: tuple[int | None, str | None]) -> ChildNameTakenError:
    """Return the error for children, each its parent and its name, of which one's name another child has."""
    named = ", ".join(f"{name!r} of job {parent_id}" for parent_id, name in children if name is not None)
    return ChildNameTakenError(f"A child's name is taken already: {named}. Choose another name, or see job.children.")


def alias_taken(name: str, owner_id: int) -> AliasTakenError:
    """Return the error for an alias that another job has."""
    return AliasTakenError(f"Alias {name!r} belongs to job {owner_id}. Remove it there first, or choose another.")


def _taken(constraint: str | None, new: Sequence[NewJob]) -> Exception | None:
    """Return our own error for a name or a task id that another row has."""
    if constraint == "jobs_parent_id_name_key":
        return child_name_taken(*((job.parent_id, job.child_name) for job in new))
    if constraint in ("askings_pkey", "messages_pkey"):
        ids = ", ".join(job.task_id for job in new[:3])
        return InvalidValueError(f"Another asking has this task_id already: {ids}. Leave it out, or give a new one.")
    return None


def _job_row(job: NewJob) -> dict[str, Any]:
    return {
        "id": job.id or None,
        "task": job.task,
        "queue": job.queue,
        "priority": job.priority,
        "args": job.args,
        "kwargs": job.kwargs,
        "parent_id": job.parent_id,
        "name": job.child_name,
        "created_by": job.created_by,
        "max_losses": job.max_losses,
        "retention_s": job.retention_s,
        "task_id": job.task_id,
        "options": job.options,
        "due_at": job.due_at.isoformat() if job.due_at else None,
        "wait_s": job.wait_s,
    }
