"""Runs in managed queues: a delivery there is a permit for the best job that is owed, not a name.

A queue is managed while it has a row in `queues`; the claims by name then take nothing of it. The gate of a managed
queue is open if the queue is not paused, has fewer runs than its limit, and has a token of its rate. A permit that
finds the gate closed goes by: a message of the queue is then left *at the gate*, as its row says. Nobody publishes or
looks for it until it is let in. The model is `tests/protocol_model/permits.py`.

What runs is counted by the messages that runs hold, so a death leaves no wrong number. A statement that has waited for
a lock counts as of its start; therefore the row of a queue with a limit is locked by an earlier statement of the same
transaction (`queues.lock_for_run`). Whoever frees a slot locks nothing for that. Before it lets the next run in, it
locks the queue: a permit that found no slot has then left its message at the gate.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Any

from ..model.durable import Content, Key, Terms
from ..model.status import Gate
from .broker.holds import WAITED
from .claims import BEGINS, TOKEN_TAKEN, claiming
from .outbox.arming import DUE, OWED, UNCHECKED
from .outbox.holds import HELD, LIVES
from .outbox.tasks import DIGEST, named
from .queues import AT_GATE, RATE_IS_OPEN
from .statement import Statement, Transaction, first

_OF_QUEUE = "m.queue || '' = %(queue)s"
"""The condition that a message `m` is of the queue, as SQL; no index fits it.

Where a queue has just become long, Postgres takes it for empty, and would read all of it for one job, or for the runs.
"""
_BUSY = f"""
busy AS MATERIALIZED (
  SELECT coalesce(m.limit_key, '') AS key, count(*) AS runs FROM {{messages}} m
  WHERE {_OF_QUEUE} AND m.locked_by IS NOT NULL GROUP BY 1),"""
"""The CTE with the runs in progress in a queue, for each key."""
_HAS_ROOM = "(q.run_limit IS NULL OR coalesce((SELECT sum(busy.runs) FROM busy), 0::numeric) < q.run_limit::numeric)"
_TOKEN = f"""
token AS (
  UPDATE {{queues}} q SET rate_opens_at = {TOKEN_TAKEN.format("q")} FROM best
  WHERE q.name = %(queue)s AND q.rate_interval_s IS NOT NULL AND q.paused_at IS NULL AND {RATE_IS_OPEN}
  RETURNING q.name),"""
_RANKED = f"m.rank IS NOT NULL AND m.locked_by IS NULL AND {OWED}"
"""The condition, as SQL, of the indexes by rank: a message `m` waits, at no gate but that of its queue."""
_MAY_BEGIN = f"""{DUE} AND m.locked_by IS NULL
    AND j.unit_no IS NULL AND j.blocked IS NOT TRUE AND j.run_no = m.for_run - 1
    AND j.status IN ('queued', 'terminating')
    AND (j.id = %(id)s AND j.task = %(task)s OR j.task = ANY(%(tasks)s::text[]) AND NOT EXISTS (
      SELECT FROM {{askings}} a WHERE a.job_id = j.id AND a.closed_at IS NULL
        AND (a.options->>'time_limit' IS NOT NULL OR a.options->>'soft_time_limit' IS NOT NULL)))"""
"""The condition that a message `m` with its job `j` is owed a run, and that this delivery's process may run it, as SQL.

Celery has set the time limits of the delivery that it named, before anybody knew what it will run.
"""
_UNRANKED = f"""
unranked AS MATERIALIZED (
  SELECT m.job_id FROM {{messages}} m WHERE m.job_id = %(id)s AND {_OF_QUEUE} AND m.rank IS NULL),"""
"""The CTE with the named job, if its message is older than the management of its queue: it is served by its name."""
LOOKED_AT = 100
"""Messages of each rank, or of each key, among which a permit looks for a job that its process may run."""
_IS_AHEAD = f"m.gate = {Gate.OPEN}"
_WAITS = f"m.locked_by IS NULL AND m.doom IS NULL AND m.due_at <= clock_timestamp() AND {_IS_AHEAD}"
"""The condition that a message `m` is due and not at the gate, as SQL.

The transaction has waited for the lock of its queue: what was armed or let in meanwhile is later than its `now()`.
"""
_UNDER_WAY = (
    f"m.next_check_at > now() AND m.next_check_at > clock_timestamp() AND m.next_check_at < {UNCHECKED} AND {_IS_AHEAD}"
)
"""The condition that a message `m` which is due is published, or is just being published, as SQL.

The others wait at the gate, or for the sweeper to publish them, now or again. No permit that comes is theirs, even if
it names them: then it is of an earlier run. (`now()` is the condition that an index fits.)
"""
_PLACE = f"({_UNDER_WAY}) AS has_permit, m.gate = {Gate.QUEUE} AS is_at_gate"
"""The columns, as SQL, that say where a message `m` that begins has waited; with neither, for the sweeper."""
_LEFT = f"""published_at = NULL, suspected_at = NULL, gate = {Gate.QUEUE}, next_check_at = {UNCHECKED},
  rank = coalesce(m.rank, (SELECT coalesce(j.priority, 0::smallint) FROM {{jobs}} j WHERE j.id = m.job_id))"""
"""Leaves a message at the gate, as SQL: those that have been due for the longest are let in first.

One that was committed after its queue was managed, and armed before, has its rank from now on.
"""
TRIED = 10
"""Jobs that a claim by keys tries to lock: the first of so many keys."""
_LOCKED = "FOR NO KEY UPDATE OF j SKIP LOCKED"


def _best(has_room: str, further: str = "", which: str = "true") -> str:
    """Return the CTE `best`: the best job that is owed, locked: by priority, by the time since it is due, by its id.

    A message whose backoff is not over is no candidate, however high its rank: each rank is looked at by itself. If the
    process may run none of the first `LOOKED_AT` of any rank, it runs the job that was named.

    The page of messages stands in a sub-select of its own: Postgres would take all conditions together for so rare that
    it would rather sort the whole queue than read an index in its order.
    """
    return f"""
WITH RECURSIVE ranks AS (
  (SELECT m.rank FROM {{messages}} m WHERE m.queue = %(queue)s AND {_RANKED} ORDER BY m.rank DESC LIMIT 1)
  UNION ALL
  SELECT (SELECT m.rank FROM {{messages}} m
    WHERE m.queue = %(queue)s AND m.rank < r.rank AND {_RANKED} ORDER BY m.rank DESC LIMIT 1)
  FROM ranks r WHERE r.rank IS NOT NULL),{further}{_UNRANKED}
gate AS MATERIALIZED (
  SELECT q.name, q.rate_interval_s IS NOT NULL AS has_rate FROM {{queues}} q
  WHERE q.name = %(queue)s AND q.paused_at IS NULL AND {RATE_IS_OPEN} AND q.key_limit IS NULL AND {has_room}),
ranked AS MATERIALIZED (
  SELECT found.* FROM gate CROSS JOIN ranks r CROSS JOIN LATERAL (
    SELECT j.id, m.for_run, {_PLACE} FROM (
      SELECT m.job_id, m.for_run, m.due_at, m.locked_by, m.next_check_at, m.gate FROM {{messages}} m
      WHERE m.queue = %(queue)s AND m.rank = r.rank AND {_RANKED} AND m.due_at <= now()
      ORDER BY m.due_at, m.job_id LIMIT {LOOKED_AT}) m JOIN {{jobs}} j ON j.id = m.job_id
    WHERE {_MAY_BEGIN} ORDER BY m.due_at, m.job_id LIMIT 1 {_LOCKED}) found
  WHERE NOT EXISTS (SELECT FROM unranked) LIMIT 1),
named AS MATERIALIZED (
  SELECT j.id, m.for_run, {_PLACE} FROM gate CROSS JOIN {{messages}} m JOIN {{jobs}} j ON j.id = m.job_id
  WHERE m.job_id = %(id)s AND {_OF_QUEUE} AND {_MAY_BEGIN} AND NOT EXISTS (SELECT FROM ranked) {_LOCKED}),
best AS MATERIALIZED (
  SELECT b.* FROM (SELECT * FROM ranked UNION ALL SELECT * FROM named) b WHERE {which}),"""


_KEYS = f"""
  (SELECT m.limit_key AS key FROM {{messages}} m
   WHERE m.queue = %(queue)s AND m.limit_key IS NOT NULL AND {_RANKED} ORDER BY m.limit_key LIMIT 1)
  UNION ALL
  SELECT (SELECT m.limit_key FROM {{messages}} m
    WHERE m.queue = %(queue)s AND m.limit_key > k.key AND {_RANKED} ORDER BY m.limit_key LIMIT 1)
  FROM keys k WHERE k.key IS NOT NULL"""
"""The keys of the messages that wait in a queue, each once, by its index; the last row is NULL."""

_BEST_OF_KEYS = f"""
WITH RECURSIVE keys AS ({_KEYS}),{_BUSY}
gate AS MATERIALIZED (
  SELECT q.name, q.key_limit, q.rate_interval_s IS NOT NULL AS has_rate FROM {{queues}} q
  WHERE q.name = %(queue)s AND q.paused_at IS NULL AND {RATE_IS_OPEN} AND q.key_limit IS NOT NULL
    AND {_HAS_ROOM}),
firsts AS MATERIALIZED (
  SELECT found.id, found.rank, found.due_at, s.served_at FROM gate CROSS JOIN keys k CROSS JOIN LATERAL (
    SELECT j.id, m.rank, m.due_at FROM (
      SELECT m.job_id, m.for_run, m.rank, m.due_at, m.locked_by, m.gate FROM {{messages}} m
      WHERE m.queue = %(queue)s AND m.limit_key = k.key AND {_RANKED} AND m.due_at <= now()
      ORDER BY m.rank DESC, m.due_at, m.job_id LIMIT {LOOKED_AT}) m JOIN {{jobs}} j ON j.id = m.job_id
    WHERE {_MAY_BEGIN} ORDER BY m.rank DESC, m.due_at, m.job_id LIMIT 1) found
    LEFT JOIN {{limit_keys}} s ON s.queue = %(queue)s AND s.key = k.key
  WHERE coalesce((SELECT b.runs FROM busy b WHERE b.key = k.key), 0::bigint) < gate.key_limit
  UNION ALL
  (SELECT j.id, m.rank, m.due_at, s.served_at FROM gate CROSS JOIN LATERAL (
      SELECT m.job_id, m.for_run, m.rank, m.due_at, m.locked_by, m.gate FROM {{messages}} m
      WHERE m.queue = gate.name AND m.limit_key IS NULL AND {_RANKED} AND m.due_at <= now()
      ORDER BY m.limit_key, m.rank DESC, m.due_at, m.job_id LIMIT {LOOKED_AT}) m
    JOIN {{jobs}} j ON j.id = m.job_id LEFT JOIN {{limit_keys}} s ON s.queue = gate.name AND s.key = ''
  WHERE {_MAY_BEGIN} ORDER BY m.rank DESC, m.due_at, m.job_id LIMIT 1)
  UNION ALL
  SELECT j.id, coalesce(m.rank, 0::smallint), m.due_at, now() FROM gate CROSS JOIN {{messages}} m
    JOIN {{jobs}} j ON j.id = m.job_id
  WHERE m.job_id = %(id)s AND {_OF_QUEUE} AND {_MAY_BEGIN}
    AND (m.limit_key IS NULL OR coalesce((SELECT b.runs FROM busy b WHERE b.key = m.limit_key), 0::bigint)
      < gate.key_limit)),
best AS MATERIALIZED (
  SELECT j.id, m.for_run, {_PLACE}, coalesce(m.limit_key, '') AS key FROM (
    SELECT f.id, row_number() OVER (ORDER BY f.rank DESC, f.served_at NULLS FIRST, f.due_at, f.id) AS place
    FROM firsts f ORDER BY 2 LIMIT {TRIED}) f
    JOIN {{jobs}} j ON j.id = f.id JOIN {{messages}} m ON m.job_id = j.id
  WHERE {_MAY_BEGIN} ORDER BY f.place LIMIT 1 {_LOCKED}),
turn AS (
  INSERT INTO {{limit_keys}} AS s (queue, key, served_at) SELECT %(queue)s, best.key, clock_timestamp() FROM best
  ON CONFLICT (queue, key) DO UPDATE SET served_at = excluded.served_at),"""
"""The best job among the keys that have fewer runs than the limit, locked: by priority, then the keys in turn.

It reads the first job of each key that waits; jobs without a key take turns as one more key, which has no limit. Those
are ordered by their key, too: only the index of the keys has them in that order, and the other one has all jobs with
keys before them.
"""

_BEFORE = (
    _TOKEN
    + """
before AS MATERIALIZED (
  SELECT b.id, b.wakes, best.for_run FROM best JOIN {jobs} b ON b.id = best.id
  WHERE EXISTS (SELECT FROM token) OR NOT EXISTS (SELECT FROM gate WHERE gate.has_rate)),"""
)


def _permit(which: str = "true") -> str:
    """Return the CTE `permit`: the message whose permit has come, locked: that of the named job, or another under way.

    The named job may have begun by the permit of another one, whose own permit has now come. A job that somebody has
    locked is about to begin, or to change: it is passed over if there is another, and waited for if there is none.
    The message is locked, too. A claim that has not locked the queue may have begun it since this statement's start,
    and then the next one is chosen.
    """
    waits = f"{which} AND m.queue = %(queue)s AND {_WAITS} AND {_UNDER_WAY}"
    return f"""
named_one AS MATERIALIZED (
  SELECT m.task_id FROM {{messages}} m JOIN {{jobs}} j ON j.id = m.job_id
  WHERE {which} AND m.job_id = %(id)s AND {_OF_QUEUE} AND {_WAITS} AND {_UNDER_WAY} {_LOCKED} FOR NO KEY UPDATE OF m),
another AS MATERIALIZED (
  SELECT m.task_id FROM {{messages}} m JOIN {{jobs}} j ON j.id = m.job_id
  WHERE {waits} AND NOT EXISTS (SELECT FROM named_one)
  ORDER BY m.next_check_at LIMIT 1 {_LOCKED} FOR NO KEY UPDATE OF m),
in_use AS MATERIALIZED (
  SELECT m.task_id FROM {{messages}} m
  WHERE {waits} AND m.job_id IS NOT NULL AND NOT EXISTS (SELECT FROM named_one) AND NOT EXISTS (SELECT FROM another)
  ORDER BY m.next_check_at LIMIT 1 FOR NO KEY UPDATE),
permit AS (
  SELECT task_id FROM named_one UNION ALL SELECT task_id FROM another UNION ALL SELECT task_id FROM in_use)"""


_EXCHANGED = f""",
taken AS MATERIALIZED (
  SELECT claimed.id, best.is_at_gate FROM claimed JOIN best ON best.id = claimed.id AND NOT best.has_permit),
{_permit("EXISTS (SELECT FROM taken) AND m.job_id <> (SELECT taken.id FROM taken)")},
exchanged AS (
  UPDATE {{messages}} m SET published_at = NULL, suspected_at = NULL,
    gate = CASE WHEN taken.is_at_gate THEN {Gate.QUEUE} ELSE {Gate.OPEN} END,
    next_check_at = CASE WHEN taken.is_at_gate THEN {UNCHECKED} ELSE now() END
  FROM taken, permit WHERE m.task_id = permit.task_id)"""
"""Gives another message the place of the one that has just begun without a message of its own.

The other one now waits at the gate, or for the sweeper to publish it, as the one that has begun did.
"""
_BEGUN = f"j.unit_no IS NULL AND j.run_no = before.for_run - 1 AND j.blocked IS NOT TRUE AND {LIVES}"

_CLAIM = claiming(BEGINS, _BEGUN, before=_best("q.run_limit IS NULL", which="b.has_permit") + _BEFORE)
_CLAIM_IN_LOCKED = claiming(BEGINS, _BEGUN, before=_best(_HAS_ROOM, _BUSY) + _BEFORE, then=_EXCHANGED)
_CLAIM_OF_KEYS = claiming(BEGINS, _BEGUN, before=_BEST_OF_KEYS + _BEFORE, then=_EXCHANGED)


def claim(
    executor: Transaction,
    queue: str,
    *,
    job_id: int,
    task: str,
    tasks: Collection[str],
    worker_id: int,
    most: int,
    schema: str | None,
    locked: Any = None,
) -> Sequence[Any]:
    """Begin the best run that is owed in a managed queue; the result is as that of `claims.claim`.

    The delivery names a job and its `task`; it may run a job of any of `tasks`, which have the same time limits.
    Returns nothing if the gate is closed, or no run is owed. The gate of a queue with a limit is open only to a
    transaction that has `locked` it.

    Without the lock nothing begins either if another message has to take the place of the one that begins: two
    transactions could choose the same. Asks that come during the statement are left to a further run. A job that
    somebody has locked is passed over.
    """
    statement = _CLAIM if locked is None else _CLAIM_OF_KEYS if locked.has_keys else _CLAIM_IN_LOCKED
    return executor.run(
        statement,
        queue=queue,
        id=job_id,
        task=task,
        tasks=list(tasks),
        worker_id=worker_id,
        pid=os.getpid(),
        most=most,
        schema=schema,
    )


_BEGIN = Statement(f"""
WITH{_BUSY}
best AS MATERIALIZED (
  SELECT q.name, q.rate_interval_s IS NOT NULL AS has_rate FROM {{queues}} q
  WHERE q.name = %(queue)s AND q.paused_at IS NULL AND {RATE_IS_OPEN} AND {_HAS_ROOM}
    AND EXISTS (SELECT FROM {{messages}} m WHERE m.task_id = %(task_id)s AND m.generation = %(generation)s
      AND m.locked_by IS NULL AND m.doom IS NULL AND m.body IS NOT NULL AND {OWED})),{_TOKEN}
begun AS (
  UPDATE {{messages}} m SET {HELD}, on_lost = %(on_lost)s, max_losses = %(max_losses)s
  FROM best
  WHERE m.task_id = %(task_id)s AND m.generation = %(generation)s AND m.locked_by IS NULL AND m.doom IS NULL
    AND m.body IS NOT NULL AND m.task = %(task)s AND {DIGEST} = %(digest)s AND {OWED}
    AND (EXISTS (SELECT FROM token) OR NOT best.has_rate) AND {LIVES}
  RETURNING m.pool, m.queue, {WAITED} AS waited_s)
SELECT pool, queue, waited_s FROM begun""")


def begin(executor: Transaction, key: Key, content: Content, *, queue: str, worker_id: int, terms: Terms) -> Any | None:
    """Lock the row of a durable task for a run, as `holds.begin` does, if the gate of its queue is open.

    The transaction has locked the queue. A token of the rate is spent even if the content turns out to be forged.
    """
    return first(executor.run(_BEGIN, **named(key, content), **terms._asdict(), queue=queue, worker_id=worker_id))


# -- at the gate -----------------------------------------------------------------------------------------------------

_GO_BY = Statement(f"""
WITH {_permit()}
UPDATE {{messages}} m SET {_LEFT} FROM permit WHERE m.task_id = permit.task_id""")


def go_by(executor: Transaction, queue: str, *, job_id: int) -> None:
    """Leave a job's message at the gate: the permit that has come was used for nothing."""
    executor.run(_GO_BY, queue=queue, id=job_id)


_WAIT = Statement(f"""
UPDATE {{messages}} m SET {_LEFT}
WHERE m.task_id = %(task_id)s AND m.generation = %(generation)s AND {_WAITS} AND m.task = %(task)s
  AND {DIGEST} = %(digest)s
RETURNING m.task_id""")


def wait(executor: Transaction, key: Key, content: Content) -> bool:
    """Leave a durable task's message at the gate; False if it does not wait, or is another."""
    return bool(executor.run(_WAIT, **named(key, content)))


_LETS_IN = f"UPDATE {{messages}} m SET gate = {Gate.OPEN}, next_check_at = now()"
_LET_IN = Statement(f"""
WITH page AS MATERIALIZED (
  SELECT m.task_id FROM {{messages}} m WHERE m.queue = %(queue)s AND {AT_GATE}
  ORDER BY m.due_at LIMIT %(limit)s FOR UPDATE OF m SKIP LOCKED)
{_LETS_IN} FROM page WHERE m.task_id = page.task_id
RETURNING m.task_id, m.job_id""")
_LET_IN_OF_KEYS = Statement(f"""
WITH RECURSIVE keys AS ({_KEYS}),{_BUSY}
found AS MATERIALIZED (
  (SELECT m.task_id, m.due_at FROM {{messages}} m
   WHERE m.queue = %(queue)s AND m.limit_key IS NULL AND {AT_GATE} ORDER BY m.due_at LIMIT %(limit)s)
  UNION ALL
  SELECT x.task_id, x.due_at FROM {{queues}} q CROSS JOIN keys k CROSS JOIN LATERAL (
    SELECT m.task_id, m.due_at FROM {{messages}} m
    WHERE m.queue = %(queue)s AND {_RANKED} AND m.limit_key = k.key AND {AT_GATE}
    ORDER BY m.rank DESC, m.due_at, m.job_id
    LIMIT greatest(0, q.key_limit - coalesce((SELECT b.runs FROM busy b WHERE b.key = k.key), 0::bigint))) x
  WHERE q.name = %(queue)s),
page AS MATERIALIZED (
  SELECT m.task_id FROM found CROSS JOIN LATERAL (
    SELECT m.task_id FROM {{messages}} m WHERE m.task_id = found.task_id AND {AT_GATE}
    FOR UPDATE OF m SKIP LOCKED) m
  LIMIT %(limit)s)
{_LETS_IN} FROM page WHERE m.task_id = page.task_id
RETURNING m.task_id, m.job_id""")


def let_in(executor: Transaction, queue: str, *, limit: int, by_keys: bool = False) -> Sequence[Any]:
    """Take messages from the gate to be published, those first that have been due for the longest: (task_id, job_id).

    `by_keys`: the queue has a limit for each key; no key lets in more than its free slots. If the process dies before
    it publishes them, the sweeper does.
    """
    return executor.run(_LET_IN_OF_KEYS if by_keys else _LET_IN, queue=queue, limit=limit)


_LET_ALL_IN = Statement(f"{_LETS_IN} WHERE m.queue = %(queue)s AND {AT_GATE}")


def let_all_in(executor: Transaction, queue: str) -> None:
    """Take all messages from the gate of a queue that nobody manages any more; the sweeper publishes them.

    It passes none over: nobody looks at that gate again.
    """
    executor.run(_LET_ALL_IN, queue=queue)
