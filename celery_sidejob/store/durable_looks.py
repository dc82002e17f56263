"""When rows of ordinary tasks are looked at, by the sweeper, and what becomes of those that are due."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from ..model.durable import Key
from .durable_messages import FIRST_LOOK_S, SINCE
from .messages import LONGEST_LOOK_S, OLDEST, QUEUES, RESERVE_S
from .statement import Executor, Statement

_CANDIDATES = Statement(
    QUEUES
    + """
SELECT x.task_id, x.published_at, x.publication FROM q CROSS JOIN LATERAL (
  SELECT due.task_id, due.look_at, due.published_at,
    CASE WHEN due.published_at IS NOT NULL AND due.doom IS NULL AND coalesce(due.expires_at > now(), true)
      THEN due.publication END AS publication
  FROM (
    SELECT m.task_id, m.look_at, m.published_at, m.doom, m.expires_at, m.publication, m.generation FROM {messages} m
    WHERE m.queue = q.queue AND m.look_at <= now() AND m.locked_by IS NULL
    ORDER BY m.look_at LIMIT %(oldest)s) due
  WHERE due.generation IS NOT NULL ORDER BY due.look_at LIMIT %(per_queue)s) x
WHERE q.queue IS NOT NULL ORDER BY x.look_at LIMIT %(limit)s""",
    since=SINCE,
)


def candidates(executor: Executor, *, per_queue: int, limit: int) -> Sequence[Any]:
    """Read which rows should be looked at now, so many of each queue and in all, without a lock.

    Returns (task_id, published_at, publication): the last only for what the broker may still have.
    """
    return executor.run(_CANDIDATES, per_queue=per_queue, limit=limit, oldest=OLDEST)


_PUBLISHED_AT = Statement(
    """
SELECT task_id, published_at FROM {messages}
WHERE task_id = ANY(%(task_ids)s::text[]) AND published_at IS NOT NULL""",
    since=SINCE,
)


def published_at(executor: Executor, task_ids: Iterable[str]) -> dict[str, datetime]:
    """Read when messages were published, of those that are kept."""
    return {row.task_id: row.published_at for row in executor.run(_PUBLISHED_AT, task_ids=list(task_ids))}


_PASS_OVER = Statement(
    """
WITH free AS MATERIALIZED (
  SELECT found.task_id FROM unnest(%(task_ids)s::text[]) AS r(task_id) CROSS JOIN LATERAL (
    SELECT m2.task_id FROM {messages} m2
    WHERE m2.task_id = r.task_id AND m2.locked_by IS NULL AND m2.published_at IS NOT NULL AND m2.doom IS NULL
      AND m2.body IS NOT NULL AND m2.look_at <= now()
    FOR UPDATE SKIP LOCKED) found)
UPDATE {messages} m SET missing_at = CASE WHEN %(are_there)s::boolean THEN NULL ELSE m.missing_at END,
  look_at = now() + least(greatest(m.look_after, now() - m.published_at), make_interval(secs => %(longest_s)s))
FROM free WHERE m.task_id = free.task_id""",
    since=SINCE,
)


def pass_over(executor: Executor, task_ids: Iterable[str], *, longest_s: float, are_there: bool) -> None:
    """Look later at rows that wait, when they have waited for as long again, but not much later than `longest_s`.

    `are_there`: they were seen, or their queue goes on behind what was seen of it.
    """
    executor.run(_PASS_OVER, task_ids=list(task_ids), longest_s=longest_s, are_there=are_there)


_STILL_WAIT = Statement(
    """
WITH free AS MATERIALIZED (
  SELECT found.task_id FROM unnest(%(task_ids)s::text[], %(generations)s::int[]) AS r(task_id, generation)
    CROSS JOIN LATERAL (
      SELECT m2.task_id, set_config('synchronous_commit', 'off', true) FROM {messages} m2
      WHERE m2.task_id = r.task_id AND m2.generation = r.generation AND m2.body IS NOT NULL
        AND m2.published_at IS NOT NULL AND m2.locked_by IS NULL AND m2.doom IS NULL AND m2.due_at <= now()
        AND m2.look_at NOT BETWEEN now() + make_interval(secs => 0.75::double precision * %(wait_s)s::double precision)
          AND now() + make_interval(secs => %(wait_s)s)
      FOR UPDATE OF m2 SKIP LOCKED) found)
UPDATE {messages} m SET look_at = now() + make_interval(secs => %(wait_s)s), missing_at = NULL
FROM free WHERE m.task_id = free.task_id RETURNING m.task_id""",
    since=SINCE,
)


def still_wait(executor: Executor, waiting: Iterable[Key], *, wait_s: float) -> int:
    """Look at messages that a worker has received in `wait_s` seconds: not before, for it vouches for them.

    And not later, however long they have waited: nobody vouches for what a dead worker had. Returns how many that were.
    """
    keys = list(waiting)
    ids, generations = [task_id for task_id, _ in keys], [generation for _, generation in keys]
    return len(executor.run(_STILL_WAIT, task_ids=ids, generations=generations, wait_s=wait_s))


_HASTEN = Statement(
    """
UPDATE {messages} m SET published_at = NULL, look_at = now()
FROM unnest(%(task_ids)s::text[], %(generations)s::int[]) AS r(task_id, generation)
WHERE m.task_id = r.task_id AND m.generation = r.generation AND m.body IS NOT NULL AND m.published_at IS NOT NULL
  AND m.locked_by IS NULL AND m.doom IS NULL AND m.due_at <= now()""",
    since=SINCE,
)


def hasten(executor: Executor, received: Iterable[Key]) -> None:
    """Have messages published again now: the worker that had received them begins them no more."""
    keys = list(received)
    ids, generations = [task_id for task_id, _ in keys], [generation for _, generation in keys]
    executor.run(_HASTEN, task_ids=ids, generations=generations)


_SEND_AGAIN = Statement(
    """
UPDATE {messages} m SET published_at = NULL, missing_at = now(), look_at = now()
FROM unnest(%(task_ids)s::text[], %(generations)s::int[]) AS r(task_id, generation)
WHERE m.task_id = r.task_id AND m.generation = r.generation AND m.body IS NOT NULL
  AND m.locked_by IS NULL AND m.doom IS NULL AND m.due_at <= now()""",
    since=SINCE,
)


def send_again(executor: Executor, begun: Iterable[Key]) -> None:
    """Have messages published again now whose runs had begun without a lock in a process that has died.

    Also where it was not noted yet that they were published: that is not noted any more.
    """
    keys = list(begun)
    ids, generations = [task_id for task_id, _ in keys], [generation for _, generation in keys]
    executor.run(_SEND_AGAIN, task_ids=ids, generations=generations)


_RESERVE = Statement(
    """
WITH free AS MATERIALIZED (
  SELECT found.task_id, found.missing_at IS NOT NULL AS missing,
    CASE WHEN found.doom IS NOT NULL THEN found.doom WHEN found.expires_at < now() THEN 'expired'
      WHEN found.published_at IS NOT NULL AND found.missing_at IS NULL THEN 'strike' ELSE 'publish' END AS fate
  FROM unnest(%(task_ids)s::text[]) AS r(task_id) CROSS JOIN LATERAL (
    SELECT m2.task_id, m2.missing_at, m2.doom, m2.expires_at, m2.published_at FROM {messages} m2
    WHERE m2.task_id = r.task_id AND m2.locked_by IS NULL AND m2.body IS NOT NULL AND m2.look_at <= now()
    FOR UPDATE SKIP LOCKED) found)
UPDATE {messages} m SET
  look_at = now() + make_interval(secs => CASE free.fate WHEN 'strike'
    THEN %(strike_s)s::double precision ELSE %(reserve_s)s::double precision END),
  missing_at = CASE free.fate WHEN 'strike' THEN now() END,
  published_at = CASE free.fate WHEN 'strike' THEN m.published_at END,
  doom = CASE free.fate WHEN 'expired' THEN 'expired' ELSE m.doom END,
  look_after = CASE WHEN free.fate = 'publish' AND m.missing_at IS NOT NULL
    THEN least(m.look_after * 2::double precision, make_interval(secs => %(longest_s)s)) ELSE m.look_after END
FROM free WHERE m.task_id = free.task_id
RETURNING free.fate, free.missing, m.task_id, m.task, m.queue, m.generation, m.expires_at, m.losses, m.on_lost,
  CASE WHEN free.fate <> 'strike' THEN m.publication END AS publication,
  CASE WHEN free.fate <> 'strike' THEN m.body END AS body""",
    since=SINCE,
)


def reserve(executor: Executor, task_ids: Sequence[str], *, strike_s: float) -> Sequence[Any]:
    """Judge rows that are due, and take those that are to be published or buried for `RESERVE_S` seconds.

    A row that was published and not heard of is struck twice: at the first look it is only noted as missing, and
    looked at again in `strike_s`. No lock is held while anything is published or buried; if this process dies
    meanwhile, the next sweeper takes them.
    """
    return executor.run(
        _RESERVE, task_ids=list(task_ids), strike_s=strike_s, reserve_s=RESERVE_S, longest_s=LONGEST_LOOK_S
    )


_LOOK_AGAIN = Statement(
    """
UPDATE {messages} SET look_at = now() + make_interval(secs => %(wait_s)s)
WHERE task_id = ANY(%(task_ids)s::text[]) AND locked_by IS NULL AND published_at IS NULL""",
    since=SINCE,
)


def look_again(executor: Executor, task_ids: Iterable[str], *, wait_s: float) -> None:
    """Have rows that were taken, and neither published nor buried, looked at again."""
    executor.run(_LOOK_AGAIN, task_ids=list(task_ids), wait_s=wait_s)


_UNHELD = Statement(
    """
SELECT task_id, queue, published_at, now() AS read_at,
  CASE WHEN published_at IS NOT NULL AND doom IS NULL AND coalesce(expires_at > now(), true) THEN publication
    END AS publication
FROM {messages}
WHERE task_id > %(after)s AND body IS NOT NULL AND (published_at IS NOT NULL OR due_at <= now()) AND locked_by IS NULL
ORDER BY task_id LIMIT %(limit)s""",
    since=SINCE,
)


def unheld(executor: Executor, *, after: str, limit: int) -> Sequence[Any]:
    """Read a page of rows that no run holds and that do not wait for their time, as `candidates` returns them.

    And when it was read, by Postgres' clock.
    """
    return executor.run(_UNHELD, after=after, limit=limit)


_LOOK_NOW = Statement(
    """
WITH free AS MATERIALIZED (
  SELECT found.task_id FROM unnest(%(task_ids)s::text[]) AS r(task_id) CROSS JOIN LATERAL (
    SELECT m2.task_id FROM {messages} m2
    WHERE m2.task_id = r.task_id AND m2.body IS NOT NULL AND m2.locked_by IS NULL
      AND (m2.published_at IS NOT NULL OR m2.due_at <= now())
    FOR UPDATE SKIP LOCKED) found)
UPDATE {messages} m SET
  published_at = CASE WHEN m.published_at >= %(seen_at)s::timestamptz THEN m.published_at END,
  look_at = CASE WHEN m.published_at < %(seen_at)s::timestamptz THEN least(now(), m.due_at)
    WHEN m.published_at IS NULL THEN m.look_at ELSE now() + make_interval(secs => %(first_look_s)s) END,
  missing_at = CASE WHEN m.published_at < %(seen_at)s::timestamptz THEN m.missing_at ELSE now() END
FROM free WHERE m.task_id = free.task_id""",
    since=SINCE,
)


def look_now(executor: Executor, task_ids: Iterable[str], *, seen_at: datetime) -> None:
    """Have rows published again that no run holds, the oldest first: what the broker had of them then is gone.

    What is not marked as published its publisher may be about to publish: a copy now might be run and done before that
    is there, which then could not be told from the first. So it is looked at when it would have been, in a moment; and
    not marked any more, as it may have been in the broker already. What was marked since may be there, or not: it is
    looked for once more as soon, and is missing if it is not found.
    """
    executor.run(_LOOK_NOW, task_ids=list(task_ids), seen_at=seen_at, first_look_s=FIRST_LOOK_S)
