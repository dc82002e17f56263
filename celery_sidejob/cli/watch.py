"""`watch`: follows a job until it is finished."""

from __future__ import annotations

import sys
from datetime import datetime
from functools import partial
from typing import Any

import click
from rich.text import Text

from ..inspection import Inspection
from ..jobs.job import Job
from ..model.status import FINISHED, Status
from .command import INTERRUPTED, Failed, answering, job_named
from .looks import looks
from .options import job_argument
from .output import Output, line, status


@click.command()
@job_argument
@answering
def watch(sidejob: Any, output: Output, job_id: str) -> None:
    """Follow a job's status and progress until it is finished; Ctrl-C ends the command, and not the job.

    It looks into the store twice a second. Ends with 0 if the job has completed, with 1 if it has failed, was
    terminated or was deleted.
    """
    try:
        found = _follow(Inspection(sidejob.runtime), job_named(sidejob, job_id), output)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    if output.for_program:
        output.answer(found)
    if found["status"] != Status.COMPLETED:
        error = found["error"] if found["status"] == Status.FAILED else None
        raise Failed(
            f"Job {found['id']} is {found['status']}" + (f": {error['type']}: {error['message']}" if error else ".")
        )


def _follow(inspection: Inspection, job: Job, output: Output) -> dict[str, Any]:
    """Tell of each change until the job is finished, and return how it stands then."""
    said = ""
    for found in looks(partial(inspection.standing, job), output):
        shown = _shown(found)
        if shown.plain != said and not output.for_program:
            output.show(Text(f"{datetime.now():%H:%M:%S}  ", "bright_black") + shown)
        said = shown.plain
        if found["status"] in FINISHED:
            break
    return found


def _shown(found: dict[str, Any]) -> Text:
    waits = f": waits for {', '.join(found['waiting_for'])}" if found["waiting_for"] else ""
    told = f"  {found['progress']['shown']}" if found["progress"] is not None else ""
    return line(status(found["status"]), waits, told)
