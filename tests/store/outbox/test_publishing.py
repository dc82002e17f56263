"""Rows of the outbox, as the sweeper asks for them."""

from __future__ import annotations

from celery_sidejob.store.outbox import publishing
from tests.tools.in_process import Stage


def test_what_somebody_is_claiming_is_passed_over_by_a_look_at_its_queue(stage: Stage) -> None:
    jobs = [stage.job() for _ in range(3)]
    stage.sql("UPDATE messages SET published_at = now(), next_check_at = now() + interval '1 hour'")
    with stage.connect(autocommit=False) as claimer:
        claimer.execute("UPDATE messages SET locked_by = %s, locked_at = now() WHERE job_id = %s",
                        (stage.worker_id, jobs[0].id))  # fmt: skip
        looked = stage.runtime.connections.transact(
            "look", lambda executor: publishing.republish_in(executor, jobs[0].queue), within_s=10.0
        )
        assert looked == 2
        claimer.rollback()
    unpublished = stage.sql("SELECT job_id FROM messages WHERE published_at IS NULL ORDER BY job_id")
    assert unpublished == [(jobs[1].id,), (jobs[2].id,)]


def test_a_queue_should_have_what_is_due_though_its_mark_is_late(stage: Stage) -> None:
    marked, late, backing_off = (stage.job() for _ in range(3))
    stage.sql("UPDATE messages SET published_at = NULL, due_at = now() - interval '1 s'")
    stage.sql("UPDATE messages SET published_at = now() WHERE job_id = %s", marked.id)
    stage.sql("UPDATE messages SET due_at = now() + interval '1 hour' WHERE job_id = %s", backing_off.id)

    assert publishing.in_queue(stage.runtime.connections, late.queue, limit=10) == 2


def test_a_job_is_not_published_before_its_backoff_is_over(stage: Stage) -> None:
    stage.job()
    stage.sql("UPDATE messages SET published_at = NULL, due_at = now() + interval '1 hour', next_check_at = now()")
    assert stage.sidejob.poll().published == 0
    stage.sql("UPDATE messages SET due_at = now(), next_check_at = now()")
    assert stage.sidejob.poll().published == 1
