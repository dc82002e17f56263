"""What reliable fetch costs and gives: how soon a dead consumer's message is with another, and what idle workers ask.

    python -m benchmarks fetch [--deaths 100] [--crowd 50] [--idle 60] [--seed 1]

Consumers of `sidejob://` with its defaults, each a process that holds a message, are killed by SIGKILL at random
instants, while one other consumer lives: the worst case, as each worker looks after the dead. Then many consumers with
100 messages each are dead at once, 8 look after them and 4 publish; and kombu's transport restores as many, by one of
its own. Last a `celery worker` of each transport does nothing, and MONITOR counts what it asks, scripts as the one
command that runs them.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import redis
from kombu import Connection, Consumer, Queue

import celery_sidejob.transport  # noqa: F401  # makes sidejob:// known
from celery_sidejob import embedded
from celery_sidejob.transport.pulse import Pulse
from celery_sidejob.transport.redis.broker_channel import Channel
from celery_sidejob.transport.redis.consumer import Heart
from celery_sidejob.transport.redis.records import Records
from celery_sidejob.transport.redis.scripts import Keys
from tests.tools.guard import Guard
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes

AT_ONCE = 5
LONGEST_PHASE_S = 1.5
EACH, RECOVERING, WRITING = 100, 8, 4
SLOW_US = 20_000
SETTLED_S = 3.0
HOLD = """
import os
from kombu import Connection, Consumer, Queue
import celery_sidejob.transport
with Connection(os.environ["BROKER_URL"]) as connection:
    with Consumer(connection, [Queue("held", routing_key="held")], on_message=lambda message: None) as consumer:
        consumer.qos(prefetch_count=1)
        while True:
            connection.drain_events()
"""


def main(arguments: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks fetch", description=__doc__.splitlines()[0])
    parser.add_argument("--deaths", type=int, default=100)
    parser.add_argument("--crowd", type=int, default=50, help="how many consumers are dead at once")
    parser.add_argument("--idle", type=int, default=60, help="seconds for each transport")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory, Guard() as guard:
        processes = Processes(Path(directory) / "processes", guard)
        try:
            if given.deaths:
                report(deaths(processes, given.deaths, random.Random(given.seed)))
            if given.crowd:
                crowd(given.crowd)
            if given.idle:
                for transport in ("redis", "sidejob"):
                    asked = idle(processes, transport, given.idle, Path(directory))
                    each = ", ".join(f"{name} {count}" for name, count in asked.most_common())
                    print(f"idle {transport}: {asked.total() / given.idle:.2f} commands a second ({each})", flush=True)
        finally:
            processes.kill_all()
    return 0


def deaths(processes: Processes, count: int, chance: random.Random) -> list[float]:
    """Return after how many seconds each killed consumer's message was with the one that lives."""
    took: list[float] = []
    with embedded.Valkey() as server, redis.Redis.from_url(server.url) as client:
        url = by(server.url, "sidejob")
        while len(took) < count:
            with Connection(url) as connection, connection.Producer() as producer:
                for number in range(AT_ONCE):
                    producer.publish(number, routing_key="held")
            holders = [processes.start_python(HOLD, env={"BROKER_URL": url}) for _ in range(AT_ONCE)]
            wait_until(lambda: len(list(client.scan_iter("_sidejob.held.*"))) == AT_ONCE, timeout=60)
            with Connection(url) as connection:
                arrived: list[float] = []

                def note(message: object, arrived: list[float] = arrived) -> None:
                    arrived.append(time.monotonic())
                    message.ack()

                with Consumer(connection, [Queue("held", routing_key="held")], on_message=note):
                    for number, holder in enumerate(holders, 1):
                        phase = time.monotonic() + chance.uniform(0, LONGEST_PHASE_S)
                        while time.monotonic() < phase:
                            drain(connection)
                        killed_at = time.monotonic()
                        processes.end(holder)
                        while len(arrived) < number:
                            drain(connection)
                        took.append(arrived[-1] - killed_at)
    return took


def crowd(dead: int) -> None:
    """Print how long it takes until all that so many dead consumers had is back, by ours and by kombu's."""
    for transport in ("sidejob", "redis"):
        with embedded.Valkey() as server, redis.Redis.from_url(server.url) as client, ExitStack() as stack:
            options = {"consumer_timeout": 1, "visibility_timeout": 0, "unacked_restore_throttle": 1}
            connections = [
                stack.enter_context(Connection(by(server.url, transport), transport_options=options))
                for _ in range(dead)
            ]
            take_all(connections)
            if transport == "sidejob":
                for connection in connections:
                    connection.transport._heart._stop.set()
                consumers = client.zrange("_sidejob.consumers", 0, -1)
                wait_until(lambda names=consumers, client=client: all_dead(client, names), timeout=30)
                restoring = [partial(recover_all, server.url) for _ in range(RECOVERING)]
            else:
                restoring = [partial(connections[0].default_channel.qos.restore_visible, num=None)]
            client.config_set("slowlog-log-slower-than", SLOW_US)
            client.slowlog_reset()
            stopped = threading.Event()
            writers = [threading.Thread(target=write, args=(server.url, transport, stopped)) for _ in range(WRITING)]
            restorers = [threading.Thread(target=restore) for restore in restoring]
            began = time.monotonic()
            for thread in (*writers, *restorers):
                thread.start()
            for thread in restorers:
                thread.join()
            took_s = time.monotonic() - began
            stopped.set()
            for thread in writers:
                thread.join()
            numbers = [number for text in client.lrange("held", 0, -1) if (number := number_of(text)) >= 0]
            once = sorted(numbers) == list(range(dead * EACH))
            print(
                f"{transport}: {len(numbers)} messages of {dead} dead consumers were back after {took_s:.2f} s, "
                f"{'each once' if once else 'NOT EACH ONCE'}; {len(client.slowlog_get(100))} commands took longer than "
                f"{SLOW_US // 1000} ms", flush=True,
            )  # fmt: skip


def take_all(connections: list[Connection]) -> None:
    """Give each of the connections its messages; it holds them."""
    for place, connection in enumerate(connections):
        with connection.Producer() as producer:
            for number in range(place * EACH, (place + 1) * EACH):
                producer.publish(number, routing_key="held")
        for _ in range(EACH):
            assert connection.default_channel.basic_get("held") is not None


def all_dead(client: redis.Redis, names: list[bytes]) -> bool:
    """Whether none of these counts as alive."""
    seconds, microseconds = client.time()
    now_ms = seconds * 1000 + microseconds // 1000
    return all(client.zscore("_sidejob.consumers", name) <= now_ms for name in names)


def recover_all(redis_url: str) -> None:
    """Look after the dead as a worker's heart does, until there are none."""
    with redis.Redis.from_url(redis_url) as client:
        keys = Keys("", Channel.sep)
        heart = Heart(
            Records(client, keys, delivery_limit=None), timeout_s=1, pulse=Pulse(None), bound_dead_list=lambda: None
        )
        while client.zcard(keys.consumers):
            heart.run_once()


def write(redis_url: str, transport: str, stopped: threading.Event) -> None:
    """Publish until it is over."""
    with Connection(by(redis_url, transport)) as connection, connection.Producer() as producer:
        while not stopped.is_set():
            producer.publish(-1, routing_key="held")


def number_of(text: bytes) -> int:
    """What was published."""
    number: int = json.loads(base64.b64decode(json.loads(text)["body"]))
    return number


def idle(processes: Processes, transport: str, seconds: int, directory: Path) -> Counter[str]:
    """Return the commands that an idle worker sends within so many seconds."""
    asked: Counter[str] = Counter()
    with embedded.Valkey() as server, redis.Redis.from_url(server.url) as client:
        env = {"BROKER_URL": by(server.url, transport), "RAN": str(directory / "ran")}
        worker = processes.start_worker("proofs.killed_app", env=env, extra=["--without-heartbeat"])
        settled = time.monotonic() + SETTLED_S
        with client.monitor() as monitor:
            while (now := time.monotonic()) < settled + seconds:
                if not monitor.connection.can_read(timeout=min(1.0, settled + seconds - now)):
                    continue
                command = monitor.next_command()
                if command["client_type"] != "lua" and now > settled:
                    asked[command["command"].split()[0]] += 1
        processes.end(worker)
    return asked


def report(took: list[float]) -> None:
    """Print a histogram by half seconds, and what 50 and 99 of a hundred did not exceed."""
    ranked = sorted(took)
    halves = Counter(int(each * 2) / 2 for each in ranked)
    for half in sorted(halves):
        print(f"{half:4.1f} to {half + 0.5:.1f} s  {halves[half]:4}  {'#' * round(60 * halves[half] / len(ranked))}")
    middle, late = ranked[len(ranked) // 2], ranked[min(len(ranked) - 1, int(len(ranked) * 0.99))]
    print(f"{len(ranked)} deaths: p50 {middle:.1f} s, p99 {late:.1f} s, the last {ranked[-1]:.1f} s", flush=True)


def drain(connection: Connection) -> None:
    """Take what comes within a moment."""
    with suppress(TimeoutError):
        connection.drain_events(timeout=0.05)


def by(redis_url: str, transport: str) -> str:
    """The URL of a Redis for a transport."""
    return urlsplit(redis_url)._replace(scheme=transport).geturl()
