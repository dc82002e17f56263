"""The waits of a worker with gevent. What is waited for is the same in threads, of which these tests are made."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import kombu
import pytest
from celery.worker.loops import _quick_drain

from celery_sidejob import embedded
from celery_sidejob.hooks.worker import greenlets
from tests.tools.waiting import wait_until

PAUSING = """
import sys
from types import SimpleNamespace
from celery import maybe_patch_concurrency
maybe_patch_concurrency(["celery", "worker", "--pool=gevent"])
import gevent
from kombu.utils.functional import retry_over_time
from celery_sidejob.hooks.worker import greenlets
if sys.argv[1] == "ours":
    greenlets.mind(SimpleNamespace(is_green=True, on_apply=None))
going_on = gevent.spawn(gevent.sleep, 0.01)
try:
    retry_over_time(lambda: 1 / 0, ZeroDivisionError, max_retries=1, interval_start=1)
except ZeroDivisionError:
    print("went on" if going_on.dead else "stood still")
"""
TIMEOUT_S = 10.0
LOOP_S = 2.0
"""How long Celery's loop waits for something to read."""


@pytest.mark.parametrize(("whose", "greenlet"), [("ours", "went on"), ("celery's", "stood still")])
def test_greenlets_go_on_while_kombu_pauses(whose: str, greenlet: str) -> None:
    command = [sys.executable, "-c", PAUSING, whose]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.strip() == greenlet


def test_the_connection_for_events_is_looked_at_without_waiting(amqp_url: str) -> None:
    """Celery waits a tenth of a second each time; what is there is read all the same."""
    with kombu.Connection(amqp_url) as connection:
        queue = kombu.Queue("told", channel=connection.default_channel, auto_delete=True)
        told: list[str] = []
        with kombu.Consumer(connection.default_channel, [queue], callbacks=[lambda body, _: told.append(body)]):
            greenlets.look_without_waiting(SimpleNamespace(connection=connection))

            began = time.monotonic()
            for _ in range(100):
                _quick_drain(connection)
            assert time.monotonic() - began < 5  # ten, if it waited

            kombu.Producer(connection.default_channel).publish("here", routing_key="told")
            wait_until(lambda: _quick_drain(connection) or told == ["here"], timeout=TIMEOUT_S)


def test_redis_is_asked_for_more_as_soon_as_there_is_room(own_valkey: embedded.Valkey) -> None:
    got: list[int] = []
    ends: list[threading.Timer] = []

    def end_soon(body: int, message: Any) -> None:
        got.append(body)
        ends.append(threading.Timer(0.05, message.reject if body == 2 else message.ack))
        ends[-1].start()

    with kombu.Connection(own_valkey.url) as connection:
        channel = connection.default_channel
        queue = kombu.Queue("one by one", channel=channel)
        producer = kombu.Producer(channel)
        for number in range(5):
            producer.publish(number, routing_key=queue.name, declare=[queue])
        with kombu.Consumer(channel, [queue], callbacks=[end_soon], prefetch_count=1):
            greenlets.fetch_when_there_is_room(connection, channel)

            began = time.monotonic()
            while len(got) < 5:
                with suppress(TimeoutError):
                    connection.drain_events(timeout=LOOP_S)
            assert time.monotonic() - began < 2 * LOOP_S  # four times that, if each waited for the loop's next turn
            for end in ends:
                end.join()

    assert got == [0, 1, 2, 3, 4]
