"""A store with a million rows of each kind."""

from __future__ import annotations

import psycopg

FILL = """
INSERT INTO jobs (id, task, queue, status, run_no, ended_run, ended_at, ran_at)
  SELECT n, 'done', 'old', 'completed', 1, 1, now(), now() FROM generate_series(1, {n}) n;
INSERT INTO jobs (id, task, queue, status, run_no, ended_run, ended_at)
  VALUES ({n} + 1, 'stage.idle', 'parents', 'suspended', 1, 1, now());
INSERT INTO jobs (id, task, queue, status, run_no, ended_run, ended_at, parent_id, name)
  SELECT {n} + 1 + n, 'done', 'old', 'completed', 1, 1, now(), {n} + 1, 'child-' || n FROM generate_series(1, {n}) n;
INSERT INTO askings (task_id, job_id, closed_at, outcome, result, stored_at)
  SELECT 'closed-' || id, id, now(), 'completed', '1', now() FROM jobs WHERE status = 'completed';
INSERT INTO askings (task_id, job_id) VALUES ('parent', {n} + 1);
INSERT INTO jobs (id, task, queue)
  SELECT 2 * {n} + 1 + n, 'waiting', CASE WHEN n % 1000 = 0 THEN 'rare' ELSE 'waits' END FROM generate_series(1, {n}) n;
INSERT INTO messages (task_id, job_id, for_run, queue, published_at, next_check_at, check_interval)
  SELECT 'open-' || id, id, 1, queue, now(), now() + interval '1 hour', '30 s' FROM jobs WHERE status = 'queued';
INSERT INTO askings (task_id, job_id) SELECT 'open-' || id, id FROM jobs WHERE status = 'queued';
INSERT INTO messages (task_id, task, generation, queue, body, publication, published_at, next_check_at, check_interval)
  SELECT 'task-' || n, 'mail', 1, 'mail', convert_to(repeat('x', 200), 'utf8'), json_build_object(
    'v', 1, 'about', json_build_object('headers', json_build_object('task', 'mail', 'id', 'task-' || n)), 'pad',
    repeat('y', 500))::text, now(), now() + interval '1 hour', '30 s' FROM generate_series(1, {n}) n;
INSERT INTO timers (job_id, due_at, ask, accepted)
  SELECT n, now() + interval '1 hour' + n * interval '1 ms', 'run', true FROM generate_series(1, {n}) n;
INSERT INTO jobs (id, task, queue, status, run_no, ended_run, ended_at, error)
  SELECT 3 * {n} + 1 + n, 'broken', 'old', 'failed', 1, 1, now(), '{{"type": "KeyError", "message": "x"}}'
  FROM generate_series(1, {n} / 2) n;
INSERT INTO dead (job_id, task_id, task, queue, reason, error, traceback, payload)
  SELECT id, 'dead-' || id, task, queue, 'failed', 'KeyError: ' || id, repeat('line of a traceback' || chr(10), 20),
    '{{"v": 1}}' FROM jobs WHERE status = 'failed';
INSERT INTO dead (task_id, task, queue, reason, error, traceback, payload, body)
  SELECT 'buried-' || n, 'mail-' || n % 50, 'mail', 'lost', 'Lost: ' || n,
    repeat('line of a traceback' || chr(10), 20), json_build_object(
      'v', 2, 'publication', '{{"v": 1, "about": {{}}}}', 'generation', 1, 'losses', 3, 'due_at', now()), 'x'
  FROM generate_series(1, {n} / 2) n;
INSERT INTO ports (job_id, direction, name, channels)
  SELECT n, 'in', 'a', ARRAY['/c/' || n % 1000] FROM generate_series(1, {n}) n;
INSERT INTO subscriptions (channel, job_id, port_id) SELECT channels[1], job_id, id FROM ports;
INSERT INTO packets (port_id, value)
  SELECT (SELECT id FROM ports WHERE job_id = {n} LIMIT 1), to_json(n) FROM generate_series(1, {n}) n;
INSERT INTO state SELECT n, 'k', '1' FROM generate_series(1, {n}) n;
INSERT INTO aliases SELECT 'alias-' || n, n FROM generate_series(1, {n}) n;
INSERT INTO tags (tag, job_id) SELECT 'tag-' || n % 10000, n FROM generate_series(1, {n}) n;
INSERT INTO tracked (job_id) SELECT n FROM generate_series(1, {n}) n;
INSERT INTO run_history SELECT n, 0, 1, 'worker', now(), now(), 'completed' FROM generate_series(1, {n}) n;
INSERT INTO job_log (job_id, at, what) SELECT n, now(), 'entry' FROM generate_series(1, {n}) n;
INSERT INTO duplicates (task_id, call, tried, kept_until)
  SELECT 'task-' || n, 'c', '{{}}', now() + interval '1 hour' + n * interval '1 ms' FROM generate_series(1, {n}) n;
SELECT setval('jobs_id_seq', 4 * {n} + 1);
VACUUM ANALYZE"""
"""`{n}` is the number of rows; the parent of so many children is job `{n}` + 1."""


def fill(url: str, rows: int) -> None:
    """Insert all rows."""
    options = "-c search_path=sidejob -c synchronous_commit=off"
    with psycopg.connect(url, autocommit=True, options=options) as connection:
        connection.execute("SET session_replication_role = replica")  # the foreign keys are as they should be
        for statement in FILL.format(n=rows).split(";\n"):
            connection.execute(statement)
