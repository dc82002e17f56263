"""Rows of `web_answers`: what was answered to calls of the HTTP API that have an Idempotency-Key, for a day."""

from __future__ import annotations

from typing import Any

from .statement import Reader, Statement, Transaction, first

_IS_OLD = "made_at < now() - interval '1 day'"
_FIND = Statement(f"""
SELECT request, call, code, answer FROM {{web_answers}} WHERE token = %(token)s AND key = %(key)s AND NOT {_IS_OLD}""")


def find(executor: Reader, token: str, key: str) -> Any | None:
    """Read the (request, call, code, answer) of a key of a token; the answer is None while it is not known."""
    return first(executor.run(_FIND, token=token, key=key))


_HAS_WRITTEN = Statement("SELECT pg_current_xact_id_if_assigned() IS NOT NULL AS found")


def has_written(executor: Transaction) -> bool:
    """Tell whether a transaction has written anything yet."""
    return bool(executor.run(_HAS_WRITTEN)[0].found)


_NOTE = Statement(f"""
INSERT INTO {{web_answers}} AS a (token, key, request, call)
VALUES (%(token)s, %(key)s, %(request)s, %(call)s)
ON CONFLICT (token, key) DO UPDATE SET request = EXCLUDED.request, call = EXCLUDED.call, code = NULL, answer = NULL,
  made_at = now()
WHERE a.call = EXCLUDED.call OR a.{_IS_OLD} RETURNING key""")


def note(executor: Transaction, token: str, key: str, *, request: str, call: str) -> bool:
    """Note a call; False if another call has this key. It waits while the transaction of that one is open."""
    return bool(executor.run(_NOTE, token=token, key=key, request=request, call=call))


_ANSWER = Statement("""
UPDATE {web_answers} SET code = %(code)s, answer = %(answer)s
WHERE token = %(token)s AND key = %(key)s AND call = %(call)s""")
_FORGET = Statement("""
DELETE FROM {web_answers} WHERE token = %(token)s AND key = %(key)s AND call = %(call)s""")
PRUNED = 100
"""How many old rows are removed at once."""
_PRUNE = Statement(f"""
DELETE FROM {{web_answers}} WHERE ctid = ANY(ARRAY(
  SELECT ctid FROM {{web_answers}} WHERE {_IS_OLD} ORDER BY made_at LIMIT {PRUNED} FOR UPDATE SKIP LOCKED))""")


def answer(executor: Transaction, token: str, key: str, *, call: str, code: int, answer: str) -> None:
    """Keep the answer to a call that was noted, and remove old rows."""
    executor.run(_ANSWER, token=token, key=key, call=call, code=code, answer=answer)
    executor.run(_PRUNE)


def forget(executor: Transaction, token: str, key: str, *, call: str) -> None:
    """Remove the note on a call that has changed nothing."""
    executor.run(_FORGET, token=token, key=key, call=call)
