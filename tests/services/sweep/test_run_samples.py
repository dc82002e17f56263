"""The totals of runs, noted once a minute."""

from __future__ import annotations

from celery_sidejob.inspection.statistics import StatisticsViews
from celery_sidejob.services.sweep.prune import RunSamples
from celery_sidejob.services.sweep.sweep import Sweep
from tests.tools.in_process import Stage

COUNT = """
    INSERT INTO tallies AS t (day, queue, task, step, measure, bucket, number, total_us, squares_us)
    SELECT d.day, 'mail', 'send', s.step, m.measure, 3, m.number, 0, 0
    FROM unnest(ARRAY['1970-01-01', current_date]) d(day), unnest(ARRAY['', 'charge']) s(step),
      (VALUES ('run', %s), ('failure', %s), ('wait', 9)) m(measure, number)
    ON CONFLICT (day, queue, task, step, measure, bucket) DO UPDATE SET number = t.number + excluded.number"""


def age(stage: Stage, seconds: int) -> None:
    stage.sql("UPDATE run_samples SET taken_at = taken_at - make_interval(secs => %s)", seconds)


def test_runs_are_the_difference_of_two_samples(stage: Stage) -> None:
    duty, views = RunSamples(Sweep(stage.runtime)), StatisticsViews(stage.runtime)
    assert views.lately() == [], "no time is known before the first sample"
    assert duty.run_once()["runs_sampled"] == 1
    stage.sql(COUNT, 5, 2)
    age(stage, 60)
    assert duty.run_once()["runs_sampled"] == 1
    stage.sql(COUNT, 3, 0)
    assert [(runs, failures) for _, runs, failures in views.lately()] == [(5, 2), (3, 0)]


def test_whatever_sweeps_there_is_a_sample_a_minute(stage: Stage) -> None:
    for _ in range(3):
        RunSamples(Sweep(stage.runtime)).run_once()
    assert stage.row_counts()["run_samples"] == 1


def test_samples_are_kept_for_a_day(stage: Stage) -> None:
    duty = RunSamples(Sweep(stage.runtime))
    duty.run_once()
    age(stage, 25 * 3600 - 60)
    duty.run_once()
    assert stage.row_counts()["run_samples"] == 2
    age(stage, 60)
    duty.run_once()
    assert stage.row_counts()["run_samples"] == 2
