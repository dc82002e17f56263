"""Rows of `parked`: jobs that are owed a run, and whose task no worker of their queue knows.

A parked job's message is due at `NEVER`: nothing publishes it, no claim takes it, and no look of the sweeper reads it.
A worker that comes to know the task releases it. Parking a job and recording what a worker serves exclude each other
(`take_turn`), so neither overlooks what the other has just committed. Whoever changes both rows of a job locks the
message first.

A forced ask has the run begin at once, and leaves the row here: the job is parked while its message is due at `NEVER`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .outbox.arming import NEVER
from .statement import Autocommit, Reader, Statement, Transaction, first

LOCK_CLASS = 0x53_4A_50_4B - 0x40_00_00_00
"""The first half of the advisory lock's key ("SJPK", made to fit as `workers.LOCK_CLASS` is)."""

SHUTDOWN_WAITS_S = 60.0
"""For how long a parked job that is terminated waits for a worker to run its shutdown."""

_TAKE_TURN = Statement("SELECT pg_advisory_xact_lock(%(lock_class)s::int, '{parked}'::regclass::oid::int)")


def take_turn(executor: Transaction) -> None:
    """Wait until nobody else parks jobs or tells what a worker serves; what follows sees what they have committed."""
    executor.run(_TAKE_TURN, lock_class=LOCK_CLASS)


_PARK = Statement(f"""
WITH stopped AS (
  UPDATE {{messages}} m SET due_at = {NEVER}, next_check_at = {NEVER}, published_at = NULL, suspected_at = now()
  FROM {{jobs}} j
  WHERE m.job_id = %(job_id)s::bigint AND m.for_run = %(for_run)s::bigint AND m.locked_by IS NULL AND m.due_at <= now()
    AND j.id = m.job_id AND j.task = %(task)s::text AND NOT EXISTS (
      SELECT FROM {{served}} s JOIN {{workers}} w ON w.id = s.worker_id
      WHERE w.dead_at IS NULL AND m.queue = ANY(s.queues) AND j.task = ANY(s.tasks))
  RETURNING m.job_id, m.queue, j.status)
INSERT INTO {{parked}} AS p (job_id, task, queue, end_at)
SELECT job_id, %(task)s::text, queue,
  CASE WHEN status = 'terminating' THEN now() + make_interval(secs => {SHUTDOWN_WAITS_S}) END
FROM stopped
ON CONFLICT (job_id) DO UPDATE
  SET task = excluded.task, queue = excluded.queue, parked_at = excluded.parked_at, end_at = excluded.end_at
RETURNING p.queue, p.end_at IS NOT NULL AS terminating""")


def park(executor: Transaction, job_id: int, *, for_run: int, task: str) -> Any | None:
    """Park a job whose run is owed now, unless a live worker of its queue knows the task; it is this caller's turn.

    Returns (queue, terminating) of the job, None if it was not parked: a worker knows it, its run has begun, or the
    message that was received is stale.
    """
    return first(executor.run(_PARK, job_id=job_id, for_run=for_run, task=task))


_LONGEST = "make_interval(secs => 6::double precision * %(lost_after_s)s::double precision)"
_SEND_AGAIN = Statement(f"""
UPDATE {{messages}} SET published_at = NULL, suspected_at = now(),
  next_check_at = now() + least(check_interval, {_LONGEST}) / 6::double precision,
  check_interval = least(check_interval * 2::double precision, {_LONGEST})
WHERE job_id = %(job_id)s::bigint AND for_run = %(for_run)s::bigint AND locked_by IS NULL AND due_at <= now()
RETURNING extract(epoch FROM next_check_at - now())::double precision AS wait_s""")


def send_again(executor: Transaction, job_id: int, *, for_run: int, lost_after_s: float) -> float | None:
    """Have the message of a run sent again that is still owed: the worker that got it does not know the task.

    Returns in how many seconds; None if the run is not owed now.
    First after a sixth of the time after which a message counts as missing, then after twice as long each time, up to
    that time. A worker that takes all messages of a long queue so does not keep the sweeper busy. A mark that this
    message was published comes too late (`publishing.mark_published`).
    """
    row = first(executor.run(_SEND_AGAIN, job_id=job_id, for_run=for_run, lost_after_s=lost_after_s))
    return None if row is None else float(row.wait_s)


RELEASED_TOGETHER = 5_000

_RELEASE = Statement(f"""
WITH page AS MATERIALIZED (
  SELECT p.job_id FROM {{parked}} p WHERE p.queue = ANY(%(queues)s::text[]) AND p.task = ANY(%(tasks)s::text[])
  ORDER BY p.job_id LIMIT {RELEASED_TOGETHER}),
held AS MATERIALIZED (
  SELECT m.job_id FROM page JOIN {{messages}} m ON m.job_id = page.job_id ORDER BY m.job_id FOR UPDATE OF m),
released AS (
  UPDATE {{messages}} m SET due_at = now(), next_check_at = now()
  FROM held WHERE m.job_id = held.job_id AND m.due_at = {NEVER} RETURNING m.job_id),
gone AS (
  DELETE FROM {{parked}} p USING page WHERE p.job_id = page.job_id)
SELECT (SELECT count(*) FROM released) AS jobs, (SELECT count(*) FROM page) = {RELEASED_TOGETHER} AS goes_on""")


def release(executor: Transaction, *, queues: Iterable[str], tasks: Iterable[str]) -> Any:
    """Have the runs begin of the next parked jobs in these queues with these tasks; it is this caller's turn.

    Returns how many `jobs` that were, and whether it `goes_on`: there may be more. The sweeper publishes them.
    """
    return executor.run(_RELEASE, queues=list(queues), tasks=list(tasks))[0]


_RELEASE_ONE = Statement(f"""
WITH gone AS (DELETE FROM {{parked}} WHERE job_id = %(job_id)s::bigint)
UPDATE {{messages}} SET due_at = now(), next_check_at = now()
WHERE job_id = %(job_id)s::bigint AND due_at = {NEVER} RETURNING job_id""")


def release_one(executor: Autocommit | Transaction, job_id: int) -> bool:
    """Have the run of a job begin that may be parked; returns whether it was."""
    return bool(executor.run(_RELEASE_ONE, job_id=job_id))


_TO_END = Statement(f"""
SELECT p.job_id FROM {{parked}} p JOIN {{jobs}} j ON j.id = p.job_id JOIN {{messages}} m ON m.job_id = p.job_id
WHERE p.end_at <= now() AND j.status = 'terminating' AND m.due_at = {NEVER} ORDER BY p.end_at LIMIT %(limit)s""")


def to_end(executor: Reader, *, limit: int) -> list[int]:
    """Read the parked jobs that were terminated and have waited long enough for their shutdown."""
    return [row.job_id for row in executor.run(_TO_END, limit=limit)]


_COUNT = Statement(f"""
SELECT p.task, p.queue, count(*) AS jobs FROM {{parked}} p JOIN {{messages}} m ON m.job_id = p.job_id
WHERE m.due_at = {NEVER} GROUP BY p.task, p.queue ORDER BY 3 DESC, 1, 2 LIMIT %(limit)s""")


def count(executor: Reader, *, limit: int) -> Sequence[Any]:
    """Count the parked jobs of each (task, queue), the most first; reads all of them."""
    return executor.run(_COUNT, limit=limit)
