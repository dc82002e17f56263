"""A role that may only connect holds our advisory locks: calls say whose they are, and do not wait for ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from celery_sidejob import SideJobError
from celery_sidejob.store import advisory, asks, audience, batches, dependencies, parked, room
from celery_sidejob.store.connection import own_executor
from celery_sidejob.store.errors import RowsLocked
from celery_sidejob.store.schema import migrate
from tests.acceptance.lenders import LENDERS
from tests.tools.databases import SCHEMA
from tests.tools.in_process import Stage
from tests.tools.pgbouncer import direct
from tests.tools.roles import a_role

ONE = f'"{SCHEMA}".meta'
CALLS: dict[str, tuple[int, str, Callable[[Stage], Any]]] = {
    "enqueue(unique=)": (asks.KEYS_LOCK_CLASS, "key", lambda s: s.job(unique="key")),
    "batch()": (batches.LOCK_CLASS, "orders", lambda s: s.sidejob.batch("orders")),
    "depend_on()": (dependencies.LOCK_CLASS, ONE, lambda s: s.job().depend_on(s.job())),
    "parking": (parked.LOCK_CLASS, ONE, lambda s: s.runtime.connections.transact("park", parked.take_turn)),
    "waiting for room": (
        room.LOCK_CLASS, ONE,
        lambda s: s.runtime.connections.transact("room", lambda t: room.wait(t, 1, run_no=1, needs={})),
    ),
    "subscribe()": (audience.LOCK_CLASS, SCHEMA, lambda s: next(s.sidejob.subscribe("/status", timeout=60))),
    "db upgrade": (migrate.UPGRADE_LOCK, SCHEMA, lambda s: migrate.upgrade(s.database_url)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, stage: Stage) -> None:
    """Nobody waits for a lock for long; the connections that there are were opened with half a lease."""
    stage.runtime.connections.close()
    monkeypatch.setattr(own_executor, "_LOCK_TIMEOUT", "; SET LOCAL lock_timeout = 300")
    monkeypatch.setattr(advisory, "LONGEST_WAIT_S", 0.3)
    monkeypatch.setattr(migrate, "UPGRADE_WAIT_S", 0.3)


@contextmanager
def held(url: str, lock_class: int, key: str) -> Iterator[str]:
    """A role without rights holds a lock within the block: how an error names it."""
    with a_role(direct(url)) as (role, its_url), psycopg.connect(its_url, autocommit=True) as other:
        other.execute("SELECT pg_advisory_lock(%s, hashtext(%s))", [lock_class, key])
        yield f"session {other.info.backend_pid} of the role '{role}'"


@pytest.mark.parametrize("name", CALLS)
def test_a_call_names_who_holds_its_lock(stage: Stage, name: str) -> None:
    lock_class, key, call = CALLS[name]
    with held(stage.database_url, lock_class, key) as holder:
        with pytest.raises(SideJobError, match=holder):
            call(stage)
    if name not in ("subscribe()", "waiting for room"):
        call(stage)


@pytest.mark.parametrize("name", LENDERS)
def test_a_callers_transaction_is_as_before(stage: Stage, name: str) -> None:
    with LENDERS[name](stage.database_url) as lender:
        lender.sql("SET LOCAL work_mem = '1234kB'")
        with held(stage.database_url, asks.KEYS_LOCK_CLASS, "key") as holder:
            with pytest.raises(RowsLocked, match=holder):
                stage.job(unique="key", transaction=lender.transaction)
        stage.job(unique="key", transaction=lender.transaction)
        assert [lender.sql(f"SHOW {name}")[0][0] for name in ("work_mem", "lock_timeout")] == ["1234kB", "0"]
        lender.commit()
    assert len(stage.sidejob.jobs()) == 1


def test_a_callers_own_lock_timeout_holds(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advisory, "LONGEST_WAIT_S", 60.0)
    began = time.monotonic()
    with stage.connect(autocommit=False) as client:
        client.execute("SET LOCAL lock_timeout = '100ms'")
        with held(stage.database_url, asks.KEYS_LOCK_CLASS, "key"), pytest.raises(RowsLocked):
            stage.job(unique="key", transaction=client)
        stage.job(unique="key", transaction=client)
        assert client.execute("SHOW lock_timeout").fetchone() == ("100ms",)
    assert time.monotonic() - began < advisory.LONGEST_WAIT_S
