"""Rows of `web_tokens`: who may use the HTTP API. A token itself is not kept, only its SHA-256.

Rows of `web_answers`: the answers to calls with a key, for each token, so that a repeated call gets the first answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import advisory
from .statement import Reader, Statement, Transaction, first

_ADD = Statement("""
INSERT INTO {web_tokens} (name, hash, scopes) VALUES (%(name)s, %(hash)s, %(scopes)s::text[])
ON CONFLICT (name) DO NOTHING RETURNING name""")


def add(executor: Transaction, name: str, *, hash_: str, scopes: Sequence[str]) -> bool:
    """Keep a token; False if there is one of this name."""
    return bool(executor.run(_ADD, name=name, hash=hash_, scopes=list(scopes)))


_FIND = Statement("SELECT name, scopes FROM {web_tokens} WHERE hash = %(hash)s")


def find(executor: Reader, hash_: str) -> Any | None:
    """Return the (name, scopes) of a token by its hash; None if there is none."""
    return first(executor.run(_FIND, hash=hash_))


_LIST = Statement("SELECT name, scopes, created_at FROM {web_tokens} ORDER BY name")


def list_all(executor: Reader) -> Sequence[Any]:
    """Read (name, scopes, created_at) of all tokens, by name."""
    return executor.run(_LIST)


_REVOKE = Statement("DELETE FROM {web_tokens} WHERE name = %(name)s RETURNING name")


def revoke(executor: Transaction, name: str) -> bool:
    """Remove a token; False if there is none of this name."""
    return bool(executor.run(_REVOKE, name=name))


_IS_OLD = "made_at < now() - interval '1 day'"
_FIND_ANSWER = Statement(f"""
SELECT request, call, code, answer FROM {{web_answers}} WHERE token = %(token)s AND key = %(key)s AND NOT {_IS_OLD}""")


def find_answer(executor: Reader, token: str, key: str) -> Any | None:
    """Read the (request, call, code, answer) of a key of a token; the answer is None while it is not known."""
    return first(executor.run(_FIND_ANSWER, token=token, key=key))


CALLS_LOCK_CLASS = 0x53_4A_49_4B - 0x40_00_00_00
"""The first half of the advisory locks' keys ("SJIK", made to fit as `workers.LOCK_CLASS` is)."""


def take_turn(executor: Transaction, token: str, key: str, *, call: str) -> None:
    """Wait until no other transaction serves a call with this key of the token: it would lock the same rows first.

    A call that has committed its key waits for no other.
    """
    found = find_answer(executor, token, key)
    if found is None or found.call != call:
        advisory.take(executor, CALLS_LOCK_CLASS, [f"{token}\n{key}"])


_HAS_WRITTEN = Statement("SELECT pg_current_xact_id_if_assigned() IS NOT NULL AS found")


def has_written(executor: Transaction) -> bool:
    """Tell whether a transaction has written anything yet."""
    return bool(executor.run(_HAS_WRITTEN)[0].found)


_NOTE_CALL = Statement(f"""
INSERT INTO {{web_answers}} AS a (token, key, request, call)
VALUES (%(token)s, %(key)s, %(request)s, %(call)s)
ON CONFLICT (token, key) DO UPDATE SET request = EXCLUDED.request, call = EXCLUDED.call, code = NULL, answer = NULL,
  made_at = now()
WHERE a.call = EXCLUDED.call OR a.{_IS_OLD} RETURNING key""")


def note_call(executor: Transaction, token: str, key: str, *, request: str, call: str) -> bool:
    """Note a call; False if another call has this key. It waits while the transaction of that one is open."""
    return bool(executor.run(_NOTE_CALL, token=token, key=key, request=request, call=call))


_KEEP_ANSWER = Statement("""
UPDATE {web_answers} SET code = %(code)s, answer = %(answer)s
WHERE token = %(token)s AND key = %(key)s AND call = %(call)s""")
_FORGET_CALL = Statement("""
DELETE FROM {web_answers} WHERE token = %(token)s AND key = %(key)s AND call = %(call)s""")
PRUNED = 100
"""How many old rows are removed at once."""
_PRUNE_ANSWERS = Statement(f"""
DELETE FROM {{web_answers}} WHERE ctid = ANY(ARRAY(
  SELECT ctid FROM {{web_answers}} WHERE {_IS_OLD} ORDER BY made_at LIMIT {PRUNED} FOR UPDATE SKIP LOCKED))""")


def keep_answer(executor: Transaction, token: str, key: str, *, call: str, code: int, answer: str) -> None:
    """Keep the answer to a call that was noted, and remove old rows."""
    executor.run(_KEEP_ANSWER, token=token, key=key, call=call, code=code, answer=answer)
    executor.run(_PRUNE_ANSWERS)


def forget_call(executor: Transaction, token: str, key: str, *, call: str) -> None:
    """Remove the note on a call that has changed nothing."""
    executor.run(_FORGET_CALL, token=token, key=key, call=call)
