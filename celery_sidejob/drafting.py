"""Making jobs, from the arguments of `enqueue` to drafts, and from drafts to rows: in a run's unit or at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from .lookup import locate
from .model.changes import NewJob
from .model.errors import AliasTakenError, ChildNameTakenError, JobNotFoundError
from .model.names import check_alias, check_child_name
from .open_unit import active
from .operations.creation import create, draft
from .operations.family import alias_taken, child_name_taken
from .operations.runtime import Runtime
from .store import jobs
from .store.statement import Executor


def prepare(
    runtime: Runtime,
    task: Any,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    queue: str | None = None,
    parent: Any = None,
    child_name: str | None = None,
    eta: datetime | None = None,
    countdown: float | None = None,
    created_by: str | None = None,
    inports: Any = None,
    outports: Any = None,
    aliases: Iterable[str] = (),
    state: Mapping[str, Any] | None = None,
    priority: int | None = None,
    executor: Executor | None = None,
    **apply_async_options: Any,
) -> NewJob:
    """Check everything a new job is made of, and return it without an id; nothing is written.

    The parent is looked for by `executor`: it may have been made in the caller's transaction.
    """
    if eta is not None:
        apply_async_options["eta"] = eta
    if countdown is not None:
        apply_async_options["countdown"] = countdown
    call = runtime.tasks.call(task, args, kwargs, queue=queue, priority=priority, options=apply_async_options)
    parent_id = None
    if parent is not None:
        above = locate(runtime, parent, executor)
        if above is None:
            raise JobNotFoundError(f"There is no job {parent!r} to be the parent of a new {call.task!r}.")
        parent_id = above[0]
        if active() is not None and child_name is not None:
            check_child_name_is_free(runtime, parent_id, check_child_name(child_name))
    unit = active()
    if created_by is None and unit is not None:
        created_by = f"job:{unit.hold.job_id}"
    if unit is not None and not isinstance(aliases, str):
        aliases = list(aliases)
        for name in aliases:
            if (owner := locate(runtime, check_alias(name))) is not None:
                raise alias_taken(name, owner[0])
    return draft(
        runtime, call, parent_id=parent_id, child_name=child_name, created_by=created_by, inports=inports,
        outports=outports, aliases=aliases, state=state,
    )  # fmt: skip


def make(runtime: Runtime, drafts: Sequence[NewJob], transaction: Any = None) -> list[NewJob]:
    """Make prepared jobs, all or none: in the run's unit, the caller's transaction or one of ours.

    Returns them with their ids, in order.
    """
    unit = active()
    _check_names_among(drafts)
    if unit is None or transaction is not None:
        ids = create(runtime, drafts, transaction)
        return [replace(new, id=job_id) for new, job_id in zip(drafts, ids, strict=True)]
    ids = jobs.next_ids(runtime.connections, len(drafts))
    made = [replace(new, id=job_id) for new, job_id in zip(drafts, ids, strict=True)]
    for new in made:
        unit.add(new)
    return made


def check_child_name_is_free(runtime: Runtime, parent_id: int, name: str) -> None:
    """Refuse at the call, inside a run, what its commit would refuse."""
    unit = active()
    assert unit is not None
    gained, gone = unit.family(parent_id)
    other = gained.get(name)
    if other is None and parent_id not in unit.new_jobs():
        other = jobs.child(runtime.connections, parent_id, name)
    if other is not None and (name in gained or other not in gone):
        raise child_name_taken((parent_id, name))


def _check_names_among(drafts: Sequence[NewJob]) -> None:
    """Refuse names that two of the new jobs want to have."""
    children = Counter((new.parent_id, new.child_name) for new in drafts if new.child_name is not None)
    for (parent_id, child), times in children.items():
        if times > 1:
            raise ChildNameTakenError(f"{times} new children of job {parent_id} want to be {child!r}; name them apart.")
    for alias, times in Counter(alias for new in drafts for alias in new.aliases).items():
        if times > 1:
            raise AliasTakenError(f"{times} new jobs want the alias {alias!r}; it can belong to one of them.")
