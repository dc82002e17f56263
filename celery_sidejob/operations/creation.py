"""Making jobs: everything is checked and encoded first, then written in one transaction or not at all."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import psycopg.errors

from ..model import values
from ..model.changes import NewJob, PortRow
from ..model.errors import ChildNameTakenError, InvalidValueError
from ..model.names import check_alias, check_child_name
from ..model.port import NO_DATA, PortOptions, parse_ports
from ..model.tasks import Call
from ..store import jobs
from ..store.statement import Executor
from .runtime import Runtime
from .unit_of_work import carry_out


def draft(
    runtime: Runtime,
    call: Call,
    *,
    job_id: int = 0,
    parent_id: int | None = None,
    child_name: str | None = None,
    created_by: str | None = None,
    inports: Any = None,
    outports: Any = None,
    aliases: Iterable[str] = (),
    state: Mapping[str, Any] | None = None,
) -> NewJob:
    """Check and encode everything a new job is made of; nothing is written, no id is drawn."""
    if (parent_id is None) != (child_name is None):
        raise InvalidValueError(
            f"A child of a job needs parent= and child_name= together; got parent={parent_id!r}, "
            f"child_name={child_name!r}."
        )
    if child_name is not None:
        check_child_name(child_name)
    if isinstance(aliases, str):
        raise InvalidValueError(f"aliases= takes a list of names, not the string {aliases!r}.")
    limit = runtime.settings.max_value_bytes
    wait_s, due_at = when(runtime, eta=call.eta, countdown=call.countdown)
    return NewJob(
        id=job_id,
        task_id=call.task_id or str(uuid.uuid4()),
        task=call.task,
        queue=call.queue,
        args=values.encode(list(call.args), limit=limit, what="args"),
        kwargs=values.encode(dict(call.kwargs), limit=limit, what="kwargs"),
        priority=call.priority,
        parent_id=parent_id,
        child_name=child_name,
        created_by=created_by,
        max_losses=call.max_losses,
        retention_s=call.retention_s,
        options=json.dumps(dict(call.options)) if call.options else None,
        due_at=due_at,
        wait_s=wait_s,
        ports=port_rows(call, inports, outports),
        aliases=tuple(check_alias(name) for name in aliases),
        state={
            check_key(key): values.encode(value, limit=limit, what=f"state[{key!r}]")
            for key, value in (state or {}).items()
        },
    )


def port_rows(call: Call, inports: Any, outports: Any) -> tuple[PortRow, ...]:
    """Return the ports of a job: its task's own, each replaced whole where the job's creator gives one of that name."""
    merged_in = {**call.inports, **parse_ports(inports or (), where="inports")}
    merged_out = {**call.outports, **parse_ports(outports or (), where="outports")}
    return (
        *(_port_row("in", name, options) for name, options in merged_in.items()),
        *(_port_row("out", name, options) for name, options in merged_out.items()),
    )


def _port_row(direction: Any, name: str, options: PortOptions) -> PortRow:
    default = None if options.default is NO_DATA else values.encode(options.default, what=f"default of port {name!r}")
    return PortRow(direction, name, default, options.channels)


def check_key(key: Any) -> str:
    """Refuse state keys that are not plain strings."""
    if not isinstance(key, str) or "\x00" in key:
        raise InvalidValueError(f"A key of a job's state is a string without NUL characters, not {key!r}.")
    return key


def when(
    runtime: Runtime, *, eta: datetime | None, countdown: float | timedelta | None
) -> tuple[float | None, datetime | None]:
    """Return (seconds to wait, moment) of an `eta` or `countdown`; both None for now. `eta` wins."""
    if eta is not None:
        if not isinstance(eta, datetime):
            raise InvalidValueError(f"eta= takes a datetime, not {type(eta).__name__}; seconds go into countdown=.")
        return None, runtime.tasks.localize(eta)
    if countdown is None:
        return None, None
    if isinstance(countdown, timedelta):
        countdown = countdown.total_seconds()
    if isinstance(countdown, bool) or not isinstance(countdown, int | float) or countdown != countdown:
        raise InvalidValueError(f"countdown= takes seconds, not {countdown!r}.")
    return (float(countdown), None) if countdown > 0 else (None, None)


def create(runtime: Runtime, drafts: Sequence[NewJob], transaction: Any = None) -> list[int]:
    """Create jobs in one transaction, or in the caller's: all or none. Returns their ids, in order."""
    if not drafts:
        return []
    executor: Executor = runtime.connections
    if transaction is not None:
        transaction = runtime.connections.borrow(transaction)
        executor = transaction
        _check_child_names(executor, drafts)
    ids = jobs.next_ids(executor, len(drafts))
    numbered = [replace(job, id=job_id) for job, job_id in zip(drafts, ids, strict=True)]
    try:
        carry_out(runtime, "enqueue", numbered, transaction)
    except psycopg.errors.UniqueViolation as error:
        if error.diag.constraint_name != "jobs_parent_id_name_key":
            raise
        raise child_name_taken(drafts) from error
    return ids


def child_name_taken(drafts: Iterable[NewJob]) -> ChildNameTakenError:
    """Return the error for a name that another child of the same parent has."""
    named = ", ".join(f"{job.child_name!r} of job {job.parent_id}" for job in drafts if job.child_name is not None)
    return ChildNameTakenError(
        f"A child's name is taken already: {named}. Nothing was created; choose another name, or see job.children."
    )


def _check_child_names(executor: Executor, drafts: Iterable[NewJob]) -> None:
    """Look before writing into a borrowed transaction: an error of Postgres would spoil it."""
    for job in drafts:
        if job.parent_id is not None and any(
            child.name == job.child_name for child in jobs.children(executor, job.parent_id)
        ):
            raise child_name_taken([job])
