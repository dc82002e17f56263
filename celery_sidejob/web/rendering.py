"""From templates to pages: texts of others are escaped, and harmless as on a terminal; our own words have a tooltip."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ..jobs.job import Job
from ..model.printable import cut, duration, is_visible, lasting, plain, printable
from ..model.status import Status

LONGEST_VALUE = 20_000
"""The most characters of a value on a page; the command `show --json` shows all of them."""


def environment() -> Environment:
    """Return the environment of all templates."""
    made = Environment(
        loader=PackageLoader("celery_sidejob.web"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_harmless,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        ago=ago, at=at, moment=moment, duration=duration, lasting=lasting, number=number, value=value, path=path,
        query=query, exact=exact, line=line, short=cut, tail=tail, percent=percent,
    )  # fmt: skip
    made.tests["job"] = lambda one: isinstance(one, Job)
    # `live_at` is the path by which a page is told of changes.
    made.globals.update(words=WORDS, statuses=STATUSES, reasons=REASONS, live_at=None)
    return made


def ago(moment: datetime | None) -> Markup:
    """Return how long ago a moment was, or how far ahead it is; the moment itself is shown on hover."""
    if moment is None:
        return Markup("")
    away_s = (datetime.now(UTC) - moment).total_seconds()
    shown = f"{duration(away_s)} ago" if away_s >= 1 else f"in {duration(-away_s)}" if away_s <= -1 else "now"
    return _time(moment, shown, "ago")


def at(moment: datetime | None) -> Markup:
    """Return a moment, in UTC where no script shows it in the reader's time zone."""
    return Markup("") if moment is None else _time(moment, f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S}")


def moment(given: datetime, unit: str) -> Markup:
    """Return the beginning of a chart: a day, or the time of a day."""
    if unit == "day":
        return Markup("{}").format(given.date())
    return _time(given, f"{given.astimezone(UTC):%H:%M} UTC", "clock")


def number(count: float | None, estimated: bool = False) -> str:
    """Return a number with separators, and a mark if it is an estimate."""
    return "" if count is None else f"{'~' if estimated else ''}{count:,}"


def percent(part: float, whole: float) -> float:
    """Return a share in per cent, at most 100."""
    return round(min(100.0, 100 * part / whole), 2) if whole else 0.0


def value(given: Any) -> str:
    """Return a value as indented JSON, cut where it is very long."""
    return cut(json.dumps(given, default=plain, ensure_ascii=False, indent=2), LONGEST_VALUE)


def line(given: Any) -> str:
    """Return a value as JSON in one line, cut where it is long."""
    return cut(json.dumps(given, default=plain, ensure_ascii=False), 300)


def tail(text: Any, most: int) -> str:
    """Return a dotted name, cut from its beginning where it is long."""
    shown = str(text)
    return shown if len(shown) <= most else f"…{shown[1 - most :]}"


def path(part: Any) -> str:
    """Return a name as one part of a path."""
    return quote(str(part), safe="")


def exact(given: Any) -> Markup:
    """Return what a form sends back as it is: its invisible characters are references in the page, not escapes.

    HTML takes references to C1 controls for other characters: those controls stay.
    """
    shown = "" if given is None else str(escape(given))
    return Markup("".join(one if is_visible(one) or "\x80" <= one <= "\x9f" else f"&#{ord(one)};" for one in shown))


def query(given: Mapping[str, Any], **changed: Any) -> str:
    """Return the query of a URL; parameters without a value are left out."""
    kept = {name: value for name, value in {**given, **changed}.items() if value not in (None, "", (), [])}
    return f"?{urlencode(kept, doseq=True)}" if kept else "?"


def _time(moment: datetime, shown: str, kind: str = "at") -> Markup:
    whole = moment.astimezone(UTC)
    return Markup('<time class="{}" datetime="{}" title="{}">{}</time>').format(
        kind, whole.isoformat(), f"{whole:%Y-%m-%d %H:%M:%S} UTC", shown
    )


def _harmless(shown: Any) -> Any:
    """Replace invisible characters of every text that a template shows; what is Markup was escaped before."""
    if shown is None:
        return ""
    return shown if isinstance(shown, Markup) else escape(printable(str(shown), keep="\n\t"))


# -- the words of pages ------------------------------------------------------------------------------------------------

WORDS = {
    "batch": "A set of jobs and durable tasks. It has its own progress, and can make a call when all its members "
    "have ended.",
    "capacity pool": "A number of slots that calls share. A call that finds no free slot is refused, or waits.",
    "channel": "A name such as /orders/new under which messages are published, by an output port or by "
    "sidejob.publish(). Each message is written to every input port that subscribes to the "
    "channel. Not the same as a channel of kombu.",
    "dead set": "The list of work that needs a person: jobs that failed, and durable tasks that failed, were "
    "lost, expired or were revoked. An entry can be retried or deleted.",
    "durable task": "An ordinary Celery task with durable=True. Its message is a row in Postgres until the "
    "task has ended successfully or is in the dead set.",
    "failure group": "The name under which similar failures are counted in the dead set: the class of the "
    "exception, or the group that a JobFailed names.",
    "gate": "The place in front of a managed queue. Messages wait there until the order, the limit and the rate of "
    "the queue let them through.",
    "job": "A row in Postgres with a task, arguments, state, ports, timers and children. The task runs many times "
    "over the job's life, which may last months.",
    "packet": "One value on a port, with its context and options.",
    "port": "A job's mailbox. Packets wait on an input port until a run reads them, and on an output port until the "
    "job's parent or a client reads them.",
    "run": "One execution of a job's task, or of a durable task. A run begins with a claim, and ends with a commit "
    "or is lost.",
    "schedule": "A row in Postgres with times. At each time it makes a job, or a message of a durable task.",
    "state": "The JSON values that you keep on a job with job.set().",
    "step": "A part of a body that is done once: job.step, job.call, job.sleep, job.receive. Its effects and its "
    "record are one commit, and later runs of the same asking go on behind it.",
    "timer": "A moment at which a job will be asked to run: job.run(eta=…), job.run(countdown=3600). Postgres keeps "
    "the timer.",
}
"""The words whose meaning a page shows in a tooltip; docs/glossary.md says the same."""
STATUSES = {
    Status.QUEUED: "A run is owed: it begins when a worker is free and nothing holds it back.",
    Status.RUNNING: "A worker runs it now.",
    Status.SUSPENDED: "Its last run has ended, and it waits to be asked again: by a packet, a child or a timer.",
    Status.COMPLETED: "Its last run has ended well.",
    Status.FAILED: "Its last run has failed for good. It is in the dead set until somebody retries or deletes it.",
    Status.TERMINATING: "Its shutdown is asked for, and has not run yet.",
    Status.TERMINATED: "It was shut down. Only a forced run revives it.",
}
REASONS = {
    "dependencies": "other jobs that it depends on have not completed",
    "timer": "its time has not come",
    "retry": "its last run failed, and the wait before the next try is not over",
    "pause": "its queue is paused",
    "limit": "as many runs of its queue are in progress as the queue's limit allows",
    "rate": "runs begin no faster than its rate, or that of its queue, allows",
    "pool": "its capacity pool has no free slot",
    "room": "a port that it writes to is full until its reader makes room",
    "no worker": "no live worker of its queue knows its task",
}
SAID = {
    "asked": "It was asked to run.",
    "terminate": "Its shutdown was asked for.",
    "deleted": "It was deleted.",
    "forked": "This is the fork.",
    "changed": "It was changed.",
    "written": "The packet was written.",
    "retried": "It is tried again.",
    "revoked": "It is revoked: it does not begin, or not again.",
    "paused": "It is paused.",
    "resumed": "It goes on.",
    "made": "One more was made now.",
}
"""What a page says after an action, by the parameter `said` of its URL."""
