"""The changes of one transaction to jobs, their parents and their aliases."""

from __future__ import annotations

from collections.abc import Sequence

from ...model.changes import AddAlias, Adopt, Disown, FamilyChange, NewJob, RemoveAlias
from ...model.errors import HasParentError, IllegalMoveError, InvalidAliasError, NotAChildError
from ...model.names import alias_taken, child_name_taken, circle
from ...model.status import Status
from ...store import jobs, labels, ports, state, trees
from ...store.errors import Moved
from ...store.statement import Transaction
from ..after_commit import AfterCommit
from ..gates import capacity
from ..lock_set import LockSet
from ..runtime import LocalRuntime
from . import batches, dependencies, finding, unique_keys
from .deletion import is_being_deleted
from .mailboxes import port_row


class Family:
    """The jobs that a transaction makes, and the jobs whose parents or aliases it changes. `own`: the run's own job."""

    def __init__(
        self,
        runtime: LocalRuntime,
        executor: Transaction,
        lock_set: LockSet,
        after_commit: AfterCommit,
        *,
        own: int | None = None,
    ) -> None:
        self._check_interval_s = runtime.settings.lost_after
        self._executor = executor
        self._lock_set = lock_set
        self._after_commit = after_commit
        self._own = own

    def create(self, new: Sequence[NewJob]) -> None:
        """Create new jobs, with their ports, aliases, state and tags."""
        if not new:
            return
        executor = self._executor
        for job in new:
            self._check_parent(job)
        unique_keys.take(executor, new)
        new = self._admitted(dependencies.judge(executor, new, self._lock_set))
        for row in jobs.insert(executor, new, check_interval_s=self._check_interval_s):
            self._lock_set.statuses[row.job_id] = Status.QUEUED
            self._after_commit.created(self._lock_set.new[row.job_id], row)
        dependencies.add(executor, new, self._after_commit)
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
            state.put(executor, initial)
        finding.tag_new(executor, new)

    def _admitted(self, new: Sequence[NewJob]) -> Sequence[NewJob]:
        """Take the slots of new jobs in their capacity pools, after all other locks."""
        if not any(map(capacity.judged, new)):
            return new
        try:
            return capacity.admit(self._executor, new)
        except capacity.PoolFullError as full:
            if self._own is None:
                raise
            raise capacity.PoolFilledError(full.admission) from None

    def apply(self, change: FamilyChange) -> None:
        """Change aliases or parents."""
        match change:
            case AddAlias():
                self._add_aliases([(change.name, change.job_id)])
            case RemoveAlias():
                self._remove_alias(change)
            case Adopt():
                self._adopt(change)
            case Disown():
                self._disown(change)

    def _remove_alias(self, change: RemoveAlias) -> None:
        if not labels.remove_alias(self._executor, change.name, change.job_id):
            raise InvalidAliasError(f"Job {change.job_id} has no alias {change.name!r}; see job.aliases.")

    def _adopt(self, change: Adopt) -> None:
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

    def _disown(self, change: Disown) -> None:
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

    def _check_parent(self, job: NewJob) -> None:
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
        owners = labels.add_aliases(self._executor, wanted.items())
        for name, job_id in named:
            if owners[name] != job_id:
                raise alias_taken(name, owners[name])
