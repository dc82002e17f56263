"""A schedule: its declaration, its times, and the rules for times that were missed or that overlap.

All times are in UTC. The clock that decides what is due is the store's; nothing here asks the host for the time.

Daylight saving, as in Debian's cron: an expression whose minute or hour begins with a star comes at each minute whose
time of day, on the clocks of the zone, matches it. Every other expression comes at the minutes in which a matching time
of day passes for the first time: times that a change skips pass right after the change. `cronsim` only walks the
calendar, because across a change at midnight, or of half an hour, it leaves times out and doubles others.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import chain, islice, takewhile
from typing import Any
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from . import values
from .checks import MOST_S, SLIP, check_label, did_you_mean, in_seconds, is_number, is_seconds, is_text, nearest, shown
from .errors import InvalidValueError
from .port import parse_ports, ports_as_json

TICK = timedelta(microseconds=1)
FIELDS = 5
"""The fields of a cron expression; cronsim also accepts a field of seconds, but then without cron's daylight-saving
rules."""

OVERLAPS = ("allow", "skip", "wait")
CATCH_UPS = {"all": None, "last": 1}
MOST_CAUGHT_UP = 10_000
SHORTEST_S = 0.1
"""The shortest interval in seconds."""
LONGEST_JITTER_S = 86400.0

TIMING = ("every", "cron", "timezone", "start", "end")
RULES = ("catch_up", "overlap", "jitter")
KEYS = ("task", "args", "kwargs", *TIMING, *RULES)
"""The keys of a declaration, beside the options of `enqueue`."""

REFUSED = {
    "eta": "the schedule says when",
    "countdown": "the schedule says when",
    "transaction": "the jobs are made later, by the sweeper",
    "task_id": "each job has one of its own",
    "aliases": "an alias belongs to one job",
    "parent": "children of one job have different names",
    "child_name": "children of one job have different names",
    "unique": "each time has a job of its own; overlap= says what an open one means",
    "on_duplicate": "each time has a job of its own; overlap= says what an open one means",
    "on_full": "what a schedule makes waits for a slot",
}
"""Options of calls that cannot be those of a schedule, each with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A schedule's declaration; times without an offset were given one. Arguments are JSON text."""

    task: str
    args: str = "[]"
    kwargs: str = "{}"
    options: str = "{}"
    every_s: float | None = None
    cron: str | None = None
    timezone: str | None = None
    start_at: datetime | None = None
    end_at: datetime | None = None
    catch_up: int | None = 1
    overlap: str = "allow"
    jitter_s: float = 0.0

    @property
    def timing(self) -> tuple[Any, ...]:
        """The values that determine the times."""
        return self.every_s, self.cron, self.timezone, self.start_at, self.end_at

    @property
    def origin(self) -> tuple[Any, ...]:
        """The values that determine from which moment intervals are counted."""
        return self.every_s, self.start_at

    def window(self, *, anchor: datetime, after: datetime) -> Window:
        """Return the window of these times, from a moment on, or from the start if that is later."""
        every = None if self.every_s is None else timedelta(seconds=self.every_s)
        timing = Timing(every=every, anchor=None if every is None else anchor, cron=self.cron, timezone=self.timezone)
        return Window(timing, after if self.start_at is None else max(after, self.start_at - TICK), self.end_at)

    def first_plan(self, name: str, *, anchor: datetime) -> Plan:
        """Return the plan of a new schedule: a start in the past makes times due at once."""
        after = anchor if self.start_at is None else self.start_at - TICK
        return Plan(name, (self.window(anchor=anchor, after=after),), self.jitter_s)

    def as_json(self) -> dict[str, Any]:
        """Return JSON values, to be compared with those of another declaration."""
        given = asdict(self)
        for name in ("start", "end"):
            time = given.pop(f"{name}_at")
            given[name] = None if time is None else time.isoformat()
        return given


def parse(name: Any, given: Mapping[str, Any], *, timezone: str | None, limit: int | None = None) -> Spec:
    """Check a declaration; whether the task accepts the arguments and options is not checked.

    `timezone` is the name of the app's time zone, if it has one; `limit` bounds the arguments. Raises
    InvalidValueError, which names the schedule.
    """
    where = f"schedule {shown(name)}"
    if not isinstance(name, str) or not name:
        raise InvalidValueError(f"A schedule's name is a text, not {shown(name)}.")
    check_label("name", name)
    given = {key: value for key, value in _opened(given).items() if value is not None}
    options = {key: value for key, value in given.items() if key not in KEYS}
    task = _task(where, given.get("task"))
    _check_spelling(where, options)
    args, kwargs = given.get("args") or (), given.get("kwargs") or {}
    if not isinstance(args, list | tuple):
        raise InvalidValueError(f"args of {where} is a list or tuple of arguments, not {shown(args)}.")
    if not isinstance(kwargs, Mapping):
        raise InvalidValueError(f"kwargs of {where} is a mapping, not {shown(kwargs)}.")
    own_zone = given.get("timezone")
    is_local = given.get("cron") is not None or any(_is_naive(given.get(key)) for key in ("start", "end"))
    zone = _zone(where, own_zone if own_zone is not None else timezone if is_local else "UTC")
    every_s, cron = _every(where, given.get("every")), _cron(where, given.get("cron"))
    if (every_s is None) == (cron is None):
        wrong = "has no times: give" if cron is None else "has both every= and cron=: leave out"
        raise InvalidValueError(f"{where} {wrong} every= or cron=.")
    start, end = (_time(where, key, given.get(key), zone) for key in ("start", "end"))
    if start is not None and end is not None and end < start:
        raise InvalidValueError(f"end of {where} is before its start: {end} is earlier than {start}.")
    return Spec(
        task=task,
        args=values.encode(list(args), limit=limit, what=f"args of {where}"),
        kwargs=values.encode(dict(kwargs), limit=limit, what=f"kwargs of {where}"),
        options=_options(where, options),
        every_s=every_s,
        cron=cron,
        timezone=None if cron is None else zone.key,
        start_at=start,
        end_at=end,
        catch_up=_catch_up(where, given.get("catch_up", "last")),
        overlap=_overlap(where, given.get("overlap", "allow")),
        jitter_s=_jitter(where, given.get("jitter", 0.0), every_s),
    )


def is_declaration(declared: Any) -> bool:
    """Tell whether a value has the form of `sidejob_schedules`; a worker that starts checks each with `parse`."""
    return isinstance(declared, Mapping) and all(
        isinstance(name, str) and name and isinstance(given, Mapping) for name, given in declared.items()
    )


# -- a checked declaration ---------------------------------------------------------------------------------------------


def _opened(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Put the parts of a signature where they belong in a declaration, as a call of the signature would."""
    task, args, kwargs = given.get("task"), given.get("args") or (), given.get("kwargs") or {}
    if not isinstance(task, Mapping) or task.get("subtask_type") is not None or not isinstance(args, list | tuple):
        return given
    if not isinstance(kwargs, Mapping):
        return given
    return {
        **(task.get("options") or {}),
        **given,
        "task": task.get("task"),
        "args": (*args, *(task.get("args") or ())),
        "kwargs": {**(task.get("kwargs") or {}), **kwargs},
    }


def _check_spelling(where: str, options: Mapping[Any, Any]) -> None:
    """Refuse a misspelt key of ours; other unknown keys are refused as calls refuse them."""
    for key in options:
        if not isinstance(key, str):
            raise InvalidValueError(f"{shown(key)} is no option of {where}: it is not a text.")
        if (near := nearest(key, KEYS, like=SLIP)) is not None:
            raise InvalidValueError(f"{key} is no option of {where}: did you mean {near}?")


def _task(where: str, given: Any) -> str:
    name = given if isinstance(given, Mapping) else getattr(given, "name", given)
    if not is_text(name) or not name:
        raise InvalidValueError(f"task of {where} is a task, its name, or a signature of one task, not {shown(given)}.")
    return name


def _zone(where: str, zone: Any) -> ZoneInfo:
    name = getattr(zone, "key", zone)
    if name is None:
        raise InvalidValueError(
            f"{where} needs timezone=, such as 'Europe/Berlin': the app goes by the time zone of its host, and another "
            "host may have another one."
        )
    try:
        return ZoneInfo(name)
    except Exception:
        raise InvalidValueError(
            f"timezone of {where} is the name of a time zone, such as 'Europe/Berlin', not {shown(zone)}."
        ) from None


def _is_naive(time: Any) -> bool:
    return isinstance(time, datetime) and time.tzinfo is None


def _every(where: str, every: Any) -> float | None:
    if every is None:
        return None
    every_s = in_seconds(every)
    if not is_seconds(every_s, least=SHORTEST_S):
        raise InvalidValueError(
            f"every of {where} is a number of seconds, at least {SHORTEST_S:g} and {MOST_S}, or a timedelta, not "
            f"{shown(every)}."
        )
    return timedelta(seconds=every_s) / timedelta(seconds=1)


def _cron(where: str, cron: Any) -> str | None:
    if cron is None:
        return None
    if not isinstance(cron, str):
        raise InvalidValueError(f"cron of {where} is an expression, such as '30 4 * * mon', not {shown(cron)}.")
    problem = why_no_cron(cron)
    if problem is not None:
        raise InvalidValueError(f"cron of {where} is no cron expression: {shown(cron)} ({problem}).")
    return " ".join(cron.split())


def _time(where: str, key: str, time: Any, zone: ZoneInfo) -> datetime | None:
    if time is None:
        return None
    if not isinstance(time, datetime):
        raise InvalidValueError(f"{key} of {where} is a datetime, not {shown(time)}.")
    try:
        in_utc = (time if time.tzinfo is not None else time.replace(tzinfo=zone)).astimezone(UTC)
        return in_utc + TICK - TICK
    except (OverflowError, ValueError):
        raise InvalidValueError(f"{key} of {where} is no time that every time zone has: {time}.") from None


def _catch_up(where: str, catch_up: Any) -> int | None:
    if isinstance(catch_up, str) and catch_up in CATCH_UPS:
        return CATCH_UPS[catch_up]
    if is_number(catch_up, least=1, most=MOST_CAUGHT_UP):
        return catch_up
    raise InvalidValueError(
        f"catch_up of {where} is 'last', 'all', or a number of missed times from 1 to {MOST_CAUGHT_UP}, not "
        f"{shown(catch_up)}."
    )


def _overlap(where: str, overlap: Any) -> str:
    if overlap not in OVERLAPS:
        near = did_you_mean(overlap, OVERLAPS) if isinstance(overlap, str) else ""
        raise InvalidValueError(f"overlap of {where} is 'allow', 'skip' or 'wait', not {shown(overlap)}.{near}")
    return str(overlap)


def _jitter(where: str, jitter: Any, every_s: float | None) -> float:
    jitter_s = in_seconds(jitter)
    most = LONGEST_JITTER_S if every_s is None else min(every_s, LONGEST_JITTER_S)
    if not is_seconds(jitter_s) or jitter_s > most:
        raise InvalidValueError(
            f"jitter of {where} is a number of seconds, at most {most:g} (a day, or the interval), or a timedelta, not "
            f"{shown(jitter)}."
        )
    return float(jitter_s)


def _options(where: str, options: dict[str, Any]) -> str:
    for key, reason in REFUSED.items():
        if key in options:
            raise InvalidValueError(f"{key} is no option of {where}: {reason}.")
    for key in ("inports", "outports"):
        if key in options:
            options[key] = ports_as_json(parse_ports(options[key], where=f"{key} of {where}"))
    if isinstance(options.get("expires"), datetime):
        raise InvalidValueError(f"expires of {where} is a number of seconds, counted from when each job is made.")
    return values.encode(options, what=f"options of {where}")


# -- its times: which come next, which are due, and which due times still count after an outage ------------------------


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
            anchor=_moment(found["anchor"]),
            cron=found["cron"],
            timezone=found["timezone"],
            ahead=found.get("ahead", 0) * TICK,
        )
        after = _moment(found["after"])
        assert after is not None
        return cls(timing, after, _moment(found["until"]))


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


def _moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
