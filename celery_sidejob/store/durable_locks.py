"""Locks of runs in rows of ordinary tasks: written before a run or late, given up, taken away, removed at its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..model.durable import Content, Key, Message
from .connection import Connections
from .durable_messages import DIGEST, SINCE
from .sent import Sent
from .statement import Executor, Statement

_BEGIN = Statement(
    f"""
UPDATE {{messages}} SET locked_by = %(worker_id)s, locked_at = now(), locked_pid = %(pid)s, look_at = 'infinity',
  missing_at = NULL, on_lost = %(on_lost)s, max_losses = %(max_losses)s
WHERE task_id = %(task_id)s AND generation = %(generation)s AND locked_by IS NULL AND doom IS NULL AND body IS NOT NULL
  AND task = %(task)s AND {DIGEST} = %(digest)s
  AND EXISTS (SELECT FROM {{workers}} w WHERE w.id = %(worker_id)s AND w.dead_at IS NULL)
RETURNING losses""",
    since=SINCE,
    frequent=True,
)


def begin(
    executor: Executor, key: Key, content: Content, *, worker_id: int, pid: int, on_lost: str, max_losses: int
) -> bool:
    """Lock the row for a run of its content; False for a copy: it runs, was finished, moved on, or is in the dead set.

    False as well if the content is another than the row's.
    """
    return bool(
        executor.run(
            _BEGIN, task_id=key[0], generation=key[1], task=content.task, digest=content.digest, worker_id=worker_id,
            pid=pid, on_lost=on_lost, max_losses=max_losses,
        )
    )  # fmt: skip


def send_begin(
    connections: Connections, key: Key, content: Content, *, worker_id: int, pid: int, on_lost: str, max_losses: int,
    within_s: float,
) -> Sent | None:  # fmt: skip
    """Send what `begin` sends, and wait for no answer, which has a row if it is locked; None where that cannot be."""
    parameters = {
        "task_id": key[0], "generation": key[1], "task": content.task, "digest": content.digest,
        "worker_id": worker_id, "pid": pid, "on_lost": on_lost, "max_losses": max_losses,
    }  # fmt: skip
    return connections.send("durable-begin", _BEGIN, parameters, within_s=within_s, held=True)


class Late(NamedTuple):
    """A run that has begun without a lock, `age_s` ago."""

    task_id: str
    content: Content
    age_s: float
    max_losses: int


_FIRST = 1
"""The generation of what may begin so."""

# The row must have been there when the run began. Else it is that of a later call with the same task id, which somebody
# was free to make as a copy of the run had ended meanwhile.
_WAS_THERE = "m.locked_by IS NULL AND m.due_at <= now() - make_interval(secs => r.age_s)"

_RUNS = """unnest(%(task_ids)s::text[], %(tasks)s::text[], %(digests)s::text[], %(ages)s::double precision[],
  %(max_losses)s::int[]) AS r(task_id, task, digest, age_s, max_losses)"""
_IS_ITS_OWN = f"m.task = r.task AND {DIGEST} = r.digest"


def _parameters(runs: Sequence[Late]) -> dict[str, Any]:
    return {
        "task_ids": [run.task_id for run in runs], "tasks": [run.content.task for run in runs],
        "digests": [run.content.digest for run in runs], "ages": [run.age_s for run in runs],
        "max_losses": [run.max_losses for run in runs],
    }  # fmt: skip


_LOCK_LATE = Statement(
    f"""
UPDATE {{messages}} m SET locked_by = %(worker_id)s, locked_at = now(), locked_pid = %(pid)s, look_at = 'infinity',
  missing_at = NULL, on_lost = 'requeue', max_losses = r.max_losses
FROM {_RUNS}
WHERE m.task_id = r.task_id AND m.generation = {_FIRST} AND m.body IS NOT NULL AND {_IS_ITS_OWN}
  AND ({_WAS_THERE} AND m.doom IS NULL OR m.locked_by = %(worker_id)s AND m.locked_pid = %(pid)s)
  AND EXISTS (SELECT FROM {{workers}} w WHERE w.id = %(worker_id)s AND w.dead_at IS NULL)
RETURNING m.task_id""",
    since=SINCE,
    frequent=True,
)


def lock_late(executor: Executor, runs: Sequence[Late], *, worker_id: int, pid: int) -> set[str]:
    """Lock the rows of runs that have begun before; returns which are locked now, also by an earlier try.

    The others are somebody else's, gone, doomed, or of another content.
    """
    found = executor.run(_LOCK_LATE, worker_id=worker_id, pid=pid, **_parameters(runs))
    return {row.task_id for row in found}


_REMOVE_LATE = Statement(
    f"""
DELETE FROM {{messages}} m USING {_RUNS}, (SELECT set_config('synchronous_commit', 'off', true) AS how) commit
WHERE commit.how = 'off' AND m.task_id = r.task_id AND m.generation = {_FIRST} AND m.body IS NOT NULL
  AND {_IS_ITS_OWN}
  AND ({_WAS_THERE} OR m.locked_by = %(worker_id)s AND m.locked_pid = %(pid)s)
RETURNING m.task_id""",
    since=SINCE,
    frequent=True,
)


def remove_late(executor: Executor, runs: Sequence[Late], *, worker_id: int, pid: int) -> set[str]:
    """Remove the rows of runs that ended well, whether they had been locked or not, and return which those are.

    It waits for no disk: one that is there again after a crash of the server is of a task that may be repeated.
    """
    found = executor.run(_REMOVE_LATE, worker_id=worker_id, pid=pid, **_parameters(runs))
    return {row.task_id for row in found}


BURIAL_S = 1.0
"""How long before it can be seen an entry may be dated: a run that has begun meanwhile has found the row there."""

# The same of an entry: it was not kept later, as far as the entry tells, and it died after the run had begun.
_WAS_THE_SAME = f"""coalesce((d.payload->>'due_at')::timestamptz <= now() - make_interval(secs => r.age_s), true)
    AND d.died_at > now() - make_interval(secs => r.age_s + {BURIAL_S}::double precision)"""

_TAKE_BACK_LATE = Statement(
    f"""
DELETE FROM {{dead}} WHERE id = ANY(ARRAY(
  SELECT max(d.id) FROM {_RUNS} CROSS JOIN LATERAL (
    SELECT e.* FROM {{dead}} e
    WHERE e.task_id = r.task_id AND e.body IS NOT NULL AND e.reason IN ('lost', 'revoked', 'expired')
      AND (e.payload->>'generation')::int = {_FIRST} OFFSET 0) d
  WHERE {_WAS_THE_SAME} AND d.task = r.task AND {DIGEST} = r.digest
  GROUP BY d.task_id))
RETURNING task_id""",
    since=SINCE,
)


def take_back_late(executor: Executor, runs: Sequence[Late]) -> set[str]:
    """Take out of the dead set what ended well after all, of runs that had begun without a lock; as `take_back`."""
    found = executor.run(_TAKE_BACK_LATE, **_parameters(runs))
    return {row.task_id for row in found}


_ADOPT = Statement(
    """
INSERT INTO {messages} (task_id, task, queue, publication, body, generation, expires_at, published_at, look_at,
  look_after, locked_by, locked_at, locked_pid, on_lost, max_losses)
SELECT %(task_id)s, %(task)s, %(queue)s, %(publication)s, %(body)s, 1, %(expires_at)s::timestamptz, now(), 'infinity',
  make_interval(secs => %(look_after_s)s), w.id, now(), %(pid)s, %(on_lost)s, %(max_losses)s
FROM {workers} w WHERE w.id = %(worker_id)s AND w.dead_at IS NULL
ON CONFLICT (task_id) DO NOTHING RETURNING task_id""",
    since=SINCE,
)


def adopt(
    executor: Executor, message: Message, *, worker_id: int, pid: int, on_lost: str, max_losses: int,
    look_after_s: float,
) -> bool:  # fmt: skip
    """Make a locked row for a message that has none; False if another delivery was quicker."""
    return bool(
        executor.run(
            _ADOPT, task_id=message.task_id, task=message.task, queue=message.queue, publication=message.publication,
            body=message.body, expires_at=message.expires_at, worker_id=worker_id, pid=pid, on_lost=on_lost,
            max_losses=max_losses, look_after_s=look_after_s,
        )
    )  # fmt: skip


_REMOVE = Statement(
    """
DELETE FROM {messages} WHERE task_id = %(task_id)s AND generation = %(generation)s AND locked_by = %(worker_id)s
RETURNING task_id""",
    since=SINCE,
    frequent=True,
)


def remove(executor: Executor, key: Key, *, worker_id: int) -> bool:
    """Remove the row of a run that ended well; False if the run does not hold it any more."""
    return bool(executor.run(_REMOVE, task_id=key[0], generation=key[1], worker_id=worker_id))


_FREE = f"""body IS NOT NULL AND locked_by IS NULL AND task = %(task)s AND {DIGEST} = %(digest)s
    AND (%(age_s)s::double precision IS NULL OR due_at <= now() - make_interval(secs => %(age_s)s))"""

_ENTRY = f"""
    SELECT d.id FROM {{dead}} d, (SELECT %(age_s)s::double precision AS age_s) r
    WHERE d.task_id = %(task_id)s AND d.body IS NOT NULL AND d.reason IN ('lost', 'revoked', 'expired')
      AND (d.payload->>'generation')::int = %(generation)s AND d.task = %(task)s AND {DIGEST} = %(digest)s
      AND (r.age_s IS NULL OR {_WAS_THE_SAME})
    ORDER BY d.id DESC LIMIT 1"""

_TAKE_BACK = Statement(
    f"""
WITH row AS (
  DELETE FROM {{messages}} WHERE task_id = %(task_id)s AND generation = %(generation)s AND {_FREE} RETURNING task_id),
 entry AS (DELETE FROM {{dead}} WHERE id = ({_ENTRY}) RETURNING task_id)
SELECT task_id FROM row UNION ALL SELECT task_id FROM entry""",
    since=SINCE,
)


def take_back(executor: Executor, key: Key, content: Content, *, age_s: float | None = None) -> bool:
    """Remove what became of a run that was called lost and has ended well after all; False if it is too late.

    That is its row, if no other run holds it, or its entry in the dead set: as lost, or as what kept it from
    running again. An entry of a run that has ended otherwise stays. `age_s`: how long ago the run began, if that
    was without a lock: of another call of this task id nothing is taken then.
    """
    return bool(
        executor.run(
            _TAKE_BACK, task_id=key[0], generation=key[1], task=content.task, digest=content.digest, age_s=age_s,
        )
    )  # fmt: skip


_HOLDS = Statement(
    """
SELECT task_id FROM {messages}
WHERE task_id = %(task_id)s AND generation = %(generation)s AND locked_by = %(worker_id)s""",
    since=SINCE,
    frequent=True,
)


def holds(executor: Executor, key: Key, *, worker_id: int) -> bool:
    """Tell whether a run holds its row still."""
    return bool(executor.run(_HOLDS, task_id=key[0], generation=key[1], worker_id=worker_id))


_KEEP_FROM_OTHERS = Statement(
    f"""
WITH row AS (
  UPDATE {{messages}} SET doom = coalesce(doom, 'lost'), published_at = NULL, missing_at = NULL,
    look_at = now() + make_interval(secs => %(for_s)s)
  WHERE task_id = %(task_id)s AND generation = %(generation)s AND {_FREE} RETURNING task_id)
SELECT task_id FROM row UNION ALL SELECT d.task_id FROM {{dead}} d WHERE d.id = ({_ENTRY})""",
    since=SINCE,
)


def keep_from_others(executor: Executor, key: Key, content: Content, *, age_s: float | None, for_s: float) -> bool:
    """Doom what became of a run that was called lost and has ended well after all, so that no other run begins.

    `take_back` removes it afterwards. If that does not come, the sweeper buries it after `for_s` seconds. False where
    `take_back` would come too late.
    """
    return bool(
        executor.run(
            _KEEP_FROM_OTHERS, task_id=key[0], generation=key[1], task=content.task, digest=content.digest,
            age_s=age_s, for_s=for_s,
        )
    )  # fmt: skip


_UNLOCK = Statement(
    """
UPDATE {messages} SET locked_by = NULL, locked_at = NULL, locked_pid = NULL,
  published_at = CASE WHEN doom IS NULL THEN now() END,
  look_at = CASE WHEN doom IS NULL THEN now() + look_after ELSE now() END
WHERE task_id = %(task_id)s AND generation = %(generation)s AND locked_by = %(worker_id)s""",
    since=SINCE,
)


def unlock(executor: Executor, key: Key, *, worker_id: int) -> None:
    """Give up a run whose message goes back to the broker."""
    executor.run(_UNLOCK, task_id=key[0], generation=key[1], worker_id=worker_id)


_HELD = Statement(
    """
SELECT task_id, generation, locked_pid AS pid, locked_at < now() - make_interval(secs => %(older_than_s)s) AS old
FROM {messages} WHERE locked_by = %(worker_id)s AND body IS NOT NULL ORDER BY task_id""",
    since=SINCE,
)


def held_by(executor: Executor, worker_id: int, *, older_than_s: float = 0) -> Sequence[Any]:
    """Read the rows that a worker holds."""
    return executor.run(_HELD, worker_id=worker_id, older_than_s=older_than_s)


_LOST = """ locked_by = NULL, locked_at = NULL, locked_pid = NULL, published_at = NULL, missing_at = NULL,
  look_at = now(), losses = m.losses + held.loss,
  doom = coalesce(m.doom, CASE WHEN held.begun AND m.on_lost = 'dead'
    OR held.loss > 0 AND m.losses + held.loss >= m.max_losses THEN 'lost' END)"""

_GIVE_BACK = Statement(
    f"""
WITH held AS MATERIALIZED (
  SELECT found.task_id, %(loss)s::int AS loss, %(begun)s::boolean AS begun
  FROM unnest(%(task_ids)s::text[]) AS r(task_id) CROSS JOIN LATERAL (
    SELECT m2.task_id FROM {{messages}} m2
    WHERE m2.task_id = r.task_id AND m2.locked_by = %(worker_id)s AND m2.body IS NOT NULL
    FOR UPDATE SKIP LOCKED) found)
UPDATE {{messages}} m SET {_LOST}
FROM held WHERE m.task_id = held.task_id RETURNING m.task_id, m.task, held.loss, m.doom IS NULL AS goes_on""",
    since=SINCE,
)


def give_back(
    executor: Executor, task_ids: Iterable[str], *, worker_id: int, loss: bool, begun: bool
) -> Sequence[Any]:  # fmt: skip
    """Take runs that were cut off from their own worker; what was begun and may not be repeated is doomed."""
    return executor.run(_GIVE_BACK, task_ids=list(task_ids), worker_id=worker_id, loss=int(loss), begun=begun)


TAKEN = 200
"""Runs that are taken from dead workers in one statement; in its text, as `messages.LOOK_PAGE`."""

_TAKE_FROM_THE_DEAD = Statement(
    f"""
WITH held AS MATERIALIZED (
  SELECT m2.task_id, CASE WHEN w.dead_at IS NOT NULL AND w.suspect_at IS NULL THEN 0 ELSE 1 END AS loss, true AS begun
  FROM {{messages}} m2 LEFT JOIN {{workers}} w ON w.id = m2.locked_by
  WHERE m2.locked_by IS NOT NULL AND m2.body IS NOT NULL AND (w.id IS NULL OR w.dead_at IS NOT NULL)
  ORDER BY m2.task_id LIMIT {TAKEN} FOR UPDATE OF m2 SKIP LOCKED)
UPDATE {{messages}} m SET {_LOST}
FROM held WHERE m.task_id = held.task_id RETURNING m.task_id, m.task, held.loss, m.doom IS NULL AS goes_on""",
    since=SINCE,
)


def take_from_the_dead(executor: Executor) -> Sequence[Any]:
    """Take a page of runs from workers that were declared dead; one that left as planned has lost nothing.

    Reads what is running, by the index of held rows.
    """
    return executor.run(_TAKE_FROM_THE_DEAD)
