"""What a process loads that only imports us: as every client, worker and `celery` command does."""

from __future__ import annotations

import subprocess
import sys

LATE = ("alembic", "sqlalchemy")
"""Needed by `db upgrade`, and where a transaction of SQLAlchemy's is lent: a third of what would be imported."""


def test_what_few_processes_need_is_not_imported_by_all() -> None:
    look = (
        f"import celery_sidejob, celery_sidejob.cli.group, sys; print([name for name in {LATE} if name in sys.modules])"
    )

    said = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True, timeout=60)

    assert said.stdout == "[]\n"
