"""Which broker a test runs on: Redis (or Valkey), or RabbitMQ with classic or with quorum queues.

A test that takes the fixture `broker` runs on Redis, on the kinds that its mark `brokers("redis", "amqp")` names, or on
those of `--brokers redis,amqp,quorum`, which is for the whole of tests/acceptance: `./run test tests/acceptance
--brokers amqp`. What is about one broker alone says so, `brokers("redis", only=["redis"])`, and is skipped on others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import pytest

KINDS = ("redis", "amqp", "quorum")
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
        kind = "amqp" if url.startswith("amqp") else "redis"
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
        """Whether it is one."""
        return self.kind == "redis"

    def at(self, url: str) -> Self:
        """The same, reached by another URL: through a proxy."""
        return replace(self, url=url)


@pytest.fixture(scope="session")
def broker_kind() -> str:
    """The kind of broker a test runs on, where nothing else is said."""
    return "redis"


@pytest.fixture
def broker(broker_kind: str, redis_url: str, request: pytest.FixtureRequest) -> Broker:
    """An empty broker of this test's own."""
    url = redis_url if broker_kind == "redis" else request.getfixturevalue("amqp_url")
    return Broker(broker_kind, url, redis_url)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--brokers", help="comma-separated kinds of brokers for all tests that run on any: redis,amqp,quorum"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "brokers(*kinds, only): what it runs on without --brokers, and with it")
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
    if kinds:
        metafunc.parametrize("broker_kind", [kind for kind in kinds if kind in only], scope="session")
