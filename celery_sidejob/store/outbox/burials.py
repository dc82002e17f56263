"""Messages of ordinary tasks on their way into the dead set, and their entries on the way out.

A run that was called lost and ended well takes its row back, or its entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ...model.durable import Content, Death, Key
from ...model.status import Gate
from ..dead import OLD, OWN, Bounds
from ..statement import Reader, Statement, Transaction, first
from .arming import FIRST_CHECK_S, UNCHECKED, TaskEnd
from .references import withdrawn
from .tasks import DIGEST, named

MOST_DEATHS = 10
"""Earlier deaths of a task that are remembered; they travel with its message."""


_BURY = Statement(f"""
WITH gone AS (
  DELETE FROM {{messages}} WHERE task_id = %(task_id)s AND generation = %(generation)s AND body IS NOT NULL
    AND CASE %(by)s WHEN 'run' THEN locked_by = %(worker_id)s
      WHEN 'worker' THEN locked_by IS NULL OR locked_by = %(worker_id)s ELSE locked_by IS NULL END
    AND (%(task)s::text IS NULL OR task = %(task)s AND {DIGEST} = %(digest)s)
    AND (%(reason)s <> 'expired' OR %(by)s <> 'worker' OR expires_at <= now())
  RETURNING *)/*!,{withdrawn("gone m")}*/
INSERT INTO {{dead}} (task_id, task, queue, reason, error, traceback, retries, given_group, payload, body)
SELECT task_id, task, queue, %(reason)s, %(error)s, %(traceback)s, %(retries)s, %(group)s,
  json_build_object('v', 2, 'publication', publication, 'generation', generation, 'losses', losses,
    'loss', last_loss, 'slots', CASE WHEN pool IS NOT NULL THEN
      json_build_object('pool', pool, 'weight', pool_weight, 'rank', pool_rank, 'runs', pool_runs) END),
  body
FROM gone RETURNING id, task""")


def bury(key: Key, death: Death, *, by: str, worker_id: int | None, content: Content | None = None) -> TaskEnd:
    """Move a row to the dead set; returns the entry's (id, task), nothing if the row was no longer the judge's.

    `by` is the judge: the ``run`` that holds the row, the ``worker`` (which may not have begun it), or the ``sweeper``.
    A judge that knows only a delivery passes its `content`. Whether a row has expired is read from the row.
    """
    return TaskEnd(_BURY, {**named(key, content), **asdict(death), "by": by, "worker_id": worker_id})


_BURIED = Statement("""
SELECT d.id, d.task FROM {dead} d
WHERE d.task_id = %(task_id)s AND (d.payload->>'generation')::int = %(generation)s AND d.body IS NOT NULL
ORDER BY d.id DESC LIMIT 1""")


def buried(executor: Reader, key: Key) -> Any | None:
    """Read the (id, task) of the entry that a row became; a generation becomes an entry only once."""
    return first(executor.run(_BURIED, task_id=key[0], generation=key[1]))


_POISON = Statement("""
WITH free AS (
  UPDATE {messages} SET doom = 'lost', next_check_at = now(), published_at = NULL, suspected_at = NULL, on_lost = NULL,
    max_losses = NULL
  WHERE task_id = %(task_id)s AND generation = %(generation)s AND body IS NOT NULL AND locked_by IS NULL
    AND doom IS NULL
  RETURNING task_id)
SELECT (SELECT count(*) FROM free) > 0 AS doomed,
  EXISTS (SELECT FROM {messages} m WHERE m.task_id = %(task_id)s AND m.body IS NOT NULL) AS is_kept""")


def poison(executor: Transaction, key: Key) -> Any:
    """Doom a row whose message killed each worker before it began a run: (doomed, is_kept).

    Only such rows are doomed as lost with a null `on_lost`. A row that a run holds, that was revoked or that goes on as
    another message is left alone: then only `is_kept` is true.
    """
    return executor.run(_POISON, task_id=key[0], generation=key[1])[0]


_FREE = f"body IS NOT NULL AND locked_by IS NULL AND task = %(task)s AND {DIGEST} = %(digest)s"
_ENTRY = f"""
    SELECT d.id FROM {{dead}} d
    WHERE d.task_id = %(task_id)s AND d.body IS NOT NULL AND d.reason IN ('lost', 'revoked', 'expired')
      AND (d.payload->>'generation')::int = %(generation)s AND d.task = %(task)s AND {DIGEST} = %(digest)s
    ORDER BY d.id DESC LIMIT 1"""

_TAKE_BACK = Statement(f"""
WITH row AS (
  DELETE FROM {{messages}} WHERE task_id = %(task_id)s AND generation = %(generation)s AND {_FREE} RETURNING task_id),
 entry AS (DELETE FROM {{dead}} WHERE %(entry_too)s AND id = ({_ENTRY}) RETURNING task_id)
SELECT task_id FROM row UNION ALL SELECT task_id FROM entry""")


def take_back(executor: Transaction, key: Key, content: Content, *, entry_too: bool = True) -> bool:
    """Remove the row or entry of a run that was called lost and ended well after all; False if it is too late.

    That is its row, if no other run holds it, or with `entry_too` its entry in the dead set, as lost or for the reason
    that kept it from running again. The entry of a run that ended otherwise stays.
    """
    return bool(executor.run(_TAKE_BACK, **named(key, content), entry_too=entry_too))


_KEEP_FROM_OTHERS = Statement(f"""
WITH row AS (
  UPDATE {{messages}} SET doom = coalesce(doom, 'lost'), published_at = NULL, suspected_at = NULL,
    next_check_at = now() + make_interval(secs => %(for_s)s)
  WHERE task_id = %(task_id)s AND generation = %(generation)s AND {_FREE} RETURNING task_id)
SELECT task_id FROM row UNION ALL SELECT d.task_id FROM {{dead}} d WHERE %(entry_too)s AND d.id = ({_ENTRY})""")


def keep_from_others(executor: Transaction, key: Key, content: Content, *, for_s: float, entry_too: bool) -> bool:
    """Doom the row or entry of a run that was called lost and ended well after all: no other run begins.

    `take_back` removes it afterwards. If that never comes, the sweeper buries it after `for_s` seconds. False if
    `take_back` would come too late, or without `entry_too` if the dead set has it.
    """
    return bool(executor.run(_KEEP_FROM_OTHERS, **named(key, content), for_s=for_s, entry_too=entry_too))


_REVIVE = Statement(f"""
WITH gone AS (
  DELETE FROM {{dead}} d WHERE d.id = ANY(ARRAY(
      SELECT max(e.id) FROM {{dead}} e WHERE e.id = ANY(%(ids)s::bigint[]) AND e.body IS NOT NULL GROUP BY e.task_id))
    AND NOT EXISTS (SELECT FROM {{messages}} m WHERE m.task_id = d.task_id) RETURNING *)
INSERT INTO {{messages}} (task_id, task, queue, publication, body, generation, gate, next_check_at, check_interval,
  pool, pool_weight, pool_rank, pool_runs)
SELECT task_id, task, queue,
  (SELECT json_build_object('v', p.j->'v', 'about', p.j->'about', 'deaths', json_agg(d.death ORDER BY d.no))::text
   FROM (SELECT death, no FROM json_array_elements(p.j->'deaths') WITH ORDINALITY AS old (death, no)
         UNION ALL SELECT json_build_object('at', died_at, 'reason', reason, 'error', split_part(error, ':', 1)), 1e9
         ORDER BY no DESC LIMIT {MOST_DEATHS}) d), body,
  (payload->>'generation')::int + 1, CASE WHEN s.j IS NULL THEN {Gate.OPEN} ELSE {Gate.POOL} END,
  CASE WHEN s.j IS NULL THEN now() + make_interval(secs => {FIRST_CHECK_S}) ELSE {UNCHECKED} END,
  make_interval(secs => %(check_interval_s)s), s.j->>'pool', (s.j->>'weight')::smallint, (s.j->>'rank')::smallint,
  (s.j->>'runs')::boolean
FROM gone CROSS JOIN LATERAL (SELECT (payload->>'publication')::json AS j) p
  CROSS JOIN LATERAL (SELECT CASE WHEN payload->'slots'->>'pool' IS NOT NULL THEN payload->'slots' END AS j) s
RETURNING task_id, task, queue, publication, body, generation, expires_at, pool""")


def revive(executor: Transaction, entry_ids: Sequence[int], *, check_interval_s: float) -> Sequence[Any]:
    """Take entries out of the dead set, and keep their messages as new generations, if their task ids are free.

    Returns their rows. Those of a `pool` wait for slots, and are not to be published before they have them.
    """
    return executor.run(_REVIVE, ids=list(entry_ids), check_interval_s=check_interval_s)


_OLD_ENTRIES = Statement(f"""
WITH page AS MATERIALIZED (
  SELECT d.id, d.job_id IS NULL AS ordinary, {OLD} AS old
  FROM (SELECT id, job_id, task, died_at FROM {{dead}} WHERE id > %(after)s ORDER BY id LIMIT %(limit)s) d {OWN}),
 gone AS (DELETE FROM {{dead}} WHERE id = ANY(ARRAY(SELECT id FROM page WHERE ordinary AND old)) RETURNING id)
SELECT (SELECT count(*) FROM gone) AS removed, (SELECT max(id) FROM page) AS last,
  (SELECT count(*) = %(limit)s AND (bool_or(old) OR cardinality(%(tasks)s::text[]) > 0) FROM page) AS goes_on""")


def forget_entries(executor: Transaction, *, after: int, bounds: Bounds, limit: int) -> Any:
    """Remove entries of ordinary tasks that are beyond the bounds from a page of the dead set.

    Returns (removed, last, goes_on): the page's last id, and whether old entries may follow it.
    """
    return executor.run(_OLD_ENTRIES, after=after, limit=limit, **bounds.parameters)[0]
