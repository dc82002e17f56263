"""`run` and `terminate`: ask for a run of a job, or for its shutdown."""

from __future__ import annotations

from typing import Any

import click
from rich.text import Text

from ..jobs.job import Job
from ..model.status import Status
from ..operations.shutdown import end_without_shutdown
from ..operations.waiting import is_parked
from .command import Failed, answering, job_argument, job_named, load_modules
from .output import Output, printable, status
from .times import Seconds

LONGEST_WAIT_S = 1e9
PARKED = (
    " It is parked: no worker of its queue knows its task. If none comes to know it, the job ends in about a minute "
    "without its shutdown; at once with --without-shutdown."
)


@click.command()
@job_argument
@click.option("--force", is_flag=True, help="Also if the job is failed, terminating or terminated; ends a backoff.")
@click.option("--parent", is_flag=True, help="Ask the job's parent instead.")
@click.option("--countdown", metavar="SECONDS", type=Seconds(LONGEST_WAIT_S), help="Run it after so many seconds.")
@answering
def run(sidejob: Any, output: Output, job_id: str, force: bool, parent: bool, countdown: float | None) -> None:
    """Ask for a run of a job: one that begins after this command."""
    load_modules(sidejob)
    job = job_named(sidejob, job_id)
    asked = job.run(force=force, parent=parent, countdown=countdown)
    if asked is None:
        reason, refused = _refusal(job, parent)
        output.answer({**_job(refused), "asked": False, "reason": reason})
        raise Failed(reason)
    when = f" in {countdown:g} s" if countdown else ""
    said = f"Asked job {asked.id} ({printable(asked.task)}) to run{when}; it is "
    output.answer({**_job(asked), "asked": True, "reason": None}, Text.assemble(said, status(asked.status), "."))


@click.command()
@job_argument
@click.option("--recursive", is_flag=True, help="Also all jobs below it.")
@click.option(
    "--without-shutdown", is_flag=True, help="Do not wait for a worker: skip the task's shutdown function. "
    "For a task whose code is gone, or whose queue nobody serves.",
)  # fmt: skip
@answering
def terminate(sidejob: Any, output: Output, job_id: str, recursive: bool, without_shutdown: bool) -> None:
    """Ask for a job's shutdown; a run in progress finishes first."""
    load_modules(sidejob)
    job = job_named(sidejob, job_id).terminate(recursive=recursive)
    if without_shutdown:
        done = end_without_shutdown(sidejob.runtime, job.id, recursive=recursive)
        job = job.refresh()
        if not done:
            below = " or below it" if recursive else ""
            raise Failed(f"A run of job {job.id}{below} is in progress. Wait until it ends, and ask again.")
    what = f"job {job.id} ({printable(job.task)})" + (" and of everything below it" if recursive else "")
    parked = job.status == Status.TERMINATING and is_parked(sidejob.runtime, job.id)
    said = Text.assemble(
        f"Asked for the shutdown of {what}; the job is ", status(job.status), f".{PARKED if parked else ''}"
    )
    output.answer({**_job(job), "recursive": recursive, "parked": parked}, said)


def _job(job: Job | None) -> dict[str, Any]:
    return {"job": job and job.id, "status": job and job.status}


def _refusal(job: Job, parent: bool) -> tuple[str, Job | None]:
    """Return why a job was not asked, and that job."""
    refused = job.refresh().parent if parent else job.refresh()
    if refused is None:
        return f"Job {job.id} has no parent that could be asked to run.", None
    return f"Job {refused.id} was not asked to run: it is {refused.status}. Force it with --force.", refused
