"""Making jobs: `draft` checks and encodes everything, then `create` writes it in one transaction or not at all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from ..model import values
from ..model.changes import NewJob, PortRow
from ..model.checks import MOST_S, in_seconds, is_near, shown
from ..model.columns import OPTIONS
from ..model.errors import (
    AliasTakenError,
    ChildNameTakenError,
    InvalidValueError,
    JobNotFoundError,
    StoreUnavailableError,
)
from ..model.names import alias_taken, at_most, check_alias, check_child_name, check_key, check_tags, child_name_taken
from ..model.port import NO_DATA, PortOptions, parse_ports
from ..model.protocols import Call
from ..operations.after_commit import AfterCommit, follow
from ..operations.changes import batches
from ..operations.changes.unit_of_work import carry_out
from ..operations.gates import capacity
from ..operations.runtime import Runtime
from ..store import askings, jobs
from ..store.errors import NoAnswer, OutcomeUnknown
from ..store.statement import Transaction
from ..unit.lookup import locate
from ..unit.open_unit import OpenUnit, active
from .depending import edges_of
from .uniqueness import create_unique, first_of_each, with_the_replaced

Ports = Mapping[str, PortOptions]


def draft(  # noqa: PLR0913 - the options of a new job
    runtime: Runtime,
    task: Any,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    queue: str | None = None,
    parent: int | str | None = None,
    child_name: str | None = None,
    eta: datetime | None = None,
    countdown: float | None = None,
    inports: Any = None,
    outports: Any = None,
    aliases: Iterable[str] = (),
    state: Mapping[str, Any] | None = None,
    tags: Iterable[str] = (),
    priority: int | None = None,
    depends_on: Iterable[Any] = (),
    on_failure: str | None = None,
    executor: Transaction | None = None,
    **options: Any,
) -> NewJob:
    """Check and encode all parts of a new job, and return it without an id; nothing is written.

    `options` are Celery's, and the options that go straight into a column (`OPTIONS`). `executor` reads the parent,
    which may have been made in the caller's transaction.
    """
    given = {name: options.pop(name) for name in OPTIONS if name in options}
    options |= {name: value for name, value in (("eta", eta), ("countdown", countdown)) if value is not None}
    call = runtime.tasks.call(task, args, kwargs, queue=queue, priority=priority, options=options)
    unit = active()
    if unit is not None and given.get("created_by") is None:
        given["created_by"] = f"job:{unit.hold.job_id}"
    if not isinstance(state, Mapping | None):
        raise InvalidValueError(f"state= takes a mapping of keys to values, not a {type(state).__name__}.")
    limit = runtime.settings.max_value_bytes
    wait_s, due_at = when(runtime, eta=call.eta, countdown=call.countdown)
    edges = edges_of(runtime, depends_on, on_failure, executor)
    admission, columns = call.admission, dict(call.columns)
    if admission is not None:
        columns |= admission.columns
        if wait_s is not None or due_at is not None or edges:
            admission = replace(admission, mode="wait")
    return NewJob(
        task_id=call.task_id,
        task=call.task,
        queue=call.queue,
        priority=call.priority,
        args=values.encode(list(call.args), limit=limit, what="args"),
        kwargs=values.encode(dict(call.kwargs), limit=limit, what="kwargs"),
        parent_id=_parent_id(runtime, call, parent, child_name, executor),
        name=child_name,
        **columns,
        **{name: OPTIONS[name](name, value) for name, value in given.items()},
        options=json.dumps(dict(call.options)) if call.options else None,
        depends_on=edges,
        batch=batches.present(),
        unique=call.unique,
        admission=admission,
        due_at=due_at,
        wait_s=wait_s,
        ports=port_rows((call.inports, call.outports), inports, outports),
        aliases=_aliases(runtime, call, aliases),
        state=encode_state(state or {}, limit=limit),
        tags=check_tags(tags, where="tags="),
    )


def encode_state(state: Mapping[str, Any], *, limit: int) -> dict[str, str]:
    """Check the keys of a job's state, and return its values as texts."""
    return {
        check_key(key): values.encode(value, limit=limit, what=f"state[{key!r}]")
        for key, value in at_most(state.items(), "keys of the state")
    }


def create(runtime: Runtime, drafts: Sequence[NewJob], transaction: Any = None) -> Sequence[NewJob | int]:
    """Create drafted jobs, all or none: in the run's unit, the caller's transaction or one of ours.

    Returns them with their ids, in order. If an open job already has a draft's unique key, its id is returned instead.
    """
    if not drafts:
        return ()
    lent = transaction is not None or active() is not None
    are_plain = not lent and all(map(_is_plain, drafts))
    if are_plain and all(new.admission is None for new in drafts):
        return _until_known(runtime, drafts, partial(_create_plain, runtime, drafts))
    _check_names_among(first_of_each(drafts))
    capacity.prepare(runtime, [new.admission for new in drafts], lent=lent)
    with capacity.refusing(runtime):
        if are_plain:
            return _until_known(runtime, drafts, lambda: _create_admitted(runtime, drafts))
        if any(new.unique is not None for new in drafts):
            return create_unique(runtime, drafts, partial(_create, runtime, transaction=transaction), transaction)
        return _create(runtime, drafts, transaction)


def _create(runtime: Runtime, drafts: Sequence[NewJob], transaction: Any) -> Sequence[NewJob]:
    unit = active()
    if transaction is not None:
        _check_child_names(transaction, drafts)
        made = _numbered(drafts, jobs.next_ids(transaction, len(drafts)))
        carry_out(runtime, "enqueue", with_the_replaced(made), transaction)
        return made
    made = _numbered(drafts, jobs.next_ids(runtime.connections, len(drafts)))
    if unit is None:
        return _until_known(runtime, drafts, lambda: _create_all(runtime, made))
    _check_room(runtime, unit, made)
    for change in with_the_replaced(made):
        unit.add(change)
    return made


def check_child_name_is_free(runtime: Runtime, parent_id: int, name: str) -> None:
    """Refuse a taken name at the call, inside a run, rather than at the run's commit."""
    unit = active()
    assert unit is not None
    gained, gone = unit.family(parent_id)
    other = gained.get(name)
    if other is None and parent_id not in unit.new_jobs():
        other = jobs.child(runtime.connections, parent_id, name)
    if other is not None and (name in gained or other not in gone):
        raise child_name_taken((parent_id, name))


def port_rows(own: tuple[Ports, Ports], inports: Any, outports: Any) -> tuple[PortRow, ...]:
    """Return the ports of a job: its task's ports, each replaced by the creator's port of the same name, if any."""
    merged_in = {**own[0], **parse_ports(inports or (), where="inports")}
    merged_out = {**own[1], **parse_ports(outports or (), where="outports")}
    return (
        *(_port_row("in", name, options) for name, options in merged_in.items()),
        *(_port_row("out", name, options) for name, options in merged_out.items()),
    )


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
    wait_s = in_seconds(countdown)
    if not is_near(wait_s):
        raise InvalidValueError(f"countdown= takes seconds, {MOST_S}, not {shown(wait_s)}.")
    return (float(wait_s), None) if wait_s > 0 else (None, None)


def _parent_id(
    runtime: Runtime, call: Call, parent: int | str | None, child_name: str | None, executor: Transaction | None
) -> int | None:
    """Return the id of the parent of a new job; in a run its name must be free there.

    The commit checks the name, and the aliases, if a unique key may resolve to the very job that has them.
    """
    if parent is None and child_name is None:
        return None
    above = None if parent is None else locate(runtime, parent, executor)
    if parent is not None and above is None:
        raise JobNotFoundError(f"There is no job {shown(parent)} to be the parent of a new {call.task!r}.")
    if above is None or child_name is None:
        raise InvalidValueError(
            "A child of a job needs parent= and child_name= together; got "
            f"parent={above and above[0]!r}, child_name={shown(child_name)}."
        )
    check_child_name(child_name)
    if active() is not None and call.unique is None:
        check_child_name_is_free(runtime, above[0], child_name)
    return above[0]


def _aliases(runtime: Runtime, call: Call, aliases: Iterable[str]) -> tuple[str, ...]:
    """Return the aliases of a new job, each once; in a run they must be free."""
    if isinstance(aliases, str):
        raise InvalidValueError(f"aliases= takes a list of names, not the string {aliases!r}.")
    names = tuple(dict.fromkeys(check_alias(name) for name in at_most(aliases, "aliases")))
    for name in names if active() is not None and call.unique is None else ():
        if (owner := locate(runtime, name)) is not None:
            raise alias_taken(name, owner[0])
    return names


def _port_row(direction: Any, name: str, options: PortOptions) -> PortRow:
    default = None if options.default is NO_DATA else values.encode(options.default, what=f"default of port {name!r}")
    return PortRow(direction, name, default, options.channels, options.limit)


def _numbered(drafts: Sequence[NewJob], ids: Iterable[int]) -> list[NewJob]:
    return [replace(new, id=job_id) for new, job_id in zip(drafts, ids, strict=True)]


def _is_plain(new: NewJob) -> bool:
    """Tell whether one statement can make such jobs, however many, without BEGIN, COMMIT or a lock."""
    return new.parent_id is None and not (
        new.ports or new.aliases or new.state or new.tags or new.unique or new.depends_on or new.batch
    )


def _check_room(runtime: Runtime, unit: OpenUnit, made: Sequence[NewJob]) -> None:
    """Refuse a job at the call, inside a run, if its pool is full now; the commit takes the slots."""
    judged = [admission for admission in map(capacity.judged, made) if admission is not None]
    if not judged:
        return
    pending = Counter[str]()
    for new in unit.new_jobs().values():
        if (admission := capacity.judged(new)) is not None:
            pending[admission.pool.name] += admission.weight
    for admission in judged:
        capacity.check_room(runtime.connections, admission, pending=pending[admission.pool.name])
        pending[admission.pool.name] += admission.weight


def _create_plain(runtime: Runtime, drafts: Sequence[NewJob]) -> list[NewJob]:
    insert = partial(jobs.insert, new=drafts, check_interval_s=runtime.settings.lost_after)
    rows = runtime.connections.transact("enqueue", insert, single=True)
    return _followed(runtime, drafts, rows)


def _create_admitted(runtime: Runtime, drafts: Sequence[NewJob]) -> list[NewJob]:
    """Create plain jobs of capacity pools."""

    def work(executor: Transaction) -> Sequence[Any]:
        admitted = capacity.admit(executor, drafts)
        return jobs.insert(executor, admitted, check_interval_s=runtime.settings.lost_after)

    rows = runtime.connections.transact("enqueue", work, single=not any(map(capacity.judged, drafts)))
    return _followed(runtime, drafts, rows)


def _followed(runtime: Runtime, drafts: Sequence[NewJob], rows: Sequence[Any]) -> list[NewJob]:
    """Do the work that follows the commit of new jobs; return the jobs with their ids, which grow in their order."""
    made = _numbered(drafts, [row.job_id for row in rows])
    after_commit = AfterCommit()
    for new, row in zip(made, rows, strict=True):
        after_commit.created(new, row)
    follow(runtime, after_commit)
    if after_commit.pools:
        capacity.ring(runtime, after_commit.pools)
    return made


def _create_all(runtime: Runtime, made: Sequence[NewJob]) -> Sequence[NewJob]:
    carry_out(runtime, "enqueue", with_the_replaced(made))
    return made


def _until_known(runtime: Runtime, drafts: Sequence[NewJob], make: Callable[[], Sequence[NewJob]]) -> Sequence[NewJob]:
    """Make jobs; if the answer was lost, try again. Their task ids are unique, so no job is made twice.

    If the first commit is still in progress, the second try waits for it at the primary keys. Raises the first error if
    the store stays unreachable: then it is unknown whether the jobs were made. If so, they run.
    """
    try:
        return make()
    except NoAnswer:
        raise  # a second failure would have nothing to add
    except OutcomeUnknown as unknown:
        try:
            return make()
        except StoreUnavailableError:
            raise unknown from None
        except Exception:
            made = askings.jobs_of(runtime.connections, [new.task_id for new in drafts])
            if len(made) < len(drafts):
                raise
            return _numbered(drafts, [made[new.task_id] for new in drafts])


def _check_names_among(drafts: Sequence[NewJob]) -> None:
    """Refuse names that two of the new jobs have in common."""
    children = Counter((new.parent_id, new.name) for new in drafts if new.name is not None)
    for (parent_id, child), times in children.items():
        if times > 1:
            raise ChildNameTakenError(f"{times} new children of job {parent_id} want to be {child!r}; name them apart.")
    for alias, times in Counter(alias for new in drafts for alias in new.aliases).items():
        if times > 1:
            raise AliasTakenError(f"{times} new jobs want the alias {alias!r}; it can belong to one of them.")


def _check_child_names(executor: Transaction, drafts: Iterable[NewJob]) -> None:
    """Check names before writing into a borrowed transaction: an error of Postgres would abort it."""
    for new in drafts:
        if new.parent_id is None or new.name is None:
            continue
        if jobs.child(executor, new.parent_id, new.name) is not None:
            raise child_name_taken((new.parent_id, new.name))
