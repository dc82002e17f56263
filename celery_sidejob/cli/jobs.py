"""`jobs`: a list of jobs."""

from __future__ import annotations

from typing import Any

import click

from ..inspection import Inspection
from ..jobs.job import Job
from ..model.status import Status
from . import names
from .command import answering
from .options import AtLeast, job_filters, limit_option
from .output import Output, in_short, lasting, line, status

PARENT = "Parent"
"""Left out of a list in which no job has one: a terminal is narrow."""
COLUMNS = ("Job", "Status", "Task", "Queue", PARENT, "Created", "Last run", "Took")
JOB_ID = AtLeast(0)


@click.command()
@job_filters
@limit_option
@click.option("--oldest-first", is_flag=True, help="Show the oldest jobs first; so does --after.")
@click.option("--before", metavar="ID", type=JOB_ID, help="Only jobs before this id.")
@click.option("--after", metavar="ID", type=JOB_ID, help="Only jobs after this id, the oldest first.")
@answering
def jobs(
    sidejob: Any, output: Output, /, limit: int, oldest_first: bool, before: int | None, after: int | None,
    **chosen: Any,
) -> None:  # fmt: skip
    """List jobs by their ids, newest first.

    Beside the status the list shows why a job waits (`waiting_for`), or the error of a failed job. "Took" is how long
    the last run took, if the run has ended and the job's history has it.

    These jobs are found at once: running jobs, up to 10,000 children of a job, the jobs of a tag, the job of a key, and
    up to 1,000 jobs made --since a time. Failed jobs, and queued jobs of one queue, are read one by one. With any other
    filter the command reads all jobs until enough match: a million takes a second.
    """
    newest_first = not oldest_first and after is None
    filters = {**chosen, "status": chosen["status"] or None}
    with output.progress("Looking through the jobs"):
        found: list[Job] = sidejob.jobs(limit=limit, before=before, after=after, newest_first=newest_first, **filters)
        inspection = Inspection(sidejob.runtime)
        waiting_for, lasted = inspection.waiting_for(found), inspection.lasted(found)
    more = (
        f"There may be more: {'--before' if newest_first else '--after'} {found[-1].id}"
        if len(found) == limit
        else None
    )
    documents = [
        {**job.info, "waiting_for": waiting_for.get(job.id, []), "lasted_s": lasted.get(job.id)} for job in found
    ]
    families = any(shown["parent"] is not None for shown in documents)
    columns = COLUMNS if families else [column for column in COLUMNS if column != PARENT]
    rows = (_row(shown, families=families) for shown in documents)
    output.answer_with_list(documents, columns, rows, more=more)
    if not found:
        names.hint(sidejob, output, task=chosen["task"], queue=chosen["queue"])


def parent_of(info: dict[str, Any]) -> str:
    """Return a job's parent and its name among the parent's children."""
    return "" if info["parent"] is None else f"{info['parent']} / {info['child_name']}"


def _row(info: dict[str, Any], *, families: bool) -> tuple[Any, ...]:
    why = ", ".join(info["waiting_for"]) or (_error(info["error"]) if info["status"] == Status.FAILED else "")
    shown = line(status(info["status"]), f": {why}" if why else "")
    took = None if info["lasted_s"] is None else lasting(info["lasted_s"])
    parent = (parent_of(info),) if families else ()
    return info["id"], shown, info["task"], info["queue"], *parent, info["created_at"], info["ran_at"], took


def _error(error: dict[str, Any] | None) -> str:
    """Return the error of a failed job."""
    return "" if error is None else in_short(f"{error['type']}: {error['message']}")
