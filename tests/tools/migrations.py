"""Migrations that a test adds to a copy of ours: further revisions, which no release has yet."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from celery_sidejob.store.meta import REVISION
from celery_sidejob.store.schema import migrate

FURTHER = f"{int(REVISION) + 1:04}"
"""The revision that a test adds."""

SECOND = """
from alembic import op

revision = "NEXT"
down_revision = "HEAD"


def upgrade():
    op.execute("ALTER TABLE sidejob.jobs ADD COLUMN colour text")
"""


@contextmanager
def copied(folder: Path) -> Iterator[Path]:
    """Within the block upgrades read a copy of the migrations, to which this test may add."""
    copy = folder / "100% scripts"  # a name that an ini file would have to escape
    shutil.copytree(migrate._scripts(), copy, ignore=shutil.ignore_patterns("__pycache__"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migrate, "_scripts", lambda: copy)
        yield copy


def add_migration(scripts: Path, text: str = SECOND) -> None:
    """Add a migration, in whose text NEXT and HEAD stand for its revision and the one before."""
    (scripts / "versions" / "further.py").write_text(text.replace("NEXT", FURTHER).replace("HEAD", REVISION))
