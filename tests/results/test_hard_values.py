"""Results that are hard to keep, of plain tasks, durable tasks and jobs whose results are in the store."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from celery import states
from kombu.exceptions import EncodeError
from kombu.serialization import registry

from celery_sidejob import InvalidValueError, ResultTooLargeError, RunningJob
from celery_sidejob.results import backend as module
from tests.hooks.tasks.test_stale_runs import Shop
from tests.results.conftest import Rows, Site
from tests.tools.in_process import Stage
from tests.tools.waiting import patient, wait_until

TIMEOUT_S = patient(45)
KINDS = ["plain", "durable", "job"]


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_each_is_kept_or_refused_and_every_task_ends(site: Site, rows: Rows, serializer: str) -> None:
    settings = {"result_serializer": serializer, "accept_content": ["json", "pickle"]}
    site.app.conf.update(settings)
    site.start(concurrency=2, SETTINGS=json.dumps(settings))
    names = ["nul", "lone", "nan", "large", "text", "unpicklable", "unknown"]
    sent = {(kind, name): site.sig(f"{kind}.odd", name).delay() for kind in KINDS for name in names}
    got = {key: result.get(timeout=TIMEOUT_S, propagate=False) for key, result in sent.items()}

    for kind in KINDS:
        assert got[kind, "nul"] == "\0"
        assert got[kind, "large"] == "x" * 1_000_000
        assert isinstance(got[kind, "text"], ValueError)
        assert "and" in str(got[kind, "text"])
        assert "OddError" in repr(got[kind, "unpicklable"])
        assert "NowhereError" in repr(got[kind, "unknown"])
        assert "lost" in str(got[kind, "unknown"])
        failed = [states.FAILURE] * 3
        assert [sent[kind, name].state for name in ("text", "unpicklable", "unknown")] == failed
    for kind in ("plain", "durable"):
        assert got[kind, "lone"] == "\ud800"
        assert math.isnan(got[kind, "nan"])
    for name in ("lone", "nan"):  # no value of a job
        assert isinstance(got["job", name], InvalidValueError)
        assert "result: " in str(got["job", name])
    wait_until(lambda: not rows.all("SELECT 1 FROM messages"), timeout=TIMEOUT_S)
    assert rows.all("SELECT 1 FROM askings WHERE stored_at IS NULL") == []


def test_a_durable_task_shows_states_of_its_own(site: Site) -> None:
    site.start("solo")
    seen: list[Any] = []

    def on_message(meta: Any) -> None:
        seen.append((meta["status"], meta["result"]))
        site.record.note("seen")

    assert site.sig("durable.told").delay().get(timeout=TIMEOUT_S, on_message=on_message) is None
    assert seen == [("PROGRESS", {"step": 1}), (states.SUCCESS, None)]


# -- more than is kept -------------------------------------------------------------------------------------------------


@pytest.fixture
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result of 5,000 bytes is too large."""
    monkeypatch.setattr(module, "MOST_BYTES", 5_000)


@pytest.fixture
def stage(database_url: str) -> Iterator[Stage]:
    """An app whose store has its results; its jobs run when the test says so."""
    made = Stage(database_url, result_backend="sidejobpg://")
    yield made
    made.close()


@pytest.mark.usefixtures("few_bytes")
def test_a_job_whose_result_is_too_large_has_completed(stage: Stage) -> None:
    def body(job: RunningJob) -> str:
        return "x" * 10_000

    job = stage.job(body)
    result: Any = job.result
    assert stage.run(job) == "completed"
    with pytest.raises(
        ResultTooLargeError, match=rf"task {result.id}, which has ended with SUCCESS, takes 10\d+ bytes"
    ):
        result.get(timeout=5)


@pytest.mark.usefixtures("few_bytes")
@pytest.mark.parametrize(("outcome", "state"), [("x" * 10_000, "SUCCESS"), (ValueError("x" * 10_000), "FAILURE")])
def test_a_durable_task_whose_result_is_too_large_has_ended(
    database_url: str, redis_url: str, outcome: Any, state: str
) -> None:
    shop = Shop(database_url, redis_url, result_backend="sidejobpg://")
    try:
        result = shop.work.delay()
        shop.outcome = outcome
        shop.run(shop.work, result.id)
        with pytest.raises(ResultTooLargeError, match=f"which has ended with {state}, takes"):
            result.get(timeout=5)
        assert (shop.rows(), shop.buried()) == ([], ["failed"] * (state == "FAILURE"))
    finally:
        shop.close()


def test_a_result_that_the_serializer_refuses_fails_its_job(stage: Stage) -> None:
    """As it fails a task: the job has ended, and says why."""

    def dumps(meta: Any) -> str:
        if meta["result"] == 10**30:
            raise OverflowError("the integer is out of range")
        return json.dumps(meta)

    registry.register("picky", dumps, json.loads, "application/x-picky", "utf-8")
    try:
        stage.app.conf.update(result_serializer="picky", accept_content=["json", "picky"])
        job = stage.job(lambda job: 10**30)
        result: Any = job.result
        with pytest.raises(EncodeError, match="out of range"):
            stage.run(job)
        assert (str(job.refresh().status), result.state) == ("failed", states.FAILURE)
        assert stage.sql("SELECT 1 FROM askings WHERE stored_at IS NULL") == []
    finally:
        registry.unregister("picky")
