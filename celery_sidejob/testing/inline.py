"""Runs of jobs and durable tasks in the process of the test, from the store and without a broker."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..hooks.broker.publishing import INLINE
from ..hooks.jobs.eager import run_owed, worker_here
from ..hooks.outcome import Outcome
from ..hooks.tasks.inline import run_kept
from ..hooks.worker import recording
from ..jobs.batch import settle_all
from ..jobs.job import Job
from ..model.checks import is_number
from ..model.checks import shown as in_text
from ..model.crash_points import Died
from ..model.durable import Message
from ..model.errors import InvalidValueError
from ..operations.noted_asks import apply_due, apply_noted_asks
from ..operations.publications import deliver_page
from ..operations.runtime import Runtime
from ..services.duty import Report
from ..services.heartbeat.heartbeat import Heartbeat
from ..services.sweep.dead_workers import DeadWorkers, LostRuns
from ..services.sweep.due import DueTasks
from ..services.sweep.sweep import Sweep
from ..store import publications, workers
from ..store.outbox.doorbells import doomed, due
from .databases import declare_dead
from .freezing import family
from .subject import shown, sidejob_of
from .waiting import wait_until

PAGE = 100


def run_job(job: Job, *, raise_errors: bool = True) -> Job:
    """Do the one run that a job owes now, and return the job as it is then.

    What else it asks for stays asked for: its children, say, and its next run. With `raise_errors` the error of its
    body is raised, once its end is written. AssertionError if no run is owed.
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
    """Run the jobs and durable tasks that are due, and all that they lead to; return the number of runs.

    What is due later stays in the store; `move_clock` brings it nearer. With `raise_errors` the first error of a body
    is raised, once its end is written; without it, errors are kept as a worker keeps them. AssertionError if there is
    more to run after `limit` runs, with the jobs and tasks that are still due.
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
    """Have this process be a worker within the block, and tell no other one of what is asked for."""
    inline = INLINE.set(set())
    try:
        _rescue_lost(runtime)
        with worker_here(runtime) as worker:
            try:
                yield worker
            except Died:
                declare_dead(runtime.settings.require_database_url(), runtime.settings.schema, worker.worker_id)
                raise
    finally:
        INLINE.reset(inline)
        recording.end()


def _rescue_lost(runtime: Runtime) -> None:
    """Rescue or bury what dead workers held, as the sweeper does: killed ones, and what this process was as it "died".

    A worker whose process is gone is not waited for.
    """
    for row in workers.list_all(runtime.connections, runtime.settings):
        if row.dead_at is None and _is_gone(row.ident):
            declare_dead(runtime.settings.require_database_url(), runtime.settings.schema, row.id)
    sweep = Sweep(runtime)

    def all_rescued() -> bool:
        DeadWorkers(sweep).run_once()
        LostRuns(sweep).run_once()  # not a job that the server has locked until it notices its client's death
        return not any(row.dead_at for row in workers.list_all(runtime.connections, runtime.settings))

    wait_until(all_rescued, message="the runs of dead workers to be rescued")
    ids = [row.task_id for row in doomed(runtime.connections)]
    if ids:
        DueTasks(sweep).judge(ids, Report())


def _is_gone(ident: str) -> bool:
    """Tell whether a worker has run on this machine, and does not any more."""
    host, _, pid = ident.rpartition(":")[0].rpartition(":")
    return host == socket.gethostname() and not family(int(pid))


def _due(runtime: Runtime) -> Any:
    """Apply what the sweeper would, and return the rows of what could run now."""
    for channel in publications.channels(runtime.connections, after="", limit=PAGE):
        while deliver_page(runtime, channel):
            pass
    apply_due(runtime, PAGE)
    settle_all(runtime)
    return due(runtime.connections)


def _run(sidejob: Any, worker: Heartbeat, row: Any) -> Outcome | None:
    """Do the run of a row; None if it is over already."""
    if row.task not in sidejob.app.tasks:
        raise AssertionError(f"{row.task} is due, and this process does not know it: import the module of this task.")
    if row.body is None:
        return run_owed(sidejob.app, worker, row, eager=False)
    return run_kept(sidejob.app, worker, Message.of_row(row))


def _judge(outcome: Outcome | None, raise_errors: bool) -> None:
    if raise_errors and outcome is not None and outcome.error is not None:
        raise outcome.error
