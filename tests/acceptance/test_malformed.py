"""Messages that no publisher could mean: a worker drops them, tells of them, and goes on with the next."""

from __future__ import annotations

import json
import os
import random
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import kombu
import pytest
import redis

from tests.tools.apps import make_app
from tests.tools.brokers import Broker
from tests.tools.databases import Eye
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes, WorkerProcess

APP = "tests.acceptance.malformed_app"
QUEUE = "malformed"
PLAIN = f"{APP}.plain"
TASKS = {"sidejob_durable": f"{APP}.noted", "sidejob": f"{APP}.job"}
TIMEOUT_S = 60.0

DURABLE_HEADERS: list[Any] = [
    "x", 5, 0, "", [], [1], {}, True, {"v": "x", "n": 1}, {"v": None, "n": 1}, {"v": [1], "n": 1}, {"v": 1.5, "n": 1},
    {"v": 1}, {"v": 1, "n": None}, {"v": 1, "n": "x"}, {"v": 1, "n": [1]}, {"v": 1, "n": {}}, {"v": 1, "n": -1},
    {"v": 1, "n": 2**40}, {"v": 1, "n": 1.5}, {"v": 1, "n": 1, "s": 5}, {"v": 1, "n": 1, "s": [1]},
    {"v": 1, "n": 1, "s": {"a": 1}}, {"v": 1, "n": 1, "s": "nowhere"}, {"v": 1, "n": 1, "c": 5},
    {"v": 1, "n": 1, "c": [1]}, {"v": 1, "n": 1, "t": 5}, {"v": 1, "n": 1, "t": "x"}, {"v": 1, "n": 1, "t": [[1]]},
    {"v": 1, "n": 1, "c": "x", "t": [5]}, {"v": 1, "n": 1, "u": "x"}, {"v": 2, "n": 1}, {"v": 99},
    {"v": 99, "n": [1]}, {"v": 1, "n": 1, "c": "a\x00b", "u": True},
]  # fmt: skip
"""What says that a row of a durable task stands behind the message."""
JOB_HEADERS: list[Any] = [
    "x", 5, 0, "", [], [1], {}, True, {"v": "x"}, {"v": 1}, {"v": 1, "job": 1}, {"v": 1, "for_run": 1},
    {"v": 1, "job": None, "for_run": 1}, {"v": 1, "job": [1], "for_run": 1}, {"v": 1, "job": {}, "for_run": 1},
    {"v": 1, "job": "1", "for_run": 1}, {"v": 1, "job": -1, "for_run": 1}, {"v": 1, "job": 2**63 - 1, "for_run": 1},
    {"v": 1, "job": 1.5, "for_run": 1}, {"v": 1, "job": 1, "for_run": None}, {"v": 1, "job": 1, "for_run": [1]},
    {"v": 1, "job": 1, "for_run": "x"}, {"v": 1, "job": 1, "for_run": -32768}, {"v": 1, "job": 1, "for_run": 2**62},
    {"v": [1], "job": 1, "for_run": 1}, {"v": 99}, {"v": 99, "job": [1]},
]  # fmt: skip
"""What says that a job stands behind the message."""
OTHERS: list[dict[str, Any]] = [
    {"id": None}, {"id": 5}, {"id": [1]}, {"id": {}}, {"id": ""}, {"id": "a\x00b"}, {"id": "x" * 5000},
    {"timelimit": 5}, {"timelimit": "x"}, {"timelimit": ["a", "b"]}, {"timelimit": [1, 2, 3]}, {"timelimit": {"a": 1}},
    {"timelimit": [-1, -1]}, {"retries": "x"}, {"retries": -1}, {"retries": 2**40}, {"retries": [1]}, {"eta": 5},
    {"eta": [1]}, {"eta": "x"}, {"eta": "0001-01-01T00:00:00"}, {"expires": 5}, {"expires": [1]}, {"expires": "x"},
    {"shadow": [1]}, {"argsrepr": 5}, {"root_id": [1]}, {"parent_id": 5}, {"group": [1]}, {"group_index": "x"},
    {"ignore_result": "x"}, {"stamped_headers": 5}, {"stamped_headers": "x", "stamps": 5}, {"lang": 5},
    {"origin": [1]}, {"meth": 5}, {"replaced_task_nesting": "x"}, {"sidejob_worker": "x"}, {"sidejob_worker": {"a": 1}},
    {"sidejob_adopted": {"a": 1}}, {"sidejob_ahead": 5}, {"sidejob_late": True}, {"sidejob_call": 5},
    {"sidejob_call": "a\x00b"}, {"sidejob_deaths": 5}, {"sidejob_deaths": ["x"]}, {"sidejob_republished": [1]},
    {"compression": "x"}, {"compression": 5},
]  # fmt: skip
"""Other headers, of ours and of Celery's."""
BODIES: list[str | bytes] = [
    "5", '"x"', "null", "[]", "[1, 2, 3]", "[[], {}]", "[[], [], {}]", "[{}, {}, {}]", "[[], {}, 5]", "{}",
    '{"args": 5}', "no JSON", "", b"\xff\xfe", "[[], {}, {}, {}]", '[[1, 2, 3, 4], {"no": "such"}, {}]',
    '[[], {}, {"callbacks": 5}]', '[[], {}, {"chord": 5}]', '[[], {}, {"chain": 5}]', '[[], {}, {"errbacks": [5]}]',
    '[["a\\u0000b"], {}, {}]',
]  # fmt: skip
RAW: list[str | bytes] = [
    "no JSON", b"\xff", "", "5", "null", "[]", "{}", '{"body": 5}', '{"body": "", "headers": 5, "properties": {}}',
    '{"body": "", "headers": {"task": "x"}, "properties": {"delivery_tag": 5}}', "[" * 900 + "]" * 900,
]  # fmt: skip
"""What is no message of kombu's at all, in a list of Redis."""
FUZZED = int(os.environ.get("FUZZED", "100"))
"""How many messages are made up for each worker; `FUZZED=3000 FUZZ_SEED=x` walks on."""
SEED = os.environ.get("FUZZ_SEED", "malformed")


def deep(levels: int, innermost: Any = 5) -> Any:
    """Nest a value, in lists and mappings by turns."""
    for level in range(levels):
        innermost = [innermost] if level % 2 else {"a": innermost}
    return innermost


ODD: list[Any] = [
    None, 5, -1, 0, 2**31, 2**62, 2**70, 1.5, True, "", "x", "zzz", "a\x00b", "\ud800", "\u202e", "x" * 70_000, [], [5],
    ["x"], [None], [[]], {}, {"a": 1}, {"": None}, [{"task": "x"}], {"task": 5}, {"task": PLAIN},
    {"task": PLAIN, "args": 5},
    [{"task": PLAIN, "args": [1], "kwargs": {}, "options": {"queue": {}}, "subtask_type": "group", "immutable": 5}],
    "2020-01-01T00:00:00", "9999-12-31T23:59:59.999999+00:00", deep(40), deep(450), deep(900),
]  # fmt: skip
"""Values that a part of a message may be given."""
EMBEDDED = ("callbacks", "errbacks", "chain", "chord", "args", "kwargs", "id", "task", "group", "delivery_info", "zzz")
HEADERS = sorted({name for headers in OTHERS for name in headers} | {*TASKS, "task", "groups", "stamps", "headers"})
PROPERTIES = ("content_type", "content_encoding", "correlation_id", "reply_to", "priority", "message_id", "expiration")


def fuzzed(chance: random.Random) -> tuple[bytes, dict[str, Any] | None, dict[str, Any]]:
    """Make up a message as Celery sends it, but for a few parts: its body, its headers and its properties."""
    task = chance.choice([PLAIN, *TASKS.values()])
    headers: Any = {"lang": "py", "task": task, "id": f"fuzzed{chance.random()}", "retries": 0}
    properties: dict[str, Any] = {}
    parts: list[Any] = [["x"], {}, {}]
    whole: Any = parts
    raw: bytes | None = None
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        odd = chance.choice(ODD)
        match chance.randrange(8):
            case 0 | 1:
                headers[chance.choice(HEADERS)] = odd
            case 2 | 3:
                parts[2][chance.choice(EMBEDDED)] = odd
            case 4:
                parts[chance.randrange(2)] = odd
            case 5:
                whole = odd
            case 6:
                properties[chance.choice(PROPERTIES)] = odd
            case 7 if chance.random() < 0.5:  # as Celery 3 does
                whole = {"task": task, "id": "fuzzed", "args": [7], "kwargs": {}, chance.choice(HEADERS): odd}
                headers = {chance.choice(HEADERS): odd}
            case _:
                raw = bytes(chance.randrange(256) for _ in range(chance.randrange(40)))
                headers["compression"] = chance.choice([None, "application/x-gzip", "application/x-bz2", "zzz"])
    return (json.dumps(whole).encode() if raw is None else raw), headers, properties


class Site:
    """A worker, and what sends it messages as anybody can who may write into its queue."""

    def __init__(self, database_url: str, broker: Broker, record: Record, processes: Processes) -> None:
        self.broker, self.record, self._processes = broker, record, processes
        self._env = {"SIDEJOB_DATABASE_URL": database_url, **broker.env, **record.env, "SIDEJOB_LOST_AFTER": "2"}
        self._eye = Eye(database_url)
        self.app = make_app(
            "client",
            broker=None,
            **broker.configuration,
            sidejob_database_url=database_url,
            task_default_queue=QUEUE,
            sidejob_durable_tasks=[TASKS["sidejob_durable"]],
        )
        self.sidejob = self.app.sidejob
        self._sent = 0
        self._producer: Any = None
        self._counting = kombu.Connection(broker.url)

    def close(self) -> None:
        self._hang_up()
        self._counting.release()
        self._eye.close()
        self.sidejob.close()
        self.app.close()

    def _hang_up(self) -> None:
        if self._producer is not None:
            self._producer.connection.release()
            self._producer = None

    def worker(self, pool: str, **env: str) -> WorkerProcess:
        return self._processes.start_worker(APP, env={**self._env, **env}, pool=pool)

    def publish(self, body: str | bytes, headers: dict[str, Any] | None, **options: Any) -> None:
        """Put a message into the queue."""
        about = {"content_type": "application/json", "content_encoding": "utf-8", "routing_key": QUEUE, **options}
        body = body.encode() if isinstance(body, str) else body
        if self._producer is None:
            self._producer = kombu.Connection(self.broker.url).Producer(auto_declare=False)
            self._producer.maybe_declare(self.app.amqp.queues[QUEUE])
        try:
            self._producer.publish(body, headers=headers, **about)
        except Exception:
            self._hang_up()  # half of it may have been sent
            raise

    def publish_fuzzed(self, seed: str) -> None:
        """Put made-up messages into the queue; what the client's library cannot send at all is left out."""
        chance = random.Random(seed)
        for _ in range(FUZZED):
            body, headers, properties = fuzzed(chance)
            with suppress(Exception):
                self.publish(body, headers, **properties)

    def send(self, task: str, body: str | bytes = "[[], {}, {}]", **headers: Any) -> None:
        """Send a task as Celery does, but for what is said otherwise."""
        self._sent += 1
        own = {"lang": "py", "task": task, "id": f"bad{self._sent}", "retries": 0, "timelimit": [None, None]}
        self.publish(body, {**own, **headers})

    def send_first_protocol(self, task: str, task_id: Any, **body: Any) -> None:
        """Send a task as Celery 3 does."""
        made = {"task": task, "id": task_id, "args": [7], "kwargs": {}, "retries": 0, "eta": None, **body}
        self.publish(json.dumps(made), {})

    def waits(self) -> int:
        """How many messages wait in the queue."""
        channel = self._counting.default_channel
        return int(channel.queue_declare(QUEUE, durable=True, auto_delete=False).message_count)

    def sql(self, statement: str) -> list[Any]:
        return self._eye.rows(statement)

    def prove(self) -> None:
        """Have a durable task, a job and a plain task run."""
        value = uuid.uuid4().hex
        self.app.send_task(TASKS["sidejob_durable"], (value,))
        self.app.send_task(TASKS["sidejob"], (value,))  # of a client that does not know it: adopted
        self.app.send_task(PLAIN, (value,))
        self.record.wait_for("ran", count=3, timeout=TIMEOUT_S, value=value)


@pytest.fixture
def site(database_url: str, broker: Broker, record: Record, processes: Processes) -> Iterator[Site]:
    made = Site(database_url, broker, record, processes)
    yield made
    made.close()


@pytest.mark.few(5)
@pytest.mark.brokers("redis", "sidejob", "amqp", "sidejobpg")
@pytest.mark.parametrize("pool", ["prefork", "solo", "threads", "gevent"])
def test_a_worker_outlives_whatever_is_sent_to_it(site: Site, pool: str) -> None:
    for value in DURABLE_HEADERS:
        site.send(TASKS["sidejob_durable"], sidejob_durable=value)
    for value in JOB_HEADERS:
        site.send(TASKS["sidejob"], sidejob=value)
    for task in (*TASKS.values(), PLAIN):
        for headers in OTHERS:
            site.send(task, **headers)
        for body in BODIES:
            site.send(task, body)
        site.publish("[[], {}, {}]", {"task": task})
        site.publish("[[], {}, {}]", {"task": task, "id": "odd1"}, content_type="application/x-nothing")
        site.publish("[[], {}, {}]", {"task": task, "id": "odd2"}, content_encoding="x")
        site.publish(b"\x80\x04K\x05.", {"task": task, "id": "odd3"}, content_type="application/x-python-serialize")
        for body in ({"id": None}, {"id": 5}, {"args": 5}, {"kwargs": 5}, {"sidejob_durable": "x"}, {"sidejob": [1]}):
            site.send_first_protocol(task, "odd4", **body)
        site.send(task, '[["no memory"], {}, {}]')
    if site.broker.is_redis:  # also what is no message of kombu's
        with redis.Redis.from_url(site.broker.redis_url) as server:
            server.lpush(QUEUE, *RAW)
    site.publish_fuzzed(f"{SEED}, {pool}, {site.broker.kind}")

    worker = site.worker(pool)
    wait_until(lambda: site.waits() == 0, timeout=TIMEOUT_S, message="all to be fetched")
    site.prove()
    wait_until(lambda: site.waits() == 0, timeout=TIMEOUT_S, message="nothing to be left")

    assert worker.alive
    for sign in ("Connection to broker lost", "Trying to re-establish", "Unrecoverable error", "WorkerLostError"):
        assert sign not in worker.log(), sign


@pytest.mark.brokers("redis", "amqp")
@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_a_message_of_the_first_protocol_is_run_once_and_kept_until_then(site: Site, pool: str) -> None:
    for task in TASKS.values():
        site.send_first_protocol(task, f"first-{task}")

    site.worker(pool)

    site.record.wait_for("ran", count=2, timeout=TIMEOUT_S, value=7)
    wait_until(lambda: site.sql("SELECT 1 FROM messages") == [], timeout=TIMEOUT_S, message="both to be through")
    assert len(site.record.of("ran")) == 2


def test_what_other_workers_can_run_does_not_keep_a_solo_worker_from_its_own(site: Site) -> None:
    """It was given back to the queue, and came next."""
    site.send(f"{APP}.noted_late", sidejob_durable={"v": 99, "n": 1})
    site.send(f"{APP}.noted_late", sidejob_durable={"v": 1, "n": 1, "s": "nowhere"})
    site.worker("solo", PREFETCH="1")

    site.prove()

    wait_until(lambda: site.waits() == 0, timeout=TIMEOUT_S, message="nothing to be left")


def test_a_worker_whose_pool_is_idle_finds_its_places_again(site: Site) -> None:
    worker = site.worker("prefork", LOSES_PLACES="yes")

    site.prove()

    assert "The pool of this worker is idle" in worker.log()
