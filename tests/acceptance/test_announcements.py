"""Announcements and the log with real workers, and with a Redis or a listener that stands still."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from celery_sidejob.announcements.announcer import MOST
from tests.tools.brokers import Broker
from tests.tools.freezing import frozen
from tests.tools.in_process import Stage
from tests.tools.recorder import Record
from tests.tools.servers import embedded
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes, WorkerProcess

APP = "tests.acceptance.announcing_app"
LISTENER = """
import sys
from tests.acceptance.announcing_app import sidejob
subscription = sidejob.subscribe("/flood")
print("listening", flush=True)
for _ in subscription:
    print("heard", flush=True)
"""


class Site:
    """Workers of one app, and a client that has not their code."""

    def __init__(self, database_url: str, broker: Broker, processes: Processes, record: Record) -> None:
        self.env = {"DATABASE_URL": database_url, **broker.env, **record.env}
        self.client = Stage(database_url, broker=broker.url)
        self.sidejob = self.client.sidejob
        self._processes = processes

    def worker(self, **options: Any) -> WorkerProcess:
        return self._processes.start_worker(APP, env=self.env, **options)

    def python(self, code: str) -> Any:
        return self._processes.start_python(code, env=self.env, name="listener")


@pytest.fixture
def site(database_url: str, broker: Broker, processes: Processes, record: Record) -> Iterator[Site]:
    made = Site(database_url, broker, processes, record)
    yield made
    made.client.close()


def until(subscription: Any, last: Any) -> list[Any]:
    """The messages up to this one, or up to this status."""
    found = []
    for _, message in subscription:
        found.append(message)
        if message == last or (isinstance(message, dict) and message.get("status") == last):
            return found
    raise AssertionError(found)


def statuses(messages: list[dict[str, Any]]) -> list[str]:
    """The statuses that are told, by their numbers."""
    return [message["status"] for message in sorted(messages, key=lambda message: message["change"])]


@pytest.mark.few(1)
@pytest.mark.brokers("redis", "sidejob", "amqp", "sidejobpg")
def test_runs_in_workers_are_announced(site: Site) -> None:
    """Also the last run of a pool's process, which ends right after it, and the rescue of a run by the parent."""
    site.worker(concurrency=1, extra=["--max-tasks-per-child=1"])
    job = site.sidejob.enqueue("announcing.idle", countdown=3600)
    with site.sidejob.subscribe(f"/sidejob/job/{job.id}", timeout=20) as subscription:
        for _ in range(3):
            job.run(force=True)
            told = until(subscription, "completed")
            if "running" not in statuses(told):  # its process tells that, and its worker the end: either may be faster
                told += until(subscription, "running")
            assert statuses(told)[-2:] == ["running", "completed"]
        job.run()
        job.terminate()
        assert statuses(until(subscription, "terminated"))[-1:] == ["terminated"]


@pytest.mark.few(3)
@pytest.mark.brokers("redis", "sidejobpg")
@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "solo"])
def test_a_worker_s_log_is_kept_by_one_job(site: Site, pool: str) -> None:
    site.worker(pool=pool, concurrency=2)
    collector = site.sidejob.enqueue("announcing.collect")
    collector.wait(timeout=20)  # its first run has made its port subscribe
    with site.sidejob.subscribe("/sidejob/log", timeout=20):
        pass  # what a process had learned before about who listens counts no longer
    adder = site.sidejob.enqueue("announcing.add")
    faulty = site.sidejob.enqueue("announcing.fail")
    for job in (adder, faulty):
        job.wait(timeout=20)
    with site.sidejob.subscribe("/sidejob/log", timeout=20) as log:
        adder.input("a").write_many([1, 2])
        faulty.run(force=True)
        heard = [next(log).message for _ in range(4)]

    def kept() -> list[Any]:
        return [entry for entry in collector.refresh().get("entries", []) if entry.get("job") in (adder.id, faulty.id)]

    wait_until(lambda: len(kept()) >= 4, timeout=20)
    added = [entry for entry in kept() if entry["job"] == adder.id]
    assert [(one["read"][0]["data"], one["write"][0]["data"]) for one in added] == [([1], [1]), ([2], [3])]
    errors = [entry for entry in kept() if entry["job"] == faulty.id]
    assert {(one["error"], one["run"]) for one in errors} == {("no", 1), ("no", 2)}
    assert all("announcing_app.py" in one["backtrace"] for one in errors)
    assert [one["run"] for one in heard if one.get("job") == faulty.id] == [2]


def test_a_frozen_redis_holds_up_nobody(
    database_url: str, own_valkey: embedded.Valkey, processes: Processes, record: Record, amqp_url: str, redis_url: str
) -> None:
    """Callers, runs and ends go on; the queue is bounded; afterwards all is as before."""
    site = Site(database_url, Broker("amqp", amqp_url, redis_url), processes, record)
    site.env["SIDEJOB_REDIS_URL"] = own_valkey.url
    site.client.close()
    site.client = Stage(database_url, broker=amqp_url, sidejob_redis_url=own_valkey.url)
    site.sidejob = site.client.sidejob
    try:
        site.worker(concurrency=1)
        announcer = site.client.runtime.announcer
        with site.sidejob.subscribe("/a", timeout=20) as subscription:
            with frozen(own_valkey.pid):
                began = time.process_time()
                for number in range(MOST + 2000):
                    announcer.announce("/a", str(number))
                assert time.process_time() - began < 5, "no call waits"
                assert announcer.dropped > 0
                job = site.sidejob.enqueue("announcing.idle")
                job.wait(timeout=20)
                site.sidejob.publish("/a", "during")
            assert announcer.flush(20)
            found: list[Any] = []
            reader = threading.Thread(target=lambda: found.extend(message for _, message in subscription))
            reader.start()
            wait_until(lambda: site.sidejob.publish("/a", "again") or "again" in found, timeout=20)
            subscription.close()
            reader.join()
    finally:
        site.client.close()


def test_a_redis_that_is_down_costs_one_warning(
    database_url: str, processes: Processes, record: Record, caplog: pytest.LogCaptureFixture
) -> None:
    client = Stage(database_url, sidejob_redis_url="redis://127.0.0.1:1/0")
    try:
        for number in range(100):
            client.sidejob.publish("/a", number)
        assert client.runtime.announcer.flush(20)
        jobs = [client.job() for _ in range(5)]
        assert [client.run(job) for job in jobs] == ["completed"] * 5
        assert client.runtime.announcer.flush(20)
        assert caplog.text.count("Announcements are dropped") == 1
        with pytest.raises(Exception, match="does not answer"):
            client.sidejob.subscribe("/a")
    finally:
        client.close()


@pytest.mark.brokers("redis", "sidejobpg")
def test_a_frozen_listener_holds_up_nobody(site: Site) -> None:
    listener = site.python(LISTENER)
    listener.wait_for_log("listening", timeout=20)
    with site.sidejob.subscribe("/flood", "/end", timeout=20) as other, frozen(listener.pid):
        announcer = site.client.runtime.announcer
        for number in range(60):
            announcer.announce("/flood", f'"{number}{"x" * 200_000}"')
            assert announcer.flush(20)
        site.sidejob.publish("/end", "end")
        found = until(other, "end")
        assert len(found) + other.dropped == 61
        assert announcer.dropped == 0
    listener.wait_for_log("heard", timeout=20)


@pytest.mark.brokers("redis", "sidejobpg")
def test_a_forked_process_announces_by_itself(site: Site) -> None:
    with site.sidejob.subscribe("/a", timeout=20) as subscription:
        site.sidejob.publish("/a", "parent")
        assert next(subscription).message == "parent"
        pid = os.fork()
        if pid == 0:
            try:
                site.sidejob.publish("/a", "child")
                site.client.runtime.announcer.flush(10)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert next(subscription).message == "child"
        site.sidejob.publish("/a", "parent again")
        assert next(subscription).message == "parent again"


@pytest.mark.brokers("redis", "sidejobpg")
def test_a_script_that_ends_at_once_has_announced(site: Site) -> None:
    with site.sidejob.subscribe("/a", timeout=20) as subscription:
        script = site.python('from tests.acceptance.announcing_app import sidejob; sidejob.publish("/a", "bye")')
        assert script.wait(20) == 0
        assert next(subscription).message == "bye"


@pytest.mark.brokers("redis", "sidejobpg")
def test_a_subscription_survives_the_loss_of_its_connection(site: Site, broker: Broker) -> None:
    with site.sidejob.subscribe("/a", timeout=20) as subscription:
        if broker.is_redis:
            import redis

            with redis.Redis.from_url(broker.redis_url) as client:
                for one in client.client_list(_type="pubsub"):
                    if int(one["sub"]):
                        client.client_kill_filter(_id=one["id"])
        else:
            site.client.sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name = 'celery_sidejob_listener' AND datname = current_database()"
            )
        wait_until(lambda: _comes(site, subscription), timeout=20)


def _comes(site: Site, subscription: Any) -> bool:
    site.sidejob.publish("/a", 1)
    subscription._timeout = 0.5
    try:
        return bool(next(subscription).message == 1)
    except TimeoutError:
        return False
