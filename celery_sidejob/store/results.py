"""Rows of `results`: what tasks have returned, for the callers that ask, until it expires.

A row's `body` is Celery's own encoding of a result and all that belongs to it. A process that waits for results listens
for notifications, and holds a shared advisory lock for the life of that session.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .audience import UNREAD
from .connection.connections import Connections
from .connection.own_executor import OwnExecutor
from .statement import Frequent, Reader, Statement, Transaction, columns

LOCK_CLASS = 0x53_4A_52_53 - 0x40_00_00_00
"""The first half of our advisory locks' keys ("SJRS", made to fit a signed 32-bit integer)."""

PAGE = 1000
"""The most rows that one statement removes or reads; part of its text, like `publishing.CHECK_PAGE`."""

SMALL_BYTES = 16_000
"""The most bytes of a result that passes through the worker, which keeps those of many runs in one statement."""

_LOCK = f"{LOCK_CLASS}, hashtext($k${{results}}$k$::text)"
# Two sessions that ask at the same moment take each other's lock for a listener: one notification too many.
_LISTENED = f"CASE WHEN pg_try_advisory_lock({_LOCK}) THEN NOT pg_advisory_unlock({_LOCK}) ELSE true END"
LISTENED = f"CASE WHEN %(key)s::text IS NULL THEN false ELSE {_LISTENED} END AS listened"
"""Whether a process listens for the result of a statement's parameters, if there is one, as SQL."""
_ENDS = "{}.state IN ('SUCCESS', 'FAILURE', 'REVOKED')"
_LIVES = "(r.expires_at IS NULL OR r.expires_at > now())"


class Kept(NamedTuple):
    """A result to be kept, in `body`, under `key`; it expires after so many seconds, or never (None)."""

    key: str
    state: str
    body: bytes
    expires_s: float | None

    @property
    def is_small(self) -> bool:
        """Whether a worker may keep it in one statement with those of other runs."""
        return len(self.body) <= SMALL_BYTES


class Ended(NamedTuple):
    """A run that has ended well, as the statement of its end names it, and its result, if that is kept with the end."""

    run: Any
    result: Kept | None


GIVEN = """SELECT %(key)s::text AS key, %(state)s::text AS state, %(body)s::bytea AS body,
      %(expires_s)s::double precision AS expires_s"""
"""The result of a statement's parameters, as SQL for `kept`; see `given`."""
IS_GIVEN = "%(key)s::text IS NOT NULL"


BRIEFLY_S = 0.1
"""How long a worker that writes ends waits for a row that another transaction has locked."""


def kept_briefly(rows: str) -> str:
    """Return the CTE `kept` of a statement with `TOLD`, which is refused if another transaction has locked a result.

    Even SKIP LOCKED would wait for a result with the same key that is not committed yet.
    """
    hasty = f"SELECT g.* FROM ({rows}) g WHERE (SELECT h.now FROM haste h) IS NOT NULL"
    return f"""
  haste AS MATERIALIZED (
    SELECT current_setting('lock_timeout') AS before,
      set_config('lock_timeout', '{round(BRIEFLY_S * 1000)}', true) AS now
    WHERE EXISTS ({rows})),
  {kept(hasty).removesuffix(")")} RETURNING 1 AS one)"""


def kept(rows: str = GIVEN) -> str:
    """Return the CTE `kept` of a statement that keeps results: the `rows` of a SELECT, each with a key of its own."""
    # Of two runs of a task, the first success counts, as in Celery's other backends. A state such as RETRY replaces no
    # result: a slow process may write it when the next run has ended already.
    return f"""
  kept AS (
    INSERT INTO {{results}} AS r (key, state, body, expires_at)
    SELECT g.key, g.state, g.body, now() + make_interval(secs => g.expires_s) FROM ({rows}) g
    ON CONFLICT (key) DO UPDATE SET state = excluded.state, body = excluded.body, expires_at = excluded.expires_at
    WHERE (r.state <> 'SUCCESS' AND ({_ENDS.format("excluded")} OR NOT {_ENDS.format("r")}))
      OR NOT {_LIVES} OR %(replaces)s::boolean)"""


MOST_BYTES = 7000
"""The most bytes of keys in one notification, which Postgres allows less than 8,000."""
_CHANNEL = "sidejob_results:"
_CHANNEL_OF_SCHEMA = f"""'{_CHANNEL}' || substr(encode(sha256(convert_to($k${{results}}$k$, 'UTF8')), 'hex'), 1, 32)"""


def told(rows: str) -> str:
    """Return the CTE `told` of a statement that notifies the listeners, if any, of all results `g` in `rows` at once.

    If there are too many keys for one notification, the listeners are told to look at all that they wait for.
    """
    return f"""
  told AS (
    SELECT pg_notify({_CHANNEL_OF_SCHEMA}, CASE WHEN octet_length(n.keys) <= {MOST_BYTES} THEN n.keys ELSE '' END)
    FROM (SELECT json_agg(g.key)::text AS keys FROM {rows} WHERE g.key IS NOT NULL) n
    WHERE n.keys IS NOT NULL AND {_LISTENED})"""


TOLD = """(SELECT set_config('lock_timeout', h.before, true)
    FROM haste h CROSS JOIN (SELECT count(*) FROM told) t CROSS JOIN (SELECT count(*) FROM kept) k) AS told"""
"""The column with which a statement must end for its CTE `told` to be run, and for its commit to wait as before.

Transactions with notifications are committed one after the other.
"""

_NONE = (None,) * 4


def given(result: Kept | None, *, replaces: bool = False) -> dict[str, Any]:
    """Return the parameters of `GIVEN`, `kept` and `LISTENED`; the key is NULL if there is no result."""
    return {**dict(zip(Kept._fields, result or _NONE, strict=True)), "replaces": replaces}


def results_of(results: Sequence[Kept | None]) -> dict[str, Any]:
    """Return the parameters of the results of a page of runs, of which some may have none."""
    given = columns([result or _NONE for result in results], "keys", "states", "bodies", "lifetimes")
    return {**given, "replaces": False}


_KEEP = Frequent(f"WITH {kept()} SELECT {LISTENED}")


def keep(executor: Transaction, result: Kept, *, replaces: bool = False) -> bool:
    """Keep a result, and tell whether a process listens; a success that is kept stays, unless this `replaces` it."""
    return bool(executor.run(_KEEP, **given(result, replaces=replaces))[0].listened)


_READ = Frequent(f"SELECT r.key, r.body FROM {{results}} r WHERE r.key = ANY(%(keys)s::text[]) AND {_LIVES}")


def read(executor: Reader, keys: Sequence[str]) -> Mapping[str, bytes]:
    """Read what is kept under some keys, at most `PAGE`."""
    return {row.key: row.body for row in executor.run(_READ, keys=list(keys))}


_FORGET = Statement("DELETE FROM {results} WHERE key = ANY(%(keys)s::text[])")


def forget(executor: Transaction, keys: Sequence[str]) -> None:
    """Remove what is kept under some keys, at most `PAGE`."""
    executor.run(_FORGET, keys=list(keys))


_PRUNE = Statement(f"""
DELETE FROM {{results}} WHERE ctid = ANY(ARRAY(
  SELECT r.ctid FROM {{results}} r WHERE r.expires_at <= now() ORDER BY r.expires_at LIMIT {PAGE}
  FOR UPDATE SKIP LOCKED)) RETURNING key""")


def prune(connections: Connections) -> bool:
    """Remove a page of expired results; tell whether there may be more."""
    return len(connections.transact("prune", lambda executor: executor.run(_PRUNE), single=True)) == PAGE


# -- notifications -----------------------------------------------------------------------------------------------------

_TELL = Frequent(f"WITH {told('unnest(%(keys)s::text[]) AS g(key)')} SELECT count(*) FROM told")


def tell(executor: Transaction, keys: Sequence[str]) -> None:
    """Notify the listeners of kept results; in a transaction of its own, after many results' (docs/decisions.md)."""
    executor.run(_TELL, keys=list(keys))


_LISTEN = Statement(f"SELECT pg_try_advisory_lock_shared({_LOCK}) AS taken")


def listen(executor: OwnExecutor, schema: str, hear: Callable[[Sequence[str] | None], None]) -> bool:
    """Let this session `hear` the keys of notifications, or None for all keys; see `OwnExecutor.listen`.

    False while a session that keeps a result has the lock for a moment: call again.
    """
    if not executor.run(_LISTEN)[0].taken:
        return False
    executor.connection.execute(UNREAD)
    executor.listen([_channel(schema)], lambda _, payload: hear(_keys_of(payload)))
    return True


def _channel(schema: str) -> str:
    """Return the name under which results of a schema are notified; a schema's own name may be too long for one."""
    return _CHANNEL + hashlib.sha256(f'"{schema}".results'.encode()).hexdigest()[:32]


def _keys_of(payload: str) -> Sequence[str] | None:
    try:
        keys = json.loads(payload)
    except ValueError:
        return None
    return keys if isinstance(keys, list) and all(isinstance(key, str) for key in keys) else None


def pages(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the keys in pages."""
    for first in range(0, len(keys), PAGE):
        yield keys[first : first + PAGE]
