"""Durable tasks that wait in a Redis broker get no copies, however long they wait; those that it lost are published."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from kombu import Connection

from celery_sidejob import RunningJob
from celery_sidejob.hooks.broker import redis_look
from celery_sidejob.services.heartbeat import prefetched
from celery_sidejob.services.heartbeat.deliveries import Deliveries
from celery_sidejob.services.heartbeat.prefetched import Prefetched
from celery_sidejob.services.heartbeat.worker import Worker
from celery_sidejob.services.sweep.backlog import Backlog
from celery_sidejob.services.sweep.due import PER_QUEUE
from celery_sidejob.store import workers
from celery_sidejob.store.outbox.kinds import JOBS, TASKS, Kind
from celery_sidejob.store.statement import Statement
from tests.tools.apps import make_app
from tests.tools.waiting import wait_until

DUE = Statement("UPDATE {messages} SET next_check_at = now() - interval '1 s' WHERE next_check_at < 'infinity'")
AGED = Statement("""
UPDATE {messages} SET published_at = now() - make_interval(secs => %(seconds)s), next_check_at = now() - interval '1 s'
WHERE task_id = ANY(%(task_ids)s::text[])""")
UNMARKED = Statement("UPDATE {messages} SET published_at = NULL WHERE task_id = ANY(%(task_ids)s::text[])")
RUNS = Statement("""
UPDATE {messages} SET next_check_at = 'infinity', locked_by = %(worker_id)s, locked_at = now(), locked_pid = 1,
  on_lost = 'requeue', max_losses = 3
WHERE task_id = %(task_id)s""")
ROWS = Statement("""
SELECT task_id, generation, suspected_at IS NOT NULL AS missing, published_at,
  extract(epoch FROM next_check_at - now())::float AS look_in_s
FROM {messages} ORDER BY task_id""")


def rests(job: RunningJob) -> None:
    """The body of a job that does nothing."""


class Shop:
    """An app with a store and a Redis, to which nobody listens."""

    def __init__(self, database_url: str, redis_url: str) -> None:
        self.app = make_app(
            "shop", broker=redis_url, sidejob_database_url=database_url, sidejob_durable_tasks=["shop.*"]
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
        wait_until(self.all_marked, message="all messages to be marked as published, which is put off")

    def enqueue(self, *task_ids: str, **options: Any) -> None:
        """Make jobs."""
        self.sidejob.enqueue_many([{"task": self.rests, "task_id": name, **options} for name in task_ids])
        wait_until(self.all_marked, message="all messages to be marked as published, which is put off")

    def all_marked(self) -> bool:
        """Whether everything that is kept is marked as published."""
        return all(row.published_at is not None for row in self.rows().values())

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

    def waiting(self, queue: str = "celery") -> int:
        """How many messages the lists of a queue have."""
        return sum(self.client.llen(key) for key in (queue, f"{queue}\x06\x169"))


@pytest.fixture
def shop(database_url: str, redis_url: str) -> Iterator[Shop]:
    """An app with a store and a Redis of this test's own."""
    made = Shop(database_url, redis_url)
    yield made
    made.close()


def test_a_long_backlog_gets_no_copy(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_look, "OF_A_LIST", 20)
    many = 2 * PER_QUEUE
    shop.call(*(f"call-{number}" for number in range(many)), queue="long")
    shop.call(*(f"urgent-{number}" for number in range(many)), queue="long", priority=9)
    shop.call("alone", queue="other")

    assert shop.poll(times=4) == 0

    assert shop.waiting("long") == 2 * many
    assert shop.missing() == set()


def test_a_long_backlog_of_jobs_gets_no_copy(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_look, "OF_A_LIST", 20)
    many = 2 * PER_QUEUE
    shop.enqueue(*(f"job-{number}" for number in range(many)), queue="long")
    shop.enqueue(*(f"urgent-{number}" for number in range(many)), queue="long", priority=9)
    shop.enqueue("alone", queue="other")

    assert shop.poll(times=4) == 0

    assert shop.waiting("long") == 2 * many


def test_the_message_of_a_job_that_was_lost_among_others_is_published_alone(shop: Shop) -> None:
    shop.enqueue("lost", *(f"job-{number}" for number in range(50)))
    shop.client.rpop("celery")

    assert shop.poll() == 1
    assert shop.waiting() == 51
    assert shop.poll(times=3) == 0


def test_no_message_of_a_job_is_published_while_redis_does_not_say_what_waits(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.enqueue("job")
    shop.client.delete("celery")
    monkeypatch.setattr(redis_look, "OF_ALL", 0)
    assert shop.poll() == 0, "there was no time to read the list"
    monkeypatch.undo()
    assert shop.poll() == 1


def test_what_waits_behind_a_higher_priority_gets_no_copy(shop: Shop) -> None:
    """It was overtaken, and is not missing: each priority has a list of its own."""
    waiting = [f"call-{number}" for number in range(20)]
    shop.call(*waiting)
    shop.aged(60, *waiting)
    shop.call("urgent", priority=9)
    shop.client.delete("celery\x06\x169")
    worker_id = workers.register(shop.connections, "test:urgent")
    shop.connections.run(RUNS, task_id="urgent", worker_id=worker_id)

    assert shop.poll(times=3) == 0

    assert (shop.waiting(), shop.missing()) == (20, set())


def test_the_next_look_comes_after_as_long_again_and_soon_for_what_is_served_next(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_look, "OF_A_LIST", 1)
    monkeypatch.setattr(redis_look, "FIRST_PAGE", 1)
    shop.call("front", "young", "old")
    shop.aged(100_000, "front")
    shop.aged(120, "young")
    shop.aged(90_000, "old")

    shop.sidejob.poll()

    look_in_s = {task_id: row.look_in_s for task_id, row in shop.rows().items()}
    assert look_in_s == {
        "front": pytest.approx(300, abs=5), "young": pytest.approx(120, abs=5), "old": pytest.approx(3600, abs=5),
    }  # fmt: skip


def test_what_somebody_took_from_redis_is_published_again_after_two_strikes(shop: Shop) -> None:
    shop.call("kept", "taken")
    shop.call("urgent", priority=9)
    (taken,) = shop.client.lrange("celery", 0, 0)
    shop.client.lrem("celery", 1, taken)
    shop.client.delete("celery\x06\x169")

    assert shop.poll() == 0
    assert shop.missing() == {"taken", "urgent"}
    assert shop.poll() == 2
    assert shop.waiting() == 3
    assert shop.poll(times=3) == 0
    assert shop.missing() == set()


def test_what_was_popped_out_of_a_long_queue_is_missing_once_it_was_overtaken(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_look, "OF_A_LIST", 20)
    waiting = [f"call-{number:03}" for number in range(100)]
    shop.call("lost", *waiting)
    shop.client.rpop("celery")
    shop.aged(60, "lost")
    shop.aged(40, *waiting[:90])

    assert shop.poll() == 0
    assert shop.missing() == {"lost"}
    assert shop.poll() == 1
    assert shop.waiting() == 101


@pytest.mark.parametrize("kind", [JOBS, TASKS], ids=["jobs", "tasks"])
def test_what_is_not_marked_yet_may_have_been_lost_with_all_that_an_emptied_broker_had(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    """Its publisher has not said when it was published, so the order of the queue tells nothing of it."""
    monkeypatch.setattr(redis_look, "OF_A_LIST", 20)
    names = [f"call-{number:03}" for number in range(100)]
    if kind is TASKS:
        shop.call(*names)
    else:
        shop.enqueue(*names)
    shop.connections.run(UNMARKED, task_ids=names[98:])

    assert Backlog(shop.sidejob.runtime, lambda: True).look_for_all(kind)

    assert shop.missing() == set(names[98:])


def test_a_strike_is_forgotten_when_the_message_is_seen(shop: Shop) -> None:
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


def test_what_was_just_fetched_is_not_missing_until_it_is_nowhere(shop: Shop) -> None:
    shop.call("fetched")
    with Connection(shop.app.conf.broker_url) as connection:
        assert connection.default_channel.basic_get("celery") is not None
        assert shop.poll(times=3) == 0

        shop.client.delete("unacked")
        assert shop.poll(times=2) == 1


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


def test_a_redis_that_has_not_seen_a_sweeper_gets_copies_only_of_what_it_lost(shop: Shop) -> None:
    """A fleet's first worker starts after the first calls, or the marker alone was deleted."""
    shop.call("waits", "lost", "waits too")
    (text,) = [text for text in shop.client.lrange("celery", 0, -1) if b'"lost"' in text]
    shop.client.lrem("celery", 1, text)
    shop.client.delete(*shop.client.scan_iter("celery_sidejob:marker:*"))

    report = shop.sidejob.poll()

    assert (report.broker_emptied, report.published, shop.waiting()) == (True, 1, 3)
    assert shop.sidejob.poll().published == 0, "and that is all"
    assert shop.missing() == set()


def test_what_is_called_during_such_a_look_gets_no_copy(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list is read once, before its message is there."""
    shop.call("a")
    shop.client.delete(*shop.client.scan_iter("celery_sidejob:marker:*"))
    look = Backlog.without_what_waits

    def look_and_call(backlog: Backlog, rows: Any, kind: Kind = TASKS) -> Any:
        found = look(backlog, rows, kind)
        if [row.task_id for row in rows] == ["a"] and "b" not in shop.rows():
            shop.call("b")
        return found

    monkeypatch.setattr(Backlog, "without_what_waits", look_and_call)

    report = shop.sidejob.poll()

    assert (report.broker_emptied, report.published, shop.waiting()) == (True, 0, 2)
    assert shop.missing() == {"b"}, "it is looked for again in a moment"
    assert (shop.poll(), shop.missing(), shop.waiting()) == (0, set(), 2)


def test_a_purged_queue_s_tasks_are_published_again(shop: Shop) -> None:
    shop.call("one", "two")
    assert shop.app.control.purge() == 2

    assert shop.poll(times=2) == 2
    assert shop.waiting() == 2


def test_a_look_that_is_refused_counts_as_none(database_url: str, redis_url: str) -> None:
    """Where a user of Redis may not read lists: two strikes, then a copy, at doubling intervals."""
    host = redis_url.rpartition("@")[2].removeprefix("redis://")
    with redis.Redis.from_url(redis_url) as client:
        client.acl_setuser(
            "blind", enabled=True, passwords=["+blind"], keys=["*"], channels=["*"], commands=["+@all", "-lrange"]
        )
        shop = Shop(database_url, f"redis://blind:blind@{host}")
        shop.call("waits")
        assert shop.poll() == 0
        assert shop.missing() == {"waits"}
        assert shop.poll() == 1
        shop.close()
        client.acl_deluser("blind")


@pytest.fixture
def worker(shop: Shop) -> Iterator[Worker]:
    """A worker of the store, with a connection of its own."""
    made = Worker(shop.sidejob.runtime)
    yield made
    made.disconnect()


def test_a_worker_vouches_for_what_it_has_received_and_cannot_begin(
    shop: Shop, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetched, "SOON_S", 0.0)
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
    monkeypatch.setattr(prefetched, "SOON_S", 0.0)
    shop.call("swallowed")
    runs: Deliveries[tuple[str, int]] = Deliveries()
    runs.received(("swallowed", 1))
    busy = [True]
    worker.is_busy = lambda: busy[0]
    waiting = Prefetched(worker, runs, TASKS)
    assert waiting.run_once()["vouched"] == 1

    busy[0] = False
    lease = shop.sidejob.settings.lease
    monkeypatch.setattr(prefetched.time, "monotonic", lambda clock=prefetched.time.monotonic: clock() + lease + 1)

    assert waiting.run_once()["vouched"] == 0
    assert shop.rows()["swallowed"].look_in_s <= lease
