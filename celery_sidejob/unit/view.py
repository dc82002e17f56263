"""What a unit in progress makes of the store: rows as they were read, changed by what the unit will write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from ..model.changes import (
    AddAlias,
    Adopt,
    Change,
    ConfigurePorts,
    Disown,
    NewJob,
    PortKey,
    PortRow,
    RemoveAlias,
    SetChannels,
    SetDefault,
    SetState,
    UnsetState,
    Write,
)
from ..model.columns import SHOWN
from ..model.port import WILDCARD
from ..model.status import Status


@dataclass(frozen=True, slots=True)
class PortView:
    """A port's row as a unit sees it; one that is not stored yet has no id."""

    id: int | None
    job_id: int
    direction: str
    name: str
    default_value: str | None
    channels: Sequence[str]


def new_jobs(changes: Sequence[Change]) -> dict[int, NewJob]:
    """Return the jobs that will be created, by id."""
    return {change.id: change for change in changes if isinstance(change, NewJob)}


def row_of(new: NewJob) -> Any:
    """Return the row that a new job will have, as handles show it."""
    return SimpleNamespace(
        **{column.name: getattr(new, column.name) for column in SHOWN.values()},
        id=new.id, status=Status.QUEUED, created_at=None, ran_at=None, ended_at=None, run_no=0, unit_no=None,
        run_kind=None, worker_id=None, losses=0, retries=0, asked_again=False, error=None, task_id=new.task_id,
        ports=new.ports,
    )  # fmt: skip


def state(changes: Sequence[Change], job_id: int, stored: Mapping[str, str]) -> dict[str, str]:
    """Return a job's state, {key: JSON text}."""
    found = dict(stored)
    for change in changes:
        if isinstance(change, SetState) and change.job_id == job_id:
            found.update(change.values)
        elif isinstance(change, UnsetState) and change.job_id == job_id:
            for gone in change.keys:
                found.pop(gone, None)
    return found


def family(changes: Sequence[Change], parent_id: int) -> tuple[dict[str, int], set[Any]]:
    """Return the children that a job is given, {name: id}, and the ids or names that are taken away."""
    gained: dict[str, int] = {}
    gone: set[Any] = set()
    for change in changes:
        match change:
            case NewJob() if change.parent_id == parent_id and change.name is not None:
                gained[change.name] = change.id
            case Adopt() if change.parent_id == parent_id:
                gained[change.name] = change.child_id
            case Disown() if change.parent_id == parent_id:
                gone.add(change.child)
                gained = {name: child for name, child in gained.items() if change.child not in (name, child)}
            case _:
                pass
    return gained, gone


def aliases(changes: Sequence[Change], job_id: int | None = None) -> tuple[dict[str, int], set[str]]:
    """Return the aliases that are given, {name: job id}, and those taken away; of one job, or of all."""
    given: dict[str, int] = {}
    taken: set[str] = set()
    for change in changes:
        match change:
            case NewJob() if job_id in (None, change.id):
                given.update(dict.fromkeys(change.aliases, change.id))
            case AddAlias() if job_id in (None, change.job_id):
                given[change.name] = change.job_id
            case RemoveAlias() if job_id in (None, change.job_id):
                given.pop(change.name, None)
                taken.add(change.name)
            case _:
                pass
    return given, taken


def ports(changes: Sequence[Change], job_id: int, stored: Mapping[tuple[str, str], Any]) -> dict[tuple[str, str], Any]:
    """Return a job's ports, {(direction, name): row}."""
    known = dict(stored)
    for change in changes:
        match change:
            case ConfigurePorts() if change.job_id == job_id:
                known = {
                    (port.direction, port.name): _over(known.get((port.direction, port.name)), job_id, port)
                    for port in change.ports
                }
            case SetDefault() if change.job_id == job_id:
                _amend(known, change.direction, change.port, job_id, default=change.value)
            case SetChannels() if change.job_id == job_id:
                _amend(known, change.direction, change.port, job_id, channels=change.channels)
            case Write(as_default=True) if change.job_id == job_id:
                _amend(known, change.direction, change.port, job_id, default=change.packets[-1][0])
            case _:
                pass
    return known


def ports_made(job_id: int, ports: Sequence[PortRow]) -> dict[tuple[str, str], Any]:
    """Return the ports of a job that nobody else can see yet."""
    return {(port.direction, port.name): _unstored(job_id, port) for port in ports}


def writes(changes: Sequence[Change], key: PortKey) -> list[Write]:
    """Return what will be written to a port, oldest first."""
    return [
        change
        for change in changes
        if isinstance(change, Write) and (change.job_id, change.direction, change.port) == key and not change.as_default
    ]


def _unstored(job_id: int, port: PortRow) -> PortView:
    return PortView(None, job_id, port.direction, port.name, port.default, port.channels)


def _over(row: Any, job_id: int, port: PortRow) -> PortView:
    return replace(_unstored(job_id, port), id=row.id if row is not None else None)


def _amend(known: dict[Any, Any], direction: str, name: str, job_id: int, **changed: Any) -> None:
    row = known.get((direction, name))
    made_as = row or known.get((direction, WILDCARD))
    view = PortView(
        row.id if row else None,
        job_id,
        direction,
        name,
        made_as.default_value if made_as else None,
        row.channels if row else (),
    )
    if "default" in changed:
        view = replace(view, default_value=changed["default"])
    if "channels" in changed:
        view = replace(view, channels=changed["channels"])
    known[direction, name] = view
