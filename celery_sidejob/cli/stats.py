"""`stats`: the store at a glance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
from rich.console import RenderableType
from rich.text import Text

from ..inspection.statistics import COUNTED, GAUGES, StatisticsViews, life_of
from ..model.errors import InvalidValueError, SideJobError
from ..model.statistics import TIMED, Durations, Statistics, day_of
from ..model.status import Status
from .command import commands
from .output import Output, duration, lasting, printable, status, table_if_any

WAITING = {"scheduled": "Scheduled", "delayed": "Backoff", "parked": "Parked", "unpublished": "Not published"}
"""The counts of waiting runs that the table of queues has, by their keys in the document: the headings."""
TASKS = ("Queue", "Task", "Runs", "Mean", "±", "Waited", "±", "Failed", "Retried", "Lost", "Dead now")
STEPS = ("Queue", "Task", "Step", "Times", "Mean", "±", "Failed", "Retried")
ALARM = "bold red"
DEVIATION = (
    "± is the standard deviation: how far single runs usually are from the mean before it. If it is larger than the "
    "mean, a few runs took far longer than the others."
)
LIFE_STYLES = {"alive": "green", "suspected": "yellow", "silent": "yellow", "dead": "red", "stopped": ""}


@commands.command()
@click.option("--prometheus", is_flag=True, help="Print Prometheus' text format instead; needs the extra 'prometheus'.")
@click.option(
    "--all", "everything", is_flag=True, help="Count finished jobs too; reads all jobs, a million in a second."
)
@click.option("--day", help="Show what runs took on a day: 2026-11-26, today, yesterday, or `all` that are kept.")
def stats(sidejob: Any, output: Output, prometheus: bool, everything: bool, day: str | None) -> None:
    """Show queues, unfinished jobs, workers, the dead set, and what went wrong so far.

    With --day it shows, for each task in each queue, how long its runs waited and ran on that day (in UTC), and how
    many failed, were tried again or were lost; and the same for the steps of these tasks.

    With --prometheus a store that cannot be read is printed as `sidejob_up 0`; the command still ends with 1.
    """
    if prometheus and output.for_program:
        raise click.UsageError("--json and --prometheus are two formats; choose one.")
    if day is not None and (prometheus or everything):
        raise click.UsageError("--day shows something else than --prometheus and --all; give it alone.")
    if day is not None:
        _show_day(sidejob, output, day)
        return
    if prometheus and everything:
        raise click.UsageError("--all is not for --prometheus: a scrape must not read finished jobs.")
    if prometheus:
        _expose(sidejob)
        return
    found = StatisticsViews(sidejob.runtime).stats()
    if everything:
        # Reads all jobs, however long that takes.
        with sidejob.runtime.connections.talking(within_s=None), output.progress("Counting all jobs"):
            found["jobs"] = sidejob.count_jobs()
            found["estimated"] = [what for what in found["estimated"] if what != "jobs"]
    output.answer(found, *_tables(found, everything), *_totals(found))


def _show_day(sidejob: Any, output: Output, given: str) -> None:
    try:
        day = None if given == "all" else day_of(given)
    except InvalidValueError:
        raise click.UsageError(
            f"--day takes a date such as 2026-11-26, today, yesterday or all, not '{printable(given)}'."
        ) from None
    found, steps = StatisticsViews(sidejob.runtime).statistics_of_tasks(day)
    shown = table_if_any(*TASKS, rows=list(map(_task_row, found)))
    of_steps = table_if_any(*STEPS, rows=list(map(_step_row, steps)))
    document = {
        "day": None if day is None else day.isoformat(),
        "tasks": [one.as_document() for one in found],
        "steps": [one.as_document() for one in steps],
    }
    hint = Text(DEVIATION, "bright_black") if shown else None
    output.answer(document, shown or "Nothing is known of runs then.", of_steps, hint)


def _task_row(of: Statistics) -> tuple[Any, ...]:
    ran, waited = _spread(of.runs), _spread(of.waits)
    return of.queue, of.task, of.runs.count, *ran, *waited, of.failures, of.retries, of.losses, of.failed_now


def _step_row(of: Statistics) -> tuple[Any, ...]:
    return of.queue, of.task, of.step, of.runs.count, *_spread(of.runs), of.failures, of.retries


def _spread(durations: Durations) -> tuple[str, str]:
    """Return the mean and the deviation as people read them, in milliseconds if they are short."""
    if not durations.count:
        return "", ""
    return lasting(durations.mean), lasting(durations.std)


def _expose(sidejob: Any) -> None:
    from ..prometheus import exposition  # imported here: the library comes with an extra

    try:
        shown = exposition(sidejob)
    except SideJobError:
        click.echo(exposition(None), nl=False)  # otherwise the file from a minute ago would still say "up"
        raise
    click.echo(shown, nl=False)


def _about(found: dict[str, Any], what: str, number: int) -> str:
    """Return a number with a mark if it is an estimate."""
    return f"~{number:,}" if what in found["estimated"] else str(number)


def _tables(found: dict[str, Any], everything: bool) -> Iterator[RenderableType | None]:
    jobs = [(_about(found, "jobs", found["jobs"][name]), status(name)) for name in Status if name in found["jobs"]]
    yield table_if_any("Jobs", "Status", rows=jobs) or Text(
        "There are no jobs." if everything else "No job is unfinished."
    )
    queues = [
        (
            name,
            _about(found, f"queues.{name}", queue["depth"]),
            queue["running"],
            *(_about(found, f"queues.{name}", queue[what]) for what in WAITING),
            duration(queue["oldest_due_s"]),
            queue["workers"],
            "paused" if queue["paused"] else "" if queue["limit"] is None else f"at most {queue['limit']}",
        )
        for name, queue in found["queues"].items()
    ]
    columns = ("Queue", "Due", "Running", *WAITING.values(), "Oldest waits for", "Workers", "")
    yield table_if_any(*columns, rows=queues)
    workers = [(worker["ident"], worker["broker"] or "", _life(worker)) for worker in found["workers"]]
    yield table_if_any("Worker", "Broker", "", rows=workers) or Text("No worker is known.")
    stores = [(one["place"], one["name"] or "", one["error"] or "answers") for one in found["stores"]]
    yield table_if_any("Failover store", "Name", "", rows=stores)
    times = [
        (TIMED[name], row["count"], lasting(row["p50_s"]), lasting(row["p99_s"]))
        for name, row in found["durations"].items()
        if row["count"]
    ]
    yield table_if_any("The store's time for", "Times", "p50", "p99", rows=times)
    counts = [(found["counters"][name], meaning.rstrip(".")) for name, meaning in COUNTED.items()]
    yield table_if_any("So far", "", rows=[row for row in counts if row[0]])
    groups = [(row["entries"], row["task"], row["group"], row["reason"]) for row in found["dead"]["groups"]]
    yield table_if_any("Dead", "Task", "Group", "Reason", rows=groups)


def _totals(found: dict[str, Any]) -> Iterator[RenderableType]:
    numbers = [(gauge, gauge.of(found)) for gauge in GAUGES if gauge.label is not None]
    waiting = "".join(
        f" {gauge.label}: {_about(found, gauge.path[0], int(number))}."
        for gauge, number in numbers
        if number is not None
    )
    yield Text(f"Sweeping is {duration(found['sweep']['lag_s'])} behind.{waiting}")
    dead, given_up = found["dead"]["entries"], found["dead_list"]
    yield Text(f"Dead set: {_about(found, 'dead', dead)}", style=ALARM if dead else "")
    if given_up is not None:
        yield Text(f"Dead list of the broker: {given_up}", style=ALARM if given_up else "")
    if found["estimated"]:
        yield Text("~ marks an estimate from a sample; counting everything would take too long.", "bright_black")


def _life(worker: dict[str, Any]) -> Text:
    life = life_of(worker)
    return Text(f"silent for {duration(worker['silent_s'])}" if life == "silent" else life, LIFE_STYLES[life])
