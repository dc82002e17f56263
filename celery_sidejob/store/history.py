"""The history of jobs and of durable tasks.

Of a job: rows of `run_history`, one for each ended run, and of `job_log`, its own entries. Of durable tasks: rows of
`task_history`, one for each task that ended last, if `sidejob_task_history` keeps some. All are bounded.

The statement that ends a run writes its row (`ENDED`), into a ring with as many positions as runs are kept; the first
run has its own position. An entry of the log removes the oldest entry beyond the number. A process of a worker adds its
ended tasks from time to time: the end of a task does not wait for this, and tasks that a killed process has not stored
are missing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from ..model.changes import Log
from ..model.events import TaskFinished
from .statement import Reader, Statement, Transaction, arrays

ENDED = """
noted AS (
  INSERT INTO {{run_history}} AS h (job_id, place, run_no, worker, began_at, ended_at, how, detail)
  SELECT ended.id,
    CASE WHEN ended.run_no = 1 THEN 0 ELSE 1 + ended.run_no %% nullif(%(history)s::bigint, 0) END,
    ended.run_no, (SELECT w.ident FROM {{workers}} w WHERE w.id = %(worker_id)s),
    CASE WHEN %(kind)s = 'run' THEN ended.ran_at END, now(), %(how)s, %(detail)s::json
  FROM ended WHERE %(history)s::bigint > 0
  ON CONFLICT (job_id, place) DO UPDATE SET run_no = excluded.run_no, worker = excluded.worker,
    began_at = excluded.began_at, ended_at = excluded.ended_at, how = excluded.how, detail = excluded.detail)"""
"""The CTE that writes the row of an ended run, as SQL; `ended` is the job's new row."""

_LOG = Statement("""
WITH given AS MATERIALIZED (
  SELECT * FROM unnest(%(job_id)s::bigint[], %(age_s)s::double precision[], %(message)s::text[], %(run_no)s::bigint[],
    %(worker_id)s::bigint[], %(detail)s::text[]) WITH ORDINALITY
    AS r(job_id, age_s, what, run_no, worker_id, detail, place)),
made AS (
  INSERT INTO {job_log} (job_id, at, what, run_no, worker, detail)
  SELECT g.job_id, least(now(), clock_timestamp() - make_interval(secs => g.age_s)), g.what, g.run_no, w.ident,
    g.detail::json
  FROM given g LEFT JOIN {workers} w ON w.id = g.worker_id ORDER BY g.place)
DELETE FROM {job_log} WHERE job_id = ANY(ARRAY(SELECT job_id FROM given)) AND id = ANY(ARRAY(
  SELECT o.id FROM (SELECT job_id, count(*) AS number FROM given GROUP BY job_id) n CROSS JOIN LATERAL (
    SELECT l.id FROM {job_log} l WHERE l.job_id = n.job_id ORDER BY l.job_id, l.id DESC
    OFFSET greatest(%(keep)s::bigint - n.number, 0)) o))""")


def log(executor: Transaction, entries: Sequence[Log], *, keep: int) -> None:
    """Write entries of jobs, and remove each job's oldest entries beyond `keep`."""
    now = time.monotonic()
    given = arrays(entries, "job_id", "message", "run_no", "worker_id", "detail")
    executor.run(_LOG, **given, age_s=[now - entry.made_at for entry in entries], keep=keep)


_READ = Statement("""
SELECT created_at AS at, 0 AS step, 'made' AS what, NULL::bigint AS run_no, NULL AS worker,
  CASE WHEN created_by IS NOT NULL THEN json_build_object('by', created_by) END::text AS detail, id
FROM {jobs} WHERE id = %(job_id)s
UNION ALL
SELECT h.began_at, 1, 'claimed', h.run_no, h.worker, NULL, h.run_no FROM {run_history} h
WHERE h.job_id = %(job_id)s AND h.began_at IS NOT NULL
UNION ALL
SELECT h.ended_at, 3, h.how, h.run_no, h.worker, h.detail::text, h.run_no FROM {run_history} h
WHERE h.job_id = %(job_id)s
UNION ALL
SELECT j.ran_at, 1, 'claimed', j.run_no, (SELECT w.ident FROM {workers} w WHERE w.id = j.worker_id), NULL, j.run_no
FROM {jobs} j WHERE j.id = %(job_id)s AND j.run_kind = 'run'
UNION ALL
SELECT l.at, 2, l.what, l.run_no, l.worker, l.detail::text, l.id FROM {job_log} l WHERE l.job_id = %(job_id)s
ORDER BY 1, 2, 7""")


def read(executor: Reader, job_id: int) -> Sequence[Any]:
    """Read a job's history, oldest first; empty if there is no such job."""
    return executor.run(_READ, job_id=job_id)


_LASTED = Statement("""
SELECT j.id, extract(epoch FROM h.ended_at - h.began_at)::double precision AS lasted_s
FROM unnest(%(job_ids)s::bigint[]) AS i(id) CROSS JOIN LATERAL (
    SELECT x.id, x.ran_at FROM {jobs} x WHERE x.id = i.id OFFSET 0) j
  CROSS JOIN LATERAL (
    SELECT r.began_at, r.ended_at FROM {run_history} r
    WHERE r.job_id = i.id AND r.began_at = j.ran_at AND r.how <> 'lost' OFFSET 0) h""")


def lasted(executor: Reader, job_ids: Iterable[int]) -> dict[int, float]:
    """Read how long the last run of each job took.

    A job is missing if that run goes on or is not in the history, or if it was lost: its end is unknown.
    """
    return {row.id: row.lasted_s for row in executor.run(_LASTED, job_ids=list(job_ids))}


_ADD_TASKS = Statement("""
WITH made AS (
  INSERT INTO {task_history} (task_id, task, queue, how, ended_at, lasted_s)
  SELECT r.task_id, r.task, r.queue, r.how, now() - make_interval(secs => r.age_s), r.lasted_s
  FROM unnest(%(task_id)s::text[], %(task)s::text[], %(queue)s::text[], %(how)s::text[],
      %(age_s)s::double precision[], %(lasted_s)s::double precision[])
    AS r(task_id, task, queue, how, age_s, lasted_s))
DELETE FROM {task_history} WHERE id = ANY(ARRAY(
  SELECT h.id FROM {task_history} h ORDER BY h.id DESC
  OFFSET greatest(%(keep)s::bigint - %(number)s::bigint, 0::bigint)))""")


def add_tasks(executor: Transaction, ended: Sequence[TaskFinished], *, keep: int) -> None:
    """Add tasks that have ended, and forget the oldest beyond `keep`."""
    now = time.monotonic()
    executor.run(
        _ADD_TASKS,
        **arrays(ended, "task_id", "task", "queue", "lasted_s"),
        how=[str(each.how) for each in ended],
        age_s=[now - each.at for each in ended],
        number=len(ended),
        keep=keep,
    )


_TASKS = Statement("""
SELECT h.task_id, h.task, h.how AS status, h.queue, h.ended_at, h.lasted_s FROM {task_history} h
WHERE (%(task)s::text IS NULL OR h.task = %(task)s) AND (%(queue)s::text IS NULL OR h.queue = %(queue)s)
ORDER BY h.ended_at DESC, h.id DESC LIMIT %(limit)s""")


def tasks(executor: Reader, *, task: str | None, queue: str | None, limit: int) -> Sequence[Any]:
    """Read the matching tasks that ended last, the newest first."""
    return executor.run(_TASKS, task=task, queue=queue, limit=limit)
