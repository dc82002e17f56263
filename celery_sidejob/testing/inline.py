"""Runs of jobs and durable tasks in the process of the test, from the store and without a broker."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..embedded.processes import is_alive
from ..hooks.bodies import Outcome
from ..hooks.broker.publishing import INLINE
from ..hooks.jobs.eager import DIED, run_kept, run_owed, worker_here
from ..hooks.worker import recording
from ..jobs.batch import settle_all
from ..jobs.job import Job
from ..model import native
from ..model.checks import is_number
from ..model.checks import shown as in_text
from ..model.crash_points import Died
from ..model.durable import Message
from ..model.errors import InvalidValueError
from ..operations.changes.follow_up import apply_due, apply_noted_asks, deliver_page
from ..operations.runtime import Runtime
from ..services.duty import Report
from ..services.heartbeat.heartbeat import Heartbeat
from ..services.sweep.dead_workers import DeadWorkers, LostRuns
from ..services.sweep.due import DueTasks
from ..services.sweep.sweep import Sweep
from ..store import publications, workers
from ..store.outbox.doorbells import doomed, due
from .databases import declare_dead
from .subject import shown, sidejob_of
from .waiting import wait_until

PAGE = 100


def run_job(job: Job, *, raise_errors: bool = True) -> Job:
    """Do the one run that a job owes now, and return the job as it is afterwards.

    Work that the run asks for does not run, such as its children and its next run. With `raise_errors` the error of its
    body is raised after its end is written. AssertionError if no run is owed.
    """
    if not isinstance(job, Job):
        raise InvalidValueError(f"run_job() takes a job, as enqueue() returns it, not {in_text(job)}.")
    sidejob = sidejob_of(job)
    runtime = sidejob.runtime
    with _working(runtime) as worker:
        apply_noted_asks(runtime, [job.id])
        rows = due(runtime.connections, job.id)
        if not rows:
            reasons = " and ".join(job.waiting_for)
            hint = f"it waits for: {reasons}." if reasons else "ask for one with run(), or write to a port."
            raise AssertionError(f"{shown(job.refresh())} owes no run now: {hint}")
        _judge(_run(sidejob, worker, rows[0]), raise_errors)
    return job.refresh()


def run_until_quiet(sidejob: Any, *, limit: int = 1000, raise_errors: bool = True) -> int:
    """Run all due jobs and durable tasks, and all work that follows from them; return the number of runs.

    Work that is due later stays in the store; `move_clock` brings it nearer. With `raise_errors` the first error of a
    body is raised after its end is written; otherwise errors are stored as a worker does. AssertionError if work is
    still due after `limit` runs; the message lists it.
    """
    if not isinstance(getattr(sidejob, "runtime", None), Runtime):
        raise InvalidValueError(f"run_until_quiet() takes a SideJob, not {in_text(sidejob)}.")
    if not is_number(limit, least=1):
        raise InvalidValueError(f"limit of run_until_quiet() is a number of runs, from 1 on, not {in_text(limit)}.")
    runtime = sidejob.runtime
    done = 0
    with _working(runtime) as worker:
        while rows := _due(runtime):
            for row in rows:
                outcome = _run(sidejob, worker, row)
                if outcome is None:
                    continue
                done += 1
                _judge(outcome, raise_errors)
                if done >= limit and (left := _due(runtime)):
                    still = ", ".join(f"job {row.job_id} ({row.task})" if row.job_id else row.task for row in left[:10])
                    raise AssertionError(f"This is not quiet after {limit} runs; due are {still}.")
    return done


@contextmanager
def _working(runtime: Runtime) -> Iterator[Heartbeat]:
    """Let this process be a worker within the block; other workers are not woken by its asks."""
    try:
        with native.within(INLINE, set[int]()):
            _rescue_lost(runtime)
            with worker_here(runtime) as worker:
                try:
                    yield worker
                except Died:
                    declare_dead(runtime.settings.require_database_url(), runtime.settings.schema, worker.worker_id)
                    raise
    finally:
        recording.end()


def _rescue_lost(runtime: Runtime) -> None:
    """Rescue or bury the runs of dead workers, as the sweeper does: of killed workers, and of this one if it "died".

    A worker whose process is gone is declared dead at once.
    """
    for row in workers.list_all(runtime.connections, runtime.settings):
        if row.dead_at is None and _is_gone(row.ident):
            declare_dead(runtime.settings.require_database_url(), runtime.settings.schema, row.id)
    sweep = Sweep(runtime)

    def all_rescued() -> bool:
        DeadWorkers(sweep).run_once()
        LostRuns(sweep).run_once()  # except jobs that the server keeps locked until it notices its client's death
        return not any(row.dead_at for row in workers.list_all(runtime.connections, runtime.settings))

    wait_until(all_rescued, message="the runs of dead workers to be rescued")
    ids = [row.task_id for row in doomed(runtime.connections)]
    if ids:
        DueTasks(sweep).judge(ids, Report())


def _is_gone(ident: str) -> bool:
    """Tell whether a worker has run on this machine, and is gone, or "died" in this process."""
    host, _, pid = ident.rpartition(":")[0].rpartition(":")
    return ident in DIED or (host == socket.gethostname() and not is_alive(int(pid)))


def _due(runtime: Runtime) -> Any:
    """Do the sweeper's due work, and return the rows of all runs that could begin now."""
    for channel in publications.channels(runtime.connections, after="", limit=PAGE):
        while deliver_page(runtime, channel):
            pass
    apply_due(runtime, PAGE)
    settle_all(runtime)
    return due(runtime.connections)


def _run(sidejob: Any, worker: Heartbeat, row: Any) -> Outcome | None:
    """Do the run of a row; None if it is already over."""
    if row.task not in sidejob.app.tasks:
        raise AssertionError(f"{row.task} is due, and this process does not know it: import the module of this task.")
    if row.body is None:
        return run_owed(sidejob.app, worker, row, eager=False)
    return run_kept(sidejob.app, worker, Message.of_row(row))


def _judge(outcome: Outcome | None, raise_errors: bool) -> None:
    if raise_errors and outcome is not None and outcome.error is not None:
        raise outcome.error
