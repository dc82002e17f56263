"""Revocations of ordinary durable tasks: their rows are doomed as revoked.

The sweeper then buries a waiting row. A row that a run holds stays with that run, which ends as it will. If it would
begin again, after a retry or a loss, it is buried instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..statement import Statement, Transaction

_REVOKE = Statement(
    """
UPDATE {messages} m SET doom = 'revoked', suspected_at = NULL,
  published_at = CASE WHEN m.locked_by IS NULL THEN NULL ELSE m.published_at END,
  next_check_at = CASE WHEN m.locked_by IS NULL THEN now() ELSE m.next_check_at END
FROM (SELECT task_id FROM {messages}
      WHERE task_id = ANY(%(task_ids)s::text[]) AND body IS NOT NULL AND doom IS NULL
        AND (%(call)s::text IS NULL OR generation = 1 AND publication::json->>'call' = %(call)s)
      ORDER BY task_id FOR UPDATE) undoomed
WHERE m.task_id = undoomed.task_id RETURNING m.task_id, m.locked_by IS NOT NULL AS runs""",
)


def revoke(executor: Transaction, task_ids: Iterable[str], *, call: str | None = None) -> Sequence[Any]:
    """Doom the messages of these task ids, whether they wait or run; returns (task_id, runs) of the rows found.

    With `call` only the messages of that call, not a later task of the same id.
    """
    return executor.run(_REVOKE, task_ids=sorted(set(task_ids)), call=call)
