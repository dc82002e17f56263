"""Works: jobs, or messages of a durable task, that the sweeper makes by calls which are stored.

A call is checked when it is given, and stored as JSON. It is made later, for a schedule or after a batch, in the
transaction that records that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from ..model import values
from ..model.changes import NewJob
from ..model.checks import shown
from ..model.durable import Message
from ..model.errors import InvalidValueError
from ..operations.after_commit import AfterCommit, publish_kept
from ..operations.changes.follow_up import follow_up
from ..operations.changes.unit_of_work import Applied
from ..operations.gates import capacity
from ..operations.gates.capacity import Work
from ..operations.ledger.keeping import keep_in
from ..operations.runtime import LocalRuntime, Runtime
from ..store import jobs
from ..store.statement import Transaction
from .drafts import draft

OPTIONS = ("queue", "priority", "countdown")
"""The options that a stored call may have."""

Following = Mapping[str, str]
"""A call of a sidejob task or a durable task: its `task`; its `args`, `kwargs` and `options` as JSON text."""


def following_of(runtime: Runtime, where: str, call: Any) -> Following:
    """Check a call: a task, or a signature of a task with its arguments, `queue`, `priority` and `countdown`."""
    given: Mapping[str, Any] = call if isinstance(call, Mapping) else {"task": getattr(call, "name", call)}
    name = given.get("task")
    if not isinstance(name, str) or given.get("subtask_type") is not None:
        raise InvalidValueError(f"{where}= takes a task or a signature of one task, not {shown(call)}.")
    options = {key: value for key, value in (given.get("options") or {}).items() if value is not None}
    unknown = [key for key in options if key not in OPTIONS]
    if unknown:
        known = ", ".join(OPTIONS)
        raise InvalidValueError(f"{where}= takes a signature with {known}, not with {', '.join(unknown)}.")
    limit = runtime.settings.max_value_bytes
    found = {
        "task": name,
        "args": values.encode(list(given.get("args") or ()), limit=limit, what=f"args of {where}"),
        "kwargs": values.encode(dict(given.get("kwargs") or {}), limit=limit, what=f"kwargs of {where}"),
        "options": values.encode(options, what=f"options of {where}"),
    }
    works_of(runtime, [found])  # refuses the call as a real call would; nothing is written
    return found


def works_of(runtime: Runtime, calls: Iterable[Following]) -> list[Works]:
    """Make calls ready to be written."""
    return [
        ready(
            runtime,
            call["task"],
            values.decode(call["args"]),
            values.decode(call["kwargs"]),
            [{**values.decode(call["options"]), "task_id": str(uuid4())}],
        )
        for call in calls
    ]


def ready(
    runtime: Runtime, task: str, args: list[Any], kwargs: Mapping[str, Any], options: Sequence[dict[str, Any]]
) -> Works:
    """Make calls of one task ready to be written, one for each of these options; a full pool makes them wait."""
    if runtime.tasks.kind(task) == "job":
        new = [_waiting(draft(runtime, task, args, kwargs, **each)) for each in options]
        capacity.prepare(runtime, [each.admission for each in new])
        return Works(jobs=new)
    for each in options[:1]:
        runtime.tasks.check_message(task, args, kwargs, each)
    messages, tell = runtime.tasks.messages(task, args, kwargs, options)
    return Works(messages=[_waiting(message) for message in messages], tell=tell)


def _waiting(work: Work) -> Work:
    """Return the job or message, changed so that it waits for a slot if its pool is full."""
    return work if work.admission is None else replace(work, admission=replace(work.admission, mode="wait"))


# -- writing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Works:
    """New jobs, or messages of a durable task."""

    jobs: Sequence[NewJob] = ()
    messages: Sequence[Message] = ()
    tell: Callable[[], None] = lambda: None
    """Reports the messages once they are kept."""


@dataclass(frozen=True, slots=True)
class Written:
    """Written works, and the work that follows the commit. `last_id` is the last job's, 0 if there is none."""

    works: Works
    last_id: int
    after_commit: AfterCommit
    to_send: Sequence[Message]

    def follow(self, runtime: Runtime) -> None:
        """Do the work that follows the commit."""
        follow_up(runtime, self.after_commit)
        if self.to_send:
            publish_kept(runtime, self.to_send)
        self.works.tell()


def write(runtime: LocalRuntime, executor: Transaction, works: Works) -> Written:
    """Write works in a transaction of ours."""
    last_id, after_commit = 0, AfterCommit()
    if works.jobs:
        ids = jobs.next_ids(executor, len(works.jobs))
        made = [replace(new, id=job_id) for new, job_id in zip(works.jobs, ids, strict=True)]
        after_commit = Applied(runtime, executor, made).done().after_commit
        last_id = made[-1].id
    to_send = keep_in(runtime, executor, works.messages) if works.messages else works.messages
    return Written(works, last_id, after_commit, to_send)
