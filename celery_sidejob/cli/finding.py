"""`tags`, `tag`, `untag`, `tracked`, `track` and `untrack`: finding and following jobs."""

from __future__ import annotations

from typing import Any

import click

from ..jobs.job import Job
from ..model.printable import counted
from .command import answering, job_named
from .options import job_argument, limit_option
from .output import Output, status, table_if_any

names = click.argument("names", metavar="TAG...", nargs=-1, required=True)


@click.command()
@limit_option
@answering
def tags(sidejob: Any, output: Output, limit: int) -> None:
    """List the tags that most jobs have, the most common first. Counting a million tags takes about a second."""
    found: list[tuple[str, int]] = sidejob.tags(limit)
    shown = table_if_any("Jobs", "Tag", rows=[(count, tag) for tag, count in found])
    output.answer([{"tag": tag, "jobs": count} for tag, count in found], shown or "No job has a tag.")


@click.command()
@job_argument
@names
@answering
def tag(sidejob: Any, output: Output, job_id: str, names: tuple[str, ...]) -> None:
    """Add tags to a job, after the tags that it has already."""
    _tell_tags(output, job_named(sidejob, job_id).tag(*names))


@click.command()
@job_argument
@names
@answering
def untag(sidejob: Any, output: Output, job_id: str, names: tuple[str, ...]) -> None:
    """Remove tags from a job; tags that it does not have are ignored."""
    _tell_tags(output, job_named(sidejob, job_id).untag(*names))


@click.command()
@limit_option
@answering
def tracked(sidejob: Any, output: Output, limit: int) -> None:
    """List the tracked jobs, in the order in which they were tracked."""
    found: list[Job] = sidejob.tracked(limit)
    rows = [(job.id, status(job.status), job.task, job.queue, job.ran_at) for job in found]
    shown = table_if_any("Job", "Status", "Task", "Queue", "Last run", rows=rows)
    output.answer([job.info for job in found], shown or "No job is tracked.")


@click.command()
@job_argument
@answering
def track(sidejob: Any, output: Output, job_id: str) -> None:
    """Track a job: `tracked` lists it, and its changes are announced on /sidejob/tracked."""
    job = job_named(sidejob, job_id).track()
    output.answer({"id": job.id, "tracked": True}, f"Job {job.id} is tracked.")


@click.command()
@job_argument
@answering
def untrack(sidejob: Any, output: Output, job_id: str) -> None:
    """Stop tracking a job."""
    job = job_named(sidejob, job_id).untrack()
    output.answer({"id": job.id, "tracked": False}, f"Job {job.id} is not tracked any more.")


def _tell_tags(output: Output, job: Job) -> None:
    found = job.tags
    said = f"Job {job.id} has {counted(len(found), 'tag', 'tags')}"
    output.answer({"id": job.id, "tags": found}, f"{said}: {', '.join(found)}." if found else f"{said}.")
