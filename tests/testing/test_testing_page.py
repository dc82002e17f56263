"""The page on testing runs as it is written: as the tests of a user's project, in two processes of pytest-xdist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.test_guides import blocks
from tests.tools.versions import KOMBU_5_7
from tests.tools.workers import ROOT, environment

PAGE = ROOT / "docs" / "testing.md"


def project(directory: Path) -> Path:
    """Write each file that the page shows, which its first line names."""
    for text in blocks(PAGE, "python", "ini"):
        name, _, shown = text.partition("\n")
        (directory / name.removeprefix("# ")).write_text(shown)
    return directory


def run_pytest(directory: Path, *arguments: str, **env: str) -> str:
    """Run a user's tests to their end, and return pytest's output."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-W", "error", *arguments], cwd=directory, env=environment(env), check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=220,
    )  # fmt: skip
    return f"{done.stdout}\nexit code {done.returncode}"


@KOMBU_5_7
@pytest.mark.timeout(240)
def test_the_page_runs_as_it_is_written(tmp_path: Path, postgres_url: str) -> None:
    said = run_pytest(project(tmp_path), "-n", "2", SIDEJOB_TEST_DATABASE_URL=postgres_url)

    wanted = sum(len(re.findall(r"^def test_", text, re.MULTILINE)) for text in blocks(PAGE, "python"))
    assert f"{wanted} passed" in said, said
    assert "exit code 0" in said, said
