"""`steps`: removes steps of a job, to be done again; `fork`: makes a job that continues another job's steps."""

from __future__ import annotations

from typing import Any

import click

from ..jobs.job import Job
from .command import answering, job_named, load_modules
from .options import JsonValue, job_argument
from .output import Output


@click.group()
def steps() -> None:
    """Have steps of a job done again; `show --steps` lists them."""


@steps.command()
@job_argument
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@answering
def forget(sidejob: Any, output: Output, job_id: str, names: tuple[str, ...]) -> None:
    """Remove what a job keeps of steps, so that its next run does them again: NAME, or one of several as NAME#2.

    It asks for no run: `run --force` does that, for a failed job too.
    """
    job = job_named(sidejob, job_id)
    before = {str(step) for step in job.steps}
    job.forget(*names)
    gone = sorted(before - {str(step) for step in job.steps})
    said = f"Job {job.id} forgets {', '.join(gone)}." if gone else f"Job {job.id} has no such step."
    output.answer({"job": job.id, "forgotten": gone}, said)


@click.command()
@job_argument
@click.option("--before", metavar="STEP", help="The new job does this step, and all that began after it, again.")
@click.option("--args", metavar="JSON", type=JsonValue(list), help="Other positional arguments: a JSON list.")
@click.option("--kwargs", metavar="JSON", type=JsonValue(dict), help="Other keyword arguments: a JSON object.")
@click.option("--task", metavar="NAME", help="Another task.")
@click.option("--queue", metavar="NAME", help="Another queue.")
@answering
def fork(sidejob: Any, output: Output, /, job_id: str, before: str | None, **changed: Any) -> None:
    """Make a job with the task, arguments, state and finished steps of another one that has not completed."""
    load_modules(sidejob)
    job = job_named(sidejob, job_id)
    made: Job = sidejob.fork(job, before, **{name: value for name, value in changed.items() if value is not None})
    output.answer({"job": made.id, "of": job.id}, f"Made job {made.id} ({made.task}) from job {job.id}.")
