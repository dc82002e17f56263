"""Schedules on real workers, some of which are killed: each time is made once, whatever dies, and needs no beat."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from tests.acceptance.scene import QUICK, Scene
from tests.tools.waiting import wait_until

SECOND = timedelta(seconds=1)


def made(scene: Scene, name: str) -> list[tuple[int, datetime]]:
    """What a schedule has made of jobs: (number, time), in order."""
    rows = scene.sql("SELECT schedule_no, nominal_at FROM jobs WHERE schedule = %s ORDER BY id", name)
    return [(row.schedule_no, row.nominal_at) for row in rows]


@pytest.mark.parametrize("point", ["schedule:before-commit", "schedule:after-commit"])
def test_a_sweeper_that_is_killed_around_its_commit_loses_nothing_and_repeats_nothing(scene: Scene, point: str) -> None:
    """The second of its commits: a page was made before."""
    sweeper = scene.worker(
        queues="elsewhere", name="sweeps", **QUICK, SIDEJOB_CRASH_POINTS=f"{point}=kill@2"
    )  # it knows the task, which the client does not
    count = 130
    start = scene.sql("SELECT now() AS now")[0].now - (count - 0.5) * SECOND
    end = start + (count - 1) * SECOND
    scene.sidejob.schedule("tick", "acceptance.timed", (7,), every=1, start=start, end=end, catch_up="all")
    assert sweeper.wait(20) == -9
    assert len(made(scene, "tick")) == (100 if point == "schedule:before-commit" else count)

    scene.worker(concurrency=2, name="follows", **QUICK)
    wait_until(lambda: len(made(scene, "tick")) == count, timeout=30, message="all of its times")
    scene.settle(60)
    assert made(scene, "tick") == [(number, start + (number - 1) * SECOND) for number in range(1, count + 1)]
    assert len(scene.record.of("ended")) == count, "each ran once"


def test_what_is_declared_is_made_by_any_worker_and_outlives_its_death(scene: Scene) -> None:
    declared: dict[str, Any] = {
        "tick": {"task": "acceptance.timed", "args": [1], "every": 0.5, "catch_up": "all"},
        "mail": {"task": "acceptance.timed_task", "args": [2], "every": 0.5, "catch_up": "all"},
    }
    env = {**QUICK, "SCHEDULES": json.dumps(declared)}
    worker = scene.worker(name="first", **env)
    schedule = scene.sidejob.get_schedule("tick")
    wait_until(lambda: schedule.count >= 3, timeout=20, message="three times")
    worker.kill()
    before = schedule.count

    scene.worker(name="second", **env)
    wait_until(lambda: schedule.count >= before + 3, timeout=20, message="further times")
    schedule.pause()
    mail = scene.sidejob.get_schedule("mail").pause()
    scene.settle(30)
    numbers, times = zip(*made(scene, "tick"), strict=True)
    assert list(numbers) == [*range(1, schedule.count + 1)]
    assert {later - sooner for sooner, later in pairwise(times)} == {timedelta(seconds=0.5)}
    ended = [line for line in scene.record.of("ended") if line["number"] == 2]
    assert mail.count > 3
    assert mail.count <= len(ended) <= mail.count + 1, "the one that died may have ended unnoticed"
