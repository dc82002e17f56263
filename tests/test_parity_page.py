"""The pages of `tests/parity/` have every behaviour and weakness of the older systems, calls and tests that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

import click
import pytest
from celery import Celery
from celery.app.control import Control
from celery.app.task import Task
from kombu import Connection
from kombu.transport import TRANSPORT_ALIASES

import celery_sidejob.testing
from celery_sidejob.cli import sidejob
from celery_sidejob.model.settings import SETTINGS
from celery_sidejob.transport.redis.acknowledgements import QoS
from celery_sidejob.transport.redis.broker_channel import Channel
from celery_sidejob.transport.redis.consumer import Heart
from celery_sidejob.transport.redis.records import Records
from celery_sidejob.transport.redis.scripts import Keys
from celery_sidejob.transport.redis.transport import SentinelChannel, UnsuitableServerError
from tests.tools.workers import environment

ROOT = Path(__file__).parent.parent


def ids(prefix: str, digits: int, *spans: tuple[int, int]) -> list[str]:
    """The ids with a prefix, of all numbers within some spans."""
    return [f"{prefix}{number:0{digits}}" for first, last in spans for number in range(first, last + 1)]


PAGES = {
    "capacity": [
        *ids("BS-", 3, (1, 12), (20, 34), (40, 43), (50, 52), (60, 72), (80, 87)), *ids("B-S", 1, (1, 14)),
    ],
    "durable_job": [
        *ids("DJ-", 3, (1, 10), (20, 34), (40, 46), (50, 54), (60, 73), (75, 81), (90, 95)), *ids("WD-", 2, (1, 25)),
    ],
    "qless": [
        *ids("QL-", 3, (1, 8), (10, 16), (20, 23), (30, 62), (70, 83), (90, 97), (100, 110), (115, 119), (125, 135)),
        *ids("QL-", 3, (140, 147), (150, 152), (160, 162), (170, 184), (190, 197), (200, 206), (210, 215)),
        *ids("QL-", 3, (220, 224), (300, 315)), *ids("B-Q", 1, (1, 34)),
    ],
    "reliable_fetch": [
        *ids("UL-", 3, (1, 2), (10, 13), (20, 27), (30, 34), (40, 42), (50, 59), (70, 75), (80, 82)),
        *ids("B-U", 1, (1, 17)), *ids("B-K", 1, (1, 12)), *ids("P-", 2, (1, 18)),
    ],
    "sidejob": [
        *ids("SJ-", 3, (1, 7), (10, 26), (30, 34), (40, 44), (50, 58), (60, 67), (80, 93), (100, 108), (110, 118)),
        *ids("SJ-", 3, (120, 133), (150, 154), (160, 168), (170, 171), (175, 184), (190, 197)),
        *ids("SJ-", 3, (200, 225), (230, 237), (240, 246), (250, 256), (260, 273), (280, 282), (285, 286), (290, 297)),
        *ids("SJ-", 3, (300, 312), (320, 325), (330, 339)), *ids("WS-", 2, (1, 33)),
    ],
}  # fmt: skip
"""What each page has: all that was found in the older system, and of qless all but statistics and a few more."""
HOW_MANY = {
    "capacity": 55 + 14, "durable_job": 64 + 25, "qless": 172 + 34, "reliable_fetch": 41 + 17 + 12 + 18,
    "sidejob": 235 + 33,
}  # fmt: skip
MOST_THAT_DO_NOT_APPLY = {"capacity": 3, "durable_job": 5, "qless": 4, "reliable_fetch": 8, "sidejob": 15}
"""Of each page."""
LATER = "later: web page"
"""What a line says whose counterpart comes with a page that is not made yet: it has neither a call nor a test."""


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


def rows(page: str) -> list[Row]:
    """The lines of a page's table."""
    lines = (ROOT / "tests" / "parity" / f"{page}.md").read_text().splitlines()
    found = [line.strip("| ").split(" | ") for line in lines if re.match(r"\| [A-Z-]+\d+ \|", line)]
    return [Row(*columns) for columns in found]


ROWS = {page: rows(page) for page in PAGES}
every_page = pytest.mark.parametrize("page", PAGES)


def unknown(tests: Iterable[str], session: pytest.Session) -> set[str]:
    """Those of the ids, with parameters or without, that no test has."""
    missing = set(tests) - both_ways(item.nodeid for item in session.items)
    files = sorted({test.partition("::")[0] for test in missing})
    return missing - collected(*files) if files else missing


@cache
def collected(*files: str) -> frozenset[str]:
    """The ids of all tests in files that this session has not collected, or only in part."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *files], cwd=ROOT, env=environment({}),
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return both_ways(line for line in done.stdout.splitlines() if "::" in line)


def both_ways(whole: Iterable[str]) -> frozenset[str]:
    """Ids of tests, and the same without parameters."""
    return frozenset(part for name in whole for part in (name, name.partition("[")[0]))


CELERY_S = {"app": Celery, "app.control": Control, "Task": Task}
"""What calls of Celery's begin with."""
TRANSPORT_S: dict[str, Any] = {
    "Channel": Channel, "Heart": Heart, "Keys": Keys, "QoS": QoS, "Records": Records,
    "UnsuitableServerError": UnsuitableServerError,
}  # fmt: skip
OPTIONS = {*SentinelChannel.from_transport_options, *signature(Connection).parameters, "polling_interval"}
"""Of the broker's connection; the last one is the transport's own."""


def is_there(call: str) -> bool:
    """Tell whether a call, a setting, an option, a key or a command exists."""
    if call.startswith("sidejob_"):
        return call in {setting.key for setting in SETTINGS}
    if call.endswith("://"):
        return call.removesuffix("://") in TRANSPORT_ALIASES
    if call.startswith("_sidejob."):
        return hasattr(Keys("", ""), call.removeprefix("_sidejob."))
    if call in OPTIONS or call in dict(Task.from_config):
        return True
    if call.startswith("celery -A app sidejob "):
        return is_command(call.removeprefix("celery -A app sidejob ").split())
    names = call.removeprefix("celery_sidejob.").split(".")
    for count in (2, 1):
        theirs = CELERY_S.get(".".join(names[:count])) or TRANSPORT_S.get(".".join(names[:count]))
        if theirs is not None:
            return has(theirs, names[count:])
    return names[0] in (*celery_sidejob.__all__, "transport", "testing") and has(celery_sidejob, names)


def has(found: Any, names: Sequence[str]) -> bool:
    """Tell whether the attributes of attributes are there."""
    for name in names:
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


def is_command(words: Sequence[str]) -> bool:
    """Tell whether `celery sidejob` has this command, with these options."""
    command: Any = sidejob
    for word in words:
        if word.startswith("-"):
            return any(word in option.opts for option in command.params)
        command = command.get_command(click.Context(command), word)
        if command is None:
            return False
    return True


@every_page
def test_each_behaviour_and_weakness_is_there_once(page: str) -> None:
    assert len(PAGES[page]) == HOW_MANY[page]
    assert Counter(row.id for row in ROWS[page]) == Counter(PAGES[page])


@every_page
def test_each_line_says_how_it_compares(page: str) -> None:
    wrong = [row.id for row in ROWS[page] if not re.fullmatch(rf"same|better: .+|does not apply: .+|{LATER}", row.how)]
    assert wrong == []
    assert sum(row.how.startswith("does not apply") for row in ROWS[page]) <= MOST_THAT_DO_NOT_APPLY[page]
    assert [row.id for row in ROWS[page] if bool(row.calls) == (row.how == LATER)] == []


@every_page
def test_each_call_exists(page: str) -> None:
    assert [(row.id, call) for row in ROWS[page] for call in row.calls if not is_there(call)] == []


@pytest.mark.parametrize(
    "call",
    ["sidejob_leese", "SideJob.pole", "DeadSet.retry.all", "celery -A app sidejob dead bury", "celery_sidejob.beat",
     "celery -A app sidejob dead retry --every", "DurableTask.on_found", "app.send_mail", "app.control.cancel_all",
     "sidejobz://", "_sidejob.hold", "consumer_timeouts", "QoS.acks", "celery_sidejob.transport.message_lost"],
)  # fmt: skip
def test_a_call_that_does_not_exist_is_seen(call: str) -> None:
    assert not is_there(call)


@every_page
def test_each_test_exists(page: str, request: pytest.FixtureRequest) -> None:
    assert [row.id for row in ROWS[page] if bool(row.tests) == (row.how == LATER)] == []
    missing = unknown((test for row in ROWS[page] for test in row.tests), request.session)
    assert [(row.id, test) for row in ROWS[page] for test in row.tests if test in missing] == []
