"""The operations of the HTTP API. Each does what a command does, and names its token in a job's history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from importlib.metadata import version as version_of
from typing import Any

import msgspec

from ..deadset import DeadEntry
from ..examination import examine
from ..inspection.dead import DeadViews
from ..inspection.jobs import JobViews
from ..inspection.queues import QueueViews, all_schedules
from ..inspection.statistics import StatisticsViews
from ..inspection.tasks import TaskViews
from ..jobs.job import Job
from ..jobs.workers import document_of
from ..model.names import at_most, check_key, check_tags
from ..store.statement import picked
from . import schemas, verbs
from .api import Call, Operation, openapi
from .pages import DEAD_FILTERS, FILTERS, NEXT_TIMES, POOLS, matching_jobs, port_of
from .site import Refused
from .verbs import noted, tell

# -- jobs ------------------------------------------------------------------------------------------------------------


def version(call: Call) -> Any:
    """Return the version of this package, and the name of the app."""
    return {"version": version_of("celery-sidejob"), "app": call.site.name}


def list_jobs(call: Call) -> Any:
    """List jobs: one page, and the cursor of the next."""
    asked = call.query
    filters = {name: value for name in FILTERS if (value := getattr(asked, name)) is not None}
    newest = asked.order == "newest"
    page = matching_jobs(
        call.sidejob, filters, limit=asked.limit, newest_first=newest, **{"before" if newest else "after": asked.cursor}
    )
    return _page(JobViews(call.sidejob.runtime).brief(page.jobs), page.next)


def make_job(call: Call) -> Any:
    """Make a job."""
    body = call.body
    options = {
        name: value
        for name, value in msgspec.structs.asdict(body).items()
        if value not in (None, []) and name not in ("task", "args", "kwargs", "context", "on_duplicate", "on_failure")
    }
    if body.unique is not None:
        options["on_duplicate"] = body.on_duplicate
    if body.depends_on:
        options["on_failure"] = body.on_failure
    _refuse_without_task(call, body.task)
    with _context(call, body.context):
        made = call.sidejob.enqueue(body.task, body.args, body.kwargs, created_by=call.user.name, **options)
    return made.info


def get_job(call: Call) -> Any:
    """Return everything about a job, by its id or an alias."""
    return JobViews(call.sidejob.runtime).details(_job_of(call))


def delete_job(call: Call) -> Any:
    """Delete a job and everything below it, if all of it is terminated."""
    job = _job_of(call)
    verbs.delete(call, job)
    return {"id": job.id, "deleted": True}


def run_job(call: Call) -> Any:
    """Ask a job to run at least once after this call."""
    body = call.body
    how = {"force": body.force, "fresh": body.fresh, "parent": body.parent, "countdown": body.countdown}
    return verbs.run(call, _job_of(call), **how).info


def terminate_job(call: Call) -> Any:
    """Ask for a job's shutdown."""
    return verbs.terminate(call, _job_of(call), recursive=call.body.recursive).info


def change_job(call: Call) -> Any:
    """Change a job's priority, queue or tags."""
    job, body = _job_of(call), call.body
    for tags in (body.tag, body.untag):
        check_tags(tags, where="PATCH")  # before the first of several commits
    if body.queue is not None:
        verbs.move(call, job, body.queue)
    if body.priority is not None:
        verbs.set_priority(call, job, body.priority)
    if body.tag or body.untag:
        verbs.change_tags(call, job, tag=body.tag, untag=body.untag)
    return job.refresh().info


def fork_job(call: Call) -> Any:
    """Make a job with the arguments, state and finished steps of another one."""
    return verbs.fork(call, _job_of(call), call.body.before).info


def adopt_job(call: Call) -> Any:
    """Make a job a named child of this one."""
    job = _job_of(call)
    child = call.sidejob.get(call.body.job)
    with noted(call, job, "asked to adopt", child=child.id):
        job.adopt(child, call.body.name)
    return child.refresh().info


def disown_job(call: Call) -> Any:
    """Make a child of this job a job without a parent."""
    job = _job_of(call)
    with noted(call, job, "asked to disown", name=call.body.name):
        job.disown(call.body.name)
    return job.refresh().info


def change_state(call: Call) -> Any:
    """Set and remove keys of a job's state; the control keys of old systems are ordinary keys."""
    job, body = _job_of(call), call.body
    for key in at_most(body.unset, "keys of the state"):
        check_key(key)  # before the first of two commits
    with noted(call, job, "state changed", set=[*body.set], unset=body.unset):
        if body.set:
            job.set(body.set)
        if body.unset:
            job.unset(*body.unset)
    return job.refresh().info


def get_steps(call: Call) -> Any:
    """List the steps of a job."""
    return {"items": [asdict(step) for step in _job_of(call).steps]}


def get_tree(call: Call) -> Any:
    """List a job and the jobs below it, parents first."""
    nodes = JobViews(call.sidejob.runtime).tree(_job_of(call), limit=call.query.limit)
    return {"items": [asdict(node) for node in nodes]}


# -- ports and channels ----------------------------------------------------------------------------------------------


def peek_packets(call: Call) -> Any:
    """List the next packets of a port, without reading them."""
    return {"items": JobViews(call.sidejob.runtime).packets(port_of(call, _job_of(call)), call.query.limit)}


def write_packets(call: Call) -> Any:
    """Write values to a port."""
    port, body = port_of(call, _job_of(call)), call.body
    if (body.value is msgspec.UNSET) == (body.values is None):
        raise Refused(400, "Not understood", "Give either `value` or `values`.")
    written = body.values if body.values is not None else [body.value]
    with _context(call, body.context):
        verbs.write(call, port, written)
    return {"written": len(written)}


def take_packets(call: Call) -> Any:
    """Read values from a port: they are consumed, even if the answer does not arrive."""
    port = port_of(call, _job_of(call))
    with noted(call, port.job, "packets read", port=f"{port.direction} {port.name}"):
        return {"values": port.read_many(call.body.limit)}


def publish(call: Call) -> Any:
    """Write a message to every input port that subscribes to a channel."""
    tell(call, f"publishes on {call.body.channel}")
    with _context(call, call.body.context):
        return {"written": call.sidejob.publish(call.body.channel, call.body.message)}


def write_log(call: Call) -> Any:
    """Make an entry of the log."""
    with _context(call, call.body.context):
        call.sidejob.log(call.body.entry)
    return {"logged": True}


# -- durable tasks and the dead set ----------------------------------------------------------------------------------


def list_tasks(call: Call) -> Any:
    """List durable tasks that wait or run: one page, and the cursor of the next."""
    asked = call.query
    chosen = {"task": asked.task, "queue": asked.queue, "text": asked.text}
    statuses = None if asked.status is None else [asked.status]
    views = TaskViews(call.sidejob.runtime)
    return _page(*views.page(**chosen, after=asked.cursor, limit=asked.limit, statuses=statuses))


def get_task(call: Call) -> Any:
    """Return everything about a durable task that waits or runs."""
    found = TaskViews(call.sidejob.runtime).task(call.path["id"])
    if found is None:
        raise Refused(404, "Not found", f"No durable task {call.path['id']!r} waits or runs.")
    return found


def revoke_task(call: Call) -> Any:
    """Revoke a durable task: it does not begin, or not again."""
    return verbs.revoke(call, call.path["id"], terminate=call.body.terminate)


def list_dead(call: Call) -> Any:
    """List entries of the dead set, the newest first: one page, and the cursor of the next."""
    asked = call.query
    chosen = picked(asked, *DEAD_FILTERS)
    entries, further = DeadViews(call.sidejob.runtime).page(**chosen, before=asked.cursor or 0, limit=asked.limit)
    return _page([asdict(entry) for entry in entries], None if further is None else str(further))


def list_dead_groups(call: Call) -> Any:
    """Count the newest 10,000 entries of the dead set by their failure group."""
    groups, are_more = DeadViews(call.sidejob.runtime).newest_groups()
    return {"groups": groups, "more": are_more}


def get_dead(call: Call) -> Any:
    """Return one entry of the dead set."""
    return asdict(call.sidejob.dead.get(call.path["id"]))


def retry_dead(call: Call) -> Any:
    """Try one entry of the dead set again."""
    entry: DeadEntry = call.sidejob.dead.get(call.path["id"])
    verbs.retry(call, entry)
    return {"retried": 1, "job": entry.job_id, "task_id": entry.task_id}


def retry_many_dead(call: Call) -> Any:
    """Try the first entries that match again; repeat it until `retried` is 0."""
    chosen = picked(call.body, *DEAD_FILTERS)
    tell(call, f"retries {chosen} of the dead set")
    return {"retried": call.sidejob.dead.retry_all(**chosen, limit=call.body.limit)}


def delete_dead(call: Call) -> Any:
    """Remove an entry of the dead set, with its job."""
    entry: DeadEntry = call.sidejob.dead.get(call.path["id"])
    return {"deleted": verbs.delete_entry(call, entry)}


# -- what runs them --------------------------------------------------------------------------------------------------


def list_queues(call: Call) -> Any:
    """Return the depth of each queue, and the settings of the managed ones."""
    gates = {gate["name"]: gate for gate in QueueViews(call.sidejob.runtime).gates()}
    found = StatisticsViews(call.sidejob.runtime).stats()["queues"]
    return {"items": [{"name": name, **found.get(name, {}), "gate": gates.get(name)} for name in {**found, **gates}]}


def pause_queue(call: Call) -> Any:
    """Let no further run of a queue begin."""
    verbs.pause(call, call.sidejob.queue(call.path["name"]), call.body.reason)
    return {"name": call.path["name"], "paused": True}


def resume_queue(call: Call) -> Any:
    """Let runs of a queue begin again."""
    verbs.resume(call, call.sidejob.queue(call.path["name"]))
    return {"name": call.path["name"], "paused": False}


def configure_queue(call: Call) -> Any:
    """Change the limits of a queue at once."""
    queue = call.sidejob.queue(call.path["name"])
    given = {name: value for name, value in msgspec.structs.asdict(call.body).items() if value is not msgspec.UNSET}
    tell(call, f"configures queue {queue.name}: {given}")
    queue.configure(**given)
    return {"name": queue.name, **given}


def list_pools(call: Call) -> Any:
    """List the capacity pools."""
    return {"items": QueueViews(call.sidejob.runtime).pools(POOLS)}


def resize_pool(call: Call) -> Any:
    """Give a capacity pool another number of slots."""
    verbs.resize_pool(call, call.path["name"], call.body.limit)
    return {"name": call.path["name"], "limit": call.body.limit}


def list_schedules(call: Call) -> Any:
    """List the schedules, with their next times."""
    return {"items": all_schedules(call.sidejob.runtime, NEXT_TIMES)}


def pause_schedule(call: Call) -> Any:
    """Pause a schedule."""
    return verbs.pause(call, call.sidejob.get_schedule(call.path["name"]), call.body.reason).info


def resume_schedule(call: Call) -> Any:
    """Resume a schedule."""
    return verbs.resume(call, call.sidejob.get_schedule(call.path["name"])).info


def run_schedule(call: Call) -> Any:
    """Make one more job, or message, of a schedule now."""
    made = verbs.run_schedule(call, call.sidejob.get_schedule(call.path["name"]))
    return {
        "job": made.id if isinstance(made, Job) else None,
        "task_id": made.task_id if isinstance(made, Job) else made.id,
    }


def list_workers(call: Call) -> Any:
    """List the live workers, and what each runs."""
    return {"items": [document_of(one, runs="runs") for one in call.sidejob.workers()]}


def get_stats(call: Call) -> Any:
    """Return the store at a glance, as `stats --json`."""
    return StatisticsViews(call.sidejob.runtime).stats()


def get_findings(call: Call) -> Any:
    """Return what `doctor` finds."""
    return {"items": [asdict(finding) for finding in examine(call.sidejob, thorough=False)]}


def get_openapi(call: Call) -> Any:
    """Return this document."""
    found = openapi(OPERATIONS, version_of("celery-sidejob"))
    return {**found, "servers": [{"url": call.root + found["servers"][0]["url"]}]}


# --------------------------------------------------------------------------------------------------------------------


def _job_of(call: Call) -> Job:
    found: Job = call.sidejob.get(call.path["id"])
    return found


def _page(items: Sequence[Any], cursor: int | str | None) -> dict[str, Any]:
    return {"items": items, "next": cursor}


def _context(call: Call, data: Mapping[str, Any]) -> Any:
    return call.sidejob.context(**data) if data else nullcontext()


def _refuse_without_task(call: Call, name: str) -> None:
    """Refuse durable tasks and ordinary ones: a call of those is no job, and they have rules of their own."""
    task = call.sidejob.app.tasks.get(name)
    if task is not None and not hasattr(task, "inports"):
        raise Refused(400, "No sidejob task", f"{name} is no sidejob task: only those make jobs.")


GET, POST, PATCH, DELETE = "GET", "POST", "PATCH", "DELETE"
READ, WRITE, OPERATE = "read", "write", "operate"
PORT = "/jobs/{id}/ports/{direction}/{name}"
OPERATIONS = (
    Operation(GET, "/", READ, version, schemas.Version),
    Operation(GET, "/openapi.json", READ, get_openapi, schemas.Document),
    Operation(GET, "/jobs", READ, list_jobs, schemas.Jobs, query=schemas.JobsQuery),
    Operation(POST, "/jobs", WRITE, make_job, schemas.JobInfo, schemas.NewJob, status=201),
    Operation(GET, "/jobs/{id}", READ, get_job, schemas.JobDetails),
    Operation(PATCH, "/jobs/{id}", OPERATE, change_job, schemas.JobInfo, schemas.Change),
    Operation(DELETE, "/jobs/{id}", OPERATE, delete_job, schemas.Deleted),
    Operation(POST, "/jobs/{id}/run", OPERATE, run_job, schemas.JobInfo, schemas.Run),
    Operation(POST, "/jobs/{id}/terminate", OPERATE, terminate_job, schemas.JobInfo, schemas.Terminate),
    Operation(POST, "/jobs/{id}/fork", OPERATE, fork_job, schemas.JobInfo, schemas.Fork, status=201),
    Operation(POST, "/jobs/{id}/adopt", OPERATE, adopt_job, schemas.JobInfo, schemas.Adopt),
    Operation(POST, "/jobs/{id}/disown", OPERATE, disown_job, schemas.JobInfo, schemas.Disown),
    Operation(PATCH, "/jobs/{id}/state", WRITE, change_state, schemas.JobInfo, schemas.State),
    Operation(GET, "/jobs/{id}/steps", READ, get_steps, schemas.Steps),
    Operation(GET, "/jobs/{id}/tree", READ, get_tree, schemas.Tree, query=schemas.Few),
    Operation(GET, PORT, READ, peek_packets, schemas.SeenPackets, query=schemas.Few),
    Operation(POST, PORT, WRITE, write_packets, schemas.Written, schemas.Packets),
    Operation(POST, f"{PORT}/take", WRITE, take_packets, schemas.Taken, schemas.Few),
    Operation(POST, "/publish", WRITE, publish, schemas.Written, schemas.Message),
    Operation(POST, "/log", WRITE, write_log, schemas.Logged, schemas.LogEntry),
    Operation(GET, "/tasks", READ, list_tasks, schemas.Tasks, query=schemas.TasksQuery),
    Operation(GET, "/tasks/{id}", READ, get_task, schemas.Task),
    Operation(POST, "/tasks/{id}/revoke", OPERATE, revoke_task, schemas.Revoked, schemas.Revoke),
    Operation(GET, "/dead", READ, list_dead, schemas.DeadEntries, query=schemas.DeadQuery),
    Operation(GET, "/dead/groups", READ, list_dead_groups, schemas.Groups),
    Operation(POST, "/dead/retry", OPERATE, retry_many_dead, schemas.Retried, schemas.DeadFilters),
    Operation(GET, "/dead/{id}", READ, get_dead, DeadEntry),
    Operation(POST, "/dead/{id}/retry", OPERATE, retry_dead, schemas.RetriedOne),
    Operation(DELETE, "/dead/{id}", OPERATE, delete_dead, schemas.Removed),
    Operation(GET, "/queues", READ, list_queues, schemas.Queues),
    Operation(PATCH, "/queues/{name}", OPERATE, configure_queue, schemas.Configured, schemas.Limits),
    Operation(POST, "/queues/{name}/pause", OPERATE, pause_queue, schemas.Paused, schemas.Reason),
    Operation(POST, "/queues/{name}/resume", OPERATE, resume_queue, schemas.Paused),
    Operation(GET, "/pools", READ, list_pools, schemas.Pools),
    Operation(PATCH, "/pools/{name}", OPERATE, resize_pool, schemas.Resized, schemas.Slots),
    Operation(GET, "/schedules", READ, list_schedules, schemas.Schedules),
    Operation(POST, "/schedules/{name}/pause", OPERATE, pause_schedule, schemas.Schedule, schemas.Reason),
    Operation(POST, "/schedules/{name}/resume", OPERATE, resume_schedule, schemas.Schedule),
    Operation(POST, "/schedules/{name}/run", OPERATE, run_schedule, schemas.Made),
    Operation(GET, "/workers", READ, list_workers, schemas.Workers),
    Operation(GET, "/stats", READ, get_stats, schemas.Document),
    Operation(GET, "/findings", READ, get_findings, schemas.Findings),
)
