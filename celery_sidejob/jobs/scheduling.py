"""From a schedule to its jobs: checks its declaration like a call, and makes the due jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any
from uuid import uuid4

from ..model import values
from ..model.changes import NewJob
from ..model.errors import SettingsError, SideJobError, StoreUnavailableError, UnknownTaskError
from ..model.logger import logger
from ..model.schedule import Spec, parse
from ..operations import schedules
from ..operations.runtime import Runtime
from ..operations.schedules import ScheduledWorks
from ..store import schedules as rows
from ..store.schedules import Row
from .drafts import draft
from .following import ready

PAGE = 100
"""How many jobs one transaction makes at most."""

SCHEDULE, NUMBER, NOMINAL_TIME = "sidejob_schedule", "sidejob_schedule_number", "sidejob_nominal_time"
"""Headers of a durable task's message, for the values that a job has as attributes."""


def declare(runtime: Runtime, name: str, given: Mapping[str, Any]) -> None:
    """Make a schedule, or change it to this declaration; refuses a call that its task would refuse."""
    spec = _parse(runtime, name, given)
    check(runtime, spec)
    schedules.declare(runtime, name, spec)


def apply_declared(runtime: Runtime, declared: Mapping[str, Mapping[str, Any]]) -> None:
    """Apply the declarations of `sidejob_schedules` that have changed, and delete the schedules of removed ones.

    Unchanged declarations keep their changes from run time. If neither this process nor the store knows a declaration's
    task, a worker that knows the task applies it. Raises SettingsError for a call that its task would refuse.
    """
    known = rows.read(runtime.connections, declared) if declared else {}
    for name, given in declared.items():
        spec = _parse(runtime, name, given)
        wanted = spec.as_json()
        if name in known and known[name].declared == wanted:
            continue
        try:
            check(runtime, spec)
        except UnknownTaskError as error:
            logger.warning("Schedule %s of sidejob_schedules is left as it is in the store: %s", name, error)
            continue
        except StoreUnavailableError:
            raise
        except (SideJobError, TypeError) as error:
            raise SettingsError(f"sidejob_schedules[{name!r}] cannot be: {error}") from error
        if schedules.declare(runtime, name, spec, declared=wanted):
            logger.info("Schedule %s is what sidejob_schedules declares", name)
    for name in schedules.delete_declared(runtime, but=declared):
        logger.info("Schedule %s is deleted: sidejob_schedules does not declare it any more", name)


def make_due(runtime: Runtime, row: Row) -> int:
    """Make a schedule's due jobs or messages, at most a page, and return how many; raises the error that prevents it.

    After an error the schedule stays due, and its row has the reason.
    """
    try:
        return _make_due(runtime, row)
    except StoreUnavailableError:
        raise
    except Exception as error:
        rows.note_trouble(runtime.connections, row.name, row.revision, f"{type(error).__name__}: {error}"[:1000])
        raise


def run_now(runtime: Runtime, name: str) -> tuple[int, str]:
    """Make one more work of a schedule now, whether or not it is paused: (job's id or 0, task id)."""
    while True:
        row = schedules.get(runtime, name)
        works = prepare(runtime, row, [row.read_at])
        made = schedules.make(runtime, row, row.plan, works, wait=True)
        if made is not None:
            return made, works.task_id


def check(runtime: Runtime, spec: Spec) -> None:
    """Refuse a call that the schedule's task would refuse; nothing is written."""
    args, kwargs, options = _call_of(spec)
    if runtime.tasks.kind(spec.task) == "job":
        draft(runtime, spec.task, args, kwargs, **options)
    else:
        runtime.tasks.check_message(spec.task, args, kwargs, options)


def prepare(runtime: Runtime, row: Row, times: Sequence[datetime]) -> ScheduledWorks:
    """Prepare a schedule's jobs or messages for some of its times; nothing is written."""
    args, kwargs, options = _call_of(row.spec)
    calls = [(str(uuid4()), number, time) for number, time in enumerate(times, row.count + 1)]
    is_job = runtime.tasks.kind(row.spec.task) == "job"
    own = [
        {**options, "task_id": task_id, **({} if is_job else _headers(options, row, number, time))}
        for task_id, number, time in calls
    ]
    works = ready(runtime, row.spec.task, args, kwargs, own)
    # There are either jobs or messages.
    jobs = [_of_schedule(new, row, number, time) for new, (_, number, time) in zip(works.jobs, calls, strict=False)]
    messages = [
        message if message.eta is not None else replace(message, eta=_due_at(row, time))
        for message, (*_, time) in zip(works.messages, calls, strict=False)
    ]
    last_id, _, last_at = calls[-1]
    return ScheduledWorks(
        count=len(calls), last_at=last_at, task_id=last_id, jobs=jobs, messages=messages, tell=works.tell
    )


# --------------------------------------------------------------------------------------------------------------------


def _make_due(runtime: Runtime, row: Row) -> int:
    spec, plan, now = row.spec, row.plan, row.read_at
    if spec.overlap == "skip" and row.is_open:
        if schedules.pass_over(runtime, row, plan.past(plan.until(now))):
            logger.info("Schedule %s passes over its times until now: %s is still open", row.name, row.last_task_id)
        return 0
    times = plan.due(now, keep=spec.catch_up, most=PAGE if spec.overlap == "allow" else 1)
    if not times:
        return 0
    made = schedules.make(runtime, row, plan.past(times[-1]), prepare(runtime, row, times))
    return 0 if made is None else len(times)


def _parse(runtime: Runtime, name: str, given: Mapping[str, Any]) -> Spec:
    return parse(name, given, timezone=runtime.tasks.timezone, limit=runtime.settings.max_value_bytes)


def _call_of(spec: Spec) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    return values.decode(spec.args), values.decode(spec.kwargs), values.decode(spec.options)


def _of_schedule(new: NewJob, row: Row, number: int, time: datetime) -> NewJob:
    due_at = None if new.wait_s is not None else _due_at(row, time)
    return replace(new, schedule=row.name, schedule_no=number, nominal_at=time.isoformat(), due_at=due_at)


def _due_at(row: Row, time: datetime) -> datetime:
    """Return the moment since which the work of a time is due, however late the sweeper is; now for `run_now`."""
    return min(row.plan.made_at(time), row.read_at)


def _headers(options: Mapping[str, Any], row: Row, number: int, time: datetime) -> dict[str, Any]:
    told = {SCHEDULE: row.name, NUMBER: number, NOMINAL_TIME: time.isoformat()}
    return {"headers": {**(options.get("headers") or {}), **told}}
