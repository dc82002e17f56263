"""What is too much to be counted is estimated from a sample, and says so."""

from __future__ import annotations

import re
from typing import Any

import pytest

from celery_sidejob.inspection.jobs import JobViews
from celery_sidejob.inspection.queues import QueueViews
from celery_sidejob.store import packets, stats, trees, waiting
from tests.tools.commands import ask
from tests.tools.in_process import Stage

MANY = 20_000
FILL = f"""
INSERT INTO jobs (id, task, queue, status) SELECT n, 'stage.idle', 'long', 'queued' FROM generate_series(1, {MANY}) n;
INSERT INTO askings (task_id, job_id) SELECT 'a' || n, n FROM generate_series(1, {MANY}) n;
INSERT INTO messages (task_id, job_id, for_run, queue, due_at, next_check_at, check_interval, published_at)
  SELECT 'a' || n, n, 1, 'long', CASE WHEN n % 4 = 0 THEN now() + interval '1 day' ELSE now() - interval '1 minute' END,
    now() + interval '1 hour', '30 s', now() FROM generate_series(1, {MANY}) n;
INSERT INTO timers (job_id, due_at, ask, accepted)
  SELECT n, now() + interval '1 hour', 'run', true FROM generate_series(1, {MANY}) n;
INSERT INTO dead (task_id, task, queue, reason, payload, body)
  SELECT 'd' || n, 'mail', 'q', 'lost', '{{}}', 'x' FROM generate_series(1, {MANY}) n"""


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of more than eighty pages is judged by about eighty of them."""
    monkeypatch.setattr(stats, "EXACT_PAGES", 80)
    monkeypatch.setattr(stats, "SAMPLED_PAGES", 80)
    monkeypatch.setattr(stats, "COUNTING_PAGES", 80)


@pytest.fixture
def full(stage: Stage, sampled: None) -> Stage:
    """A store with twenty thousand of each, and a queue with three messages, one of which is running."""
    stage.sql("VACUUM FULL jobs, askings, messages, timers, dead")  # pages that other tests have left empty say little
    for statement in FILL.split(";\n"):
        stage.sql(statement)
    stage.sql(f"SELECT setval('jobs_id_seq', {MANY})")
    jobs = [stage.job(queue="short") for _ in range(3)]
    assert stage.claim(jobs[0]) is not None
    return stage


def about(number: int) -> Any:
    return pytest.approx(number, rel=0.35)


def test_what_is_very_much_is_estimated_and_the_rest_is_exact(full: Stage) -> None:
    found = full.sidejob.stats()

    assert found["estimated"] == ["dead", "jobs", "queues.long", "timers"]
    assert found["jobs"]["queued"] == about(MANY)
    long = found["queues"]["long"]
    assert (long["depth"], long["delayed"], long["running"]) == (about(MANY * 3 // 4), about(MANY // 4), 0)
    assert (found["queues"]["short"]["depth"], found["queues"]["short"]["running"]) == (2, 1)
    assert found["timers"]["waiting"] == about(MANY)
    assert found["dead"]["entries"] == about(MANY)
    assert found["results"]["unsent"] == 0
    assert all(len(str(number).rstrip("0")) <= stats.DIGITS for number in found["jobs"].values())


def test_an_estimate_changes_with_what_is_there_alone(full: Stage) -> None:
    names = ("jobs", "timers", "dead")
    first, second = full.sidejob.stats(), full.sidejob.stats()

    assert [first[name] for name in names] == [second[name] for name in names]
    assert first["queues"]["long"]["depth"] == second["queues"]["long"]["depth"]


def test_few_are_counted_however_large_their_table_is(stage: Stage, sampled: None) -> None:
    stage.job(queue="short")
    for statement in FILL.split(";\n"):
        stage.sql(statement.replace("generate_series(1, ", "generate_series(2, "))
    stage.sql("DELETE FROM timers WHERE job_id > 7")
    stage.sql("DELETE FROM messages WHERE job_id > 7")
    stage.sql("DELETE FROM jobs WHERE id > 7")
    stage.sql("DELETE FROM dead WHERE id NOT IN (SELECT id FROM dead ORDER BY id LIMIT 5)")

    found = stage.sidejob.stats()

    assert found["estimated"] == []
    assert (found["jobs"], found["timers"]["waiting"], found["dead"]["entries"]) == ({"queued": 7}, 6, 5)
    assert (found["queues"]["long"]["depth"], found["queues"]["long"]["delayed"]) == (5, 1)


def test_a_person_is_told_what_is_an_estimate(full: Stage) -> None:
    said = ask(full.app, "stats").out

    assert "~ marks an estimate from a sample" in said
    assert re.search(r"Dead set: ~\d\d,\d00", said)
    assert re.search(r"Timers: ~\d\d,\d00\.", said)
    assert "Results not sent: 0." in said


def test_drain_is_not_done_while_a_single_message_of_a_long_queue_is_due(full: Stage) -> None:
    full.sql("UPDATE messages SET due_at = now() + interval '1 day' WHERE queue = 'long'")
    inspection = QueueViews(full.runtime)
    assert "long" not in inspection.pending(horizon_s=60.0)["queues"]

    full.sql(f"UPDATE messages SET due_at = now(), next_check_at = now() + interval '9 days' WHERE job_id = {MANY}")

    assert inspection.pending(horizon_s=60.0)["queues"]["long"]["queued"] >= 1


def test_a_queue_is_counted_from_the_sample_if_it_has_more_than_is_counted_one_by_one(full: Stage) -> None:
    (row,) = (row for row in waiting.depths(full.runtime.connections) if row.queue == "long")
    assert (row.is_estimated, row.messages) == (True, about(MANY))
    assert row.soon + row.later == about(MANY)
    assert row.later_from is not None
    assert row.oldest_due_s == pytest.approx(60, abs=30)


def test_what_is_shown_of_a_job_is_counted_up_to_a_bound(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = stage.job()
    parent.input("a").write(0)
    (port,) = stage.sql("SELECT id FROM ports WHERE job_id = %s AND name = 'a'", parent.id)[0]
    stage.sql(f"INSERT INTO packets (port_id, value) SELECT {port}, '1' FROM generate_series(1, {packets.COUNTED}) n")
    stage.sql(
        "INSERT INTO jobs (task, queue, status, parent_id, name) "
        f"SELECT 't', 'q', 'completed', {parent.id}, 'c' || n FROM generate_series(1, {trees.TOO_MANY}) n"
    )

    shown = JobViews(stage.runtime).details(parent)

    assert (shown["inports"]["a"]["packets"], shown["inports"]["a"]["more_packets"]) == (10_000, True)
    assert (shown["children_count"], shown["more_children"]) == (10_000, True)
    said = " ".join(ask(stage.app, "show", str(parent.id)).out.split())
    assert " a 10,000+ " in said
    assert "(the first 100 of 10,000+)" in said
    assert "… 9,996+ more" in ask(stage.app, "tree", str(parent.id), "--limit", "5").out
    stage.sql("DELETE FROM packets WHERE value::text = '0'")
    stage.sql("DELETE FROM jobs WHERE name = 'c1'")
    shown = JobViews(stage.runtime).details(parent)
    assert (shown["inports"]["a"]["packets"], shown["inports"]["a"]["more_packets"]) == (10_000, False)
    assert (shown["children_count"], shown["more_children"]) == (10_000, False)
