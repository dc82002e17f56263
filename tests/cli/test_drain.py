"""`drain` waits for what can be finished, tells of what cannot, and ends with a code that a script can use."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest

from celery_sidejob import RunningJob
from celery_sidejob.operations import waiting
from celery_sidejob.store import registry
from celery_sidejob.store.outbox.kinds import JOBS
from tests.tools.commands import ask
from tests.tools.in_process import Stage
from tests.tools.waiting import wait_until


def suspend(job: RunningJob) -> None:
    job.suspend()


def retry(job: RunningJob) -> None:
    raise job.retry(countdown=30)


def retry_later(job: RunningJob) -> None:
    raise job.retry(countdown=3600)


def test_an_empty_store_is_drained(stage: Stage) -> None:
    said = ask(stage.app, "drain")
    assert (said.code, said.lines) == (0, ["No run is due or in progress. Left: nothing."])


def test_what_rests_is_told_of_and_left(stage: Stage) -> None:
    suspended = stage.inside(suspend)
    waiting = stage.job(countdown=3600)

    said = ask(stage.app, "drain", "--timeout", 0)
    assert said.code == 0
    assert said.lines == ["No run is due or in progress. Left: 1 suspended job, 1 timer."]
    assert ask(stage.app, "drain", "--json").document == {
        "done": True, "queues": {}, "unserved": [], "parked": 0, "later": 0, "later_from": None, "suspended": 1,
        "timers": 1, "results": 0,
    }  # fmt: skip
    assert (suspended.refresh().status, waiting.refresh().status) == ("suspended", "queued")


def test_the_time_is_up(stage: Stage) -> None:
    stage.job(queue="a")
    running = stage.job(queue="a")
    assert stage.claim(running) is not None
    stage.inside(retry, queue="b")

    said = ask(stage.app, "drain", "--timeout", 0.2)
    assert (said.code, said.lines) == (
        1, ["The time is up. Not finished: a (1 queued, 1 running), b (1 queued, 0 running)."],
    )  # fmt: skip
    noted = wait_until(lambda: ask(stage.app, "drain", "--timeout", 0.2).err, message="a look before the time is up")
    assert noted == "Not finished: a (1 queued, 1 running), b (1 queued, 0 running).\n"
    assert ask(stage.app, "drain", "--timeout", 0, "--json").document["queues"] == {
        "a": {"queued": 1, "running": 1}, "b": {"queued": 1, "running": 0},
    }  # fmt: skip


def test_one_thing_that_is_left_is_not_many(stage: Stage) -> None:
    stage.inside(suspend)
    stage.inside(retry_later)
    parked = stage.job()
    waiting.decline(stage.runtime, JOBS, (parked.id, 1), task="stage.idle")
    stage.job(countdown=7200)

    said = ask(stage.app, "drain", "--timeout", 0).lines[0]
    for one in (" 1 run for later (", " 1 parked run (", " 1 suspended job,", " 1 timer"):
        assert one in said, said


def test_nobody_waits_for_what_is_due_much_later(stage: Stage) -> None:
    stage.app.conf.sidejob_durable_tasks = ["mails.*"]
    stage.inside(retry_later, queue="a")
    stage.app.send_task("mails.send", countdown=7200, queue="b")

    said = ask(stage.app, "drain", "--timeout", 0)

    assert said.code == 0
    assert re.fullmatch(
        r"No run is due or in progress\. Left: 2 runs for later \(the first at 20\S+ \S+\)\.", said.lines[0]
    )
    found = ask(stage.app, "drain", "--timeout", 0, "--json").document
    assert (found["done"], found["queues"], found["later"]) == (True, {}, 2)
    first = datetime.fromisoformat(found["later_from"]) - datetime.now(UTC)
    assert timedelta(minutes=50) < first <= timedelta(hours=1)
    assert ask(stage.app, "drain", "--timeout", 0, "--json", "--horizon", 3700).document["queues"] == {
        "a": {"queued": 1, "running": 0}
    }
    assert ask(stage.app, "drain", "--timeout", 0, "--horizon", 1e9).code == 1


def test_a_queue_is_drained_by_itself(stage: Stage) -> None:
    stage.job(queue="a")
    stage.inside(suspend, queue="b")

    assert ask(stage.app, "drain", "--queue", "b", "--json", "--timeout", 0).document == {
        "done": True, "queues": {}, "unserved": [], "parked": 0, "later": 0, "later_from": None, "suspended": 1,
        "timers": 0, "results": 0,
    }  # fmt: skip
    assert ask(stage.app, "drain", "--queue", "a", "--timeout", 0).code == 1


def test_a_queue_that_nobody_knows_is_refused(stage: Stage) -> None:
    stage.app.conf.task_routes = {"stage.idle": {"queue": "routed"}}
    for name, hint in (("celeri", " Did you mean 'celery'?"), ("", "")):
        said = ask(stage.app, "drain", "--queue", name, "--timeout", 0)
        assert said.code == 2
        assert f"Nobody knows a queue {name!r}" in said.err
        assert said.err.endswith(f"{hint}\n")

    stage.sidejob.task(name="stage.own", queue="own")(suspend)
    registry.note_served(stage.runtime.connections, stage.worker_id, queues=["served"], tasks=[])
    stage.job(queue="used")
    for name in ("celery", "routed", "own", "served"):
        assert ask(stage.app, "drain", "--queue", name, "--timeout", 0).code == 0
    assert ask(stage.app, "drain", "--queue", "used", "--timeout", 0).code == 1


def test_a_queue_that_nobody_serves_is_told_of(stage: Stage) -> None:
    stage.job(queue="a")
    registry.note_served(stage.runtime.connections, stage.worker_id, queues=["a"], tasks=[])
    assert "serves" not in ask(stage.app, "drain", "--timeout", 0).lines[0]

    stage.sql("UPDATE workers SET beat_at = now() - interval '1 min'")
    said = ask(stage.app, "drain", "--timeout", 0)
    assert said.lines[0].endswith("Not finished: a (1 queued, 0 running). No live worker serves a: start one.")
    assert ask(stage.app, "drain", "--timeout", 0, "--json").document["unserved"] == ["a"]


@pytest.mark.parametrize("words", [("--timeout", "-1"), ("--timeout", "soon"), ("--horizon", "nan")])
def test_a_timeout_is_a_number_of_seconds(stage: Stage, words: tuple[str, ...]) -> None:
    assert ask(stage.app, "drain", *words).code == 2
