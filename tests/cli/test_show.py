"""What `show` says of one job: its result, its queue and its history."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from celery_sidejob import Job, RunningJob
from celery_sidejob.store import registry
from tests.tools.commands import Command, ask
from tests.tools.in_process import Stage


@pytest.fixture
def keeping(database_url: str) -> Iterator[Stage]:
    """A stage whose app keeps results, and shows secrets to nobody."""

    def redact(value: Any) -> Any:
        return "***" if value == "secret" else value

    stage = Stage(database_url, result_backend="cache+memory://", sidejob_redact=redact)
    yield stage
    stage.close()


@pytest.mark.parametrize(
    ("value", "shown"), [({"sum": 3}, '{"sum": 3}'), ("done", '"done"'), (0, "0"), (False, "false")]
)
def test_the_value_that_a_job_has_returned(keeping: Stage, value: Any, shown: str) -> None:
    job = _returning(keeping, value)
    assert ask(keeping.app, "show", job.id, "--json").document["result"] is None
    keeping.run(job)

    assert f"result {shown}" in ask(keeping.app, "show", job.id).lines
    assert ask(keeping.app, "show", job.id, "--json").document["result"] == value
    job.run()
    assert ask(keeping.app, "show", job.id, "--json").document["result"] is None, "it runs again"


def test_a_value_is_redacted(keeping: Stage) -> None:
    job = _returning(keeping, "secret")
    keeping.run(job)
    assert 'result "***"' in ask(keeping.app, "show", job.id).lines


def test_a_job_without_a_value(stage: Stage, command: Command) -> None:
    returned = stage.job()
    stage.run(returned)
    failed = stage.job(_fail)
    with pytest.raises(ValueError, match="no"):
        stage.run(failed)
    for job in (returned, failed):
        assert not any(line.startswith("result") for line in command("show", job.id).lines)
        assert command("show", job.id, "--json").document["result"] is None


def test_a_queue_that_no_worker_serves(stage: Stage, command: Command) -> None:
    job, paused = stage.job(queue="maths"), stage.job(queue="paused", countdown=60)
    assert "queue maths" in command("show", job.id).lines, "a worker has not said yet what it serves"
    assert command("show", job.id, "--json").document["queue_served"] is None

    registry.note_served(stage.runtime.connections, stage.worker_id, queues=["letters"], tasks=["stage.idle"])
    for each in (job, paused):
        assert f"queue {each.queue}: no live worker serves it" in command("show", each.id).lines
        assert command("show", each.id, "--json").document["queue_served"] is False

    stage.run(job)
    assert "queue maths" in command("show", job.id).lines, "no run is owed"
    registry.note_served(stage.runtime.connections, stage.worker_id, queues=["paused"], tasks=["stage.idle"])
    assert "queue paused" in command("show", paused.id).lines


def test_the_whole_history(stage: Stage, command: Command) -> None:
    job = stage.job()
    for n in range(25):
        job.log(f"entry {n}")

    short, whole = command("show", job.id), command("show", job.id, "--history")
    assert "History (the last 20 of 26 entries: --history)" in short.lines
    assert "History" in whole.lines
    assert [sum("entry " in line for line in said.lines) for said in (short, whole)] == [20, 25]


def _returning(stage: Stage, value: Any) -> Job:
    @stage.task(name="stage.value")
    def body(job: RunningJob) -> Any:
        return value

    return stage.sidejob.enqueue(body)


def _fail(job: RunningJob) -> None:
    raise ValueError("no")
