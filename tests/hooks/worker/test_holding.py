"""When a worker has a page of messages held."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery.worker import state

from celery_sidejob.hooks.worker import holding as pages
from celery_sidejob.hooks.worker.delivered import Delivered
from celery_sidejob.hooks.worker.holding import SOON_S, Holding


class Hub:
    """An event loop that runs a round when the test says so."""

    def __init__(self) -> None:
        self.on_tick: set[Any] = set()
        self.timers: list[float] = []

    def add_reader(self, *_: Any) -> None:
        """Nothing is heard here."""

    def call_later(self, seconds: float, call: Any) -> None:
        """Note when it would call."""
        self.timers.append(seconds)

    def tick(self) -> None:
        """End a round."""
        for call in self.on_tick:
            call()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> tuple[Holding, Hub, list[float], list[str]]:
    """What holds, its loop, the time, and the rings by which its thread is woken."""
    now, rings, hub = [100.0], list[str](), Hub()
    monkeypatch.setattr(pages, "monotonic", lambda: now[0])
    monkeypatch.setattr(pages.Loop, "start", lambda loop: None)
    monkeypatch.setattr(Delivered, "concurrency", lambda: 2)
    holding = Holding(None)  # type: ignore[arg-type]
    monkeypatch.setattr(holding._wakes, "ring", lambda: rings.append("ring"))
    holding.register(hub)
    return holding, hub, now, rings


def have(monkeypatch: pytest.MonkeyPatch, holding: Holding, *, running: int, waiting: int) -> None:
    """Have so many runs in the pool, and so many messages that are held and wait for it."""
    monkeypatch.setattr(state, "active_requests", range(running))
    monkeypatch.setattr(state, "reserved_requests", range(running + waiting + holding._under_way))


def test_what_arrives_in_one_round_of_the_loop_is_one_page(
    worker: tuple[Holding, Hub, list[float], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    holding, hub, _, rings = worker
    for _ in range(3):
        holding.hand_over(lambda request: None, SimpleNamespace(fresh="a row"))
    have(monkeypatch, holding, running=2, waiting=2)
    assert rings == []
    hub.tick()
    hub.tick()
    assert rings == ["ring"], "once for all, however often the loop comes round before the thread does"


def test_a_page_waits_a_moment_while_more_wait_for_the_pool_than_run(
    worker: tuple[Holding, Hub, list[float], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    holding, hub, now, rings = worker
    holding.hand_over(lambda request: None, SimpleNamespace(fresh="a row"))
    have(monkeypatch, holding, running=2, waiting=3)
    hub.tick()
    assert (rings, hub.timers) == ([], [SOON_S])
    now[0] += SOON_S
    hub.tick()
    assert rings == ["ring"]
