"""A clock that a test moves: what is due in an hour is due now."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from ..model.checks import SECONDS, in_seconds, is_seconds, shown
from ..model.errors import InvalidValueError
from .databases import check_is_for_tests, move_back
from .subject import sidejob_of


def move_clock(by: timedelta | float, *, sidejob: Any = None) -> None:
    """Have this time pass (a timedelta, or seconds): for jobs, messages, timers, schedules, retention and the dead set.

    All times in the store move into the past, so nothing in a production process asks for a clock. Workers do not seem
    silent: `kill` and `freeze` are for that. Messages that a worker has in its memory, as those with an `eta` within
    `sidejob_timer_horizon`, wait as long as before. The `nominal_time` of what a schedule makes is as much earlier.
    A cron expression that is given, changed or resumed afterwards goes by the calendar of today.
    """
    seconds = in_seconds(by)
    if not is_seconds(seconds):
        raise InvalidValueError(f"move_clock() takes {SECONDS}, or a timedelta, not {shown(by)}.")
    settings = sidejob_of(sidejob).settings
    check_is_for_tests(settings.require_database_url())
    move_back(settings.require_database_url(), settings.schema, float(seconds))
