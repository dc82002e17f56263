"""Rows of `broker_consumers`: who may hold messages. A consumer without a row is dead, and what it held is free.

A consumer is alive while it beats. One that holds an advisory lock on a session of its own is dead as soon as that lock
is free: after a SIGKILL within the next beat of any other. What is set for a whole session, on a connection that no
proxy shares among clients, is at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..connection.own_executor import OwnExecutor
from ..statement import Frequent, Statement, Transaction, arrays
from .queues import Broadcast

LOCK_CLASS = 0x53_4A_42_43 - 0x40_00_00_00
"""The first half of our advisory locks' keys ("SJBC", made to fit a signed 32-bit integer)."""

_REGISTER = Statement(
    "INSERT INTO {broker_consumers} (ident, silence_s) VALUES (%(ident)s, %(silence_s)s) RETURNING id"
)


def register(executor: Transaction, ident: str, *, silence_s: float) -> int:
    """Register a consumer that is dead after so many seconds without a beat; return its id."""
    return int(executor.run(_REGISTER, ident=ident, silence_s=silence_s)[0].id)


_LOCK = Statement("""
SELECT pg_try_advisory_lock(%(lock_class)s, (hashtext(%(schema)s) # %(id)s::int)) AS taken""")
_ANNOUNCE = Statement("UPDATE {broker_consumers} SET locked = true WHERE id = %(id)s")


def lock(executor: Transaction, consumer: int, schema: str) -> None:
    """Have a consumer live no longer than this executor's session, which must be no proxy's."""
    if executor.run(_LOCK, lock_class=LOCK_CLASS, schema=schema, id=consumer)[0].taken:
        executor.run(_ANNOUNCE, id=consumer)


@dataclass(frozen=True, slots=True)
class Beaten:
    """The answer to a beat."""

    is_alive: bool
    dead: Sequence[str]
    """Consumers that this beat found dead, and removed."""
    heard: Sequence[Any] = ()
    """The broadcasts that this beat has read, as `queues.broadcasts_since` returns them."""


# A consumer that was silent itself does not judge others: perhaps the server stood still, and all were silent.
_BEATEN = """
WITH me AS MATERIALIZED (
  SELECT c.id, c.beat_at > now() - make_interval(secs => c.silence_s * 0.6::double precision) AS judges
  FROM {broker_consumers} c, (SELECT set_config('synchronous_commit', 'off', true)) AS soon
  WHERE c.id = %(id)s FOR UPDATE OF c),
beaten AS (UPDATE {broker_consumers} c SET beat_at = now() FROM me WHERE c.id = me.id),
dead AS (
  DELETE FROM {broker_consumers} d USING (
    SELECT c.id FROM {broker_consumers} c WHERE c.id <> %(id)s AND EXISTS (SELECT FROM me WHERE me.judges)
      AND (c.beat_at < now() - make_interval(secs => c.silence_s)
        OR c.locked AND pg_try_advisory_xact_lock(%(lock_class)s, (hashtext(%(schema)s) # c.id::int)))
    FOR UPDATE SKIP LOCKED) AS f
  WHERE d.id = f.id RETURNING d.ident)"""
_FOUND = "SELECT EXISTS (SELECT FROM me) AS is_alive, ARRAY(SELECT d.ident FROM dead d) AS dead"
_BEAT = Frequent(f"{_BEATEN}\n{_FOUND}")


def beat(executor: Transaction, consumer: int, schema: str) -> Beaten:
    """Report a consumer alive, and remove those that are dead."""
    row = executor.run(_BEAT, id=consumer, lock_class=LOCK_CLASS, schema=schema)[0]
    return Beaten(row.is_alive, row.dead)


_TALK = Frequent(f"""{_BEATEN},
said AS (
  INSERT INTO {{broker_broadcasts}} (exchange, routing_key, headers, properties, body)
  SELECT s.exchange, s.routing_key, s.headers, s.properties, s.body
  FROM unnest(%(exchange)s::text[], %(routing_key)s::text[], %(headers)s::text[], %(properties)s::text[],
    %(body)s::text[]) WITH ORDINALITY AS s(exchange, routing_key, headers, properties, body, place)
  ORDER BY s.place)
SELECT f.is_alive, f.dead, b.id, b.exchange, b.routing_key, b.headers, b.properties, b.body FROM ({_FOUND}) AS f
LEFT JOIN {{broker_broadcasts}} b ON b.id > %(since)s AND b.exchange = ANY(%(exchanges)s::text[]) ORDER BY b.id""")


def beat_and_talk(
    executor: Transaction,
    consumer: int,
    schema: str,
    *,
    said: Sequence[Broadcast],
    since: int,
    exchanges: Sequence[str],
) -> Beaten:
    """Do the same, send broadcasts, and read those of some exchanges since an id."""
    sent = arrays(said, *Broadcast._fields)
    found = executor.run(
        _TALK, id=consumer, lock_class=LOCK_CLASS, schema=schema, since=since, exchanges=list(exchanges), **sent
    )
    return Beaten(found[0].is_alive, found[0].dead, found if found[0].id is not None else ())


_LEAVE = Statement("DELETE FROM {broker_consumers} WHERE id = %(id)s")


def leave(executor: Transaction, consumer: int) -> None:
    """Remove a consumer: what it holds is free."""
    executor.run(_LEAVE, id=consumer)


_NOTIFY = Frequent("SELECT pg_notify(%(channel)s, %(payload)s)")


def notify(executor: Transaction, channel: str, payload: str) -> None:
    """Wake those who listen; never in the statement or transaction that has sent a message (docs/decisions.md)."""
    executor.run(_NOTIFY, channel=channel, payload=payload)


def notify_soon(executor: OwnExecutor, channel: str, payload: str) -> None:
    """The same, without waiting until it is done: settle the executor before its next use."""
    executor.post(_NOTIFY, channel=channel, payload=payload)


# Tables of messages are empty now and full a moment later. A plan that was made for an empty one reads it as a whole.
# To a table that has to be read as a whole all the same, Postgres before version 18 then gives an absurd cost, and
# compiles the statement for a quarter of a second each time.
_BY_INDEX = "SET enable_seqscan = off; SET plan_cache_mode = force_generic_plan; SET jit = off"


def plan_by_index(executor: OwnExecutor) -> None:
    """Have Postgres use indexes however few rows there are."""
    executor.connection.execute(_BY_INDEX)


def commit_late(executor: OwnExecutor) -> None:
    """Have commits answer before they are on the server's disk."""
    executor.connection.execute("SET synchronous_commit = off")


def commit_lastingly(executor: OwnExecutor) -> None:
    """Have the transaction that was begun commit as without `commit_late`."""
    executor.connection.execute("SET LOCAL synchronous_commit TO DEFAULT")
