"""`delete`: deletes a job and everything below it."""

from __future__ import annotations

from typing import Any

import click

from ..inspection import Inspection
from ..jobs.job import Job
from .command import Failed, answering, job_named, with_app
from .options import job_argument, yes_option
from .output import Output, at_least
from .questions import confirm

UNFINISHED = (
    "Job {job} was not deleted: {which} is {status}, and a job is deleted with everything below it, when all of it is "
    "terminated. Ask for that: `celery -A <app> sidejob terminate --recursive {job}`."
)
ASKED_MEANWHILE = "Job {job} was not deleted: it, or a job below it, was asked to run again."


@click.command()
@job_argument
@yes_option
@answering
def delete(sidejob: Any, output: Output, job_id: str, yes: bool) -> None:
    """Delete a job and everything below it for good, if all of it is terminated; asks first.

    If a job of it is not terminated, the command says which one, and deletes nothing.
    """
    inspection, job = Inspection(sidejob.runtime), job_named(sidejob, job_id)
    reason = _reason(inspection, job)
    if reason is None:
        what = _tree(inspection, job)
        confirm(f"Delete {what} for good?", yes=yes)
        if job.delete():
            output.answer({"job": job.id, "deleted": True, "reason": None}, f"Deleted {what}.")
            return
        reason = _reason(inspection, job) or ASKED_MEANWHILE.format(job=job.id)
    output.answer({"job": job.id, "deleted": False, "reason": reason})
    raise Failed(reason)


def _tree(inspection: Inspection, job: Job) -> str:
    """Return the name of the job, and how many jobs are below it."""
    below, more = inspection.count_below(job)
    further = f" and {at_least(below, more)} {'job' if below == 1 else 'jobs'} below it" if below else ""
    return f"job {job.id} ({job.task}){further}"


def _reason(inspection: Inspection, job: Job) -> str | None:
    """Say why the job cannot be deleted now."""
    found = inspection.not_terminated(job)
    if found is None:
        return None
    which = "it" if found.id == job.id else f"job {found.id} below it"
    return with_app(UNFINISHED.format(job=job.id, which=which, status=found.status))
