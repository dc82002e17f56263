"""`stats`: the store at a glance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
from rich.console import RenderableType
from rich.text import Text

from ..inspection import COUNTED, GAUGES, Inspection
from ..model.errors import SideJobError
from ..model.measures import TIMED
from ..model.status import Status
from .command import Failed, as_json, with_sidejob
from .output import Output, status, table

ALARM = "bold red"


@click.command()
@as_json
@click.option("--prometheus", is_flag=True, help="Print Prometheus' text format instead; needs the extra 'prometheus'.")
@click.option(
    "--all", "everything", is_flag=True, help="Count finished jobs too; reads all jobs, a million in a second."
)
@with_sidejob
def stats(sidejob: Any, output: Output, as_json: bool, prometheus: bool, everything: bool) -> None:
    """Show queues, unfinished jobs, workers, the dead set, and what went wrong so far.

    With --prometheus a store that cannot be read is printed as `sidejob_up 0`; the command still ends with 1.
    """
    if as_json and prometheus:
        raise click.UsageError("--json and --prometheus are two formats; choose one.")
    if prometheus and everything:
        raise click.UsageError("--all is not for --prometheus: a scrape must not read finished jobs.")
    if prometheus:
        _expose(sidejob)
        return
    found = Inspection(sidejob.runtime).stats()
    if everything:
        # It reads all jobs, however long that takes.
        with sidejob.runtime.connections.talking(within_s=None), output.progress("Counting all jobs"):
            found["jobs"] = sidejob.count_jobs()
            found["estimated"] = [what for what in found["estimated"] if what != "jobs"]
    if as_json:
        output.json(found)
    else:
        output.show(*_tables(found, everything))


def _expose(sidejob: Any) -> None:
    try:
        from ..prometheus import exposition, exposition_of_nothing
    except ModuleNotFoundError as error:
        raise Failed(
            f"--prometheus needs the library {error.name!r}: install celery-sidejob[prometheus], or prometheus-client."
        ) from error
    try:
        shown = exposition(sidejob)
    except SideJobError:
        click.echo(exposition_of_nothing(), nl=False)  # otherwise the file of the last minute would still say "up"
        raise
    click.echo(shown, nl=False)


def _tables(found: dict[str, Any], everything: bool) -> list[RenderableType]:
    shown = [
        _jobs(found, everything), _queues(found), _workers(found), _stores(found), _times(found), _so_far(found),
        _dead_groups(found), *_totals(found),
    ]  # fmt: skip
    return [one for one in shown if one is not None]


def _about(found: dict[str, Any], what: str, number: int) -> str:
    """Return a number with a mark if it is an estimate."""
    return f"~{number:,}" if what in found["estimated"] else str(number)


def _jobs(found: dict[str, Any], everything: bool) -> RenderableType:
    counts = found["jobs"]
    if not counts:
        return Text("There are no jobs." if everything else "No job is unfinished.")
    rows = [(_about(found, "jobs", counts[name]), status(name)) for name in Status if name in counts]
    return table("Jobs", "Status", rows=rows)


def _queues(found: dict[str, Any]) -> RenderableType | None:
    rows = [
        (
            name, _about(found, f"queues.{name}", queue["depth"]), queue["running"],
            *(_about(found, f"queues.{name}", queue[what]) for what in ("scheduled", "delayed", "unpublished")),
            duration(queue["oldest_due_s"]), queue["workers"],
        )
        for name, queue in found["queues"].items()
    ]  # fmt: skip
    columns = ("Queue", "Due", "Running", "Scheduled", "Backoff", "Not published", "Oldest waits for", "Workers")
    return table(*columns, rows=rows) if rows else None


def _workers(found: dict[str, Any]) -> RenderableType:
    lives = [(worker["id"], worker["ident"], _life(worker)) for worker in found["workers"]]
    return table("Worker", "Process", "", rows=lives) if lives else Text("No worker is known.")


def _stores(found: dict[str, Any]) -> RenderableType | None:
    stores = [(one["place"], one["name"] or "", one["error"] or "answers") for one in found["stores"]]
    return table("Failover store", "Name", "", rows=stores) if stores else None


def _times(found: dict[str, Any]) -> RenderableType | None:
    timed = [(TIMED[name], row) for name, row in found["durations"].items() if row["count"]]
    times = [(what, row["count"], _milliseconds(row["p50_s"]), _milliseconds(row["p99_s"])) for what, row in timed]
    return table("The store's time for", "Times", "p50", "p99", rows=times) if times else None


def _so_far(found: dict[str, Any]) -> RenderableType | None:
    happened = [(found["counters"][name], meaning.rstrip(".")) for name, meaning in COUNTED.items()]
    rows = [row for row in happened if row[0]]
    return table("So far", "", rows=rows) if rows else None


def _dead_groups(found: dict[str, Any]) -> RenderableType | None:
    groups = [(row["entries"], row["task"], row["error"]) for row in found["dead"]["groups"]]
    return table("Dead", "Task", "Error", rows=groups) if groups else None


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
        yield Text(f"Dead list of sidejob://: {given_up}", style=ALARM if given_up else "")
    if found["estimated"]:
        yield Text("~ marks an estimate from a sample; counting everything would take too long.", "bright_black")


def _life(worker: dict[str, Any]) -> Text:
    if worker["silent_s"] is not None:
        return Text(f"silent for {duration(worker['silent_s'])}", style="yellow")
    if worker["stopped"]:
        return Text("stopped")
    if not worker["alive"]:
        return Text("dead", style="red")
    return Text("suspected", style="yellow") if worker["suspected"] else Text("alive", style="green")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"


def duration(seconds: float | None) -> str:
    """Return a duration as people read it."""
    if seconds is None:
        return ""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} s"
