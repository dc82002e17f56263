"""Workers whose main loop does not move: their messages go to others, whatever their threads go on doing."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import Exchange, Queue
from kombu.asynchronous import Hub
from kombu.asynchronous.timer import Timer

from celery_sidejob.transport.pulse import Pulse
from celery_sidejob.transport.redis.broker_channel import Asked
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes
from tests.transport.conftest import Connect
from tests.transport.consuming import Consuming, publish


@pytest.fixture
def client(broker_url: str) -> Any:
    """A plain app that sends tasks and commands."""
    app = Celery("client", broker=broker_url, set_as_current=False)
    yield app
    app.close()


@contextmanager
def forked() -> Iterator[None]:
    """A process that has a copy of all we have open."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    try:
        yield
    finally:
        os.close(writing)
        os.waitpid(child, 0)


def wait_for_its_bell(consuming: Consuming) -> None:
    """Return once it has found nothing, and waits for the next message."""

    def waits() -> bool:
        consuming.drain_once(0.05)
        return consuming.channel._asked is Asked.WAIT

    wait_until(waits, message="a fetch that finds nothing")


def test_queues_are_added_after_pool_processes_were_killed(
    processes: Processes, broker_url: str, record: Record, client: Celery
) -> None:
    env = {"BROKER_URL": broker_url, **record.env}
    worker = processes.start_worker("tests.transport.worker_app", env=env, pool="prefork", concurrency=1)
    for turn in range(3):
        (child,) = worker.children()
        os.kill(child, signal.SIGKILL)
        wait_until(lambda was=child: worker.children() not in ([], [was]), message="another pool process")
        client.control.add_consumer(f"added{turn}", destination=[worker.nodename])
        client.send_task("note", (f"added{turn}",), queue=f"added{turn}")
        record.wait_for(f"added{turn}", timeout=30)


def test_a_socket_that_a_forked_process_keeps_open_is_polled_no_more(connect: Connect) -> None:
    consuming = Consuming(connect(), "queue", prefetch=1)
    wait_for_its_bell(consuming)
    poller = consuming.channel.connection.cycle.poller
    with forked():
        Consuming(consuming.connection, "of another channel", prefetch=1).close()
        consuming.channel.basic_consume("queue", False, None, "another")
        assert poller.poll(0) == []


def test_a_forked_process_that_hangs_up_takes_nothing_out_of_our_poll(connect: Connect) -> None:
    consuming = Consuming(connect(), "queue", prefetch=1)
    wait_for_its_bell(consuming)
    child = os.fork()
    if not child:
        try:
            consuming.channel.client.connection.disconnect()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    publish(connect(), "queue", "heard")
    assert consuming.take(1, timeout=5) == ["heard"]


def test_nothing_is_read_where_no_answer_has_come(connect: Connect) -> None:
    letters = Queue("letters", Exchange("letters", type="fanout"))
    consuming = Consuming(connect(socket_timeout=3), "queue", letters, prefetch=1)
    wait_for_its_bell(consuming)
    channel = consuming.channel
    for read in (channel._brpop_read, channel._receive):
        with pytest.raises(Empty):
            read()
    assert channel._asked is Asked.WAIT, "the answer is still to come"
    publish(connect(), "queue", "heard")
    assert consuming.take(1) == ["heard"]


def test_others_take_over_from_a_worker_whose_loop_stands_still(
    processes: Processes, broker_url: str, record: Record, client: Celery, connect: Connect
) -> None:
    env = {"BROKER_URL": broker_url, "CONSUMER_TIMEOUT": "1", "LOOP_TIMEOUT": "2", **record.env}
    worker = processes.start_worker("tests.transport.worker_app", env=env, pool="prefork", concurrency=1)
    client.send_task("hold")
    record.wait_for("begun")
    client.send_task("note", ("behind it",))
    worker.wait_for_log("note[")
    client.control.broadcast("stand_still", destination=[worker.nodename])
    record.wait_for("still")
    record.note("go")  # its pool goes on, and nobody takes the result

    other = Consuming(connect(consumer_timeout=1), "celery", prefetch=4)
    assert len(other.take(2, timeout=30)) == 2
    worker.wait_for_log("been stuck for more than 2 s")
    assert "in stand_still" in worker.log(), "it says where"
    record.note("move")
    worker.wait_for_log("was taken from this worker")
    client.send_task("note", ("next",))
    other.close()
    record.wait_for("next", timeout=30)
    record.wait_for("behind it")
    assert len(record.of("behind it")) == 1
    worker.terminate()
    assert worker.wait(15) == 0


@pytest.mark.few(0)
def test_a_worker_that_waits_for_its_tasks_as_it_stops_does_not_stand_still(
    processes: Processes, broker_url: str, record: Record, client: Celery
) -> None:
    settings = {
        "worker_soft_shutdown_timeout": 4,
        "broker_transport_options": {"consumer_timeout": 1, "loop_timeout": 1},
    }
    env = {"BROKER_URL": broker_url, "SETTINGS": json.dumps(settings), **record.env}
    worker = processes.start_worker("tests.transport.worker_app", env=env, pool="prefork", concurrency=1)
    client.send_task("last", (60,))
    active = client.control.inspect([worker.nodename], timeout=1).active
    wait_until(lambda: (active() or {}).get(worker.nodename), message="its main process to know that the task runs")
    worker.send_signal(signal.SIGQUIT)
    worker.wait_for_log("Initiating Soft Shutdown")
    worker.wait(30)
    assert "been stuck" not in worker.log()


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A loop that comes round often."""
    hub = Hub(timer=Timer())
    yield hub
    hub.close()


def run_for(hub: Hub, seconds: float) -> None:
    """Let a loop go round for so long."""
    hub.call_later(seconds, hub.stop)
    hub.run_forever()


def test_a_loop_that_is_in_a_callback_for_long_stands_still_and_one_that_has_ended_does_not(hub: Hub) -> None:
    pulse = Pulse(0.5)
    pulse.tick()
    hub.call_repeatedly(0.1, pulse.tick)
    found: list[bool] = []

    def asked() -> None:
        found.append(pulse.stands_still())

    def ask_after(seconds: float) -> None:
        asking = threading.Timer(seconds, asked)
        asking.start()
        asking.join()

    hub.call_soon(ask_after, 0.8)
    run_for(hub, 1.6)  # and comes round again
    ask_after(0)
    ask_after(0.8)
    assert found == [True, False, False]


def test_a_read_that_never_ends_is_noticed_where_there_is_no_loop() -> None:
    pulse = Pulse(0.05)
    assert not pulse.stands_still()
    with pulse.reading():
        wait_until(pulse.stands_still, message="it to be noticed")
    assert not pulse.stands_still()


def test_a_loop_that_goes_on_finds_out_what_was_taken_before_it_begins_any_of_it(
    connect: Connect, server: redis.Redis
) -> None:
    publish(connect(), "queue", "fetched")
    consuming = Consuming(connect(consumer_timeout=0.6), "queue", prefetch=1)
    consuming.take(1)
    transport = consuming.channel.connection
    transport._come_round()
    consuming.fall_silent()
    other = Consuming(connect(consumer_timeout=0.6), "elsewhere", prefetch=1)
    other.drain(0.01)
    wait_until(lambda: server.llen("queue") == 1, message="it to be taken away")
    with pytest.raises(redis.ConnectionError, match="1 messages were taken from this worker"):
        transport._come_round()


@pytest.mark.parametrize("value", [0, -1, "2", True])
def test_a_loop_timeout_that_cannot_be_meant_is_refused(connect: Connect, value: Any) -> None:
    with pytest.raises(ValueError, match="loop_timeout"):
        connect(loop_timeout=value).connect()
