"""The times of schedules: across both changes of daylight saving, from any moment on, and what of them is due."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from zoneinfo import ZoneInfo, available_timezones

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_sidejob.model.schedule import Plan, Timing, Window, why_no_cron

BERLIN, NEW_YORK, LORD_HOWE, BEIRUT = "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Beirut"
"""Lord Howe changes by half an hour, Beirut at midnight."""
START = datetime(2026, 1, 1, tzinfo=UTC)


def local(times: Iterable[datetime], zone: str) -> list[str]:
    return [f"{time.astimezone(ZoneInfo(zone)):%d %H:%M %z}" for time in times]


def cron_times(cron: str, zone: str, day: datetime, days: int = 2) -> list[str]:
    """The times of some days, from the beginning of one on, as the clocks there show them."""
    begin = day.replace(tzinfo=ZoneInfo(zone)).astimezone(UTC)
    end = (day + timedelta(days=days)).replace(tzinfo=ZoneInfo(zone)).astimezone(UTC)
    times = Timing(cron=cron, timezone=zone).after(begin - timedelta(microseconds=1))
    return local(takewhile(lambda time: time < end, times), zone)


FORWARD, BACK = datetime(2027, 3, 27), datetime(2026, 10, 24)
"""The days before Berlin's clocks go from 2:00 to 3:00, and from 3:00 to 2:00."""


def test_a_time_that_is_skipped_comes_right_after_the_change() -> None:
    assert cron_times("30 2 * * *", BERLIN, FORWARD, 3) == ["27 02:30 +0100", "28 03:00 +0200", "29 02:30 +0200"]
    assert cron_times("0 2,3 * * *", BERLIN, FORWARD) == [
        "27 02:00 +0100", "27 03:00 +0100", "28 03:00 +0200",
    ], "what then falls on one moment is one time"  # fmt: skip


def test_a_time_that_is_repeated_comes_once() -> None:
    assert cron_times("30 2 * * *", BERLIN, BACK, 3) == ["24 02:30 +0200", "25 02:30 +0200", "26 02:30 +0100"]
    assert cron_times("15 1-3 * * *", BERLIN, BACK + timedelta(days=1), 1) == [
        "25 01:15 +0200", "25 02:15 +0200", "25 03:15 +0100",
    ]  # fmt: skip


def test_what_comes_every_hour_or_minute_goes_by_the_time_that_passes() -> None:
    forward = cron_times("0 * * * *", BERLIN, FORWARD + timedelta(days=1), 1)
    assert (len(forward), forward[1:3]) == (23, ["28 01:00 +0100", "28 03:00 +0200"])
    back = cron_times("0 * * * *", BERLIN, BACK + timedelta(days=1), 1)
    assert (len(back), back[2:4]) == (25, ["25 02:00 +0200", "25 02:00 +0100"])
    assert len(cron_times("*/30 * * * *", LORD_HOWE, datetime(2027, 4, 4), 1)) == 49


def test_an_interval_does_not_know_of_clocks() -> None:
    anchor = datetime(2026, 10, 24, 23, 0, tzinfo=UTC)
    times = Timing(every=timedelta(hours=1), anchor=anchor).after(anchor)
    assert local(islice(times, 3), BERLIN) == ["25 02:00 +0200", "25 02:00 +0100", "25 03:00 +0100"]


def test_another_offset_of_a_zone_moves_the_times() -> None:
    daily = Timing(cron="0 9 * * *", timezone=NEW_YORK)
    assert [time.hour for time in islice(daily.after(datetime(2026, 10, 31, tzinfo=UTC)), 3)] == [13, 14, 14]


EXPRESSIONS = (
    "0 * * * *", "30 2 * * *", "*/15 * * * *", "15 1-3 * * *", "0 2 * * 0", "* 2 * * *", "45 1,2 * * *", "*/20 2 * * *",
    "30 */2 * * *", "0 0 * * *",
)  # fmt: skip


def until(times: Iterable[datetime], end: datetime) -> list[datetime]:
    return list(takewhile(lambda time: time <= end, times))


@pytest.mark.parametrize("zone", [BERLIN, NEW_YORK, LORD_HOWE, BEIRUT])
def test_the_times_are_the_same_from_whatever_moment_one_looks(zone: str) -> None:
    """From a moment in an hour that is repeated, or skipped, too: else one is left out, or made twice."""
    chosen = random.Random(zone)
    for day in ((2026, 10, 24), (2027, 3, 26), (2026, 10, 31), (2027, 3, 13), (2027, 4, 3), (2018, 2, 17)):
        begin, end = datetime(*day, tzinfo=UTC), datetime(*day, tzinfo=UTC) + timedelta(days=3)
        for expression in EXPRESSIONS:
            timing = Timing(cron=expression, timezone=zone)
            times = until(timing.after(begin), end)
            assert times == sorted(set(times))
            for _ in range(4):
                moment = begin + timedelta(seconds=chosen.randrange(3 * 86400))
                rest = until(timing.after(moment), end)
                assert rest == [time for time in times if time > moment], (expression, moment)
                for count in (1, 3):
                    last = timing.last(count, after=begin, until=moment)
                    assert last == [time for time in times if time <= moment][-count:], (expression, moment)


# -- compared with a search minute by minute ---------------------------------------------------------------------------

MINUTES = ("*", "*/2", "*/7", "*/15", "*/30", "0", "30", "0-10/5", "15,45", "0,30")
HOURS = ("*", "*/2", "*/4", "*/6", "*/12", "0", "1", "2", "3", "23", "0-3", "1,3", "22-23", "0,12")
DAYS = ("* * *", "* * 0", "* * 1-5", "1-7 * *", "*/2 * *", "29,30 3,10 0", "* */2 6")
USUAL = tuple(f"{minute} {hour} {days}" for days in DAYS for hour in HOURS for minute in MINUTES)


def numbers(field: str, first: int, last: int) -> set[int]:
    found: set[int] = set()
    for term in field.split(","):
        values, _, step = term.partition("/")
        begin, _, end = (f"{first}-{last}" if values == "*" else values).partition("-")
        found.update(range(int(begin), int(end or begin) + 1, int(step or 1)))
    return found


def matcher(expression: str) -> Callable[[datetime], bool]:
    """Return what tells whether a time of the calendar matches an expression of the forms above."""
    minutes, hours, days, months, weekdays = expression.split()
    times = [hour * 60 + minute for hour in numbers(hours, 0, 23) for minute in numbers(minutes, 0, 59)]
    of_day, of_month, of_year, of_week = (
        set(times),
        numbers(days, 1, 31),
        numbers(months, 1, 12),
        numbers(weekdays, 0, 6),
    )
    either = not days.startswith("*") and not weekdays.startswith("*")

    def matches(time: datetime) -> bool:
        if time.hour * 60 + time.minute not in of_day or time.month not in of_year:
            return False
        found = time.day in of_month, time.isoweekday() % 7 in of_week
        return any(found) if either else all(found)

    return matches


def changes(zone: str) -> tuple[datetime, ...]:
    """Return the moments of 2026 and 2027 from which on a zone's clocks have another offset."""
    found, moment, known = [], START, ZoneInfo(zone)
    while moment.year < 2028:
        following = moment + timedelta(days=1)
        if known.utcoffset(moment.astimezone(known)) != known.utcoffset(following.astimezone(known)):
            before = known.utcoffset(moment.astimezone(known))
            while known.utcoffset(moment.astimezone(known)) == before:
                moment += timedelta(minutes=1)
            found.append(moment)
        moment = following
    return tuple(found)


def changing_zones() -> Iterator[tuple[str, tuple[datetime, ...]]]:
    """Yield one zone of each group whose clocks change alike, with the changes."""
    known = set()
    for zone in sorted(available_timezones()):
        moments = changes(zone)
        alike = tuple((moment, moment.astimezone(ZoneInfo(zone)).utcoffset()) for moment in moments)
        if moments and alike not in known:
            known.add(alike)
            yield zone, moments


def compare(zone: str, change: datetime, expressions: Iterable[str]) -> Iterator[str]:
    """Yield each difference, in the two days around a change, from a search minute by minute."""
    begin, end = change - timedelta(hours=24), change + timedelta(hours=24)
    clock = [
        (moment, moment.astimezone(ZoneInfo(zone)).replace(tzinfo=None))
        for moment in (begin + number * timedelta(minutes=1) for number in range(48 * 60 + 1))
    ]
    passing, latest = [], clock[0][1] - timedelta(minutes=1)
    for moment, shown in clock:
        new = [
            latest + number * timedelta(minutes=1) for number in range(1, (shown - latest) // timedelta(minutes=1) + 1)
        ]
        passing.append((moment, new))
        latest = max(latest, shown)
    for expression in expressions:
        matches = matcher(expression)
        if any(field.startswith("*") for field in expression.split()[:2]):
            expected = [moment for moment, shown in clock if matches(shown)]
        else:
            expected = [moment for moment, new in passing if any(map(matches, new))]
        times = Timing(cron=expression, timezone=zone)
        for start in (
            begin - timedelta(microseconds=1),
            change - timedelta(minutes=40),
            change,
            change + timedelta(minutes=20),
        ):
            found = until(times.after(start), end)
            if found != [moment for moment in expected if moment > start]:
                yield f"{expression} in {zone} from {start}"


def test_near_each_change_of_a_clock_the_times_are_those_of_a_search_minute_by_minute() -> None:
    chosen = random.Random(0)
    known = ("*/30 1 * * 0", "0 */2 * * *", "0 */4 * * 0")
    wrong = [
        difference
        for zone in (BERLIN, NEW_YORK, LORD_HOWE, BEIRUT, "Antarctica/Troll", "Africa/Casablanca")
        for change in chosen.sample(changes(zone), 2)
        for difference in compare(zone, change, (*known, *chosen.sample(USUAL, 4)))
    ]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_near_all_changes_of_two_years_the_times_are_those_of_a_search_minute_by_minute() -> None:
    chosen = random.Random(0)
    wrong = [
        difference
        for zone, moments in changing_zones()
        for change in moments
        for difference in compare(zone, change, chosen.sample(USUAL, 60))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("* * * *", "it has five fields: minute, hour, day of the month, month, day of the week"),
        ("0 * * * * *", "it has five fields: minute, hour, day of the month, month, day of the week"),
        ("61 * * * *", "bad minute"),
        ("0 0 30 2 *", "bad day-of-month"),
        ("@daily", "it has five fields: minute, hour, day of the month, month, day of the week"),
        ("30 4 * * mon", None),
        ("0 0 29 2 *", None),
        ("0 12 L * *", None),
    ],
)
def test_what_is_no_cron_expression_is_told(expression: str, problem: str | None) -> None:
    assert why_no_cron(expression) == problem


# -- plans -------------------------------------------------------------------------------------------------------------


def seconds(*numbers: float) -> list[datetime]:
    return [START + timedelta(seconds=number) for number in numbers]


def moment(number: float) -> datetime:
    return START + timedelta(seconds=number)


def every(number: float, *, after: float = 0, until: float | None = None) -> Window:
    timing = Timing(every=timedelta(seconds=number), anchor=START)
    return Window(timing, moment(after), None if until is None else moment(until))


def test_what_is_due_is_made_in_pages_and_the_rest_stays() -> None:
    plan = Plan("p", (every(10),))
    first = plan.due(moment(55), keep=None, most=3)
    assert first == seconds(10, 20, 30)
    plan = plan.past(first[-1])
    assert plan.due(moment(55), keep=None, most=3) == seconds(40, 50)
    assert plan.past(moment(50)).next == moment(60)


def test_of_what_was_missed_the_last_are_kept() -> None:
    plan = Plan("p", (every(10),))
    assert plan.due(moment(55), keep=1, most=100) == seconds(50)
    assert plan.due(moment(55), keep=3, most=2) == seconds(30, 40)
    assert plan.due(moment(55), keep=9, most=100) == seconds(10, 20, 30, 40, 50)
    assert plan.due(moment(9), keep=9, most=100) == []


def test_the_last_of_a_century_of_seconds_is_found_at_once() -> None:
    plan = Plan("p", (Window(Timing(every=timedelta(seconds=1), anchor=START), START),))
    now = START + timedelta(days=36500)
    assert plan.due(now, keep=2, most=100) == [now - timedelta(seconds=1), now]
    cron = Plan("p", (Window(Timing(cron="0 4 1 1 *", timezone=BERLIN), START),))
    assert cron.due(now, keep=1, most=100)[0].year == 2125


def test_a_change_leaves_what_is_due_to_the_old_timing() -> None:
    plan = Plan("p", (every(10),)).closed(moment(35)).then(every(7, after=35))
    assert plan.due(moment(50), keep=None, most=100) == seconds(10, 20, 30, 42, 49)
    assert plan.due(moment(50), keep=3, most=100) == seconds(30, 42, 49)
    assert len(plan.past(moment(30)).windows) == 1, "a window without a time to come is dropped"
    assert len(Plan("p", (every(10, after=30),)).closed(moment(35)).windows) == 0, "nothing was due"


def test_windows_come_back_from_json_as_they_were() -> None:
    windows = (every(0.1, after=3, until=9), Window(Timing(cron="0 4 * * *", timezone=BERLIN), START))
    assert tuple(Window.of_json(found) for found in Plan("p", windows).as_json()) == windows


def test_jitter_makes_times_later_and_keeps_their_order() -> None:
    plan = Plan("p", (every(10),), jitter_s=10.0)
    late = [(plan.made_at(time) - time).total_seconds() for time in seconds(*range(10, 2010, 10))]
    assert 0 <= min(late) < 1
    assert 9 < max(late) <= 10
    assert late != [Plan("q", (), 10.0).made_at(time) for time in seconds(*range(10, 2010, 10))], "each has its own"
    made: list[datetime] = []
    for now in range(0, 300):
        due = plan.due(moment(now), keep=None, most=100)
        assert all(plan.made_at(time) <= moment(now) for time in due)
        if due:
            plan = plan.past(due[-1])
        made += due
    assert made == seconds(*range(10, 10 * len(made) + 1, 10))
    assert len(made) >= 28


STEPS = st.lists(
    st.tuples(st.sampled_from(["pass", "make", "change", "pause", "resume"]), st.integers(1, 40)), max_size=40
)


@given(STEPS)
def test_whatever_is_changed_and_paused_each_time_is_made_once(steps: list[tuple[str, int]]) -> None:
    """Compared with what counts all times of each stretch in which a timing held."""
    now, number, paused = 0.0, 7, False
    plan = Plan("p", (every(number),))
    held, begin = [], 0.0
    made: list[datetime] = []
    for what, size in steps:
        now += 0.5  # two changes never fall on one moment
        if what == "pass":
            now += size
        elif what == "make":
            due = plan.due(moment(now), keep=None, most=size)
            plan = plan.past(due[-1]) if due else plan
            made += due
        elif what == "resume" and paused:
            plan, paused, begin = plan.then(every(number, after=now)), False, now
        elif what in ("change", "pause") and not paused:
            plan = plan.closed(moment(now))
            held.append((number, begin, now))
            number = size if what == "change" else number
            paused, begin = what == "pause", now
            plan = plan if paused else plan.then(every(number, after=now))
    if not paused:
        held.append((number, begin, now))
    made += plan.due(moment(now), keep=None, most=10_000)
    expected = [
        moment(time)
        for interval, after, until in held
        for time in range(0, int(until) + 1, interval) if after < time <= until
    ]  # fmt: skip
    assert made == expected
