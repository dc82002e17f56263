"""Packets that a run takes: whose they are, and when they are free."""

from __future__ import annotations

from celery_sidejob import Job
from celery_sidejob.model.changes import PortKey
from celery_sidejob.operations.runs import recovery
from celery_sidejob.store import packets
from tests.tools.in_process import Stage


def take(stage: Stage, port: PortKey, job: Job, run_no: int) -> list[str]:
    def work(executor: packets.Transaction) -> list[str]:
        return [row.value for row in packets.take(executor, port, job_id=job.id, run_no=run_no, limit=10)]

    return stage.runtime.connections.transact("take", work)


def test_what_an_older_run_takes_late_is_free_for_the_jobs_current_run(stage: Stage) -> None:
    other = stage.job()
    other.output("o").write(1)
    port: PortKey = (other.id, "out", "o")
    job = stage.job()
    zombie = stage.claim(job)
    assert zombie is not None
    assert recovery.rescue(stage.runtime, job.id, run_no=1, worker_id=zombie.worker_id, own=True)
    heir = stage.claim(job)
    assert heir is not None

    assert take(stage, port, job, zombie.run_no) == ["1"]
    assert [packet.value for packet in other.output("o").peek()] == [1]
    assert take(stage, port, job, heir.run_no) == ["1"]
    assert take(stage, port, job, zombie.run_no) == []
    assert other.output("o").peek() == []
    stage.perform(heir)
