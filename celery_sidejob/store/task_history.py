"""Rows of `task_history`: the durable tasks that ended last, if `sidejob_task_history` keeps some.

A process of a worker adds its ended tasks from time to time, like `tallies`: the end of a task does not wait for this,
and tasks that a killed process has not stored are missing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ..model.events import TaskFinished
from .statement import Reader, Statement, Transaction

_ADD = Statement("""
WITH made AS (
  INSERT INTO {task_history} (task_id, task, queue, how, ended_at, lasted_s)
  SELECT r.task_id, r.task, r.queue, r.how, now() - make_interval(secs => r.age_s), r.lasted_s
  FROM unnest(%(task_ids)s::text[], %(tasks)s::text[], %(queues)s::text[], %(hows)s::text[],
      %(ages)s::double precision[], %(lasted)s::double precision[])
    AS r(task_id, task, queue, how, age_s, lasted_s))
DELETE FROM {task_history} WHERE id = ANY(ARRAY(
  SELECT h.id FROM {task_history} h ORDER BY h.id DESC
  OFFSET greatest(%(keep)s::bigint - %(number)s::bigint, 0::bigint)))""")


def add(executor: Transaction, ended: Sequence[TaskFinished], *, keep: int) -> None:
    """Add tasks that have ended, and forget the oldest beyond `keep`."""
    now = time.monotonic()
    executor.run(
        _ADD,
        task_ids=[each.task_id for each in ended],
        tasks=[each.task for each in ended],
        queues=[each.queue for each in ended],
        hows=[str(each.how) for each in ended],
        ages=[now - each.at for each in ended],
        lasted=[each.lasted_s for each in ended],
        number=len(ended),
        keep=keep,
    )


_READ = Statement("""
SELECT h.task_id, h.task, h.how AS status, h.queue, h.ended_at, h.lasted_s FROM {task_history} h
WHERE (%(task)s::text IS NULL OR h.task = %(task)s) AND (%(queue)s::text IS NULL OR h.queue = %(queue)s)
ORDER BY h.ended_at DESC, h.id DESC LIMIT %(limit)s""")


def read(executor: Reader, *, task: str | None, queue: str | None, limit: int) -> Sequence[Any]:
    """Read the matching tasks that ended last, the newest first."""
    return executor.run(_READ, task=task, queue=queue, limit=limit)
