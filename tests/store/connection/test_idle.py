"""Connections that nobody uses are kept for a while, then closed."""

from __future__ import annotations

import pytest

from celery_sidejob.store.connection import own_executor
from celery_sidejob.store.connection.own_executor import OwnExecutor
from celery_sidejob.store.statement import Statement
from tests.tools.in_process import Stage
from tests.tools.waiting import wait_until

PID = Statement("SELECT pg_backend_pid() AS pid")


def pid(executor: OwnExecutor) -> int:
    """Which process of Postgres serves this connection."""
    found: int = executor.run(PID)[0].pid
    return found


def test_a_connection_is_used_again_and_closed_once_it_was_idle_for_long(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections = stage.runtime.connections
    first = connections.transact("first", pid)
    wait_until(lambda: stage.sql("SELECT 1 FROM pg_stat_activity WHERE pid = %s AND state = 'idle'", first))
    assert connections.transact("second", pid) == first

    monkeypatch.setattr(own_executor, "IDLE_S", 0.2)
    connections.close()
    last = connections.transact("last", pid)
    wait_until(lambda: not stage.sql("SELECT 1 FROM pg_stat_activity WHERE pid = %s", last), message="it to be closed")
