"""`enqueue`: makes a job."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click

from ..jobs.job import Job
from ..model.errors import DuplicateError
from . import names
from .command import Failed, answering, load_modules
from .options import JsonValue
from .output import Output
from .times import Moment, Seconds


@click.command()
@click.argument("task")
@click.option("--args", metavar="JSON", type=JsonValue(list), default="[]", help="Positional arguments: a JSON list.")
@click.option("--kwargs", metavar="JSON", type=JsonValue(dict), default="{}", help="Keyword arguments: a JSON object.")
@click.option("--queue", metavar="NAME", help="The queue of its runs; by default the task's.")
@click.option("--eta", metavar="TIME", type=Moment(), help="When its first run is due, such as 2026-11-28T10:30.")
@click.option("--countdown", metavar="DURATION", type=Seconds(), help="How long until its first run is due: 90, 5min.")
@click.option("--priority", type=click.IntRange(0, 9), help="From 0 to 9; higher is sooner.")
@click.option("--tag", "tags", metavar="TAG", multiple=True, help="A tag; may be repeated.")
@click.option("--alias", "aliases", metavar="NAME", multiple=True, help="A further name; may be repeated.")
@click.option("--unique", metavar="KEY", help="A key that no other open job has; if one has it, no job is made.")
@click.option("--parent", metavar="ID_OR_ALIAS", help="The job's parent; needs --child-name.")
@click.option("--child-name", metavar="NAME", help="The job's name among its parent's children.")
@click.option(
    "--depends-on", metavar="ID_OR_ALIAS", multiple=True, help="A job that must have completed first; may be repeated."
)
@click.option("--created-by", metavar="WHO", help="A text by which the job is found.")
@answering
def enqueue(
    sidejob: Any, output: Output, /, task: str, eta: datetime | None, countdown: float | None, **given: Any
) -> None:
    """Make a job of a sidejob task, as `sidejob.enqueue` does."""
    if eta is not None and countdown is not None:
        raise click.UsageError("--eta and --countdown are two ways to say when; choose one.")
    load_modules(sidejob)
    queue = given["queue"]
    unknown = names.unknown(sidejob, output, "queue", queue) if queue is not None else None  # its job makes it known
    options = {"eta": eta, "countdown": countdown, **given}
    if given["unique"] is not None:
        options["on_duplicate"] = "refuse"  # and so it can be told
    try:
        job: Job = sidejob.enqueue(task, **options)
    except DuplicateError as error:
        _tell_of_open(output, error)
        return
    except TypeError as error:  # arguments that the task does not take
        raise Failed(error) from error
    said = f"Made job {job.id} ({job.task}) in queue {job.queue}."
    output.answer({"job": job.id, "made": True, "task_id": job.task_id}, said)
    if unknown:
        output.note(unknown)


def _tell_of_open(output: Output, error: DuplicateError) -> None:
    job = error.job
    if job is None:
        raise error
    said = f"No job was made: job {job.id}, which is {job.status}, has this unique key."
    output.answer({"job": job.id, "made": False, "task_id": job.task_id}, said)
