"""The jobs that a command is given by filters, and what it does with each of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ..jobs.job import Job
from ..model.errors import JobNotFoundError, SideJobError, StoreUnavailableError
from ..model.printable import counted
from . import names
from .command import INTERRUPTED, Failed, job_named
from .options import check_one_way
from .output import Output
from .questions import confirm_all
from .summary import Summary

PAGE = 200
"""Jobs that are read together."""
Act = Callable[[Job], str | None]
"""Does something with a job; returns why not, in a few words, if it does not apply to the job."""


def check_choice(job_ids: Sequence[str], chosen: Mapping[str, Any]) -> None:
    """Raise a usage error unless jobs are either named or chosen by filters."""
    by_filters = any(value not in (None, ()) for value in chosen.values())
    say = "Name a job, or choose jobs by filters such as --status and --task; not both."
    check_one_way(bool(job_ids), by_filters, say=say)


def act_on_each(
    sidejob: Any, output: Output, job_ids: Sequence[str], chosen: Mapping[str, Any], act: Act, *, verb: str, done: str,
    yes: bool,
) -> None:  # fmt: skip
    """Act on each job that is named, or count the jobs that match, ask whether to `verb` them, and act on each.

    Tells how many are `done`; ends with 1 if one that is named is not. All that are named must exist.

    Jobs that are made after the count are left alone. They are read a page at a time, each is one transaction, and
    what one of them refuses does not keep the others from it.
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
        names.hint(sidejob, output, task=chosen["task"], queue=chosen["queue"])
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
    """Act on what matches; return the outage or the Ctrl-C that has ended it before the last one, for a report."""
    try:
        act()
    except (StoreUnavailableError, Failed, KeyboardInterrupt) as stopped:
        return stopped
    return None


def end_if(stopped: BaseException | None) -> None:
    """End the command as whatever has stopped it requires, once it has reported how far it came."""
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
    """Return an id that is larger than those of all jobs there are now."""
    return next((job.id + 1 for job in sidejob.jobs(limit=1, newest_first=True)), 0)
