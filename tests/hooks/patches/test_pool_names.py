"""`celery worker --pool` takes its names from a list that it has read at its import."""

from __future__ import annotations

import subprocess
import sys

HELP = [sys.executable, "-m", "celery", "worker", "--help"]


def test_the_command_knows_the_pool_asyncio() -> None:
    said = subprocess.run(HELP, capture_output=True, text=True, timeout=60, check=True).stdout

    assert "threads|custom|asyncio]" in "".join(said.split())
