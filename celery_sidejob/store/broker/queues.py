"""Rows of `broker_queues` and `broker_bindings`: which queues were declared, and which exchange leads to which of them.

They are shared by all processes: a worker finds the reply queue that a client has bound. A transient queue (one that is
deleted with its consumer) and one with an expiry go when nobody has used them for `unused_s`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..statement import Reader, Statement, Transaction

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
