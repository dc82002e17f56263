"""Celery's beat: the task that sweeps once, which keeps jobs going if no worker sweeps, and the entries of others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from celery import Celery, _state
from celery.schedules import crontab
from celery.schedules import schedule as interval

from ..model.checks import shown
from ..model.errors import InvalidValueError
from .configuration import settings_of
from .patches import app_methods

TASK = "celery_sidejob.poll"
ENTRY = "celery-sidejob-poll"


def add_entry(app: Celery, **_: Any) -> None:
    """Put the poll into the beat schedule, unless the user has an entry of that name.

    A poll that waits longer than the interval is useless, and expires.
    """
    settings, schedule = settings_of(app), app.conf.beat_schedule
    if settings.database_url is not None and ENTRY not in schedule:
        queue, interval_s = settings.poll_queue or app.conf.task_default_queue, settings.poll_interval
        options = {"queue": queue, "expires": interval_s * 0.9, "ignore_result": True}
        schedule[ENTRY] = {"task": TASK, "schedule": interval_s, "options": options}


def _register(app: Celery) -> None:
    def poll() -> dict[str, Any]:
        """Sweep once and report it."""
        return dataclasses.asdict(app.sidejob.poll())

    app_methods.make_task(app, poll, name=TASK, ignore_result=True, acks_late=False)


_state.connect_on_app_finalize(_register)


FULL = tuple(frozenset(range(*bounds)) for bounds in ((60,), (24,), (1, 32), (1, 13), (7,)))
"""All values that the five fields of a cron expression can have."""


def entries_of(app: Celery) -> Mapping[str, Mapping[str, Any]]:
    """Return the app's beat entries by name, without the entry for polling, which schedules do not need."""
    app.finalize(auto=True)
    found = {name: entry for name, entry in app.conf.beat_schedule.items() if name != ENTRY}
    return {name: entry if isinstance(entry, Mapping) else vars(entry) for name, entry in found.items()}


def declaration_of(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the declaration of a schedule with the times and the call of a beat entry.

    Raises InvalidValueError for an entry whose times a schedule cannot have.
    """
    return {
        "task": entry.get("task"),
        "args": tuple(entry.get("args") or ()),
        "kwargs": dict(entry.get("kwargs") or {}),
        **_times_of(name, entry.get("schedule")),
        **(entry.get("options") or {}),
    }


def _times_of(name: str, schedule: Any) -> dict[str, Any]:
    if isinstance(schedule, crontab):
        return {"cron": _cron_of(name, schedule)}  # in the app's time zone, as in beat
    if type(schedule) is interval:
        return {"every": schedule.run_every}
    if isinstance(schedule, int | float | timedelta) and not isinstance(schedule, bool):
        return {"every": schedule}
    raise InvalidValueError(f"The times of {name!r} are neither an interval nor a crontab: {shown(schedule)}.")


def _cron_of(name: str, schedule: crontab) -> str:
    fields = [
        (schedule._orig_minute, schedule.minute),
        (schedule._orig_hour, schedule.hour),
        (schedule._orig_day_of_month, schedule.day_of_month),
        (schedule._orig_month_of_year, schedule.month_of_year),
        (schedule._orig_day_of_week, schedule.day_of_week),
    ]
    texts = [_field(str(given), numbers, full) for (given, numbers), full in zip(fields, FULL, strict=True)]
    if not texts[2].startswith("*") and not texts[4].startswith("*"):
        raise InvalidValueError(
            f"{name!r} means days of the month that are certain days of the week as well. In a cron expression one of "
            "the two is enough: make a schedule with one of them, and let the task check the other."
        )
    return " ".join(texts)


def _field(given: str, numbers: Iterable[int], full: frozenset[int]) -> str:
    """Return one field: a field that begins with a star stays, and any other becomes a list of numbers and ranges."""
    if set(numbers) == full:
        return "*"
    if given.startswith("*/") and given[2:].isdecimal():
        return given
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
