"""What takes long shows on a terminal that it goes on, and nothing to programs."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any

import pytest
from celery.bin.base import CLIContext

from celery_sidejob.cli import output
from celery_sidejob.cli import sidejob as group
from celery_sidejob.cli.output import Output
from tests.tools.in_process import Stage
from tests.tools.waiting import wait_until


class Terminal(io.StringIO):
    """Takes down what a person would see."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class AtOnce(threading.Timer):
    """Does at once what a timer does later."""

    def start(self) -> None:
        self.function()

    def join(self, timeout: float | None = None) -> None: ...


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """The terminal of a command, for which everything takes long."""
    monkeypatch.setattr(output, "Timer", AtOnce)
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


Ask = Callable[..., None]


@pytest.fixture
def ask(stage: Stage, terminal: Terminal) -> Ask:
    """Gives a command to the stage's app at the terminal, with its output on the process's own."""

    def ask(*words: str) -> None:
        context = CLIContext(app=stage.app, no_color=True, workdir=None)
        with redirect_stderr(terminal):
            group.main([*words], obj=context, standalone_mode=False)

    return ask


LONG = {
    "jobs": "Looking through the jobs",
    "stats --all": "Counting all jobs",
    "dead list": "Looking through the dead set",
    "dead groups": "Counting the dead set",
    "dead retry --all": "Retrying entries",
    "dead purge --keep 7": "Purging entries",
}


@pytest.mark.parametrize("command", LONG)
def test_a_command_that_may_take_long_says_on_a_terminal_what_it_does(
    terminal: Terminal, ask: Ask, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    ask(*command.split())

    assert LONG[command] in terminal.getvalue()
    assert LONG[command] not in capsys.readouterr().out


@pytest.mark.parametrize("command", LONG)
def test_a_program_is_shown_nothing(terminal: Terminal, ask: Ask, command: str) -> None:
    ask(*command.split(), "--json")

    assert terminal.getvalue() == ""


def test_doctor_and_drain_say_what_they_read(terminal: Terminal, ask: Ask) -> None:
    with pytest.raises(SystemExit):
        ask("doctor", "--thorough")
    with pytest.raises(Exception, match="Nobody knows a queue"):
        ask("drain", "--queue", "unheard-of")

    assert "Looking at every job" in terminal.getvalue()
    assert "Looking for the queue unheard-of in all jobs" in terminal.getvalue()


def test_a_number_that_grows_is_shown(terminal: Terminal) -> None:
    with redirect_stderr(terminal), Output(coloured=False).progress("Retrying entries") as add:
        add(1000)
        add(200)
        wait_until(lambda: "1,200" in terminal.getvalue())


def test_what_is_no_terminal_is_shown_nothing(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(output, "Timer", AtOnce)

    with Output(coloured=False).progress("Retrying entries") as add:
        add(1)

    assert capsys.readouterr() == ("", "")


def test_what_is_quick_shows_nothing(monkeypatch: pytest.MonkeyPatch, terminal: Terminal) -> None:
    monkeypatch.setattr(output, "Timer", threading.Timer)
    monkeypatch.setattr(output, "PROGRESS_AFTER_S", 60.0)

    with redirect_stderr(terminal), Output(coloured=False).progress("Retrying entries") as add:
        add(1)

    assert "Retrying" not in terminal.getvalue()


def test_retries_and_purges_tell_how_many_they_have_done(stage: Stage) -> None:
    for _ in range(3):
        job = stage.job(lambda job: 1 / 0)
        hold = stage.claim(job)
        assert hold is not None
        stage.perform(hold)
    told: list[int] = []

    assert stage.sidejob.dead.retry_all(limit=2, progress=told.append) == sum(told) == 2
    told.clear()
    assert stage.sidejob.dead.purge(keep=0, progress=told.append) == sum(told) == 1
