"""Rows of `broker_broadcasts`, each for everybody who listens just now. The table is not logged, and kept short."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..statement import Reader, Statement, Transaction

KEPT_S = 60.0
"""How long a broadcast is kept for those who have not read it yet."""


class Broadcast(NamedTuple):
    """A message to everybody who listens to its exchange."""

    exchange: str
    routing_key: str
    headers: str
    properties: str
    body: str


_SEND = Statement(
    """
INSERT INTO {broker_broadcasts} (exchange, routing_key, headers, properties, body)
VALUES (%(exchange)s, %(routing_key)s, %(headers)s, %(properties)s, %(body)s)""",
    frequent=True,
)


def send(executor: Transaction, broadcast: Broadcast) -> None:
    """Send a broadcast."""
    executor.run(_SEND, **broadcast._asdict())


_LAST = Statement("SELECT coalesce(max(b.id), 0)::bigint AS id FROM {broker_broadcasts} b")


def last(executor: Reader) -> int:
    """Return the id of the newest broadcast, from which a new listener goes on."""
    found: int = executor.run(_LAST)[0].id
    return found


_SINCE = Statement(
    """
SELECT b.id, b.exchange, b.routing_key, b.headers, b.properties, b.body FROM {broker_broadcasts} b
WHERE b.id > %(since)s AND b.exchange = ANY(%(exchanges)s::text[]) ORDER BY b.id""",
    frequent=True,
)


def since(executor: Reader, since: int, exchanges: Sequence[str]) -> Sequence[Any]:
    """Read the broadcasts since an id: id, exchange, routing_key, headers, properties, body."""
    return executor.run(_SINCE, since=since, exchanges=list(exchanges))


_FORGET = Statement("""
DELETE FROM {broker_broadcasts} b WHERE b.sent_at < now() - make_interval(secs => %(kept_s)s::double precision)""")


def forget(executor: Transaction) -> None:
    """Remove old broadcasts."""
    executor.run(_FORGET, kept_s=KEPT_S)
