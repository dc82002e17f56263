"""`schedules`: lists the schedules and their next times, and lets a person change them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from ..hooks.beat import declaration_of, entries_of
from ..model.errors import SideJobError
from .command import Failed, commands, load_modules, nothing_matches
from .options import yes_option
from .output import Output, facts, job_or_task, line, moment, paused, table, table_if_any
from .selection import confirm

NEXT_SHOWN = 5
name_argument = click.argument("name")


@commands.group()
def schedules() -> None:
    """List schedules, pause and resume them, run one now, and take over the entries of Celery's beat."""


@schedules.command("list")
def list_schedules(sidejob: Any, output: Output) -> None:
    """Show all schedules: their times, the next time, and the time of the last job."""
    found = [schedule.info for schedule in sidejob.schedules()]
    rows = [
        (each["name"], _state(each), each["task"], _times(each), each["next_time"], each["last_time"], each["count"])
        for each in found
    ]
    shown = table_if_any("Schedule", "", "Task", "Times", "Next", "Last", "Made", rows=rows)
    output.answer(found, shown or "There is no schedule: declare one in sidejob_schedules, or make one.")


@schedules.command()
@name_argument
def show(sidejob: Any, output: Output, name: str) -> None:
    """Show everything about one schedule, and the times that come next."""
    schedule = sidejob.get_schedule(name)
    about = schedule.info
    about["next_times"] = schedule.next_times(NEXT_SHOWN)
    last = f"job {about['last_job']}" if about["last_job"] else about["last_task_id"]
    output.answer(
        about,
        line((f"Schedule {name}", "bold"), f"  {about['task']}  {_state(about)}"),
        facts(
            {
                "times": _times(about),
                "from": about["start"],
                "until": about["end"],
                "catch up": about["catch_up"],
                "overlap": about["overlap"],
                "jitter": about["jitter"] or None,
                "arguments": about["args"],
                "keywords": about["kwargs"] or None,
                "options": about["options"] or None,
                "declared": "in sidejob_schedules" if about["declared"] else None,
                "trouble": about["trouble"],
                "made": about["count"],
                "last": last,
                "last time": about["last_time"],
                "next": ", ".join(map(moment, about["next_times"])) or "none",
            }
        ),
    )


@schedules.command()
@name_argument
@click.option("--reason", metavar="TEXT", help="Why it is paused; `schedules list` shows this text.")
def pause(sidejob: Any, output: Output, name: str, reason: str | None) -> None:
    """Pause a schedule: it makes no job until `schedules resume`, and no job for the times of the pause."""
    schedule = sidejob.get_schedule(name).pause(reason)
    output.answer(schedule.info, f"Schedule {name} is paused.")


@schedules.command()
@name_argument
def resume(sidejob: Any, output: Output, name: str) -> None:
    """Resume a paused schedule, from now on."""
    schedule = sidejob.get_schedule(name)
    was_paused = schedule.paused
    about = schedule.resume().info
    said = "goes on" if was_paused else "was not paused"
    next_time = f" Next: {moment(about['next_time'])}." if about["next_time"] is not None else ""
    output.answer(about, f"Schedule {name} {said}.{next_time}")


@schedules.command()
@name_argument
def run(sidejob: Any, output: Output, name: str) -> None:
    """Make one more job of a schedule now; its own times stay as they are."""
    load_modules(sidejob)
    made = sidejob.get_schedule(name).run_now()
    said = f"Schedule {name} has made {job_or_task(made)}."
    output.answer({"name": name, "made": made.id}, said)


@schedules.command()
@name_argument
@yes_option
def delete(sidejob: Any, output: Output, name: str, yes: bool) -> None:
    """Delete a schedule and its times that are due, after a question; the jobs that it has made stay."""
    schedule = sidejob.get_schedule(name)
    confirm(f"Delete schedule {name} ({schedule.info['task']}) for good?", yes=yes)
    was_there = schedule.delete()
    output.answer({"name": name, "deleted": was_there}, f"Schedule {name} is deleted.")


@schedules.command("import")
@click.argument("names", metavar="[NAME]...", nargs=-1)
def import_entries(sidejob: Any, output: Output, names: Sequence[str]) -> None:
    """Make schedules from entries of Celery's beat_schedule: from the named ones, or from all that can be imported.

    An entry can be imported if its task is a sidejob task or a durable task, and its times are an interval or a
    crontab. Remove an imported entry from beat_schedule: until then beat calls the task too.
    """
    load_modules(sidejob)
    entries = entries_of(sidejob.app)
    for name in names:
        if name not in entries:
            raise Failed(nothing_matches("beat_schedule", sorted(entries), name))
    done = [_imported(sidejob, name, entry) for name, entry in entries.items() if not names or name in names]
    imported = [each["name"] for each in done if each["problem"] is None]
    rows = [(each["name"], each["times"] or "", each["problem"] or "imported") for each in done]
    output.answer(done, table("Entry", "Times", "", rows=rows))
    if imported:
        output.note(f"Remove these from beat_schedule, or beat calls them too: {', '.join(imported)}.")
    if names and len(imported) < len(done):
        raise Failed(next(each["problem"] for each in done if each["problem"] is not None))


def _imported(sidejob: Any, name: str, entry: Any) -> dict[str, Any]:
    """Make one schedule; if that is impossible, return the reason."""
    try:
        given = declaration_of(name, entry)
        schedule = sidejob.schedule(name, given.pop("task"), given.pop("args"), given.pop("kwargs"), **given)
    except (SideJobError, TypeError) as error:
        return {"name": name, "times": None, "problem": str(error)}
    return {"name": name, "times": _times(schedule.info), "problem": None}


def _times(about: dict[str, Any]) -> str:
    return f"every {about['every']:g} s" if about["cron"] is None else f"{about['cron']} ({about['timezone']})"


def _state(about: dict[str, Any]) -> str:
    if about["paused_at"] is not None:
        return paused(about["paused_at"], about["pause_reason"])
    if about["trouble"] is not None:
        return "in trouble"
    return "" if about["next_time"] is not None else "ended"
