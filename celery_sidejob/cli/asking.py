"""`run` and `terminate`: ask for a run of a job, or for its shutdown."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from ..jobs.job import Job
from ..model.status import Status
from ..operations.shutdown import terminate_without_shutdown
from ..operations.waiting import is_parked
from .command import Failed, answering, job_named, load_modules
from .looks import wait_for_none
from .options import job_filters, jobs_or_filters, yes_option
from .output import Output, line, status
from .selection import act_on_each, check_choice
from .times import Seconds

PARKED = (
    " It is parked: no worker of its queue knows its task. If none comes to know it, the job ends in about a minute "
    "without its shutdown; at once with --without-shutdown."
)


@click.command()
@jobs_or_filters
@job_filters
@click.option("--force", is_flag=True, help="Also ask a failed, terminating or terminated job; end a backoff.")
@click.option("--parent", "of_parent", is_flag=True, help="Ask the job's parent instead.")
@click.option("--countdown", metavar="DURATION", type=Seconds(), help="Run it after this time: 90, 5min, 2h.")
@yes_option
@answering
def run(
    sidejob: Any, output: Output, /, job_ids: tuple[str, ...], force: bool, of_parent: bool, countdown: float | None,
    yes: bool, **chosen: Any,
) -> None:  # fmt: skip
    """Ask a job to run; the run begins after this command.

    Name jobs, or give filters: then the command asks all jobs that match. It first shows how many there are, and asks
    you. To try failed jobs again, give --status failed --force.
    """
    check_choice(job_ids, chosen)
    load_modules(sidejob)
    if len(job_ids) != 1:
        act = partial(_ask, force=force, of_parent=of_parent, countdown=countdown)
        act_on_each(sidejob, output, job_ids, chosen, act, verb="Run", done="Asked to run", yes=yes)
        return
    job = job_named(sidejob, job_ids[0])
    asked = job.run(force=force, parent=of_parent, countdown=countdown)
    if asked is None:
        refused = _refused(job, of_parent)
        reason = (
            f"Job {job.id} has no parent that could be asked to run." if refused is None else
            f"Job {refused.id} was not asked to run: it is {refused.status}. Force it with --force."
        )  # fmt: skip
        output.answer({**_job(refused), "asked": False, "reason": reason})
        raise Failed(reason)
    when = f" in {countdown:g} s" if countdown else ""
    said = f"Asked job {asked.id} ({asked.task}) to run{when}; it is "
    output.answer({**_job(asked), "asked": True, "reason": None}, line(said, status(asked.status), "."))


@click.command()
@jobs_or_filters
@job_filters
@click.option("--recursive", is_flag=True, help="Also all jobs below it.")
@click.option(
    "--without-shutdown", is_flag=True, help="Do not wait for a worker: skip the task's shutdown function. "
    "Use it if the task's code is gone, or if no worker serves its queue.",
)  # fmt: skip
@click.option("--kill", is_flag=True, help="Kill the process of the job's run in progress first: for a run that hangs.")
@yes_option
@answering
def terminate(
    sidejob: Any, output: Output, /, job_ids: tuple[str, ...], recursive: bool, without_shutdown: bool, kill: bool,
    yes: bool, **chosen: Any,
) -> None:  # fmt: skip
    """Ask for a job's shutdown; a run in progress finishes first, unless you --kill it.

    Name jobs, or give filters: then the command asks for the shutdown of all jobs that match. It first shows how many
    there are, and asks you.
    """
    check_choice(job_ids, chosen)
    if kill and (len(job_ids) != 1 or without_shutdown):
        raise click.UsageError("--kill is for one job, whose shutdown follows: name it, and leave out the rest.")
    load_modules(sidejob)
    if len(job_ids) != 1:
        act = partial(_terminate, sidejob, recursive=recursive, without_shutdown=without_shutdown)
        act_on_each(sidejob, output, job_ids, chosen, act, verb="Terminate", done="Asked for the shutdown", yes=yes)
        return
    job = job_named(sidejob, job_ids[0])
    if job.status == Status.TERMINATED and not recursive:
        said = line(f"Job {job.id} ({job.task}) has ended: it is ", status(job.status), " already.")
        output.answer({**_job(job), "recursive": False, "parked": False}, said)
    else:
        _terminate_one(sidejob, output, job, recursive=recursive, without_shutdown=without_shutdown, kill=kill)


def _terminate_one(
    sidejob: Any, output: Output, job: Job, *, recursive: bool, without_shutdown: bool, kill: bool
) -> None:
    """Ask for the shutdown of one job that is not terminated, and tell how it stands then."""
    if not without_shutdown:
        job = job.terminate(recursive=recursive)
        if kill:
            _kill(sidejob, output, job)
            job = job.refresh()
    else:
        done = terminate_without_shutdown(sidejob.runtime, job.id, recursive=recursive)
        job = job.refresh()
        if not done:
            below = " or below it" if recursive else ""
            raise Failed(f"A run of job {job.id}{below} is in progress. Wait until it ends, and ask again.")
    what = f"job {job.id} ({job.task})" + (" and of everything below it" if recursive else "")
    parked = job.status == Status.TERMINATING and is_parked(sidejob.runtime, job.id)
    said = line(f"Asked for the shutdown of {what}; the job is ", status(job.status), f".{PARKED if parked else ''}")
    output.answer({**_job(job), "recursive": recursive, "parked": parked}, said)


def _kill(sidejob: Any, output: Output, job: Job) -> None:
    """Have its worker end the run in progress; fail if that goes on."""
    run_no = job.refresh().info["run_no"]

    def runs() -> list[Job]:
        now = job.refresh().info
        return [job] if now["in_run"] and now["run_no"] == run_no else []

    if runs():
        sidejob.app.control.kill_run(job.id, run_no)
    if wait_for_none(runs, output):
        raise Failed(
            f"The run of job {job.id} was not ended, and its shutdown follows it: the worker has not heard, or its "
            "pool cannot stop it."
        )


def _ask(job: Job, *, force: bool, of_parent: bool, countdown: float | None) -> str | None:
    """Ask one of many jobs to run; returns why not."""
    if job.run(force=force, parent=of_parent, countdown=countdown) is not None:
        return None
    refused = _refused(job, of_parent)
    if refused is None:
        return "no parent"
    return f"{'parent ' if of_parent else ''}{refused.status}: --force asks it too"


def _terminate(sidejob: Any, job: Job, *, recursive: bool, without_shutdown: bool) -> str | None:
    """Ask for the shutdown of one of many jobs; returns why that was not needed, or is not done at once."""
    if job.status == Status.TERMINATED and not recursive:
        return "terminated already"
    if not without_shutdown:
        job.terminate(recursive=recursive)
        return None
    if terminate_without_shutdown(sidejob.runtime, job.id, recursive=recursive):
        return None
    return "a run is in progress, and the shutdown follows it"


def _job(job: Job | None) -> dict[str, Any]:
    return {"job": job and job.id, "status": job and job.status}


def _refused(job: Job, of_parent: bool) -> Job | None:
    """Return the job that was not asked, as it is now; None if a job has no parent that could be asked."""
    return job.refresh().parent if of_parent else job.refresh()
