"""The pages that only read: each function asks `inspection` and the handles as a command does, and fills a template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from ..deadset import REASONS as DEATHS
from ..deadset import DeadEntry
from ..examination import examine
from ..inspection import graphs
from ..inspection.dead import DeadViews
from ..inspection.jobs import BatchViews, JobPage, JobViews
from ..inspection.queues import QueueViews, all_schedules
from ..inspection.statistics import StatisticsViews, life_of
from ..inspection.tasks import TaskViews
from ..jobs.job import Job
from ..jobs.port import Port
from ..model.checks import MOST
from ..model.errors import job_not_found
from ..model.finding import Level
from ..model.printable import seconds_from, since_from
from ..model.status import ASKABLE, Status
from ..operations.waiting import REASONS
from ..store.waiting import STATUSES as TASK_STATUSES
from .drawing import chart_of, drawn, month_chart, over_time, runs_of, span_of
from .rendering import path
from .schemas import JobsQuery
from .site import Entry, Refused, Shown, Visit

PAGE = 50
"""How many rows a list shows at once."""
GROUPS = 12
"""How many failure groups the overview shows."""
POOLS = 200
STEPS = 300
"""The most steps that are drawn."""
TREE = 300
"""The most jobs of a tree that are shown."""
PACKETS = 50
BATCHES = 25
"""How many batches a list shows at once."""
MEMBERS = 50
"""How many open members of a batch are shown, and how many failed ones."""
NEXT_TIMES = 5


def overview(visit: Visit) -> Shown:
    """Show the store at a glance."""
    views = StatisticsViews(visit.sidejob.runtime)
    stats = views.stats()
    queues = stats["queues"].values()
    due = [queue["oldest_due_s"] for queue in queues if queue["oldest_due_s"] is not None]
    lately = views.lately()
    return visit.show(
        "overview.html",
        stats=stats,
        groups=stats["dead"]["groups"][:GROUPS],
        waiting=sum(queue["depth"] for queue in queues),
        running=sum(queue["running"] for queue in queues),
        oldest_s=max(due, default=None),
        workers=[worker for worker in stats["workers"] if life_of(worker) == "alive"],
        charts=(chart_of("hour", lately), chart_of("day", lately), month_chart(views.days())),
    )


# -- jobs ------------------------------------------------------------------------------------------------------------

FILTERS = tuple(name for name in JobsQuery.__struct_fields__ if name not in ("order", "cursor", "limit"))
"""The filters of the list of jobs: parameters of its URL, named like those of `sidejob.jobs`."""
TASK_FILTERS = ("status", "task", "queue", "text")
"""The filters of durable tasks."""
DEAD_FILTERS = ("group", "task", "queue", "reason")
"""The filters of the dead set."""


def jobs(visit: Visit) -> Shown:
    """List jobs, newest first."""
    chosen = {name: value for name, value in visit.asked.items() if name in FILTERS}
    newest_first = "after" not in visit.asked
    ends = {"before": _number(visit, "before"), "after": _number(visit, "after")}
    page = matching_jobs(visit.sidejob, chosen, **ends, limit=PAGE, newest_first=newest_first)
    shown = page.jobs if newest_first else page.jobs[::-1]
    newer, older = (None, page.next) if newest_first else (page.next, None)
    if ends["before"] is not None:
        newer = shown[0].id if shown else ends["before"] - 1
    elif ends["after"] is not None:
        older = shown[-1].id if shown else ends["after"] + 1
    return visit.show(
        "jobs.html",
        jobs=JobViews(visit.sidejob.runtime).brief(shown),
        chosen=chosen,
        statuses_to_choose=[*Status],
        reasons_to_choose=REASONS,
        newer=newer,
        older=older,
        looked_to=page.looked_to,
        goes_on="Older" if newest_first else "Newer",
    )


def matching_jobs(sidejob: Any, chosen: Mapping[str, str], *, limit: int, **options: Any) -> JobPage:
    """Return a page of the jobs that match the filters of a URL; the options are those of `JobViews.page`.

    Its pages end at `before` and `after`.
    """
    filters = filters_from(chosen) | {name: options.pop(name, None) for name in ("before", "after")}
    alias = filters.pop("alias", None)
    if alias is not None:
        job = sidejob.find(alias)
        if job is None:
            return JobPage([], None, None)
        filters["before"] = min(filters["before"] or MOST, job.id + 1)
        filters["after"] = max(filters["after"] or 0, job.id - 1)
    return JobViews(sidejob.runtime).page(filters, limit=limit, **options)


def filters_from(chosen: Mapping[str, str]) -> dict[str, Any]:
    """Return the filters of `sidejob.jobs` from their texts in a URL."""
    found: dict[str, Any] = dict(chosen)
    try:
        if "since" in chosen:
            found["since"] = since_from(chosen["since"].strip())
        if "older_than" in chosen:
            found["older_than"] = seconds_from(chosen["older_than"].strip())
    except ValueError as error:
        raise Refused(400, "Refused", str(error)) from error
    return found


def find(visit: Visit) -> Response:
    """Go to the job of an id, alias or task id, or to the durable task or dead entry of a task id."""
    which = visit.asked.get("which", "").strip()
    job = visit.sidejob.find(which) or visit.sidejob.for_task_id(which) if which else None
    if job is not None:
        return visit.go(f"/jobs/{job.id}")
    if which and TaskViews(visit.sidejob.runtime).task(which) is not None:
        return visit.go(f"/tasks/{path(which)}")
    entry = visit.sidejob.dead.for_task_id(which) if which else None
    if entry is not None:
        return visit.go(f"/dead/{path(entry.id)}")
    raise Refused(404, "Not found", f"No job, durable task or dead entry has the id or alias {which!r}.")


def job(visit: Visit) -> Shown:
    """Show everything about one job."""
    found = job_of(visit)
    details = JobViews(visit.sidejob.runtime).details(found)
    steps = found.steps
    return visit.show(
        "job.html",
        job=details,
        steps=steps[:STEPS],
        steps_count=len(steps),
        drawn=over_time([span_of(step) for step in steps[:STEPS]]),
        timeline=over_time(runs_of(details["history"])),
        history=details["history"][::-1],
        schedule=found.schedule,
        is_askable=found.status in ASKABLE,
    )


def tree(visit: Visit) -> Shown:
    """Show a job and the jobs below it."""
    found = job_of(visit)
    nodes = JobViews(visit.sidejob.runtime).tree(found, limit=TREE)
    return visit.show("tree.html", job=found, nodes=nodes, is_whole=len(nodes) < TREE)


def graph(visit: Visit) -> Shown:
    """Show a job among the jobs above and below it, its dependencies and its channels."""
    found = job_of(visit)
    shown = graphs.around(visit.sidejob.runtime, found)
    names = {node.key: f"job {node.job_id}" if node.job_id else node.label or "several tasks" for node in shown.nodes}
    return visit.show("graph.html", job=found, graph=shown, drawn=drawn(shown), names=names)


def packets(visit: Visit) -> Shown:
    """Show the next packets of a port, without reading them."""
    found = job_of(visit)
    port = port_of(visit, found)
    views = JobViews(visit.sidejob.runtime)
    count, is_more = views.count_packets(port)
    return visit.show(
        "packets.html",
        job=found,
        direction=port.direction,
        name=port.name,
        packets=views.packets(port, PACKETS),
        count=count,
        is_more=is_more,
    )


def port_of(visit: Visit, job: Job) -> Port:
    """Return the port of a job that a path names."""
    direction, name = visit.request.path_params["direction"], visit.request.path_params["name"]
    if direction not in ("in", "out"):
        raise Refused(404, "Not found", "A port's direction is `in` or `out`.")
    return job.input(name) if direction == "in" else job.output(name)


def job_of(visit: Visit) -> Job:
    """Return the job that a path names by its id."""
    which = visit.request.path_params["id"]
    if not (which.isascii() and which.isdecimal()):
        raise job_not_found(which)
    found: Job = visit.sidejob.get(which)
    return found


def batches(visit: Visit) -> Shown:
    """List batches, newest first."""
    found = BatchViews(visit.sidejob.runtime).page(before=_number(visit, "before"), limit=BATCHES + 1)
    older = found[BATCHES - 1]["id"] if len(found) > BATCHES else None
    return visit.show("batches.html", batches=found[:BATCHES], older=older)


def batch(visit: Visit) -> Shown:
    """Show one batch: its counts, the calls that follow it, and its open and failed members."""
    found = BatchViews(visit.sidejob.runtime).one(visit.asked.get("name", ""), limit=MEMBERS)
    return visit.show("batch.html", batch=found, most=MEMBERS)


# -- durable tasks and the dead set ----------------------------------------------------------------------------------


def tasks(visit: Visit) -> Shown:
    """List the durable tasks that wait or run."""
    chosen = {name: value for name, value in visit.asked.items() if name in TASK_FILTERS}
    status = chosen.get("status")
    if status is not None and status not in TASK_STATUSES:
        raise Refused(400, "Refused", f"{status!r} is no status of a durable task: {', '.join(TASK_STATUSES)}.")
    others = {name: value for name, value in chosen.items() if name != "status"}
    found, further = TaskViews(visit.sidejob.runtime).page(
        **others, statuses=None if status is None else [status], limit=PAGE, after=visit.asked.get("after", "")
    )
    return visit.show("tasks.html", tasks=found, chosen=chosen, task_statuses=TASK_STATUSES, further=further)


def task(visit: Visit) -> Shown:
    """Show everything about a durable task that waits or runs."""
    which = visit.request.path_params["task_id"]
    found = TaskViews(visit.sidejob.runtime).task(which)
    if found is None:
        told = f"No durable task {which!r} waits or runs: it has ended well, or is in the dead set."
        raise Refused(404, "Not found", told)
    return visit.show("task.html", task=found)


def dead(visit: Visit) -> Shown:
    """List the entries of the dead set, beside the failure groups."""
    chosen = {name: value for name, value in visit.asked.items() if name in DEAD_FILTERS}
    views = DeadViews(visit.sidejob.runtime)
    entries, older = views.page(**chosen, before=visit.asked.get("before", 0), limit=PAGE)
    groups, are_more = views.newest_groups()
    shown = {"entries": entries, "older": older, "groups": groups, "are_more": are_more}
    return visit.show("dead.html", chosen=chosen, deaths=DEATHS, **shown)


def dead_entry(visit: Visit) -> Shown:
    """Show one entry of the dead set, with the cause of each loss and its traceback."""
    entry: DeadEntry = visit.sidejob.dead.get(visit.request.path_params["id"])
    return visit.show("dead_entry.html", entry=entry)


# -- what runs them --------------------------------------------------------------------------------------------------


def workers(visit: Visit) -> Shown:
    """List the live workers, and what each runs."""
    return visit.show("workers.html", workers=visit.sidejob.workers())


def queues(visit: Visit) -> Shown:
    """List the queues with their gates, and the capacity pools."""
    views = QueueViews(visit.sidejob.runtime)
    stats = StatisticsViews(visit.sidejob.runtime).stats()
    gates = {gate["name"]: gate for gate in views.gates()}
    return visit.show(
        "queues.html", stats=stats, gates=gates, pools=views.pools(POOLS), names=sorted({*gates, *stats["queues"]})
    )


def schedules(visit: Visit) -> Shown:
    """List the schedules with their next times."""
    return visit.show("schedules.html", schedules=all_schedules(visit.sidejob.runtime, NEXT_TIMES))


def doctor(visit: Visit) -> Shown:
    """Show what `doctor` finds, the worst first."""
    order = {Level.ERROR: 0, Level.WARNING: 1, Level.OK: 2}
    found = sorted(examine(visit.sidejob, thorough=False), key=lambda finding: order[finding.level])
    return visit.show("doctor.html", findings=found)


def _number(visit: Visit, name: str) -> int | None:
    """Return a parameter that is the id of a job."""
    return number_of(name, visit.asked[name]) if name in visit.asked else None


def number_of(name: str, given: str) -> int:
    """Return the whole number that a parameter, or a field of a form, has."""
    if not (given.isascii() and given.isdecimal() and len(given) <= 18):
        raise Refused(400, "Refused", f"{name} is a whole number, not {given[:80]!r}.")
    return int(given)


READING = (
    Entry("/", overview, price=24),
    Entry("/find", find),
    Entry("/jobs", jobs),
    Entry("/jobs/{id}", job, price=32, is_of_job=True),
    Entry("/jobs/{id}/tree", tree),
    Entry("/jobs/{id}/graph", graph, price=12),
    Entry("/jobs/{id}/ports/{direction}/{name}", packets),
    Entry("/batches", batches, price=1),
    Entry("/batches/named", batch, price=5),
    Entry("/tasks", tasks),
    Entry("/tasks/{task_id}", task),
    Entry("/dead", dead),
    Entry("/dead/{id}", dead_entry),
    Entry("/workers", workers, price=2),
    Entry("/queues", queues, price=24),
    Entry("/schedules", schedules, price=1),
    Entry("/doctor", doctor),
)
