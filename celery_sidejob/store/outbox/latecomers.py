"""Runs of durable tasks that the store hears about late: they lock their row late, or ended well after all.

A run that began without a lock locks its row when the store hears of it, or removes the row at once. A run that was
called lost and ends well takes its row or its entry back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ...model.durable import Content, Key
from ...model.run_end import RunEnd
from ..statement import Statement, Transaction
from ..task_end import TaskEnd
from .holds import HELD, LIVES
from .kinds import SOON
from .tasks import DIGEST


class LateRun(NamedTuple):
    """A run that has begun without a lock, `age_s` ago."""

    task_id: str
    content: Content
    age_s: float
    max_losses: int


_FIRST = 1
"""The generation of messages that may begin without a lock."""

# The row must have existed when the run began. Otherwise it belongs to a later call with the same task id. Such a call
# was possible because a copy of the run had ended meanwhile.
_WAS_THERE = "m.locked_by IS NULL AND m.due_at <= now() - make_interval(secs => r.age_s)"

_RUNS = """unnest(%(task_ids)s::text[], %(tasks)s::text[], %(digests)s::text[], %(ages)s::double precision[],
  %(max_losses)s::int[]) AS r(task_id, task, digest, age_s, max_losses)"""
_WAITED = "extract(epoch FROM now() - m.due_at)::double precision - r.age_s AS waited_s"
_IS_ITS_OWN = f"m.task = r.task AND {DIGEST} = r.digest"


def _parameters(runs: Sequence[LateRun]) -> dict[str, Any]:
    return {
        "task_ids": [run.task_id for run in runs], "tasks": [run.content.task for run in runs],
        "digests": [run.content.digest for run in runs], "ages": [run.age_s for run in runs],
        "max_losses": [run.max_losses for run in runs],
    }  # fmt: skip


_LOCK_LATE = Statement(
    f"""
UPDATE {{messages}} m SET {HELD}, on_lost = 'requeue', max_losses = r.max_losses
FROM {_RUNS}
WHERE m.task_id = r.task_id AND m.generation = {_FIRST} AND m.body IS NOT NULL AND {_IS_ITS_OWN}
  AND ({_WAS_THERE} AND m.doom IS NULL OR m.locked_by = %(worker_id)s AND m.locked_pid = %(pid)s)
  AND {LIVES}
RETURNING m.task_id, m.pool, m.queue, {_WAITED}""",
    frequent=True,
)


def lock_late(executor: Transaction, runs: Sequence[LateRun], *, worker_id: int, pid: int) -> dict[str, Any]:
    """Lock the rows of runs that have already begun; returns those that are locked now, also by an earlier try.

    {task id: (pool, queue, waited_s)}. The other rows belong to other runs, are gone or doomed, or have another
    content.
    """
    found = executor.run(_LOCK_LATE, worker_id=worker_id, pid=pid, **_parameters(runs))
    return {row.task_id: row for row in found}


_REMOVE_LATE = Statement(
    f"""
DELETE FROM {{messages}} m USING {_RUNS}, (SELECT {SOON} AS how) commit
WHERE commit.how = 'off' AND m.task_id = r.task_id AND m.generation = {_FIRST} AND m.body IS NOT NULL
  AND {_IS_ITS_OWN}
  AND ({_WAS_THERE} OR m.locked_by = %(worker_id)s AND m.locked_pid = %(pid)s)
RETURNING m.task_id, m.pool, m.queue, {_WAITED}""",
    frequent=True,
)


def remove_late(runs: Sequence[LateRun], *, worker_id: int, pid: int) -> TaskEnd:
    """Remove the rows of runs that ended well, whether they were locked or not: (task_id, pool, queue, waited_s).

    Commits without waiting for the disk: a row that is back after a crash of the server belongs to a repeatable task.
    """
    return TaskEnd(RunEnd.COMPLETED, _REMOVE_LATE, {"worker_id": worker_id, "pid": pid, **_parameters(runs)})


BURIAL_S = 1.0
"""Seconds by which an entry's date may precede its commit: a run begun in between has found the row."""

# The same for an entry: its message was not kept later, and it died after the run had begun.
_WAS_THE_SAME = f"""(d.payload->>'due_at')::timestamptz <= now() - make_interval(secs => r.age_s)
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
RETURNING task_id"""
)


def take_back_late(executor: Transaction, runs: Sequence[LateRun]) -> set[str]:
    """Take out of the dead set runs that began without a lock and ended well after all; see `take_back`."""
    found = executor.run(_TAKE_BACK_LATE, **_parameters(runs))
    return {row.task_id for row in found}


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
 entry AS (DELETE FROM {{dead}} WHERE %(entry_too)s AND id = ({_ENTRY}) RETURNING task_id)
SELECT task_id FROM row UNION ALL SELECT task_id FROM entry"""
)


def take_back(
    executor: Transaction, key: Key, content: Content, *, age_s: float | None = None, entry_too: bool = True
) -> bool:
    """Remove the row or entry of a run that was called lost and ended well after all; False if it is too late.

    That is its row, if no other run holds it, or with `entry_too` its entry in the dead set, as lost or for the reason
    that kept it from running again. The entry of a run that ended otherwise stays. `age_s`: seconds since the run
    began, if it began without a lock: then nothing is taken of another call with this task id.
    """
    return bool(
        executor.run(
            _TAKE_BACK, task_id=key[0], generation=key[1], task=content.task, digest=content.digest, age_s=age_s,
            entry_too=entry_too,
        )
    )  # fmt: skip


_KEEP_FROM_OTHERS = Statement(
    f"""
WITH row AS (
  UPDATE {{messages}} SET doom = coalesce(doom, 'lost'), published_at = NULL, suspected_at = NULL,
    next_check_at = now() + make_interval(secs => %(for_s)s)
  WHERE task_id = %(task_id)s AND generation = %(generation)s AND {_FREE} RETURNING task_id)
SELECT task_id FROM row UNION ALL SELECT d.task_id FROM {{dead}} d WHERE %(entry_too)s AND d.id = ({_ENTRY})"""
)


def keep_from_others(
    executor: Transaction, key: Key, content: Content, *, age_s: float | None, for_s: float, entry_too: bool
) -> bool:
    """Doom the row or entry of a run that was called lost and ended well after all: no other run begins.

    `take_back` removes it afterwards. If that never comes, the sweeper buries it after `for_s` seconds. False if
    `take_back` would come too late, or without `entry_too` if the dead set has it.
    """
    return bool(
        executor.run(
            _KEEP_FROM_OTHERS, task_id=key[0], generation=key[1], task=content.task, digest=content.digest,
            age_s=age_s, for_s=for_s, entry_too=entry_too,
        )
    )  # fmt: skip
