"""How far a run is, as its body says."""

from __future__ import annotations

from typing import Any

import pytest

from celery_sidejob import Job, RunningJob
from celery_sidejob.inspection.jobs import JobViews
from celery_sidejob.model.errors import StoreUnavailableError
from celery_sidejob.operations.runs import measuring
from tests.tools.in_process import Stage

pytestmark = pytest.mark.pooled_too


def told(job: Job) -> Any:
    found = job.progress_of
    return None if found is None else (found.done, found.total, found.note, found.run_no)


def test_it_is_seen_while_the_run_goes_on_and_after_it(stage: Stage) -> None:
    seen: list[Any] = []

    def body(job: RunningJob) -> None:
        job.progress(1, 4, "the first")
        stage.outside(lambda: seen.append(told(Job(job.id, runtime=stage.runtime))))
        job.progress(2, 4)
        job.progress(note="nearly")
        stage.outside(lambda: seen.append(told(Job(job.id, runtime=stage.runtime))))

    job = stage.job(body)
    assert job.progress_of is None
    stage.run(job)
    assert seen == [(1.0, 4.0, "the first", 1)] * 2, "not more than once a second"
    assert told(job) == (None, None, "nearly", 1), "the last word is kept"


def test_later_words_are_kept_when_a_second_is_over(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "PROGRESS_S", 0.0)
    seen: list[Any] = []

    def body(job: RunningJob) -> None:
        for done in range(3):
            job.progress(done, 2)
            stage.outside(lambda: seen.append(Job(job.id, runtime=stage.runtime).progress_of.fraction))  # type: ignore[union-attr]

    stage.inside(body)
    assert seen == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("ends", ["fails", "retries", "suspends"])
def test_it_is_no_part_of_the_unit(stage: Stage, ends: str) -> None:
    def body(job: RunningJob) -> None:
        job.progress(1, 4)
        job.progress(3, 4)
        if ends == "suspends":
            job.suspend()
        raise job.retry(countdown=0) if ends == "retries" else ValueError("it does not work")

    job = stage.job(body)
    hold = stage.claim(job)
    assert hold is not None
    stage.perform(hold)
    assert told(job) == (3.0, 4.0, None, 1)


def test_a_run_that_was_taken_away_says_nothing(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        stage.outside(lambda: Job(job.id, runtime=stage.runtime).move(queue="new", force=True))
        job.progress(1, 4)

    job = stage.job(body)
    hold = stage.claim(job)
    assert hold is not None
    stage.perform(hold)
    assert job.progress_of is None


def test_it_goes_with_the_job_and_is_shown(stage: Stage) -> None:
    job = stage.inside(lambda job: job.progress(3, 4, "pages"))
    details = JobViews(stage.runtime).details(job)["progress"]
    assert (details["shown"], details["fraction"]) == ("3 of 4: pages", 0.75)
    assert JobViews(stage.runtime).tree(job, limit=10)[0].progress == details
    job.terminate(without_shutdown=True)
    job.delete()
    assert stage.sql("SELECT count(*) FROM progress") == [(0,)]


def test_without_a_store_the_run_goes_on(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any, **__: Any) -> None:
        raise StoreUnavailableError("nobody listens")

    monkeypatch.setattr(measuring.jobs, "set_progress", away)
    job = stage.inside(lambda job: job.progress(3, 4))
    assert (str(job.status), job.progress_of) == ("completed", None)


def test_a_caller_that_waits_for_the_result_sees_it(stage: Stage) -> None:
    stage.app.conf.update(result_backend="cache+memory://")
    seen: list[Any] = []

    def body(job: RunningJob) -> int:
        result: Any = job.result
        job.progress(1, 4, "the first")
        seen.append((result.state, result.info))
        job.progress(4, 4)
        return 7

    job = stage.job(body)
    result: Any = job.result
    stage.run(job)
    assert seen == [("PROGRESS", {"current": 1, "total": 4, "note": "the first"})]
    assert (result.state, result.get(timeout=5)) == ("SUCCESS", 7)
