"""Rows of `broker_queues` and `broker_bindings`: which queues were declared, and which exchange leads to which of them.

They are shared by all processes: a worker finds the reply queue that a client has bound. A transient queue (one that is
deleted with its consumer) and one with an expiry go when nobody has used them for `unused_s`. An exchange may also lead
to everybody who listens just now: `broker_broadcasts`, which is not logged, and kept short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..statement import Frequent, Reader, Statement, Transaction
from .messages import COUNTED, HIGHEST_PRIORITY

_DECLARE = Statement("""
INSERT INTO {broker_queues} AS q (name, transient, unused_s, expires_at)
VALUES (%(name)s, %(transient)s, %(unused_s)s::double precision,
  now() + make_interval(secs => %(unused_s)s::double precision))
ON CONFLICT (name) DO UPDATE
SET transient = excluded.transient, unused_s = excluded.unused_s, expires_at = excluded.expires_at
WHERE q.transient <> excluded.transient OR q.unused_s IS NOT NULL OR excluded.unused_s IS NOT NULL""")


def declare(executor: Transaction, name: str, *, transient: bool = False, unused_s: float | None = None) -> None:
    """Declare a queue, and use it; a queue that was declared alike and does not expire is only read."""
    executor.run(_DECLARE, name=name, transient=transient, unused_s=unused_s)


_IS_DECLARED = Statement("SELECT EXISTS (SELECT FROM {broker_queues} q WHERE q.name = %(name)s) AS found")


def is_declared(executor: Reader, name: str) -> bool:
    """Tell whether a queue was declared and not deleted."""
    return bool(executor.run(_IS_DECLARED, name=name)[0].found)


_DELETE = Statement("DELETE FROM {broker_queues} q WHERE q.name = %(name)s")


def delete(executor: Transaction, name: str) -> None:
    """Delete a queue with its bindings; its messages stay."""
    executor.run(_DELETE, name=name)


_BIND = Statement("""
WITH queue AS (INSERT INTO {broker_queues} (name) VALUES (%(queue)s) ON CONFLICT (name) DO NOTHING)
INSERT INTO {broker_bindings} (exchange, queue, routing_key)
VALUES (%(exchange)s, %(queue)s, %(routing_key)s) ON CONFLICT (exchange, queue, routing_key) DO NOTHING""")


def bind(executor: Transaction, exchange: str, queue: str, routing_key: str) -> None:
    """Bind a queue to an exchange; a queue that was not declared is now."""
    executor.run(_BIND, exchange=exchange, queue=queue, routing_key=routing_key)


_UNBIND = Statement("""
DELETE FROM {broker_bindings} b
WHERE b.exchange = %(exchange)s AND b.queue = %(queue)s AND b.routing_key = %(routing_key)s""")


def unbind(executor: Transaction, exchange: str, queue: str, routing_key: str) -> None:
    """Remove a binding."""
    executor.run(_UNBIND, exchange=exchange, queue=queue, routing_key=routing_key)


_BOUND_TO = Statement("""
SELECT b.routing_key, b.queue, q.transient FROM {broker_bindings} b JOIN {broker_queues} q ON q.name = b.queue
WHERE b.exchange = %(exchange)s ORDER BY b.queue, b.routing_key""")


def bound_to(executor: Reader, exchange: str) -> Sequence[Any]:
    """Read the bindings of an exchange: routing_key, queue, transient."""
    return executor.run(_BOUND_TO, exchange=exchange)


_USE = Statement("""
UPDATE {broker_queues} q SET expires_at = now() + make_interval(secs => q.unused_s)
WHERE q.name = ANY(%(names)s::text[])
  AND q.expires_at < now() + make_interval(secs => q.unused_s * 0.7::double precision)""")


def use(executor: Transaction, names: Sequence[str]) -> None:
    """Note that queues are consumed, where they would expire otherwise."""
    executor.run(_USE, names=list(names))


_EXPIRED = Statement("SELECT q.name FROM {broker_queues} q WHERE q.expires_at < now()")
_EXPIRE = Statement("DELETE FROM {broker_queues} q WHERE q.name = %(name)s AND q.expires_at < now()")


def expired(executor: Reader) -> Sequence[str]:
    """Return the queues that nobody has used for so long."""
    return [row.name for row in executor.run(_EXPIRED)]


def expire(executor: Transaction, name: str) -> None:
    """Delete a queue that nobody has used for so long."""
    executor.run(_EXPIRE, name=name)


KEPT_S = 60.0
"""How long a broadcast is kept for those who have not read it yet."""


class Broadcast(NamedTuple):
    """A message to everybody who listens to its exchange."""

    exchange: str
    routing_key: str
    headers: str
    properties: str
    body: str


_SEND_BROADCAST = Frequent("""
INSERT INTO {broker_broadcasts} (exchange, routing_key, headers, properties, body)
VALUES (%(exchange)s, %(routing_key)s, %(headers)s, %(properties)s, %(body)s)""")


def send_broadcast(executor: Transaction, broadcast: Broadcast) -> None:
    """Send a broadcast."""
    executor.run(_SEND_BROADCAST, **broadcast._asdict())


_LAST_BROADCAST = Statement("SELECT coalesce(max(b.id), 0)::bigint AS id FROM {broker_broadcasts} b")


def last_broadcast(executor: Reader) -> int:
    """Return the id of the newest broadcast, from which a new listener goes on."""
    return int(executor.run(_LAST_BROADCAST)[0].id)


_BROADCASTS_SINCE = Frequent("""
SELECT b.id, b.exchange, b.routing_key, b.headers, b.properties, b.body FROM {broker_broadcasts} b
WHERE b.id > %(since)s AND b.exchange = ANY(%(exchanges)s::text[]) ORDER BY b.id""")


def broadcasts_since(executor: Reader, since: int, exchanges: Sequence[str]) -> Sequence[Any]:
    """Read the broadcasts since an id: id, exchange, routing_key, headers, properties, body."""
    return executor.run(_BROADCASTS_SINCE, since=since, exchanges=list(exchanges))


_FORGET_BROADCASTS = Statement("""
DELETE FROM {broker_broadcasts} b WHERE b.sent_at < now() - make_interval(secs => %(kept_s)s::double precision)""")


def forget_broadcasts(executor: Transaction) -> None:
    """Remove old broadcasts."""
    executor.run(_FORGET_BROADCASTS, kept_s=KEPT_S)


_COUNTS = Statement("""
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


def counts(executor: Reader) -> Sequence[Any]:
    """Count the messages of each lasting queue: name, ready, held by consumers, and later (waiting for their time).

    Of each priority `COUNTED` messages are counted at most, and so many of all that wait for their time.
    """
    return executor.run(_COUNTS, highest=HIGHEST_PRIORITY, counted=COUNTED)


_COUNT_CONSUMERS = Statement("SELECT count(*) AS rows FROM {broker_consumers}")


def count_consumers(executor: Reader) -> int:
    """Count the consumers, with those that nobody has found dead yet."""
    return int(executor.run(_COUNT_CONSUMERS)[0].rows)
