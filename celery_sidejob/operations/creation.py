"""Making jobs: everything is checked and encoded first, then written in one transaction or not at all."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from ..model import values
from ..model.call import Call
from ..model.changes import NewJob, PortRow
from ..model.errors import InvalidValueError, StoreUnavailableError
from ..model.messages import Doorbell
from ..model.names import check_alias, check_child_name, why_not_storable
from ..model.port import NO_DATA, PortOptions, parse_ports
from ..model.status import Status
from ..store import askings, jobs
from ..store.errors import NoAnswer, OutcomeUnknown
from ..store.statement import Executor
from .family import child_name_taken, insert
from .runtime import Aftermath, Move, Runtime
from .unit_of_work import carry_out

LONGEST_WAIT_S = 10_000_000_000.0
"""The longest countdown, three hundred years; Postgres has an end of its own not far beyond."""


def draft(
    runtime: Runtime,
    call: Call,
    *,
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
    _check_text("created_by", created_by)
    _check_text("queue", call.queue)
    if not isinstance(state, Mapping | None):
        raise InvalidValueError(f"state= takes a mapping of keys to values, not a {type(state).__name__}.")
    limit = runtime.settings.max_value_bytes
    wait_s, due_at = when(runtime, eta=call.eta, countdown=call.countdown)
    return NewJob(
        id=0,
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
        aliases=tuple(dict.fromkeys(check_alias(name) for name in aliases)),
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


def _check_text(what: str, text: Any) -> None:
    problem = None if text is None else why_not_storable(text) if isinstance(text, str) else "it is not a string"
    if text == "":
        problem = "it is empty"
    if problem:
        raise InvalidValueError(f"{str(text)[:100]!a} cannot be {what}=: {problem}")


def check_key(key: Any) -> str:
    """Refuse state keys that are not strings, or that the store could not keep."""
    if not isinstance(key, str):
        raise InvalidValueError(f"A key of a job's state is a string, not {key!r}.")
    problem = why_not_storable(key)
    if problem:
        raise InvalidValueError(f"{key[:100]!a} cannot be a key of a job's state: {problem}")
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
    if isinstance(countdown, bool) or not isinstance(countdown, int | float) or not countdown <= LONGEST_WAIT_S:
        raise InvalidValueError(f"countdown= takes seconds, at most {LONGEST_WAIT_S:.0f}, not {countdown!r}.")
    return (float(countdown), None) if countdown > 0 else (None, None)


def create(runtime: Runtime, drafts: Sequence[NewJob], transaction: Any = None) -> list[int]:
    """Create jobs in one transaction, or in the caller's: all or none. Returns their ids, in order."""
    if not drafts:
        return []
    if transaction is not None:
        borrowed = runtime.connections.borrow(transaction)
        _check_child_names(borrowed, drafts)
        ids = jobs.next_ids(borrowed, len(drafts))
        carry_out(runtime, "enqueue", _numbered(drafts, ids), borrowed)
        return ids
    if all(map(_is_plain, drafts)):
        return _until_known(runtime, drafts, lambda: _create_plain(runtime, drafts))
    ids = jobs.next_ids(runtime.connections, len(drafts))

    def make() -> list[int]:
        carry_out(runtime, "enqueue", _numbered(drafts, ids))
        return ids

    return _until_known(runtime, drafts, make)


def _numbered(drafts: Sequence[NewJob], ids: Sequence[int]) -> list[NewJob]:
    return [replace(job, id=job_id) for job, job_id in zip(drafts, ids, strict=True)]


def _is_plain(job: NewJob) -> bool:
    """Tell whether such jobs, however many, are made by one statement, which needs no BEGIN, no COMMIT and no lock."""
    return job.parent_id is None and not (job.ports or job.aliases or job.state)


def _create_plain(runtime: Runtime, drafts: Sequence[NewJob]) -> list[int]:
    def work(executor: Executor) -> Sequence[Any]:
        return insert(executor, drafts, look_after_s=runtime.settings.lost_after)

    rows = runtime.connections.transact("enqueue", work, single=True)
    aftermath = Aftermath()
    for job, row in zip(drafts, rows, strict=True):  # ids grow in the order of the drafts
        aftermath.moves.append(Move(row.job_id, job.task, None, Status.QUEUED))
        if row.for_run is not None:
            aftermath.doorbells.append(Doorbell.of(row.job_id, job, row, job.options))
    runtime.follow(aftermath)
    return [row.job_id for row in rows]


def _until_known(runtime: Runtime, drafts: Sequence[NewJob], make: Callable[[], list[int]]) -> list[int]:
    """Make jobs, and once more if the answer was lost: their task ids tell, so that none is made twice.

    A first commit that is still under way is waited for by the primary keys. Raises the first error if the store is
    gone for longer: the caller cannot know, and what was made then runs.
    """
    try:
        return make()
    except NoAnswer:
        raise  # it would say nothing to a second one either
    except OutcomeUnknown as unknown:
        try:
            return make()
        except StoreUnavailableError:
            raise unknown from None
        except Exception:
            made = askings.jobs_of(runtime.connections, [job.task_id for job in drafts])
            if len(made) < len(drafts):
                raise
            return [made[job.task_id] for job in drafts]


def _check_child_names(executor: Executor, drafts: Iterable[NewJob]) -> None:
    """Look before writing into a borrowed transaction: an error of Postgres would spoil it."""
    for job in drafts:
        if job.parent_id is None or job.child_name is None:
            continue
        if jobs.child(executor, job.parent_id, job.child_name) is not None:
            raise child_name_taken((job.parent_id, job.child_name))
