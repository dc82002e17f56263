"""Rows of the outbox that a fetch holds together with the references that lead to them, and their ends in pages.

Who fetches the message of a task that may be repeated holds its row: the statement that fetches the reference locks the
row for the worker, so that no process has to before the body. What such a run leaves to be done is told by its process
and done by the worker, for many runs in one statement, mostly that of the next fetch.

A row that has come back from a death is not held so: `on_lost` says that a run had it. The process that runs it locks
it, which notes that it has begun (`tests/protocol_model/holds.py`). Rows of pools and of managed queues are not held
either: whether they may begin is decided elsewhere. No statement here waits for a row of the outbox that a transaction
has locked. A statement with results is refused after a moment if a result is locked (`results.kept_briefly`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...model.durable import Held
from ...model.status import Gate
from ..results import TOLD, Ended, kept_briefly, results_of, told
from ..statement import Frequent, Transaction, columns

IS_FRESH = f"""m.locked_by IS NULL AND m.on_lost IS NULL AND m.doom IS NULL AND m.pool IS NULL
      AND m.gate = {Gate.OPEN} AND NOT EXISTS (SELECT FROM {{queues}} q WHERE q.name = m.queue)"""
"""The condition that a row `m` may be held before its run begins, as SQL.

Who has its message knows that it is due. It may seem due later than this statement began, whose snapshot is younger.
"""

WAITED = "greatest(extract(epoch FROM now() - m.due_at)::double precision, 0::double precision)"
"""How long a row `m` has waited since it was due, as SQL."""

HOLDS = """
  UPDATE {messages} m SET locked_by = %(worker_id)s, locked_at = now(), next_check_at = 'infinity',
    suspected_at = NULL, declined_at = NULL, on_lost = 'requeue', max_losses = fresh.max_losses
  FROM fresh WHERE m.task_id = fresh.task_id"""
"""The UPDATE that holds the rows of `fresh`."""

HELD = f"""
fresh AS MATERIALIZED (
  SELECT DISTINCT ON (found.task_id) t.id AS reference, found.* FROM free t CROSS JOIN LATERAL (
    SELECT m.task_id, r.max_losses, {WAITED} AS waited_s
    FROM {{messages}} m JOIN unnest(%(tasks)s::text[], %(max_losses)s::int[]) AS r(task, max_losses) ON r.task = m.task
    WHERE m.task_id = t.task_id AND m.generation::bigint = t.generation AND {IS_FRESH}
    FOR UPDATE OF m SKIP LOCKED) found
  WHERE EXISTS (SELECT FROM {{workers}} w WHERE w.id = %(worker_id)s AND w.dead_at IS NULL)
  ORDER BY found.task_id, t.id),
held AS ({HOLDS}
  RETURNING fresh.reference, m.locked_at AS held_at, fresh.waited_s)"""
"""The CTE `held`, behind `free`, the references that are fetched: their rows that this worker holds from now on.

Of several references to one row, only the first has the hold: the others are copies.
"""

RUNS = """unnest(%(ended)s::text[], %(generations)s::int[], %(workers)s::bigint[], %(held_at)s::timestamptz[],
    %(keys)s::text[], %(states)s::text[], %(bodies)s::bytea[], %(lifetimes)s::double precision[])
    AS r(task_id, generation, worker_id, held_at, key, state, body, expires_s)"""
"""The relation `r` of holds and results, as SQL; see `ended`."""
IS_HELD = """m.task_id = r.task_id AND m.generation = r.generation AND m.locked_by = r.worker_id
      AND m.locked_at = r.held_at"""
"""The condition that the hold `r` of a row `m` stands, as SQL."""

OVER = f"""
ended AS MATERIALIZED (
  SELECT found.task_id, r.key, r.state, r.body, r.expires_s FROM {RUNS}
  CROSS JOIN LATERAL (
    SELECT m.task_id FROM {{messages}} m WHERE {IS_HELD}
    FOR UPDATE OF m SKIP LOCKED) found),
{kept_briefly("SELECT DISTINCT ON (e.key) e.* FROM ended e WHERE e.key IS NOT NULL")},
{told("ended g")},
over AS (DELETE FROM {{messages}} m USING ended WHERE m.task_id = ended.task_id RETURNING m.task_id)"""
"""The CTE `over`: the rows that were removed of runs that have ended well, if their holds stood.

Their results are kept, and those who wait for them are notified if the statement selects `TOLD`.
"""


@dataclass(frozen=True, slots=True)
class Holder:
    """The worker that holds what a fetch finds."""

    worker_id: int
    may_repeat: Mapping[str, int]
    """The tasks whose rows it may hold so: after how many losses each goes to the dead set."""

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of `HELD`."""
        return {
            "worker_id": self.worker_id,
            "tasks": list(self.may_repeat),
            "max_losses": list(self.may_repeat.values()),
        }


NOBODY = Holder(0, {})
"""Holds nothing."""


def ended(runs: Sequence[Ended]) -> dict[str, Any]:
    """Return the parameters of `RUNS` for runs, each named by its `Held`."""
    return {**those([one.run for one in runs]), **results_of([one.result for one in runs])}


def those(runs: Sequence[Held]) -> dict[str, Any]:
    """Return the parameters of `RUNS` for the holds alone."""
    return columns(runs, "ended", "generations", "workers", "held_at")


_REMOVE = Frequent(f"WITH {OVER} SELECT over.task_id, {TOLD} FROM over")


def remove(executor: Transaction, runs: Sequence[Ended]) -> frozenset[str]:
    """Remove the rows of runs that have ended well, and keep their results.

    Returns the task ids of those whose holds stood.
    """
    return frozenset(row.task_id for row in executor.run(_REMOVE, **ended(runs)))
