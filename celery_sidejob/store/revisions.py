"""Which revision of the schema this code knows, and which one a schema is at.

A version runs on the revision before its own and on the one after, so that a rolling deploy needs no pause.
"""

from __future__ import annotations

from .statement import Reader, Statement

KNOWN = "0001"
"""The newest revision this code knows; the head of the migrations."""

_REVISION = Statement("SELECT version_num AS revision FROM {alembic_version}")


def read(executor: Reader) -> str | None:
    """Read the schema's revision; None if there are no migrations in it yet."""
    found = executor.run(_REVISION)
    return found[0].revision if found else None
