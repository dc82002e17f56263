"""Rows of `counters` and `served_queues`: what workers say of themselves. Nothing is decided by them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ..model.measures import Key
from .statement import Reader, Statement, Transaction

_ADD = Statement("""
INSERT INTO {counters} (name, label, value)
SELECT r.name, r.label, r.value FROM unnest(%(names)s::text[], %(labels)s::text[], %(amounts)s::double precision[])
  AS r(name, label, value) ORDER BY r.name, r.label
ON CONFLICT (name, label) DO UPDATE SET value = {counters}.value + excluded.value""")


def add(executor: Transaction, amounts: Mapping[Key, float]) -> None:
    """Add to the totals; two processes that do so at a time take the rows in the same order."""
    names, labels = [name for name, _ in amounts], [label for _, label in amounts]
    executor.run(_ADD, names=names, labels=labels, amounts=[float(amount) for amount in amounts.values()])


_READ = Statement("SELECT name, label, value FROM {counters}")


def read(executor: Transaction) -> dict[Key, float]:
    """Read all totals."""
    return {(row.name, row.label): row.value for row in executor.run(_READ)}


_SERVE = Statement("""
WITH w AS (SELECT id FROM {workers} WHERE id = %(worker_id)s FOR KEY SHARE),
gone AS (DELETE FROM {served_queues} WHERE worker_id = %(worker_id)s AND NOT queue = ANY(%(queues)s::text[]))
INSERT INTO {served_queues} (worker_id, queue, skew_s)
SELECT w.id, q, extract(epoch FROM clock_timestamp())::double precision - %(clock)s::double precision
FROM w, unnest(%(queues)s::text[]) q ORDER BY q
ON CONFLICT (worker_id, queue) DO UPDATE SET skew_s = excluded.skew_s""")


def serve(executor: Transaction, worker_id: int, queues: Iterable[str]) -> None:
    """Say which queues a worker takes messages from, and by its own clock when; a worker that is gone says nothing."""
    executor.run(_SERVE, worker_id=worker_id, queues=sorted(set(queues)), clock=time.time())


_SERVED = Statement("""
SELECT s.queue, count(*) AS workers FROM {served_queues} s JOIN {workers} w ON w.id = s.worker_id
WHERE w.dead_at IS NULL AND w.id <> ALL(%(silent)s::bigint[]) GROUP BY s.queue""")


def served(executor: Reader, silent: Collection[int]) -> Sequence[Any]:
    """Read how many live workers serve each queue, without those that are `silent` (`workers.silent`)."""
    return executor.run(_SERVED, silent=list(silent))


_SKEWED = Statement("""
SELECT DISTINCT ON (w.id) w.ident, s.skew_s FROM {served_queues} s JOIN {workers} w ON w.id = s.worker_id
WHERE w.dead_at IS NULL AND abs(s.skew_s) > %(most_s)s ORDER BY w.id""")


def skewed(executor: Transaction, most_s: float) -> Sequence[Any]:
    """Read the live workers whose clock differs from the database's by more than this, and by how much."""
    return executor.run(_SKEWED, most_s=most_s)


_UNANNOUNCED = Statement("""
SELECT w.id, w.ident FROM {workers} w
WHERE w.dead_at IS NULL AND w.id <> ALL(%(silent)s::bigint[])
  AND NOT EXISTS (SELECT FROM {served_queues} s WHERE s.worker_id = w.id) ORDER BY w.id""")


def unannounced(executor: Transaction, silent: Collection[int]) -> Sequence[Any]:
    """Read which live workers have not said what they serve: they are only just starting.

    Those that are `silent` (`workers.silent`) are not among them.
    """
    return executor.run(_UNANNOUNCED, silent=list(silent))
