"""What follows the commit of a transaction that was lent to us, where nobody tells of the commit."""

from __future__ import annotations

from celery_sidejob import Job, RunningJob
from tests.tools.in_process import Stage


def test_a_run_learns_of_psycopgs_commit_and_does_what_follows_it(stage: Stage) -> None:
    """Without a sweep: jobs that the unit made are published, and what it asked of others is applied."""
    other = stage.job()
    stage.drain()
    made: list[Job] = []
    seen: list[tuple[list[tuple[bool]], str]] = []

    def look() -> None:
        published = stage.sql("SELECT published_at IS NOT NULL FROM messages WHERE job_id = %s", made[0].id)
        seen.append((published, other.refresh().status))

    def body(job: RunningJob) -> None:
        with stage.connect(autocommit=False) as own:
            with job.unit(transaction=own):
                made.append(stage.sidejob.enqueue(stage.idle))
                other.run()
            own.commit()
        stage.outside(look)
        job.checkpoint()
        stage.outside(look)

    stage.inside(body)
    assert seen == [([(False,)], "completed"), ([(True,)], "queued")]
