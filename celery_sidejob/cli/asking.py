"""`enqueue`, `run`, `terminate` and `delete`: make jobs, ask for their runs or their shutdown, and remove them."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from ..inspection.jobs import JobViews
from ..jobs.job import Job
from ..model.errors import DuplicateError
from ..model.status import Status
from ..operations.runs.terminations import terminate_without_shutdown
from ..operations.waiting import is_parked
from .command import Failed, commands, job_named, load_modules, unknown_name, wait_for_none, with_app
from .options import JSON_LIST, JSON_OBJECT, MOMENT, SECONDS, job_argument, yes_option
from .output import Output, at_least, line, status
from .selection import JobsCommand, Selection, act_on_each, confirm


@commands.command()
@click.argument("task")
@click.option("--args", metavar="JSON", type=JSON_LIST, default="[]", help="Positional arguments: a JSON list.")
@click.option("--kwargs", metavar="JSON", type=JSON_OBJECT, default="{}", help="Keyword arguments: a JSON object.")
@click.option("--queue", metavar="NAME", help="The queue of its runs; by default the task's.")
@click.option("--eta", metavar="TIME", type=MOMENT, help="When its first run is due, such as 2026-11-28T10:30.")
@click.option("--countdown", metavar="DURATION", type=SECONDS, help="How long until its first run is due: 90, 5min.")
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
def enqueue(sidejob: Any, output: Output, /, task: str, **given: Any) -> None:
    """Make a job of a sidejob task, as `sidejob.enqueue` does."""
    if given["eta"] is not None and given["countdown"] is not None:
        raise click.UsageError("--eta and --countdown are two ways to say when; choose one.")
    load_modules(sidejob)
    queue = given["queue"]
    unknown = unknown_name(sidejob, output, "queue", queue) if queue is not None else None  # its job makes it known
    if given["unique"] is not None:
        given["on_duplicate"] = "refuse"  # so that the command can report the open job
    try:
        job: Job = sidejob.enqueue(task, **given)
    except DuplicateError as error:
        if (job := error.job) is None:
            raise
        said = f"No job was made: job {job.id}, which is {job.status}, has this unique key."
        output.answer({"job": job.id, "made": False, "task_id": job.task_id}, said)
        return
    except TypeError as error:  # the task does not take these arguments
        raise Failed(error) from error
    said = f"Made job {job.id} ({job.task}) in queue {job.queue}."
    output.answer({"job": job.id, "made": True, "task_id": job.task_id}, said)
    if unknown:
        output.note(unknown)


PARKED = (
    " It is parked: no worker of its queue knows its task. If none comes to know it, the job ends in about a minute "
    "without its shutdown; at once with --without-shutdown."
)


@commands.command(cls=JobsCommand)
@click.option("--force", is_flag=True, help="Also ask a failed, terminating or terminated job; end a backoff.")
@click.option("--parent", "of_parent", is_flag=True, help="Ask the job's parent instead.")
@click.option("--countdown", metavar="DURATION", type=SECONDS, help="Run it after this time: 90, 5min, 2h.")
@yes_option
def run(
    sidejob: Any, output: Output, selection: Selection, force: bool, of_parent: bool, countdown: float | None
) -> None:
    """Ask a job to run; the run begins after this command.

    Name jobs, or give filters: then the command asks all jobs that match. It first shows how many there are, and asks
    you. To try failed jobs again, give --status failed --force.
    """
    load_modules(sidejob)
    if len(selection.job_ids) != 1:
        act = partial(_ask, force=force, of_parent=of_parent, countdown=countdown)
        act_on_each(sidejob, output, selection, act, verb="Run", done="Asked to run")
        return
    job = job_named(sidejob, selection.job_ids[0])
    asked = job.run(force=force, parent=of_parent, countdown=countdown)
    if asked is None:
        refused = _refused(job, of_parent)
        reason = (
            f"Job {job.id} has no parent that could be asked to run."
            if refused is None
            else f"Job {refused.id} was not asked to run: it is {refused.status}. Force it with --force."
        )
        output.answer({**_job(refused), "asked": False, "reason": reason})
        raise Failed(reason)
    when = f" in {countdown:g} s" if countdown else ""
    said = f"Asked job {asked.id} ({asked.task}) to run{when}; it is "
    output.answer({**_job(asked), "asked": True, "reason": None}, line(said, status(asked.status), "."))


@commands.command(cls=JobsCommand)
@click.option("--recursive", is_flag=True, help="Also all jobs below it.")
@click.option(
    "--without-shutdown",
    is_flag=True,
    help="Do not wait for a worker: skip the task's shutdown function. "
    "Use it if the task's code is gone, or if no worker serves its queue.",
)
@click.option("--kill", is_flag=True, help="Kill the process of the job's run in progress first: for a run that hangs.")
@yes_option
def terminate(
    sidejob: Any, output: Output, selection: Selection, recursive: bool, without_shutdown: bool, kill: bool
) -> None:
    """Ask for a job's shutdown; a run in progress finishes first, unless you --kill it.

    Name jobs, or give filters: then the command asks for the shutdown of all jobs that match. It first shows how many
    there are, and asks you.
    """
    if kill and (len(selection.job_ids) != 1 or without_shutdown):
        raise click.UsageError("--kill is for one job, whose shutdown follows: name it, and leave out the rest.")
    load_modules(sidejob)
    if len(selection.job_ids) != 1:
        act = partial(_terminate, sidejob, recursive=recursive, without_shutdown=without_shutdown)
        act_on_each(sidejob, output, selection, act, verb="Terminate", done="Asked for the shutdown")
        return
    job = job_named(sidejob, selection.job_ids[0])
    if job.status == Status.TERMINATED and not recursive:
        said = line(f"Job {job.id} ({job.task}) has ended: it is ", status(job.status), " already.")
        output.answer({**_job(job), "recursive": False, "parked": False}, said)
    else:
        _terminate_one(sidejob, output, job, recursive=recursive, without_shutdown=without_shutdown, kill=kill)


def _terminate_one(
    sidejob: Any, output: Output, job: Job, *, recursive: bool, without_shutdown: bool, kill: bool
) -> None:
    """Ask for the shutdown of one job that is not terminated, and report its status afterwards."""
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
    """Have its worker end the run in progress; fail if the run goes on."""
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
    """Ask one of many jobs to run; returns the reason if it does not."""
    if job.run(force=force, parent=of_parent, countdown=countdown) is not None:
        return None
    refused = _refused(job, of_parent)
    if refused is None:
        return "no parent"
    return f"{'parent ' if of_parent else ''}{refused.status}: --force asks it too"


def _terminate(sidejob: Any, job: Job, *, recursive: bool, without_shutdown: bool) -> str | None:
    """Ask for the shutdown of one of many jobs; returns the reason if that was needless or is not done at once."""
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
    """Return the job that was not asked, as it is now; None if the job has no parent that could be asked."""
    return job.refresh().parent if of_parent else job.refresh()


UNFINISHED = (
    "Job {job} was not deleted: {which} is {status}, and a job is deleted with everything below it, when all of it is "
    "terminated. Ask for that: `celery -A <app> sidejob terminate --recursive {job}`."
)
ASKED_MEANWHILE = "Job {job} was not deleted: it, or a job below it, was asked to run again."


@commands.command()
@job_argument
@yes_option
def delete(sidejob: Any, output: Output, job_id: str, yes: bool) -> None:
    """Delete a job and everything below it for good, if all of it is terminated; asks first.

    If a job of it is not terminated, the command says which one, and deletes nothing.
    """
    views, job = JobViews(sidejob.runtime), job_named(sidejob, job_id)
    reason = _reason(views, job)
    if reason is None:
        what = _tree(views, job)
        confirm(f"Delete {what} for good?", yes=yes)
        if job.delete():
            output.answer({"job": job.id, "deleted": True, "reason": None}, f"Deleted {what}.")
            return
        reason = _reason(views, job) or ASKED_MEANWHILE.format(job=job.id)
    output.answer({"job": job.id, "deleted": False, "reason": reason})
    raise Failed(reason)


def _tree(views: JobViews, job: Job) -> str:
    """Return the name of the job, and how many jobs are below it."""
    below, more = views.count_below(job)
    further = f" and {at_least(below, more)} {'job' if below == 1 else 'jobs'} below it" if below else ""
    return f"job {job.id} ({job.task}){further}"


def _reason(views: JobViews, job: Job) -> str | None:
    """Say why the job cannot be deleted now."""
    found = views.not_terminated(job)
    if found is None:
        return None
    which = "it" if found.id == job.id else f"job {found.id} below it"
    return with_app(UNFINISHED.format(job=job.id, which=which, status=found.status))
