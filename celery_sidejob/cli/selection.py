"""Commands that act on many items: they ask first, act on each, and sum up."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from ..jobs.job import Job
from ..model.errors import JobNotFoundError, SideJobError, StoreUnavailableError
from ..model.printable import counted, printable
from .command import INTERRUPTED, Command, Failed, hint_unknown, job_named, with_app
from .options import JOB_FILTERS, check_one_way
from .output import Output


def confirm_all(verb: str, counts: Mapping[str, int], nouns: tuple[str, str], *, yes: bool) -> None:
    """Ask whether to `verb` all jobs counted by status, unless there are none; `nouns` are singular and plural."""
    total = sum(counts.values())
    if total:
        kinds = ", ".join(f"{number:,} {status}" for status, number in sorted(counts.items()))
        confirm(f"{verb} {counted(total, *nouns)} ({kinds})?", yes=yes)


def confirm(question: str, *, yes: bool) -> None:
    """Ask whether to go on, unless `yes`; without a yes, or a person to ask, fail before anything is changed."""
    if yes:
        return
    if not can_ask():
        raise Failed(f"Nothing was changed. {question} There is no terminal to ask on: say --yes.")
    if not click.confirm(printable(with_app(question)), err=True):
        raise Failed("Nothing was changed.")


def can_ask() -> bool:
    """Tell whether a person can answer a question."""
    return sys.stdin is not None and sys.stdin.isatty()  # None: it is closed


class Summary:
    """What a command has done with many items: how many were done, how many skipped and why, and what has ended it."""

    def __init__(self) -> None:
        self.done = 0
        self.skipped: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self._stopped: BaseException | None = None
        self._shown: Callable[[int], None] = lambda number: None

    def add(self, number: int = 1) -> None:
        """Count items that were done."""
        self.done += number
        self._shown(number)

    def skip(self, reason: str, number: int = 1) -> None:
        """Count skipped items and their reason."""
        if number:
            self.skipped[reason] += number

    def refuse(self, error: SideJobError) -> None:
        """Count an error; the first error of each class is kept in full."""
        self.skip(type(error).__name__)
        self._examples.setdefault(type(error).__name__, str(error))

    def work(self, output: Output, doing: str, act: Callable[[], object]) -> None:
        """Act on all matches, and show the progress; an outage or Ctrl-C ends it early, which `end` tells."""
        with output.progress(doing) as self._shown:
            try:
                act()
            except (StoreUnavailableError, Failed, KeyboardInterrupt) as stopped:
                self._stopped = stopped

    @property
    def skips(self) -> str:
        """A sentence on the skipped items; empty if there are none."""
        if not self.skipped:
            return ""
        return f" Skipped: {', '.join(f'{number:,} ({reason})' for reason, number in self.skipped.most_common())}."

    def end(self, output: Output) -> None:
        """Print the kept errors in full, as notes, and end the command as the interruption requires."""
        for kind, example in self._examples.items():
            output.note(f"{kind}, for example: {example}")
        if isinstance(self._stopped, KeyboardInterrupt):
            sys.exit(INTERRUPTED)
        if self._stopped is not None:
            raise Failed(f"The rest was not looked at. {self._stopped}")


PAGE = 200
"""How many jobs are read together."""
Act = Callable[[Job], str | None]
"""Acts on a job; returns the reason, in a few words, if the action does not apply to the job."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The jobs that a person means: those that are named, or all that match filters, after a question unless `yes`."""

    job_ids: Sequence[str]
    chosen: Mapping[str, Any]
    yes: bool


class JobsCommand(Command):
    """A command, with `yes_option`, on jobs that are named or chosen by filters: it gets a `Selection` of them."""

    def __init__(self, *args: Any, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.params[:0] = [click.Argument(["job_ids"], metavar="[ID_OR_ALIAS]...", nargs=-1), *JOB_FILTERS]

    def call(self, app: Any, output: Output, given: dict[str, Any]) -> Any:
        """Call the function of the command; a usage error if jobs are named and chosen, or neither."""
        chosen = {str(option.name): given.pop(str(option.name)) for option in JOB_FILTERS}
        selection = Selection(given.pop("job_ids"), chosen, given.pop("yes"))
        by_filters = any(value not in (None, ()) for value in chosen.values())
        say = "Name a job, or choose jobs by filters such as --status and --task; not both."
        check_one_way(bool(selection.job_ids), by_filters, say=say)
        return super().call(app, output, {**given, "selection": selection})


def act_on_each(sidejob: Any, output: Output, selection: Selection, act: Act, *, verb: str, done: str) -> None:
    """Act on each job that is named, or count the jobs that match, ask whether to `verb` them, and act on each.

    Reports how many are `done`; ends with 1 if a named job is not. All named jobs must exist.

    Jobs that are made after the count are not touched. Jobs are read a page at a time, and each is one transaction. If
    a job refuses, the others are still acted on.
    """
    job_ids, chosen = selection.job_ids, selection.chosen
    if job_ids:
        jobs: Iterable[Job] = {job.id: job for job in (job_named(sidejob, one) for one in job_ids)}.values()
        matched = len(list(jobs))
    else:
        filters = {**chosen, "status": chosen["status"] or None, "before": _next_id(sidejob)}
        with output.progress("Counting the jobs"):
            statuses: dict[str, int] = sidejob.count_jobs(**filters)
        matched = sum(statuses.values())
        confirm_all(verb, statuses, ("job", "jobs"), yes=selection.yes)
        jobs, act = sidejob.iter_jobs(page=PAGE, **filters), _if_still(chosen["status"], act)
    summary = Summary()
    summary.work(output, done, lambda: _walk(jobs, act, summary))
    said = f"{done}: {counted(summary.done, 'job', 'jobs')}.{summary.skips}" if matched else "No job matches."
    output.answer({"matched": matched, "done": summary.done, "skipped": dict(summary.skipped)}, said)
    if not matched:
        hint_unknown(sidejob, output, task=chosen["task"], queue=chosen["queue"])
    summary.end(output)
    if job_ids and summary.skipped:
        raise Failed("Some of these jobs were skipped.")


def _if_still(statuses: Collection[str], act: Act) -> Act:
    """Act on a job only if it still has one of these statuses: its page may have been read a while ago."""

    def check(job: Job) -> str | None:
        now = job.refresh()
        return act(now) if now.status in statuses else f"{now.status} meanwhile"

    return check if statuses else act


def _walk(jobs: Iterable[Job], act: Act, summary: Summary) -> None:
    """Act on each job."""
    for job in jobs:
        try:
            reason = act(job)
        except StoreUnavailableError:
            raise
        except JobNotFoundError:
            reason = "deleted meanwhile"
        except SideJobError as error:
            summary.refuse(error)
            continue
        if reason is None:
            summary.add()
        else:
            summary.skip(reason)


def _next_id(sidejob: Any) -> int:
    """Return an id that is larger than the id of every existing job."""
    return next((job.id + 1 for job in sidejob.jobs(limit=1, newest_first=True)), 0)
