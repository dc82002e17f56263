"""The state of the broker at a glance, for people; no count reads more as queues grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..statement import Reader, Statement
from .messages import COUNTED, HIGHEST_PRIORITY

_QUEUES = Statement("""
SELECT q.name, coalesce(sum(c.ready), 0)::bigint AS ready, coalesce(sum(c.held), 0)::bigint AS held,
  coalesce(max(l.later), 0)::bigint AS later
FROM {broker_queues} q
CROSS JOIN generate_series(0, %(highest)s::int) AS p(priority)
CROSS JOIN LATERAL (
  SELECT count(*) FILTER (WHERE f.holder IS NULL) AS ready, count(*) FILTER (WHERE f.holder IS NOT NULL) AS held
  FROM (
    SELECT m.holder FROM {broker_messages} m
    WHERE m.queue = q.name AND m.priority = p.priority AND m.due_at IS NULL ORDER BY m.id LIMIT %(counted)s) AS f) AS c
LEFT JOIN (
  SELECT d.queue, count(*) AS later FROM (
    SELECT m.queue FROM {broker_messages} m WHERE m.due_at IS NOT NULL ORDER BY m.due_at LIMIT %(counted)s) AS d
  GROUP BY d.queue) AS l ON l.queue = q.name
WHERE NOT q.transient GROUP BY q.name ORDER BY q.name""")


def queues(executor: Reader) -> Sequence[Any]:
    """Count the messages of each lasting queue: name, ready, held by consumers, and later (waiting for their time).

    Of each priority `COUNTED` messages are counted at most, and so many of all that wait for their time.
    """
    return executor.run(_QUEUES, highest=HIGHEST_PRIORITY, counted=COUNTED)


_CONSUMERS = Statement("SELECT count(*) AS rows FROM {broker_consumers}")


def consumers(executor: Reader) -> int:
    """Count the consumers, with those that nobody has found dead yet."""
    found: int = executor.run(_CONSUMERS)[0].rows
    return found
