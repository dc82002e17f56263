"""Messages that wait, in a worker or in the broker, are not looked for; those that a worker lost or passed by are."""

from __future__ import annotations

import pytest

from celery_sidejob import Job
from celery_sidejob.services.heartbeat import heartbeat as module
from celery_sidejob.services.heartbeat.heartbeat import Heartbeat, Prefetched
from celery_sidejob.services.heartbeat.worker import Worker
from celery_sidejob.store.outbox import publishing
from celery_sidejob.store.outbox.kinds import JOBS
from tests.tools.in_process import Stage

pytestmark = pytest.mark.pooled_too


def publish(stage: Stage, *jobs: Job, ago_s: float = 60, look_in_s: float = 1) -> None:
    """Have the jobs' messages published so long ago, to be looked at in so many seconds."""
    for job in jobs:
        stage.sql(
            "UPDATE messages SET published_at = now() - %s * interval '1 s',"
            " next_check_at = now() + %s * interval '1 s' WHERE job_id = %s", ago_s, look_in_s, job.id,
        )  # fmt: skip


def look_in(stage: Stage, job: Job) -> float:
    """Return in how many seconds the sweeper looks at a job's message."""
    return float(
        stage.sql("SELECT extract(epoch FROM next_check_at - now()) FROM messages WHERE job_id = %s", job.id)[0][0]
    )


def test_a_worker_vouches_for_what_it_cannot_begin_for_one_lease(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SOON_S", 0.0)
    soon, late, unpublished, stale, elsewhere, running = (stage.job() for _ in range(6))
    publish(stage, soon, stale, elsewhere, running)
    publish(stage, late, look_in_s=1000)
    stage.runtime.connections.write_behind_now()
    stage.sql("UPDATE messages SET published_at = NULL, next_check_at = now() WHERE job_id = %s", unpublished.id)
    assert stage.claim(running) is not None
    worker = Worker(stage.runtime)
    for job in (soon, late, unpublished, running):
        worker.runs.received((job.id, 1))
    worker.runs.received((stale.id, 0))

    assert Prefetched(worker, worker.runs, JOBS).run_once()["vouched"] == 1
    worker.disconnect()

    lease = stage.runtime.settings.lease
    assert lease - 5 < look_in(stage, soon) <= lease
    assert look_in(stage, late) > 900
    assert look_in(stage, stale) < 2
    assert look_in(stage, elsewhere) < 2
    assert [row.task_id for row in publishing.candidates(stage.runtime.connections, JOBS, per_queue=10)] == [
        row[0] for row in stage.sql("SELECT task_id FROM messages WHERE job_id = %s", unpublished.id)
    ]


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_worker_vouches_for_a_job_only_behind_something_that_runs(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, is_busy: bool
) -> None:
    """What waits where nothing runs is behind nothing: the pool has lost it."""
    monkeypatch.setattr(module, "SOON_S", 0.0)
    job = stage.job()
    publish(stage, job)
    heartbeat = Heartbeat(stage.runtime, is_busy=lambda: is_busy)
    heartbeat.register()
    heartbeat.runs.received((job.id, 1))
    lease = stage.runtime.settings.lease
    monkeypatch.setattr(module.time, "monotonic", lambda clock=module.time.monotonic: clock() + lease + 1)

    heartbeat.run_once()

    assert (look_in(stage, job) > 2) is is_busy
    heartbeat.leave()
    heartbeat.close()


def test_a_queue_that_vanished_has_its_messages_published_again_and_no_other(stage: Stage) -> None:
    gone = [stage.job(queue="gone") for _ in range(3)]
    running, other = stage.job(queue="gone"), stage.job(queue="other")
    publish(stage, *gone, running, other, look_in_s=1000)
    assert stage.claim(running) is not None
    assert publishing.queues_in_broker(stage.runtime.connections) == ["gone", "other"]

    assert publishing.republish_in(stage.runtime.connections, "gone") == 3
    assert publishing.republish_in(stage.runtime.connections, "gone") == 0

    assert publishing.queues_in_broker(stage.runtime.connections) == ["other"]
    due = stage.sql("SELECT job_id FROM messages WHERE published_at IS NULL AND next_check_at <= now() ORDER BY job_id")
    assert [row[0] for row in due] == [job.id for job in gone]
    assert look_in(stage, other) > 900
