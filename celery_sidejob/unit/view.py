"""The store as a unit in progress will leave it: rows as they were read, changed by what the unit will write.

A job's timers and the entries of its history are such rows in the form in which users read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any, Literal

from ..model import changes, values
from ..model.checks import is_number, shown
from ..model.columns import SHOWN
from ..model.errors import InvalidValueError
from ..model.port import WILDCARD
from ..model.status import Status
from ..operations.hold import Hold
from ..operations.runtime import Runtime
from ..store import jobs, trees
from ..store import ports as port_rows


@dataclass(frozen=True, slots=True)
class PortView:
    """A port as a unit will leave it."""

    default_value: str | None
    channels: Sequence[str]


@dataclass(frozen=True, slots=True)
class Written:
    """A packet that the unit itself has written: its JSON texts, and no time as long as it is not committed."""

    value: str
    context: str | None
    options: str | None
    written_at: None = None


@dataclass(frozen=True, slots=True)
class Timer:
    """A request for later, by ``eta=`` or ``countdown=`` of ``run()`` and ``enqueue()`` or by ``suspend(timeout=)``."""

    id: int | None
    """Its number, for `Job.cancel_timer`; None until the unit that sets it is committed."""
    due_at: datetime | None
    """When it fires; None for a ``countdown`` in a unit, because it counts from the commit."""
    ask: Literal["run", "force", "timeout"]
    """What it asks for: a run, a forced run, or the run that ends a wait unless another run begins first."""


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """Something that happened to a job."""

    at: datetime | None
    """When it happened; None for an entry of the run in progress that is not committed yet."""
    what: str
    """`made`; `claimed`: a run began; how a run ended, such as `completed` or `lost`; `moved`; `revived`; or an
    entry's own message."""
    run_no: int | None
    worker: str | None
    detail: dict[str, Any] | None
    """An error has `error`, `group` and `message`; other entries have who made the job (`by`); the `task` and `queue`
    to which it was moved; the status it was revived `from`; the data of an entry."""


class Seen:
    """The store as the body of a run sees it: what its unit will make of it. `pending` returns its changes.

    `empty` returns the row of a port of which it is known that no packet waits there.
    """

    def __init__(
        self,
        runtime: Runtime,
        hold: Hold,
        *,
        pending: Callable[[], Sequence[changes.Change]],
        empty: Callable[[changes.PortKey], Any | None],
    ) -> None:
        self._runtime = runtime
        self._hold = hold
        self._changes = pending
        self._empty = empty
        self._ports: dict[int, dict[tuple[str, str], Any]] = {}
        self._known: set[changes.PortKey] = set()

    def begin_next(self) -> None:
        """Read ports anew from now on: a unit was committed."""
        self._ports.clear()

    def new_jobs(self) -> dict[int, changes.NewJob]:
        """Return the jobs this unit will create."""
        return new_jobs(self._changes())

    def state(self, job_id: int, key: str | None = None) -> dict[str, str]:
        """Return a job's state as this unit leaves it, {key: JSON text}."""
        pending = self._changes()
        new = new_jobs(pending).get(job_id)
        found = dict(new.state if new else jobs.read_state(self._runtime.connections, job_id, key))
        for change in pending:
            if isinstance(change, changes.SetState) and change.job_id == job_id:
                found.update(change.values)
            elif isinstance(change, changes.UnsetState) and change.job_id == job_id:
                for gone in change.keys:
                    found.pop(gone, None)
        return found

    def family(self, parent_id: int) -> tuple[dict[str, int], set[Any]]:
        """Return the children this unit gives a job, {name: id}, and the ids or names it takes away."""
        gained: dict[str, int] = {}
        gone: set[Any] = set()
        for change in self._changes():
            match change:
                case changes.NewJob() if change.parent_id == parent_id and change.name is not None:
                    gained[change.name] = change.id
                case changes.Adopt() if change.parent_id == parent_id:
                    gained[change.name] = change.child_id
                case changes.Disown() if change.parent_id == parent_id:
                    gone.add(change.child)
                    gained = {name: child for name, child in gained.items() if change.child not in (name, child)}
        return gained, gone

    def ancestors(self, job_id: int) -> list[int]:
        """Return a job and everything above it as this unit leaves them, the root last."""
        moved, line = parents(self._changes()), list[int]()
        start: int | None = job_id
        while start is not None:
            for above in trees.ancestors(self._runtime.connections, start) or [start]:
                line.append(above)
                start = moved.get(above)
                if above in moved:
                    break
        return line

    def aliases(self, job_id: int | None = None) -> tuple[dict[str, int], set[str]]:
        """Return the aliases this unit gives, {name: job id}, and those it takes away; of one job, or of all."""
        given: dict[str, int] = {}
        taken: set[str] = set()
        for change in self._changes():
            match change:
                case changes.NewJob() if job_id in (None, change.id):
                    given.update(dict.fromkeys(change.aliases, change.id))
                case changes.AddAlias() if job_id in (None, change.job_id):
                    given[change.name] = change.job_id
                    taken.discard(change.name)
                case changes.RemoveAlias() if job_id in (None, change.job_id):
                    given.pop(change.name, None)
                    taken.add(change.name)
        return given, taken

    def ports(self, job_id: int) -> dict[tuple[str, str], Any]:
        """Return a job's ports as this unit leaves them, {(direction, name): row}."""
        pending = self._changes()
        new = new_jobs(pending).get(job_id)
        if new is not None:
            return ports(pending, job_id, ports_made(new.ports))
        if job_id not in self._ports:
            self._ports[job_id] = port_rows.of_job(self._runtime.connections, job_id)
        return ports(pending, job_id, self._ports[job_id])

    def port(self, key: changes.PortKey) -> Any | None:
        """Return a port as this unit leaves it, or the pattern that allows it; None if the job has no such port."""
        job_id, direction, name = key
        empty = self._empty(key)
        rows = self.ports(job_id) if empty is None else ports(self._changes(), job_id, {(direction, name): empty})
        found = rows.get((direction, name)) or rows.get((direction, WILDCARD))
        if found is not None:
            self._known.add(key)
        return found

    def knows_port(self, key: changes.PortKey) -> bool:
        """Tell without the store whether a port is there: it was found before, or is the run's own by its task."""
        job_id, direction, name = key
        if key not in self._known and job_id == self._hold.job_id:
            declared = self._runtime.tasks.ports(self._hold.row.task)[direction == "out"]
            if name in declared or WILDCARD in declared:
                self._known.add(key)
        return key in self._known


def new_jobs(pending: Sequence[changes.Change]) -> dict[int, changes.NewJob]:
    """Return the jobs that will be created, by id."""
    return {change.id: change for change in pending if isinstance(change, changes.NewJob)}


def row_of(new: changes.NewJob) -> Any:
    """Return the row that a new job will have, as handles show it."""
    return SimpleNamespace(
        **{column.name: getattr(new, column.name) for column in SHOWN.values()},
        id=new.id, status=Status.QUEUED, changes=0, created_at=None, ran_at=None, ended_at=None, run_no=0, unit_no=None,
        run_kind=None, worker_id=None, losses=0, retries=0, asked_again=False, has_steps=None, error=None,
        task_id=new.task_id,
        unique_key=None if new.unique is None else new.unique.key, ports=new.ports,
    )  # fmt: skip


def keys_set(pending: Sequence[changes.Change]) -> set[tuple[int, str]]:
    """Return the keys of jobs' states that are set or removed: (job id, key)."""
    found = set[tuple[int, str]]()
    for change in pending:
        if isinstance(change, changes.SetState):
            found.update((change.job_id, key) for key in change.values)
        elif isinstance(change, changes.UnsetState):
            found.update((change.job_id, key) for key in change.keys)
    return found


def tags(pending: Sequence[changes.Change], job_id: int, stored: Sequence[str]) -> list[str]:
    """Return a job's tags, in their order."""
    found = dict.fromkeys(stored)
    for change in pending:
        match change:
            case changes.NewJob() if change.id == job_id:
                found.update(dict.fromkeys(change.tags))
            case changes.Tag() if change.job_id == job_id:
                found.update(dict.fromkeys(change.names))
            case changes.Untag() if change.job_id == job_id:
                found = {name: None for name in found if name not in change.names}
    return list(found)


def tracked(pending: Sequence[changes.Change], job_id: int, stored: bool) -> bool:
    """Return whether a job is tracked."""
    return next(
        (change.on for change in reversed(pending) if isinstance(change, changes.Track) and change.job_id == job_id),
        stored,
    )


def parents(pending: Sequence[changes.Change]) -> dict[int, int | None]:
    """Return the parents of new jobs and of jobs that are adopted or disowned, {id: parent's id}."""
    found: dict[int, int | None] = {}
    for change in pending:
        match change:
            case changes.NewJob():
                found[change.id] = change.parent_id
            case changes.Adopt():
                found[change.child_id] = change.parent_id
            case changes.Disown(child=int(child)):
                found[child] = None
    return found


def ports(
    pending: Sequence[changes.Change], job_id: int, stored: Mapping[tuple[str, str], Any]
) -> dict[tuple[str, str], Any]:
    """Return a job's ports, {(direction, name): row}."""
    known = dict(stored)
    for change in pending:
        match change:
            case changes.ConfigurePorts() if change.job_id == job_id:
                others = {key: row for key, row in known.items() if key[0] not in change.directions}
                known = {**others, **ports_made(change.ports)}
            case changes.SetDefault() if change.job_id == job_id:
                _amend(known, change, default_value=change.value)
            case changes.SetChannels() if change.job_id == job_id:
                _amend(known, change, channels=change.channels)
            case changes.Write(as_default=True) if change.job_id == job_id:
                _amend(known, change, default_value=change.packets[-1][0])
    return known


def keeps_stored(pending: Sequence[changes.Change], key: changes.PortKey) -> bool:
    """Tell whether a port may have packets in the store: its job is there already, and its ports are not taken away."""
    job_id, direction, name = key
    for change in pending:
        match change:
            case changes.NewJob() if change.id == job_id:
                return False
            case changes.ConfigurePorts() if change.job_id == job_id and direction in change.directions:
                if (direction, name) not in ports_made(change.ports):
                    return False
    return True


def ports_made(ports: Sequence[changes.PortRow]) -> dict[tuple[str, str], Any]:
    """Return ports as they are made."""
    return {(port.direction, port.name): PortView(port.default, port.channels) for port in ports}


def writes(pending: Sequence[changes.Change], key: changes.PortKey) -> list[changes.Write]:
    """Return what will be written to a port, oldest first."""
    return [
        change
        for change in pending
        if isinstance(change, changes.Write)
        and (change.job_id, change.direction, change.port) == key
        and not change.as_default
    ]


def _amend(
    known: dict[Any, Any], change: changes.SetDefault | changes.SetChannels | changes.Write, **changed: Any
) -> None:
    key = (change.direction, change.port)
    row = known.get(key)
    if row is None:  # it is made by its pattern
        row = known.get((change.direction, WILDCARD)) or PortView(None, ())
    known[key] = replace(PortView(row.default_value, row.channels), **changed)


def timers(pending: Sequence[changes.Change], job_id: int, stored: Sequence[Any]) -> list[Timer]:
    """Return a job's timers: those that are stored, as the changes of a unit leave them, then the unit's own."""
    found = [Timer(row.id, row.due_at, row.ask) for row in stored]
    for change in pending:
        match change:
            case changes.Terminate() if change.job_id == job_id:
                found = []
            case changes.CancelTimer() if change.job_id == job_id:
                found = [timer for timer in found if timer.id != change.timer_id]
            case _:
                found += _set_by(change, job_id)
    return found


def _set_by(change: changes.Change, job_id: int) -> Iterator[Timer]:
    match change:
        case changes.NewJob(id=asked, due_at=due_at, wait_s=wait_s):
            ask: Literal["run", "force"] = "run"
        case changes.Ask(job_id=asked, due_at=due_at, wait_s=wait_s, of_parent=False):
            ask = "force" if change.force else "run"
        case _:
            return
    if asked == job_id and (due_at is not None or wait_s):
        yield Timer(None, due_at, ask)


def timer_id(timer: Any) -> int:
    """Return the number of a timer, given as a `Timer` or as its number; InvalidValueError for anything else."""
    number = timer.id if isinstance(timer, Timer) else timer
    if isinstance(timer, Timer) and number is None:
        raise InvalidValueError(
            "cancel_timer() was given a timer that its own unit sets: it has no id before the commit. Commit the unit "
            "first, with job.checkpoint()."
        )
    if not is_number(number, least=1):
        raise InvalidValueError(f"cancel_timer() takes one of job.timers, or its id, not {shown(timer)}.")
    return number


def dependencies(pending: Sequence[changes.Change], job_id: int, stored: Iterable[int]) -> list[int]:
    """Return the ids of the jobs for which a job waits, as the changes of a unit will leave them."""
    found = dict.fromkeys(stored)
    for change in pending:
        if isinstance(change, changes.NewJob) and change.id == job_id:
            found |= dict.fromkeys(on for on, _ in change.depends_on)
        elif isinstance(change, changes.DependOn) and change.job_id == job_id:
            found |= dict.fromkeys(change.on)
        elif isinstance(change, changes.Undepend) and change.job_id == job_id:
            found = {on: None for on in found if change.on is not None and on not in change.on}
    return sorted(found)


def history(
    pending: Sequence[changes.Change], job_id: int, stored: Sequence[Any], hide: Callable[[Any], Any]
) -> list[HistoryEntry]:
    """Return a job's history: the stored rows, then the entries that the run in progress has made."""
    mine = [change for change in pending if isinstance(change, changes.Log) and change.job_id == job_id]
    return [entry_of(row, hide) for row in stored] + [
        HistoryEntry(None, log.message, log.run_no, None, None if log.detail is None else values.decode(log.detail))
        for log in mine
    ]


def entry_of(row: Any, hide: Callable[[Any], Any]) -> HistoryEntry:
    """Return the entry of a row; `hide` is applied to the details of an error and to the data of an entry."""
    detail = None if row.detail is None else hide(values.decode(row.detail))
    return HistoryEntry(row.at, row.what, row.run_no, row.worker, detail)
