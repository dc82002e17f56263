"""A sweeper sets one bad row aside, and it blocks nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from celery_sidejob import Job, RunningJob, StoreUnavailableError
from celery_sidejob.model.durable import Message
from celery_sidejob.model.protocols import Refused
from celery_sidejob.operations.hold import Hold
from celery_sidejob.services.duty import Report
from celery_sidejob.services.sweep.due import bury_unsendable
from celery_sidejob.services.sweep.sweeper import Sweeper
from tests.tools.in_process import Stage

pytestmark = pytest.mark.pooled_too

BAD = "stage.bad"


@contextmanager
def refused(stage: Stage) -> Iterator[None]:
    """Within the block the store refuses every change of a job of the task BAD."""
    stage.sql("""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'refused'; END $$;
        CREATE TRIGGER refuse BEFORE UPDATE ON jobs FOR EACH ROW WHEN (old.task = 'stage.bad')
          EXECUTE FUNCTION refuse()""")
    try:
        yield
    finally:
        stage.sql("DROP TRIGGER refuse ON jobs; DROP FUNCTION refuse")


def pair(stage: Stage, **options: object) -> tuple[Job, Job]:
    """A job that the store will refuse to change, and a later one that it will not."""

    def bad(job: RunningJob) -> None:
        pass

    return stage.task(bad, name=BAD).enqueue(**options), stage.job(**options)


def lose(stage: Stage, *jobs: Job) -> list[Hold]:
    """Have a worker that is declared dead hold these jobs."""
    holds = [stage.claim(job) for job in jobs]
    stage.sql("UPDATE workers SET dead_at = now() WHERE id = %s", stage.worker_id)
    return [hold for hold in holds if hold is not None]


def test_a_run_that_cannot_be_rescued_blocks_nothing(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    bad, good = pair(stage)
    late = stage.job(countdown=3600)
    lose(stage, bad, good)
    stage.sql("UPDATE timers SET due_at = now()")
    sweeper = Sweeper(stage.runtime)

    with refused(stage):
        report = sweeper.run_once()
        assert (report.rescued, report.timers) == (1, 1)
        assert [record.message for record in caplog.records if "set aside" in record.message] == [
            f"Job {bad.id} is set aside for 5 s, its rescue failed"
        ]
        sweeper.run_once()
        assert caplog.text.count("set aside") == 1, "it is left alone for a while"

    assert Sweeper(stage.runtime).run_once().rescued == 1
    stage.worker_id = stage.new_worker()
    stage.drain()
    assert {job.refresh().status for job in (bad, good, late)} == {"completed"}


def test_a_timer_that_cannot_be_applied_blocks_no_other(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    bad, good = pair(stage, countdown=3600)
    stage.sql("UPDATE timers SET due_at = now()")
    sweeper = Sweeper(stage.runtime)

    with refused(stage):
        assert sweeper.run_once().timers == 1
        assert f"Job {bad.id} is set aside for 5 s, its timer failed" in caplog.text
        assert sweeper.run_once().timers == 0
        assert caplog.text.count("set aside") == 1, "it is left alone for a while"

    assert Sweeper(stage.runtime).run_once().timers == 1
    stage.drain()
    assert {job.refresh().status for job in (bad, good)} == {"completed"}


def test_what_was_buried_before_the_store_went_away_is_counted(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def away_for_the_second(message: Message, *_: object, **__: object) -> tuple[str, tuple[()]]:
        told.append(message.task_id)
        if len(told) == 2:
            raise StoreUnavailableError("injected")
        return "bury", ()

    monkeypatch.setattr(stage.runtime.results, "tell_of_doom", away_for_the_second)
    stage.sql("""
        INSERT INTO messages (task_id, task, queue, publication, body, generation, next_check_at, check_interval)
        SELECT unnest(ARRAY['a', 'b']), 'mail', 'q', '{}', 'x', 1, now(), interval '1 s'""")
    refused: Refused = [(Message(task_id, "mail", "q", "{}", b"x"), ValueError("no queue")) for task_id in "ab"]
    report = Report()

    with pytest.raises(StoreUnavailableError):
        bury_unsendable(stage.runtime, None, refused, report)

    assert stage.sql("SELECT task_id FROM dead") == [("a",)]
    assert report == Report(tasks_buried=1)
