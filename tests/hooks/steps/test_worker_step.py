"""A worker's start, and the bell by which its event loop is told to look after its pool."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from celery import Celery
from kombu.asynchronous import Hub

from celery_sidejob import SideJob, StoreUnavailableError
from celery_sidejob.hooks import steps
from celery_sidejob.hooks.steps import SideJobStep, maintain_after_rings
from celery_sidejob.hooks.worker.holding import Bell
from celery_sidejob.services.heartbeat import liveness
from celery_sidejob.services.heartbeat.heartbeat import Heartbeat
from celery_sidejob.store.connection import opening
from celery_sidejob.store.connection.own_executor import OwnExecutor
from celery_sidejob.store.statement import Statement
from tests.tools.in_process import Stage
from tests.tools.pgbouncer import direct


@pytest.fixture
def hub() -> Iterator[Any]:
    """An event loop as a worker's."""
    made = Hub(timer=None)
    yield made
    made.close()


def test_the_loop_looks_after_its_pool_when_the_bell_rings(hub: Any) -> None:
    looks: list[str] = []
    pool = SimpleNamespace(_pool=SimpleNamespace(maintain_pool=lambda: looks.append("look")))
    bell = Bell()
    maintain_after_rings(bell, pool, hub, lambda: looks.append("told"))

    bell.ring()
    hub.run_once()

    assert looks == ["look", "told"]


def test_a_bell_that_rings_when_the_pool_has_ended_does_no_harm(hub: Any) -> None:
    """A cold stop ends the pool in the midst of the loop; that its processes are gone is what rings the bell."""
    pool = SimpleNamespace(_pool=SimpleNamespace(maintain_pool=pytest.fail))
    bell = Bell()
    maintain_after_rings(bell, pool, hub, lambda: None)

    pool._pool = None
    bell.ring()
    hub.run_once()


class Ended(OwnExecutor):
    """An executor whose connection the server ends before one of its statements."""

    left = 0

    def run(self, statement: Statement, /, **parameters: Any) -> list[Any]:
        """Run it, or have the connection end."""
        Ended.left -= 1
        if Ended.left == 0:
            with psycopg.connect(direct(self.url), autocommit=True) as other:
                other.execute("SELECT pg_terminate_backend(%s)", [self.connection.info.backend_pid])
        return super().run(statement, **parameters)

    url = ""


def starting(stage: Stage) -> SideJobStep:
    """The step of a worker that is to enter the store."""
    step: SideJobStep = object.__new__(SideJobStep)
    step._heartbeats = [Heartbeat(stage.runtime, check=stage.sidejob.check_schema)]
    return step


def test_a_worker_whose_connection_ends_while_it_starts_tries_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(steps, "AGAIN_S", 0.0)
    monkeypatch.setattr(liveness, "AGAIN_S", 0.0)
    monkeypatch.setattr(opening, "OwnExecutor", Ended)
    monkeypatch.setattr(Ended, "url", stage.database_url)
    stage.runtime.connections.close()
    place, was_reached = 0, True
    while was_reached:
        place += 1
        Ended.left = place
        step = starting(stage)
        step._register()
        (heartbeat,) = step._heartbeats
        was_reached, Ended.left = Ended.left <= 0, 0
        try:
            heartbeat.beat()  # takes the lock if that lost its own connection, without which the worker starts
            assert stage.sql("SELECT locked FROM workers WHERE id = %s", heartbeat.worker_id) == [(True,)], place
        finally:
            heartbeat.leave()
            heartbeat.close()

    assert place > 8, "a start takes some statements"
    assert caplog.text.count("cannot start yet, and tries again") > 3


def test_a_worker_without_a_store_ends_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "AGAIN_S", 0.0)
    monkeypatch.setattr(steps, "START_S", 0.1)
    app = Celery("away", broker="memory://", set_as_current=False)
    app.conf.update(sidejob_database_url="postgresql://127.0.0.1:1/none")
    step: SideJobStep = object.__new__(SideJobStep)
    step._heartbeats = [Heartbeat(SideJob(app).runtime)]

    with pytest.raises(StoreUnavailableError):
        step._register()
    app.close()
