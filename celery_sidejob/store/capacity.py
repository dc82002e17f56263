"""Capacity pools: their rows, the slots that works hold, and the totals of what was admitted, freed and refused.

A pool's counters are its rows of `capacity_shards`. The transaction that makes a work takes its slots there. A row that
is made without a slot waits (`outbox/arming.py`). Triggers of `messages` free the slots of every row that is deleted,
whoever deletes it, and hand them to those that wait, in the same transaction (`fill_pool`). They do so at the commit:
locks of a pool come after all others. A row that waits and is locked is passed over: the sweeper fills the pool again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..model.status import Gate
from .statement import Autocommit, Frequent, Reader, Statement, Transaction, columns, first

AT_COMMIT = -1
"""The shard of a row that takes its slots at the commit, however many are free: in the emptiest shard."""
WINDOW_S = 60
"""Seconds for which `stats` counts what happened lately."""

_DECLARE = Statement("""
WITH made AS (
  INSERT INTO {capacity_pools} AS p (name, capacity, declared, shards, covers)
  VALUES (%(name)s, %(limit)s::int, %(limit)s::int, %(shards)s::smallint, %(covers)s)
  ON CONFLICT (name) DO UPDATE SET name = excluded.name
  RETURNING p.name, p.xmax::text = '0' AS is_new)
INSERT INTO {capacity_shards} (pool, shard, capacity)
SELECT made.name, (t.place - 1)::smallint, t.slots
FROM made, unnest(%(parts)s::int[]) WITH ORDINALITY AS t(slots, place) WHERE made.is_new""")


def declare(executor: Transaction, name: str, *, limit: int, covers: str, parts: Sequence[int]) -> None:
    """Make a pool with the slots of each shard, unless it exists; the next statement sees it, whoever has made it."""
    executor.run(_DECLARE, name=name, limit=limit, covers=covers, shards=len(parts), parts=list(parts))


_ROOM = "(NOT %(refuses)s OR c.used + %(weight)s <= c.capacity)"

_ADMIT = Frequent(f"""
WITH chosen AS MATERIALIZED (
  SELECT c.shard FROM {{capacity_shards}} c WHERE c.pool = %(name)s AND {_ROOM}
  ORDER BY c.used + %(weight)s > c.capacity, (c.shard + %(first)s) %% %(shards)s LIMIT 1),
admitted AS (
  UPDATE {{capacity_shards}} c SET used = c.used + %(weight)s, admitted = c.admitted + 1
  FROM chosen WHERE c.pool = %(name)s AND c.shard = chosen.shard AND {_ROOM}
  RETURNING c.shard)
SELECT p.capacity, p.declared, p.shards, p.covers, (SELECT shard FROM admitted) AS slot,
  EXISTS (SELECT FROM chosen) AS had_room,
  (SELECT max(c.capacity) FROM {{capacity_shards}} c WHERE c.pool = %(name)s) AS most
FROM {{capacity_pools}} p WHERE p.name = %(name)s""")


def admit(executor: Transaction, name: str, *, weight: int, refuses: bool, first_shard: int, shards: int) -> Any | None:
    """Take slots of a pool for one work, in the first shard with room from `first_shard` on; None without the pool.

    Returns (capacity, declared, shards, covers, slot, had_room, most). `slot` is the shard, None if nothing was taken:
    without `had_room` the pool was full, else another has just taken what was free. No slot is taken beyond the
    capacity, as the UPDATE judges the row that it has locked. A full pool is only read. `most` is the capacity of the
    largest shard.
    """
    return first(
        executor.run(_ADMIT, name=name, weight=weight, refuses=refuses, first=-first_shard % shards, shards=shards)
    )


_LOCK = Statement("""
SELECT c.shard, c.used, c.capacity FROM {capacity_shards} c WHERE c.pool = %(name)s ORDER BY c.shard FOR UPDATE""")


def lock(executor: Transaction, name: str) -> Sequence[Any]:
    """Lock all shards of a pool, to admit several works at once: (shard, used, capacity)."""
    return executor.run(_LOCK, name=name)


_TAKE = Statement("""
UPDATE {capacity_shards} c SET used = c.used + t.slots, admitted = c.admitted + t.works
FROM unnest(%(shards)s::smallint[], %(slots)s::bigint[], %(works)s::bigint[]) AS t(shard, slots, works)
WHERE c.pool = %(name)s AND c.shard = t.shard""")


def take(executor: Transaction, name: str, taken: Mapping[int, tuple[int, int]]) -> None:
    """Take slots in locked shards: {shard: (slots, works)}."""
    executor.run(_TAKE, name=name, shards=list(taken), **columns(taken.values(), "slots", "works"))


_COLUMNS = f"""
SELECT p.name, p.capacity, p.declared, p.shards, p.covers, p.refused, c.used, c.admitted, c.freed, c.room, c.most,
  coalesce(s.admitted, 0) AS admitted_before, coalesce(s.freed, 0) AS freed_before,
  coalesce(s.refused, 0) AS refused_before,
  extract(epoch FROM now() - coalesce(s.taken_at, greatest(p.created_at, now() - interval '{WINDOW_S} s')))
    ::double precision AS window_s
FROM {{capacity_pools}} p
CROSS JOIN LATERAL (
  SELECT sum(c.used)::bigint AS used, sum(c.admitted)::bigint AS admitted, sum(c.freed)::bigint AS freed,
    max(c.capacity - c.used) AS room, max(c.capacity) AS most
  FROM {{capacity_shards}} c WHERE c.pool = p.name) c
LEFT JOIN LATERAL (
  SELECT s.* FROM {{capacity_samples}} s WHERE s.pool = p.name AND s.taken_at <= now() - interval '{WINDOW_S} s'
  ORDER BY s.taken_at DESC LIMIT 1) s ON true"""
_READ = Statement(f"{_COLUMNS}\nWHERE p.name = %(name)s")
_LIST = Statement(f"{_COLUMNS}\nORDER BY p.name LIMIT %(limit)s")


def read(executor: Reader, name: str) -> Any | None:
    """Read a pool: what it has, its totals, and the totals as they were `window_s` seconds ago; None without it.

    `room` is the number of free slots in the shard with the most of them, `most` the capacity of the largest shard.
    """
    return first(executor.run(_READ, name=name))


def page(executor: Reader, *, limit: int) -> Sequence[Any]:
    """Read the first pools by their names, each as `read` does, with its `name`."""
    return executor.run(_LIST, limit=limit)


_RESIZE = Statement("""
WITH resized AS (UPDATE {capacity_pools} SET capacity = %(limit)s::int WHERE name = %(name)s RETURNING name)
UPDATE {capacity_shards} c SET capacity = t.slots
FROM resized, unnest(%(parts)s::int[]) WITH ORDINALITY AS t(slots, place)
WHERE c.pool = resized.name AND c.shard = t.place - 1""")


def resize(executor: Transaction, name: str, *, limit: int, parts: Sequence[int]) -> None:
    """Give a pool another capacity, with the slots of each shard; its shards are locked."""
    executor.run(_RESIZE, name=name, limit=limit, parts=list(parts))


_FILL = Statement("""
WITH locked AS MATERIALIZED (
  SELECT c.pool FROM {capacity_shards} c WHERE c.pool = %(name)s ORDER BY c.shard FOR UPDATE)
SELECT {fill_pool}(%(name)s) FROM locked LIMIT 1""")


def fill(executor: Transaction, name: str) -> None:
    """Admit the works that wait for slots of a pool, as far as there are slots."""
    executor.run(_FILL, name=name)


_WAITING = Statement(f"""
SELECT p.name FROM {{capacity_pools}} p WHERE EXISTS (
  SELECT FROM {{messages}} m WHERE m.pool = p.name AND m.gate = {Gate.POOL} AND m.due_at <= now()) AND EXISTS (
  SELECT FROM {{capacity_shards}} c WHERE c.pool = p.name AND (c.used < c.capacity OR c.used = 0))
ORDER BY p.name""")


def fillable(executor: Reader) -> list[str]:
    """Read the pools that have a free slot, and a work that waits for one."""
    return [row.name for row in executor.run(_WAITING)]


_WAITING_WEIGHT = Statement(f"""
SELECT coalesce(sum(w.pool_weight), 0::bigint) AS weight FROM (
  SELECT m.pool_weight FROM {{messages}} m WHERE m.pool = %(name)s AND m.gate = {Gate.POOL}
  LIMIT %(most)s::bigint + 1) w""")


def waiting(executor: Reader, name: str, *, most: int) -> int:
    """Count the slots for which works wait in a pool; a number beyond `most` only says that there are more."""
    return int(executor.run(_WAITING_WEIGHT, name=name, most=max(0, most))[0].weight)


_LET_IN = Statement("""
SELECT m.task_id, m.job_id FROM {messages} m
WHERE m.pool = ANY(%(names)s::text[]) AND m.pool_shard IS NOT NULL AND m.published_at IS NULL AND m.locked_by IS NULL
  AND m.doom IS NULL AND m.due_at <= now() AND m.next_check_at <= now()
ORDER BY m.next_check_at LIMIT %(limit)s""")


def let_in(executor: Reader, names: Iterable[str], *, limit: int) -> Sequence[Any]:
    """Read messages that have got the slots for which they waited, and are to be published: (task_id, job_id)."""
    return executor.run(_LET_IN, names=list(names), limit=limit)


_HOLDERS = Statement("""
SELECT m.task_id, m.job_id, coalesce(m.task, j.task) AS task, m.queue, m.pool_weight AS weight,
  m.locked_by IS NOT NULL AS running
FROM {messages} m LEFT JOIN {jobs} j ON j.id = m.job_id
WHERE m.pool = %(name)s AND m.pool_shard IS NOT NULL ORDER BY m.due_at, m.task_id""")


def holders(executor: Reader, name: str) -> Sequence[Any]:
    """Read who holds slots of a pool, as of one moment: (task_id, job_id, task, queue, weight, running)."""
    return executor.run(_HOLDERS, name=name)


_COUNT_REFUSALS = Statement("""
UPDATE {capacity_pools} p SET refused = p.refused + t.times
FROM (SELECT name, count(*) AS times FROM unnest(%(names)s::text[]) AS name GROUP BY name ORDER BY name) t
WHERE p.name = t.name""")


def count_refusals(executor: Transaction, names: Iterable[str]) -> None:
    """Add calls that were refused, each with the name of its pool, to the totals."""
    executor.run(_COUNT_REFUSALS, names=list(names))


_SAMPLE = Statement("""
WITH moved AS (
  SELECT p.name, c.admitted, c.freed, p.refused FROM {capacity_pools} p
  CROSS JOIN LATERAL (
    SELECT sum(c.admitted)::bigint AS admitted, sum(c.freed)::bigint AS freed FROM {capacity_shards} c
    WHERE c.pool = p.name) c
  WHERE c.admitted + c.freed + p.refused <> p.sampled),
noted AS (
  UPDATE {capacity_pools} p SET sampled = moved.admitted + moved.freed + moved.refused
  FROM moved WHERE p.name = moved.name RETURNING p.name)
INSERT INTO {capacity_samples} (pool, taken_at, admitted, freed, refused)
SELECT moved.name, now(), moved.admitted, moved.freed, moved.refused FROM moved JOIN noted ON noted.name = moved.name
ON CONFLICT DO NOTHING RETURNING pool""")

_FORGET = Statement(f"""
DELETE FROM {{capacity_samples}} s WHERE s.taken_at < now() - interval '{WINDOW_S} s' AND EXISTS (
  SELECT FROM {{capacity_samples}} n
  WHERE n.pool = s.pool AND n.taken_at > s.taken_at AND n.taken_at <= now() - interval '{WINDOW_S} s')""")


def sample(connections: Autocommit) -> int:
    """Note the totals of each pool that has moved since its last sample; returns how many have.

    Of samples older than the window the newest stays: what a pool has done lately is counted from it.
    """
    taken = connections.run(_SAMPLE)
    connections.run(_FORGET)
    return len(taken)
