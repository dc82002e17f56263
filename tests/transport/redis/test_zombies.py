"""Workers that were frozen for so long that they were taken for dead, and then go on."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
import redis
from celery import Celery

from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes
from tests.transport.conftest import Connect
from tests.transport.consuming import Consuming


@pytest.fixture
def send(broker_url: str) -> Any:
    """Sends a task of the plain app."""
    app = Celery("client", broker=broker_url, set_as_current=False)
    yield app.send_task
    app.close()


@pytest.mark.parametrize("cancel", ["", "1"], ids=["it goes on", "it is cut off"])
def test_a_zombie_is_told_and_begins_nothing_that_others_have(
    processes: Processes, broker_url: str, record: Record, send: Any, connect: Connect, cancel: str
) -> None:
    env = {"BROKER_URL": broker_url, "CONSUMER_TIMEOUT": "1", "CANCEL": cancel, **record.env}
    zombie = processes.start_worker("tests.transport.worker_app", env=env, pool="prefork", name="zombie")
    send("hold")
    begun = record.wait_for("begun")[0]
    names = [f"task{number}" for number in range(3)]
    for name in names:
        send("note", (name,))
    zombie.wait_for_log("note[", count=3)

    zombie.stop_signal()
    owner = Consuming(connect(consumer_timeout=1), "celery", prefetch=4)
    owner.take(4)  # recovered by its heart
    zombie.cont()

    zombie.wait_for_log("was taken from this worker", count=4)
    if cancel:
        wait_until(lambda: not psutil.pid_exists(begun["pid"]), message="the task to be cut off")
    else:
        record.note("go")
        record.wait_for("ended")
    send("note", ("marker",))  # the other has no room for it
    record.wait_for("marker")
    assert [record.of(name) for name in names] == [[], [], []]
    assert ("Cannot ack the message" in zombie.log()) == (not cancel)

    if cancel:
        record.note("go")
    owner.close()
    record.wait_for(names[-1])
    assert [len(record.of(name)) for name in names] == [1, 1, 1]
    assert (len(record.of("begun")), len(record.of("ended"))) == ((2, 1) if cancel else (2, 2))
    zombie.terminate()
    assert zombie.wait(15) == 0


def test_a_worker_that_held_nothing_goes_on_as_if_nothing_were(
    processes: Processes, broker_url: str, record: Record, send: Any, server: redis.Redis, connect: Connect
) -> None:
    env = {"BROKER_URL": broker_url, "CONSUMER_TIMEOUT": "1", **record.env}
    worker = processes.start_worker("tests.transport.worker_app", env=env, pool="prefork", name="worker")
    send("hold_early")
    record.wait_for("begun")  # in its process, of which the worker hears later that it may acknowledge
    wait_until(lambda: not [*server.scan_iter("_sidejob.held.*")], message="the message to be acknowledged")
    worker.stop_signal()
    other = Consuming(connect(consumer_timeout=1), "elsewhere", prefetch=1)
    other.drain(0.01)
    mine = other.channel.consumer.name.encode()
    wait_until(lambda: server.zrange("_sidejob.consumers", 0, -1) == [mine], message="it to be recovered")
    worker.cont()
    worker.wait_for_log("was declared dead")
    record.note("go")
    record.wait_for("ended")
    send("note", ("next",))
    record.wait_for("next")
    assert "Connection to broker lost" not in worker.log()
