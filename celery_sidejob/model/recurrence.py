"""The nominal times of a schedule: which come next, which are due, and which due times still count after an outage.

All times are in UTC. The clock that decides what is due is the store's; nothing here asks the host for the time.

Daylight saving, as in Debian's cron: an expression whose minute or hour begins with a star comes at each minute whose
time of day, on the clocks of the zone, matches it. Every other expression comes at the minutes in which a matching time
of day passes for the first time: times that a change skips pass right after the change. `cronsim` only walks the
calendar, because across a change at midnight, or of half an hour, it leaves times out and doubles others.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import chain, islice, takewhile
from typing import Any
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

TICK = timedelta(microseconds=1)
FIELDS = 5
"""The fields of a cron expression; cronsim also accepts a field of seconds, but then without cron's daylight-saving
rules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How a schedule's times follow each other: at an interval counted from `anchor`, or by a cron expression.

    `ahead`: how much earlier than the calendar the expression's times come, because a test has moved the clock.
    """

    every: timedelta | None = None
    anchor: datetime | None = None
    cron: str | None = None
    timezone: str | None = None
    ahead: timedelta = timedelta()

    def after(self, moment: datetime) -> Iterator[datetime]:
        """Yield the times later than a moment, in order; ends where the calendar, or the expression, ends."""
        try:
            yield from self._by_interval(moment) if self.cron is None else self._by_cron(moment)
        except OverflowError:
            return

    def last(self, count: int, *, after: datetime, until: datetime) -> list[datetime]:
        """Return the last `count` times later than `after` and not later than `until`, in order."""
        if self.every is not None and self.anchor is not None:
            begin = max(after, self.anchor + ((until - self.anchor) // self.every - count) * self.every)
            return list(takewhile(lambda time: time <= until, self.after(begin)))
        span = timedelta(minutes=2 * count)
        while True:
            begin = max(after, until - span)
            found = deque(takewhile(lambda time: time <= until, self.after(begin)), maxlen=count)
            if len(found) == count or begin == after:
                return list(found)
            span *= 4

    def moved_back(self, by: timedelta) -> Timing:
        """Return the timing with all times earlier by `by`."""
        if self.cron is not None:
            return replace(self, ahead=self.ahead + by)
        return replace(self, anchor=None if self.anchor is None else self.anchor - by)

    def _by_interval(self, moment: datetime) -> Iterator[datetime]:
        assert self.every is not None
        assert self.anchor is not None
        number = max(0, (moment - self.anchor) // self.every + 1)
        while True:
            yield self.anchor + number * self.every
            number += 1

    def _by_cron(self, moment: datetime) -> Iterator[datetime]:
        assert self.cron is not None
        zone, moment = ZoneInfo(self.timezone or "UTC"), moment + self.ahead
        shown = moment.astimezone(zone).replace(tzinfo=None)
        repeated = max(timedelta(), _at(shown, zone, fold=1) - _at(shown, zone))
        calendar = CronSim(self.cron, shown - repeated)
        for time in _by_clock(calendar, zone) if _by_elapsed_time(self.cron) else _by_calendar(calendar, zone):
            if time > moment:
                yield time - self.ahead


def _by_elapsed_time(cron: str) -> bool:
    minute, hour = cron.split()[:2]
    return minute.startswith("*") or hour.startswith("*")


def _by_clock(calendar: Iterable[datetime], zone: ZoneInfo) -> Iterator[datetime]:
    """Yield each moment at which the zone's clocks show one of the times: none, or two, near a change."""
    again: deque[datetime] = deque()
    for time in calendar:
        first, second = _at(time, zone), _at(time, zone, fold=1)
        while again and again[0] < first:
            yield again.popleft()
        if second >= first:  # else the change skips it
            yield first
        if second > first:
            again.append(second)


def _by_calendar(calendar: Iterable[datetime], zone: ZoneInfo) -> Iterator[datetime]:
    """Yield the first moment at which the zone's clocks show each time, or have just skipped it."""
    last = None
    for time in calendar:
        while _at(time, zone, fold=1) < _at(time, zone):  # a change skips it
            time += timedelta(minutes=1)
        found = _at(time, zone)
        if found != last:
            yield found
        last = found


def _at(time: datetime, zone: ZoneInfo, *, fold: int = 0) -> datetime:
    """Return the moment at which clocks show a time: the first or second of two; if they never do, out of order."""
    return time.replace(tzinfo=zone, fold=fold).astimezone(UTC)


def why_no_cron(expression: str) -> str | None:
    """Say why a text is no cron expression with a possible time; None if it is one."""
    if len(expression.split()) != FIELDS:
        return "it has five fields: minute, hour, day of the month, month, day of the week"
    try:
        first = next(CronSim(expression, datetime(2000, 1, 1, tzinfo=UTC)), None)
    except CronSimError as error:
        text = str(error)
        return text[:1].lower() + text[1:]
    return "there is no such date" if first is None else None


@dataclass(frozen=True, slots=True)
class Window:
    """The period in which a timing applies: later than `after`, and not later than `until`."""

    timing: Timing
    after: datetime
    until: datetime | None = None

    def times(self, after: datetime) -> Iterator[datetime]:
        """Yield the window's times that are also later than `after`."""
        times, until = self.timing.after(max(after, self.after)), self.until
        return times if until is None else takewhile(lambda time: time <= until, times)

    def moved_back(self, by: timedelta) -> Window:
        """Return the window earlier by `by`, with its times."""
        until = None if self.until is None else self.until - by
        return Window(self.timing.moved_back(by), self.after - by, until)

    def as_json(self) -> dict[str, Any]:
        """Return JSON values."""
        timing = self.timing
        every = None if timing.every is None else timing.every // TICK
        return {
            "every": every,
            "anchor": _text(timing.anchor),
            "cron": timing.cron,
            "timezone": timing.timezone,
            "after": _text(self.after),
            "until": _text(self.until),
            **({"ahead": timing.ahead // TICK} if timing.ahead else {}),
        }

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> Window:
        """Return the window from such JSON values."""
        timing = Timing(
            every=None if found["every"] is None else found["every"] * TICK,
            anchor=_time(found["anchor"]),
            cron=found["cron"],
            timezone=found["timezone"],
            ahead=found.get("ahead", 0) * TICK,
        )
        after = _time(found["after"])
        assert after is not None
        return cls(timing, after, _time(found["until"]))


@dataclass(frozen=True, slots=True)
class Plan:
    """The times of a schedule that are still to come: its windows, in order.

    Usually there is one window. A change of the timing, and a pause, close the window; it stays for as long as any of
    its times is due. `jitter_s`: the largest delay of a time; the delay depends on the schedule and the time.
    """

    name: str
    windows: tuple[Window, ...] = ()
    jitter_s: float = 0.0

    def upcoming(self, after: datetime | None = None) -> Iterator[datetime]:
        """Yield all times to come, in order; with `after` only the later ones."""
        return chain.from_iterable(window.times(window.after if after is None else after) for window in self.windows)

    @property
    def next(self) -> datetime | None:
        """The first time to come."""
        return next(self.upcoming(), None)

    def made_at(self, nominal: datetime) -> datetime:
        """Return the moment at which the work of a time is made."""
        if not self.jitter_s:
            return nominal
        digest = hashlib.sha256(f"{self.name} {nominal.isoformat()}".encode()).digest()
        return nominal + timedelta(seconds=self.jitter_s) * (int.from_bytes(digest[:6], "big") / 2**48)

    def until(self, now: datetime) -> datetime:
        """Return a moment up to which all times are due and after which none is: jitter never changes their order."""
        if self.jitter_s:
            for time in takewhile(lambda time: time <= now, self.upcoming(now - timedelta(seconds=self.jitter_s))):
                if self.made_at(time) > now:
                    return time - TICK
        return now

    def due(self, now: datetime, *, keep: int | None, most: int) -> list[datetime]:
        """Return the first `most` due times; with `keep`, of the last `keep` due times only."""
        until = self.until(now)
        if keep is None:
            return list(islice(takewhile(lambda time: time <= until, self.upcoming()), most))
        kept: list[datetime] = []
        for window in reversed(self.windows):
            end = until if window.until is None else min(until, window.until)
            if len(kept) < keep and end > window.after:
                kept = window.timing.last(keep - len(kept), after=window.after, until=end) + kept
        return kept[:most]

    def past(self, moment: datetime) -> Plan:
        """Return the plan without the times up to a moment, which were made or passed over."""
        left = [
            replace(window, after=max(window.after, moment))
            for window in self.windows
            if window.until is None or window.until > moment
        ]
        while left and left[0].until is not None and next(left[0].times(left[0].after), None) is None:
            del left[0]
        return replace(self, windows=tuple(left))

    def closed(self, now: datetime) -> Plan:
        """Return the plan without the times after now: only the due times remain."""
        cut = [
            replace(window, until=now if window.until is None else min(window.until, now))
            for window in self.windows
            if window.after < now
        ]
        return replace(self, windows=tuple(window for window in cut if next(window.times(window.after), None)))

    def then(self, window: Window) -> Plan:
        """Return the plan with a further window."""
        return replace(self, windows=(*self.windows, window))

    def moved_back(self, by: timedelta) -> Plan:
        """Return the plan with all times earlier by `by`."""
        return replace(self, windows=tuple(window.moved_back(by) for window in self.windows))

    def as_json(self) -> Sequence[dict[str, Any]]:
        """Return the windows as JSON values."""
        return [window.as_json() for window in self.windows]


def _text(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat()


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
