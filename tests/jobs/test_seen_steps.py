"""How others see steps: signals, announcements, statistics, and spans of traces."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.orm import Session

from celery_sidejob import ChildFailedError, InvalidValueError, Job, RunningJob, Status, StepNameError, step_ended
from celery_sidejob.operations.stores import Store
from celery_sidejob.prometheus import exposition
from celery_sidejob.services.sweep.prune import Prune
from celery_sidejob.services.sweep.sweep import Sweep
from celery_sidejob.store import measured
from tests.jobs.test_steps import Ledger, killed_at, ledger, pass_time  # noqa: F401 - the fixture `ledger`
from tests.tools.commands import ask
from tests.tools.counting import connections_of
from tests.tools.in_process import Stage

QUEUE = "mail"
TODAY = "(now() AT TIME ZONE 'UTC')::date"


def fails(*_: Any) -> None:
    raise ValueError("no")


# -- signals ----------------------------------------------------------------------------------------------------------


class Heard:
    """What the signal of steps has told, and which steps the store had then."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.facts: list[dict[str, Any]] = []
        self.kept: list[list[str]] = []

    def __call__(self, sender: str, signal: Any, **facts: Any) -> None:
        assert sender == facts["task"]
        self.facts.append(facts)
        self.kept.append([str(step) for step in self._stage.sidejob.get(facts["job_id"]).steps if step.done])

    @property
    def brief(self) -> list[tuple[Any, ...]]:
        return [(one["name"], one["number"], one["kind"], one["tries"], str(one["outcome"])) for one in self.facts]


@pytest.fixture
def heard(stage: Stage) -> Iterator[Heard]:
    found = Heard(stage)
    step_ended.connect(found, weak=False)
    yield found
    step_ended.disconnect(found)


def test_each_step_is_told_once_after_its_commit(stage: Stage, heard: Heard) -> None:
    def body(job: RunningJob) -> None:
        job.step("charge", time.sleep, 0.05)
        job.step("charge", str)
        if job.since("now"):
            job.sleep("rest", days=1)
        job.since("then")
        job.step("pack", str)

    job = stage.job(body)
    assert stage.run(job) == Status.SUSPENDED
    assert heard.brief == [("charge", 1, "step", 1, "completed"), ("charge", 2, "step", 1, "completed")]
    assert heard.kept == [["charge"], ["charge", "charge#2"]], "told after the commit of the record"
    first = heard.facts[0]
    assert (first["job_id"], first["task"], first["run_no"]) == (job.id, "stage.call", 1)
    assert 0.05 <= first["seconds"] < 5

    heard.facts.clear()
    pass_time(stage, job)
    stage.sidejob.poll()
    assert stage.run(job) == Status.COMPLETED
    assert heard.brief == [("pack", 1, "step", 1, "completed")], "what has a record is not executed"


def test_tries_and_failures_are_told(stage: Stage, heard: Heard) -> None:
    def body(job: RunningJob) -> None:
        job.step("charge", fails, retries=1)

    job = stage.job(body)
    assert stage.run(job) == Status.SUSPENDED
    pass_time(stage, job)
    stage.sidejob.poll()
    with pytest.raises(ValueError, match="no"):
        stage.run(job)
    assert heard.brief == [("charge", 1, "step", 1, "retried"), ("charge", 1, "step", 2, "failed")]


def test_a_failure_that_the_body_catches_is_told_once(stage: Stage, heard: Heard) -> None:
    def body(job: RunningJob) -> None:
        with pytest.raises(ValueError, match="no"):
            job.step("charge", fails)
        job.step("undo", str)

    stage.inside(body)
    assert heard.brief == [("charge", 1, "step", 1, "failed"), ("undo", 1, "step", 1, "completed")]


def test_a_step_in_the_caller_s_transaction_is_told_once_that_is_committed(
    stage: Stage, heard: Heard, ledger: Ledger  # noqa: F811 - the fixture
) -> None:  # fmt: skip
    def body(job: RunningJob) -> None:
        for commits in (False, True):
            with Session(ledger.engine) as session, job.step("invoice", transaction=session) as step:
                assert step.is_new
                step.value = commits
                (session.commit if commits else session.rollback)()
            job.get("anything")
            assert [one["outcome"] for one in heard.facts] == (["completed"] if commits else [])
        with Session(ledger.engine) as session, job.step("refused", transaction=session):
            fails()

    with pytest.raises(ValueError, match="no"):
        stage.run(stage.job(body))
    assert heard.brief == [("invoice", 1, "step", 1, "completed"), ("refused", 1, "step", 1, "failed")]


def test_a_step_that_died_after_its_commit_is_not_told_by_a_later_run(stage: Stage, heard: Heard) -> None:
    job = stage.job(lambda job: job.step("charge", str))
    killed_at(stage, job, "step[charge]:before-commit")
    assert heard.facts == []
    killed_at(stage, job, "step[charge]:after-commit")
    assert stage.run(job) == Status.COMPLETED
    assert heard.brief == [("charge", 1, "step", 1, "completed")]


def test_waits_tell_how_long_they_took(stage: Stage, heard: Heard) -> None:
    def body(job: RunningJob) -> None:
        job.call("pack", stage.idle)
        job.receive("answers", timeout=timedelta(days=14))
        job.sleep("cool off", hours=1)
        with pytest.raises(ChildFailedError):
            job.call_all("measure", [(stage.task(fails, name="stage.fails"))])
        job.suspend()

    def waited(seconds: int) -> None:
        stage.sql("UPDATE steps SET began_at = began_at - make_interval(secs => %s) WHERE NOT done", seconds)

    job = stage.job(body)
    stage.run(job)
    waited(60)
    stage.drain()
    waited(7)
    job.input("answers").write("yes")
    stage.run(job)
    stage.sql("UPDATE steps SET began_at = began_at - interval '3600 s', due_at = due_at - interval '3600 s' "
              "WHERE kind = 'sleep'")  # fmt: skip
    stage.sql("UPDATE timers SET due_at = now() WHERE job_id = %s", job.id)
    stage.sidejob.poll()
    stage.run(job)
    waited(30)
    stage.drain()

    took = {str(step): step.took_s for step in job.steps}
    assert took == {
        "pack": pytest.approx(60, abs=5), "answers": pytest.approx(7, abs=5), "cool off": pytest.approx(3600, abs=0.01),
        "measure": pytest.approx(30, abs=5),
    }  # fmt: skip
    assert [(one["name"], round(one["seconds"], 3)) for one in heard.facts] == [
        (name, round(took[name], 3)) for name in ("pack", "answers", "measure")
    ], "the end of a sleep is no commit, and no event"
    assert heard.brief[-1] == ("measure", 1, "calls", 1, "failed")

    job.run()
    stage.run(job)


def test_a_receiver_of_the_signal_is_outside_of_the_run(stage: Stage) -> None:
    def asks(job_id: int, **_: Any) -> None:
        stage.sidejob.get(job_id).set(heard=True)
        raise RuntimeError("a receiver that raises stops nothing")

    def body(job: RunningJob) -> None:
        job.step("charge", str)
        raise ValueError("no")

    step_ended.connect(asks, weak=False)
    try:
        job = stage.job(body)
        with pytest.raises(ValueError, match="no"):
            stage.run(job)
    finally:
        step_ended.disconnect(asks)
    assert job.get("heard") is True


# -- announcements ----------------------------------------------------------------------------------------------------


def test_steps_are_announced_to_who_listens(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        job.step("charge", str)
        job.step("pack", fails, retries=1)

    job = stage.job(body)
    with stage.sidejob.subscribe(f"/sidejob/job/{job.id}", timeout=20) as announcements:
        stage.run(job)
        found = [next(announcements).message for _ in range(4)]
    steps = [one for one in found if "step" in one]
    assert [one.pop("seconds") >= 0 for one in steps] == [True, True]
    assert steps == [
        {"step": "charge", "number": 1, "kind": "step", "outcome": "completed", "tries": 1},
        {"step": "pack", "number": 1, "kind": "step", "outcome": "retried", "tries": 1},
    ]
    assert [one["status"] for one in found if "status" in one] == ["running", "suspended"]


# -- statistics -------------------------------------------------------------------------------------------------------


def record(stage: Stage) -> None:
    connections_of(stage).record()


def order(job: RunningJob) -> None:
    job.step("charge", time.sleep, 0.03)
    for _ in range(3):
        job.step("pack", str)
    job.step("ship", fails, retries=1)


def one_step(job: RunningJob) -> None:
    job.step("g", str)


def done(stage: Stage, job: Job) -> None:
    assert stage.run(job) == Status.SUSPENDED
    pass_time(stage, job)
    stage.sidejob.poll()
    with pytest.raises(ValueError, match="no"):
        stage.run(job)


def test_statistics_of_a_step(counted: Stage) -> None:
    for _ in range(2):
        done(counted, counted.job(order, queue=QUEUE))
    record(counted)
    charge = counted.sidejob.statistics(step="charge")
    assert (charge.step, charge.runs.count, charge.failures, charge.retries) == ("charge", 2, 0, 0)
    assert charge.runs.mean >= 0.03
    lengths = {bound: count for bound, count in charge.runs.histogram if count}
    assert (sum(lengths.values()), min(lengths) >= 0.05) == (2, True), "a busy machine sleeps for longer"
    ship = counted.sidejob.statistics(queue=QUEUE, task=counted.call, day="today", step="ship")
    assert (ship.runs.count, ship.failures, ship.retries) == (4, 2, 2)
    assert (ship.waits.count, ship.losses, ship.failed_now) == (0, 0, 0)
    assert counted.sidejob.statistics(step="pack").runs.count == 6
    assert counted.sidejob.statistics(queue="other", step="pack").runs.count == 0

    of_runs = counted.sidejob.statistics()
    assert (of_runs.step, of_runs.runs.count, of_runs.failures, of_runs.failed_now) == (None, 4, 2, 2)
    with pytest.raises(StepNameError):
        counted.sidejob.statistics(step="pack#2")
    with pytest.raises(StepNameError):
        counted.sidejob.statistics(step=5)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError):
        counted.sidejob.statistics(task=b"x", step="pack")


def test_names_that_never_end_are_counted_together(counted: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "MOST_STEPS", 3)

    def pages(job: RunningJob, *names: str) -> None:
        for name in names:
            job.step(name, str)

    def body(job: RunningJob) -> None:
        pages(job, *(job.get("names")))

    for names in (["a", "b"], ["b", "c", "d", "e"], ["a", "f", "d"]):
        job = counted.job(body)
        job.set(names=names)
        counted.run(job)
        record(counted)
    found = {name: counted.sidejob.statistics(step=name).runs.count for name in ("a", "b", "c", "d", "other")}
    assert found == {"a": 2, "b": 2, "c": 1, "d": 0, "other": 4}
    counted.run(counted.task(one_step, name="stage.another").enqueue())
    record(counted)
    assert counted.sidejob.statistics(step="g").runs.count == 1, "each task has its own names"


def test_the_name_of_a_step_that_is_not_used_any_more_is_forgotten(counted: Stage) -> None:
    for name in ("old", "new"):
        counted.run(counted.job(lambda job, name=name: job.step(name, str)))
        record(counted)
    counted.sql(f"UPDATE tallies SET day = {TODAY} - 31 WHERE day = {TODAY} AND step = 'old'")
    counted.sql(f"INSERT INTO tallies SELECT {TODAY} - 31, queue, task, step, measure, bucket, number, total_us, "
                f"squares_us FROM tallies WHERE day = {TODAY} AND step = 'new'")  # fmt: skip
    store = Store(replace(counted.runtime.settings, stats_history=30), counted.runtime.connections)
    Prune(Sweep(counted.runtime.at(store))).run_once()
    assert counted.sql("SELECT DISTINCT step FROM tallies WHERE day = '1970-01-01' ORDER BY 1") == [("",), ("new",)]


def test_a_name_that_is_too_long_for_an_index_is_left_out(counted: Stage) -> None:
    def body(job: RunningJob) -> None:
        job.step("x" * 255, str)
        job.step("short", str)

    counted.run(counted.task(body, name="t" * 400).enqueue(queue=QUEUE))
    record(counted)
    assert counted.sql("SELECT DISTINCT step FROM tallies ORDER BY 1") == [("",), ("short",)]


def test_prometheus_reads_steps(counted: Stage) -> None:
    done(counted, counted.job(order, queue=QUEUE))
    record(counted)
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(exposition(counted.sidejob)):
        for sample in family.samples:
            if sample.name.startswith("sidejob_step_"):
                assert (sample.labels["queue"], sample.labels["task"]) == (QUEUE, "stage.call")
                name = (sample.name.removeprefix("sidejob_step_"), sample.labels["step"])
                found[*name, sample.labels.get("le", "")] = sample.value
    assert found["seconds_bucket", "charge", "0.025"] == 0
    assert found["seconds_bucket", "charge", "+Inf"] == found["seconds_count", "charge", ""] == 1
    assert found["seconds_count", "pack", ""] == 3
    assert [found[name, "ship", ""] for name in ("failures_total", "retries_total")] == [1, 1]


def test_the_command_shows_the_steps_of_a_day(counted: Stage) -> None:
    done(counted, counted.job(order, queue=QUEUE))
    record(counted)
    shown = ask(counted.app, "stats", "--day", "today", "--json").document
    assert [(one["task"], one["runs"]["count"]) for one in shown["tasks"]] == [("stage.call", 2)]
    assert [(one["step"], one["runs"]["count"]) for one in shown["steps"]] == [("charge", 1), ("pack", 3), ("ship", 2)]
    lines = ask(counted.app, "stats", "--day", "today").lines
    (ship,) = [line.split() for line in lines if " ship " in line]
    assert ship[:4] == [QUEUE, "stage.call", "ship", "2"]
    assert ship[-2:] == ["1", "1"]


# -- OpenTelemetry ----------------------------------------------------------------------------------------------------


def test_a_step_is_a_span_below_its_run(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, ledger: Ledger  # noqa: F811 - the fixture
) -> None:  # fmt: skip
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", lambda name: provider.get_tracer(name))

    def charge() -> None:
        with provider.get_tracer("the user's").start_as_current_span("ask the bank"):
            pass

    def body(job: RunningJob) -> None:
        job.step("charge", charge)
        job.step("charge", str)
        with Session(ledger.engine) as session:
            with job.step("invoice", transaction=session):
                pass
            session.commit()
        job.step("ship", fails, retries=1)

    job = stage.job(body)
    for _ in range(2):
        hold = stage.claim(job)
        assert hold is not None
        with provider.get_tracer("celery").start_as_current_span("run"):
            stage.perform(hold)
        pass_time(stage, job)
        stage.sidejob.poll()
    stage.sidejob.poll()
    spans = exporter.get_finished_spans()
    by_id = {span.context.span_id: span.name for span in spans}
    found = [(span.name, by_id.get(span.parent.span_id) if span.parent else None) for span in spans]
    assert found == [
        ("ask the bank", "step/charge"), ("step/charge", "run"), ("step/charge", "run"), ("step/invoice", "run"),
        ("step/ship", "run"), ("run", None), ("step/ship", "run"), ("run", None),
    ]  # fmt: skip
    ships = [span for span in spans if span.name == "step/ship"]
    assert [dict(span.attributes or {}) for span in ships] == [
        {"sidejob.job_id": job.id, "sidejob.step": "ship", "sidejob.try": number} for number in (1, 2)
    ]
    assert {span.status.status_code.name for span in ships} == {"ERROR"}
    assert [span.events[0].attributes["exception.message"] for span in ships] == ["no", "no"]  # type: ignore[index]
    assert {span.status.status_code.name for span in spans if span not in ships and span.name != "run"} == {"UNSET"}
