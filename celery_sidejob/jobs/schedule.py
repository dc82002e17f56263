"""`Schedule`: a task with its times. Its declaration is checked like a call, and its due jobs are made from it.

The transaction that makes jobs or messages has locked the schedule's row and moves it on. If the process dies before
the commit, nothing was made, and another sweeper makes the jobs; after the commit, no sweeper finds them due.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ..awaiting import AioOf
from ..model import values
from ..model.changes import NewJob
from ..model.checks import check_number, check_texts
from ..model.errors import (
    InvalidValueError,
    ScheduleNotFoundError,
    SettingsError,
    SideJobError,
    StoreUnavailableError,
    UnknownTaskError,
)
from ..model.logger import logger
from ..model.schedule import Plan, Spec, parse
from ..operations.runtime import Runtime
from ..store import jobs
from ..store import schedules as rows
from ..store.errors import Moved
from ..store.schedules import Row
from ..store.statement import Transaction
from .drafts import draft
from .job import Job
from .works import Works, Written, ready, write

if TYPE_CHECKING:
    from ..aio import AioSchedule


PAGE = 100
"""How many jobs one transaction makes at most."""

SCHEDULE, NUMBER, NOMINAL_TIME = "sidejob_schedule", "sidejob_schedule_number", "sidejob_nominal_time"
"""Headers of a durable task's message, for the values that a job has as attributes."""


class Schedule:
    """A schedule, by its name; equal and hashable by it. Attributes ask the store."""

    aio: AioOf[AioSchedule] = AioOf("AioSchedule")
    """The verbs as coroutines."""

    def __init__(self, name: str, *, runtime: Runtime) -> None:
        self.name = name
        self._runtime = runtime

    def __repr__(self) -> str:
        return f"<Schedule {self.name}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    # -- declaration ---------------------------------------------------------------------------------------------

    @property
    def task(self) -> str:
        """The name of its task."""
        return self._read().spec.task

    @property
    def args(self) -> list[Any]:
        """The positional arguments of each call."""
        decoded: list[Any] = values.decode(self._read().spec.args)
        return decoded

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments of each call."""
        decoded: dict[str, Any] = values.decode(self._read().spec.kwargs)
        return decoded

    @property
    def options(self) -> dict[str, Any]:
        """The options of each call, beside the arguments."""
        decoded: dict[str, Any] = values.decode(self._read().spec.options)
        return decoded

    @property
    def every(self) -> timedelta | None:
        """The interval between two times; None if a cron expression determines them."""
        every_s = self._read().spec.every_s
        return None if every_s is None else timedelta(seconds=every_s)

    @property
    def cron(self) -> str | None:
        """The cron expression that determines its times; None if there is an interval."""
        return self._read().spec.cron

    @property
    def timezone(self) -> str | None:
        """The name of the time zone of the cron expression."""
        return self._read().spec.timezone

    @property
    def start(self) -> datetime | None:
        """The earliest time that it can have; intervals are counted from it."""
        return self._read().spec.start_at

    @property
    def end(self) -> datetime | None:
        """The latest time that it can have."""
        return self._read().spec.end_at

    @property
    def catch_up(self) -> str | int:
        """How many of the missed times still get a job: "all", "last", or a number."""
        return _caught_up(self._read().spec.catch_up)

    @property
    def overlap(self) -> str:
        """What happens at a time while the job of the previous time is still open: "allow", "skip" or "wait"."""
        return self._read().spec.overlap

    @property
    def jitter(self) -> float:
        """The largest delay, in seconds, that is added to a time."""
        return self._read().spec.jitter_s

    # -- state ---------------------------------------------------------------------------------------------------

    def next_times(self, n: int = 1) -> list[datetime]:
        """Return the next `n` times, in UTC; times that are already due come first. A paused schedule has no others."""
        check_number("n", n, of="times")
        return list(islice(self._read().plan.upcoming(), n))

    @property
    def last(self) -> Any:
        """The job that it made last (a durable task's result); None if it made none, or the job was deleted."""
        row = self._read()
        if row.last_job_id is None:
            return None if row.last_task_id is None else self._runtime.tasks.result(row.last_task_id)
        found = jobs.find(self._runtime.connections, [row.last_job_id])
        return Job(row.last_job_id, runtime=self._runtime, row=found[0]) if found else None

    @property
    def last_time(self) -> datetime | None:
        """The time for which it last made a job or message."""
        return self._read().last_at

    @property
    def count(self) -> int:
        """How many jobs or messages it has made; they are numbered from 1, without gaps."""
        return self._read().count

    @property
    def paused(self) -> bool:
        """Whether it is paused."""
        return self.paused_at is not None

    @property
    def paused_at(self) -> datetime | None:
        """When it was paused; None if it is not."""
        return self._read().paused_at

    @property
    def pause_reason(self) -> str | None:
        """Why it was paused, as given to `pause`."""
        return self._read().pause_reason

    @property
    def declared(self) -> bool:
        """Whether `sidejob_schedules` declares it, or did when a worker last started."""
        return self._read().declared is not None

    @property
    def trouble(self) -> str | None:
        """Why the due job cannot be made, such as an unknown task; it is tried again every few seconds."""
        return self._read().trouble

    @property
    def info(self) -> dict[str, Any]:
        """Everything about it that a person may want to see; `sidejob_redact` is applied to its call."""
        return info_of(self._read(), self._runtime.settings.redacted)

    @property
    def exists(self) -> bool:
        """Whether it still exists."""
        return bool(rows.read(self._runtime.connections, [self.name]))

    # -- verbs ---------------------------------------------------------------------------------------------------

    def pause(self, reason: str | None = None) -> Schedule:
        """Stop making jobs until `resume()`; takes effect at once, also in a run. Pausing again changes the reason.

        Times that pass during the pause get no job. Jobs that were due before the pause are made after it.
        """
        check_texts(reason=reason)

        def work(executor: Transaction) -> None:
            row = _locked(executor, self.name)
            plan = row.plan if row.paused_at is not None else row.plan.closed(rows.clock(executor))
            rows.pause(executor, plan, reason)

        self._runtime.connections.transact("pause-schedule", work)
        return self

    def resume(self) -> Schedule:
        """Continue from now; has no effect unless it is paused."""

        def work(executor: Transaction) -> None:
            row = _locked(executor, self.name)
            if row.paused_at is not None:
                window = row.spec.window(anchor=row.anchor_at, after=_later_than(row, rows.clock(executor)))
                rows.resume(executor, row.plan.then(window))

        self._runtime.connections.transact("resume-schedule", work)
        return self

    def run_now(self) -> Any:
        """Make one more job or message now, with the next number and the present time; returns the job, or the result.

        The schedule's times stay as they are. A pause and open jobs do not matter. In a run, too, it is made at once.
        """
        job_id, task_id = run_now(self._runtime, self.name)
        return Job(job_id, runtime=self._runtime) if job_id else self._runtime.tasks.result(task_id)

    def delete(self) -> bool:
        """Delete it with its due times; the jobs that it has made stay. Returns whether it existed.

        Raises InvalidValueError if `sidejob_schedules` declares it: the next worker to start would make it again.
        """
        if self.name in (self._runtime.settings.schedules or {}):
            raise InvalidValueError(
                f"Schedule {self.name!r} is declared in sidejob_schedules, so the next worker to start would make it "
                "again. Remove it from sidejob_schedules first, or pause it."
            )
        delete = partial(rows.delete, name=self.name)
        return self._runtime.connections.transact("delete-schedule", delete, single=True)

    # ------------------------------------------------------------------------------------------------------------

    def _read(self) -> Row:
        return get(self._runtime, self.name)


def get(runtime: Runtime, name: str) -> Row:
    """Return a schedule; raises ScheduleNotFoundError."""
    found = rows.read(runtime.connections, [name]).get(name)
    if found is None:
        raise _not_found(name)
    return found


def info_of(row: Row, redacted: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the `info` of a schedule from its row."""
    spec = row.spec
    return {
        "name": row.name, "task": spec.task, "args": redacted(values.decode(spec.args)),
        "kwargs": redacted(values.decode(spec.kwargs)), "options": redacted(values.decode(spec.options)),
        "every": spec.every_s, "cron": spec.cron, "timezone": spec.timezone, "start": spec.start_at,
        "end": spec.end_at, "catch_up": _caught_up(spec.catch_up), "overlap": spec.overlap,
        "jitter": spec.jitter_s, "next_time": row.next_at, "last_time": row.last_at, "last_job": row.last_job_id,
        "last_task_id": row.last_task_id, "count": row.count, "paused_at": row.paused_at,
        "pause_reason": row.pause_reason, "declared": row.declared is not None, "trouble": row.trouble,
    }  # fmt: skip


def _caught_up(catch_up: int | None) -> str | int:
    return "all" if catch_up is None else "last" if catch_up == 1 else catch_up


# -- making its jobs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledWorks(Works):
    """The works that a schedule makes in one transaction; `task_id` is that of the last."""

    count: int
    last_at: datetime
    task_id: str


def declare(runtime: Runtime, name: str, given: Mapping[str, Any]) -> None:
    """Make a schedule, or change it to this declaration; refuses a call that its task would refuse."""
    spec = _parse(runtime, name, given)
    check(runtime, spec)
    _declare(runtime, name, spec)


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
        if _declare(runtime, name, spec, declared=wanted):
            logger.info("Schedule %s is what sidejob_schedules declares", name)
    delete = partial(rows.delete_declared, but=list(declared))
    for name in runtime.connections.transact("delete-schedule", delete, single=True):
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
        row = get(runtime, name)
        works = prepare(runtime, row, [row.read_at])
        made = _make(runtime, row, row.plan, works, wait=True)
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


def _make_due(runtime: Runtime, row: Row) -> int:
    spec, plan, now = row.spec, row.plan, row.read_at
    if spec.overlap == "skip" and row.is_open:
        if _pass_over(runtime, row, plan.past(plan.until(now))):
            logger.info("Schedule %s passes over its times until now: %s is still open", row.name, row.last_task_id)
        return 0
    times = plan.due(now, keep=spec.catch_up, most=PAGE if spec.overlap == "allow" else 1)
    if not times:
        return 0
    made = _make(runtime, row, plan.past(times[-1]), prepare(runtime, row, times))
    return 0 if made is None else len(times)


def _make(runtime: Runtime, row: Row, plan: Plan, works: ScheduledWorks, *, wait: bool = False) -> int | None:
    """Make works of a schedule, unless it has changed since its `row` was read; `plan` has the times that remain.

    Returns the id of the last job, 0 for messages; None if nothing was made. With `wait` it waits for a transaction
    that has locked the row.
    """

    def work(executor: Transaction) -> Written | None:
        if rows.lock_at(executor, row.name, row.revision, wait=wait) is None:
            return None
        written = write(runtime, executor, works)
        rows.go_on(
            executor,
            plan,
            paused=row.paused_at is not None,
            made=works.count,
            last_at=works.last_at,
            last_job_id=written.last_id or None,
            last_task_id=works.task_id,
        )
        return written

    written = runtime.connections.transact("schedule", work)
    if written is None:
        return None
    written.follow(runtime)
    return written.last_id


def _pass_over(runtime: Runtime, row: Row, plan: Plan) -> bool:
    """Pass over the due times; False if the schedule has changed since its `row` was read, or is locked."""

    def work(executor: Transaction) -> bool:
        if rows.lock_at(executor, row.name, row.revision) is None:
            return False
        rows.go_on(executor, plan, paused=False)
        return True

    return runtime.connections.transact("schedule", work)


def _declare(runtime: Runtime, name: str, spec: Spec, *, declared: Mapping[str, Any] | None = None) -> bool:
    """Make a schedule, or change it to this; returns whether that changed anything.

    `declared`: its declaration in the configuration, which is applied if it differs from the last one. Times until now
    follow the old timing, and due ones still get their jobs. Later times follow the new timing.
    """

    def work(executor: Transaction) -> bool:
        row = rows.lock(executor, name)
        now = rows.clock(executor)
        if row is None:
            anchor = spec.start_at or now
            plan = spec.first_plan(name, anchor=anchor)
            if not rows.insert(executor, plan, spec, anchor_at=anchor, declared=declared):
                raise Moved(f"schedule {name!r} was made meanwhile")
            return True
        last = row.declared if declared is None else declared
        if row.declared == last and (declared is not None or row.spec == spec):
            return False
        anchor, plan = row.anchor_at, replace(row.plan, jitter_s=spec.jitter_s)
        paused = row.paused_at is not None
        if spec.origin != row.spec.origin:
            anchor = spec.start_at or now
        if spec.timing != row.spec.timing:
            plan = plan.closed(now)
            if not paused:
                plan = plan.then(spec.window(anchor=anchor, after=_later_than(row, now)))
        rows.change(executor, plan, spec, paused=paused, anchor_at=anchor, declared=last)
        return True

    return runtime.connections.transact("declare-schedule", work)


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


def _later_than(row: Row, now: datetime) -> datetime:
    """Return the moment after which new times begin: the store's clock may have been put back behind earlier times."""
    return now if row.last_at is None else max(now, row.last_at)


def _locked(executor: Transaction, name: str) -> Row:
    row = rows.lock(executor, name)
    if row is None:
        raise _not_found(name)
    return row


def _not_found(name: str) -> ScheduleNotFoundError:
    """Return the error for a schedule that does not exist."""
    return ScheduleNotFoundError(f"There is no schedule {name!r}: it was never made, or was deleted.")
