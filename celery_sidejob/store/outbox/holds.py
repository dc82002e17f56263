"""Rows held by a run: from its beginning until the row is dropped, given back, or taken from a dead worker.

A job's row is held by the claim (`claims.py`) and freed by `arming.py`; the run's marker in `jobs` decides who holds
it. A durable task's row decides this itself, so every change names the generation and the holder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from ...model.durable import Content, Held, Key, Message, Terms
from ...model.loss import Loss
from ...model.status import Gate
from ..broker.holds import HOLDS, IS_FRESH, IS_HELD, OVER, WAITED, ended, those
from ..results import GIVEN, IS_GIVEN, LISTENED, TOLD, Ended, Kept, given, kept
from ..statement import Autocommit, Frequent, Reader, Statement, Transaction, first, first_value, picked
from ..workers import LOSS_KIND, SILENT_S
from .arming import MANAGED, OWED, UNCHECKED, UNLOCKED, TaskEnd
from .kinds import BY_TASK_ID, KINDS, Kind, free
from .tasks import DIGEST, named, pool_of

HELD = f"""locked_by = %(worker_id)s, locked_at = now(), locked_pid = %(pid)s, next_check_at = {UNCHECKED},
    gate = {Gate.OPEN}, suspected_at = NULL, declined_at = NULL"""
"""The columns that a run writes into the row it holds, as SQL: nobody checks the row while its worker lives."""
LIVES = "EXISTS (SELECT FROM {workers} w WHERE w.id = %(worker_id)s AND w.dead_at IS NULL)"
"""The condition, as SQL, that the worker which is to hold a row was not declared dead."""

_BEGIN = Frequent(f"""
UPDATE {{messages}} m SET {HELD}, on_lost = %(on_lost)s, max_losses = %(max_losses)s
WHERE task_id = %(task_id)s AND generation = %(generation)s AND locked_by IS NULL AND doom IS NULL AND body IS NOT NULL
  AND task = %(task)s AND {DIGEST} = %(digest)s AND {OWED} AND NOT EXISTS ({MANAGED})
  AND {LIVES}
RETURNING pool, queue, locked_at, {WAITED} AS waited_s""")


def begin(executor: Transaction, key: Key, content: Content, *, worker_id: int, terms: Terms) -> Any | None:
    """Lock the row for a run of its content, and return its (pool, queue, locked_at, waited_s).

    None for a copy: the task runs, ended, moved on, or is in the dead set. Also None if the content differs from the
    row's, if the row waits for a slot of its capacity pool, or its queue is managed: then `permits.begin` decides.
    """
    return first(executor.run(_BEGIN, **named(key, content), **terms._asdict(), worker_id=worker_id))


_ADOPT = Statement(f"""
INSERT INTO {{messages}} (task_id, task, queue, publication, body, generation, expires_at, published_at, next_check_at,
  check_interval, locked_by, locked_at, locked_pid, on_lost, max_losses, pool, pool_weight, pool_rank, pool_runs,
  gate)
SELECT %(task_id)s, %(task)s, m.queue, %(publication)s, %(body)s, 1, %(expires_at)s::timestamptz,
  CASE WHEN m.pool IS NULL THEN now() END, CASE WHEN g.waits AND m.pool IS NULL
    THEN now() + make_interval(secs => %(check_interval_s)s) ELSE {UNCHECKED} END,
  make_interval(secs => %(check_interval_s)s), CASE WHEN NOT g.waits THEN w.id END,
  CASE WHEN NOT g.waits THEN now() END, %(pid)s, CASE WHEN NOT g.waits THEN %(on_lost)s END, %(max_losses)s,
  m.pool, %(pool_weight)s::smallint, %(pool_rank)s::smallint, %(pool_runs)s::boolean,
  CASE WHEN m.pool IS NULL THEN {Gate.OPEN} ELSE {Gate.POOL} END
FROM {{workers}} w CROSS JOIN (SELECT %(queue)s::text AS queue, %(pool)s::text AS pool) m
  CROSS JOIN LATERAL (SELECT m.pool IS NOT NULL OR EXISTS ({MANAGED}) AS waits) g
WHERE w.id = %(worker_id)s AND w.dead_at IS NULL
ON CONFLICT (task_id) DO NOTHING RETURNING locked_by IS NOT NULL AS begun""")


def adopt(
    executor: Transaction, message: Message, *, worker_id: int, terms: Terms, check_interval_s: float
) -> bool | None:
    """Make a row for a message that has none, locked if it begins; None if another delivery was faster.

    It does not begin if its queue is managed, or if it waits for a slot. Returns whether it does.
    """
    found = executor.run(
        _ADOPT,
        **picked(message, "task_id", "task", "queue", "publication", "body", "expires_at"),
        **pool_of(message),
        **terms._asdict(),
        worker_id=worker_id,
        check_interval_s=check_interval_s,
    )
    return first_value(found, bool)


_REMOVE = Frequent(f"""
WITH removed AS (
  DELETE FROM {{messages}} WHERE task_id = %(task_id)s AND generation = %(generation)s AND locked_by = %(worker_id)s
    AND (%(at)s::timestamptz IS NULL OR locked_at = %(at)s::timestamptz)
  RETURNING task_id),
{kept(f"{GIVEN} FROM removed WHERE {IS_GIVEN}")}
SELECT {LISTENED} FROM removed""")


def remove(key: Key, *, worker_id: int, at: datetime | None = None, keeps: Kept | None = None) -> TaskEnd:
    """Remove the row of a run that ended well; returns nothing if the run does not hold it any more.

    With `at` only if it is still this hold of the worker: see `Held`. `keeps`: the task's result, which the same
    statement keeps; then the row tells whether a process listens.
    """
    parameters = {"task_id": key[0], "generation": key[1], "worker_id": worker_id, "at": at, **given(keeps)}
    return TaskEnd(_REMOVE, parameters)


_DROP = Statement("""
DELETE FROM {messages} WHERE task_id = %(task_id)s AND generation = %(generation)s AND body IS NOT NULL
  AND (locked_by IS NULL OR locked_by = %(worker_id)s)
RETURNING task_id""")


def drop(key: Key, *, worker_id: int | None = None) -> TaskEnd:
    """Remove a copy that does not count, unless another worker runs it."""
    return TaskEnd(_DROP, {"task_id": key[0], "generation": key[1], "worker_id": worker_id})


_HOLDS = Frequent("""
SELECT task_id FROM {messages}
WHERE task_id = %(task_id)s AND generation = %(generation)s AND locked_by = %(worker_id)s""")


def holds(executor: Reader, key: Key, *, worker_id: int) -> bool:
    """Tell whether a run still holds its row."""
    return bool(executor.run(_HOLDS, task_id=key[0], generation=key[1], worker_id=worker_id))


_UNLOCK = Statement(f"""
UPDATE {{messages}} SET {UNLOCKED},
  published_at = CASE WHEN doom IS NULL AND NOT %(is_sent_again)s::boolean THEN now() END,
  next_check_at = CASE WHEN doom IS NULL AND NOT %(is_sent_again)s::boolean THEN now() + check_interval ELSE now() END
WHERE task_id = %(task_id)s AND generation = %(generation)s AND locked_by = %(worker_id)s RETURNING task_id""")


def unlock(key: Key, *, worker_id: int, is_sent_again: bool) -> TaskEnd:
    """Give up a run whose message goes back to the broker, or else is sent again at once."""
    parameters = {"task_id": key[0], "generation": key[1], "worker_id": worker_id, "is_sent_again": is_sent_again}
    return TaskEnd(_UNLOCK, parameters)


_HOLD = Frequent(f"""
WITH {OVER},
fresh AS MATERIALIZED (
  SELECT found.task_id, r.max_losses, found.waited_s
  FROM unnest(%(task_ids)s::text[], %(fresh)s::int[], %(tasks)s::text[], %(digests)s::text[], %(max_losses)s::int[])
    AS r(task_id, generation, task, digest, max_losses)
  CROSS JOIN LATERAL (
    SELECT m.task_id, {WAITED} AS waited_s FROM {{messages}} m
    WHERE m.task_id = r.task_id AND m.generation = r.generation AND m.task = r.task AND {DIGEST} = r.digest
      AND {IS_FRESH}
    FOR UPDATE OF m SKIP LOCKED) found
  WHERE {LIVES}),
held AS ({HOLDS} RETURNING m.task_id, m.queue, m.locked_at AS held_at, fresh.waited_s)
SELECT h.task_id, h.queue, h.held_at, h.waited_s, s.over, s.told
FROM (SELECT ARRAY(SELECT o.task_id FROM over o) AS over, {TOLD}) s LEFT JOIN held h ON true""")


class Fresh(NamedTuple):
    """What a worker has received, whose row it may hold."""

    key: Key
    content: Content
    max_losses: int


def hold(
    executor: Transaction, received: Sequence[Fresh], *, worker_id: int, over: Sequence[Ended]
) -> tuple[dict[str, Any], frozenset[str]]:
    """Hold the rows of tasks that may be repeated, and remove those of runs that are `over`, keeping their results.

    Returns the (queue, held_at, waited_s) of each row that is held now, by task id, and the runs whose rows were
    removed. Waits for no row that a transaction has locked.
    """
    found = executor.run(
        _HOLD,
        task_ids=[one.key[0] for one in received],
        fresh=[one.key[1] for one in received],
        tasks=[one.content.task for one in received],
        digests=[one.content.digest for one in received],
        max_losses=[one.max_losses for one in received],
        worker_id=worker_id,
        **ended(over),
    )
    return {row.task_id: row for row in found if row.task_id is not None}, frozenset(found[0].over)


_RETURNS = "r.place IS NOT NULL AND m.doom IS NULL"
_UNHOLD = Statement(f"""
WITH back AS (
  UPDATE {{messages}} m SET {UNLOCKED}, on_lost = NULL, max_losses = NULL,
    published_at = CASE WHEN {_RETURNS} THEN m.published_at END,
    next_check_at = CASE WHEN {_RETURNS} THEN now() + m.check_interval ELSE now() END
  FROM unnest(%(ended)s::text[], %(generations)s::int[], %(workers)s::bigint[], %(held_at)s::timestamptz[],
    %(places)s::bigint[]) AS r(task_id, generation, worker_id, held_at, place)
  WHERE {IS_HELD} AND m.locked_pid IS NULL
  RETURNING m.task_id, m.queue, m.priority, m.generation, CASE WHEN {_RETURNS} THEN r.place END AS place),
returned AS (
  INSERT INTO {{broker_messages}} (id, queue, priority, task_id, generation, again) OVERRIDING SYSTEM VALUE
  SELECT b.place, b.queue, b.priority, b.task_id, b.generation, true FROM back b WHERE b.place IS NOT NULL)
SELECT DISTINCT b.queue FROM back b WHERE b.place IS NOT NULL""")


def unhold(runs: Sequence[Held]) -> TaskEnd:
    """Give up rows that a worker holds since it has fetched their messages, and whose runs have not begun.

    Where the store is the broker, their messages are in their places again; returns the queues of these.
    """
    return TaskEnd(_UNHOLD, {**those(runs), "places": [run.place for run in runs]})


_HELD_BY = {
    kind: Statement(f"""
SELECT {kind.key} AS id, {kind.generation} AS number, locked_pid AS pid,
  locked_at < now() - make_interval(secs => %(older_than_s)s) AS old
FROM {{messages}} WHERE locked_by = %(worker_id)s AND {kind.generation} IS NOT NULL ORDER BY {kind.key}""")
    for kind in KINDS
}


def held_by(executor: Reader, kind: Kind, worker_id: int, *, older_than_s: float = 0) -> Sequence[Any]:
    """Read the rows that a worker holds, by the index of held rows, each with its key (id, number)."""
    return executor.run(_HELD_BY[kind], worker_id=worker_id, older_than_s=older_than_s)


# -- of jobs ---------------------------------------------------------------------------------------------------------

_TOUCH = Statement("""
UPDATE {messages} SET locked_at = now()
WHERE job_id = %(id)s AND for_run = %(run_no)s AND locked_by = %(worker_id)s RETURNING job_id""")


def touch(connections: Autocommit, job_id: int, *, run_no: int, worker_id: int) -> bool:
    """Move the deadline of a run that renews its own lease; False if the run is no longer current."""
    return bool(connections.run(_TOUCH, id=job_id, run_no=run_no, worker_id=worker_id))


_OVERDUE = Statement("""
SELECT m.job_id AS id, m.for_run AS number, m.locked_pid AS pid
FROM {messages} m JOIN unnest(%(ids)s::bigint[], %(leases_s)s::double precision[]) AS r(job_id, lease_s)
  ON m.job_id = r.job_id
WHERE m.locked_by = %(worker_id)s AND m.locked_at < now() - make_interval(secs => r.lease_s)""")


def overdue(executor: Reader, leases: Mapping[int, float], *, worker_id: int) -> Sequence[Any]:
    """Read which of a worker's runs, {job id: lease in seconds}, have not renewed their own lease in time."""
    return executor.run(
        _OVERDUE, ids=list(leases), leases_s=[float(lease) for lease in leases.values()], worker_id=worker_id
    )


_HELD_BY_DEAD = Statement(f"""
SELECT m.job_id, m.for_run AS run_no, m.locked_by AS worker_id, m.locked_pid AS pid, w.ident,
  w.dead_at IS NOT NULL AND w.suspect_at IS NULL AS has_left, {LOSS_KIND} AS loss_kind, {SILENT_S} AS silent_s
FROM {{messages}} m LEFT JOIN {{workers}} w ON w.id = m.locked_by
WHERE m.locked_by IS NOT NULL AND m.job_id IS NOT NULL AND (w.id IS NULL OR w.dead_at IS NOT NULL)
ORDER BY m.job_id""")


def held_by_dead(executor: Reader) -> Sequence[Any]:
    """Read the jobs' runs whose worker was declared dead, or is forgotten; reads the runs in progress."""
    return executor.run(_HELD_BY_DEAD)


# -- of durable tasks that were lost ---------------------------------------------------------------------------------

_LOST = f"""
UPDATE {{messages}} m SET {UNLOCKED}, published_at = NULL, suspected_at = NULL, next_check_at = now(),
  losses = m.losses + free.loss,
  last_loss = CASE WHEN free.loss > 0 OR free.begun AND m.on_lost = 'dead' THEN free.last_loss ELSE m.last_loss END,
  doom = coalesce(m.doom, CASE WHEN free.begun AND m.on_lost = 'dead'
    OR free.loss > 0 AND m.losses + free.loss >= m.max_losses THEN 'lost' END)
FROM free WHERE m.task_id = free.task_id RETURNING m.task_id, m.task, m.queue, free.loss, m.doom IS NULL AS goes_on,
  m.last_loss::text AS last_loss"""

_GIVE_BACK = Statement(
    free(
        BY_TASK_ID,
        "m.task_id = r.task_id AND m.locked_by = %(worker_id)s AND m.body IS NOT NULL",
        columns="found.task_id, %(loss)s::int AS loss, %(begun)s::boolean AS begun, %(last_loss)s::json AS last_loss",
    )
    + _LOST
)


def give_back(task_ids: Iterable[str], *, worker_id: int, loss: Loss, begun: bool) -> TaskEnd:
    """Take back runs that their own worker no longer executes; doom those that had begun and must not be repeated.

    Returns (task_id, task, queue, loss, goes_on, last_loss).
    """
    lost = {"loss": int(begun and loss.counts), "begun": begun, "last_loss": loss.json}
    return TaskEnd(_GIVE_BACK, {"task_ids": list(task_ids), "worker_id": worker_id, **lost})


TAKEN = 200
"""Runs taken from dead workers in one statement; part of its text, like `publishing.CHECK_PAGE`."""

_TAKE_FROM_THE_DEAD = Statement(f"""
WITH free AS MATERIALIZED (
  SELECT m.task_id, l.loss, true AS begun,
    json_build_object('kind', CASE WHEN l.loss = 0 THEN 'stopped' ELSE {LOSS_KIND} END, 'worker', w.ident, 'process',
      m.locked_pid, 'silent_s', CASE WHEN l.loss > 0 THEN {SILENT_S} END) AS last_loss
  FROM {{messages}} m LEFT JOIN {{workers}} w ON w.id = m.locked_by
    CROSS JOIN LATERAL (
      SELECT CASE WHEN w.dead_at IS NOT NULL AND w.suspect_at IS NULL OR m.locked_pid IS NULL THEN 0 ELSE 1 END AS loss
    ) l
  WHERE m.locked_by IS NOT NULL AND m.body IS NOT NULL AND (w.id IS NULL OR w.dead_at IS NOT NULL)
  ORDER BY m.task_id LIMIT {TAKEN} FOR UPDATE OF m SKIP LOCKED){_LOST}""")


def take_from_the_dead() -> TaskEnd:
    """Take a page of runs from workers that were declared dead; a run of a worker that left as planned has no `loss`.

    Nor has a row that its worker held since the fetch: nobody knows whether its run had begun. Its next run is locked
    by its process, and counts.
    Reads the runs in progress, by the index of held rows. Returns the same columns as `give_back`.
    """
    return TaskEnd(_TAKE_FROM_THE_DEAD, {})
