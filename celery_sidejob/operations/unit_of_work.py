"""Applying changes: one lock statement, everything judged under it, one commit.

The jobs that will be touched are known before they are locked: what decides the set is read first without locks and
compared afterwards; if it moved, the transaction is repeated. All are locked in one statement in ascending order of
their ids, so that two units never deadlock, whoever they write to.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..model import channel as channels_of
from ..model.changes import (
    AddAlias,
    Adopt,
    Ask,
    Change,
    ConfigurePorts,
    Direction,
    Disown,
    NewJob,
    PortRow,
    Publish,
    RememberInputs,
    RemoveAlias,
    SetChannels,
    SetDefault,
    SetState,
    Terminate,
    UnsetState,
    Write,
)
from ..model.errors import (
    AliasTakenError,
    ChildNameTakenError,
    CycleError,
    HasParentError,
    IllegalMoveError,
    InvalidAliasError,
    InvalidValueError,
    JobNotFoundError,
    NotAChildError,
    PortNotFoundError,
    StoreUnavailableError,
)
from ..model.messages import Doorbell
from ..model.port import WILDCARD
from ..model.status import ASKABLE, Status
from ..store import aliases, asks, jobs, packets, ports, state
from ..store.borrowed import Borrowed
from ..store.connection import Moved
from ..store.statement import Executor, violated
from .runtime import Aftermath, Runtime, bell_of

logger = logging.getLogger("celery_sidejob")

FAN_OUT = 64
"""Above so many subscribers their jobs are not locked: packets and asks are only noted, and applied afterwards."""

PortKey = tuple[int, Direction, str]


def carry_out(runtime: Runtime, name: str, changes: Sequence[Change], transaction: Any = None) -> Applied:
    """Apply changes in one transaction of ours, or as part of the caller's.

    Raises before anything is written; what is asked of a broker that is down is published later.
    """
    if transaction is not None:
        return _lend(runtime, changes, transaction)

    def work(executor: Executor) -> Applied:
        applied = Applied(runtime, executor, changes)
        applied.lock()
        applied.apply()
        return applied

    applied = runtime.connections.transact(name, work, single=all(map(_is_one_statement, changes)) and len(changes) > 0)
    runtime.follow(applied.aftermath)
    apply_noted_asks(runtime, applied.aftermath.noted)
    return applied


def _is_one_statement(change: Change) -> bool:
    """Tell whether such changes, however many, are applied by `jobs.insert` alone, which needs no BEGIN and COMMIT."""
    match change:
        case NewJob(parent_id=None, ports=(), aliases=(), state=state):
            return not state
        case _:
            return False


def _lend(runtime: Runtime, changes: Sequence[Change], transaction: Any) -> Applied:
    """Write changes into the caller's transaction: asks are only noted, no job is locked but for its state."""
    borrowed: Borrowed = runtime.connections.borrow(transaction)
    applied = Applied(runtime, borrowed, changes, noting=True)
    with borrowed.atomic():
        applied.lock()
        applied.apply()
    runtime.follow_commit_of(borrowed, applied.aftermath, lambda job_id: apply_noted_asks(runtime, [job_id]))
    return applied


def apply_noted_asks(runtime: Runtime, job_ids: Iterable[int]) -> None:
    """Judge and apply the due timers of jobs, each in a transaction of its own.

    What noted them is committed, so nothing here may fail it: a locked job, and a store that is away, are left to the
    sweeper.
    """
    waiting = sorted(set(job_ids), reverse=True)
    while waiting:
        job_id = waiting.pop()

        def work(executor: Executor, job_id: int = job_id) -> Aftermath:
            return mature(runtime, executor, job_id)

        try:
            aftermath = runtime.connections.transact("mature", work)
        except StoreUnavailableError as error:
            logger.warning("What was asked of job %d is noted, and applied by the sweeper: %s", job_id, error)
            return
        runtime.follow(aftermath)
        waiting += aftermath.noted  # a recursive termination notes what is below


def mature(runtime: Runtime, executor: Executor, job_id: int) -> Aftermath:
    """Apply a job's due timers in the order in which they were set.

    A timer was accepted when it was set, so a failure since then does not cancel it; only a termination does, by
    deleting it. An ask of a borrowed transaction is judged now.
    """
    aftermath = Aftermath()
    row = jobs.lock_if_free(executor, job_id)
    if row is None:
        return aftermath
    applied = Applied(runtime, executor, (), aftermath=aftermath)
    applied.rows = {job_id: row}
    applied.statuses = {job_id: row.status}
    for timer in asks.take_due(executor, job_id):
        status = applied.statuses[job_id]
        if timer.ask.startswith("terminate"):
            if timer.ask == "terminate_tree":
                # Locking the subtree now could break the ascending order, so it is handed down step by step; the job's
                # own shutdown repeats it for children that come meanwhile.
                below = [child.id for child in jobs.children(executor, job_id)]
                asks.note(executor, below, "terminate_tree")
                aftermath.noted += below
            applied.terminate([job_id], tree=timer.ask == "terminate_tree", timers_before=timer.id)
        elif timer.ask == "force" or status in ASKABLE or (timer.accepted and status == Status.FAILED):
            applied.ask([job_id], force=timer.ask == "force" or status == Status.FAILED)
    return aftermath


class Applied:
    """One transaction's changes: what they touch, what they did, and what follows from them."""

    def __init__(
        self,
        runtime: Runtime,
        executor: Executor,
        changes: Sequence[Change],
        *,
        noting: bool = False,
        own: int | None = None,
        aftermath: Aftermath | None = None,
    ) -> None:
        self._runtime = runtime
        self._executor = executor
        self._changes = changes
        self._noting = noting
        self._own = own
        self._new = {change.id: change for change in changes if isinstance(change, NewJob)}
        self._parents: dict[int, int | None] = {}
        self._ports: dict[PortKey, Any] = {}
        self._subscribers: dict[str, Sequence[Any]] = {}
        self._lifecycle: list[tuple[str, int]] = []
        self._timed: list[Ask] = []
        self.rows: dict[int, Any] = {}
        self.statuses: dict[int, str] = {}
        self.refused: set[int] = set()
        self.aftermath = aftermath if aftermath is not None else Aftermath()

    # -- what is touched -----------------------------------------------------------------------------------------

    def lock(self, also: Iterable[int] = (), *, with_parents: bool = False) -> None:
        """Find out which jobs the changes touch and lock them all, in one statement."""
        touched, upward, downward = self._touched()
        touched.update(also)
        if with_parents:
            upward.update(also)
        executor = self._executor
        touched |= self._touched_by_family()
        # What decides the set is read without locks; jobs that this transaction creates are not there yet.
        old = sorted((touched | upward) - self._new.keys())
        if upward:
            self._parents = jobs.parents(executor, old)
        for change in self._new.values():
            self._parents[change.id] = change.parent_id
        trees = {row.id for row in jobs.subtree(executor, downward)} if downward else set()
        self._read_ports()
        self._read_subscribers()
        everything = set(old) | trees
        everything |= {parent for job_id in upward if (parent := self._parents.get(job_id)) is not None}
        everything |= {row.job_id for found in self._subscribers.values() if len(found) <= FAN_OUT for row in found}
        everything -= self._new.keys()
        if self._noting:
            self._look(everything)
            return
        exclusive = any(isinstance(change, Adopt | Disown) for change in self._changes)
        self.rows = self._lock_rows(everything, exclusive)
        self.statuses = {job_id: row.status for job_id, row in self.rows.items()}
        for name, found in self._subscribers.items():  # one that was deleted meanwhile subscribes to nothing
            if len(found) <= FAN_OUT:
                self._subscribers[name] = [row for row in found if row.job_id in self.rows or row.job_id in self._new]
        for job_id in old:
            if job_id not in self.rows:
                raise JobNotFoundError(f"There is no job {job_id}: it was deleted, or never committed.")
            if job_id in self._parents and self.rows[job_id].parent_id != self._parents[job_id]:
                raise Moved(f"job {job_id} has another parent than before it was locked")
        if downward and {row.id for row in jobs.subtree(executor, downward)} != trees:
            raise Moved("children came or went before the subtree was locked")

    def _lock_rows(self, ids: set[int], exclusive: bool) -> dict[int, Any]:
        if not ids:
            return {}
        if exclusive:
            jobs.lock_exclusively(self._executor, ids)
        return jobs.lock(self._executor, ids)

    def _look(self, ids: set[int]) -> None:
        """In a borrowed transaction: read without locks what a lock would have shown, and judge by it for now."""
        found = jobs.find(self._executor, sorted(ids)) if ids else ()
        self.rows = {row.id: row for row in found}
        self.statuses = {row.id: row.status for row in found}
        missing = ids - self.rows.keys()
        if missing:
            raise JobNotFoundError(f"There is no job {min(missing)}: it was deleted, or never committed.")

    def _touched(self) -> tuple[set[int], set[int], set[int]]:
        """Return the ids of jobs that are touched, those whose parent is, and those whose subtree is."""
        touched: set[int] = set()
        upward: set[int] = set()
        downward: set[int] = set()
        for change in self._changes:
            match change:
                case NewJob(parent_id=parent_id):
                    if parent_id is not None:
                        touched.add(parent_id)
                case Adopt(parent_id=parent_id, child_id=child_id):
                    touched.update((parent_id, child_id))
                    upward.add(child_id)
                case Disown(parent_id=parent_id, child=child):
                    touched.add(parent_id)
                    if isinstance(child, int):
                        touched.add(child)
                case Publish():
                    pass
                case Ask(job_id=job_id, of_parent=True) | Write(job_id=job_id, direction="out"):
                    touched.add(job_id)
                    upward.add(job_id)
                case Terminate(job_id=job_id, tree=True):
                    touched.add(job_id)
                    downward.add(job_id)
                case _:
                    touched.add(change.job_id)
        return touched, upward, downward

    def _touched_by_family(self) -> set[int]:
        """Return children that are disowned by name, and the ancestors of adopting jobs.

        These are locked too, or two adoptions could close a circle behind each other's back.
        """
        touched: set[int] = set()
        for change in self._changes:
            if isinstance(change, Disown) and isinstance(change.child, str):
                named = jobs.child(self._executor, change.parent_id, change.child)
                touched |= set() if named is None else {named}
            elif isinstance(change, Adopt):
                above: int | None = change.parent_id
                while above in self._new:
                    above = self._new[above].parent_id
                if above is not None:
                    touched |= jobs.ancestors(self._executor, above)
        return touched - self._new.keys()

    def _read_ports(self) -> None:
        used = {
            change.job_id
            for change in self._changes
            if isinstance(change, Write | SetDefault | SetChannels) and change.job_id not in self._new
        }
        if used:
            for row in ports.of_jobs(self._executor, used):
                self._ports[row.job_id, row.direction, row.name] = row

    def _read_subscribers(self) -> None:
        names = {change.channel for change in self._changes if isinstance(change, Publish)}
        for change in self._changes:
            match change:
                case Write(direction="out"):
                    names.update(self._channels_of(change))
                case SetChannels(direction="out", channels=given):
                    names.update(given)
                case ConfigurePorts(ports=given_ports):
                    names.update(name for port in given_ports if port.direction == "out" for name in port.channels)
                case _:
                    pass
        for name in names:
            self._subscribers[name] = ports.subscribers(self._executor, channels_of.ancestors(name))

    def _channels_of(self, write: Write) -> Sequence[str]:
        if write.job_id in self._new and (write.job_id, write.direction, write.port) not in self._ports:
            for port in self._new[write.job_id].ports:
                if (port.direction, port.name) == (write.direction, write.port):
                    return port.channels
            return ()
        row = self._ports.get((write.job_id, write.direction, write.port))
        return row.channels if row is not None else ()

    # -- applying ------------------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Apply everything: first what is, then data, then the asks, each kind in the order in which it was asked."""
        self._create_jobs()
        for change in self._changes:
            match change:
                case AddAlias():
                    self._add_aliases([(change.name, change.job_id)])
                case RemoveAlias():
                    self._remove_alias(change)
                case Adopt():
                    self._adopt(change)
                case Disown():
                    self._disown(change)
                case ConfigurePorts():
                    self._configure_ports(change)
                case SetChannels():
                    self._set_channels(change)
                case RememberInputs():
                    jobs.remember_inputs(self._executor, change.job_id, change.memo)
                case _:
                    pass
        self._subscribe_new_ports()
        self._write_state()
        self._write_packets()
        self._apply_lifecycle()

    def _create_jobs(self) -> None:
        new = list(self._new.values())
        if not new:
            return
        executor = self._executor
        for job in new:
            self._check_parent(job)
        try:
            created = jobs.insert(
                executor, (_job_row(job) for job in new), look_after_s=self._runtime.settings.lost_after,
                first_look_s=jobs.FIRST_LOOK_S if len(new) < FAN_OUT else 10.0,
            )  # fmt: skip
        except Exception as error:
            taken = _taken(violated(error), new)
            if taken is None:
                raise
            raise taken from error
        for row in created:
            job = self._new[row.job_id]
            self.aftermath.doorbells.append(
                Doorbell(
                    job_id=job.id,
                    for_run=row.for_run,
                    task_id=job.task_id,
                    task=job.task,
                    queue=job.queue,
                    priority=job.priority,
                    options=json.loads(job.options) if job.options else None,
                )
            )
        for job in new:
            self.statuses[job.id] = Status.QUEUED
            self.aftermath.moves.append((job.id, job.task, None, Status.QUEUED))
        rows = [_port_row(job.id, port) for job in new for port in job.ports]
        if rows:
            for row in ports.put(executor, rows):
                self._ports[row.job_id, row.direction, row.name] = row
        named = [(alias, job.id) for job in new for alias in job.aliases]
        if named:
            self._add_aliases(named)
        initial = {(job.id, key): value for job in new for key, value in job.state.items()}
        if initial:
            state.put(executor, initial)

    def _check_parent(self, job: NewJob) -> None:
        if job.parent_id is None or job.parent_id in self._new:
            return
        if self.statuses[job.parent_id] in (Status.TERMINATING, Status.TERMINATED) and job.parent_id != self._own:
            raise IllegalMoveError(
                f"Job {job.parent_id} is {self.statuses[job.parent_id]}: it takes no more children. "
                "Force a run of it first, or create the job without a parent."
            )

    def _add_aliases(self, named: Sequence[tuple[str, int]]) -> None:
        wanted: dict[str, int] = {}
        for name, job_id in named:
            wanted.setdefault(name, job_id)
        owners = aliases.add(self._executor, wanted.items())
        for name, job_id in named:
            if owners[name] != job_id:
                raise AliasTakenError(
                    f"Alias {name!r} belongs to job {owners[name]}, so job {job_id} cannot have it. "
                    "Remove it there first, or choose another."
                )

    def _remove_alias(self, change: RemoveAlias) -> None:
        if not aliases.remove(self._executor, change.name, change.job_id):
            raise InvalidAliasError(f"Job {change.job_id} has no alias {change.name!r}; see job.aliases.")

    def _adopt(self, change: Adopt) -> None:
        parent, child = change.parent_id, change.child_id
        if (above := self._parents[child]) is not None:
            raise HasParentError(f"Job {child} is a child of job {above}; disown it there first.")
        if self.statuses[parent] in (Status.TERMINATING, Status.TERMINATED):
            raise IllegalMoveError(f"Job {parent} is {self.statuses[parent]}: it takes no more children.")
        if child in jobs.ancestors(self._executor, parent):
            raise CycleError(f"Job {parent} cannot adopt job {child}, which is itself or one of its ancestors.")
        taken = jobs.child(self._executor, parent, change.name)
        if taken is not None:
            raise ChildNameTakenError(f"Job {parent} has a child {change.name!r} already: job {taken}.")
        jobs.set_parent(self._executor, child, parent_id=parent, name=change.name)
        self._parents[child] = parent

    def _disown(self, change: Disown) -> None:
        for child in jobs.children(self._executor, change.parent_id):
            if change.child in (child.id, child.name):
                if child.id not in self.statuses:
                    raise Moved(f"another job became child {change.child!r} of job {change.parent_id}")
                jobs.set_parent(self._executor, child.id, parent_id=None, name=None)
                self._parents[child.id] = None
                return
        raise NotAChildError(f"Job {change.parent_id} has no child {change.child!r}; see job.children.")

    def _configure_ports(self, change: ConfigurePorts) -> None:
        kept = ports.put(self._executor, [_port_row(change.job_id, port) for port in change.ports])
        ports.keep_only(self._executor, change.job_id, [row.id for row in kept])
        self._ports = {key: row for key, row in self._ports.items() if key[0] != change.job_id}
        self._ports.update({(row.job_id, row.direction, row.name): row for row in kept})

    def _set_channels(self, change: SetChannels) -> None:
        row = self._port((change.job_id, change.direction, change.port))
        port = PortRow(change.direction, change.port, row.default_value, change.channels)
        (row,) = ports.put(self._executor, [_port_row(change.job_id, port)])
        self._ports[row.job_id, row.direction, row.name] = row

    def _subscribe_new_ports(self) -> None:
        """Have what is published here also reach the ports that these very changes subscribe."""
        if not self._subscribers or not any(
            isinstance(change, NewJob | SetChannels | ConfigurePorts) for change in self._changes
        ):
            return
        for name in self._subscribers:
            found = ports.subscribers(self._executor, channels_of.ancestors(name))
            if not self._noting and len(found) <= FAN_OUT and any(row.job_id not in self.statuses for row in found):
                raise Moved(f"somebody subscribed to {name!r} before the subscribers were locked")
            self._subscribers[name] = found

    def _write_state(self) -> None:
        values: dict[tuple[int, str], str] = {}
        for change in self._changes:
            if isinstance(change, SetState):
                values.update({(change.job_id, key): value for key, value in change.values.items()})
            elif isinstance(change, UnsetState):
                for key in change.keys:
                    values.pop((change.job_id, key), None)
                state.remove(self._executor, change.job_id, change.keys)
        if values:
            state.put(self._executor, values)

    def _write_packets(self) -> None:
        rows: list[tuple[int, str, str | None, str | None]] = []
        for change in self._changes:
            match change:
                case Write(as_default=True):
                    port = self._port((change.job_id, change.direction, change.port))
                    ports.set_default(self._executor, port.id, change.packets[-1][0])
                    self._notify(change)
                case Write():
                    port = self._port((change.job_id, change.direction, change.port))
                    rows += [(port.id, *packet) for packet in change.packets]
                    self._notify(change)
                    for name in self._channels_of(change) if change.direction == "out" else ():
                        for value, context, _ in change.packets:
                            rows += self._publish(name, value, context)
                case SetDefault():
                    port = self._port((change.job_id, change.direction, change.port))
                    ports.set_default(self._executor, port.id, change.value)
                case Publish():
                    rows += self._publish(change.channel, change.value, change.context)
                case Ask() | Terminate():
                    self._lifecycle_of(change)
                case _:
                    pass
        if rows:
            packets.write(self._executor, rows)

    def _port(self, key: PortKey) -> Any:
        """Return the port's row; one that the task allows by `"*"` is created by its first use."""
        if key in self._ports:
            return self._ports[key]
        job_id, direction, name = key
        pattern = self._ports.get((job_id, direction, WILDCARD))
        if pattern is None:
            raise PortNotFoundError(
                f"Job {job_id} has no {direction}put port {name!r}. Give it when the job is made ({direction}ports=), "
                f'or let the task allow further ports with "*".'
            )
        port = PortRow(direction, name, pattern.default_value)
        self._ports[key] = ports.put(self._executor, [_port_row(job_id, port)])[0]
        return self._ports[key]

    def _publish(self, name: str, value: str, context: str | None) -> list[tuple[int, str, str | None, str | None]]:
        self.aftermath.published.append((name, value))
        with_channel = json.dumps({**(json.loads(context) if context else {}), "channel": name})
        found = self._subscribers[name]
        for row in found:
            if len(found) > FAN_OUT:
                self._lifecycle.append(("note", row.job_id))
            else:
                self._lifecycle.append(("nudge", row.job_id))
        return [(row.port_id, value, with_channel, None) for row in found]

    def _notify(self, change: Write) -> None:
        if not change.notify:
            return
        if change.direction == "in":
            self._lifecycle.append(("nudge", change.job_id))
            return
        reader = self._parents.get(change.job_id)
        if reader is not None:
            self._lifecycle.append(("nudge", reader))

    def _lifecycle_of(self, change: Ask | Terminate) -> None:
        if isinstance(change, Terminate):
            self._lifecycle.append(("terminate_tree" if change.tree else "terminate", change.job_id))
            return
        job_id: int | None = change.job_id
        if change.of_parent:
            job_id = self._parents.get(change.job_id)
            if job_id is None:
                self.refused.add(change.job_id)
                return
        assert job_id is not None
        if change.due_at is not None or (change.wait_s or 0) > 0:
            self._lifecycle.append(("timer", len(self._timed)))
            self._timed.append(replace(change, job_id=job_id, of_parent=False))
        else:
            self._lifecycle.append(("force" if change.force else "ask", job_id))

    def _set_timer(self, change: Ask) -> None:
        job_id, force = change.job_id, change.force
        if not (force or self.statuses[job_id] in ASKABLE):
            self.refused.add(job_id)
        elif self._noting:
            asks.note(
                self._executor, [job_id], "force" if force else "run", due_at=change.due_at, wait_s=change.wait_s or 0.0
            )
        else:
            after = asks.set_timer(self._executor, job_id, due_at=change.due_at, wait_s=change.wait_s, force=force)
            self._moved(job_id, after)

    def _apply_lifecycle(self) -> None:
        """Apply asks and terminations in their order; neighbours of one kind are one statement."""
        batch: list[int] = []
        kind = ""
        for step, job_id in [*self._lifecycle, ("", 0)]:
            if step != kind:
                self._apply_batch(kind, list(dict.fromkeys(batch)))
                kind, batch = step, []
            batch.append(job_id)
        self._lifecycle = []

    def _apply_batch(self, kind: str, ids: list[int]) -> None:
        if not ids:
            return
        if kind == "timer":
            for place in ids:
                self._set_timer(self._timed[place])
        elif kind == "note" or self._noting:
            late = [job_id for job_id in ids if not self._just_created(job_id)]
            asks.note(self._executor, late, {"ask": "run", "nudge": "run", "note": "run"}.get(kind, kind))
            self.aftermath.noted += late
        elif kind == "terminate":
            self.terminate(ids, tree=False)
        elif kind == "terminate_tree":
            below = [row.id for row in jobs.subtree(self._executor, ids)]
            unlocked = [job_id for job_id in below if job_id not in self.rows and job_id not in self._new]
            if unlocked:  # adopted in this very transaction
                asks.note(self._executor, unlocked, "terminate")
                self.aftermath.noted += unlocked
            self.terminate([job_id for job_id in below if job_id not in unlocked], tree=True)
        else:
            late = [job_id for job_id in ids if kind == "force" or not self._just_created(job_id)]
            self.ask(late, force=kind == "force", nudge=kind == "nudge")

    def _just_created(self, job_id: int) -> bool:
        """Whether the job is new and its first run, which no one can have claimed yet, is owed at once."""
        new = self._new.get(job_id)
        return new is not None and new.due_at is None and not new.wait_s and self.statuses[job_id] == Status.QUEUED

    def ask(self, ids: Sequence[int], *, force: bool = False, nudge: bool = False) -> None:
        """Ask jobs that are locked to run; those that may not are in `refused` afterwards."""
        may = [job_id for job_id in ids if force or self.statuses[job_id] in ASKABLE]
        self.refused.update(set(ids) - set(may))
        if not may:
            return
        look_after_s = self._runtime.settings.lost_after
        for row in asks.ask(self._executor, may, force=force, nudge=nudge, look_after_s=look_after_s):
            self._moved(row.id, row.status)
            self._ring(row)

    def terminate(self, ids: Sequence[int], *, tree: bool, timers_before: int | None = None) -> None:
        """Make jobs that are locked terminating; terminated ones stay."""
        look_after_s = self._runtime.settings.lost_after
        for row in asks.terminate(
            self._executor, ids, tree=tree, look_after_s=look_after_s, timers_before=timers_before
        ):
            self._moved(row.id, Status.TERMINATING)
            self._ring(row)

    def _ring(self, row: Any) -> None:
        if row.task_id is None:
            return
        job = self.rows.get(row.id) or self._new[row.id]
        self.aftermath.doorbells.append(bell_of(job, row))

    def _moved(self, job_id: int, after: str) -> None:
        before = self.statuses[job_id]
        job = self.rows.get(job_id) or self._new[job_id]
        self.statuses[job_id] = after
        if before != after:
            self.aftermath.moves.append((job_id, job.task, before, after))


def child_name_taken(drafts: Iterable[NewJob]) -> ChildNameTakenError:
    """Return the error for a name that another child of the same parent has."""
    named = ", ".join(f"{job.child_name!r} of job {job.parent_id}" for job in drafts if job.child_name is not None)
    return ChildNameTakenError(
        f"A child's name is taken already: {named}. Nothing was created; choose another name, or see job.children."
    )


def _taken(constraint: str | None, new: Sequence[NewJob]) -> Exception | None:
    """Return our own error for a name or a task id that another row has."""
    if constraint == "jobs_parent_id_name_key":
        return child_name_taken(new)
    if constraint in ("askings_pkey", "messages_pkey"):
        ids = ", ".join(job.task_id for job in new[:3])
        return InvalidValueError(f"Another asking has this task_id already: {ids}. Leave it out, or give a new one.")
    return None


def _job_row(job: NewJob) -> dict[str, Any]:
    return {
        "id": job.id,
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
        "task_id": job.task_id or str(uuid.uuid4()),
        "options": job.options,
        "due_at": job.due_at.isoformat() if job.due_at else None,
        "wait_s": job.wait_s,
    }


def _port_row(job_id: int, port: PortRow) -> dict[str, Any]:
    return {
        "job_id": job_id,
        "direction": port.direction,
        "name": port.name,
        "default_value": port.default,
        "channels": list(port.channels),
    }
