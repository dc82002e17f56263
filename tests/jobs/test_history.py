"""The history of a job: what happened to it, in which run and worker; bounded, in commits that happen anyway."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from celery_sidejob import InvalidValueError, Job, JobFailed, JobNotFoundError, RunningJob
from celery_sidejob.store.connection.own_executor import OwnExecutor
from celery_sidejob.store.statement import Statement
from tests.tools.commands import ask
from tests.tools.in_process import EMPTY, Stage


def told(job: Job) -> list[tuple[str, int | None]]:
    """What happened, and in which run."""
    return [(entry.what, entry.run_no) for entry in job.history]


@pytest.fixture
def short(stage_database_url: str) -> Iterator[Stage]:
    """A stage whose jobs keep three runs and three entries."""
    made = Stage(stage_database_url, sidejob_history=3)
    yield made
    made.sql(EMPTY)
    made.close()


def test_a_run_and_its_worker_are_in_the_history(stage: Stage) -> None:
    job = stage.job(created_by="me")
    stage.run(job)
    made, claimed, ended = job.history

    (ident,) = stage.sql("SELECT ident FROM workers WHERE id = %s", stage.worker_id)[0]
    assert [entry.what for entry in (made, claimed, ended)] == ["made", "claimed", "completed"]
    assert (made.detail, made.run_no, made.worker) == ({"by": "me"}, None, None)
    assert (claimed.run_no, claimed.worker, ended.worker) == (1, ident, ident)
    assert made.at <= claimed.at <= ended.at  # type: ignore[operator]


def test_a_run_in_progress_is_in_the_history(stage: Stage) -> None:
    job = stage.job()
    assert stage.claim(job)

    assert told(job) == [("made", None), ("claimed", 1)]


def test_each_end_is_told_by_its_name(stage: Stage) -> None:
    bodies = iter(["retry", "suspend", "fail"])

    def body(job: RunningJob) -> None:
        match next(bodies):
            case "retry":
                raise job.retry(countdown=0)
            case "suspend":
                job.suspend()
            case "fail":
                raise JobFailed("no stock", "Shelf 7 is empty.")

    job = stage.job(body)
    stage.drain()
    worker = stage.new_worker()
    job.run()
    assert stage.claim(job, worker_id=worker)
    stage.declare_dead(worker)
    stage.sidejob.poll()
    with pytest.raises(JobFailed):
        stage.run(job)
    job.terminate()
    stage.drain()

    entries = job.history
    assert [(entry.what, entry.run_no) for entry in entries if entry.what not in ("made", "claimed")] == [
        ("retried", 1), ("suspended", 2), ("lost", 3), ("failed", 4), ("terminated", 5),
    ]  # fmt: skip
    (failed,) = (entry for entry in entries if entry.what == "failed")
    assert failed.detail == {"error": "JobFailed", "group": "no stock", "message": "Shelf 7 is empty."}


def test_a_job_that_is_asked_after_its_end_is_revived(stage: Stage) -> None:
    def fail(job: RunningJob) -> None:
        raise ValueError("no")

    job = stage.job(fail)
    with pytest.raises(ValueError, match="no"):
        stage.run(job)
    (entry,) = stage.sidejob.dead
    stage.sidejob.dead.retry(entry.id)
    job.terminate(without_shutdown=True)
    job.run(force=True, countdown=3600)

    assert [(entry.what, entry.run_no, entry.detail) for entry in job.history if entry.what == "revived"] == [
        ("revived", None, {"from": "failed"}), ("revived", None, {"from": "terminated"}),
    ]  # fmt: skip


def test_a_job_that_is_asked_at_rest_or_in_its_run_is_not_revived(stage: Stage) -> None:
    job = stage.job(lambda job: job.run() if job.run_no == 1 else None)
    stage.drain()
    job.run()
    stage.drain()

    assert told(job)[-1] == ("completed", 3)
    assert stage.sql("SELECT count(*) FROM job_log") == [(0,)]


def test_the_first_run_and_the_last_ones_are_kept(short: Stage) -> None:
    job = short.job()
    for _ in range(9):
        short.run(job)
        job.run()

    assert [run for what, run in told(job) if what == "completed"] == [1, 7, 8, 9]
    assert short.sql("SELECT count(*) FROM run_history") == [(4,)]


def test_the_last_own_entries_are_kept(short: Stage) -> None:
    job, other = short.job(), short.job()
    other.log("stays")
    for number in range(9):
        job.log(f"entry {number}", number=number)

    entries = [entry for entry in job.history if entry.what != "made"]
    assert [entry.what for entry in entries] == ["entry 6", "entry 7", "entry 8"]
    assert entries[-1].detail == {"number": 8}
    assert told(other) == [("made", None), ("stays", None)]


def test_entries_of_a_run_are_committed_with_its_unit_and_bounded(short: Stage) -> None:
    seen: list[Any] = []

    def body(job: RunningJob) -> None:
        for number in range(9):
            job.log(f"entry {number}")
        seen.extend([job.history[-1].what, job.history[-1].at])
        job.checkpoint()
        job.log("last")

    job = short.inside(body)

    assert seen == ["entry 8", None]
    assert told(job) == [
        ("made", None), ("claimed", 1), ("entry 7", 1), ("entry 8", 1), ("last", 1), ("completed", 1)
    ]  # fmt: skip


def test_entries_of_a_run_that_raises_stay(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        job.set(lost=1)
        job.log("before it failed", page=7)
        raise ValueError("no")

    job = stage.job(body)
    with pytest.raises(ValueError, match="no"):
        stage.run(job)

    assert told(job) == [("made", None), ("claimed", 1), ("before it failed", 1), ("failed", 1)]
    assert job.state == {}


def test_without_a_history_nothing_is_kept(stage_database_url: str) -> None:
    stage = Stage(stage_database_url, sidejob_history=0)
    try:
        job = stage.job()
        stage.run(job)
        job.log("nothing")
        assert told(job) == [("made", None)]
        assert stage.sql("SELECT count(*) FROM run_history UNION ALL SELECT count(*) FROM job_log") == [(0,), (0,)]
    finally:
        stage.sql(EMPTY)
        stage.close()


def test_a_history_goes_with_its_job(stage: Stage) -> None:
    job = stage.job()
    stage.run(job)
    job.log("x").terminate(without_shutdown=True)
    assert job.delete()

    assert stage.sql("SELECT count(*) FROM run_history UNION ALL SELECT count(*) FROM job_log") == [(0,), (0,)]
    with pytest.raises(JobNotFoundError):
        _ = job.history


def test_a_run_sends_no_statement_for_its_history(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bool] = []
    run = OwnExecutor.run

    def counting(executor: OwnExecutor, statement: Statement, /, **parameters: Any) -> Any:
        sent.append("history" in parameters)
        return run(executor, statement, **parameters)

    job = stage.job()
    monkeypatch.setattr(OwnExecutor, "run", counting)
    stage.run(job)

    assert sum(sent) == 1, "the statement that ends the run has it as a parameter"
    assert len(sent) <= 5


def test_what_an_error_tells_is_redacted(stage_database_url: str) -> None:
    stage = Stage(stage_database_url, sidejob_redact=lambda value: "***" if "division" in f"{value}" else value)
    try:
        job = stage.job(lambda job: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            stage.run(job)
        assert job.history[-1].detail == "***"
    finally:
        stage.sql(EMPTY)
        stage.close()


@pytest.mark.parametrize("message", ["", 5, "a\0"])
def test_what_is_no_message_is_refused(stage: Stage, message: Any) -> None:
    with pytest.raises(InvalidValueError):
        stage.job().log(message)


def test_show_has_the_history(stage: Stage) -> None:
    job = stage.job()
    stage.run(job)
    job.log("paid", amount=7)

    assert [entry["what"] for entry in ask(stage.app, "show", job.id, "--json").document["history"]] == [
        "made", "claimed", "completed", "paid"
    ]  # fmt: skip
    assert any("completed" in line and " 1 " in line for line in ask(stage.app, "show", job.id).lines)
