"""Users of a database with no rights but those that a test gives them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from tests.tools.pgbouncer import direct


@contextmanager
def a_role(url: str) -> Iterator[tuple[str, str]]:
    """A user without rights in this database within the block: its name and its URL, which leads there directly.

    The tests' PgBouncer makes everybody the same user.
    """
    url = direct(url)
    role = f"sidejob_test_{secrets.token_hex(6)}"
    with psycopg.connect(url, autocommit=True) as owner:
        owner.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'secret'")
        try:
            scheme, rest = url.split("://")
            yield role, f"{scheme}://{role}:secret@{rest.rpartition('@')[2]}"
        finally:
            owner.execute(f"DROP OWNED BY {role} CASCADE")
            owner.execute(f"DROP ROLE {role}")
