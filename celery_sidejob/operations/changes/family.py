"""The changes of one transaction to jobs, their parents, aliases and tags, and the moves of jobs that are in no run."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ...model import changes
from ...model.errors import HasParentError, IllegalMoveError, InvalidAliasError, NotAChildError
from ...model.names import TRACKED_CHANNEL, alias_taken, child_name_taken, circle
from ...model.status import Status
from ...store import asks, jobs, ports, trees
from ...store.errors import Moved
from ..gates import capacity
from ..lock_set import LockSet
from . import batches, dependencies, unique_keys
from .deletion import is_being_deleted
from .mailboxes import add_ports, port_row


class Family:
    """The jobs that a transaction makes or moves, or gives other parents or aliases. `own`: the run's own job."""

    def __init__(self, lock_set: LockSet, *, own: int | None) -> None:
        self._check_interval_s = lock_set.settings.lost_after
        self._executor = lock_set.executor
        self._lock_set = lock_set
        self._after_commit = lock_set.after_commit
        self._own = own

    def create(self, new: Sequence[changes.NewJob]) -> None:
        """Create new jobs, with their ports, aliases, state and tags."""
        if not new:
            return
        executor = self._executor
        for job in new:
            self._check_parent(job)
        unique_keys.take(executor, new)
        new = self._admitted(dependencies.judge(new, self._lock_set))
        for row in jobs.insert(executor, new, check_interval_s=self._check_interval_s):
            self._lock_set.statuses[row.job_id] = Status.QUEUED
            self._after_commit.created(self._lock_set.new[row.job_id], row)
        dependencies.add(new, self._lock_set)
        batches.join_new(executor, new)
        rows = [port_row(job.id, port) for job in new for port in job.ports]
        if rows:
            made = ports.put(executor, rows)
            self._after_commit.ports_changed(made)
            for row in made:
                self._lock_set.ports[row.job_id, row.direction, row.name] = row
        named = [(alias, job.id) for job in new for alias in job.aliases]
        if named:
            self._add_aliases(named)
        initial = {(job.id, key): value for job in new for key, value in job.state.items()}
        if initial:
            jobs.put_state(executor, initial)
        tagged = [(job.id, job.tags) for job in new if job.tags]
        if tagged:
            jobs.add_tags(executor, tagged)

    def _admitted(self, new: Sequence[changes.NewJob]) -> Sequence[changes.NewJob]:
        """Take the slots of new jobs in their capacity pools, after all other locks."""
        if not any(map(capacity.judged, new)):
            return new
        try:
            return capacity.admit(self._executor, new)
        except capacity.PoolFullError as full:
            if self._own is None:
                raise
            raise capacity.PoolFilledError(full.admission) from None

    def move(self, change: changes.Move) -> bool:
        """Move a job to another queue, task, arguments or time; returns whether it must be asked to run now."""
        job_id, lock_set, after_commit = change.job_id, self._lock_set, self._after_commit
        status, before = lock_set.statuses[job_id], lock_set.job(job_id)
        in_run = job_id not in lock_set.new and before.unit_no is not None
        check_may_move(job_id, status, in_run=in_run, has_time=change.has_time)
        if change.has_time:
            jobs.forget_times(self._executor, job_id, later=change.is_later)
        moved = jobs.move(
            self._executor, job_id, change.stage, now=change.has_time, check_interval_s=self._check_interval_s
        )
        assert moved is not None  # it is locked
        add_ports(self._executor, job_id, change.stage.ports, after_commit)
        after_commit.silence(job_id)
        after_commit.ring(moved, moved)
        if before.pool not in (None, moved.pool):
            after_commit.pools.add(before.pool)  # it has given up a slot there
        if change.is_later:
            after = asks.set_timer(self._executor, job_id, due_at=change.due_at, wait_s=change.wait_s, ask="run")
            after_commit.moved(moved, status, after.status, after.changes)
            lock_set.statuses[job_id] = after.status
        return change.has_time and not change.is_later and moved.task_id is None

    def apply(self, change: changes.FamilyChange | changes.FindingChange) -> None:
        """Change aliases, parents or tags, or whether a job is tracked; listeners of tracked jobs are told of that."""
        match change:
            case changes.AddAlias():
                self._add_aliases([(change.name, change.job_id)])
            case changes.RemoveAlias():
                if not jobs.remove_alias(self._executor, change.name, change.job_id):
                    raise InvalidAliasError(f"Job {change.job_id} has no alias {change.name!r}; see job.aliases.")
            case changes.Adopt():
                self._adopt(change)
            case changes.Disown():
                self._disown(change)
            case changes.Tag():
                jobs.add_tags(self._executor, [(change.job_id, change.names)])
            case changes.Untag():
                jobs.remove_tags(self._executor, change.job_id, change.names)
            case changes.Track():
                jobs.track(self._executor, change.job_id, on=change.on)
                self._after_commit.tracking_changed = True
                told = json.dumps({"job": change.job_id, "tracked": change.on})
                self._after_commit.announcements.append((TRACKED_CHANNEL, told))

    def _adopt(self, change: changes.Adopt) -> None:
        """Make a job without a parent a child.

        Every change of a parent locks the child first, and every adoption its parent's ancestors. So while this
        transaction holds those locks, no other adoption can change the line of ancestors that is read here.
        """
        parent, child = change.parent_id, change.child_id
        if (above := self._lock_set.parents[child]) is not None:
            raise HasParentError(f"Job {child} is a child of job {above}; disown it there first.")
        if self._lock_set.statuses[parent] in (Status.TERMINATING, Status.TERMINATED):
            raise IllegalMoveError(f"Job {parent} is {self._lock_set.statuses[parent]}: it takes no more children.")
        line = trees.ancestors(self._executor, parent)
        if child in line:
            raise circle(child, line)
        if not self._lock_set.statuses.keys() >= set(line):
            raise Moved(f"an ancestor of job {parent} was adopted while its ancestors were being read")
        if jobs.child(self._executor, parent, change.name) is not None:
            raise child_name_taken((parent, change.name))
        jobs.set_parent(self._executor, child, parent_id=parent, name=change.name)
        self._lock_set.parents[child] = parent

    def _disown(self, change: changes.Disown) -> None:
        """Make a child a job without a parent."""
        child, parent_id = change.child, change.parent_id
        if isinstance(child, str):
            child_id = jobs.child(self._executor, parent_id, child)
        else:
            child_id = child if jobs.parents(self._executor, [child]).get(child) == parent_id else None
        if child_id is None:
            raise NotAChildError(f"Job {parent_id} has no child {child!r}; see job.children.")
        if child_id not in self._lock_set.statuses:
            raise Moved(f"another job became child {child!r} of job {parent_id}")
        if self._lock_set.statuses[child_id] == Status.TERMINATED and is_being_deleted(self._executor, child_id):
            raise IllegalMoveError(
                f"Job {child_id} is being deleted with the tree that it is in: it cannot be disowned."
            )
        jobs.set_parent(self._executor, child_id, parent_id=None, name=None)
        self._lock_set.parents[child_id] = None

    def _check_parent(self, job: changes.NewJob) -> None:
        if job.parent_id is None or job.parent_id in self._lock_set.new:
            return
        status = self._lock_set.statuses[job.parent_id]
        if status in (Status.TERMINATING, Status.TERMINATED) and job.parent_id != self._own:
            raise IllegalMoveError(
                f"Job {job.parent_id} is {status}: it takes no more children. "
                "Force a run of it first, or create the job without a parent."
            )

    def _add_aliases(self, named: Sequence[tuple[str, int]]) -> None:
        wanted: dict[str, int] = {}
        for name, job_id in named:
            wanted.setdefault(name, job_id)
        owners = jobs.add_aliases(self._executor, wanted.items())
        for name, job_id in named:
            if owners[name] != job_id:
                raise alias_taken(name, owners[name])


def check_may_move(job_id: int, status: str, *, in_run: bool, has_time: bool) -> None:
    """Raise IllegalMoveError if a job with this status cannot be moved."""
    if status in (Status.TERMINATING, Status.TERMINATED):
        raise IllegalMoveError(f"Job {job_id} is {status}: it is not moved. Force a run of it first.")
    if in_run:
        raise IllegalMoveError(
            f"A run of job {job_id} is in progress: move it when that has ended, or with force=True, which takes the "
            "job from that run. In its own body call job.then()."
        )
    if has_time and status == Status.FAILED:
        raise IllegalMoveError(
            f"Job {job_id} has failed: move it without eta= and countdown=, and retry it from the dead set."
        )
