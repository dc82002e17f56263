"""The pruner removes what has been finished for longer than it is to be kept, and nothing else."""

from __future__ import annotations

import pytest

from celery_sidejob import Job, RunningJob
from celery_sidejob.services import pruner as module
from celery_sidejob.services.pruner import Pruned, Pruner
from tests.tools.in_process import Stage

pytestmark = pytest.mark.pooled_too


def soon_forgotten(stage: Stage) -> Job:
    """A job of a task whose finished jobs are kept for no time."""

    def forgettable(job: RunningJob) -> None:
        pass

    job: Job = stage.task(forgettable, name="pruner.forgettable", retention=0).enqueue()
    return job


def test_a_finished_job_goes_when_its_tasks_retention_is_over(stage: Stage) -> None:
    kept, gone = stage.job(), soon_forgotten(stage)
    stage.drain()
    assert Pruner(stage.runtime).run_once() == Pruned(jobs=1, dead=0)
    assert kept.exists
    assert not gone.exists


def test_a_job_stays_as_long_as_anything_below_it_is_not_finished(stage: Stage) -> None:
    parent = soon_forgotten(stage)
    stage.drain()
    child = parent.enqueue("stage.idle", child_name="c")
    pruner = Pruner(stage.runtime)
    assert pruner.run_once() == Pruned()
    stage.drain()
    assert pruner.run_once() == Pruned(jobs=1)
    assert not child.exists


def test_an_old_entry_of_the_dead_set_goes_together_with_its_job(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        raise ValueError("for good")

    old, young = stage.job(body), stage.job(body)
    for job in (old, young):
        with pytest.raises(ValueError, match="for good"):
            stage.run(job)
    stage.sql("UPDATE dead SET died_at = now() - interval '181 days' WHERE job_id = %s", old.id)
    assert Pruner(stage.runtime).run_once() == Pruned(dead=1)
    assert not old.exists
    assert [job.id for job in stage.sidejob.jobs(status="failed")] == [young.id]


def test_old_entries_whose_jobs_must_stay_keep_no_others(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(job: RunningJob) -> None:
        raise ValueError("for good")

    monkeypatch.setattr(module, "PAGE", 1)
    parent, other = stage.job(body), stage.job(body)
    child = stage.job(parent=parent, child_name="c")
    for job in (parent, other):
        with pytest.raises(ValueError, match="for good"):
            stage.run(job)
    stage.sql("UPDATE dead SET died_at = now() - interval '181 days'")
    pruner = Pruner(stage.runtime)

    assert [pruner.run_once() for _ in range(2)] == [Pruned(), Pruned(dead=1)]

    assert (parent.exists, child.exists, other.exists) == (True, True, False)
    stage.drain()
    assert sum(pruner.run_once().dead for _ in range(2)) == 1, "it begins anew at the end"


def test_an_old_entry_of_an_ordinary_task_goes_by_itself(stage: Stage) -> None:
    stage.sql("""
        INSERT INTO dead (task_id, task, queue, reason, payload, body, died_at)
        SELECT 't' || n, 'mail', 'q', 'lost', '{}', 'x', now() - n * interval '100 days'
        FROM generate_series(1, 3) n""")
    assert Pruner(stage.runtime).run_once() == Pruned(dead=2)
    assert stage.sql("SELECT task_id FROM dead") == [("t1",)]


def test_a_schema_with_many_jobs_is_pruned_to_its_end(stage: Stage) -> None:
    """Postgres takes small numbers of a statement for smallints, of which two do not add up to more than 32,767."""
    stage.sql("SELECT setval('jobs_id_seq', 40000)")
    job = soon_forgotten(stage)
    stage.drain()
    pruner = Pruner(stage.runtime)

    assert sum(pruner.run_once().jobs for _ in range(9)) == 1

    assert not job.exists
