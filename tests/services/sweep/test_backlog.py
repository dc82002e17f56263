"""Messages that wait in a Redis broker get few copies, however long they wait; those that it lost are published."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from celery_sidejob import RunningJob
from celery_sidejob.services.heartbeat import heartbeat
from celery_sidejob.services.heartbeat.deliveries import Deliveries
from celery_sidejob.services.heartbeat.heartbeat import Prefetched
from celery_sidejob.services.heartbeat.worker import Worker
from celery_sidejob.services.sweep import backlog
from celery_sidejob.services.sweep.backlog import Backlog
from celery_sidejob.services.sweep.due import PER_QUEUE
from celery_sidejob.store import workers
from celery_sidejob.store.outbox.kinds import JOBS, TASKS, Kind
from celery_sidejob.store.statement import Statement
from tests.tools.apps import make_app

DUE = Statement("UPDATE {messages} SET next_check_at = now() - interval '1 s' WHERE next_check_at < 'infinity'")
MARKED = Statement("""
UPDATE {messages} SET published_at = now(), next_check_at = now() + check_interval WHERE published_at IS NULL""")
AGED = Statement("""
UPDATE {messages} SET published_at = now() - make_interval(secs => %(seconds)s), next_check_at = now() - interval '1 s'
WHERE task_id = ANY(%(task_ids)s::text[])""")
RUNS = Statement("""
UPDATE {messages} SET next_check_at = 'infinity', locked_by = %(worker_id)s, locked_at = now(), locked_pid = 1,
  on_lost = 'requeue', max_losses = 3
WHERE task_id = %(task_id)s""")
ROWS = Statement("""
SELECT task_id, suspected_at IS NOT NULL AS missing, check_interval > interval '30 s' AS copied, published_at,
  extract(epoch FROM next_check_at - now())::float AS look_in_s
FROM {messages} ORDER BY task_id""")


def rests(job: RunningJob) -> None:
    """The body of a job that does nothing."""


class Shop:
    """An app with a store and a Redis, to which nobody listens."""

    def __init__(self, database_url: str, redis_url: str, **options: Any) -> None:
        self.app = make_app(
            "shop", broker=redis_url, sidejob_database_url=database_url, sidejob_durable_tasks=["shop.*"], **options
        )
        self.sidejob = self.app.sidejob
        self.connections = self.sidejob.runtime.connections
        self.client = redis.Redis.from_url(redis_url)
        self.rests = self.sidejob.task(rests, name="rests")
        self.sidejob.poll()  # which puts its marker there

    def close(self) -> None:
        self.sidejob.close()
        self.app.close()
        self.client.close()

    def call(self, *task_ids: str, **options: Any) -> None:
        """Call durable tasks."""
        for task_id in task_ids:
            self.app.send_task("shop.mail", (), task_id=task_id, **options)
        self.mark()

    def enqueue(self, *task_ids: str, **options: Any) -> None:
        """Make jobs."""
        self.sidejob.enqueue_many([{"task": self.rests, "task_id": name, **options} for name in task_ids])
        self.mark()

    def mark(self) -> None:
        """Mark everything as published, which is put off; a machine that is slow may have come too late for it."""
        self.connections.write_behind_now()
        self.connections.run(MARKED)

    def poll(self, times: int = 1) -> int:
        """Poll so often, as if the time for the next look at everything had come; returns what was published."""
        published = 0
        for _ in range(times):
            self.connections.run(DUE)
            published += self.sidejob.poll().published
        return published

    def rows(self) -> dict[str, Any]:
        """What is kept, by task id."""
        return {row.task_id: row for row in self.connections.run(ROWS)}

    def missing(self) -> set[str]:
        """What is noted as missing."""
        return {row.task_id for row in self.rows().values() if row.missing}

    def aged(self, seconds: float, *task_ids: str) -> None:
        """Let these have been published so long ago."""
        self.connections.run(AGED, seconds=seconds, task_ids=list(task_ids))

    def runs(self, task_id: str) -> None:
        """Let a worker have the run of this one."""
        worker_id = workers.register(self.connections, "test:runs")
        self.connections.run(RUNS, task_id=task_id, worker_id=worker_id)

    def waiting(self, queue: str = "celery") -> int:
        """How many messages the lists of a queue have."""
        return sum(self.client.llen(key) for key in (queue, f"{queue}\x06\x169"))


@pytest.fixture
def shop(database_url: str, redis_url: str) -> Iterator[Shop]:
    """An app with a store and a Redis of this test's own."""
    made = Shop(database_url, redis_url)
    yield made
    made.close()


@pytest.mark.parametrize("kind", [JOBS, TASKS], ids=str)
def test_a_long_backlog_gets_no_copy(shop: Shop, kind: Kind) -> None:
    many = 2 * PER_QUEUE
    make = shop.enqueue if kind is JOBS else shop.call
    make(*(f"one-{number}" for number in range(many)), queue="long")
    make(*(f"urgent-{number}" for number in range(many)), queue="long", priority=9)
    make("alone", queue="other")

    assert shop.poll(times=4) == 0

    assert shop.waiting("long") == 2 * many
    assert shop.missing() == set()


def test_as_many_copies_are_published_as_messages_were_lost(shop: Shop) -> None:
    shop.enqueue("lost", "lost too", *(f"job-{number}" for number in range(50)))
    shop.client.rpop("celery", 2)

    assert shop.poll() == 2
    assert shop.waiting() == 52
    assert shop.poll(times=3) == 0


def test_those_that_were_suspected_are_published_at_the_second_check(shop: Shop) -> None:
    shop.call(*(f"call-{number}" for number in range(50)))
    shop.client.rpop("celery", 3)

    assert shop.poll() == 0
    suspected = shop.missing()
    assert len(suspected) == 3
    assert shop.poll() == 3
    assert {row.task_id for row in shop.rows().values() if row.copied} == suspected
    assert (shop.poll(times=3), shop.waiting(), shop.missing()) == (0, 50, set())


def test_a_suspicion_is_forgotten_once_the_broker_has_enough(shop: Shop) -> None:
    shop.call("hidden")
    (text,) = shop.client.lrange("celery", 0, -1)
    shop.client.delete("celery")
    shop.poll()
    assert shop.missing() == {"hidden"}
    shop.client.lpush("celery", text)
    shop.poll()
    assert shop.missing() == set()
    shop.client.delete("celery")

    assert shop.poll() == 0
    assert shop.poll() == 1


def test_what_was_lost_in_a_long_queue_is_missing_once_it_was_overtaken(shop: Shop) -> None:
    """Others stand in for it, such as plain tasks."""
    waiting = [f"call-{number:02}" for number in range(20)]
    shop.call("lost", *waiting, "runs", "later")
    shop.client.lpush("celery", "a plain task", "and another one")
    shop.aged(60, "lost", *waiting[:9])
    shop.aged(50, *waiting[9:], "later")
    shop.aged(51, "runs")
    shop.runs("runs")
    assert shop.poll() == 0
    assert shop.missing() == {"lost", *waiting[:9]}


def test_what_was_overtaken_or_waits_for_an_hour_gets_copies_up_to_a_limit(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A higher priority overtakes it; it may not be missing."""
    monkeypatch.setattr(backlog, "COPIES", 5)
    low = [f"low-{number:02}" for number in range(20)]
    shop.enqueue(*low, queue="busy")
    shop.aged(60, *low)
    shop.enqueue("urgent", queue="busy", priority=9)
    shop.client.lpush("busy", "a plain task")
    shop.runs("urgent")
    old = [f"old-{number:02}" for number in range(20)]
    shop.enqueue(*old, queue="old")
    shop.aged(3700, *old)

    published = shop.poll()

    assert published == 10, "five of each queue"


def test_the_next_check_comes_after_as_long_again(shop: Shop) -> None:
    shop.call("young", "old")
    shop.aged(120, "young")
    shop.aged(3000, "old")

    shop.sidejob.poll()

    look_in_s = {task_id: row.look_in_s for task_id, row in shop.rows().items()}
    assert look_in_s == {"young": pytest.approx(120, abs=5), "old": pytest.approx(3000, abs=5)}


def test_a_doomed_or_expired_task_does_not_wait(shop: Shop) -> None:
    shop.call("expired", expires=3600)
    shop.connections.run(Statement("UPDATE {messages} SET expires_at = now()"))

    shop.poll()

    assert shop.rows() == {}


def test_an_emptied_redis_has_everything_published_at_once(shop: Shop) -> None:
    shop.call("one", "two")
    shop.client.flushdb()

    report = shop.sidejob.poll()

    assert (report.broker_emptied, report.published, shop.waiting()) == (True, 2, 2)


def test_an_emptied_redis_has_the_oldest_first(shop: Shop) -> None:
    called = [hashlib.sha256(bytes([number])).hexdigest() for number in range(120)]  # in no order of the store's
    shop.call(*called)
    shop.client.flushdb()

    shop.sidejob.poll()

    texts = reversed(shop.client.lrange("celery", 0, -1))
    assert [json.loads(text)["headers"]["id"] for text in texts] == called


def test_a_redis_that_has_not_seen_a_sweeper_gets_no_copy_into_a_queue_that_is_whole(shop: Shop) -> None:
    """A fleet's first worker starts after the first calls, or the marker alone was deleted."""
    shop.call(*(f"whole-{number}" for number in range(20)), queue="whole")
    shop.call(*(f"lost-{number}" for number in range(20)), queue="lost")
    shop.client.rpop("lost", 3)
    shop.client.delete(*shop.client.scan_iter("celery_sidejob:marker:*"))

    report = shop.sidejob.poll()

    assert (report.broker_emptied, report.published) == (True, 20)
    assert [shop.waiting(queue) for queue in ("whole", "lost")] == [20, 37]
    assert shop.sidejob.poll().published == 0, "and that is all"
    assert shop.missing() == set()


def test_what_is_called_during_such_a_look_gets_no_copy(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.call("a", "a-lost")
    shop.client.rpop("celery")
    shop.client.delete(*shop.client.scan_iter("celery_sidejob:marker:*"))
    is_whole = Backlog._is_whole

    def count_and_call(backlog: Backlog, queue: str) -> bool:
        found = is_whole(backlog, queue)
        if "b" not in shop.rows():
            shop.call("b")
        return found

    monkeypatch.setattr(Backlog, "_is_whole", count_and_call)

    report = shop.sidejob.poll()

    assert (report.broker_emptied, report.published, shop.waiting()) == (True, 2, 4)
    assert shop.missing() == {"b"}, "it is checked again in a moment"
    assert (shop.poll(), shop.missing(), shop.waiting()) == (0, set(), 4)


def test_a_purged_queue_s_tasks_are_published_again(shop: Shop) -> None:
    shop.call("one", "two")
    assert shop.app.control.purge() == 2

    assert shop.poll(times=2) == 2
    assert shop.waiting() == 2


def test_the_messages_of_a_queue_are_counted_in_every_priority_s_list(database_url: str, redis_url: str) -> None:
    shop = Shop(database_url, redis_url, broker_transport_options={"global_keyprefix": "shop:"})
    for priority in (None, 0, 3, 5, 9):
        shop.call(f"at-{priority}", priority=priority)
    shop.client.set("shop:string", "is no list")

    counts = map(shop.sidejob.runtime.broker.ready_messages, ("celery", "other", "string"))
    assert list(counts) == [5, 0, None]
    shop.close()


@pytest.fixture
def worker(shop: Shop) -> Iterator[Worker]:
    """A worker of the store, with a connection of its own."""
    made = Worker(shop.sidejob.runtime)
    yield made
    made.disconnect()


def test_a_worker_vouches_for_what_it_has_received_and_cannot_begin(
    shop: Shop, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "SOON_S", 0.0)
    shop.call("soon", "late", "elsewhere", "moved", "unpublished")
    shop.poll()
    shop.aged(4000, "late")
    shop.poll()
    shop.client.flushdb()
    shop.connections.run(Statement("UPDATE {messages} SET suspected_at = now() WHERE task_id = 'soon'"))
    shop.connections.run(Statement("UPDATE {messages} SET published_at = NULL WHERE task_id = 'unpublished'"))
    runs: Deliveries[tuple[str, int]] = Deliveries()
    for task_id in ("soon", "late", "unpublished"):
        runs.received((task_id, 1))
    runs.received(("moved", 2))
    before = shop.rows()

    assert Prefetched(worker, runs, TASKS).run_once()["vouched"] == 2

    lease, after = shop.sidejob.settings.lease, shop.rows()
    assert [after[one].look_in_s for one in ("soon", "late")] == [pytest.approx(lease, abs=5)] * 2
    assert before["late"].look_in_s > lease, "not later either: when the worker dies, the look comes within a lease"
    assert shop.missing() == set()
    for one in ("elsewhere", "moved", "unpublished"):
        assert after[one].look_in_s == pytest.approx(before[one].look_in_s, abs=2)
    assert Prefetched(worker, runs, TASKS).run_once()["vouched"] == 0


def test_nobody_vouches_for_what_waits_where_nothing_has_been_running(
    shop: Shop, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is behind nothing: the pool has lost it."""
    monkeypatch.setattr(heartbeat, "SOON_S", 0.0)
    shop.call("swallowed")
    runs: Deliveries[tuple[str, int]] = Deliveries()
    runs.received(("swallowed", 1))
    busy = [True]
    worker.is_busy = lambda: busy[0]
    waiting = Prefetched(worker, runs, TASKS)
    assert waiting.run_once()["vouched"] == 1

    busy[0] = False
    lease = shop.sidejob.settings.lease
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda clock=heartbeat.time.monotonic: clock() + lease + 1)

    assert waiting.run_once()["vouched"] == 0
    assert shop.rows()["swallowed"].look_in_s <= lease
