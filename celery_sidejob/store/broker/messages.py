"""Rows of `broker_messages`: a row is a message from its sending to its acknowledgement, or leads to one.

A row with `task_id` leads to a row of the outbox, if the broker is the store (`outbox/references.py`): what it delivers
is the message of that row, as long as that is of the same generation. A fetch that holds the row removes the
reference. Any other row has the message of a plain task.
`id` is the order within a queue and priority, and the delivery tag. A row with `due_at` waits for that time. A row with
`holder` was delivered to that consumer. It is free again as soon as the holder has no row in `broker_consumers`: so the
removal of that one row frees whatever a dead consumer held, and no index needs to contain the holder.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from ..connection.own_executor import OwnExecutor
from ..results import TOLD, Ended
from ..statement import Frequent, Reader, Statement, Transaction, arrays
from .holds import HELD, NOBODY, OVER, Holder, ended

HIGHEST_PRIORITY = 9
COUNTED = 10_000
"""Up to this many messages of a queue are counted; beyond that their number is unknown."""
PAGE = 1000
"""How many messages one statement moves or removes where there may be a million."""


class Row(NamedTuple):
    """A message to be sent; its fields are the columns, in their order, as a COPY takes them."""

    queue: str
    priority: int
    due_at: datetime | None
    headers: str
    properties: str
    body: str


_COLUMNS = ", ".join(Row._fields)
_PUT = Frequent(f"""
INSERT INTO {{broker_messages}} ({_COLUMNS})
VALUES (%(queue)s, %(priority)s, %(due_at)s, %(headers)s, %(properties)s, %(body)s)""")


def put(executor: Transaction, row: Row) -> None:
    """Send one message."""
    executor.run(_PUT, **row._asdict())


def put_all(executor: OwnExecutor, rows: Iterable[Row]) -> None:
    """Send many messages, all or none."""
    executor.copy("broker_messages", _COLUMNS, rows)


@dataclass(frozen=True, slots=True)
class Watermark:
    """Where a fetch looks: a queue and a priority, and the id from which on."""

    queue: str
    priority: int
    low: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """The answer to a fetch."""

    rows: Sequence[Any]
    """Messages in the order of the watermarks, the oldest first: id, queue, priority, returns,
    deaths, and what was sent.

    `returns` counts how often it came back after it had begun, `deaths` how often because its consumer had died. A
    reference has `task_id`, `generation` and `again`, whether it may be a copy of an earlier one. It also has what the
    row has that it leads to: `task`, for a durable task `publication`, `kept` (its body) and `expires_at`, for a job
    `job_id` and `options`. These are None if it leads to nothing any more. `held_at` and `waited_s` are not None if
    this worker holds that row from now on: then the reference is gone.
    """
    refused: frozenset[int]
    """Messages that were to be removed, and were not this consumer's any more."""
    over: frozenset[str]
    """Of the runs that have ended, those whose rows were removed."""
    is_alive: bool
    """Whether the consumer is still registered."""
    due_in_s: float | None
    """Seconds until the next message of any queue is due; None if none waits."""


# The consumers are read before the first row is locked. A row that somebody takes in between has a newer `held_at` than
# this statement, so a consumer that was registered in between loses nothing.
_IS_FREE = """m.due_at IS NULL AND (m.task_id IS NULL OR %(reads)s::boolean)
        AND (m.holder IS NULL OR m.held_at < now() - interval '1 s'
          AND m.holder <> ALL (ARRAY(SELECT c.id FROM {broker_consumers} c)))"""
# Written with `priority =` and ORDER BY id, the primary key would do as well: Postgres takes it where all messages are
# of one queue and priority, and then reads all that are not vacuumed, once for each other priority.
_FREE = f"""
  SELECT f.*, l.place
  FROM unnest(%(queue)s::text[], %(priority)s::smallint[], %(low)s::bigint[])
    WITH ORDINALITY AS l(queue, priority, low, place)
  CROSS JOIN LATERAL (
    SELECT m.id, m.queue, m.priority, m.headers, m.properties, m.body, m.task_id, m.generation, m.again,
      m.returns + (m.holder IS NOT NULL)::int AS returns, m.deaths + (m.holder IS NOT NULL)::int AS deaths
    FROM {{broker_messages}} m
    WHERE m.queue = l.queue AND (m.priority, m.id) >= (l.priority, l.low) AND m.priority <= l.priority
      AND {_IS_FREE}
    ORDER BY m.priority, m.id LIMIT %(room)s FOR UPDATE SKIP LOCKED) AS f"""

_KEPT = """LEFT JOIN LATERAL (
    SELECT k.publication, k.body, k.expires_at, k.job_id, coalesce(j.task, k.task) AS task, a.options::text AS options
    FROM {messages} k LEFT JOIN {jobs} j ON j.id = k.job_id LEFT JOIN {askings} a ON a.task_id = k.task_id
    WHERE k.task_id = t.task_id AND coalesce(k.generation::bigint, k.for_run) = t.generation
  ) k ON t.task_id IS NOT NULL"""
_DELIVERED = """t.id, t.queue, t.priority, t.returns, t.deaths, t.headers, t.properties, t.body, t.task_id,
  t.generation, t.again, k.task, k.publication, k.body AS kept, k.expires_at, k.job_id, k.options"""

# What is done is removed before anything is locked: `free` asks for the number of `gone`. A fetch may lock a row that
# somebody else has just taken, finds out, and keeps the lock to its end. So whoever removes a row may wait for a fetch;
# if it had locked other rows before, as its own fetch does, each could wait for the other.
_FETCH = Frequent(f"""
WITH gone AS (
  DELETE FROM {{broker_messages}} m WHERE m.id = ANY(%(done)s::bigint[]) AND m.holder = %(holder)s RETURNING m.id),
{OVER},
free AS MATERIALIZED ({_FREE}
  WHERE EXISTS (SELECT FROM {{broker_consumers}} c WHERE c.id = %(holder)s)
    AND (SELECT count(*) FROM gone) <= cardinality(%(done)s::bigint[]) LIMIT %(room)s),
{HELD},
acknowledged AS (DELETE FROM {{broker_messages}} m USING held h WHERE m.id = h.reference),
taken AS (
  UPDATE {{broker_messages}} m
  SET holder = %(holder)s, held_at = now(), returns = free.returns, deaths = free.deaths
  FROM free WHERE m.id = free.id AND NOT EXISTS (SELECT FROM held h WHERE h.reference = free.id))
SELECT {_DELIVERED}, h.held_at, h.waited_s, s.gone, s.over, s.is_alive, s.due_in_s, s.told
FROM (SELECT
    CASE WHEN (SELECT count(*) FROM gone) < cardinality(%(done)s::bigint[])
      THEN ARRAY(SELECT g.id FROM gone g) END AS gone,
    ARRAY(SELECT o.task_id FROM over o) AS over, {TOLD},
    EXISTS (SELECT FROM {{broker_consumers}} c WHERE c.id = %(holder)s) AS is_alive,
    (SELECT extract(epoch FROM min(d.due_at) - now())::double precision
      FROM {{broker_messages}} d WHERE d.due_at IS NOT NULL) AS due_in_s) AS s
LEFT JOIN free t ON true {_KEPT} LEFT JOIN held h ON h.reference = t.id ORDER BY t.place, t.id""")


def fetch(
    executor: Transaction,
    *,
    holder: int,
    done: Sequence[int],
    watermarks: Sequence[Watermark],
    room: int,
    reads: bool,
    worker: Holder = NOBODY,
    over: Sequence[Ended] = (),
) -> Fetched:
    """Remove what this consumer has acknowledged, and take the next messages for it, at most `room`.

    References are left to others unless it `reads` what they lead to. Its `worker` holds from now on the rows that it
    may, and the references to them are removed. Also removes the rows of runs that are `over`,
    and keeps their results.
    """
    found = executor.run(
        _FETCH,
        holder=holder,
        done=list(done),
        room=room,
        reads=reads,
        **arrays(watermarks, "queue", "priority", "low"),
        **worker.parameters,
        **ended(over),
    )
    first = found[0]
    refused = frozenset() if first.gone is None else frozenset(done) - frozenset(first.gone)
    rows = found if first.id is not None else ()
    return Fetched(rows, refused, frozenset(first.over), first.is_alive, first.due_in_s)


_TAKE = Frequent(f"""
WITH free AS MATERIALIZED ({_FREE} LIMIT %(room)s),
taken AS (DELETE FROM {{broker_messages}} m USING free WHERE m.id = free.id)
SELECT {_DELIVERED} FROM free t {_KEPT} ORDER BY t.place, t.id""")


def take(executor: Transaction, *, watermarks: Sequence[Watermark], room: int, reads: bool) -> Sequence[Any]:
    """Take messages out that nobody will acknowledge; what the caller does not handle is lost."""
    return executor.run(_TAKE, room=room, reads=reads, **arrays(watermarks, "queue", "priority", "low"))


_REMOVE = Frequent(f"""
WITH gone AS (
  DELETE FROM {{broker_messages}} m WHERE m.id = ANY(%(done)s::bigint[]) AND m.holder = %(holder)s RETURNING m.id),
{OVER}
SELECT ARRAY(SELECT g.id FROM gone g) AS gone, ARRAY(SELECT o.task_id FROM over o) AS over, {TOLD}""")


def remove(
    executor: Transaction, *, holder: int, done: Sequence[int], over: Sequence[Ended] = ()
) -> tuple[frozenset[int], frozenset[str]]:
    """Remove what this consumer has acknowledged, and the rows of runs that are `over`, whose results it keeps.

    Returns the messages that were not its own any more, and the runs whose rows were removed.
    """
    found = executor.run(_REMOVE, holder=holder, done=list(done), **ended(over))[0]
    return frozenset(done).difference(found.gone), frozenset(found.over)


_RELEASE = Statement("""
UPDATE {broker_messages} m
SET holder = NULL, held_at = NULL, returns = m.returns + (m.id = ANY(%(begun)s::bigint[]))::int
WHERE m.id = ANY(%(ids)s::bigint[]) AND m.holder = %(holder)s RETURNING m.id""")


def release(executor: Transaction, *, holder: int, ids: Sequence[int], begun: Sequence[int]) -> frozenset[int]:
    """Give messages back to their places; return those that were not this consumer's any more.

    Of those that were `begun`, the delivery counts.
    """
    found = executor.run(_RELEASE, holder=holder, ids=list(ids), begun=list(begun))
    return frozenset(ids).difference(row.id for row in found)


_PROMOTE = Statement("""
WITH due AS MATERIALIZED (
  SELECT m.id FROM {broker_messages} m WHERE m.due_at <= now() ORDER BY m.due_at LIMIT %(at_most)s
  FOR UPDATE SKIP LOCKED)
UPDATE {broker_messages} m SET due_at = NULL FROM due WHERE m.id = due.id RETURNING m.queue""")


def promote(executor: Transaction) -> Sequence[str]:
    """Make messages ready whose time has come, at most a page of them; return the queue of each."""
    return [row.queue for row in executor.run(_PROMOTE, at_most=PAGE)]


_PURGE = Statement("""
WITH page AS MATERIALIZED (
  SELECT m.id FROM {broker_messages} m WHERE m.queue = %(queue)s AND m.due_at IS NULL AND m.holder IS NULL
  ORDER BY m.priority, m.id LIMIT %(at_most)s FOR UPDATE SKIP LOCKED)
DELETE FROM {broker_messages} m WHERE m.id = ANY(ARRAY(SELECT p.id FROM page p)) RETURNING m.id""")
_PURGE_LATER = Statement("""
DELETE FROM {broker_messages} m WHERE m.queue = %(queue)s AND m.due_at IS NOT NULL RETURNING m.id""")


def purge_page(executor: Transaction, queue: str) -> int:
    """Remove ready messages of a queue that nobody holds, at most a page; return how many."""
    return len(executor.run(_PURGE, queue=queue, at_most=PAGE))


def purge_later(executor: Transaction, queue: str) -> int:
    """Remove the messages of a queue that wait for their time; reads all that wait so. Return how many."""
    return len(executor.run(_PURGE_LATER, queue=queue))


_SIZE = Statement("""
SELECT count(*) AS rows FROM (
  SELECT FROM {broker_messages} m WHERE m.queue = %(queue)s AND m.due_at IS NULL AND m.holder IS NULL
  ORDER BY m.priority, m.id LIMIT %(counted)s) AS few""")


def size(executor: Reader, queue: str) -> int:
    """Count the messages of a queue that are ready and that nobody holds, up to `COUNTED`."""
    return int(executor.run(_SIZE, queue=queue, counted=COUNTED)[0].rows)


SHOWN = 100
"""How many of the messages that wait for their time are shown."""
LOOKED_AT = 10_000
"""Of so many of all queues, the soonest first."""
_SCHEDULED = Statement(f"""
WITH soon AS (
  SELECT m.* FROM {{broker_messages}} m WHERE m.due_at IS NOT NULL ORDER BY m.due_at LIMIT %(looked_at)s)
SELECT t.due_at, {_DELIVERED} FROM (
  SELECT s.* FROM soon s WHERE s.queue = ANY(%(queues)s::text[]) ORDER BY s.due_at, s.id LIMIT %(shown)s) t {_KEPT}
ORDER BY t.due_at, t.id""")


def scheduled(executor: Reader, queues: Sequence[str]) -> Sequence[Any]:
    """Read messages of these queues that wait for their time, the soonest first, at most `SHOWN`."""
    return executor.run(_SCHEDULED, queues=list(queues), looked_at=LOOKED_AT, shown=SHOWN)
