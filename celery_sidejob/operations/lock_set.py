"""The jobs that a set of changes affects: found without locks, then locked, then compared.

The affected jobs are known before they are locked. The rows that decide the set are first read without locks and
compared afterwards; if they changed, the transaction is repeated. One statement locks all jobs in ascending order of
their ids. Two units therefore never deadlock, whatever jobs they write to.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from ..model import changes
from ..model.errors import job_not_found
from ..model.port import WILDCARD
from ..store import jobs, ports, trees
from ..store.errors import Moved
from ..store.statement import Transaction
from .after_commit import AfterCommit
from .runtime import LocalRuntime

TOGETHER = 10_000
"""The most jobs that one transaction terminates or deletes; a larger tree takes several."""

KeptPorts = dict[int, list[Any]]
"""Rows of ports with the parents of their jobs, by job id, as read by an earlier transaction."""


class LockSet:
    """The jobs that changes affect, with their parents and ports, as the transaction knows them, and what follows it.

    `noting`: the transaction is the caller's, so no other job is locked and asks are only noted. Rows of ports among
    the `kept` are not read again; rows that are read are added to it. If a change changes a job's ports, the job's rows
    are removed.
    """

    def __init__(
        self,
        runtime: LocalRuntime,
        executor: Transaction,
        given: Sequence[changes.Change] = (),
        kept: KeptPorts | None = None,
        *,
        noting: bool = False,
    ) -> None:
        self.settings = runtime.settings
        self.executor = executor
        self.noting = noting
        self.after_commit = AfterCommit()
        self._changes = given
        self._kept = {} if kept is None else kept
        self.new = {change.id: change for change in given if isinstance(change, changes.NewJob)}
        self._looked_up: set[int] = set()
        """Jobs that the changes affect but do not name by id."""
        self.rows: dict[int, Any] = {}
        self.statuses: dict[int, str] = {}
        """Statuses by job id, as the changes applied so far leave them; new jobs included."""
        self.parents: dict[int, int | None] = {}
        self.ports: dict[changes.PortKey, Any] = {}
        self.large: set[int] = set()
        """Jobs to terminate with everything below them, which is too much for one transaction."""

    @classmethod
    def of_rows(cls, runtime: LocalRuntime, executor: Transaction, rows: Mapping[int, Any]) -> LockSet:
        """Return the set for jobs that were locked already, {id: row}."""
        affected = cls(runtime, executor)
        affected.add_again(rows)
        return affected

    def add(self, rows: Mapping[int, Any]) -> None:
        """Add jobs that were locked without waiting for them, {id: row}; jobs that it already knows are not changed."""
        for job_id, row in rows.items():
            if not self.knows(job_id):
                self.rows[job_id] = row
                self.statuses[job_id] = row.status

    def add_again(self, rows: Mapping[int, Any]) -> None:
        """Record the rows of locked jobs after changes by this transaction, {id: row}."""
        self.rows |= rows
        self.statuses |= {job_id: row.status for job_id, row in rows.items()}

    def job(self, job_id: int) -> Any:
        """Return the row of an affected job; for a new job, its values."""
        return self.rows.get(job_id) or self.new[job_id]

    def knows(self, job_id: int) -> bool:
        """Tell whether the job is locked, or new."""
        return job_id in self.rows or job_id in self.new

    def lock(self, also: Iterable[int] = (), *, parents: Mapping[int, int | None] | None = None) -> None:
        """Find the jobs that the changes affect, and lock them, with those of `also`, in one statement.

        The `parents` of further jobs, which were read before, are locked with them.
        """
        everything, named = self._find(also, parents)
        if everything and any(isinstance(change, changes.Adopt | changes.Disown) for change in self._changes):
            jobs.lock_exclusively(self.executor, everything)
        self.rows = jobs.lock(self.executor, everything) if everything else {}
        self.statuses = {job_id: row.status for job_id, row in self.rows.items()}
        for job_id in named:
            if job_id not in self.rows and job_id in self._looked_up:
                raise Moved(f"job {job_id} was deleted before it was locked")
            if job_id not in self.rows:
                raise job_not_found(job_id)
            if job_id in self.parents and self.rows[job_id].parent_id != self.parents[job_id]:
                raise Moved(f"job {job_id} has another parent than before it was locked")

    def look(self, locked: Iterable[int] = ()) -> None:
        """In a borrowed transaction: lock only the jobs of `locked`, and judge the others by rows read without locks.

        Raises JobNotFoundError if a job is missing; `rows` then has the existing jobs.
        """
        self.rows = jobs.lock(self.executor, locked) if locked else {}
        ids, _ = self._find(locked)
        others = ids - self.rows.keys()
        if others:
            self.rows |= {row.id: row for row in jobs.find(self.executor, sorted(others))}
        self.statuses = {job_id: row.status for job_id, row in self.rows.items()}
        missing = ids - self.rows.keys()
        if missing:
            raise job_not_found(min(missing))

    def set_port(self, row: Any) -> None:
        """Record a port as the changes leave it."""
        self._kept.pop(row.job_id, None)
        self.ports[row.job_id, row.direction, row.name] = row

    def set_ports(self, job_id: int, rows: Iterable[Any], *, directions: Container[str]) -> None:
        """Record that the changes leave a job these ports and no others of these directions."""
        self._kept.pop(job_id, None)
        self.ports = {key: row for key, row in self.ports.items() if key[0] != job_id or key[1] not in directions}
        self.ports.update({(row.job_id, row.direction, row.name): row for row in rows})

    def _find(
        self, also: Iterable[int] = (), parents: Mapping[int, int | None] | None = None
    ) -> tuple[set[int], list[int]]:
        """Find, without locks, the affected jobs, and the jobs among them that the changes name; without new jobs."""
        known = parents or {}
        affected, upward, downward = self._affected()
        affected.update(also)
        self._looked_up = self._affected_by_family() - affected
        affected |= self._looked_up
        named = sorted((affected | upward | known.keys()) - self.new.keys())
        self.parents = {**known, **{change.id: change.parent_id for change in self.new.values()}}
        self._read_ports()
        self.parents.update({row.job_id: row.parent_id for row in self.ports.values() if row.job_id in upward})
        adopts = any(isinstance(change, changes.Adopt) for change in self._changes)
        if adopts or not upward <= self.parents.keys():  # an adoption may give the ancestors other parents too
            self.parents.update(jobs.parents(self.executor, named))
        upward |= known.keys()
        below = self._find_below(downward) if downward else set()
        everything = set(named) | below
        everything |= {parent for job_id in upward if (parent := self.parents.get(job_id)) is not None}
        return everything - self.new.keys(), named

    def _find_below(self, downward: set[int]) -> set[int]:
        """Find the jobs of trees that are terminated; in larger trees only the roots are locked, and are `large`."""
        found = {row.id for row in trees.subtree(self.executor, downward, most=TOGETHER + 1)}
        self.large = downward if len(found) > TOGETHER else set()
        return set() if self.large else found

    def _affected(self) -> tuple[set[int], set[int], set[int]]:  # noqa: PLR0912, PLR0915 - an arm for each kind of change
        """Return the ids of affected jobs, of jobs whose parent is affected, and of jobs whose subtree is."""
        affected: set[int] = set()
        upward: set[int] = set()
        downward: set[int] = set()
        for change in self._changes:
            match change:
                case changes.NewJob(parent_id=parent_id, replaces=replaces):
                    affected.update(job_id for job_id in (parent_id, replaces) if job_id is not None)
                case changes.Adopt(parent_id=parent_id, child_id=child_id):
                    affected.update((parent_id, child_id))
                    upward.add(child_id)
                case changes.Disown(parent_id=parent_id, child=child):
                    affected.add(parent_id)
                    if isinstance(child, int):
                        affected.add(child)
                case changes.Publish() | changes.Announce() | changes.JoinBatch() | changes.CloseBatch():
                    pass
                case changes.Connect(source=source, targets=targets):
                    affected.update(job_id for job_id, _, _ in (source, *targets))
                    upward.update(job_id for job_id, direction, _ in targets if direction == "out")
                case (
                    changes.Ask(job_id=job_id, of_parent=True)
                    | changes.Write(job_id=job_id, direction="out")
                    | changes.SetDefault(job_id=job_id, direction="out", notify=True)
                ):
                    affected.add(job_id)
                    upward.add(job_id)
                case changes.Terminate(job_id=job_id, tree=True):
                    affected.add(job_id)
                    downward.add(job_id)
                case _:
                    affected.add(change.job_id)
        return affected, upward, downward

    def _affected_by_family(self) -> set[int]:
        """Return children that are disowned by name, and the ancestors of adopting jobs.

        The ancestors are locked too; otherwise two adoptions could close a circle without seeing each other.
        """
        affected: set[int] = set()
        for change in self._changes:
            if isinstance(change, changes.Disown) and isinstance(change.child, str):
                named = jobs.child(self.executor, change.parent_id, change.child)
                affected |= set() if named is None else {named}
            elif isinstance(change, changes.Adopt):
                above: int | None = change.parent_id
                while above in self.new:
                    above = self.new[above].parent_id
                if above is not None:
                    affected.update(trees.ancestors(self.executor, above))
        return affected - self.new.keys()

    def _read_ports(self) -> None:
        """Read the ports of the jobs whose ports are used, unless kept rows have those ports or their patterns.

        Kept rows are older, and are compared under the lock like others. A port that is missing there may have been
        made since.
        """
        used: dict[int, set[tuple[str, str]]] = {}
        for change in self._changes:
            for job_id, direction, name in _ports_used(change):
                if job_id not in self.new:
                    used.setdefault(job_id, set()).add((direction, name))
        unknown = {job_id for job_id, names in used.items() if not self._keeps(job_id, names)}
        for job_id in unknown:
            self._kept[job_id] = []
        for row in ports.of_jobs(self.executor, unknown) if unknown else ():
            self._kept[row.job_id].append(row)
        for job_id in used:
            self.ports.update({(row.job_id, row.direction, row.name): row for row in self._kept[job_id]})

    def _keeps(self, job_id: int, names: set[tuple[str, str]]) -> bool:
        known = {(row.direction, row.name) for row in self._kept.get(job_id, ())}
        return all(name in known or (name[0], WILDCARD) in known for name in names)


def _ports_used(change: changes.Change) -> Sequence[changes.PortKey]:
    """Return the ports that a change reads, writes to or changes one by one."""
    match change:
        case changes.Write() | changes.SetDefault() | changes.SetChannels() | changes.MarkReceived():
            return [(change.job_id, change.direction, change.port)]
        case changes.Connect(source=source, targets=targets):
            return [source, *targets]
    return ()
