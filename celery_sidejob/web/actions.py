"""The forms of an operator: each does one thing, as a command does, and goes back to the page that shows it.

Or it acts on all jobs, or on all entries of the dead set, that match filters. A page shows first how many there are; it
counts for a moment only. Each request then acts on one batch, and its page goes on to the next: closing it, or its
link, stops the rest. The newest are first, and a batch begins before the last of the one before: none is acted on
twice, and nothing that was made meanwhile.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.responses import Response

from ..deadset import DeadEntry
from ..inspection.dead import DeadViews
from ..jobs.job import Job
from ..model.errors import SideJobError, StoreUnavailableError
from ..model.printable import seconds_from
from . import verbs
from .pages import DEAD_FILTERS, FILTERS, job_of, matching_jobs, number_of, port_of
from .site import Entry, Refused, Shown, Visit
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


# -- on many at once -------------------------------------------------------------------------------------------------

BATCH = 200
"""The most items of one request."""
COUNTED = 1000
"""The most items that are counted at once."""
COUNT_S = 0.05
"""For how many seconds items are counted."""
BATCH_S = 3.0
"""After so many seconds a request leaves the rest of its batch to the next one."""


@dataclass(frozen=True, slots=True)
class Verb:
    """One action on many: its name, what it means, and what does it to one; a text that it returns says why not."""

    asks: str
    means: str
    act: Callable[[Visit, Any], Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """What is acted on: jobs, or entries of the dead set."""

    path: str
    noun: tuple[str, str]
    filters: Sequence[str]
    verbs: Mapping[str, Verb]
    page: Callable[[Visit, Mapping[str, str], str, int], tuple[Sequence[Any], int | str | None]]
    """Returns the next items before an id, and the id from which to go on; None at the end."""


def ask(kind: Kind, visit: Visit) -> Shown:
    """Show how many match, and ask whether to act on them."""
    verb, chosen = _verb(kind, visit.asked.get("verb", "")), _chosen(kind, visit.asked)
    total, is_more, before = _count(kind, visit, chosen)
    shown = {"kind": kind, "name": visit.asked["verb"], "verb": verb, "chosen": chosen, "state": "ask"}
    return visit.show("bulk.html", **shown, total=total, is_more=is_more, done=0, skipped=0, before=before, why=None)


def _count(kind: Kind, visit: Visit, chosen: Mapping[str, str]) -> tuple[int, bool, str]:
    """Count the items that match; tell whether there may be more, and before which id all of them are.

    It counts for a moment only: a second is too long for a page.
    """
    count, first, before, until = 0, "", "", time.monotonic() + COUNT_S
    while True:
        items, goes_on = kind.page(visit, chosen, before, COUNTED)
        count, before = count + len(items), str(goes_on)
        if not first:
            first = _next(items[0].id) if items else before
        if goes_on is None or time.monotonic() > until:
            return count, goes_on is not None, first


def _next(item_id: int | str) -> str:
    """Return the id after an id, which may have the name of a store."""
    store, colon, number = str(item_id).rpartition(":")
    return f"{store}{colon}{int(number) + 1}"


def act(kind: Kind, visit: Visit) -> Shown:
    """Act on the next batch, and show how far it is."""
    form = visit.form
    name = form.get("verb", "")
    verb, chosen = _verb(kind, name), _chosen(kind, form)
    total, done, skipped = (number_of(field, form.get(field) or "0") for field in ("total", "done", "skipped"))
    before, why, until = form.get("before", ""), form.get("why") or None, time.monotonic() + BATCH_S
    is_more = "is_more" in form
    if not done + skipped:
        tell(visit, f"{name}: {total}{' or more' if is_more else ''} {kind.noun[1]} with {chosen}")
    most = BATCH if is_more else max(0, min(BATCH, total - done - skipped))
    items, goes_on = kind.page(visit, chosen, before, most) if most else ([], None)
    for item in items:
        reason = _one(verb, visit, item)
        done, skipped, why = (done + 1, skipped, why) if reason is None else (done, skipped + 1, reason)
        if time.monotonic() > until and item is not items[-1]:
            goes_on = item.id
            break
    state = "over" if goes_on is None or (done + skipped >= total and not is_more) else "go on"
    total = max(total, done + skipped)
    how_far = {"total": total, "is_more": is_more, "done": done, "skipped": skipped, "before": goes_on, "why": why}
    return visit.show("bulk.html", kind=kind, name=name, verb=verb, chosen=chosen, state=state, **how_far)


def _one(verb: Verb, visit: Visit, item: Any) -> str | None:
    try:
        answer = verb.act(visit, item)
        return answer if isinstance(answer, str) else None
    except StoreUnavailableError:
        raise
    except (SideJobError, Refused) as error:
        return str(error)


def _verb(kind: Kind, name: str) -> Verb:
    found = kind.verbs.get(name)
    if found is None:
        raise Refused(400, "Refused", f"There is no action {name[:80]!r}.")
    return found


def _chosen(kind: Kind, given: Mapping[str, str]) -> dict[str, str]:
    return {name: given[name] for name in kind.filters if given.get(name)}


# -- jobs ------------------------------------------------------------------------------------------------------------


def _jobs(visit: Visit, chosen: Mapping[str, str], before: str, limit: int) -> tuple[Sequence[Job], int | None]:
    page = matching_jobs(visit.sidejob, chosen, before=number_of("before", before) if before else None, limit=limit)
    return page.jobs, page.next


JOBS = Kind(
    "/jobs",
    ("job", "jobs"),
    FILTERS,
    {
        "run": Verb("Ask to run", "Each runs once more, as soon as it may. Failed jobs stay as they are.", verbs.run),
        "force": Verb(
            "Force to run",
            "Each runs once more, also if it has failed or was terminated.",
            partial(verbs.run, force=True),
        ),
        "terminate": Verb("Terminate", "Each shuts down. A run in progress finishes first.", verbs.terminate),
        "delete": Verb("Delete for good", "Only what is terminated goes, with all below it.", verbs.delete),
    },
    _jobs,
)


# -- the dead set ----------------------------------------------------------------------------------------------------


def _entries(
    visit: Visit, chosen: Mapping[str, str], before: str, limit: int
) -> tuple[Sequence[DeadEntry], int | str | None]:
    return DeadViews(visit.sidejob.runtime).page(**chosen, before=before or 0, limit=limit)


def _delete_entry(visit: Visit, entry: DeadEntry) -> str | None:
    return None if verbs.delete_entry(visit, entry) else "a job below its job is not finished"


DEAD = Kind(
    "/dead",
    ("entry", "entries"),
    DEAD_FILTERS,
    {
        "retry": Verb("Retry", "Each is tried again, and leaves the dead set.", verbs.retry),
        "delete": Verb("Delete for good", "Each entry goes with its job and all jobs below it.", _delete_entry),
    },
    _entries,
)


BULK = tuple(
    Entry(f"{kind.path}/bulk", partial(page, kind), method, Role.OPERATE)
    for kind in (JOBS, DEAD)
    for method, page in (("GET", ask), ("POST", act))
)
