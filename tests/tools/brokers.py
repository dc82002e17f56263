"""Which broker a test runs on: Redis (Valkey) by kombu's transport or ours, RabbitMQ with classic and quorum queues, or
Postgres.

A test that takes the fixture `broker` runs on Redis, on the kinds that its mark `brokers("redis", "amqp")` names, or on
those of `--brokers redis,sidejob,amqp,quorum,sidejobpg`, which is for the whole of tests/acceptance: `./run test
tests/acceptance --brokers amqp`. What is about one broker alone says so, `brokers("amqp", only=["amqp"], reason="…")`,
and is skipped on others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self
from urllib.parse import urlsplit

import kombu
import pytest
import redis

KINDS = ("redis", "sidejob", "amqp", "quorum", "sidejobpg")
APART = tuple(kind for kind in KINDS if kind != "sidejobpg")
"""Those that are another server than the store: one of the two can be away alone."""
VARIABLE = "SIDEJOB_TEST_BROKER"
QUORUM = {
    "task_default_queue_type": "quorum",
    "task_create_missing_queue_type": "quorum",
    "broker_native_delayed_delivery_queue_type": "classic",  # 28 queues at each start of a worker
}


@dataclass(frozen=True)
class Broker:
    """A broker of one test's own, and a Redis for results: RabbitMQ keeps none that a second process could read."""

    kind: str
    url: str
    backend_url: str

    @classmethod
    def of(cls, broker: Broker | str) -> Broker:
        """A Redis with its results in it, if only its URL is given."""
        return broker if isinstance(broker, Broker) else cls("redis", broker, broker)

    @classmethod
    def from_env(cls) -> Self:
        """The broker this process was told of."""
        url = os.environ["BROKER_URL"]
        kind = urlsplit(url).scheme
        return cls(os.environ.get(VARIABLE, kind), url, os.environ.get("RESULT_BACKEND", url))

    @property
    def env(self) -> Mapping[str, str]:
        """The variables by which a process finds this broker."""
        return {"BROKER_URL": self.url, "RESULT_BACKEND": self.backend_url, VARIABLE: self.kind}

    @property
    def configuration(self) -> Mapping[str, Any]:
        """What an app's configuration needs to use it."""
        queues = QUORUM if self.kind == "quorum" else {}
        return {"broker_url": self.url, "result_backend": self.backend_url, **queues}

    @property
    def is_redis(self) -> bool:
        """Whether it is one, by whichever transport."""
        return self.kind in ("redis", "sidejob")

    @property
    def is_store(self) -> bool:
        """Whether it is the store too: a message is there with the commit that keeps it, and leads to its row."""
        return self.kind not in APART

    @property
    def is_amqp(self) -> bool:
        """Whether it is a RabbitMQ, with queues of either kind."""
        return self.kind in ("amqp", "quorum")

    @property
    def redis_url(self) -> str:
        """The URL by which redis-py knows it."""
        return urlsplit(self.url)._replace(scheme="redis").geturl()

    @property
    def away(self) -> Self:
        """One of the same kind that is down."""
        return self.at("amqp://127.0.0.1:1//" if self.is_amqp else f"{self.kind}://127.0.0.1:1/0")

    def at(self, url: str) -> Self:
        """The same, reached by another URL: through a proxy."""
        return replace(self, url=url)

    def occupy(self, name: str) -> None:
        """Have something else bear the name of a queue: no message can be put there."""
        if self.is_redis:
            with redis.Redis.from_url(self.redis_url) as client:
                client.set(name, "no list")
            return
        with kombu.Connection(self.url) as connection:
            connection.default_channel.queue_declare(
                name, durable=True, auto_delete=False, arguments={"x-expires": 10**6}
            )

    def take(self, queue: str) -> Callable[[], None]:
        """Take the oldest message out of a queue; returns what puts a copy of it there."""
        with kombu.Connection(self.url) as connection:
            message = connection.default_channel.basic_get(queue, no_ack=True)
        assert message is not None, f"there is no message in {queue!r}"

        def put() -> None:
            with kombu.Connection(self.url) as connection:
                connection.Producer().publish(
                    message.body, routing_key=queue, headers=message.headers, content_type=message.content_type,
                    content_encoding=message.content_encoding,
                    correlation_id=message.properties["correlation_id"], reply_to=message.properties["reply_to"],
                )  # fmt: skip

        return put


@pytest.fixture(scope="session")
def broker_kind() -> str:
    """The kind of broker a test runs on, where nothing else is said."""
    return "redis"


@pytest.fixture
def broker(broker_kind: str, redis_url: str, request: pytest.FixtureRequest) -> Broker:
    """An empty broker of this test's own."""
    return broker_of(broker_kind, redis_url, request.getfixturevalue)


@pytest.fixture
def other_broker(broker: Broker, request: pytest.FixtureRequest) -> Broker:
    """Another empty one of the same kind."""
    if broker.is_amqp:
        return broker.at(request.getfixturevalue("other_amqp_url"))
    if broker.kind == "sidejobpg":
        return broker.at(in_postgres(request.getfixturevalue("other_database_url")))
    return broker_of(broker.kind, request.getfixturevalue("other_redis_url"))


def broker_of(kind: str, redis_url: str, server: Callable[[str], Any] | None = None) -> Broker:
    """The broker of a kind on a Redis, or on a server: `server` returns its URL, by the name of the fixture."""
    if kind.startswith("sidejob") and kombu.VERSION[:2] < (5, 7):
        pytest.skip(f"{kind}:// needs kombu 5.7")
    if kind == "sidejob":
        return Broker(kind, urlsplit(redis_url)._replace(scheme="sidejob").geturl(), redis_url)
    if kind == "redis" or server is None:
        return Broker(kind, redis_url, redis_url)
    if kind == "sidejobpg":
        return Broker(kind, in_postgres(server("database_url")), redis_url)
    return Broker(kind, server("amqp_url"), redis_url)


def in_postgres(database_url: str) -> str:
    """The URL of the broker in a database."""
    return urlsplit(database_url)._replace(scheme="sidejobpg").geturl()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--brokers",
        help="comma-separated kinds of brokers for all tests that run on any: redis,sidejob,amqp,quorum,sidejobpg",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "brokers(*kinds, only, reason): what it runs on without --brokers, and with it")
    unknown = set((config.getoption("--brokers") or "redis").split(",")) - set(KINDS)
    if unknown:
        raise pytest.UsageError(f"--brokers takes {', '.join(KINDS)}, not {', '.join(sorted(unknown))}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test on each of its kinds of brokers."""
    if "broker_kind" not in metafunc.fixturenames:
        return
    asked_for = metafunc.config.getoption("--brokers")
    mark = metafunc.definition.get_closest_marker("brokers")
    kinds = asked_for.split(",") if asked_for else mark.args if mark is not None else ()
    only = mark.kwargs.get("only", KINDS) if mark is not None else KINDS

    def on(kind: str) -> Any:
        if mark is None or kind in only:
            return kind
        return pytest.param(kind, marks=pytest.mark.skip(reason=f"{kind}: {mark.kwargs['reason']}"))

    if kinds:
        metafunc.parametrize("broker_kind", [on(kind) for kind in kinds], scope="session")
