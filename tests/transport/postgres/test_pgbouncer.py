"""Workers behind a PgBouncer in transaction mode: they hear nothing and hold no lock, unless their hearts go past it.

With SIDEJOB_TEST_PGBOUNCER=1 all other tests of this folder go through one as well.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import pytest
from celery import Celery

from tests.tools.pgbouncer import PgBouncer
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes
from tests.transport.postgres.conftest import Tables

PLAIN = "tests.transport.worker_app"
STORE = "tests.transport.postgres.store_app"


@pytest.fixture
def pooled() -> bool:
    """All tests here go through the proxy."""
    return True


@pytest.fixture
def env(broker_url: str, record: Record) -> Mapping[str, str]:
    """What a worker that knows of the proxy alone is told."""
    return {"BROKER_URL": broker_url, "CONSUMER_TIMEOUT": "2", **record.env}


def locked(tables: Tables) -> list[bool]:
    """Which consumers are dead as soon as their sessions end."""
    return list(tables.one("SELECT coalesce(array_agg(locked ORDER BY id), '{}') FROM broker_consumers"))


def test_an_idle_worker_looks_for_what_it_does_not_hear(
    processes: Processes, env: Mapping[str, str], client: Celery, record: Record, tables: Tables
) -> None:
    processes.start_worker(PLAIN, env=env)
    assert locked(tables) == [False]
    began: list[float] = []
    for number in range(20):
        sent = tables.one("SELECT extract(epoch FROM clock_timestamp())::float8")
        client.send_task("note", (f"note{number}",))
        (noted,) = record.wait_for(f"note{number}")
        began.append(noted["at"] - sent)
    assert sorted(began)[10] < 0.25, "it looks every 50 ms, and does not back off to a second"


def test_commands_and_broadcasts_reach_it(processes: Processes, env: Mapping[str, str], client: Celery) -> None:
    worker = processes.start_worker(PLAIN, env=env, pool="threads")
    for _ in range(3):
        assert client.control.inspect(timeout=5, limit=1).ping() == {worker.nodename: {"ok": "pong"}}


def test_a_killed_worker_is_dead_when_it_was_silent_for_long(
    processes: Processes, env: Mapping[str, str], client: Celery, record: Record, tables: Tables
) -> None:
    killed = processes.start_worker(PLAIN, env=env)
    client.send_task("last", (60,))
    record.wait_for("begun")
    killed.kill_group()
    processes.start_worker(PLAIN, env=env)
    record.wait_for("begun", count=2, timeout=8)
    assert tables.consumers == 1


@pytest.mark.few(0)
def test_a_heart_goes_past_it_if_there_is_a_way(
    processes: Processes, database_url: str, record: Record, tables: Tables, pgbouncer: PgBouncer
) -> None:
    direct = os.environ["SIDEJOB_DIRECT_URL"]
    env = {"SIDEJOB_DATABASE_URL": database_url, "SIDEJOB_DIRECT_URL": direct, **record.env}
    worker = processes.start_worker(STORE, env=env)
    assert locked(tables) == [True]
    name = urlsplit(database_url).path.strip("/")

    def through_it() -> list[Any]:
        return [one for one in pgbouncer.show("CLIENTS") if one["database"] == name]

    assert through_it(), "statements go through it"
    processes.start_worker(STORE, env=env)
    worker.kill_group()
    wait_until(lambda: locked(tables) == [True], timeout=5, message="the killed one to be found")
