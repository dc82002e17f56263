"""Commands that act on many items: they ask first, act on each, and sum up."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import click

from ..jobs.job import Job
from ..model.errors import JobNotFoundError, SideJobError, StoreUnavailableError
from ..model.printable import counted, printable
from .command import INTERRUPTED, Failed, hint_unknown, job_named, with_app
from .options import check_one_way
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
    """How many items were done, and how many were skipped, by reason."""

    def __init__(self) -> None:
        self.done = 0
        self.skipped: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def skip(self, reason: str, number: int = 1) -> None:
        """Count skipped items and their reason."""
        if number:
            self.skipped[reason] += number

    def refuse(self, error: SideJobError) -> None:
        """Count an error; the first error of each class is kept in full."""
        self.skip(type(error).__name__)
        self._examples.setdefault(type(error).__name__, str(error))

    @property
    def skips(self) -> str:
        """A sentence on the skipped items; empty if there are none."""
        if not self.skipped:
            return ""
        return f" Skipped: {', '.join(f'{number:,} ({reason})' for reason, number in self.skipped.most_common())}."

    def note_errors(self, output: Output) -> None:
        """Print the kept errors in full, as notes."""
        for kind, example in self._examples.items():
            output.note(f"{kind}, for example: {example}")


PAGE = 200
"""How many jobs are read together."""
Act = Callable[[Job], str | None]
"""Acts on a job; returns the reason, in a few words, if the action does not apply to the job."""


def check_choice(job_ids: Sequence[str], chosen: Mapping[str, Any]) -> None:
    """Raise a usage error unless jobs are either named or chosen by filters."""
    by_filters = any(value not in (None, ()) for value in chosen.values())
    say = "Name a job, or choose jobs by filters such as --status and --task; not both."
    check_one_way(bool(job_ids), by_filters, say=say)


def act_on_each(
    sidejob: Any,
    output: Output,
    job_ids: Sequence[str],
    chosen: Mapping[str, Any],
    act: Act,
    *,
    verb: str,
    done: str,
    yes: bool,
) -> None:
    """Act on each job that is named, or count the jobs that match, ask whether to `verb` them, and act on each.

    Reports how many are `done`; ends with 1 if a named job is not. All named jobs must exist.

    Jobs that are made after the count are not touched. Jobs are read a page at a time, and each is one transaction. If
    a job refuses, the others are still acted on.
    """
    if job_ids:
        jobs: Iterable[Job] = {job.id: job for job in (job_named(sidejob, one) for one in job_ids)}.values()
        matched = len(list(jobs))
    else:
        filters = {**chosen, "status": chosen["status"] or None, "before": _next_id(sidejob)}
        with output.progress("Counting the jobs"):
            statuses: dict[str, int] = sidejob.count_jobs(**filters)
        matched = sum(statuses.values())
        confirm_all(verb, statuses, ("job", "jobs"), yes=yes)
        jobs, act = sidejob.iter_jobs(page=PAGE, **filters), _if_still(chosen["status"], act)
    summary = Summary()
    with output.progress(done) as add:
        stopped = until_stopped(lambda: _walk(jobs, act, summary, add))
    said = f"{done}: {counted(summary.done, 'job', 'jobs')}.{summary.skips}" if matched else "No job matches."
    output.answer({"matched": matched, "done": summary.done, "skipped": dict(summary.skipped)}, said)
    summary.note_errors(output)
    if not matched:
        hint_unknown(sidejob, output, task=chosen["task"], queue=chosen["queue"])
    end_if(stopped)
    if job_ids and summary.skipped:
        raise Failed("Some of these jobs were skipped.")


def _if_still(statuses: Collection[str], act: Act) -> Act:
    """Act on a job only if it still has one of these statuses: its page may have been read a while ago."""

    def check(job: Job) -> str | None:
        now = job.refresh()
        return act(now) if now.status in statuses else f"{now.status} meanwhile"

    return check if statuses else act


def until_stopped(act: Callable[[], None]) -> BaseException | None:
    """Act on all matches; return the outage or the Ctrl-C that has ended it early, for a report."""
    try:
        act()
    except (StoreUnavailableError, Failed, KeyboardInterrupt) as stopped:
        return stopped
    return None


def end_if(stopped: BaseException | None) -> None:
    """End the command as the interruption requires, once it has reported how far it came."""
    if isinstance(stopped, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    if stopped is not None:
        raise Failed(f"The rest was not looked at. {stopped}")


def _walk(jobs: Any, act: Act, summary: Summary, add: Callable[[int], None]) -> None:
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
            summary.done += 1
            add(1)
        else:
            summary.skip(reason)


def _next_id(sidejob: Any) -> int:
    """Return an id that is larger than the id of every existing job."""
    return next((job.id + 1 for job in sidejob.jobs(limit=1, newest_first=True)), 0)
