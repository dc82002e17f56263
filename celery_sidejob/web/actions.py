"""The forms of an operator: each does one thing, as a command does, and goes back to the page that shows it."""

from __future__ import annotations

import json

from starlette.responses import Response

from ..jobs.job import Job
from ..model.printable import seconds_from
from . import verbs
from .pages import job_of, number_of, port_of
from .site import Entry, Refused, Visit
from .users import Role
from .verbs import tell


def run(visit: Visit) -> Response:
    """Ask a job to run."""
    job, wait_s = job_of(visit), _duration(visit, "countdown")
    verbs.run(visit, job, force="force" in visit.form, fresh="fresh" in visit.form, countdown=wait_s)
    return _back(visit, job, "asked")


def terminate(visit: Visit) -> Response:
    """Ask for a job's shutdown."""
    job = job_of(visit)
    verbs.terminate(visit, job, recursive="recursive" in visit.form)
    return _back(visit, job, "terminate")


def delete(visit: Visit) -> Response:
    """Delete a job and everything below it."""
    verbs.delete(visit, job_of(visit))
    return visit.go("/jobs?said=deleted")


def fork(visit: Visit) -> Response:
    """Make a job like another one, with its finished steps up to one."""
    return _back(visit, verbs.fork(visit, job_of(visit), visit.form.get("before") or None), "forked")


def set_priority(visit: Visit) -> Response:
    """Change a job's priority."""
    job = job_of(visit)
    verbs.set_priority(visit, job, number_of("priority", visit.form.get("priority", "")))
    return _back(visit, job, "changed")


def move(visit: Visit) -> Response:
    """Move a job to another queue."""
    job = job_of(visit)
    verbs.move(visit, job, visit.form.get("queue", ""), force="force" in visit.form)
    return _back(visit, job, "changed")


def tag(visit: Visit) -> Response:
    """Give a job a tag, or take one from it."""
    job, names = job_of(visit), [visit.form.get("tag", "")]
    verbs.change_tags(visit, job, **{"untag" if "remove" in visit.form else "tag": names})
    return _back(visit, job, "changed")


def write(visit: Visit) -> Response:
    """Write a packet to a port of a job."""
    port = port_of(visit, job_of(visit))
    try:
        value = json.loads(visit.form.get("value", ""))
    except (ValueError, RecursionError) as error:
        raise Refused(400, "No JSON", f"The packet is no JSON value: {error}. A text has double quotes.") from error
    verbs.write(visit, port, [value])
    return visit.go(f"{visit.request.url.path.removeprefix(visit.root)}?said=written")


def retry_dead(visit: Visit) -> Response:
    """Try an entry of the dead set again."""
    entry = visit.sidejob.dead.get(visit.request.path_params["id"])
    verbs.retry(visit, entry)
    if entry.job_id is not None:
        return visit.go(f"/jobs/{entry.job_id}?said=retried")
    return visit.go("/dead?said=retried")


def delete_dead(visit: Visit) -> Response:
    """Remove an entry of the dead set, with its job."""
    entry = visit.sidejob.dead.get(visit.request.path_params["id"])
    if not verbs.delete_entry(visit, entry):
        raise Refused(409, "Not deleted", f"A job below job {entry.job_id} is not finished.")
    return visit.go("/dead?said=deleted")


def revoke(visit: Visit) -> Response:
    """Revoke a durable task."""
    verbs.revoke(visit, visit.request.path_params["task_id"], terminate="terminate" in visit.form)
    return visit.go("/tasks?said=revoked")


# -- queues, pools, schedules ----------------------------------------------------------------------------------------


def pause_queue(visit: Visit) -> Response:
    """Let no further run of a queue begin."""
    verbs.pause(visit, visit.sidejob.queue(visit.form.get("name", "")), visit.form.get("reason"))
    return visit.go("/queues?said=paused")


def resume_queue(visit: Visit) -> Response:
    """Let runs of a queue begin again."""
    verbs.resume(visit, visit.sidejob.queue(visit.form.get("name", "")))
    return visit.go("/queues?said=resumed")


def configure_queue(visit: Visit) -> Response:
    """Change the limits of a queue; an empty field is no limit."""
    queue = visit.sidejob.queue(visit.form.get("name", ""))
    limits = {
        name: number_of(name, given) if (given := visit.form.get(name)) else None for name in ("limit", "limit_per_key")
    }
    tell(visit, f"gives queue {queue.name} the limits {limits} and the rate {visit.form.get('rate')}")
    queue.configure(**limits, rate=visit.form.get("rate") or None, ordered="ordered" in visit.form)
    return visit.go("/queues?said=changed")


def resize_pool(visit: Visit) -> Response:
    """Give a capacity pool another number of slots."""
    verbs.resize_pool(visit, visit.form.get("name", ""), number_of("limit", visit.form.get("limit", "")))
    return visit.go("/queues?said=changed")


def act_on_schedule(visit: Visit) -> Response:
    """Pause a schedule, resume it, or make one more of it now."""
    verb = visit.form.get("verb", "")
    if verb not in ("pause", "resume", "run"):
        raise Refused(400, "Refused", f"There is no action {verb[:80]!r}.")
    schedule = visit.sidejob.get_schedule(visit.form.get("name", ""))
    if verb == "pause":
        verbs.pause(visit, schedule, visit.form.get("reason"))
        return visit.go("/schedules?said=paused")
    if verb == "resume":
        verbs.resume(visit, schedule)
        return visit.go("/schedules?said=resumed")
    made = verbs.run_schedule(visit, schedule)
    return _back(visit, made, "made") if isinstance(made, Job) else visit.go("/schedules?said=made")


# --------------------------------------------------------------------------------------------------------------------


def _back(visit: Visit, job: Job, said: str) -> Response:
    return visit.go(f"/jobs/{job.id}?said={said}")


def _duration(visit: Visit, name: str) -> float | None:
    try:
        return seconds_from(visit.form[name]) if visit.form.get(name) else None
    except ValueError as error:
        raise Refused(400, "Refused", str(error)) from error


OPERATING = tuple(
    Entry(path, page, "POST", Role.OPERATE)
    for path, page in {
        "/jobs/{id}/run": run,
        "/jobs/{id}/terminate": terminate,
        "/jobs/{id}/delete": delete,
        "/jobs/{id}/fork": fork,
        "/jobs/{id}/priority": set_priority,
        "/jobs/{id}/move": move,
        "/jobs/{id}/tag": tag,
        "/jobs/{id}/ports/{direction}/{name}": write,
        "/dead/{id}/retry": retry_dead,
        "/dead/{id}/delete": delete_dead,
        "/tasks/{task_id}/revoke": revoke,
        "/queues/pause": pause_queue,
        "/queues/resume": resume_queue,
        "/queues/configure": configure_queue,
        "/pools/resize": resize_pool,
        "/schedules/act": act_on_schedule,
    }.items()
)
