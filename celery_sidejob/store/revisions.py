"""The revision of the schema that this code knows, and the revision of a schema.

A version runs on its own revision, the previous and the next, so that a rolling deploy needs no pause.
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
