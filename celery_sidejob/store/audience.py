"""Listeners: ports that subscribe to the log, and clients that hear announcements by NOTIFY.

A client that listens holds a shared advisory lock for the life of its session.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Any

from ..model.names import LOG_CHANNEL, channel_ancestors
from . import advisory
from .connection.own_executor import OwnExecutor
from .errors import locked_out
from .statement import Statement, Transaction

LOCK_CLASS = 0x53_4A_41_55 - 0x40_00_00_00
"""The first half of our advisory locks' keys ("SJAU", made to fit a signed 32-bit integer)."""

_LOCK = f"{LOCK_CLASS}, hashtext(%(schema)s::text)"
_OF_LOG = ", ".join(f"'{name}'" for name in channel_ancestors(LOG_CHANNEL))

# Two sessions that ask at the same moment take each other's lock for a listener: one announcement too many.
WHO_LISTENS = f"""CASE WHEN %(schema)s::text IS NOT NULL
    THEN EXISTS (SELECT FROM {{subscriptions}} s WHERE s.channel IN ({_OF_LOG})) END AS keeps_log,
  CASE WHEN pg_try_advisory_lock({_LOCK}) THEN NOT pg_advisory_unlock({_LOCK}) ELSE true END AS listens"""
"""Whether a port subscribes to the log, or to an ancestor of it, and whether a client listens, as columns.

Without a `schema` this costs nothing, and `keeps_log` is null.
"""
_ASK = Statement(f"SELECT {WHO_LISTENS}")


def ask(executor: Transaction, schema: str) -> Any:
    """Read whether there are listeners: one row with the columns `WHO_LISTENS`."""
    return executor.run(_ASK, schema=schema)[0]


_LISTEN = Statement(f"SELECT pg_try_advisory_lock_shared({_LOCK}) AS taken")

# A client that stands still no longer empties its socket, and would delay the notifications of all others: the server
# ends its session. A Unix socket has no such limit; `notify` then stops before others suffer.
UNREAD = "SET tcp_user_timeout = '10 s'"


def listen(executor: OwnExecutor, schema: str, names: Sequence[str], hear: Callable[[str, str], None]) -> None:
    """Let this session `hear` notifications under these names, and be known to listen; see `OwnExecutor.listen`."""
    executor.connection.execute(UNREAD)
    executor.listen(names, hear)
    deadline = monotonic() + advisory.LONGEST_WAIT_S
    while not executor.run(_LISTEN, schema=schema)[0].taken:  # a session that asks holds it for a moment
        if monotonic() > deadline:
            raise locked_out("subscribe", advisory.holder(executor, LOCK_CLASS, [schema]))
        sleep(0.02)


_NOTIFY = Statement("""
SELECT count(pg_notify(r.name, r.payload)) AS sent
FROM (SELECT * FROM json_to_recordset(%(rows)s::json) AS r(n int, name text, payload text) ORDER BY r.n) r
WHERE (SELECT pg_notification_queue_usage()) < %(most)s::double precision""")

FULLEST = 0.1
"""The share of the server's queue of notifications above which nothing is announced: all databases share the queue."""


def notify(executor: Transaction, payloads: Sequence[tuple[str, str]]) -> bool:
    """Send notifications, (name, payload), in this order; False if the server's queue is too full for them.

    Must be its own transaction, because a transaction that notifies commits under a lock of the whole server.
    """
    rows = [{"n": n, "name": name, "payload": payload} for n, (name, payload) in enumerate(payloads)]
    return bool(executor.run(_NOTIFY, rows=json.dumps(rows), most=FULLEST)[0].sent)
