"""A row on its way into the broker, and while its message is there.

A sweeper reserves it, and marks it as published or gives it up. Later it checks the row: the message may wait longer,
or is published again at once. Without the job's lock, statements here change only `published_at`, `suspected_at`,
`next_check_at` and `check_interval`, and only in rows that no run holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from ...model.status import Gate
from ..statement import Autocommit, Frequent, Reader, Statement, Transaction
from .arming import DUE, FIRST_CHECK_S
from .kinds import BY_TASK_ID, JOBS, KINDS, SOON, TASKS, Kind, free, parameters

LONGEST_CHECK_S = 6 * 3600.0
RESERVE_S = 10.0
"""Seconds that a sweeper has to publish a page of messages that it reserved, before another sweeper may."""

_MARK = {
    kind: Frequent(
        free(
            kind.given,
            f"""{kind.is_given} AND m.published_at IS NULL AND m.locked_by IS NULL AND m.doom IS NULL
      AND m.suspected_at IS NULL AND m.gate = {Gate.OPEN} AND m.next_check_at + interval '0 s' > now()
      AND (%(again)s::boolean OR m.on_lost IS NULL)""",
            of_row=f"m.task_id, {SOON}",
        )
        + """
UPDATE {messages} m SET published_at = now(), next_check_at = greatest(m.due_at, now()) + m.check_interval
FROM free WHERE m.task_id = free.task_id""",
    )
    for kind in KINDS
}


def mark_published(
    executor: Transaction, kind: Kind, published: Iterable[tuple[str | int, int]], *, again: bool = True
) -> None:
    """Mark the rows whose messages the broker has; a later generation is not touched.

    A mark that is lost in a crash of Postgres costs one more publication, so the commit does not wait for the disk.
    Four kinds of rows are not marked. One is already missing: the process that had received its message died before
    this mark was written, and the message must be sent again. One waits at the gate of its managed queue by now: its
    message has come and gone. One is due to be published, as it is when it was let in at that gate: it would not be.
    One was begun and lost by a run meanwhile (a lock sets `on_lost`): the mark is for the message that this run had. It
    is marked if the sweeper published it `again`.
    """
    executor.run(_MARK[kind], **parameters(published), again=again)


def _reserve(condition: str, *, missing: str, fate: str, columns: str) -> Statement:
    return Statement(
        free(
            BY_TASK_ID,
            f"m.task_id = r.task_id AND m.locked_by IS NULL AND m.next_check_at <= now() AND {condition}",
            columns=f"found.task_id, {missing} AS missing, {fate} AS fate",
            of_row="m.task_id, m.suspected_at, m.declined_at, m.doom, m.expires_at, m.published_at, m.gate",
        )
        + f"""
UPDATE {{messages}} m SET
  next_check_at = now() + make_interval(secs => CASE free.fate WHEN 'strike'
    THEN %(strike_s)s::double precision ELSE {RESERVE_S}::double precision END),
  suspected_at = CASE free.fate WHEN 'strike' THEN now() END,
  published_at = CASE free.fate WHEN 'strike' THEN m.published_at END,
  doom = CASE free.fate WHEN 'expired' THEN 'expired' ELSE m.doom END,
  check_interval = CASE WHEN free.fate = 'publish' AND free.missing
    THEN least(m.check_interval * 2::double precision, make_interval(secs => {LONGEST_CHECK_S}))
    ELSE m.check_interval END
FROM free WHERE m.task_id = free.task_id
RETURNING free.fate, free.missing, m.task_id, m.queue, {columns}"""
    )


# A missing job is published again at once, because the claim drops a copy; a durable task is struck twice. A job is
# never published before its backoff has ended. A durable task is published a moment before its eta, to give a worker
# time to fetch it. If it is due for a check while it is parked, no worker has known it for too long.
_RESERVE = {
    JOBS: _reserve(
        DUE,
        missing="found.published_at IS NOT NULL",
        fate="'publish'",
        columns="""m.job_id, m.for_run, m.publication,
  (SELECT j.task FROM {jobs} j WHERE j.id = m.job_id) AS task,
  (SELECT j.priority FROM {jobs} j WHERE j.id = m.job_id) AS priority,
  (SELECT a.options::text FROM {askings} a WHERE a.task_id = m.task_id) AS options""",
    ),
    TASKS: _reserve(
        "m.body IS NOT NULL",
        missing="(found.suspected_at IS NOT NULL AND found.declined_at IS NULL)",
        fate=f"""CASE WHEN found.doom IS NOT NULL THEN found.doom WHEN found.expires_at < now() THEN 'expired'
      WHEN found.gate = {Gate.WORKER} THEN 'unknown'
      WHEN found.published_at IS NOT NULL AND found.suspected_at IS NULL THEN 'strike' ELSE 'publish' END""",
        columns="""m.task, m.generation, m.expires_at, m.losses, m.last_loss::text AS last_loss, m.on_lost,
  CASE WHEN free.fate <> 'strike' THEN m.publication END AS publication,
  CASE WHEN free.fate <> 'strike' THEN m.body END AS body""",
    ),
}


def reserve(executor: Transaction, kind: Kind, task_ids: Sequence[str], *, strike_s: float = 0.0) -> Sequence[Any]:
    """Judge due rows, and reserve those to be published or buried for `RESERVE_S` seconds.

    No row lock is held while they are published or buried. If this process dies meanwhile, the next sweeper takes them.
    The message of a durable task that was published and then silent is struck twice: the first check only suspects it,
    and it is checked again after `strike_s` seconds.
    """
    return executor.run(_RESERVE[kind], task_ids=list(task_ids), strike_s=strike_s)


_GIVE_UP = Statement("""
UPDATE {messages} SET next_check_at = now() + make_interval(secs => %(wait_s)s)
WHERE task_id = ANY(%(task_ids)s::text[]) AND published_at IS NULL AND locked_by IS NULL""")


def give_up(connections: Autocommit, task_ids: Iterable[str], *, wait_s: float) -> None:
    """Have reserved rows that were neither published nor buried checked again in `wait_s` seconds."""
    connections.run(_GIVE_UP, task_ids=list(task_ids), wait_s=wait_s)


OVERTAKEN_S = 5.0
"""Seconds by which another message was published later, at least, to have overtaken a message."""
WAITS_S = 3600.0
"""Seconds until a message that waits is checked again, at the latest."""
CHECK_PAGE = 500
"""Messages that are read, or whose next check is moved, in one transaction.

The number is part of the statements' text. If Postgres learned the limit only with the values, it would plan to read a
tenth of the table, all at once.
"""
OLDEST = 1000
"""Due rows of a queue that are scanned for one kind of message: the other kind may have a million."""

QUEUES = """
WITH RECURSIVE q(queue) AS (
  (SELECT queue FROM {messages} ORDER BY queue LIMIT 1)
  UNION ALL SELECT (SELECT m.queue FROM {messages} m WHERE m.queue > q.queue ORDER BY m.queue LIMIT 1)
  FROM q WHERE q.queue IS NOT NULL)"""

# -- rows that are due -----------------------------------------------------------------------------------------------

_IS_OVER = "(m.doom IS NOT NULL OR coalesce(m.expires_at <= now(), false)) AS is_over"
"""Whether a durable task is doomed or has expired, as SQL: it is buried, wherever its message is."""

_CANDIDATES = {
    kind: Statement(f"""{QUEUES}
SELECT m.task_id, m.queue, m.published_at, m.suspected_at, m.is_over FROM q CROSS JOIN LATERAL (
  SELECT m.task_id, m.queue, m.next_check_at, m.published_at, m.suspected_at, {_IS_OVER}
  FROM (
    SELECT m.task_id, m.job_id, m.queue, m.generation, m.next_check_at, m.published_at, m.suspected_at, m.doom,
      m.expires_at
    FROM {{messages}} m WHERE m.queue = q.queue AND m.next_check_at <= now() AND m.locked_by IS NULL
    ORDER BY m.next_check_at LIMIT %(oldest)s) m
  WHERE {kind.rows} ORDER BY m.next_check_at LIMIT %(per_queue)s) m
WHERE q.queue IS NOT NULL ORDER BY m.next_check_at LIMIT %(limit)s""")
    for kind in KINDS
}


def candidates(executor: Reader, kind: Kind, *, per_queue: int, limit: int | None = None) -> Sequence[Any]:
    """Read rows to check now, without a lock: `per_queue` of each queue, `limit` in all.

    Returns (task_id, queue, published_at, suspected_at, is_over); `is_over`: the task is doomed, or has expired.
    """
    return executor.run(_CANDIDATES[kind], per_queue=per_queue, limit=limit, oldest=OLDEST)


# `|| ''`: only the index of held messages fits. That of the queue would lead through all that wait at its gate.
_OVERDUE = Statement(f"""
SELECT count(*) AS messages,
  greatest(now() - interval '{WAITS_S} s', (
    SELECT max(r.published_at) - interval '{OVERTAKEN_S} s' FROM {{messages}} r
    WHERE r.locked_by IS NOT NULL AND r.queue || '' = %(queue)s)) AS overtaken
FROM (
  SELECT FROM {{messages}} m WHERE m.queue = %(queue)s AND m.next_check_at <= now() AND m.locked_by IS NULL
    AND m.published_at IS NOT NULL ORDER BY m.next_check_at LIMIT %(limit)s) due""")


def overdue(executor: Reader, queue: str, *, limit: int) -> Any:
    """Count a queue's messages that were published and then silent for too long, up to a limit: (messages, overtaken).

    A message that was published before `overtaken` was overtaken, because a later one has its run, or has waited for
    `WAITS_S`.
    """
    return executor.run(_OVERDUE, queue=queue, limit=limit)[0]


# -- rows that may wait longer ---------------------------------------------------------------------------------------

_POSTPONE = Statement(
    free(
        BY_TASK_ID,
        """m.task_id = r.task_id AND m.locked_by IS NULL AND m.published_at IS NOT NULL AND m.doom IS NULL
      AND m.next_check_at <= now()""",
    )
    + f"""
UPDATE {{messages}} m SET suspected_at = NULL, next_check_at = now()
    + least(greatest(m.check_interval, now() - m.published_at), interval '{WAITS_S} s')
FROM free WHERE m.task_id = free.task_id"""
)


def postpone(executor: Transaction, task_ids: Iterable[str]) -> None:
    """Postpone the check of messages that wait until they have waited as long again, but by at most `WAITS_S`."""
    executor.run(_POSTPONE, task_ids=list(task_ids))


# The check of a durable task may be an hour away, because it was seen waiting in the broker, where it no longer is. The
# check is therefore also moved nearer. The check of a job is only postponed.
_FAR = {
    JOBS: "m.next_check_at < now() + make_interval(secs => 0.75::double precision * %(wait_s)s::double precision)",
    TASKS: """m.next_check_at NOT BETWEEN
        now() + make_interval(secs => 0.75::double precision * %(wait_s)s::double precision)
        AND now() + make_interval(secs => %(wait_s)s)""",
}
_VOUCH = {
    kind: Statement(
        free(
            kind.given,
            f"""{kind.is_given} AND m.published_at IS NOT NULL AND m.locked_by IS NULL AND m.doom IS NULL
      AND {DUE} AND {far}""",
            of_row=f"m.task_id, {SOON}",
        )
        + """
UPDATE {messages} m SET next_check_at = now() + make_interval(secs => %(wait_s)s), suspected_at = NULL
FROM free WHERE m.task_id = free.task_id RETURNING m.task_id"""
    )
    for kind, far in _FAR.items()
}


def vouch(connections: Autocommit, kind: Kind, received: Iterable[tuple[str | int, int]], *, wait_s: float) -> int:
    """Move the check of messages that a worker has received to `wait_s` seconds from now: the worker vouches for them.

    Nobody vouches for the messages of a dead worker. Returns the number of messages whose check was moved.
    """
    return len(connections.run(_VOUCH[kind], **parameters(received), wait_s=wait_s))


# -- rows that are published again at once ---------------------------------------------------------------------------

# The publisher of a durable task relies on being alone for `FIRST_CHECK_S`: an unmarked row is left to it.
_HASTEN = {
    kind: Statement(f"""
UPDATE {{messages}} m SET published_at = NULL, next_check_at = now(), gate = {Gate.OPEN}
FROM {kind.given}
WHERE {kind.is_given} AND m.locked_by IS NULL AND m.doom IS NULL AND {DUE}{unless_unpublished}""")
    for kind, unless_unpublished in {JOBS: "", TASKS: " AND m.published_at IS NOT NULL"}.items()
}


def hasten(connections: Autocommit, kind: Kind, received: Iterable[tuple[str | int, int]]) -> None:
    """Have messages published again now: the process that had received them will not begin them."""
    connections.run(_HASTEN[kind], **parameters(received))


_IS_SENT = f"m.gate = {Gate.OPEN} AND (m.published_at IS NOT NULL OR m.due_at <= now())"
"""The condition that the message of a row `m` may be in the broker, as SQL.

A due row that is not marked counts: its mark may only be late.
"""
# Rows due by now are checked anyway. But the message of a due and unmarked row may have been in the broker.
_MAY_BE_THERE = {JOBS: "m.next_check_at > now()", TASKS: "m.generation IS NOT NULL"}
_IN_BROKER = {
    kind: Statement(f"""
SELECT m.{kind.key} AS key, m.task_id, m.queue, now() AS read_at
FROM {{messages}} m WHERE m.{kind.key} > %(after)s AND m.locked_by IS NULL AND {may_be_there}
  AND {_IS_SENT}
ORDER BY m.{kind.key} LIMIT {CHECK_PAGE}""")
    for kind, may_be_there in _MAY_BE_THERE.items()
}


def in_broker(executor: Reader, kind: Kind, *, after: str | int) -> Sequence[Any]:
    """Read a page of rows whose message should be in the broker, in the order of their `key`.

    Returns (key, task_id, queue, read_at); `read_at` is the time of the read, by Postgres' clock.
    """
    return executor.run(_IN_BROKER[kind], after=after)


# The claim drops a copy of a job's message. A copy of a durable task's message could be run and done before the first
# message arrives. A task marked meanwhile, or not at all, is therefore looked for once more.
_REPUBLISH = {
    JOBS: Statement(
        free(
            BY_TASK_ID,
            f"""m.task_id = r.task_id AND m.job_id IS NOT NULL AND m.locked_by IS NULL AND m.gate = {Gate.OPEN}
      AND (m.published_at < %(seen_at)s::timestamptz OR m.published_at IS NULL AND m.due_at <= now())""",
        )
        + """
UPDATE {messages} m SET published_at = NULL,
  next_check_at = CASE WHEN m.published_at IS NULL THEN m.next_check_at ELSE least(now(),
    m.due_at + make_interval(secs => mod(m.job_id, 1000000::bigint)::double precision / 1000000::double precision)) END,
  suspected_at = CASE WHEN m.published_at IS NULL THEN now() END
FROM free WHERE m.task_id = free.task_id"""
    ),
    TASKS: Statement(
        free(BY_TASK_ID, f"m.task_id = r.task_id AND m.body IS NOT NULL AND m.locked_by IS NULL AND {_IS_SENT}")
        + f"""
UPDATE {{messages}} m SET
  published_at = CASE WHEN m.published_at >= %(seen_at)s::timestamptz THEN m.published_at END,
  next_check_at = CASE WHEN m.published_at < %(seen_at)s::timestamptz THEN least(now(), m.due_at)
    WHEN m.published_at IS NULL THEN m.next_check_at ELSE now() + interval '{FIRST_CHECK_S} s' END,
  suspected_at = CASE WHEN m.published_at < %(seen_at)s::timestamptz THEN m.suspected_at ELSE now() END
FROM free WHERE m.task_id = free.task_id"""
    ),
}


def republish(executor: Transaction, kind: Kind, task_ids: Iterable[str], *, seen_at: datetime) -> None:
    """Have rows that no run holds published again: their messages were not in the broker at `seen_at`.

    The oldest are published first, and jobs of one transaction in the order of their ids, because rows are taken in the
    order of `next_check_at`. A job that was published since is left alone.

    The publisher of an unmarked row may be about to publish it. The row is therefore checked when it would have been,
    in a moment, and can no longer be marked, because its message may have been in the broker already. A durable task
    that was marked since may or may not be in the broker: it is looked for once more just as soon, and is missing if
    not found.
    """
    executor.run(_REPUBLISH[kind], task_ids=list(task_ids), seen_at=seen_at)


_REPUBLISH_IN = Statement(f"""
WITH page AS (
  SELECT task_id FROM {{messages}}
  WHERE queue = %(queue)s AND next_check_at > now() AND next_check_at < 'infinity'
    AND published_at IS NOT NULL AND locked_by IS NULL
  ORDER BY next_check_at LIMIT {CHECK_PAGE} FOR UPDATE SKIP LOCKED)
UPDATE {{messages}} m SET next_check_at = greatest(now(), m.due_at), published_at = NULL
FROM page WHERE m.task_id = page.task_id RETURNING m.task_id""")


def republish_in(executor: Transaction, queue: str) -> int:
    """Have a page of one queue's published and unclaimed messages published again when due; returns their number.

    Used after a queue was deleted, or the broker was changed. Fewer than `CHECK_PAGE` means that there are no more.
    """
    return len(executor.run(_REPUBLISH_IN, queue=queue))


# -- messages that should be in the broker's queues ------------------------------------------------------------------

_IN_QUEUE = Statement(f"""
SELECT count(*) AS messages FROM (
  SELECT FROM {{messages}} m WHERE m.queue = %(queue)s AND m.locked_by IS NULL AND {_IS_SENT}
  ORDER BY m.next_check_at LIMIT %(limit)s) counted""")


def in_queue(executor: Reader, queue: str, *, limit: int) -> int:
    """Count the messages that should be in a queue of the broker, up to a limit."""
    return int(executor.run(_IN_QUEUE, queue=queue, limit=limit)[0].messages)


_QUEUES_IN_BROKER = Statement(f"""{QUEUES}
SELECT q.queue FROM q CROSS JOIN LATERAL (
  SELECT FROM {{messages}} m WHERE m.queue = q.queue AND m.next_check_at > now() AND m.next_check_at < 'infinity'
    AND m.published_at IS NOT NULL AND m.locked_by IS NULL ORDER BY m.next_check_at LIMIT 1) x
WHERE q.queue IS NOT NULL ORDER BY q.queue""")


def queues_in_broker(executor: Reader) -> list[str]:
    """Read the queues with messages that were published, were not claimed, and are not due for a check."""
    return [row.queue for row in executor.run(_QUEUES_IN_BROKER)]
