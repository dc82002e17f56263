"""`dead`: the dead set, and a person's decisions about its entries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

import click
from rich.text import Text

from ..deadset import MOST_DIGITS, DeadEntry
from ..model.errors import SideJobError
from ..model.printable import counted
from .command import Failed, commands, hint_unknown, load_modules, nothing_matches
from .options import SECONDS, AtLeast, Read, check_one_way, limit_option, queue_option, together, yes_option
from .output import Output, facts, in_short, table
from .selection import Summary, confirm

Id = int | str
"""The id of an entry as the dead set knows it: a number; in a failover store ``name:number``."""


def entry_id_from(text: str) -> Id:
    """Return the id of an entry that a person has typed."""
    name, colon, number = text.rpartition(":")
    if not number.isdecimal() or len(number) > MOST_DIGITS or (colon and not name):
        raise ValueError(f"{text!r} is no entry's id: a number, or a store's name:number.")
    return f"{name}:{int(number)}" if name else int(number)


def _is_entry_id(given: str) -> bool:
    return given.rpartition(":")[2].isdecimal()


ENTRY_ID = Read("id", entry_id_from)
ENTRY_OR_TASK = Read("id", lambda text: entry_id_from(text) if _is_entry_id(text) else text)
"""The id of an entry; or a task id, which is searched in the dead set."""
STAYS = "something below its job is not finished, or it was locked, or it went meanwhile"
entry_argument = click.argument("entry_id", metavar="ID_OR_TASK_ID", type=ENTRY_OR_TASK)
COLUMNS = ("Entry", "Died", "Task", "Job", "Error")
ALL_COLUMNS = ("Entry", "Died", "Reason", "Queue", "Task", "Job", "Task id", "Error")
entry_filters = together(
    click.option("--group", metavar="GROUP", help="Only entries of this group, as `dead groups` shows it."),
    click.option("--task", metavar="NAME", help="Only entries of this task."),
    queue_option,
    click.option("--reason", metavar="REASON", help="Only entries with this reason, such as lost, revoked."),
)
given_entries = click.argument("given", metavar="[ID_OR_TASK_ID]...", type=ENTRY_OR_TASK, nargs=-1)
all_entries = click.option("--all", "everything", is_flag=True, help="All entries.")


def check_one_choice(given: Sequence[Id], everything: bool, chosen: Mapping[str, str | None]) -> None:
    """Raise a usage error unless entries are named, chosen by filters, or all chosen."""
    check_one_way(
        bool(given),
        everything,
        any(value is not None for value in chosen.values()),
        say="Name entries by their ids, or choose by --group, --task, --queue or --reason, or all with --all.",
    )


@commands.group()
def dead() -> None:
    """List work that failed for good, was lost or expired, and retry or delete it."""


@dead.command("list")
@entry_filters
@limit_option
@click.option("--after", metavar="ID", type=ENTRY_ID, default=0, help="Only entries after this id.")
@click.option("--wide", is_flag=True, help="Show task ids, reasons and queues too, and whole errors.")
def list_entries(sidejob: Any, output: Output, /, limit: int, wide: bool, **chosen: Any) -> None:
    """List entries, oldest first; with --group, newest first.

    The list fits a terminal of 80 columns. An entry without a job is a durable task: `dead show` and --wide have its
    task id.

    With --queue or --reason, or with --task and --group, the command reads entries one by one until enough match: a
    million takes a second.
    """
    with output.progress("Looking through the dead set"):
        found: list[DeadEntry] = sidejob.dead.list(limit=limit, **chosen)
    rows = map(_wide_row if wide else _row, found)
    more = f"There may be more: --after {found[-1].id}" if len(found) == limit else None
    output.answer_with_list(map(asdict, found), ALL_COLUMNS if wide else COLUMNS, rows, more=more)
    if not found and not chosen.pop("after"):
        _suggest(sidejob, output, **chosen)


@dead.command()
def groups(sidejob: Any, output: Output) -> None:
    """Count entries by failure group; reads them all, a million in a second."""
    with output.progress("Counting the dead set"):
        found: dict[str, int] = sidejob.dead.groups()
    output.answer(found, table("Entries", "Group", rows=[(count, group) for group, count in found.items()]))


@dead.command()
@entry_argument
def show(sidejob: Any, output: Output, entry_id: Id) -> None:
    """Show one entry with its traceback."""
    show_entry(output, sidejob.dead.get(_entry_of(sidejob, entry_id)))


@dead.command()
@given_entries
@all_entries
@entry_filters
@click.option("--limit", type=AtLeast(1), help="Retry at most this many.")
@yes_option
def retry(
    sidejob: Any, output: Output, /, given: Sequence[Id], everything: bool, limit: int | None, yes: bool, **chosen: Any
) -> None:
    """Try entries again: by id, or by group, task, queue or reason, or all, in the order in which they failed.

    Unless you name entries by their ids, the command first shows how many match, and asks you. To choose failed jobs by
    other filters, such as --tag or --since, use `run --status failed --force`.
    """
    check_one_choice(given, everything, chosen)
    load_modules(sidejob)
    if given:
        _act_on(output, _named(sidejob, given), sidejob.dead.retry, "retried")
        return
    with output.progress("Counting entries"):
        matched = sidejob.dead.count(**chosen)
    number = matched if limit is None else min(limit, matched)
    if number:
        confirm(f"Retry {counted(number, 'entry', 'entries')} of the dead set?", yes=yes)
    summary = Summary()
    retry_all = partial(sidejob.dead.retry_all, limit=limit, progress=summary.add, **chosen)
    summary.work(output, "Retrying entries", lambda: retry_all(skipped=lambda _, error: summary.refuse(error)))
    if not matched and not everything:
        _suggest(sidejob, output, **chosen)
    said = f"{counted(summary.done, 'entry', 'entries')} retried.{summary.skips}"
    output.answer({"retried": summary.done, "skipped": dict(summary.skipped)}, said)
    summary.end(output)


@dead.command()
@given_entries
@all_entries
@entry_filters
@yes_option
def delete(
    sidejob: Any, output: Output, /, given: Sequence[Id], everything: bool, yes: bool, **chosen: str | None
) -> None:
    """Delete entries for good: by id, or by group, task, queue or reason, or all; asks first.

    With the entry of a job goes the job, with its state and packets, and with all jobs below it.
    """
    check_one_choice(given, everything, chosen)
    if not given:
        _purge(sidejob, output, "deleted", yes, **(chosen if not everything else {"older_than": 0.0}))
        return

    def remove(entry_id: Id) -> None:
        if not sidejob.dead.delete(entry_id):
            raise Failed(f"Entry {entry_id} was not deleted: {STAYS}.")

    entries = _named(sidejob, given)
    _confirm_deletion(len(entries), sum(entry.job_id is not None for entry in entries.values()), yes=yes)
    _act_on(output, entries, remove, "deleted")


@dead.command()
@click.option("--older-than", metavar="DURATION", type=SECONDS, help="Entries that are older: 86400, 1d.")
@click.option("--keep", metavar="N", type=AtLeast(0), help="All entries but the newest N.")
@entry_filters
@yes_option
def purge(
    sidejob: Any, output: Output, /, older_than: float | None, keep: int | None, yes: bool, **chosen: str | None
) -> None:
    """Delete entries for good, by age or by number; asks first.

    With the entry of a job goes the job, with its state and packets, and with all jobs below it. With --older-than and
    --keep entries go to which either applies; with --group, --task, --queue or --reason only those that match too.
    """
    if older_than is None and keep is None and not any(value is not None for value in chosen.values()):
        raise click.UsageError(
            "Say what is to go: --older-than DURATION, --keep N, or a filter such as --reason REASON."
        )
    _purge(sidejob, output, "purged", yes, older_than=older_than, keep=keep, **chosen)


def _purge(sidejob: Any, output: Output, what: str, yes: bool, **which: Any) -> None:
    """Delete the entries that match, after a question, and report how many were deleted."""
    matched = 0
    with ExitStack() as shown:
        adds = [shown.enter_context(output.progress("Counting entries"))]

        def confirm(entries: int, jobs: int) -> None:
            nonlocal matched
            matched = entries
            shown.close()  # a spinner would write over the question
            _confirm_deletion(entries, jobs, yes=yes)
            adds.append(shown.enter_context(output.progress("Purging entries")))

        done = sidejob.dead.purge(**which, confirm=confirm, progress=lambda number: adds[-1](number))
    _report(output, what, done)
    if done < matched:
        output.note(f"{counted(matched - done, 'entry', 'entries')} left: {STAYS}.")
    if not matched and "group" in which:
        _suggest(sidejob, output, **{name: which[name] for name in ("group", "task", "queue", "reason")})


def _confirm_deletion(entries: int, jobs: int, *, yes: bool) -> None:
    """Ask whether so many entries may be deleted, and say how many of them are jobs."""
    with_jobs = (
        f" ({counted(jobs, 'job', 'jobs')} with everything below {'it' if jobs == 1 else 'them'})" if jobs else ""
    )
    if entries:
        confirm(f"Delete {counted(entries, 'entry', 'entries')} of the dead set{with_jobs} for good?", yes=yes)


def show_entry(output: Output, entry: DeadEntry) -> None:
    """Show an entry with its traceback."""
    document = asdict(entry)
    shown = {name.replace("_", " "): value for name, value in document.items() if name != "traceback"}
    for name in ("retries", "losses", "history"):  # leave out zeros; a job's losses are in its error
        shown[name] = shown[name] or None
    if entry.loss is not None:  # as a sentence, if that is not in the error already
        shown["loss"] = None if entry.loss["why"] in entry.error else entry.loss["why"]
    output.answer(document, facts(shown), Text(entry.traceback) if entry.traceback else None)


def _named(sidejob: Any, given: Sequence[Id]) -> dict[Id, DeadEntry]:
    """Return the named entries by their ids; all of them must exist."""
    return {entry.id: entry for entry in (sidejob.dead.get(_entry_of(sidejob, one)) for one in given)}


def _act_on(output: Output, entry_ids: Iterable[Id], act: Callable[[Id], Any], what: str) -> None:
    """Apply an action to each entry, and report their number."""
    done, failures = 0, []
    for entry_id in entry_ids:
        try:
            act(entry_id)
            done += 1
        except (Failed, SideJobError) as error:
            failures.append(str(error))
    if done or not failures:
        _report(output, what, done)
    if failures:
        raise Failed(" ".join(failures))


def _entry_of(sidejob: Any, given: Id) -> Id:
    """Return an entry's id, given that id or a task id."""
    if _is_entry_id(str(given)):
        return given
    found: DeadEntry | None = sidejob.dead.for_task_id(given)
    if found is None:
        raise Failed(f"The dead set has no entry of the task id {given!r}: it was retried or deleted, or never was.")
    return found.id


def _row(entry: DeadEntry) -> tuple[Any, ...]:
    return entry.id, entry.died_at, entry.task, entry.job_id, in_short(entry.error)


def _wide_row(entry: DeadEntry) -> tuple[Any, ...]:
    return (entry.id, entry.died_at, entry.reason, entry.queue, entry.task, entry.job_id, entry.task_id, entry.error)


def _suggest(
    sidejob: Any, output: Output, *, group: str | None, task: str | None, queue: str | None, reason: str | None
) -> None:
    """If no entry matches, suggest names that would match."""
    if reason is not None or sidejob.dead.list(group=group, task=task, queue=queue, limit=1):
        return  # entries match, but another process has retried or locked them
    if group is not None:
        output.note(nothing_matches("the dead set", list(sidejob.dead.groups()), group))
    elif task is not None:
        output.note(nothing_matches("the dead set", sidejob.dead.tasks(), task))
    else:
        hint_unknown(sidejob, output, queue=queue)


def _report(output: Output, what: str, number: int) -> None:
    output.answer({what: number}, f"{counted(number, 'entry', 'entries')} {what}.")
