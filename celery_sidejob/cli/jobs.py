"""`jobs`: a list of jobs."""

from __future__ import annotations

from typing import Any

import click

from ..jobs.job import Job
from ..model.checks import MOST
from ..model.status import Status
from .command import as_json, limit_option, queue_option, task_option, with_sidejob
from .output import Output, status, table


@click.command()
@click.option(
    "--status",
    "statuses",
    type=click.Choice([str(one) for one in Status]),
    multiple=True,
    help="Only jobs with this status; may be repeated.",
)
@task_option
@queue_option
@click.option("--parent", metavar="ID_OR_ALIAS", help="Only the children of this job.")
@limit_option
@click.option("--after", metavar="ID", type=click.IntRange(0, MOST), default=0, help="Only jobs after this id.")
@as_json
@with_sidejob
def jobs(
    sidejob: Any,
    output: Output,
    statuses: tuple[str, ...],
    task: str | None,
    queue: str | None,
    parent: str | None,
    limit: int,
    after: int,
    as_json: bool,
) -> None:
    """List jobs by their ids, oldest first.

    Running jobs and up to 10,000 children of a job are found at once. Failed jobs, and the queued jobs of one queue,
    are looked at one by one, for other filters all jobs, until enough match: a million takes a second.
    """
    with output.progress("Looking through the jobs"):
        found: list[Job] = sidejob.jobs(
            status=statuses or None, task=task, queue=queue, parent=parent, limit=limit, after=after
        )
    if as_json:
        output.json([job.info for job in found])
        return
    rows = [
        (job.id, status(job.status), job.task, job.queue, parent_of(job.info), job.created_at, job.ran_at)
        for job in found
    ]
    output.show(table("Job", "Status", "Task", "Queue", "Parent", "Created", "Last run", rows=rows))
    if len(found) == limit:
        output.note(f"There may be more: --after {found[-1].id}")


def parent_of(info: dict[str, Any]) -> str:
    """Return a job's parent and its name among the parent's children."""
    return "" if info["parent"] is None else f"{info['parent']} / {info['child_name']}"
