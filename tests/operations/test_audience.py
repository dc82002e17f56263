"""What a process knows of those who listen, when several of its threads ask at the same moment."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Event
from typing import Any

import pytest

from celery_sidejob.operations.audience import Audience
from celery_sidejob.store import audience
from tests.tools.in_process import Stage


class HeldQuestion:
    """Holds the answer to the first question until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._asked, self._let_go = Event(), Event()
        self._ask = audience.ask
        monkeypatch.setattr(audience, "ask", self._held)

    def wait(self) -> None:
        """Wait until it is asked."""
        assert self._asked.wait(10)

    def let_go(self) -> None:
        """Have the answer arrive."""
        self._let_go.set()

    def _held(self, *arguments: Any) -> Any:
        found = self._ask(*arguments)
        if not self._asked.is_set():
            self._asked.set()
            assert self._let_go.wait(10)
        return found


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldQuestion:
    return HeldQuestion(monkeypatch)


def test_no_thread_takes_an_old_answer_while_another_asks(
    stage: Stage, held: HeldQuestion, aside: Callable[..., Future[Any]]
) -> None:
    known = Audience(stage.runtime.connections)
    with stage.sidejob.subscribe("/a"):
        first = aside(known.listens)
        held.wait()

        assert known.listens(), "an answer from before the first question would be that nobody does"

        held.let_go()
        assert first.result(10)


def test_a_collector_made_while_another_thread_asks_is_known_at_once(
    stage: Stage, held: HeldQuestion, aside: Callable[..., Future[Any]]
) -> None:
    known = Audience(stage.runtime.connections)
    first = aside(known.keeps_log)
    held.wait()
    stage.job(inports={"entries": {"channels": ["/sidejob/log"]}})
    known.has_changed()
    held.let_go()
    assert not first.result(10)

    assert known.keeps_log()
