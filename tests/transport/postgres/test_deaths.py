"""Workers that die, stand still or lose their connections while they fetch: nothing is lost, and little runs twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from kombu import Connection

from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes, WorkerProcess
from tests.transport.consuming import Consuming, publish
from tests.transport.postgres.conftest import Tables

Connect = Callable[..., Connection]

TASKS = 600
STOPS_S = 45
"""A warm stop of the pool prefork takes 30 seconds now and then: billiard waits for results that nobody reads."""


class Draining:
    """Tasks of a millisecond that note that they ran, and workers for them."""

    def __init__(self, processes: Processes, broker_url: str, directory: Path) -> None:
        self._processes = processes
        self._ran = directory / "ran"
        self._env = {"BROKER_URL": broker_url, "RAN": str(self._ran)}

    def publish(self, connection: Connection, count: int = TASKS) -> None:
        with connection.Producer() as producer, producer.batch():
            for number in range(count):
                headers = {"lang": "py", "task": "ran", "id": f"task-{number}"}
                producer.publish(([number], {}, {}), routing_key="celery", headers=headers, serializer="json")

    def start(self, pool: str = "prefork", *, early: bool = False) -> WorkerProcess:
        env = {**self._env, **({"EARLY": "1"} if early else {})}
        return self._processes.start_worker("proofs.killed_app", env=env, pool=pool, concurrency=2)

    @property
    def ran(self) -> Counter[int]:
        """How often each task has run."""
        return Counter(int(line) for line in self._ran.read_text().split()) if self._ran.exists() else Counter()

    def wait_for(self, count: int) -> None:
        wait_until(lambda: len(self.ran) >= count, timeout=60, message=f"{count} tasks to have run")


@pytest.fixture
def draining(processes: Processes, broker_url: str, tmp_path: Path) -> Draining:
    return Draining(processes, broker_url, tmp_path)


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
def test_nothing_is_lost_when_a_worker_is_killed_in_the_middle_of_a_drain(
    draining: Draining, connect: Connect, tables: Tables, early: bool
) -> None:
    draining.publish(connect())
    killed = draining.start(early=early)
    draining.wait_for(TASKS // 6)
    killed.kill_group()
    ran = len(draining.ran)
    assert ran < TASKS, "it was in the middle"
    draining.start(early=early)
    # A task that was acknowledged early is lost with its process, as with any broker: at most one for each.
    draining.wait_for(TASKS - (2 if early else 0))
    wait_until(lambda: tables.all == 0, message="all to be acknowledged")
    doubled = sum(count - 1 for count in draining.ran.values())
    assert doubled <= 16, "at most what the killed worker had fetched"


def test_the_messages_of_a_killed_worker_are_free_within_two_seconds(
    processes: Processes, broker_url: str, client: Celery, record: Record, pooled: bool
) -> None:
    killed = processes.start_worker("tests.transport.worker_app", env={"BROKER_URL": broker_url, **record.env})
    client.send_task("last", (60,))
    record.wait_for("begun")
    processes.start_worker("tests.transport.worker_app", env={"BROKER_URL": broker_url, **record.env})
    killed.kill_group()
    # Without a session of its own for its lock, it is dead when it was silent for 3.5 s.
    first, second = record.wait_for("begun", count=2, timeout=8 if pooled else 4)
    assert (first["delivery_count"], second["delivery_count"]) == (None, 1)


@pytest.mark.few(3)
@pytest.mark.parametrize("which", [True, False], ids=["the heart's", "the statements'"])
@pytest.mark.parametrize("pool", ["prefork", "solo", "threads"])
def test_a_drain_goes_on_after_sessions_were_ended(
    draining: Draining, connect: Connect, tables: Tables, pool: str, which: bool, pooled: bool
) -> None:
    draining.publish(connect())
    worker = draining.start(pool)
    for part in (6, 3, 2):
        draining.wait_for(TASKS // part)
        # Through a proxy no session has a lock, and each may be anybody's.
        wait_until(lambda: tables.end_sessions(locked=None if pooled else which), message="a session to end")
    draining.wait_for(TASKS)
    wait_until(lambda: tables.all == 0, message="all to be acknowledged")
    worker.terminate()
    assert worker.wait(STOPS_S) == 0
    assert tables.consumers == 0


@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_a_frozen_worker_s_tasks_go_to_another_and_it_begins_none_of_them(
    processes: Processes, broker_url: str, client: Celery, record: Record, tables: Tables, pool: str
) -> None:
    env = {"BROKER_URL": broker_url, "CONSUMER_TIMEOUT": "1.5", **record.env}
    names = [f"task{number}" for number in range(3)]
    with client.producer_pool.acquire(block=True) as producer, producer.batch():  # solo fetches once before the first
        for task, args in [("hold", ()), *(("note", (name,)) for name in names)]:
            client.send_task(task, args, producer=producer)
    zombie = processes.start_worker("tests.transport.worker_app", env=env, pool=pool, name="zombie")
    record.wait_for("begun")
    wait_until(lambda: tables.held == 4, message="all to be fetched")
    zombie.stop_signal()
    owner = processes.start_worker("tests.transport.worker_app", env=env, pool="threads", concurrency=8, name="owner")
    record.wait_for("begun", count=2)
    for name in names:
        record.wait_for(name)
    zombie.cont()
    if pool == "prefork":
        zombie.wait_for_log("declared dead")
    record.note("go")
    zombie.wait_for_log("declared dead")
    record.wait_for("ended", count=2)
    client.send_task("note", ("next",))
    record.wait_for("next")
    wait_until(lambda: tables.all == 0, message="all to be acknowledged")
    assert [len(record.of(name)) for name in names] == [1, 1, 1]
    for worker in (zombie, owner):
        worker.terminate()
    assert (zombie.wait(STOPS_S), owner.wait(STOPS_S)) == (0, 0)


def test_a_message_that_a_lost_fetch_took_comes_again(connect: Connect, tables: Tables, broker_url: str) -> None:
    publish(connect(), "queue", 1, 2)
    consuming = Consuming(connect(consumer_timeout=1), "queue", prefetch=2)
    link = consuming.channel.link
    run, seen = link.run, []

    def losing(name: str, statement: Any) -> Any:
        found = run(name, statement)
        if name == "fetch" and not seen:
            seen.append(found)
            tables.end_sessions(locked=False)
            raise ConnectionError("the answer was lost")
        return found

    link.run = losing
    with pytest.raises(ConnectionError):
        consuming.drain_once()
    assert tables.held == 2
    consuming.connection.close()
    other = Consuming(connect(consumer_timeout=1), "queue", prefetch=2)
    assert other.take(2) == [1, 2]
