"""The page on testing runs as it is written: as the tests of a user's project."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.examples.test_guides import blocks
from tests.tools.versions import KOMBU_5_7
from tests.tools.workers import ROOT, environment

PAGE = ROOT / "docs" / "testing.md"
LEFT_OUT = [f"-pno:{name}" for name in ("anyio", "hypothesispytest", "randomly", "valkey")]
"""Plugins that are here for other tests: to import them takes half of a start of pytest."""
LONGEST_S = 280
"""Of a whole run of tests, which starts many processes."""


def files(*, django: bool = False) -> dict[str, str]:
    """Return each file that the page shows, by its name in the first line: of the shop, or of the one with Django."""
    found = {}
    for text in blocks(PAGE, "python", "ini"):
        name, _, shown = text.partition("\n")
        found[name.removeprefix("# ")] = shown
    return {name: shown for name, shown in found.items() if name.startswith(("orders/", "tests/")) == django}


def write(directory: Path, shown: Mapping[str, str]) -> Path:
    """Write files into a directory, and return it."""
    for name, text in shown.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)
    return directory


def run_pytest(directory: Path, *arguments: str, **env: str) -> str:
    """Run a user's tests to their end, and return pytest's output."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-W", "error", *LEFT_OUT, *arguments], cwd=directory, env=environment(env),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LONGEST_S, check=False,
    )  # fmt: skip
    return f"{done.stdout}\nexit code {done.returncode}"


@pytest.mark.few(0)
@KOMBU_5_7
def test_the_page_runs_as_it_is_written(tmp_path: Path, postgres_url: str) -> None:
    said = run_pytest(write(tmp_path, files()), SIDEJOB_TEST_DATABASE_URL=postgres_url)

    wanted = sum(len(re.findall(r"^def test_", text, re.MULTILINE)) for text in files().values())
    assert f"{wanted} passed" in said, said
    assert "exit code 0" in said, said


def test_tables_are_dropped_in_databases_of_tests_alone(tmp_path: Path, postgres_url: str) -> None:
    shown = {name: text for name, text in files().items() if name in ("shop.py", "stock.py", "pytest.ini")}
    shown["test_tables.py"] = """
import os

import psycopg
import pytest
from celery_sidejob import SettingsError
from sqlalchemy import create_engine, inspect
from stock import Base, Sale

URL = os.environ["SIDEJOB_TEST_DATABASE_URL"]


@pytest.mark.parametrize("change", [Base.metadata.create_all, Base.metadata.drop_all, Sale.__table__.drop])
def test_the_database_of_a_developer(change):
    engine = create_engine(URL.replace("postgresql://", "postgresql+psycopg://"))
    with pytest.raises(SettingsError, match="whose name has no 'test' in it"):
        change(engine)
    assert not inspect(engine).has_table("sales")
    engine.dispose()


def test_one_in_memory():
    engine = create_engine("sqlite://")
    Base.metadata.create_all(engine)
    Base.metadata.drop_all(engine)
    engine.dispose()
"""
    said = run_pytest(write(tmp_path, shown), SIDEJOB_TEST_DATABASE_URL=postgres_url)
    assert "4 passed" in said, said
