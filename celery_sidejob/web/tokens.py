"""Tokens of the HTTP API: 256 random bits, shown once; the store keeps their hashes with names and scopes."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..model.checks import check_texts
from ..model.errors import InvalidValueError
from ..operations.runtime import Runtime
from ..store import web_tokens

SCOPES = ("read", "write", "operate")
"""`read` reads; `write` makes jobs, packets and state; `operate` does what an operator does on the page."""
PREFIX = "sjt_"


@dataclass(frozen=True, slots=True)
class Token:
    """A program that may use the API."""

    name: str
    scopes: frozenset[str]
    hash: str


def make(runtime: Runtime, name: str, scopes: Iterable[str]) -> str:
    """Make a token, and return it; it cannot be read again."""
    check_texts(name=name)
    wanted = [scope for scope in SCOPES if scope in set(scopes)]
    if not name or not wanted:
        raise InvalidValueError("A token has a name, and at least one scope.")
    token = PREFIX + secrets.token_urlsafe(32)
    made = runtime.connections.transact(
        "token", lambda executor: web_tokens.add(executor, name, hash_=_hash(token), scopes=wanted)
    )
    if not made:
        raise InvalidValueError(f"There is a token {name!r} already: revoke it first, or give this one another name.")
    return token


def find(runtime: Runtime, token: str) -> Token | None:
    """Return the name and the scopes of a token; None if it was never made, or was revoked."""
    if not token.startswith(PREFIX):
        return None
    row = web_tokens.find(runtime.connections, hash_ := _hash(token))
    return None if row is None else Token(row.name, frozenset(row.scopes), hash_)


def list_all(runtime: Runtime) -> list[dict[str, Any]]:
    """Return the names, scopes and ages of all tokens."""
    return [row._asdict() for row in web_tokens.list_all(runtime.connections)]


def revoke(runtime: Runtime, name: str) -> bool:
    """Revoke a token at once; returns whether there was one."""
    return runtime.connections.transact("token", lambda executor: web_tokens.revoke(executor, name))


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
