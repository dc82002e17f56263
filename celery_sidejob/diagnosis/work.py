"""Work that is stuck: no worker serves its queue or knows its task, or the broker does not take its messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, TypeVar

from ..model.errors import SchemaError, StoreUnavailableError
from ..model.finding import Finding, check, error, graded, warning, well
from ..model.printable import counted, first_of
from ..operations.runtime import Runtime
from ..store import asks, health, parked, registry, room, stats, waiting, workers
from ..store import queues as queue_rows
from ..store import schedules as schedule_rows
from ..store.statement import Transaction

T = TypeVar("T")

UNPUBLISHED_S = (10.0, 60.0)
"""Seconds for which a message may wait for the broker: longer is a warning, then an error."""
UNSENT_S = 60.0
UNMADE_S = 60.0
"""Seconds for which a schedule may be due: a busy sweeper makes its jobs later."""
FORGOTTEN_S = 3600.0
"""Seconds for which a queue may be paused while work waits there."""
UNSERVED_S = 60.0
"""Seconds for which runs with a task unknown to all workers may be due: a worker that knows it may be restarting."""
MOMENT = "%Y-%m-%d %H:%M:%S%z"
REVOKED = "revoked"
"""The reason of entries that a person has revoked: they are no problem."""
GIVE_UP = (
    "Or give the work up: a durable task with celery -A <app> sidejob revoke <task id>, a job with celery -A <app> "
    "sidejob terminate --without-shutdown <job id>."
)


def queues(executor: Transaction, runtime: Runtime) -> Iterator[Finding]:
    """Check for queues with due runs that no live worker serves, and for messages that wait for the broker.

    One read serves both checks: the depths of long queues are estimated, which takes a while.
    """
    rows = waiting.depths(executor)
    yield from _unserved(executor, runtime, rows)
    yield from _publishing(rows)


@check("queues")
def _unserved(executor: Transaction, runtime: Runtime, depth_of: Sequence[Any]) -> Iterator[Finding]:
    found = _of_first_store(executor, runtime, lambda first: _served(first, runtime))
    if found is None:
        return
    served, unannounced = found
    rows = [row for row in depth_of if row.depth and row.queue not in served]
    shown = first_of(f"{row.queue} ({row.depth} due)" for row in rows)
    if not rows:
        yield well("every queue in which something is due has a worker")
    elif unannounced:
        names = first_of(row.ident for row in unannounced)
        yield warning(
            f"no worker has said that it serves {shown}",
            remedy="Run doctor again in a moment.",
            meaning=f"Worker {names} has just started, and has not said yet what it serves: perhaps these queues.",
        )
    else:
        yield error(
            f"nobody serves {shown}",
            meaning="These runs will never begin.",
            remedy=f"Start a worker with -Q {','.join(row.queue for row in rows)}, and keep it while something "
            f"waits there: a corrected queue or route applies to new work only. {GIVE_UP}",
        )


@check("publishing", "nothing waits for the broker")
def _publishing(depth_of: Sequence[Any]) -> Iterator[Finding]:
    rows = [row for row in depth_of if row.oldest_unpublished_s is not None]
    oldest_s = max((row.oldest_unpublished_s or 0.0 for row in rows), default=0.0)
    if oldest_s <= UNPUBLISHED_S[0]:
        return
    names = first_of(sorted(row.queue for row in rows))
    yield graded(oldest_s, UNPUBLISHED_S)(
        f"{counted(sum(row.unpublished for row in rows), 'message', 'messages')} of {names} due and not "
        f"published, the oldest for {oldest_s:.0f} s",
        meaning="The broker does not accept them, or nobody sweeps. Their runs begin later; nothing is lost.",
        remedy="See broker and sweeping below; the log of the worker that sweeps has the broker's answers.",
    )


@check("tasks")
def tasks(executor: Transaction, runtime: Runtime) -> Iterator[Finding]:
    """Check for due runs whose task no worker knows."""
    due = registry.due(executor, for_s=UNSERVED_S)
    rows = _of_first_store(
        executor, runtime, lambda first: registry.unserved(first, due, workers.silent(first, runtime.settings))
    )
    if rows is None:
        return
    if rows:
        shown = first_of(f"{row.task} in {row.queue} ({row.runs} due)" for row in rows)
        yield error(
            f"no live worker of its queue knows {shown}",
            meaning="These runs do not begin. They are parked when a worker gets their message.",
            remedy="Start a worker of that queue that imports the task, or register a renamed task under its old "
            f"name too. {GIVE_UP}",
        )
    jobs = Counter[str]()
    for row in due:
        jobs[row.task] += row.jobs
    for row in rows:
        del jobs[row.task]
    unknown = registry.never_served(executor, +jobs)
    if unknown:
        shown = first_of(f"{task} ({number} due)" for task, number in jobs.most_common() if task in unknown)
        yield warning(
            f"no worker has ever served {shown}",
            meaning="The task was renamed, or the workers do not import its module: a worker parks the job when it "
            "gets its message.",
            remedy="Register the task under its old name too, or import its module (imports, autodiscover_tasks).",
        )
    declined = parked.count(executor)
    if declined:
        shown = first_of(f"{row.runs} of {row.task} in {row.queue}" for row in declined)
        yield error(
            f"workers have declined runs: {shown}",
            meaning="The workers that got their messages did not know the task, or could not read the message. They "
            f"run once a worker can. A durable task goes to the dead set after {parked.PATIENCE}; jobs wait.",
            remedy="Start a worker of that queue that imports the task, or register a renamed task under its old "
            f"name too. If the workers do know it, their log says why they cannot read the message. {GIVE_UP}",
        )
    if not (rows or unknown or declined):
        yield well("every task of which a run is due is known to a worker")


@check("schedules", "nothing that schedules have due waits")
def schedules(executor: Transaction, runtime: Runtime) -> Iterator[Finding]:
    """Check for schedules that make no jobs: they cannot, no worker makes them, or a pause was forgotten."""
    due = schedule_rows.troubled(executor, for_s=UNMADE_S)
    troubled = [f"{row.name} (due since {row.due_at:{MOMENT}}: {row.trouble})" for row in due if row.trouble]
    if troubled:
        yield error(
            f"what is due cannot be made: {first_of(troubled)}",
            meaning="It is tried again every few seconds, and made then; catch_up says how much of it.",
            remedy="Start workers that know the task, or change the schedule, or delete it: "
            "celery -A <app> sidejob schedules delete <name>.",
        )
    late = [f"{row.name} (since {row.due_at:{MOMENT}})" for row in due if not row.trouble]
    if late:
        yield warning(
            f"what is due is not made yet: {first_of(late)}",
            remedy="See sweeping below.",
            meaning="Nobody sweeps, or there is more to make than a sweeper has made by now.",
        )
    resting = schedule_rows.resting(executor, for_s=FORGOTTEN_S)
    stopped = [_paused(row) for row in resting if row.paused_s is not None]
    if stopped:
        yield warning(
            f"paused: {first_of(stopped)}",
            meaning="They make nothing until somebody resumes them.",
            remedy="Resume what was forgotten: celery -A <app> sidejob schedules resume <name>.",
        )
    skipping = [
        f"{row.name} is {'skipping' if row.overlap == 'skip' else 'waiting'} since {since:{MOMENT}}: "
        + (f"job {row.last_job_id} is {row.status}" if row.last_job_id else f"task {row.last_task_id} is not finished")
        for row in resting
        if row.paused_s is None and (since := _held_back_since(executor, row.name))
    ]
    if skipping:
        yield warning(
            first_of(skipping, separator="; "),
            meaning="With overlap='skip' or 'wait' a schedule makes nothing while what it made last is open.",
            remedy="Look why it does not end: celery -A <app> sidejob show <job or task id>. Then run, terminate or "
            "revoke it.",
        )


def _paused(row: Any) -> str:
    why = f", {row.pause_reason}" if row.pause_reason else ""
    return f"{row.name} (for {row.paused_s / 3600:.1f} h{why})"


def _held_back_since(executor: Transaction, name: str) -> datetime | None:
    """Return the first time that a schedule has not made because of its overlap rule, if that is a while ago."""
    row = schedule_rows.read(executor, [name])[name]
    assert row.last_at is not None
    first = next(row.spec.window(anchor=row.anchor_at, after=row.last_at).times(row.last_at), None)
    is_old = first is not None and first < row.read_at - timedelta(seconds=FORGOTTEN_S)
    return first if is_old else None


@check("timers", "none of the next timers is of a completed job")
def timers(executor: Transaction, runtime: Runtime) -> Iterator[Finding]:
    """Check for timers that run a job again although it has completed since they were set."""
    found = asks.timers_of_completed(executor)
    if not found:
        return
    shown = first_of(f"job {row.job_id} at {row.due_at:{MOMENT}}" for row in found)
    yield warning(
        f"completed jobs run again: {shown}",
        meaning="A run has set the timer, by run(countdown=) or run(eta=), and the job has completed since then.",
        remedy="If the timer was to end a wait, use suspend(timeout=...) instead. job.cancel_timer() removes it.",
    )


@check("paused queues", "no queue was paused and forgotten")
def paused(executor: Transaction, runtime: Runtime) -> Iterator[Finding]:
    """Check for queues that were paused and perhaps forgotten: work has waited in them for long."""
    for row in queue_rows.paused(executor, for_s=FORGOTTEN_S):
        if not row.waiting:
            continue
        why = f" ({row.pause_reason})" if row.pause_reason else ""
        yield warning(
            f"{row.name} has been paused for {row.paused_s / 3600:.1f} h{why}, and something waits",
            meaning="Nothing of it begins until somebody resumes it.",
            remedy=f"Resume it, if it was forgotten: celery -A <app> sidejob resume {row.name}.",
        )


@check("full ports", "no job waits for a reader that has failed or is terminated")
def full_ports(executor: Transaction, runtime: Runtime) -> Iterator[Finding]:
    """Check for jobs that wait for room on a port whose reader does not run by itself."""
    rows = room.unread(executor)
    if not rows:
        return
    shown = first_of(
        (
            f"job {row.waiter_id}{f' and {row.jobs - 1} more' if row.jobs > 1 else ''} for the {row.direction}put port "
            f"{row.port} of job {row.job_id}, whose reader, job {row.reader_id}, is {row.status}"
            for row in rows
        ),
        separator="; ",
    )
    yield warning(
        f"jobs wait for room: {shown}",
        meaning="The port has a limit and is full, and its reader does not run by itself: these jobs wait for ever.",
        remedy="Have the reader run again with celery -A <app> sidejob run --force <reader id>. Or read the port in "
        "Python, raise its limit with configure_ports, or give up the job that waits, with sidejob terminate.",
    )


@check("results", "the result backend has them")
def results(executor: Transaction, runtime: Runtime) -> Iterator[Finding]:
    """Check for results that wait for the result backend."""
    unsent, oldest_s = stats.results(executor)
    if oldest_s is not None and oldest_s > UNSENT_S:
        yield warning(
            f"{counted(unsent.number, 'result waits', 'results wait')} for the result backend, the oldest for "
            f"{oldest_s:.0f} s",
            meaning="Callers of result.get(), chords and errbacks still wait for them.",
            remedy="Check whether the result backend is up and accepts the workers' writes.",
        )


@check("dead set", "empty")
def dead(executor: Transaction, runtime: Runtime) -> Iterator[Finding]:
    """Check the dead set."""
    entries, _ = stats.dead_entries(executor)
    if not entries.number:
        return
    groups = stats.dead_groups(executor)
    others = [row for row in groups if row.reason != REVOKED]
    total = f"{'about ' if entries.is_estimated else ''}{counted(entries.number, 'entry', 'entries')}"
    if not others and not entries.is_estimated:
        yield well(f"{total}, all revoked on purpose (`dead purge --reason {REVOKED}` removes them)")
        return
    shown = first_of((f"{row.entries} of {row.task} ({row.group})" for row in others or groups), most=3)
    revoked = sum(row.entries for row in groups if row.reason == REVOKED)
    yield warning(
        f"{total}: {shown}{f'; {revoked} revoked on purpose' if revoked else ''}",
        meaning="These jobs and durable tasks failed for good, kept killing their workers or have expired. They stay "
        "until a person decides.",
        remedy="List them with celery -A <app> sidejob dead groups, fix the cause, then celery -A <app> sidejob "
        "dead retry, in Python sidejob.dead.retry(id); or leave them to sidejob_dead_retention.",
    )


def _of_first_store(executor: Transaction, runtime: Runtime, ask: Callable[[Transaction], T]) -> T | None:
    """Ask the first store, where workers record the queues of all stores; None if it does not answer."""
    if runtime.store.place == 0:
        return ask(executor)
    primary = runtime.at_place(0).connections
    try:
        with health.looking(primary):
            return primary.read(ask, within_s=runtime.wait_s)
    except (StoreUnavailableError, SchemaError):  # its own findings report this
        return None


def _served(executor: Transaction, runtime: Runtime) -> tuple[set[str], Sequence[Any]]:
    """Read the queues that live workers serve, and the workers that have not recorded theirs."""
    silent = workers.silent(executor, runtime.settings)
    return set(registry.workers_of_queues(executor, silent)), registry.unannounced(executor, silent)
