"""The bell by which a worker's event loop is told to look after its pool."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kombu.asynchronous import Hub

from celery_sidejob.hooks.bootsteps import PoolBell


@pytest.fixture
def hub() -> Iterator[Any]:
    """An event loop as a worker's."""
    made = Hub(timer=None)
    yield made
    made.close()


def test_the_loop_looks_after_its_pool_when_the_bell_rings(hub: Any) -> None:
    looks: list[str] = []
    worker = SimpleNamespace(pool=SimpleNamespace(_pool=SimpleNamespace(maintain_pool=lambda: looks.append("look"))))
    bell = PoolBell()
    bell.register(worker, hub)

    bell.ring()
    hub.run_once()

    assert looks == ["look"]


def test_a_bell_that_rings_when_the_pool_has_ended_does_no_harm(hub: Any) -> None:
    """A cold stop ends the pool in the midst of the loop; that its processes are gone is what rings the bell."""
    worker = SimpleNamespace(pool=SimpleNamespace(_pool=SimpleNamespace(maintain_pool=pytest.fail)))
    bell = PoolBell()
    bell.register(worker, hub)

    worker.pool._pool = None
    bell.ring()
    hub.run_once()
