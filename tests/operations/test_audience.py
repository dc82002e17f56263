"""What a process knows of those who listen, when several of its threads ask at the same moment."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Event, current_thread, main_thread
from typing import Any

import pytest

from celery_sidejob import RunningJob
from celery_sidejob.operations.audience import Audience
from celery_sidejob.store import audience
from celery_sidejob.store.connection.own_executor import OwnExecutor
from celery_sidejob.store.statement import Statement
from tests.tools.in_process import Stage

STATEMENTS = 10
"""Of a run that reads a packet and writes one, with what the test asks itself to find what is due."""


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


def test_a_claim_asks_along(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has been idle does not know who listens, and asks nothing more until its run has ended."""
    known, asked, run = stage.runtime.audience, list[Statement](), OwnExecutor.run

    def noting(self: OwnExecutor, statement: Statement, /, **parameters: Any) -> Any:
        if current_thread() is main_thread():
            asked.append(statement)
        return run(self, statement, **parameters)

    def body(job: RunningJob) -> None:
        job.output("o").write(job.input("i").read())

    def run_of_idle_process() -> tuple[list[bool], list[Statement]]:
        job = stage.job(body, inports={"i": {"default": 1}})
        known._until = float("-inf")
        asked.clear()
        stage.run(job)
        return [known.keeps_log(ask=False), known.listens(ask=False)], asked.copy()

    monkeypatch.setattr(OwnExecutor, "run", noting)
    told, statements = run_of_idle_process()
    assert told == [False, False]
    assert audience._ASK not in statements
    assert len(statements) == STATEMENTS
    with stage.sidejob.subscribe("/a"):
        assert run_of_idle_process()[0] == [False, True]
    stage.job(inports={"log": {}}).input("log").write(1)
    stage.sql(
        "INSERT INTO subscriptions (channel, job_id, port_id) SELECT '/sidejob', job_id, id FROM ports "
        "WHERE name = 'log'"
    )
    assert run_of_idle_process()[0] == [True, False], "as another process has made it"
