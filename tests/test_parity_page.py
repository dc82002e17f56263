"""`docs/parity/durable_job.md` has every behaviour and weakness of the older system, calls and tests that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
from celery import Celery

import celery_sidejob
from celery_sidejob.cli import sidejob
from celery_sidejob.model.settings import SETTINGS
from tests.tools.workers import environment

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "parity" / "durable_job.md"
BEHAVIOURS = [
    *range(1, 11),
    *range(20, 35),
    *range(40, 47),
    *range(50, 55),
    *range(60, 74),
    *range(75, 82),
    *range(90, 96),
]
IDS = [f"DJ-{number:03}" for number in BEHAVIOURS] + [f"WD-{number:02}" for number in range(1, 26)]
MOST_THAT_DO_NOT_APPLY = 5


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    id: str
    there: str
    here: str
    how: str
    shown_by: str

    @property
    def calls(self) -> list[str]:
        """What is to be called or set."""
        return re.findall(r"`([^`]+)`", self.here)

    @property
    def tests(self) -> list[str]:
        """What shows it."""
        return re.findall(r"`([^`]+)`", self.shown_by)


def rows() -> list[Row]:
    """The table's lines."""
    found = [
        line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith(("| DJ", "| WD"))
    ]
    return [Row(*columns) for columns in found]


ROWS = rows()


@cache
def collected() -> frozenset[str]:
    """The ids of all tests in the files that the page names, and the same without parameters."""
    files = sorted({test.partition("::")[0] for row in ROWS for test in row.tests})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *files], cwd=ROOT, env=environment({}),
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    whole = {line for line in done.stdout.splitlines() if "::" in line}
    return frozenset(whole | {name.partition("[")[0] for name in whole})


def is_there(call: str) -> bool:
    """Tell whether a call, a setting or a command exists."""
    if call.startswith("sidejob_"):
        return call in {setting.key for setting in SETTINGS}
    if call.startswith("celery -A app sidejob "):
        words = call.removeprefix("celery -A app sidejob ").split()
        command: Any = sidejob
        for word in words:
            if word.startswith("-"):
                return any(word in option.opts for option in command.params)
            command = command.get_command(click.Context(command), word)
            if command is None:
                return False
        return True
    first, *names = call.removeprefix("celery_sidejob.").split(".")
    found: Any = Celery if first == "app" else vars(celery_sidejob).get(first)
    for name in names:
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return first == "app" or first in celery_sidejob.__all__


def test_each_behaviour_and_weakness_is_there_once() -> None:
    assert (len(BEHAVIOURS), len(IDS)) == (64, 89)
    assert Counter(row.id for row in ROWS) == Counter(IDS)


def test_each_line_says_how_it_compares() -> None:
    wrong = [row.id for row in ROWS if not re.fullmatch(r"same|better: .+|does not apply: .+", row.how)]
    assert wrong == []
    assert sum(row.how.startswith("does not apply") for row in ROWS) <= MOST_THAT_DO_NOT_APPLY
    assert [row.id for row in ROWS if not row.calls] == []


def test_each_call_exists() -> None:
    assert [(row.id, call) for row in ROWS for call in row.calls if not is_there(call)] == []


@pytest.mark.parametrize(
    "call",
    ["sidejob_leese", "SideJob.pole", "DeadSet.retry.all", "celery -A app sidejob dead bury", "celery_sidejob.beat",
     "celery -A app sidejob dead retry --every", "DurableTask.on_found", "app.send_mail"],
)  # fmt: skip
def test_a_call_that_does_not_exist_is_seen(call: str) -> None:
    assert not is_there(call)


def test_each_test_exists() -> None:
    assert [row.id for row in ROWS if not row.tests] == []
    assert [(row.id, test) for row in ROWS for test in row.tests if test not in collected()] == []
