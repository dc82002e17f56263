"""Whole messages of ordinary durable tasks (`body` is not null): kept, moved on by a retry, read and dropped.

Such a row waits (published or not), is held by the worker that runs it, or is doomed. A doomed row goes to the dead
set, and nothing runs it any more; a row revoked during its run goes there once that run is over. Every change names the
generation, and for a held row its holder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...model.checks import is_number
from ...model.durable import Content, Key, Message
from ...model.settings import Settings
from ...model.status import Gate
from ..statement import Frequent, Reader, Statement, Transaction, arrays, first, picked
from .arming import FIRST_CHECK_S, OWED, UNCHECKED, UNLOCKED, TaskEnd
from .references import KEPT, referred

DIGEST = "encode(sha256(body), 'hex')"
"""The digest of a row's body, as `digest_of` computes it."""


def named(key: Key, content: Content | None) -> dict[str, Any]:
    """Return the parameters that name a row, and the content that it must have; None for any content."""
    task, digest = (None, None) if content is None else content[:2]
    return {"task_id": key[0], "generation": key[1], "task": task, "digest": digest}


EARLY_S = 2.0
"""Seconds before its `eta` at which a message waiting in the store is published: a worker then has it on time."""


def _first_check(eta: str, priority: str) -> str:
    """When a row is first checked, as SQL. By the clock, because a borrowed transaction may have begun long ago.

    What is published at once is checked an interval later.
    """
    return f"""CASE WHEN {eta} > now() + make_interval(secs => %(horizon_s)s)
    THEN {eta} - make_interval(secs => %(early_s)s)
    ELSE clock_timestamp() + make_interval(secs => %(first_check_s)s) END
    /*!+ CASE WHEN {priority} IS NOT NULL THEN make_interval(secs => %(check_interval_s)s) ELSE interval '0 s' END*/"""


def _gate(waits: str) -> str:
    """Return the gate at which a row is kept, as SQL: `waits` says whether it waits for slots."""
    return f"CASE WHEN {waits} THEN {Gate.POOL} ELSE {Gate.OPEN} END"


_PRIORITY = "%(priority)s::smallint"
_WITHOUT_SLOT = "(%(pool)s::text IS NOT NULL AND %(slot)s::smallint IS NULL)"
_ROW_WITHOUT_SLOT = "(r.pool IS NOT NULL AND r.slot IS NULL)"
_FIRST_CHECK = _first_check("%(eta)s::timestamptz", _PRIORITY)
_WAITS = f"""/*!priority IS NULL AND */(m.gate = {Gate.POOL}
  OR coalesce(m.due_at > now() + make_interval(secs => %(horizon_s)s), false)) AS waits"""


def _sent(priority: str, waits: str = "false") -> str:
    """Return when a row with this priority is published by the statement that writes it, as SQL."""
    return f"CASE WHEN {priority} IS NOT NULL AND NOT {waits} THEN now() END"


_KEEP = Frequent(f"""
/*!WITH kept AS (*/
INSERT INTO {{messages}} AS m
  (task_id, task, queue, publication, body, generation, due_at, gate, expires_at, next_check_at, check_interval,
    unique_key, pool, pool_weight, pool_rank, pool_runs, pool_shard/*!, priority, published_at*/)
VALUES (%(task_id)s, %(task)s, %(queue)s, %(publication)s, %(body)s, 1,
  coalesce(%(eta)s::timestamptz, now()), {_gate(_WITHOUT_SLOT)}, %(expires_at)s::timestamptz,
  CASE WHEN {_WITHOUT_SLOT} THEN {UNCHECKED} ELSE {_FIRST_CHECK} END, make_interval(secs => %(check_interval_s)s),
  %(unique_key)s::text, %(pool)s::text, %(pool_weight)s::smallint, %(pool_rank)s::smallint,
  %(pool_runs)s::boolean, %(slot)s::smallint /*!, {_PRIORITY}, {_sent(_PRIORITY, _WITHOUT_SLOT)}*/)
ON CONFLICT DO NOTHING RETURNING {_WAITS}/*!, {KEPT}),{referred("kept")}
SELECT waits FROM kept*/""")


@dataclass(frozen=True, slots=True)
class Kept:
    """A message that was kept. `waits`: it waits in the store for its eta, and is not for the broker yet."""

    waits: bool
    generation: int = 1


def keep(executor: Transaction, message: Message, settings: Settings) -> Kept | None:
    """Keep a message that is about to be published; None if one of this task id, or unique key, exists already.

    Another transaction may keep a message of this task id or key, and be open still: this waits for its end.
    """
    own = {"task_id": message.task_id, "unique_key": message.unique_key, "slot": message.slot}
    found = executor.run(_KEEP, **_columns(message, settings), **own)
    return Kept(found[0].waits) if found else None


_IN_THE_WAY = Statement("""
SELECT task_id, locked_by IS NULL AND losses = 0 AND generation = 1 AS waits, true AS has_key FROM {messages}
WHERE unique_key = %(key)s AND (doom IS NULL OR locked_by IS NOT NULL)
UNION ALL SELECT task_id, false, false FROM {messages} WHERE task_id = %(task_id)s
ORDER BY has_key DESC LIMIT 1""")


def in_the_way(executor: Reader, task_id: str, *, key: str) -> Any | None:
    """Read the message that keeps one with this task id and unique key from being kept: (task_id, waits, has_key).

    `has_key`: it has the unique key, which a doomed message that does not run has no more; `waits` says that no run of
    it has begun. Otherwise it only has the task id. None if no message is in the way any more.
    """
    return first(executor.run(_IN_THE_WAY, task_id=task_id, key=key))


_GIVE_WAY = Statement("""
UPDATE {messages} SET unique_key = NULL, doom = 'revoked', suspected_at = NULL, published_at = NULL,
  next_check_at = now()
WHERE task_id = %(task_id)s AND unique_key = %(key)s AND locked_by IS NULL AND doom IS NULL AND losses = 0
  AND generation = 1
RETURNING task_id""")


def give_way(executor: Transaction, task_id: str, *, key: str) -> bool:
    """Revoke a message that another replaces, and take its unique key from it; False if a run of it has begun."""
    return bool(executor.run(_GIVE_WAY, task_id=task_id, key=key))


_KEEP_MANY = Frequent(f"""
WITH r AS MATERIALIZED (
  SELECT * FROM unnest(%(task_id)s::text[], %(task)s::text[], %(queue)s::text[], %(publication)s::text[],
    %(body)s::bytea[], %(eta)s::timestamptz[], %(expires_at)s::timestamptz[], %(pool)s::text[],
    %(pool_weight)s::smallint[], %(pool_rank)s::smallint[], %(pool_runs)s::boolean[], %(slot)s::smallint[]
    /*!, %(priority)s::smallint[]*/)
    AS r(task_id, task, queue, publication, body, eta, expires_at, pool, pool_weight, pool_rank,
      pool_runs, slot/*!, priority*/)),
kept AS (
  INSERT INTO {{messages}} AS m
    (task_id, task, queue, publication, body, generation, due_at, gate, expires_at, next_check_at, check_interval,
      pool, pool_weight, pool_rank, pool_runs, pool_shard/*!, priority, published_at*/)
  SELECT r.task_id, r.task, r.queue, r.publication, r.body, 1, coalesce(r.eta, now()),
    {_gate(_ROW_WITHOUT_SLOT)}, r.expires_at,
    CASE WHEN {_ROW_WITHOUT_SLOT} THEN {UNCHECKED} ELSE {_first_check("r.eta", "r.priority")} END,
    make_interval(secs => %(check_interval_s)s), r.pool, r.pool_weight, r.pool_rank,
    r.pool_runs, r.slot
    /*!, r.priority, {_sent("r.priority", _ROW_WITHOUT_SLOT)}*/
  FROM r
  ON CONFLICT (task_id) DO NOTHING
  RETURNING task_id, {_WAITS}/*!, {KEPT}*/)/*!,{referred("kept")}*/
SELECT coalesce(array_agg(task_id) FILTER (WHERE waits), ARRAY[]::text[]) AS waiting,
  (SELECT r.task_id FROM r WHERE r.task_id NOT IN (SELECT k.task_id FROM kept k) LIMIT 1) AS taken
FROM kept""")


def keep_many(
    executor: Transaction, messages: Sequence[Message], settings: Settings, *, publishing_takes_s: float = 0.0
) -> tuple[list[str], str | None]:
    """Keep a page of messages in one statement; returns which wait in the store, and a task id that is taken.

    Messages whose task id is taken are left out. The sweeper gives the publisher `publishing_takes_s` more time.
    """
    pools = list(map(pool_of, messages))
    found = executor.run(
        _KEEP_MANY,
        **arrays(messages, "task_id", "task", "queue", "publication", "body", "eta", "expires_at", "slot", "priority"),
        **{name: [pool[name] for pool in pools] for name in _OF_POOL},
        check_interval_s=settings.lost_after,
        horizon_s=settings.timer_horizon,
        first_check_s=FIRST_CHECK_S + publishing_takes_s,
        early_s=EARLY_S,
    )
    return found[0].waiting, found[0].taken


_UNPUBLISHED = Statement(f"""
SELECT task_id FROM {{messages}} m WHERE task_id = ANY(%(task_ids)s::text[]) AND generation = 1
  AND published_at IS NULL AND locked_by IS NULL AND doom IS NULL
  AND m.due_at <= now() + make_interval(secs => %(horizon_s)s) AND {OWED}""")


def unpublished(executor: Reader, task_ids: Iterable[str], *, horizon_s: float) -> set[str]:
    """Read which of these rows exist, are not marked as published, and do not wait in the store."""
    found = executor.run(_UNPUBLISHED, task_ids=list(task_ids), horizon_s=horizon_s)
    return {row.task_id for row in found}


def pool_of(message: Message) -> Mapping[str, Any]:
    """Return the columns of a message's capacity pool, all null without one.

    Those of a pool that wait are served by their rank, which is the message's priority.
    """
    if message.admission is None:
        return _NO_POOL
    given = ((message.about or {}).get("properties") or {}).get("priority")
    return {**message.admission.columns, "pool_rank": given if is_number(given, most=255) else 0}


def _columns(message: Message, settings: Settings) -> dict[str, Any]:
    return {
        "task": message.task,
        "queue": message.queue,
        "publication": message.publication,
        "body": message.body,
        "eta": message.eta,
        "expires_at": message.expires_at,
        "check_interval_s": settings.lost_after,
        "horizon_s": settings.timer_horizon,
        "first_check_s": FIRST_CHECK_S,
        "early_s": EARLY_S,
        "priority": message.priority,
        **(_NO_POOL if message.admission is None else pool_of(message)),
    }


_IS_KEPT = Statement("""
SELECT body = %(body)s AND publication = %(publication)s AND generation = 1 AS same FROM {messages}
WHERE task_id = %(task_id)s""")


def is_kept(executor: Reader, message: Message) -> bool:
    """Tell whether the row of this task id is this very message: then its insert was repeated."""
    found = executor.run(_IS_KEPT, **picked(message, "task_id", "body", "publication"))
    return bool(found and found[0].same)


_ENTERS = "%(enters_pool)s AND pool IS DISTINCT FROM %(pool)s::text"
_WAITS_ANEW = f"(doom IS NULL AND {_ENTERS} AND %(pool)s::text IS NOT NULL)"
_OF_POOL = {"pool": "text", "pool_weight": "smallint", "pool_rank": "smallint", "pool_runs": "boolean"}
_NO_POOL: Mapping[str, Any] = dict.fromkeys(_OF_POOL)
_POOL_ENTERED = ", ".join(
    f"{name} = CASE WHEN {_ENTERS} THEN %({name})s::{of} ELSE {name} END" for name, of in _OF_POOL.items()
)
_MOVE = Statement(f"""
/*!WITH moved AS (*/
UPDATE {{messages}} m SET task = %(task)s, queue = %(queue)s, publication = %(publication)s, body = %(body)s,
  generation = generation + 1, due_at = coalesce(%(eta)s::timestamptz, now()), gate = {_gate(_WAITS_ANEW)},
  expires_at = %(expires_at)s::timestamptz,
  next_check_at = CASE WHEN {_WAITS_ANEW} THEN {UNCHECKED} WHEN doom IS NULL THEN {_FIRST_CHECK} ELSE now() END,
  check_interval = make_interval(secs => %(check_interval_s)s),
  published_at = coalesce(NULL::timestamptz/*!, CASE WHEN doom IS NULL THEN {_sent(_PRIORITY, _WAITS_ANEW)} END*/),
  {_POOL_ENTERED}, pool_shard = CASE WHEN NOT ({_ENTERS}) THEN pool_shard END,
  suspected_at = NULL, {UNLOCKED}, on_lost = NULL, max_losses = NULL, losses = 0,
  last_loss = NULL/*!, priority = {_PRIORITY}*/
WHERE task_id = %(task_id)s AND generation = %(generation)s AND locked_by = %(worker_id)s
RETURNING generation, {_WAITS}/*!, {KEPT}),{referred("moved")}
SELECT generation, waits FROM moved*/""")


def move(message: Message, key: Key, settings: Settings, *, worker_id: int, enters_pool: bool) -> TaskEnd:
    """Turn the row that a run holds into the row of its next message: a retry, or the task that replaces it.

    It stays in its pool, unless it `enters_pool`: then it is in the message's, and waits for a slot there. Returns the
    columns of `Kept`; nothing if the run no longer holds the row.
    """
    run = {"task_id": key[0], "generation": key[1], "worker_id": worker_id, "enters_pool": enters_pool}
    return TaskEnd(_MOVE, run | _columns(message, settings))


_READ = Statement("""
SELECT generation, locked_by, locked_pid, doom,
  published_at IS NULL AND locked_by IS NULL AND doom IS NULL
    AND next_check_at < now() + make_interval(secs => %(first_check_s)s) AS unpublished
FROM {messages} WHERE task_id = %(task_id)s AND body IS NOT NULL""")


def read(executor: Reader, task_id: str) -> Any | None:
    """Read the state of a task id's row; None if there is none: the task was finished."""
    return first(executor.run(_READ, task_id=task_id, first_check_s=FIRST_CHECK_S))


_FORGET = Statement(f"""
DELETE FROM {{messages}} WHERE task_id = %(task_id)s AND generation = %(generation)s AND locked_by IS NULL
  AND (%(task)s::text IS NULL OR task = %(task)s AND {DIGEST} = %(digest)s)
RETURNING task_id""")


def forget(executor: Transaction, key: Key, content: Content | None) -> bool:
    """Remove a row that no run holds: its run ended well after all, or ran without a lock.

    With `content`, only a row of the content that has run. Tells whether the row existed.
    """
    return bool(executor.run(_FORGET, **named(key, content)))


_CONTENT = Statement(f"""
SELECT task, {DIGEST} AS digest, CASE WHEN %(whole)s::boolean THEN body END AS body
FROM {{messages}} WHERE task_id = %(task_id)s AND generation = %(generation)s AND body IS NOT NULL""")


def content_of(executor: Reader, key: Key, *, whole: bool = False) -> Any | None:
    """Read (task, digest, body) of a row, the body only for `whole`; None if the row does not exist."""
    return first(executor.run(_CONTENT, task_id=key[0], generation=key[1], whole=whole))


_REVOKE = Statement("""
UPDATE {messages} m SET doom = 'revoked', suspected_at = NULL,
  published_at = CASE WHEN m.locked_by IS NULL THEN NULL ELSE m.published_at END,
  next_check_at = CASE WHEN m.locked_by IS NULL THEN now() ELSE m.next_check_at END
FROM (SELECT task_id FROM {messages}
      WHERE task_id = ANY(%(task_ids)s::text[]) AND body IS NOT NULL AND doom IS NULL
        AND (%(call)s::text IS NULL OR generation = 1 AND publication::json->>'call' = %(call)s)
      ORDER BY task_id FOR UPDATE) undoomed
WHERE m.task_id = undoomed.task_id RETURNING m.task_id, m.locked_by IS NOT NULL AS runs""")


def revoke(executor: Transaction, task_ids: Iterable[str], *, call: str | None = None) -> Sequence[Any]:
    """Doom the messages of these task ids, whether they wait or run; returns (task_id, runs) of the rows found.

    With `call` only the messages of that call, not a later task of the same id.

    The sweeper then buries a waiting row. A run that holds a row ends as it will; if it would begin again, after a
    retry or a loss, the row is buried instead.
    """
    return executor.run(_REVOKE, task_ids=sorted(set(task_ids)), call=call)
