"""Rows of `messages`: what was or will be given to the broker and is not finished.

A row of a job is the doorbell for its next run; a row with a `publication` is a continuation of an asking, removed
once it was published. Changes here that are made without the job's lock touch only `published_at`, `look_at` and
`look_after` of rows that no run holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from .statement import Executor, Statement

LONGEST_LOOK_S = 6 * 3600.0
OVERTAKEN_S = 5.0
"""By how much later another message was published, at least, to have overtaken one."""
RESERVE_S = 10.0
"""How long a sweeper that took a page of messages has to publish them, before another may."""
LOOK_PAGE = 500
"""Messages whose next look is moved in one transaction.

It stands in the text of the statements: for a limit that Postgres learns only with the values it plans to read a tenth
of the table, which is all of it at once.
"""

# A page is a CTE, which is read once: a sub-select in FROM is read again for each row where the planner sees fit to.
# A row is looked up for each key; `durable_messages._MARK` says why.
_MARK = Statement("""
WITH free AS MATERIALIZED (
  SELECT found.task_id FROM unnest(%(job_ids)s::bigint[], %(for_runs)s::bigint[]) AS r(job_id, for_run)
    CROSS JOIN LATERAL (
      SELECT m2.task_id, set_config('synchronous_commit', 'off', true) FROM {messages} m2
      WHERE m2.job_id = r.job_id AND m2.for_run = r.for_run AND m2.published_at IS NULL AND m2.locked_by IS NULL
      FOR UPDATE OF m2 SKIP LOCKED) found)
UPDATE {messages} m SET published_at = now(), look_at = now() + m.look_after
FROM free WHERE m.task_id = free.task_id""")


def mark_published(executor: Executor, published: Iterable[tuple[int, int]]) -> None:
    """Note that the messages of (job, run) pairs were given to the broker; a later ask's message is not touched.

    A mark that is lost with a crash of Postgres only means one more publication, so it does not wait for the disk.
    """
    pairs = list(published)
    executor.run(_MARK, job_ids=[job for job, _ in pairs], for_runs=[run for _, run in pairs])


QUEUES = """
WITH RECURSIVE q(queue) AS (
  (SELECT queue FROM {messages} ORDER BY queue LIMIT 1)
  UNION ALL SELECT (SELECT m.queue FROM {messages} m WHERE m.queue > q.queue ORDER BY m.queue LIMIT 1)
  FROM q WHERE q.queue IS NOT NULL)"""

_CANDIDATES = Statement(
    QUEUES
    + """
SELECT x.task_id FROM q CROSS JOIN LATERAL (
  SELECT due.task_id, due.look_at FROM (
    SELECT m.task_id, m.look_at, m.job_id FROM {messages} m
    WHERE m.queue = q.queue AND m.look_at <= now() AND m.locked_by IS NULL
    ORDER BY m.look_at LIMIT %(oldest)s) due
  WHERE due.job_id IS NOT NULL OR due.task_id LIKE 'continuation:%%' ORDER BY due.look_at LIMIT %(per_queue)s) x
WHERE q.queue IS NOT NULL ORDER BY x.look_at"""
)

OLDEST = 1000
"""Rows that are due, of a queue, among which those of one kind are found: those of the other may be a million."""


def candidates(executor: Executor, per_queue: int) -> list[str]:
    """Read which messages should be looked at now, at most so many of each queue, without a lock."""
    return [row.task_id for row in executor.run(_CANDIDATES, per_queue=per_queue, oldest=OLDEST)]


_RESERVE = Statement("""
WITH free AS MATERIALIZED (
  SELECT found.task_id, found.published_at FROM unnest(%(task_ids)s::text[]) AS r(task_id) CROSS JOIN LATERAL (
    SELECT m2.task_id, m2.published_at FROM {messages} m2
    WHERE m2.task_id = r.task_id AND m2.locked_by IS NULL AND m2.due_at <= now() AND m2.look_at <= now()
    FOR UPDATE SKIP LOCKED) found)
UPDATE {messages} m SET published_at = NULL, look_at = now() + make_interval(secs => %(reserve_s)s),
  look_after = CASE WHEN m.published_at IS NULL THEN m.look_after
    ELSE least(m.look_after * 2::double precision, make_interval(secs => %(longest_s)s)) END
FROM free WHERE m.task_id = free.task_id
RETURNING m.task_id, m.job_id, m.for_run, m.queue, m.publication, free.published_at IS NOT NULL AS missing,
  extract(epoch FROM now() - m.due_at)::double precision AS waited_s,
  (SELECT j.task FROM {jobs} j WHERE j.id = m.job_id) AS task,
  (SELECT j.priority FROM {jobs} j WHERE j.id = m.job_id) AS priority,
  (SELECT a.options::text FROM {askings} a WHERE a.task_id = m.task_id) AS options""")


def reserve(executor: Executor, task_ids: Sequence[str]) -> Sequence[Any]:
    """Take messages that are due for publication, or published and not heard of, for `RESERVE_S` seconds.

    No row lock is held while they are published. If this process dies meanwhile, the next sweeper takes them.
    """
    return executor.run(_RESERVE, task_ids=list(task_ids), reserve_s=RESERVE_S, longest_s=LONGEST_LOOK_S)


_READ = Statement("""
SELECT m.task_id, m.job_id, m.for_run, m.queue, m.publication, j.task, j.priority, a.options::text AS options
FROM {messages} m LEFT JOIN {jobs} j ON j.id = m.job_id LEFT JOIN {askings} a ON a.task_id = m.task_id
WHERE m.job_id = ANY(%(job_ids)s::bigint[])
  AND m.published_at IS NULL AND m.locked_by IS NULL AND m.due_at <= now()""")


def unpublished(executor: Executor, job_ids: Iterable[int]) -> Sequence[Any]:
    """Read messages of jobs that were just committed and are to be published now."""
    return executor.run(_READ, job_ids=list(job_ids))


_CONTINUE = Statement("""
INSERT INTO {messages} (task_id, queue, publication, look_at, look_after)
VALUES (%(key)s, %(queue)s, %(publication)s, now() + interval '2 s', make_interval(secs => %(look_after_s)s))
ON CONFLICT (task_id) DO NOTHING""")


def add_continuation(executor: Executor, *, key: str, queue: str, publication: str, look_after_s: float) -> None:
    """Keep a publication that follows an asking's end until the broker has it."""
    executor.run(_CONTINUE, key=key, queue=queue, publication=publication, look_after_s=look_after_s)


_REMOVE = Statement("DELETE FROM {messages} WHERE task_id = ANY(%(keys)s::text[]) AND job_id IS NULL")


def remove_continuations(executor: Executor, keys: Iterable[str]) -> None:
    """Forget continuations that were published."""
    executor.run(_REMOVE, keys=list(keys))


_SET_ASIDE = Statement("""
UPDATE {messages} SET look_at = now() + make_interval(secs => %(wait_s)s)
WHERE task_id = ANY(%(task_ids)s::text[]) AND published_at IS NULL AND locked_by IS NULL RETURNING task_id""")


def still_unpublished(executor: Executor, task_ids: Iterable[str], wait_s: float) -> int:
    """Have those of the messages that were reserved and not published looked at again, and count them."""
    return len(executor.run(_SET_ASIDE, task_ids=list(task_ids), wait_s=wait_s))


_LOOK_NOW = Statement(f"""
WITH page AS (
  SELECT task_id FROM {{messages}}
  WHERE published_at IS NOT NULL AND locked_by IS NULL AND look_at > now() AND job_id > %(after)s
  ORDER BY job_id LIMIT {LOOK_PAGE} FOR UPDATE SKIP LOCKED)
UPDATE {{messages}} m SET look_at = now(), published_at = NULL
FROM page WHERE m.task_id = page.task_id RETURNING m.job_id""")


def look_now(executor: Executor, *, after: int) -> int | None:
    """Have a page of the published and unclaimed messages published again; returns the last job id, None at the end.

    This is what follows a change of the broker.
    """
    found = [row.job_id for row in executor.run(_LOOK_NOW, after=after)]
    return max(found) if found else None


_UNCLAIMED = Statement(f"""
SELECT m.task_id, m.job_id, m.queue, m.published_at, j.priority, now() AS read_at
FROM {{messages}} m JOIN {{jobs}} j ON j.id = m.job_id
WHERE m.published_at IS NOT NULL AND m.locked_by IS NULL AND m.look_at > now() AND m.job_id > %(after)s
ORDER BY m.job_id LIMIT {LOOK_PAGE}""")


def unclaimed(executor: Executor, *, after: int) -> Sequence[Any]:
    """Read a page of jobs' messages that the broker should have, and when it was read, by Postgres' clock."""
    return executor.run(_UNCLAIMED, after=after)


_LOOK_AGAIN_NOW = Statement("""
WITH free AS MATERIALIZED (
  SELECT found.task_id FROM unnest(%(task_ids)s::text[]) AS r(task_id) CROSS JOIN LATERAL (
    SELECT m2.task_id FROM {messages} m2
    WHERE m2.task_id = r.task_id AND m2.job_id IS NOT NULL AND m2.locked_by IS NULL
      AND m2.published_at < %(seen_at)s::timestamptz
    FOR UPDATE SKIP LOCKED) found)
UPDATE {messages} m SET published_at = NULL,
  look_at = least(now(),
    m.due_at + make_interval(secs => mod(m.job_id, 1000000::bigint)::double precision / 1000000::double precision))
FROM free WHERE m.task_id = free.task_id""")


def look_again_now(executor: Executor, task_ids: Iterable[str], *, seen_at: datetime) -> None:
    """Have jobs' messages published again that the broker has lost, but for what was published since `seen_at`.

    The oldest first, and those of one transaction in the order of their jobs: rows are taken in the order of `look_at`.
    """
    executor.run(_LOOK_AGAIN_NOW, task_ids=list(task_ids), seen_at=seen_at)


_IN_QUEUE = Statement("""
SELECT count(*) AS messages FROM (
  SELECT FROM {messages} m WHERE m.queue = %(queue)s AND m.published_at IS NOT NULL AND m.locked_by IS NULL
  ORDER BY m.look_at LIMIT %(limit)s) counted""")


def in_queue(executor: Executor, queue: str, *, limit: int) -> int:
    """Count the messages that a queue of the broker should have, to a limit."""
    return int(executor.run(_IN_QUEUE, queue=queue, limit=limit)[0].messages)


_STILL_WAIT = Statement("""
WITH free AS MATERIALIZED (
  SELECT found.task_id FROM unnest(%(job_ids)s::bigint[], %(for_runs)s::bigint[]) AS r(job_id, for_run)
    CROSS JOIN LATERAL (
      SELECT m2.task_id, set_config('synchronous_commit', 'off', true) FROM {messages} m2
      WHERE m2.job_id = r.job_id AND m2.for_run = r.for_run
        AND m2.published_at IS NOT NULL AND m2.locked_by IS NULL AND m2.due_at <= now()
        AND m2.look_at < now() + make_interval(secs => 0.75::double precision * %(wait_s)s::double precision)
      FOR UPDATE OF m2 SKIP LOCKED) found)
UPDATE {messages} m SET look_at = now() + make_interval(secs => %(wait_s)s)
FROM free WHERE m.task_id = free.task_id RETURNING m.task_id""")


def still_wait(executor: Executor, waiting: Iterable[tuple[int, int]], *, wait_s: float) -> int:
    """Look at the messages of (job, run) pairs no sooner than in `wait_s` seconds: a worker has received them.

    Returns how many would have been looked at soon; the rest is not touched.
    """
    pairs = list(waiting)
    return len(
        executor.run(_STILL_WAIT, job_ids=[job for job, _ in pairs], for_runs=[run for _, run in pairs], wait_s=wait_s)
    )


_IN_BROKER = Statement(
    QUEUES
    + """
SELECT q.queue FROM q CROSS JOIN LATERAL (
  SELECT FROM {messages} m WHERE m.queue = q.queue AND m.look_at > now() AND m.look_at < 'infinity'
    AND m.published_at IS NOT NULL AND m.locked_by IS NULL ORDER BY m.look_at LIMIT 1) x
WHERE q.queue IS NOT NULL ORDER BY q.queue"""
)


def queues_in_broker(executor: Executor) -> list[str]:
    """Read which queues have messages that were published, were not claimed, and are not looked at now."""
    return [row.queue for row in executor.run(_IN_BROKER)]


_LOOK_NOW_IN = Statement(f"""
WITH page AS (
  SELECT task_id FROM {{messages}}
  WHERE queue = %(queue)s AND look_at > now() AND look_at < 'infinity'
    AND published_at IS NOT NULL AND locked_by IS NULL
  ORDER BY look_at LIMIT {LOOK_PAGE} FOR UPDATE SKIP LOCKED)
UPDATE {{messages}} m SET look_at = now(), published_at = NULL
FROM page WHERE m.task_id = page.task_id RETURNING m.task_id""")


def look_now_in(executor: Executor, queue: str) -> int:
    """Have a page of one queue's published and unclaimed messages published again; returns how many those are.

    This is what follows a deleted queue. Fewer than `LOOK_PAGE`: there are no more.
    """
    return len(executor.run(_LOOK_NOW_IN, queue=queue))


_OVERDUE = Statement(
    QUEUES
    + """
SELECT q.queue, x.messages FROM q CROSS JOIN LATERAL (
  SELECT count(*) AS messages FROM (
    SELECT FROM {messages} m WHERE m.queue = q.queue AND m.look_at <= now() AND m.locked_by IS NULL
      AND m.published_at IS NOT NULL ORDER BY m.look_at LIMIT %(limit)s) due) x
WHERE q.queue IS NOT NULL AND x.messages > 0 ORDER BY q.queue"""
)


def overdue(executor: Executor, *, limit: int) -> dict[str, int]:
    """Count the messages of each queue that were published and not heard of in time: {queue: at most `limit`}."""
    return {row.queue: row.messages for row in executor.run(_OVERDUE, limit=limit)}


_PASS_OVER = Statement(f"""
WITH page AS (
  SELECT task_id FROM {{messages}}
  WHERE queue = %(queue)s AND look_at <= now() AND locked_by IS NULL
    AND published_at > coalesce((SELECT max(r.published_at) FROM {{messages}} r
      WHERE r.queue = %(queue)s AND r.look_at = 'infinity'), '-infinity') - make_interval(secs => %(margin_s)s)
  ORDER BY look_at LIMIT {LOOK_PAGE} FOR UPDATE SKIP LOCKED)
UPDATE {{messages}} m SET missing_at = NULL,
  look_at = now() + least(greatest(m.look_after, now() - m.published_at), make_interval(secs => %(longest_s)s))
FROM page WHERE m.task_id = page.task_id RETURNING m.task_id""")


def pass_over(executor: Executor, queue: str) -> int:
    """Look later at messages of a queue in which as many wait, when they have waited for as long again; counts them.

    A page of them: fewer than `LOOK_PAGE` are the last. Not at one that was overtaken: a queue is served in order, and
    a later message of it has its run.
    """
    found = executor.run(_PASS_OVER, queue=queue, longest_s=LONGEST_LOOK_S, margin_s=OVERTAKEN_S)
    return len(found)


_HASTEN = Statement("""
UPDATE {messages} SET published_at = NULL, look_at = now()
WHERE job_id = %(id)s AND for_run = %(for_run)s AND locked_by IS NULL AND due_at <= now()""")


def hasten(executor: Executor, job_id: int, for_run: int) -> None:
    """Have one message published again now: the process that had received it died before its claim."""
    executor.run(_HASTEN, id=job_id, for_run=for_run)


_WAITING = Statement("""
SELECT m.task_id, m.job_id, m.for_run, j.task FROM {messages} m JOIN {jobs} j ON j.id = m.job_id
WHERE m.job_id = ANY(%(job_ids)s::bigint[]) AND m.locked_by IS NULL AND m.due_at <= now() ORDER BY m.job_id""")


def waiting(executor: Executor, job_ids: Iterable[int]) -> Sequence[Any]:
    """Read the messages of these jobs whose run could begin now."""
    return executor.run(_WAITING, job_ids=list(job_ids))


_OF_JOB = Statement("""
SELECT m.task_id, m.for_run, m.queue, m.due_at, m.published_at, m.locked_at, w.ident AS locked_by
FROM {messages} m LEFT JOIN {workers} w ON w.id = m.locked_by WHERE m.job_id = %(job_id)s""")


def of_job(executor: Executor, job_id: int) -> Any | None:
    """Read the message of a job's present or next run, with the worker that holds it."""
    found = executor.run(_OF_JOB, job_id=job_id)
    return found[0] if found else None


_PENDING = Statement("""
SELECT EXISTS (SELECT FROM {messages} m WHERE m.job_id = ANY(%(job_ids)s::bigint[]))
  OR EXISTS (SELECT FROM {timers} t WHERE t.job_id = ANY(%(job_ids)s::bigint[])) AS pending""")


def pending(executor: Executor, job_ids: Iterable[int]) -> bool:
    """Tell whether anything of these jobs is still to happen, now or later."""
    return bool(executor.run(_PENDING, job_ids=list(job_ids))[0].pending)
