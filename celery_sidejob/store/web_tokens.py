"""Rows of `web_tokens`: who may use the HTTP API. A token itself is not kept, only its SHA-256."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
