"""One turn of the sweeper at a time: whom it takes for dead, what it publishes, and what it does after trouble."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from celery_sidejob import Job, StoreUnavailableError, embedded
from celery_sidejob.operations import after_commit
from celery_sidejob.operations.hold import Hold
from celery_sidejob.services.heartbeat.heartbeat import Heartbeat
from celery_sidejob.services.sweep import dead_workers, sweep
from celery_sidejob.services.sweep import sweeper as sweeping
from celery_sidejob.services.sweep.due import PER_QUEUE as PAGE
from celery_sidejob.services.sweep.sweeper import Sweeper
from celery_sidejob.store import workers
from celery_sidejob.store.outbox import publishing
from celery_sidejob.store.outbox.kinds import JOBS
from celery_sidejob.store.write_behind import WriteBehind
from tests.tools.crash_points import Arm, lost
from tests.tools.databases import SCHEMA, prepare_template
from tests.tools.in_process import Stage
from tests.tools.proxy import TcpProxy
from tests.tools.waiting import wait_until


@pytest.fixture
def sweeper(stage: Stage) -> Sweeper:
    """Sweeps when the test says so."""
    return Sweeper(stage.runtime)


@pytest.fixture
def held(stage: Stage) -> Hold:
    """A run of a worker of its own, which beat just now and has no liveness lock."""
    hold = stage.claim(stage.job(), worker_id=stage.new_worker())
    assert hold is not None
    return hold


def state(stage: Stage, hold: Hold) -> tuple[Any, ...]:
    """Status, losses, and whether its worker is suspected and dead."""
    return stage.sql(
        "SELECT j.status, j.losses, w.suspect_by, w.dead_at IS NOT NULL FROM jobs j, workers w"
        " WHERE j.id = %s AND w.id = %s", hold.job_id, hold.worker_id,
    )[0]  # fmt: skip


def silent(stage: Stage, hold: Hold, seconds: float) -> None:
    """Let its worker have been silent, and suspected if it is, for so much longer."""
    stage.sql(
        "UPDATE workers SET beat_at = beat_at - make_interval(secs => %s),"
        " suspect_at = suspect_at - make_interval(secs => %s) WHERE id = %s",
        seconds, seconds, hold.worker_id,
    )  # fmt: skip


def old_enough(stage: Stage) -> None:
    """Wait until this Postgres has been up for so long that a free lock means something; workers beat meanwhile."""
    wait_until(
        lambda: stage.sql("SELECT now() - pg_postmaster_start_time() > interval '10 s'")[0][0], timeout=15,
        message="Postgres to be ten seconds old",
    )  # fmt: skip
    stage.sql("UPDATE workers SET beat_at = now()")


# -- who is dead ------------------------------------------------------------------------------------------------------


def test_a_silent_worker_is_suspected_then_declared_dead_then_rescued(
    stage: Stage, sweeper: Sweeper, held: Hold
) -> None:
    lease = stage.sidejob.settings.lease
    assert not sweeper.run_once()
    silent(stage, held, lease / 2 - 2)
    assert not sweeper.run_once()
    assert state(stage, held) == ("running", 0, None, False), "it may still be heard of in time"

    silent(stage, held, 3)
    for _ in range(2):
        assert not sweeper.run_once()
        assert state(stage, held) == ("running", 0, "silence", False), "one observation is not enough"
    silent(stage, held, lease / 2 - 2)
    assert not sweeper.run_once()
    assert state(stage, held) == ("running", 0, "silence", False)

    silent(stage, held, 3)
    report = sweeper.run_once()
    assert report is not None
    assert (report.declared_dead, report.rescued) == (1, 1)
    assert stage.sql("SELECT status, losses, worker_id FROM jobs") == [("queued", 1, None)]
    assert stage.sql("SELECT id FROM workers WHERE id = %s", held.worker_id) == [], "nothing of it is left"


def test_a_beat_in_between_clears_every_suspicion(stage: Stage, sweeper: Sweeper, held: Hold) -> None:
    lease = stage.sidejob.settings.lease
    silent(stage, held, lease)
    sweeper.run_once()
    assert state(stage, held)[2] == "silence"
    assert workers.beat(stage.runtime.connections, held.worker_id, schema=SCHEMA)
    assert state(stage, held) == ("running", 0, None, False)
    for _ in range(2):
        assert not sweeper.run_once()

    silent(stage, held, lease)
    sweeper.run_once()
    assert not sweeper.run_once(), "the time since the first suspicion does not count"
    assert state(stage, held) == ("running", 0, "silence", False)


def test_after_a_start_of_postgres_a_free_lock_means_nothing(own_postgres: embedded.Postgres) -> None:
    """All locks were freed by it, and their owners are on their way back; that it means something later is below."""
    prepare_template(own_postgres.url)
    stage = Stage(own_postgres.url)
    try:
        hold = stage.claim(stage.job())
        assert hold is not None
        workers.announce_lock(stage.runtime.connections, hold.worker_id, True)
        own_postgres.restart()
        stage.close()
        stage._looking = stage.connect()

        Sweeper(stage.runtime).run_once()
        assert state(stage, hold) == ("running", 0, None, False)
    finally:
        stage.close()


def test_a_free_lock_is_a_death_within_seconds_and_a_held_one_is_none(
    stage: Stage, sweeper: Sweeper, held: Hold
) -> None:
    old_enough(stage)
    living = Heartbeat(stage.runtime)
    living.register()
    try:
        of_living = stage.claim(stage.job(), worker_id=living.worker_id)
        workers.announce_lock(stage.runtime.connections, held.worker_id, True)  # its lock's connection is gone
        sweeper.run_once()
        assert state(stage, held) == ("running", 0, "lock", False)
        assert sweeper.wait_s() < sweeping.TICK_S, "it looks again soon"
        assert not sweeper.run_once()

        silent(stage, held, stage.sidejob.settings.lock_grace + 0.5)
        report = sweeper.run_once()
        assert report is not None
        assert (report.declared_dead, report.rescued) == (1, 1)
        assert of_living is not None
        assert state(stage, of_living) == ("running", 0, None, False)
    finally:
        living.leave()
        living.close()


def test_a_worker_without_a_lock_is_not_missed_by_it(stage: Stage, sweeper: Sweeper, held: Hold) -> None:
    old_enough(stage)
    silent(stage, held, stage.sidejob.settings.lock_grace + 0.5)
    for _ in range(2):
        assert not sweeper.run_once()
    assert state(stage, held) == ("running", 0, None, False)


def test_silence_is_given_more_time_than_a_free_lock(stage: Stage, sweeper: Sweeper, held: Hold) -> None:
    silent(stage, held, stage.sidejob.settings.lease)
    sweeper.run_once()
    silent(stage, held, stage.sidejob.settings.lock_grace + 0.5)
    assert not sweeper.run_once()
    assert state(stage, held) == ("running", 0, "silence", False)


def test_after_trouble_of_its_own_a_sweeper_does_not_believe_a_free_lock(
    stage: Stage, sweeper: Sweeper, held: Hold, at: Arm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What kept the sweeper from the store may have freed the locks of all others."""
    old_enough(stage)
    at("read:before-commit", lost)
    with pytest.raises(StoreUnavailableError):
        sweeper.run_once()
    workers.announce_lock(stage.runtime.connections, held.worker_id, True)

    assert not sweeper.run_once()
    assert state(stage, held) == ("running", 0, None, False)
    monkeypatch.setattr(dead_workers, "TROUBLE_S", 0.0)
    sweeper.run_once()
    assert state(stage, held) == ("running", 0, "lock", False)


def test_after_trouble_of_its_own_a_sweeper_declares_nobody_dead(
    stage: Stage, sweeper: Sweeper, held: Hold, at: Arm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What kept the sweeper from the store may have kept a suspected worker from beating."""
    old_enough(stage)
    workers.announce_lock(stage.runtime.connections, held.worker_id, True)
    sweeper.run_once()
    at("read:before-commit", lost)
    with pytest.raises(StoreUnavailableError):
        sweeper.run_once()
    silent(stage, held, stage.sidejob.settings.lock_grace + 0.5)

    assert not sweeper.run_once()
    assert state(stage, held) == ("running", 0, "lock", False)
    monkeypatch.setattr(dead_workers, "TROUBLE_S", 0.0)
    report = sweeper.run_once()
    assert report is not None
    assert report.declared_dead == 1


def test_a_job_that_somebody_has_locked_keeps_back_no_other_rescue(stage: Stage, sweeper: Sweeper, held: Hold) -> None:
    more = [stage.claim(stage.job(), worker_id=held.worker_id) for _ in range(2)]
    stage.declare_dead(held.worker_id)
    with stage.connect(autocommit=False) as shell:
        shell.execute("SELECT 1 FROM jobs WHERE id = %s FOR UPDATE", [held.job_id])
        report = sweeper.run_once()
        assert report is not None
        assert report.rescued == len(more)
        assert stage.sql("SELECT id FROM workers WHERE id = %s", held.worker_id), "it still holds a run"
        shell.rollback()
    report = sweeper.run_once()
    assert report is not None
    assert report.rescued == 1
    assert stage.sql("SELECT id FROM workers WHERE id = %s", held.worker_id) == []


# -- who sweeps -------------------------------------------------------------------------------------------------------


class Worker:
    """A worker that beats each time its sweeper wants to know whether anybody sweeps."""

    lock_lost_at = float("-inf")

    def __init__(self, stage: Stage) -> None:
        self.worker_id = stage.new_worker()
        self._stage = stage

    def sweep_is_due(self) -> bool:
        beaten = workers.beat(self._stage.runtime.connections, self.worker_id, schema=SCHEMA)
        return beaten is not None and bool(beaten.watches)


def test_one_sweeps_and_the_next_follows_when_its_lease_or_its_life_is_over(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "RENEW_S", 0.0)
    sweepers = [Worker(stage) for _ in range(3)]
    identities = [worker.worker_id for worker in sweepers]
    first, second, third = (Sweeper(stage.runtime, worker) for worker in sweepers)

    assert first.run_once() is not None
    assert second.run_once() is None
    assert second.wait_s() == sweeping.WATCH_S
    assert first.run_once() is not None, "it renews its lease"

    stage.sql("UPDATE leases SET expires_at = now() - interval '1 ms'")
    assert second.run_once() is not None
    assert first.run_once() is None

    stage.declare_dead(identities[1])
    assert third.run_once() is not None, "nobody waits for the lease of the dead"

    workers.drop_sweeper_lease(stage.runtime.connections, identities[2])
    assert first.run_once() is not None


def test_between_two_turns_a_sweeping_worker_looks_for_dead_workers_alone(
    stage: Stage, held: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "TURN_S", 3600)
    stage.job(countdown=3600)
    sweeper = Sweeper(stage.runtime, Worker(stage))
    assert sweeper.run_once() is not None

    stage.sql("UPDATE timers SET due_at = now()")
    silent(stage, held, stage.sidejob.settings.lease)
    report = sweeper.run_once()
    assert report is not None
    assert (report.suspected, report.timers) == (1, 0)

    stage.sql("UPDATE leases SET expires_at = now() - interval '1 ms'")
    report = Sweeper(stage.runtime, Worker(stage)).run_once()
    assert report is not None
    assert report.timers == 1


# -- what is published ------------------------------------------------------------------------------------------------


@pytest.fixture
def broker(database_url: str, redis_url: str) -> Iterator[tuple[Stage, TcpProxy, Any]]:
    """A client of a Redis, the proxy between them, and a look into that Redis."""
    with TcpProxy.to(redis_url) as proxy, redis.Redis.from_url(redis_url) as client:
        made = Stage(database_url, broker=proxy.url_for(redis_url), result_backend=redis_url)
        made.sidejob.poll()  # our marker is there now
        try:
            yield made, proxy, client
            assert made.broken_rules() == []
        finally:
            made.close()


def rung(client: Any, queue: str = "celery") -> list[int]:
    """The ids of the jobs whose doorbells are in the broker, the oldest first."""
    return [json.loads(text)["headers"]["sidejob"]["job"] for text in reversed(client.lrange(queue, 0, -1))]


def unpublished(stage: Stage) -> int:
    return int(stage.sql("SELECT count(*) FROM messages WHERE published_at IS NULL")[0][0])


def is_published_once_it_may(stage: Stage) -> None:
    """Sweep until the pause after a failure is over and nothing is left to be published."""
    stage.sql("UPDATE messages SET next_check_at = now() WHERE published_at IS NULL")
    wait_until(lambda: stage.sidejob.poll() and unpublished(stage) == 0, message="everything to be published")


def test_what_the_broker_did_not_take_is_not_marked_and_goes_out_later(broker: tuple[Stage, TcpProxy, Any]) -> None:
    stage, proxy, client = broker
    proxy.refuse()
    jobs = [stage.job() for _ in range(3)]
    assert unpublished(stage) == 3
    assert stage.sql("SELECT count(*) FROM messages WHERE next_check_at <= now() + interval '2 s'") == [(3,)]

    stage.sql("UPDATE messages SET next_check_at = now()")
    report = stage.sidejob.poll()
    assert (report.published, unpublished(stage)) == (0, 3)

    proxy.pass_through()
    is_published_once_it_may(stage)
    assert rung(client) == [job.id for job in jobs]
    assert not stage.sidejob.poll()


def test_a_death_between_publish_and_mark_is_one_copy_more(
    broker: tuple[Stage, TcpProxy, Any], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    stage, _, client = broker
    monkeypatch.setattr(after_commit, "MARK_S", 3600.0)
    job = stage.job()
    assert (rung(client), unpublished(stage)) == ([job.id], 1)
    stage.sql("UPDATE messages SET next_check_at = now()")
    assert stage.sidejob.poll().published == 1
    assert rung(client) == [job.id] * 2
    assert stage.run(job) == "completed"
    stage.runtime.connections.write_behind_now()
    assert stage.claim(job, for_run=1) is None


def test_doorbells_are_marked_before_a_sweeper_looks_at_them(broker: tuple[Stage, TcpProxy, Any]) -> None:
    stage, _, client = broker
    jobs = [stage.job(), *stage.sidejob.enqueue_many([{"task": "stage.idle"} for _ in range(150)])]
    assert len(rung(client)) == len(jobs)

    wait_until(lambda: unpublished(stage) == 0, message="all to be marked")

    assert stage.sidejob.poll().published == 0


def test_a_late_mark_is_not_of_the_next_run(
    broker: tuple[Stage, TcpProxy, Any], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    stage, _, client = broker
    monkeypatch.setattr(after_commit, "MARK_S", 3600.0)
    job = stage.job()
    assert stage.run(job) == "completed"
    client.flushdb()
    monkeypatch.setattr(stage.runtime.publisher, "publish", lambda waiting, **_: [])
    job.run()

    stage.runtime.connections.write_behind_now()

    assert unpublished(stage) == 1


def test_a_continuation_is_kept_until_the_broker_has_it(broker: tuple[Stage, TcpProxy, Any]) -> None:
    stage, proxy, client = broker
    job = stage.job(lambda job: 7, link=stage.app.signature("somebody.elses", queue="links"))
    client.delete("celery")
    proxy.refuse()
    assert stage.run(job) == "completed"
    assert stage.row_counts()["messages"] == 1
    stage.sql("UPDATE messages SET next_check_at = now()")
    stage.sidejob.poll()
    assert stage.row_counts()["messages"] == 1

    proxy.pass_through()
    is_published_once_it_may(stage)
    (text,) = client.lrange("links", 0, -1)
    assert json.loads(text)["headers"]["task"] == "somebody.elses"
    assert stage.row_counts()["messages"] == 0


def test_every_page_is_published_again_when_the_broker_was_emptied(broker: tuple[Stage, TcpProxy, Any]) -> None:
    stage, _, client = broker
    many = 1100  # more than the sweeper marks in one step
    jobs = stage.sidejob.enqueue_many([{"task": "stage.idle"} for _ in range(many)])
    assert client.llen("celery") == many
    stage.runtime.connections.write_behind_now()
    client.flushdb()

    report = stage.sidejob.poll()

    assert report.broker_emptied
    assert rung(client) == [job.id for job in jobs], "the oldest first"
    assert stage.sidejob.poll().published == 0, "and that is all"


def test_a_mark_that_comes_after_the_broker_was_emptied_hides_nothing(broker: tuple[Stage, TcpProxy, Any]) -> None:
    stage, _, client = broker
    job = stage.job()
    marks: WriteBehind[Any] = stage.runtime.connections.write_behind(
        "marks of jobs", lambda: pytest.fail("nothing was rung")
    )
    on_its_way = marks.take()
    assert [mark for _, mark in on_its_way] == [(job.id, 1)]
    client.flushdb()

    report = stage.sidejob.poll()
    assert (report.broker_emptied, rung(client)) == (True, [])
    marks.give_back(on_its_way)
    stage.runtime.connections.write_behind_now()

    is_published_once_it_may(stage)
    assert rung(client) == [job.id]


def test_what_was_seen_of_an_emptied_broker_outlives_trouble_with_the_store(
    broker: tuple[Stage, TcpProxy, Any], at: Arm
) -> None:
    """The broker tells only once: when the marker is set again, it looks as if nothing had been."""
    stage, _, client = broker
    job = stage.job()
    stage.runtime.connections.write_behind_now()
    client.flushdb()
    sweeper = Sweeper(stage.runtime)
    at("check-now:before-commit", lost)
    with pytest.raises(StoreUnavailableError):
        sweeper.run_once()
    assert rung(client) == []

    report = sweeper.run_once()
    assert report is not None
    assert report.broker_emptied
    assert rung(client) == [job.id]


def test_a_page_that_was_reserved_in_vain_is_looked_at_again(stage: Stage, sweeper: Sweeper, at: Arm) -> None:
    stage.job()
    stage.runtime.connections.write_behind_now()
    stage.sql("UPDATE messages SET published_at = NULL, next_check_at = now()")
    at("reserve:after-commit", lost)
    with pytest.raises(StoreUnavailableError):
        sweeper.run_once()
    assert stage.sql("SELECT next_check_at > now() FROM messages") == [(True,)]

    report = sweeper.run_once()
    assert report is not None
    assert report.published == 1


def test_a_page_that_died_with_its_sweeper_is_looked_at_when_its_reservation_ends(stage: Stage) -> None:
    job = stage.job()
    stage.runtime.connections.write_behind_now()
    stage.sql("UPDATE messages SET published_at = NULL, next_check_at = now()")
    (row,) = publishing.reserve(stage.runtime.connections, JOBS, [str(job.task_id)])
    assert (row.job_id, row.for_run, row.missing) == (job.id, 1, False)
    assert not stage.sidejob.poll()
    stage.sql("UPDATE messages SET next_check_at = next_check_at - make_interval(secs => %s)", publishing.RESERVE_S)
    assert stage.sidejob.poll().published == 1


def test_a_full_queue_keeps_back_no_other(stage: Stage) -> None:
    stage.sidejob.enqueue_many([{"task": "stage.idle", "queue": "full"} for _ in range(PAGE + 1)])
    stage.sql("UPDATE messages SET next_check_at = now() - interval '1 hour'")
    other = stage.job(queue="other")
    stage.sql("UPDATE messages SET next_check_at = now() WHERE queue = 'other'")

    found = [row.task_id for row in publishing.candidates(stage.runtime.connections, JOBS, per_queue=PAGE)]

    assert len(found) == PAGE + 1
    assert other.task_id in found


# -- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # Celery's backend with redis-py 8
def test_a_result_that_the_backend_did_not_take_is_brought_there_later(database_url: str, redis_url: str) -> None:
    with TcpProxy.to(redis_url) as proxy:
        transport: dict[str, Any] = {"retry_policy": {"max_retries": 0, "timeout": 1.0}}
        stage = Stage(database_url, result_backend=proxy.url_for(redis_url), result_backend_transport_options=transport)
        try:
            job = stage.job(lambda job: 42)
            proxy.refuse()
            assert stage.run(job) == "completed"
            assert stage.sql("SELECT stored_at FROM askings") == [(None,)]

            stage.sql("UPDATE askings SET closed_at = closed_at - interval '1 min'")
            assert stage.sidejob.poll().results == 0
            assert stage.sql("SELECT stored_at FROM askings") == [(None,)]

            proxy.pass_through()
            assert stage.sidejob.poll().results == 1
            assert Job(job.id, runtime=stage.runtime).result.get(timeout=5) == 42
            assert stage.sql("SELECT stored_at IS NULL FROM askings") == [(False,)]
            assert stage.sidejob.poll().results == 0
        finally:
            stage.close()
