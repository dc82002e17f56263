"""Rows of `messages` that are whole messages of ordinary tasks (`body` is not null).

Such a row waits (published or not), or is held by the worker that runs it, or is doomed: somebody decided that it goes
to the dead set, and nothing runs it any more (what was revoked while it runs: once that run is over). Every change
names the generation, and of a held row its holder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from ..model.durable import Key, Message
from . import revisions
from .connection import Connections
from .messages import LONGEST_LOOK_S, OLDEST, QUEUES, RESERVE_S
from .sent import Sent
from .statement import Executor, Statement

SINCE = "0003"
NEWEST = 100_000
"""Entries of the dead set among which that of one run is looked for: it was called lost and goes on, for one."""
FIRST_LOOK_S = 2.0
"""When the sweeper looks for a message whose publisher did not say that the broker has it."""
EARLY_S = 2.0
"""How long before its `eta` a message that waits in the store is published: on time for a worker to have fetched it."""

# By the clock: a transaction that is borrowed may have begun long ago.
_FIRST_LOOK = """CASE WHEN %(eta)s::timestamptz > now() + make_interval(secs => %(horizon_s)s)
    THEN %(eta)s::timestamptz - make_interval(secs => %(early_s)s)
    ELSE clock_timestamp() + make_interval(secs => %(first_look_s)s) END"""
_WAITS = "coalesce(due_at > now() + make_interval(secs => %(horizon_s)s), false) AS waits"

_KEEP = Statement(
    f"""
INSERT INTO {{messages}} (task_id, task, queue, publication, body, generation, due_at, expires_at, look_at, look_after)
VALUES (%(task_id)s, %(task)s, %(queue)s, %(publication)s, %(body)s, 1, coalesce(%(eta)s::timestamptz, now()),
  %(expires_at)s::timestamptz, {_FIRST_LOOK}, make_interval(secs => %(look_after_s)s))
ON CONFLICT (task_id) DO NOTHING RETURNING {_WAITS}""",
    since=SINCE,
    frequent=True,
)


@dataclass(frozen=True, slots=True)
class Waits:
    """When a message is looked at: so long after its publication; what is due beyond the horizon waits here."""

    look_after_s: float
    horizon_s: float


@dataclass(frozen=True, slots=True)
class Kept:
    """A message that was kept. `waits`: not for the broker just now, but in the store for its eta."""

    waits: bool
    generation: int = 1


def keep(executor: Executor, message: Message, waits: Waits) -> Kept | None:
    """Keep a message that is about to be published; None if there is one of this task id already."""
    found = executor.run(_KEEP, task_id=message.task_id, **_columns(message, waits))
    return Kept(found[0].waits) if found else None


def send_keep(connections: Connections, message: Message, waits: Waits, *, within_s: float) -> Sent | None:
    """Send what `keep` sends, and wait for no answer, which has a row if it is kept; None where that cannot be done."""
    parameters = {"task_id": message.task_id, **_columns(message, waits)}
    return connections.send("durable-keep", _KEEP, parameters, within_s=within_s, held=True)


_KEEP_MANY = Statement(
    """
WITH r AS MATERIALIZED (
  SELECT * FROM unnest(%(task_ids)s::text[], %(tasks)s::text[], %(queues)s::text[], %(publications)s::text[],
    %(bodies)s::bytea[], %(etas)s::timestamptz[], %(expires)s::timestamptz[])
    AS r(task_id, task, queue, publication, body, eta, expires_at)),
kept AS (
  INSERT INTO {messages}
    (task_id, task, queue, publication, body, generation, due_at, expires_at, look_at, look_after)
  SELECT r.task_id, r.task, r.queue, r.publication, r.body, 1, coalesce(r.eta, now()), r.expires_at,
    CASE WHEN r.eta > now() + make_interval(secs => %(horizon_s)s) THEN r.eta - make_interval(secs => %(early_s)s)
      ELSE clock_timestamp() + make_interval(secs => %(first_look_s)s) END, make_interval(secs => %(look_after_s)s)
  FROM r
  ON CONFLICT (task_id) DO NOTHING
  RETURNING task_id, coalesce(due_at > now() + make_interval(secs => %(horizon_s)s), false) AS waits)
SELECT coalesce(array_agg(task_id) FILTER (WHERE waits), ARRAY[]::text[]) AS waiting,
  (SELECT r.task_id FROM r WHERE r.task_id NOT IN (SELECT k.task_id FROM kept k) LIMIT 1) AS taken
FROM kept""",
    since=SINCE,
    frequent=True,
)


def keep_many(
    run: Callable[..., Sequence[Any]], messages: Sequence[Message], waits: Waits, *, publishing_takes_s: float = 0.0
) -> tuple[list[str], str | None]:
    """Keep a page of messages in one statement; returns which of them wait in the store, and a task id that is taken.

    Messages whose task id is taken are left out. The sweeper leaves the publisher so much more time. `run` is that of
    an executor, or what does something else while the server inserts.
    """
    found = run(
        _KEEP_MANY,
        task_ids=[message.task_id for message in messages], tasks=[message.task for message in messages],
        queues=[message.queue for message in messages], publications=[message.publication for message in messages],
        bodies=[message.body for message in messages], etas=[message.eta for message in messages],
        expires=[message.expires_at for message in messages], look_after_s=waits.look_after_s,
        horizon_s=waits.horizon_s, first_look_s=FIRST_LOOK_S + publishing_takes_s, early_s=EARLY_S,
    )  # fmt: skip
    return found[0].waiting, found[0].taken


_UNPUBLISHED = Statement(
    """
SELECT task_id FROM {messages} WHERE task_id = ANY(%(task_ids)s::text[]) AND generation = 1
  AND published_at IS NULL AND locked_by IS NULL AND doom IS NULL
  AND due_at <= now() + make_interval(secs => %(horizon_s)s)""",
    since=SINCE,
)


def unpublished(executor: Executor, task_ids: Iterable[str], *, horizon_s: float) -> set[str]:
    """Read which of these rows are there, not marked as published, and not to wait in the store."""
    found = executor.run(_UNPUBLISHED, task_ids=list(task_ids), horizon_s=horizon_s)
    return {row.task_id for row in found}


def _columns(message: Message, waits: Waits) -> dict[str, Any]:
    return {
        "task": message.task, "queue": message.queue, "publication": message.publication, "body": message.body,
        "eta": message.eta, "expires_at": message.expires_at, "look_after_s": waits.look_after_s,
        "horizon_s": waits.horizon_s, "first_look_s": FIRST_LOOK_S, "early_s": EARLY_S,
    }  # fmt: skip


_IS_KEPT = Statement(
    """
SELECT body = %(body)s AND publication = %(publication)s AND generation = 1 AS same FROM {messages}
WHERE task_id = %(task_id)s""",
    since=SINCE,
)


def is_kept(executor: Executor, message: Message) -> bool:
    """Tell whether the row of this task id is this very message: its insert was repeated."""
    found = executor.run(_IS_KEPT, task_id=message.task_id, body=message.body, publication=message.publication)
    return bool(found and found[0].same)


# What is locked first, here and below, is a CTE with a row looked up for each key (LATERAL), so that no plan reads the
# table for each of its rows: where a VACUUM found it empty and could not truncate it, Postgres takes it for empty until
# the next one, and any order of joins for free. A hundred marks beside a thousand rows took nine seconds so.
_MARK = Statement(
    """
WITH free AS MATERIALIZED (
  SELECT found.task_id FROM unnest(%(task_ids)s::text[], %(generations)s::int[]) AS r(task_id, generation)
    CROSS JOIN LATERAL (
      SELECT m2.task_id, set_config('synchronous_commit', 'off', true) FROM {messages} m2
      WHERE m2.task_id = r.task_id AND m2.generation = r.generation
        AND m2.published_at IS NULL AND m2.locked_by IS NULL AND m2.doom IS NULL
        AND m2.missing_at IS NULL AND (%(again)s::boolean OR m2.on_lost IS NULL)
      FOR UPDATE OF m2 SKIP LOCKED) found)
UPDATE {messages} m SET published_at = now(), look_at = greatest(m.due_at, now()) + m.look_after
FROM free WHERE m.task_id = free.task_id""",
    since=SINCE,
    frequent=True,
)


def mark_published(executor: Executor, published: Iterable[Key], *, again: bool) -> None:
    """Note which messages the broker has; a mark that is lost only means one more copy, so it waits for no disk.

    Not what is missing already: who had received it has died before this mark was written, and it is to be sent again.
    Nor, unless they were published `again`, by the sweeper, what a run has begun and lost meanwhile (`on_lost` is noted
    with a lock): the mark is of the message that this run had.
    """
    keys = list(published)
    ids, generations = [task_id for task_id, _ in keys], [generation for _, generation in keys]
    executor.run(_MARK, task_ids=ids, generations=generations, again=again)


_MOVE = Statement(
    f"""
UPDATE {{messages}} SET task = %(task)s, queue = %(queue)s, publication = %(publication)s, body = %(body)s,
  generation = generation + 1, due_at = coalesce(%(eta)s::timestamptz, now()), expires_at = %(expires_at)s::timestamptz,
  look_at = CASE WHEN doom IS NULL THEN {_FIRST_LOOK} ELSE now() END,
  look_after = make_interval(secs => %(look_after_s)s),
  published_at = NULL, missing_at = NULL, locked_by = NULL, locked_at = NULL, locked_pid = NULL, on_lost = NULL,
  max_losses = NULL, losses = 0
WHERE task_id = %(task_id)s AND generation = %(generation)s AND locked_by = %(worker_id)s
RETURNING generation, {_WAITS}""",
    since=SINCE,
)


def move(executor: Executor, message: Message, key: Key, waits: Waits, *, worker_id: int) -> Kept | None:
    """Turn the row that a run holds into that of the message by which it goes on: a retry, or what replaces it.

    None if the run does not hold it any more.
    """
    found = executor.run(
        _MOVE, task_id=key[0], generation=key[1], worker_id=worker_id, **_columns(message, waits)
    )  # fmt: skip
    return Kept(found[0].waits, found[0].generation) if found else None


_BEGIN = Statement(
    """
UPDATE {messages} SET locked_by = %(worker_id)s, locked_at = now(), locked_pid = %(pid)s, look_at = 'infinity',
  missing_at = NULL, on_lost = %(on_lost)s, max_losses = %(max_losses)s
WHERE task_id = %(task_id)s AND generation = %(generation)s AND locked_by IS NULL AND doom IS NULL AND body IS NOT NULL
  AND EXISTS (SELECT FROM {workers} w WHERE w.id = %(worker_id)s AND w.dead_at IS NULL)
RETURNING losses""",
    since=SINCE,
    frequent=True,
)


def begin(executor: Executor, key: Key, *, worker_id: int, pid: int, on_lost: str, max_losses: int) -> bool:
    """Lock the row for a run; False for a copy: it runs, it was finished, moved on, or is in the dead set."""
    return bool(
        executor.run(
            _BEGIN, task_id=key[0], generation=key[1], worker_id=worker_id, pid=pid, on_lost=on_lost,
            max_losses=max_losses,
        )
    )  # fmt: skip


def send_begin(
    connections: Connections, key: Key, *, worker_id: int, pid: int, on_lost: str, max_losses: int, within_s: float
) -> Sent | None:
    """Send what `begin` sends, and wait for no answer, which has a row if it is locked; None where that cannot be."""
    parameters = {
        "task_id": key[0], "generation": key[1], "worker_id": worker_id, "pid": pid, "on_lost": on_lost,
        "max_losses": max_losses,
    }  # fmt: skip
    return connections.send("durable-begin", _BEGIN, parameters, within_s=within_s, held=True)


class Late(NamedTuple):
    """A run that has begun without a lock, `age_s` ago."""

    task_id: str
    age_s: float
    max_losses: int


_FIRST = 1
"""The generation of what may begin so."""

# The row must have been there when the run began. Else it is that of a later call with the same task id, which somebody
# was free to make as a copy of the run had ended meanwhile.
_WAS_THERE = "m.locked_by IS NULL AND m.due_at <= now() - make_interval(secs => r.age_s)"

_LOCK_LATE = Statement(
    f"""
UPDATE {{messages}} m SET locked_by = %(worker_id)s, locked_at = now(), locked_pid = %(pid)s, look_at = 'infinity',
  missing_at = NULL, on_lost = 'requeue', max_losses = r.max_losses
FROM unnest(%(task_ids)s::text[], %(ages)s::double precision[], %(max_losses)s::int[]) AS r(task_id, age_s, max_losses)
WHERE m.task_id = r.task_id AND m.generation = {_FIRST} AND m.body IS NOT NULL
  AND ({_WAS_THERE} AND m.doom IS NULL OR m.locked_by = %(worker_id)s AND m.locked_pid = %(pid)s)
  AND EXISTS (SELECT FROM {{workers}} w WHERE w.id = %(worker_id)s AND w.dead_at IS NULL)
RETURNING m.task_id""",
    since=SINCE,
    frequent=True,
)


def lock_late(executor: Executor, runs: Sequence[Late], *, worker_id: int, pid: int) -> set[str]:
    """Lock the rows of runs that have begun before; returns which are locked now, also by an earlier try.

    The others are somebody else's, gone, or doomed.
    """
    found = executor.run(
        _LOCK_LATE, worker_id=worker_id, pid=pid, task_ids=[run.task_id for run in runs],
        ages=[run.age_s for run in runs], max_losses=[run.max_losses for run in runs],
    )  # fmt: skip
    return {row.task_id for row in found}


_REMOVE_LATE = Statement(
    f"""
DELETE FROM {{messages}} m USING unnest(%(task_ids)s::text[], %(ages)s::double precision[]) AS r(task_id, age_s),
  (SELECT set_config('synchronous_commit', 'off', true) AS how) commit
WHERE commit.how = 'off' AND m.task_id = r.task_id AND m.generation = {_FIRST} AND m.body IS NOT NULL
  AND ({_WAS_THERE} OR m.locked_by = %(worker_id)s AND m.locked_pid = %(pid)s)
RETURNING m.task_id""",
    since=SINCE,
    frequent=True,
)


def remove_late(executor: Executor, runs: Sequence[Late], *, worker_id: int, pid: int) -> set[str]:
    """Remove the rows of runs that ended well, whether they had been locked or not, and return which those are.

    It waits for no disk: one that is there again after a crash of the server is of a task that may be repeated.
    """
    found = executor.run(
        _REMOVE_LATE, worker_id=worker_id, pid=pid, task_ids=[run.task_id for run in runs],
        ages=[run.age_s for run in runs],
    )  # fmt: skip
    return {row.task_id for row in found}


BURIAL_S = 1.0
"""How long before it can be seen an entry may be dated: a run that has begun meanwhile has found the row there."""

# The same of an entry: it was not kept later, as far as the entry tells, and it died after the run had begun.
_WAS_THE_SAME = f"""coalesce((d.payload->>'due_at')::timestamptz <= now() - make_interval(secs => r.age_s), true)
    AND d.died_at > now() - make_interval(secs => r.age_s + {BURIAL_S})"""

_TAKE_BACK_LATE = Statement(
    f"""
DELETE FROM {{dead}} WHERE id = ANY(ARRAY(
  SELECT max(d.id) FROM (
    SELECT d.* FROM (SELECT * FROM {{dead}} ORDER BY id DESC LIMIT %(newest)s) d
    WHERE d.task_id = ANY(%(task_ids)s::text[]) AND d.body IS NOT NULL AND d.reason IN ('lost', 'revoked', 'expired')
      AND (d.payload->>'generation')::int = {_FIRST}) d
    JOIN unnest(%(task_ids)s::text[], %(ages)s::double precision[]) AS r(task_id, age_s) ON r.task_id = d.task_id
  WHERE {_WAS_THE_SAME}
  GROUP BY d.task_id))
RETURNING task_id""",
    since=SINCE,
)


def take_back_late(executor: Executor, runs: Sequence[Late]) -> set[str]:
    """Take out of the dead set what ended well after all, of runs that had begun without a lock; as `take_back`."""
    found = executor.run(
        _TAKE_BACK_LATE, task_ids=[run.task_id for run in runs], ages=[run.age_s for run in runs], newest=NEWEST
    )
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


_READ = Statement(
    """
SELECT generation, locked_by, locked_pid, doom,
  published_at IS NULL AND locked_by IS NULL AND doom IS NULL
    AND look_at < now() + make_interval(secs => %(first_look_s)s) AS unpublished
FROM {messages} WHERE task_id = %(task_id)s AND body IS NOT NULL""",
    since=SINCE,
)


def read(executor: Executor, task_id: str) -> Any | None:
    """Read how the row of a task id stands; None if there is none: it was finished."""
    found = executor.run(_READ, task_id=task_id, first_look_s=FIRST_LOOK_S)
    return found[0] if found else None


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


_TAKE_BACK = Statement(
    f"""
WITH row AS (
  DELETE FROM {{messages}} WHERE task_id = %(task_id)s AND generation = %(generation)s AND body IS NOT NULL
    AND locked_by IS NULL
    AND (%(age_s)s::double precision IS NULL OR due_at <= now() - make_interval(secs => %(age_s)s)) RETURNING task_id),
 entry AS (
  DELETE FROM {{dead}} WHERE id = (
    SELECT d.id FROM (SELECT * FROM {{dead}} ORDER BY id DESC LIMIT %(newest)s) d,
      (SELECT %(age_s)s::double precision AS age_s) r
    WHERE d.task_id = %(task_id)s AND d.body IS NOT NULL AND d.reason IN ('lost', 'revoked', 'expired')
      AND (d.payload->>'generation')::int = %(generation)s
      AND (r.age_s IS NULL OR {_WAS_THE_SAME})
    ORDER BY d.id DESC LIMIT 1) RETURNING task_id)
SELECT task_id FROM row UNION ALL SELECT task_id FROM entry""",
    since=SINCE,
)


def take_back(executor: Executor, key: Key, *, age_s: float | None = None) -> bool:
    """Remove what became of a run that was called lost and has ended well after all; False if it is too late.

    That is its row, if no other run holds it, or its entry in the dead set, looked for among the newest ones: as lost,
    or as what kept it from running again. An entry of a run that has ended otherwise stays. `age_s`: how long ago the
    run began, if that was without a lock: of another call of this task id nothing is taken then.
    """
    return bool(executor.run(_TAKE_BACK, task_id=key[0], generation=key[1], age_s=age_s, newest=NEWEST))


_FORGET = Statement(
    """
DELETE FROM {messages} WHERE task_id = %(task_id)s AND generation = %(generation)s AND locked_by IS NULL""",
    since=SINCE,
)


def forget(executor: Executor, key: Key) -> None:
    """Remove a row that no run holds: its run had ended well after all, or was one without a lock."""
    executor.run(_FORGET, task_id=key[0], generation=key[1])


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


_BURY = Statement(
    """
WITH gone AS (
  DELETE FROM {messages} WHERE task_id = %(task_id)s AND generation = %(generation)s AND body IS NOT NULL
    AND CASE %(by)s WHEN 'run' THEN locked_by = %(worker_id)s
      WHEN 'worker' THEN locked_by IS NULL OR locked_by = %(worker_id)s ELSE locked_by IS NULL END
  RETURNING *)
INSERT INTO {dead} (task_id, task, queue, reason, error, traceback, retries, payload, body)
SELECT task_id, task, queue, %(reason)s, %(error)s, %(traceback)s, %(retries)s,
  json_build_object('v', 2, 'publication', publication, 'generation', generation, 'losses', losses, 'due_at', due_at),
  body
FROM gone RETURNING id, task""",
    since=SINCE,
)


def bury(
    executor: Executor, key: Key, *, by: str, worker_id: int | None, reason: str, error: str, traceback: str | None,
    retries: int,
) -> Any | None:  # fmt: skip
    """Move a row to the dead set; returns the entry's (id, task), None if it was somebody else's by then.

    `by` is who judges: the ``run`` that holds it, the ``worker`` (which may not have begun it), or the ``sweeper``.
    """
    found = executor.run(
        _BURY, task_id=key[0], generation=key[1], by=by, worker_id=worker_id, reason=reason, error=error,
        traceback=traceback, retries=retries,
    )  # fmt: skip
    return found[0] if found else None


_BURIED = Statement(
    """
SELECT d.id, d.task FROM (SELECT * FROM {dead} ORDER BY id DESC LIMIT %(newest)s) d
WHERE d.task_id = %(task_id)s AND (d.payload->>'generation')::int = %(generation)s AND d.body IS NOT NULL
ORDER BY d.id DESC LIMIT 1""",
    since=SINCE,
)


def buried(executor: Executor, key: Key) -> Any | None:
    """Read the (id, task) of the entry that a row became, looked for among the newest; a generation does so once."""
    found = executor.run(_BURIED, task_id=key[0], generation=key[1], newest=NEWEST)
    return found[0] if found else None


_POISON = Statement(
    """
WITH free AS (
  UPDATE {messages} SET doom = 'lost', look_at = now(), published_at = NULL, missing_at = NULL, on_lost = NULL,
    max_losses = NULL
  WHERE task_id = %(task_id)s AND generation = %(generation)s AND body IS NOT NULL AND locked_by IS NULL
    AND doom IS NULL
  RETURNING task_id)
SELECT (SELECT count(*) FROM free) > 0 AS doomed,
  EXISTS (SELECT FROM {messages} m WHERE m.task_id = %(task_id)s AND m.body IS NOT NULL) AS is_kept""",
    since=SINCE,
)


def poison(executor: Executor, key: Key) -> Any:
    """Doom a row whose message each worker died with, before it had begun a run: (doomed, is_kept).

    Its `on_lost` is null, as of no other that is doomed as lost. What runs, was revoked or goes on as another message
    is left alone: then only `is_kept` is true.
    """
    return executor.run(_POISON, task_id=key[0], generation=key[1])[0]


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
FROM held WHERE m.task_id = held.task_id RETURNING m.task_id, m.task, held.loss""",
    since=SINCE,
)


def give_back(
    executor: Executor, task_ids: Iterable[str], *, worker_id: int, loss: bool, begun: bool
) -> Sequence[Any]:  # fmt: skip
    """Take runs that were cut off from their own worker; what was begun and may not be repeated is doomed."""
    return executor.run(_GIVE_BACK, task_ids=list(task_ids), worker_id=worker_id, loss=int(loss), begun=begun)


_TAKE_FROM_THE_DEAD = Statement(
    f"""
WITH held AS MATERIALIZED (
  SELECT m2.task_id, CASE WHEN w.dead_at IS NOT NULL AND w.suspect_at IS NULL THEN 0 ELSE 1 END AS loss, true AS begun
  FROM {{messages}} m2 LEFT JOIN {{workers}} w ON w.id = m2.locked_by
  WHERE m2.locked_by IS NOT NULL AND m2.body IS NOT NULL AND (w.id IS NULL OR w.dead_at IS NOT NULL)
  ORDER BY m2.task_id LIMIT %(limit)s FOR UPDATE OF m2 SKIP LOCKED)
UPDATE {{messages}} m SET {_LOST}
FROM held WHERE m.task_id = held.task_id RETURNING m.task_id, m.task, held.loss""",
    since=SINCE,
)


def take_from_the_dead(executor: Executor, limit: int) -> Sequence[Any]:
    """Take a page of runs from workers that were declared dead; one that left as planned has lost nothing.

    Reads what is running, by the index of held rows.
    """
    return executor.run(_TAKE_FROM_THE_DEAD, limit=limit)


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
WHERE task_id = ANY(%(task_ids)s::text[]) AND published_at IS NOT NULL AND body IS NOT NULL""",
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
        AND m2.look_at NOT BETWEEN now() + make_interval(secs => 0.75 * %(wait_s)s::double precision)
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
    THEN least(m.look_after * 2, make_interval(secs => %(longest_s)s)) ELSE m.look_after END
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


_LOOK_NOW = Statement(
    """
WITH page AS (
  SELECT task_id FROM {messages}
  WHERE task_id > %(after)s AND body IS NOT NULL AND (published_at IS NOT NULL OR due_at <= now())
    AND locked_by IS NULL
  ORDER BY task_id LIMIT %(limit)s FOR UPDATE SKIP LOCKED),
 looked AS (UPDATE {messages} m SET published_at = NULL,
    look_at = CASE WHEN m.published_at IS NULL THEN m.look_at ELSE now() END,
    missing_at = CASE WHEN m.published_at IS NULL THEN now() ELSE m.missing_at END
  FROM page WHERE m.task_id = page.task_id)
SELECT max(task_id) AS last FROM page""",
    since=SINCE,
)


def look_now(executor: Executor, *, after: str, limit: int) -> str | None:
    """Have a page of rows that no run holds published again; returns the last of it, None at the end.

    This is what follows an emptied broker. What is not marked as published its publisher may be about to publish: a
    copy now might be run and done before that is there, which then could not be told from the first. So it is looked
    at when it would have been, in a moment; and not marked any more, as it may have been in the broker already.
    """
    last: str | None = executor.run(_LOOK_NOW, after=after, limit=limit)[0].last
    return last


MOST_DEATHS = 10
"""How many earlier deaths of a task are remembered; they travel with its message."""

_REVIVE = Statement(
    """
WITH gone AS (
  DELETE FROM {dead} d WHERE d.id = ANY(ARRAY(
      SELECT max(e.id) FROM {dead} e WHERE e.id = ANY(%(ids)s::bigint[]) AND e.body IS NOT NULL GROUP BY e.task_id))
    AND NOT EXISTS (SELECT FROM {messages} m WHERE m.task_id = d.task_id) RETURNING *)
INSERT INTO {messages} (task_id, task, queue, publication, body, generation, look_at, look_after)
SELECT task_id, task, queue,
  (SELECT json_build_object('v', p.j->'v', 'about', p.j->'about', 'deaths', json_agg(d.death ORDER BY d.no))::text
   FROM (SELECT death, no FROM json_array_elements(p.j->'deaths') WITH ORDINALITY AS old (death, no)
         UNION ALL SELECT json_build_object('at', died_at, 'reason', reason, 'error', split_part(error, ':', 1)), 1e9
         ORDER BY no DESC LIMIT %(most_deaths)s) d), body,
  (payload->>'generation')::int + 1, now() + make_interval(secs => %(first_look_s)s),
  make_interval(secs => %(look_after_s)s)
FROM gone CROSS JOIN LATERAL (SELECT (payload->>'publication')::json AS j) p
RETURNING task_id, task, queue, publication, body, generation, expires_at""",
    since=SINCE,
)


def revive(executor: Executor, entry_ids: Sequence[int], *, look_after_s: float) -> list[Message]:
    """Take entries out of the dead set and keep their messages as new generations; those that are there, and free."""
    rows = executor.run(
        _REVIVE, ids=list(entry_ids), look_after_s=look_after_s, first_look_s=FIRST_LOOK_S, most_deaths=MOST_DEATHS
    )
    return [Message.of_row(row) for row in rows]


_OLD_ENTRIES = Statement(
    """
WITH page AS MATERIALIZED (
  SELECT id, died_at, body IS NOT NULL AS ordinary FROM {dead} WHERE id > %(after)s ORDER BY id LIMIT %(limit)s),
 gone AS (DELETE FROM {dead} WHERE id = ANY(ARRAY(
   SELECT id FROM page WHERE ordinary AND died_at < now() - make_interval(secs => %(age_s)s))) RETURNING id)
SELECT (SELECT count(*) FROM gone) AS removed, (SELECT max(id) FROM page) AS last""",
    since=SINCE,
)


def forget_entries(executor: Executor, *, after: int, age_s: float, limit: int) -> Any:
    """Remove those of a page of the dead set that are of ordinary tasks and older than this: (removed, last id)."""
    return executor.run(_OLD_ENTRIES, after=after, age_s=age_s, limit=limit)[0]


def fits(executor: Executor) -> bool:
    """Tell whether the schema has what durable tasks need."""
    return (revisions.read(executor) or revisions.FIRST) >= SINCE
