"""Fixtures that give commands to the stage's app."""

from __future__ import annotations

import pytest

from tests.tools.commands import Command, Said, ask
from tests.tools.in_process import Stage


@pytest.fixture
def command(stage: Stage) -> Command:
    """Gives a command to the stage's app; the code it ends with must be `code`."""

    def command(*words: object, code: int = 0) -> Said:
        said = ask(stage.app, *words)
        assert said.code == code, said
        assert "Traceback" not in said.err
        if code == 1:
            assert said.err.startswith("Error: ")
            assert said.err.count("\n") == 1, "an error is one line"
        return said

    return command


@pytest.fixture
def answer(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Gives a command at a terminal, where somebody types this answer to its question."""
    monkeypatch.setattr("celery_sidejob.cli.selection.can_ask", lambda: True)

    def answer(text: str, *words: object) -> Said:
        return ask(stage.app, *words, typed=f"{text}\n")

    return answer
