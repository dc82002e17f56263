"""`jobs`, `tree` and `watch`: a list of jobs, a job with all jobs below it, and a job as it goes on.

`steps` removes steps of a job, to be done again; `fork` makes a job that continues another job's steps. `tags`, `tag`,
`untag`, `tracked`, `track` and `untrack` find and follow jobs; `batches` lists, shows, closes and deletes batches.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import Any

import click
from rich.text import Text
from rich.tree import Tree

from ..inspection.jobs import DEEPEST, JobViews, Node
from ..jobs.batch import Batch
from ..jobs.job import Job
from ..model.printable import counted
from ..model.status import FINISHED, Status
from .command import INTERRUPTED, Failed, commands, hint_unknown, job_named, load_modules, looks
from .options import JOB_FILTERS, JSON_LIST, JSON_OBJECT, AtLeast, job_argument, limit_option, yes_option
from .output import Output, at_least, in_short, lasting, line, status, table_if_any
from .selection import confirm

PARENT = "Parent"
"""Omitted if no job of the list has a parent: a terminal is narrow."""
COLUMNS = ("Job", "Status", "Task", "Queue", PARENT, "Created", "Last run", "Took")
JOB_ID = AtLeast(0)


@commands.command(params=[*JOB_FILTERS])
@limit_option
@click.option("--oldest-first", is_flag=True, help="Show the oldest jobs first; so does --after.")
@click.option("--before", metavar="ID", type=JOB_ID, help="Only jobs before this id.")
@click.option("--after", metavar="ID", type=JOB_ID, help="Only jobs after this id, the oldest first.")
def jobs(sidejob: Any, output: Output, /, limit: int, oldest_first: bool, **chosen: Any) -> None:
    """List jobs by their ids, newest first.

    Beside the status the list shows why a job waits (`waiting_for`), or the error of a failed job. "Took" is how long
    the last run took, if the run has ended and the job's history has it.

    These jobs are found at once: running jobs, up to 10,000 children of a job, the jobs of a tag or a batch, the job of
    a key, and up to 1,000 jobs made --since a time. Failed jobs, and queued jobs of one queue, are read one by one.
    With any other filter the command reads all jobs until enough match: a million takes a second.
    """
    newest_first = not oldest_first and chosen["after"] is None
    filters = {**chosen, "status": chosen["status"] or None}
    with output.progress("Looking through the jobs"):
        found: list[Job] = sidejob.jobs(limit=limit, newest_first=newest_first, **filters)
        views = JobViews(sidejob.runtime)
        waiting_for, lasted = views.waiting_for(found), views.lasted(found)
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
        hint_unknown(sidejob, output, task=chosen["task"], queue=chosen["queue"])


def parent_of(info: dict[str, Any]) -> str:
    """Return a job's parent and its name among the parent's children."""
    return "" if info["parent"] is None else f"{info['parent']} / {info['child_name']}"


def _row(info: dict[str, Any], *, families: bool) -> tuple[Any, ...]:
    why, error = ", ".join(info["waiting_for"]), info["error"]
    if not why and info["status"] == Status.FAILED and error is not None:
        why = in_short(f"{error['type']}: {error['message']}")
    shown = line(status(info["status"]), f": {why}" if why else "")
    took = None if info["lasted_s"] is None else lasting(info["lasted_s"])
    parent = (parent_of(info),) if families else ()
    return info["id"], shown, info["task"], info["queue"], *parent, info["created_at"], info["ran_at"], took


@commands.command()
@job_argument
@click.option(
    "--depth", type=click.IntRange(0, DEEPEST), default=100, show_default=True, help="Show at most this many levels."
)
@click.option("--limit", type=AtLeast(1), default=1000, show_default=True, help="Show at most this many jobs.")
def tree(sidejob: Any, output: Output, job_id: str, depth: int, limit: int) -> None:
    """Show a job and all jobs below it. Reading and printing a thousand jobs takes a fifth of a second.

    Each level indents the lines by four columns. For a tree of a thousand levels, --json is shorter.
    """
    with output.progress("Reading the tree"):
        nodes = JobViews(sidejob.runtime).tree(job_named(sidejob, job_id), depth=depth, limit=limit)
    output.answer([asdict(node) for node in nodes], _grown(nodes))
    if _left_out(nodes):
        output.note("There are more jobs below these: raise --limit or --depth.")


def _grown(nodes: list[Node]) -> Tree:
    left_out = _left_out(nodes)
    endless = {node.id for node in nodes if node.more_children}
    trees: dict[int, Tree] = {}
    for node in nodes:
        name = "" if node.child_name is None else f"{node.child_name}: "
        shown = line((str(node.id), "bold"), f"  {name}{node.task}  ", status(node.status))
        if node.progress is not None:
            shown += line((f"  {node.progress['shown']}", "bright_black"))
        # A parent comes before its children; the first node's own is not here.
        above = trees.get(node.parent) if node.parent is not None else None
        trees[node.id] = above.add(shown) if above is not None else Tree(shown)
    for job_id, count in left_out.items():
        has = len(trees[job_id].children)
        number = at_least(count, job_id in endless)
        trees[job_id].add(Text(f"… {number} more" if has else f"… {number} below", style="bright_black"))
    return trees[nodes[0].id]


def _left_out(nodes: list[Node]) -> dict[int, int]:
    """Count the children of each job that are not shown."""
    shown = Counter(node.parent for node in nodes[1:])
    return {node.id: node.children - shown[node.id] for node in nodes if node.children > shown[node.id]}


@commands.command()
@job_argument
def watch(sidejob: Any, output: Output, job_id: str) -> None:
    """Follow a job's status and progress until it is finished; Ctrl-C ends the command, and not the job.

    It reads the store twice a second. Ends with 0 if the job has completed, with 1 if it has failed, was
    terminated or was deleted.
    """
    try:
        found = _follow(JobViews(sidejob.runtime), job_named(sidejob, job_id), output)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    if output.for_program:
        output.answer(found)
    if found["status"] != Status.COMPLETED:
        error = found["error"] if found["status"] == Status.FAILED else None
        raise Failed(
            f"Job {found['id']} is {found['status']}" + (f": {error['type']}: {error['message']}" if error else ".")
        )


def _follow(views: JobViews, job: Job, output: Output) -> dict[str, Any]:
    """Report each change until the job is finished, and return its last state."""
    said = ""
    for found in looks(partial(views.standing, job), output):
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


# -- steps -------------------------------------------------------------------------------------------------------------


@commands.group()
def steps() -> None:
    """Have steps of a job done again; `show --steps` lists them."""


@steps.command()
@job_argument
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
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


@commands.command()
@job_argument
@click.option("--before", metavar="STEP", help="The new job does this step, and all that began after it, again.")
@click.option("--args", metavar="JSON", type=JSON_LIST, help="Other positional arguments: a JSON list.")
@click.option("--kwargs", metavar="JSON", type=JSON_OBJECT, help="Other keyword arguments: a JSON object.")
@click.option("--task", metavar="NAME", help="Another task.")
@click.option("--queue", metavar="NAME", help="Another queue.")
def fork(sidejob: Any, output: Output, /, job_id: str, before: str | None, **changed: Any) -> None:
    """Make a job with the task, arguments, state and finished steps of another one that has not completed."""
    load_modules(sidejob)
    job = job_named(sidejob, job_id)
    made: Job = sidejob.fork(job, before, **{name: value for name, value in changed.items() if value is not None})
    output.answer({"job": made.id, "of": job.id}, f"Made job {made.id} ({made.task}) from job {job.id}.")


# -- tags, and tracked jobs --------------------------------------------------------------------------------------------

tag_names = click.argument("names", metavar="TAG...", nargs=-1, required=True)


@commands.command()
@limit_option
def tags(sidejob: Any, output: Output, limit: int) -> None:
    """List the tags that most jobs have, the most common first. Counting a million tags takes about a second."""
    found: list[tuple[str, int]] = sidejob.tags(limit)
    shown = table_if_any("Jobs", "Tag", rows=[(count, tag) for tag, count in found])
    output.answer([{"tag": tag, "jobs": count} for tag, count in found], shown or "No job has a tag.")


@commands.command()
@job_argument
@tag_names
def tag(sidejob: Any, output: Output, job_id: str, names: tuple[str, ...]) -> None:
    """Add tags to a job, after the tags that it has already."""
    _tell_tags(output, job_named(sidejob, job_id).tag(*names))


@commands.command()
@job_argument
@tag_names
def untag(sidejob: Any, output: Output, job_id: str, names: tuple[str, ...]) -> None:
    """Remove tags from a job; tags that it does not have are ignored."""
    _tell_tags(output, job_named(sidejob, job_id).untag(*names))


@commands.command()
@limit_option
def tracked(sidejob: Any, output: Output, limit: int) -> None:
    """List the tracked jobs, in the order in which they were tracked."""
    found: list[Job] = sidejob.tracked(limit)
    rows = [(job.id, status(job.status), job.task, job.queue, job.ran_at) for job in found]
    shown = table_if_any("Job", "Status", "Task", "Queue", "Last run", rows=rows)
    output.answer([job.info for job in found], shown or "No job is tracked.")


@commands.command()
@job_argument
def track(sidejob: Any, output: Output, job_id: str) -> None:
    """Track a job: `tracked` lists it, and its changes are announced on /sidejob/tracked."""
    job = job_named(sidejob, job_id).track()
    output.answer({"id": job.id, "tracked": True}, f"Job {job.id} is tracked.")


@commands.command()
@job_argument
def untrack(sidejob: Any, output: Output, job_id: str) -> None:
    """Stop tracking a job."""
    job = job_named(sidejob, job_id).untrack()
    output.answer({"id": job.id, "tracked": False}, f"Job {job.id} is not tracked any more.")


def _tell_tags(output: Output, job: Job) -> None:
    found = job.tags
    said = f"Job {job.id} has {counted(len(found), 'tag', 'tags')}"
    output.answer({"id": job.id, "tags": found}, f"{said}: {', '.join(found)}." if found else f"{said}.")


# -- batches -----------------------------------------------------------------------------------------------------------

name_argument = click.argument("name")
BATCH_COLUMNS = ("Batch", "", "Members", "Completed", "Failed", "Terminated", "Open")


@commands.group()
def batches() -> None:
    """List batches, and show one, close it or delete it."""


@batches.command("list")
def list_batches(sidejob: Any, output: Output) -> None:
    """Show all batches, oldest first, and how their members have ended; reads all members."""
    _show_batches(output, sidejob.batches(), lambda found: found)


@batches.command()
@name_argument
def show(sidejob: Any, output: Output, name: str) -> None:
    """Show how the members of a batch have ended."""
    _show_batches(output, [sidejob.get_batch(name)], lambda found: found[0])


@batches.command()
@name_argument
def close(sidejob: Any, output: Output, name: str) -> None:
    """Close a batch that somebody left open: it takes nothing more, and ends when all its members have."""
    about = _counts(sidejob.get_batch(name).close())
    output.answer(about, f"Batch {name} is closed. Open members: {about['counts']['open']}.")


@batches.command()
@name_argument
@yes_option
def delete(sidejob: Any, output: Output, name: str, yes: bool) -> None:
    """Delete a batch, after a question: nothing follows it, and its members go on."""
    batch = sidejob.get_batch(name)
    confirm(f"Delete batch {name} ({batch.counts.open} open), so that nothing follows it?", yes=yes)
    batch.delete()
    output.answer({"name": name, "deleted": True}, f"Batch {name} is deleted.")


def _show_batches(output: Output, found: list[Batch], document: Any) -> None:
    shown = [_counts(batch) for batch in found]
    rows = [(each["name"], each["state"], *each["counts"].values()) for each in shown]
    output.answer(document(shown), table_if_any(*BATCH_COLUMNS, rows=rows) or "There is no batch.")


def _counts(batch: Batch) -> dict[str, Any]:
    counts, ended_at = batch.counts, batch.ended_at
    state = "ended" if ended_at is not None else "closed" if batch.closed else "takes members"
    return {"name": batch.name, "state": state, "ended_at": ended_at, "counts": {**asdict(counts), "open": counts.open}}
