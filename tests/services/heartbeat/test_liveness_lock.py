"""The liveness lock is held where it tells the truth, and nowhere else; a beat tells who should sweep."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import closing

import pytest

from celery_sidejob.model.settings import Settings
from celery_sidejob.services.heartbeat.heartbeat import Heartbeat
from celery_sidejob.services.heartbeat.liveness import LivenessLock
from celery_sidejob.services.sweep.sweeper import Sweeper
from celery_sidejob.store import workers
from celery_sidejob.store.connection.connections import Connections
from celery_sidejob.store.connection.own_executor import OwnExecutor
from tests.tools.databases import Databases
from tests.tools.in_process import Stage
from tests.tools.pgbouncer import PgBouncer
from tests.tools.waiting import wait_until

SCHEMA = "sidejob"


@pytest.fixture
def lock(stage: Stage) -> Iterator[LivenessLock]:
    with closing(LivenessLock(stage.runtime.settings)) as made:
        yield made


@pytest.fixture
def beating(stage: Stage) -> Iterator[OwnExecutor]:
    """The connection on which a worker beats."""
    with closing(stage.runtime.connections.connect()) as made:
        yield made


def is_free(stage: Stage, worker_id: int) -> bool:
    """Whether others find the worker's lock free, and would make something of it."""
    found = workers.liveness(stage.runtime.connections, schema=SCHEMA, silence_s=1000)
    return next(row.lock_free for row in found if row.id == worker_id)


def of(settings: Settings, **changes: str) -> LivenessLock:
    return LivenessLock(dataclasses.replace(settings, **changes))


def test_it_is_held_as_long_as_its_connection(stage: Stage, lock: LivenessLock, beating: OwnExecutor) -> None:
    assert lock.take(stage.worker_id, beating)
    assert (lock.held, lock.is_due, is_free(stage, stage.worker_id)) == (True, False, False)

    stage.sql("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'")

    wait_until(lambda: lock.dropped_within(0.1))
    assert (lock.held, lock.is_due) == (False, True)
    wait_until(lambda: is_free(stage, stage.worker_id), message="Postgres to let go of it, after it has hung up")
    assert lock.take(stage.worker_id, beating)
    assert (lock.held, is_free(stage, stage.worker_id)) == (True, False)


def test_it_is_not_taken_twice(stage: Stage, lock: LivenessLock, beating: OwnExecutor) -> None:
    assert lock.take(stage.worker_id, beating)
    with closing(LivenessLock(stage.runtime.settings)) as second:
        assert not second.take(stage.worker_id, beating)
        assert not second.is_due, "it is tried again later, not at each beat"
    assert lock.held


def test_through_a_pooling_proxy_it_is_not_taken(
    stage: Stage, pgbouncer: PgBouncer, beating: OwnExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    pooled = pgbouncer.url_of(stage.database_url)
    for changes, said in (
        ({"database_url": pooled, "direct_url": None}, "set sidejob_direct_url to lead past it"),
        ({"direct_url": pooled}, "sidejob_direct_url leads through a pooling proxy; it must lead past it"),
    ):
        with closing(of(stage.runtime.settings, **changes)) as lock, caplog.at_level(logging.WARNING):
            assert not lock.take(stage.worker_id, beating)
            assert not lock.is_due
        assert said in caplog.text
        assert stage.sql("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == [(0,)]
        assert stage.sql("SELECT locked FROM workers WHERE id = %s", stage.worker_id) == [(False,)]


def test_in_another_database_it_is_not_held(
    stage: Stage, databases: Databases, beating: OwnExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    """Advisory locks are each database's own: nobody would see it, and a living worker would seem dead."""
    with databases.fresh() as elsewhere:
        with closing(of(stage.runtime.settings, direct_url=databases.url_of(elsewhere))) as lock:
            assert not lock.take(stage.worker_id, beating)
            assert not lock.is_due
    assert "leads to another database than sidejob_database_url" in caplog.text
    assert not is_free(stage, stage.worker_id), "nobody makes anything of its absence"


def test_a_server_that_cannot_be_reached_is_tried_again_later(
    stage: Stage, beating: OwnExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(of(stage.runtime.settings, direct_url="postgresql://nobody@127.0.0.1:1/x")) as lock:
        assert not lock.take(stage.worker_id, beating)
        assert not lock.is_due
        assert "is sidejob_direct_url right?" in caplog.text
        lock._again_at = 0.0
        assert lock.is_due


# -- who sweeps ------------------------------------------------------------------------------------------------------


def watches(stage: Stage, worker_id: int) -> bool:
    beaten = workers.beat(stage.runtime.connections, worker_id, schema=SCHEMA)
    assert beaten is not None
    return bool(beaten.watches)


def hold(stage: Stage, worker_id: int, lease_s: float = 1000) -> bool:
    return workers.hold_sweeper_lease(stage.runtime.connections, worker_id, schema=SCHEMA, lease_s=lease_s)


def test_a_beat_tells_who_watches_the_sweeper(stage: Stage, lock: LivenessLock, beating: OwnExecutor) -> None:
    holder, *others = [stage.new_worker() for _ in range(6)]
    assert watches(stage, others[0]), "nobody sweeps yet"
    assert lock.take(holder, beating)
    assert hold(stage, holder)
    assert not hold(stage, others[0])

    assert watches(stage, holder), "the answer by which it became the sweeper may have been lost"
    assert [watches(stage, other) for other in others] == [False, False, False, False, True], "the newest watches it"

    lock.close()
    wait_until(lambda: is_free(stage, holder), message="the server to notice that the connection is closed")
    assert [watches(stage, other) for other in others] == [True] * 5, "its lock is free"
    assert hold(stage, others[0])
    assert hold(stage, others[0])
    assert not hold(stage, others[1])
    workers.leave(stage.runtime.connections, others[0])
    assert watches(stage, others[1]), "it is dead"
    assert hold(stage, others[1], lease_s=0)
    assert watches(stage, others[2]), "its lease is over"


def test_a_worker_that_does_not_sweep_asks_nothing_but_by_its_beat(stage: Stage) -> None:
    first, second = Heartbeat(stage.runtime), Heartbeat(stage.runtime)
    with closing(first), closing(second):
        first.register(), second.register()
        sweeping, following = Sweeper(stage.runtime, first), Sweeper(stage.runtime, second)
        assert sweeping.run_once() is not None
        assert following.run_once() is None
        with counting(stage) as statements:
            for _ in range(5):
                assert following.run_once() is None
            assert statements() == 0
        assert sweeping.run_once() is not None
        stage.sql("UPDATE leases SET expires_at = now()")
        second._beat_at = 0.0  # a beat is due
        second.run_once()
        assert following.run_once() is not None
        sweeping._renewed_at = 0.0  # a renewal is due
        assert sweeping.run_once() is None


class counting:  # noqa: N801 - used like a function
    """Counts what this process sends to the store within the block."""

    def __init__(self, stage: Stage) -> None:
        self._connections = stage.runtime.connections
        self._count = 0

    def __enter__(self) -> counting:
        original = Connections.transact

        def transact(connections, *args, **kwargs):
            self._count += connections is self._connections
            return original(connections, *args, **kwargs)

        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(Connections, "transact", transact)
        return self

    def __call__(self) -> int:
        return self._count

    def __exit__(self, *error: object) -> None:
        self._patch.undo()
