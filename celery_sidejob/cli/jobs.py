"""`jobs`: a list of jobs."""

from __future__ import annotations

from typing import Any

import click
from rich.text import Text

from ..inspection import Inspection
from ..jobs.job import Job
from ..model.checks import LONGEST_S, MOST
from ..model.status import Status
from ..operations.waiting import REASONS
from .command import Seconds, answering, limit_option, queue_option, task_option
from .output import Output, status

COLUMNS = ("Job", "Status", "Task", "Queue", "Parent", "Created", "Last run")
statuses = click.Choice([str(one) for one in Status])


@click.command()
@click.option("--status", type=statuses, multiple=True, help="Only jobs with this status; may be repeated.")
@task_option
@queue_option
@click.option("--parent", metavar="ID_OR_ALIAS", help="Only the children of this job.")
@click.option("--unique", metavar="KEY", help="Only the open job that has this unique key.")
@click.option("--tag", metavar="TAG", help="Only jobs that have this tag.")
@click.option("--older-than", metavar="SECONDS", type=Seconds(LONGEST_S), help="Only jobs that are older than this.")
@click.option("--waiting-for", type=click.Choice(REASONS), help="Only jobs that do not run now for this reason.")
@limit_option
@click.option("--after", metavar="ID", type=click.IntRange(0, MOST), default=0, help="Only jobs after this id.")
@answering
def jobs(sidejob: Any, output: Output, /, limit: int, **chosen: Any) -> None:
    """List jobs by their ids, oldest first, with what a job waits for (`waiting_for`) beside its status.

    Running jobs, up to 10,000 children of a job, the jobs of a tag and the job of a key are found at once. To find
    failed jobs, or the queued jobs of one queue, the command looks at them one by one; for other filters, at all jobs,
    until enough match: a million takes a second.
    """
    with output.progress("Looking through the jobs"):
        found: list[Job] = sidejob.jobs(limit=limit, **{**chosen, "status": chosen["status"] or None})
        waiting_for = Inspection(sidejob.runtime).waiting_for(found)
    more = f"There may be more: --after {found[-1].id}" if len(found) == limit else None
    documents = ({**job.info, "waiting_for": waiting_for.get(job.id, [])} for job in found)
    rows = (_row(job, waiting_for.get(job.id, [])) for job in found)
    output.answer_with_list(documents, COLUMNS, rows, more=more)


def parent_of(info: dict[str, Any]) -> str:
    """Return a job's parent and its name among the parent's children."""
    return "" if info["parent"] is None else f"{info['parent']} / {info['child_name']}"


def _row(job: Job, waiting_for: list[str]) -> tuple[Any, ...]:
    shown = Text.assemble(status(job.status), f": {', '.join(waiting_for)}" if waiting_for else "")
    return job.id, shown, job.task, job.queue, parent_of(job.info), job.created_at, job.ran_at
