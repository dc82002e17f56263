"""What a person on the page and a token of the API do alike: one action each, with the name of who asks for it.

The log of this process names it before the action, a job's history after it: what was refused is not in the history.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..jobs.job import Job
from ..jobs.port import Port
from ..model.capacity import PoolSpec, check_limit
from ..model.errors import SideJobError
from ..model.logger import logger
from ..model.printable import printable
from ..operations.gates import capacity
from ..operations.ledger import burials
from .site import Refused, Visit

MOST_TOLD = 20
"""How many names of a long list a history's entry has."""


@contextmanager
def noted(visit: Visit, job: Job, what: str, **detail: Any) -> Iterator[None]:
    """Write into a job's history who has done what, unless the block raises: then it was refused."""
    tell(visit, f"tries on job {job.id}: {what}")
    yield
    note(visit, job, what, **detail)


def note(visit: Visit, job: Job, what: str, **detail: Any) -> None:
    """Write into a job's history who has done what. It is done, so a failure here is told in the log alone."""
    told = {name: _few(value) for name, value in detail.items() if not (value is None or value is False or value == [])}
    try:
        job.log(what, by=visit.user.name, **told)
    except SideJobError as error:
        logger.warning("The history of job %s lacks %r by %s: %s", job.id, what, printable(visit.user.name), error)


def _few(value: Any) -> Any:
    if not isinstance(value, list) or len(value) <= MOST_TOLD:
        return value
    return [*value[:MOST_TOLD], f"and {len(value) - MOST_TOLD} more"]


def tell(visit: Visit, what: str) -> None:
    """Write into the log of this process who does what."""
    logger.info("Web page: %s: %s", printable(visit.user.name), printable(what))


def run(visit: Visit, job: Job, **how: Any) -> Job:
    """Ask a job to run; the options are those of `Job.run`."""
    with noted(visit, job, "asked to run", **how):
        asked = job.run(**how)
        if asked is None:
            why = "has no parent" if how.get("parent") else f"is {job.refresh().status}: force it to run"
            raise Refused(409, "Not asked to run", f"Job {job.id} {why}.")
    return asked


def set_priority(visit: Visit, job: Job, priority: int) -> None:
    """Change a job's priority."""
    with noted(visit, job, "priority changed", priority=priority):
        job.set_priority(priority)


def move(visit: Visit, job: Job, queue: str, *, force: bool = False) -> None:
    """Move a job to another queue."""
    with noted(visit, job, "asked to move", queue=queue):
        job.move(queue=queue, force=force)


def change_tags(visit: Visit, job: Job, *, tag: Sequence[str] = (), untag: Sequence[str] = ()) -> None:
    """Take tags from a job, and give it others."""
    with noted(visit, job, "tags changed", tag=list(tag), untag=list(untag)):
        job.untag(*untag)
        job.tag(*tag)


def terminate(visit: Visit, job: Job, *, recursive: bool = False) -> Job:
    """Ask for a job's shutdown."""
    with noted(visit, job, "asked to terminate", recursive=recursive):
        return job.terminate(recursive=recursive)


def write(visit: Visit, port: Port, values: Sequence[Any]) -> None:
    """Write packets to a port."""
    with noted(visit, port.job, "packet written", port=f"{port.direction} {port.name}", packets=len(values)):
        port.write_many(values)


def delete(visit: Visit, job: Job) -> None:
    """Delete a job and everything below it, if all of it is terminated."""
    tell(visit, f"deletes job {job.id} ({job.task})")
    if not job.delete():
        raise Refused(409, "Not deleted", f"Job {job.id}, or a job below it, is not terminated. Terminate it first.")


def fork(visit: Visit, job: Job, before: str | None) -> Job:
    """Make a job like another one, with its finished steps up to one."""
    tell(visit, f"forks job {job.id}")
    made: Job = visit.sidejob.fork(job, before=before)
    note(visit, made, "forked")
    return made


def retry(visit: Visit, entry: Any) -> None:
    """Try an entry of the dead set again."""
    tell(visit, f"retries entry {entry.id} of the dead set ({entry.task}, {entry.task_id})")
    visit.sidejob.dead.retry(entry.id)
    if entry.job_id is not None:
        note(visit, Job(entry.job_id, runtime=visit.sidejob.runtime), "asked to retry")


def revoke(visit: Visit, task_id: str, *, terminate: bool) -> dict[str, Any]:
    """Revoke a durable task, and tell the workers; the store keeps the revocation, whether they can be told or not."""
    tell(visit, f"revokes the durable task {task_id}{', and ends it' if terminate else ''}")
    found = burials.revoke_in_all(visit.sidejob.runtime, [task_id])
    is_running = task_id in found.running
    if not is_running and task_id not in found.waiting:
        if (error := found.unavailable or found.unfit) is not None:  # that store may have it
            raise error
        raise Refused(404, "Not found", f"No durable task {task_id!r} waits or runs that was not revoked before.")
    try:
        visit.sidejob.app.control.tell_of_revocation([task_id], terminate=terminate)
        is_told = True
    except Exception:  # a transport may raise anything
        logger.warning("The workers could not be told that %s is revoked", printable(task_id), exc_info=True)
        is_told = False
    return {"task_id": task_id, "running": is_running, "told": is_told}


def delete_entry(visit: Visit, entry: Any) -> bool:
    """Remove an entry of the dead set, with its job; False if a job below that one is not finished."""
    tell(visit, f"deletes entry {entry.id} of the dead set ({entry.task}, {entry.task_id})")
    return bool(visit.sidejob.dead.delete(entry.id))


def pause(visit: Visit, which: Any, reason: str | None) -> Any:
    """Let no further run of a queue begin, or pause a schedule."""
    tell(visit, f"pauses {_named(which)}")
    return which.pause(f"{reason or 'paused'} ({visit.user.name})")


def resume(visit: Visit, which: Any) -> Any:
    """Let runs of a queue begin again, or resume a schedule."""
    tell(visit, f"resumes {_named(which)}")
    return which.resume()


def _named(which: Any) -> str:
    return f"{type(which).__name__.lower()} {which.name}"


def resize_pool(visit: Visit, name: str, limit: int) -> None:
    """Give a capacity pool another number of slots."""
    check_limit(name, limit)
    tell(visit, f"resizes capacity pool {name} to {limit}")
    capacity.resize(visit.sidejob.runtime, PoolSpec(name, None), limit)


def run_schedule(visit: Visit, schedule: Any) -> Any:
    """Make one more job, or message, of a schedule now."""
    tell(visit, f"runs {_named(schedule)} now")
    made = schedule.run_now()
    if isinstance(made, Job):
        note(visit, made, "made now")
    return made
