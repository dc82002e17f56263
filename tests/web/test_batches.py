"""The pages of batches."""

from __future__ import annotations

import re
from typing import Any

import pytest

from celery_sidejob import RunningJob
from celery_sidejob.jobs import batch as batches
from tests.tools.browsers import Browser
from tests.tools.in_process import Stage


def fail(job: RunningJob) -> None:
    raise ValueError("no such page")


def publish(number: int) -> None:
    pass


def an_import(stage: Stage, name: str = "import <7>") -> list[Any]:
    """A batch with a completed, a failed and an open job, and an open durable task."""
    task = stage.app.task(durable=True, name="stage.publish", shared=False)(publish)
    with stage.sidejob.batch(name, on_complete=task.s(7).set(queue="mail")):
        jobs = [stage.job(), stage.job(fail), stage.job()]
        task.apply_async((8,), countdown=3600)
    stage.run(jobs[0])
    with pytest.raises(ValueError, match="no such page"):
        stage.run(jobs[1])
    batches.settle_all(stage.runtime)
    return jobs


def test_the_list_shows_the_progress_of_each(stage: Stage, reader: Browser) -> None:
    assert "There is no batch." in reader.text("/batches")
    an_import(stage)
    stage.sidejob.batch("open one")
    shown = reader.text("/batches")
    assert shown.index("open one") < shown.index("import &lt;7&gt;"), "the newest first"
    assert 'href="/batches/named?name=import+%3C7%3E"' in shown
    assert re.search(r'<progress max="4" value="2" aria-label="2 of 4', shown)
    assert "takes members" in shown
    assert 'href="/batches" aria-current="page"' in shown


def test_the_list_leads_on(stage: Stage, reader: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery_sidejob.web.pages.BATCHES", 2)
    for n in range(3):
        stage.sidejob.batch(f"number {n}")
    shown = reader.text("/batches")
    assert "number 0" not in shown
    onward = re.search(r'rel="next" href="([^"]+)"', shown)
    assert onward is not None
    assert "number 0" in reader.text(onward[1])
    assert reader.get("/batches?before=x").status_code == 400


def test_one_batch(stage: Stage, reader: Browser) -> None:
    done, failed, open_ = an_import(stage)
    shown = reader.text("/batches/named?name=import+%3C7%3E")
    for job, is_named in ((done, False), (failed, True), (open_, True)):
        assert (f'href="/jobs/{job.id}"' in shown) == is_named
    for query in ("", "&amp;status=completed", "&amp;status=failed"):
        assert f'href="/jobs?batch=import+%3C7%3E{query}"' in shown
    assert re.search(r"on_complete.*stage\.publish.*\[7\].*mail", re.sub(r"\s+", "", shown))
    assert "2 of 4 have ended" in shown
    assert reader.get("/batches/named?name=none").status_code == 404


def test_a_large_batch_is_counted_up_to_a_bound_in_the_list(
    stage: Stage, reader: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_sidejob.inspection.jobs.COUNTED", 3)
    an_import(stage)
    assert "3+" in reader.text("/batches")
    assert "2 of 4 have ended" in reader.text("/batches/named?name=import+%3C7%3E")


def test_the_jobs_of_a_batch_are_a_list_in_pages(
    stage: Stage, reader: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_sidejob.web.pages.PAGE", 2)
    stage.job()
    ids = [str(job.id) for job in an_import(stage)]
    shown = reader.text("/jobs?batch=import+%3C7%3E")
    assert re.findall(r'"n"><a href="/jobs/(\d+)"', shown) == ids[:0:-1]
    onward = re.search(r'rel="next" href="([^"]+)"', shown)
    assert onward is not None
    rest = reader.text(onward[1].replace("&amp;", "&"))
    assert re.findall(r'"n"><a href="/jobs/(\d+)"', rest) == ids[:1]
    assert reader.get("/jobs?batch=none").status_code == 404


def test_the_failed_jobs_of_a_batch_can_be_run_again_at_once(stage: Stage, operator: Browser) -> None:
    _, failed, _ = an_import(stage)
    shown = operator.text("/jobs/bulk?verb=force&batch=import+%3C7%3E&status=failed")
    assert "1 job" in shown
    operator.submit("/jobs/bulk", verb="force", batch="import <7>", status="failed", total="1")
    assert failed.refresh().status == "queued"
