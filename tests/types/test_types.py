"""The types of the public names, as `mypy --strict` sees them in a user's project."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import celery_sidejob

APP = Path(__file__).parent / "every_name.py"
OPTIONS = """\
[mypy]
strict = true
[mypy-celery.*]
ignore_missing_imports = true
"""
"""What a user's project has to say: Celery has no types."""


def test_a_strict_project_that_uses_every_name_has_no_error(tmp_path: Path) -> None:
    (tmp_path / "mypy.ini").write_text(OPTIONS)
    app = tmp_path / "shop.py"
    app.write_text(APP.read_text())
    done = subprocess.run([sys.executable, "-m", "mypy", "shop.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "Success: no issues found in 1 source file\n"), done.stdout


def test_no_public_name_is_left_out() -> None:
    """Errors are taken from the package all together."""
    used = set(re.findall(r"\w+", APP.read_text()))
    left = {name for name in celery_sidejob.__all__ if not name.endswith("Error")} - used
    assert left == OF_HOOKS_AND_RESULTS


OF_HOOKS_AND_RESULTS = {
    "Announcement",
    "BatchCounts",
    "DurableTask",
    "Durations",
    "JSONFormatter",
    "Overloaded",
    "QueueCounts",
    "RunFilter",
    "SlotHolder",
    "Suspend",
    "Timer",
}
"""Names that users meet as what something returns or raises, or name in a configuration."""
