"""The commands below `schedules`, what `doctor` says of schedules, and the import of beat's entries."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice
from typing import Any

import pytest
from celery.schedules import crontab, schedule

from celery_sidejob import RunningJob
from celery_sidejob.hooks.beat import declaration_of
from celery_sidejob.model.schedule import Timing
from tests.cli.test_doctor import findings, levels
from tests.tools.commands import Command, ask
from tests.tools.in_process import EMPTY, Stage


def test_a_schedule_is_listed_and_shown(stage: Stage, command: Command) -> None:
    nothing = "There is no schedule: declare one in sidejob_schedules, or make one."
    assert command("schedules", "list").lines == [nothing]
    stage.sidejob.schedule("tick", stage.idle, every=3600)
    stage.sidejob.schedule(
        "report", stage.idle, cron="0 6 * * mon-fri", timezone="Europe/Berlin", overlap="skip", catch_up=3, queue="slow"
    ).run_now()
    header, report, tick = command("schedules", "list").lines
    assert header == "Schedule Task Times Next Last Made"
    assert report.startswith("report stage.idle 0 6 * * mon-fri (Europe/Berlin) 20")
    assert report.endswith(" 1")
    assert tick.startswith("tick stage.idle every 3600 s 20")

    found = command("schedules", "show", "report", "--json").document
    assert (found["catch_up"], found["overlap"], found["options"], found["count"]) == (3, "skip", {"queue": "slow"}, 1)
    assert len(found["next_times"]) == 5
    text = command("schedules", "show", "report").out
    assert "Schedule report  stage.idle" in text
    assert f"job {found['last_job']}" in text
    assert re.search(r"next +(20\d\d-\d\d-\d\d \d\d:\d\d:\d\d(, )?){5}\n", text)
    assert command("schedules", "list", "--json").document[0]["name"] == "report"


def test_a_schedule_is_paused_resumed_run_and_deleted(stage: Stage, command: Command) -> None:
    stage.sidejob.schedule("tick", stage.idle, every=3600)
    assert command("schedules", "pause", "tick", "--reason", "a holiday").lines == ["Schedule tick is paused."]
    assert "paused 20" in command("schedules", "list").lines[1]
    assert ": a holiday" in command("schedules", "list").lines[1]
    assert command("schedules", "run", "tick").lines == ["Schedule tick has made job 1."]
    (resumed,) = command("schedules", "resume", "tick").lines
    assert resumed.startswith("Schedule tick goes on. Next: 20")
    assert command("schedules", "resume", "tick").lines[0].startswith("Schedule tick was not paused.")
    assert "Delete schedule tick (stage.idle) for good?" in command("schedules", "delete", "tick", code=1).err
    assert command("schedules", "delete", "tick", "--yes").lines == ["Schedule tick is deleted."]
    for verb in ("show", "pause", "resume", "run", "delete"):
        refused = command("schedules", verb, "tick", code=1)
        assert (refused.code, refused.err) == (
            1, "Error: There is no schedule 'tick': it was never made, or was deleted.\n",
        )  # fmt: skip


def test_doctor_finds_what_cannot_be_made_and_what_nobody_makes(stage: Stage) -> None:
    stage.sidejob.schedule("tick", stage.idle, every=3600, start=datetime.now(UTC) - timedelta(minutes=5))
    (finding,) = findings(stage)["schedules"]
    assert finding.level == "warning"
    assert finding.found.startswith("what is due is not made yet: tick (since 20")
    stage.sql("UPDATE schedules SET trouble = 'UnknownTaskError: who is that'")
    (finding,) = findings(stage)["schedules"]
    assert finding.level == "error"
    assert finding.found.startswith("what is due cannot be made: tick (due since 20")
    assert finding.found.endswith(": UnknownTaskError: who is that)")
    stage.sql("INSERT INTO schedules SELECT (s).* FROM (SELECT jsonb_populate_record(s, jsonb_build_object("
              "'name', 'more' || n)) AS s FROM schedules s, generate_series(1, 8) n) m")  # fmt: skip
    (finding,) = findings(stage)["schedules"]
    assert finding.found.endswith(": UnknownTaskError: who is that) and 4 more")
    stage.sql("DELETE FROM schedules WHERE name <> 'tick'")
    stage.sidejob.poll()
    assert levels(stage, "schedules") == ["ok"]


def test_doctor_tells_of_schedules_that_are_paused_or_skip_for_ever(stage: Stage) -> None:
    def suspend(job: RunningJob) -> None:
        job.suspend()

    suspends = stage.task(suspend, name="stage.suspends")
    stage.sidejob.schedule("tick", suspends, every=60, overlap="skip", start=datetime.now(UTC) - timedelta(hours=3))
    stage.sidejob.schedule("paused", stage.idle, every=60)
    stage.sidejob.get_schedule("paused").pause("a holiday")
    stage.sidejob.poll()
    stage.drain()
    (job,) = stage.sidejob.jobs()
    assert job.status == "suspended"
    assert levels(stage, "schedules") == ["ok"], "neither is old"
    stage.sql("UPDATE schedules SET last_at = now() - interval '2 h' WHERE name = 'tick'")
    stage.sql("UPDATE schedules SET paused_at = now() - interval '2 h' WHERE name = 'paused'")

    paused, skipping = findings(stage)["schedules"]

    assert (paused.level, paused.found) == ("warning", "paused: paused (for 2.0 h, a holiday)")
    assert skipping.level == "warning"
    assert skipping.found.startswith("tick is skipping since 20")
    assert skipping.found.endswith(f": job {job.id} is suspended")
    stage.sidejob.get_schedule("paused").resume()
    job.run()
    job.terminate()
    stage.drain()
    assert levels(stage, "schedules") == ["ok"]


# -- the import of beat's entries --------------------------------------------------------------------------------------


@pytest.fixture
def shop(stage_database_url: str) -> Iterator[Stage]:
    """A stage whose beat has entries of every kind."""
    made = Stage(stage_database_url, timezone="Europe/Berlin")

    @made.app.task(name="mail", durable=True, shared=False)
    def mail(to: str) -> None:
        pass

    @made.app.task(name="plain", shared=False)
    def plain() -> None:
        pass

    made.app.conf.beat_schedule = {
        "nightly": {"task": "stage.idle", "schedule": crontab(minute=30, hour="2,4", day_of_week="mon-fri")},
        "mails": {
            "task": "mail", "schedule": 30.0, "args": ("you",), "options": {"queue": "mails", "expires": 20},
        },
        "hourly": {"task": "stage.idle", "schedule": schedule(timedelta(hours=1))},
        "plain": {"task": "plain", "schedule": 10},
        "both": {"task": "stage.idle", "schedule": crontab(0, 0, day_of_month="13", day_of_week="fri")},
        "dusk": {"task": "stage.idle", "schedule": "at dusk"},
    }  # fmt: skip
    made.app.finalize()
    yield made
    made.sql(EMPTY)
    made.close()


def test_the_entries_that_can_be_are_imported(shop: Stage) -> None:
    command = partial(ask, shop.app)
    said = command("schedules", "import")
    assert said.code == 0
    assert "Remove these from beat_schedule, or beat calls them too: nightly, mails, hourly." in said.err
    problems = {each["name"]: each["problem"] for each in command("schedules", "import", "--json").document}
    assert [name for name, problem in problems.items() if problem is None] == ["nightly", "mails", "hourly"]
    assert problems["plain"].startswith("'plain' is an ordinary task")
    assert problems["both"].startswith("'both' means days of the month that are certain days of the week as well.")
    assert problems["dusk"] == "The times of 'dusk' are neither an interval nor a crontab: 'at dusk'."

    hourly, mails, nightly = shop.sidejob.schedules()
    assert (nightly.cron, nightly.timezone, nightly.task) == ("30 2,4 * * 1-5", "Europe/Berlin", "stage.idle")
    assert (mails.every, mails.args, mails.options) == (
        timedelta(seconds=30),
        ["you"],
        {"queue": "mails", "expires": 20},
    )
    assert hourly.every == timedelta(hours=1)
    assert {each.count for each in (hourly, mails, nightly)} == {0}


def test_entries_are_imported_by_name(shop: Stage) -> None:
    command = partial(ask, shop.app)
    assert command("schedules", "import", "hourly").code == 0
    assert [each.name for each in shop.sidejob.schedules()] == ["hourly"]
    refused = command("schedules", "import", "plain")
    assert (refused.code, "'plain' is an ordinary task" in refused.err) == (1, True)
    assert command("schedules", "import", "weekly").err.startswith("Error: Nothing matches. There are: 'both', 'dusk'")


CRONTABS: dict[str, dict[str, Any]] = {
    "* * * * *": {},
    "*/15 8-17 * * 1-5": {"minute": "*/15", "hour": "8-17", "day_of_week": "mon-fri"},
    "0 0-3,22-23 * * *": {"minute": 0, "hour": "22-3"},
    "0,30 6 1-7 */3 *": {"minute": [0, 30], "hour": 6, "day_of_month": "1-7", "month_of_year": "*/3"},
    "0 0 */2 * 1": {"minute": 0, "hour": 0, "day_of_month": "*/2", "day_of_week": 1},
    "5 4 * * 0,6": {"minute": 5, "hour": 4, "day_of_week": "sat,sun"},
}


@pytest.mark.parametrize("cron", CRONTABS)
def test_a_crontab_has_the_same_times_as_a_schedule(cron: str) -> None:
    """Compared with every minute of some weeks in which all of Celery's fields match."""
    celerys = crontab(**CRONTABS[cron])
    assert declaration_of("e", {"task": "t", "schedule": celerys})["cron"] == cron
    begin, minutes = datetime(2026, 10, 31, 23, 59, tzinfo=UTC), 40 * 1440
    expected = [
        time for time in (begin + timedelta(minutes=number) for number in range(1, minutes))
        if time.minute in celerys.minute and time.hour in celerys.hour and time.day in celerys.day_of_month
        and time.month in celerys.month_of_year and time.isoweekday() % 7 in celerys.day_of_week
    ]  # fmt: skip
    times = Timing(cron=cron, timezone="UTC").after(begin)
    assert list(islice(times, len(expected))) == expected
