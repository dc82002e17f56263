"""`stats`: the store at a glance."""

from __future__ import annotations

from typing import Any

import click
from rich.console import RenderableType
from rich.text import Text

from ..inspection import Inspection
from ..model.errors import SideJobError
from ..model.measures import COUNTED, TIMED
from ..model.status import Status
from .command import Failed, as_json, with_sidejob
from .output import Output, status, table


@click.command()
@as_json
@click.option("--prometheus", is_flag=True, help="Print Prometheus' text format instead; needs the extra 'prometheus'.")
@click.option("--all", "everything", is_flag=True, help="Count finished jobs too; reads all jobs.")
@with_sidejob
def stats(sidejob: Any, output: Output, as_json: bool, prometheus: bool, everything: bool) -> None:
    """Show queues, unfinished jobs, workers, the dead set, and what went wrong so far.

    With --prometheus a store that cannot be read is printed as `sidejob_up 0`; the command still ends with 1.
    """
    if as_json and prometheus:
        raise click.UsageError("--json and --prometheus are two formats; give one of them.")
    if prometheus and everything:
        raise click.UsageError("--all is not for --prometheus: what is scraped again and again reads no finished jobs.")
    if prometheus:
        _expose(sidejob)
        return
    found = Inspection(sidejob.runtime).stats()
    if everything:
        with sidejob.runtime.connections.answering(within_s=None):  # it reads all jobs, however long that takes
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
        click.echo(exposition_of_nothing(), nl=False)  # else a file of the minute before would go on saying "up"
        raise
    click.echo(shown, nl=False)


def _tables(found: dict[str, Any], everything: bool) -> list[RenderableType]:
    counts = found["jobs"]

    def about(what: str, number: int) -> str:
        return f"~{number:,}" if what in found["estimated"] else str(number)

    nothing = "There are no jobs." if everything else "No job is unfinished."
    shown: list[RenderableType] = [
        table("Jobs", "Status", rows=[(about("jobs", counts[name]), status(name)) for name in Status if name in counts])
        if counts
        else Text(nothing)
    ]
    if found["queues"]:
        rows = [
            (
                name, about(f"queues.{name}", queue["depth"]), queue["running"],
                *(about(f"queues.{name}", queue[what]) for what in ("scheduled", "delayed", "unpublished")),
                duration(queue["oldest_due_s"]), queue["workers"],
            )
            for name, queue in found["queues"].items()
        ]  # fmt: skip
        shown.append(
            table(
                "Queue", "Due", "Running", "Scheduled", "Backoff", "Not published", "Oldest waits for", "Workers",
                rows=rows,
            )
        )  # fmt: skip
    if found["workers"]:
        lives = [(worker["id"], worker["ident"], _life(worker)) for worker in found["workers"]]
        shown.append(table("Worker", "Process", "", rows=lives))
    else:
        shown.append(Text("No worker is known."))
    if found["stores"]:
        stores = [(one["place"], one["name"] or "", one["error"] or "answers") for one in found["stores"]]
        shown.append(table("Failover store", "Name", "", rows=stores))
    timed = [(TIMED[name], row) for name, row in found["durations"].items() if row["count"]]
    if timed:
        times = [(what, row["count"], _milliseconds(row["p50_s"]), _milliseconds(row["p99_s"])) for what, row in timed]
        shown.append(table("The store's time for", "Times", "p50", "p99", rows=times))
    happened = [(found["counters"][name], meaning.rstrip(".")) for name, meaning in COUNTED.items()]
    if any(count for count, _ in happened):
        shown.append(table("So far", "", rows=[row for row in happened if row[0]]))
    if found["dead"]["groups"]:
        groups = [(row["entries"], row["task"], row["error"]) for row in found["dead"]["groups"]]
        shown.append(table("Dead", "Task", "Error", rows=groups))
    late, unsent = found["sweep"]["lag_s"], found["results"]["unsent"]
    dead = found["dead"]["entries"]
    shown.append(Text(f"Sweeping is {duration(late)} behind. Timers: {about('timers', found['timers']['waiting'])}. "
                      f"Results not sent: {about('results', unsent)}."))  # fmt: skip
    shown.append(Text(f"Dead set: {about('dead', dead)}", style="bold red" if dead else ""))
    if found["dead_list"] is not None:
        given_up = found["dead_list"]
        shown.append(Text(f"Dead list of sidejob://: {given_up}", style="bold red" if given_up else ""))
    if found["estimated"]:
        shown.append(Text("~ is an estimate from a sample: there is too much to be counted each time.", "bright_black"))
    return shown


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
