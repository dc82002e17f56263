"""The servers of a test run, and the user's app on them.

If the environment names a server, the tests use it; otherwise a throwaway server is started. On a given Postgres the
tests make and drop their own databases. In a given Redis their keys have their own prefix; other keys are not touched.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from celery import Celery
from celery.app.utils import find_app
from kombu import Connection

from .. import embedded
from ..model.errors import SettingsError
from .databases import XDIST, check_can_be_reached, check_is_for_tests, drop_schema, empty_store, own_schema, reaching

POSTGRES = "SIDEJOB_TEST_DATABASE_URL"
REDIS = "SIDEJOB_TEST_REDIS_URL"
AMQP = "SIDEJOB_TEST_AMQP_URL"

CONNECT_S = 5
"""Seconds within which a given server must answer."""

QUICK: Mapping[str, Any] = {"sidejob_lease": 6, "sidejob_heartbeat_interval": 1, "sidejob_lost_after": 2}
"""Settings with shorter times than the defaults: a test kills its workers, and waits for the consequences."""

OVERRIDING = ("CELERY_BROKER_URL", "CELERY_BROKER_READ_URL", "CELERY_BROKER_WRITE_URL", "CELERY_RESULT_BACKEND")
"""Variables that take precedence over any configuration in Celery."""


@dataclass(frozen=True)
class RedisPart:
    """A Redis, and the prefix of the tests' keys in it; without a prefix all keys are the tests'."""

    url: str
    prefix: str = ""

    def check(self) -> None:
        """Raise SettingsError if it does not answer."""
        import redis

        remedy = "correct the variable, or unset it to have one started"
        with (
            reaching(f"the Redis that {REDIS} names", redis.RedisError, ValueError, remedy=remedy),
            redis.Redis.from_url(self.url, socket_connect_timeout=CONNECT_S, socket_timeout=CONNECT_S) as client,
        ):
            client.ping()

    def empty(self, *, bindings: bool = False) -> None:
        """Delete the tests' keys; the bindings of queues only on request: the app's open connections rely on them."""
        import redis  # here, because an app on another broker may not have it

        with redis.Redis.from_url(self.url) as client:
            keys = client.scan_iter(f"{self.prefix}*", count=1000)
            found = [key for key in keys if bindings or b"_kombu.binding." not in key]
            if found:
                client.delete(*found)


@contextmanager
def postgres() -> Iterator[str]:
    """Provide a Postgres within the block; yields an administrator's URL."""
    given = os.environ.get(POSTGRES)
    if given:
        check_can_be_reached(given, f"the Postgres that {POSTGRES} names", remedy="unset it to have one started")
        yield given
        return
    with _throwaway(embedded.Postgres(durable=False), POSTGRES) as server:
        yield server.url


@contextmanager
def redis_part() -> Iterator[RedisPart]:
    """Provide a Redis within the block, or a part of the given Redis."""
    given = os.environ.get(REDIS)
    if not given:
        with _throwaway(embedded.Valkey(), REDIS) as server:
            yield RedisPart(server.url)
        return
    part = RedisPart(given, f"sidejob_test_{secrets.token_hex(6)}:")
    part.check()
    try:
        yield part
    finally:
        part.empty(bindings=True)


@contextmanager
def _throwaway(server: Any, variable: str) -> Iterator[Any]:
    """Start a throwaway server; SettingsError if there is no program for it."""
    try:
        server.start()
    except embedded.ServerError as error:
        raise SettingsError(
            f"No {server.name} can be started for the tests. Name one in {variable}, or see to this: {error}"
        ) from error
    try:
        yield server
    finally:
        server.stop()


def app_of(name: str | None) -> Celery:
    """Return the app that `celery -A name` finds."""
    if not name:
        raise SettingsError(
            "Which app is tested? Name it in pytest's configuration as `celery -A` is given it: sidejob_app = shop "
            "(in pytest.ini, or under [tool.pytest.ini_options] in pyproject.toml, there in quotes)."
        )
    try:
        found: Celery = find_app(name)
    except (ImportError, AttributeError) as error:
        # After an AttributeError, of whatever module, Celery tries to import the whole name.
        first = error.__context__ if isinstance(error.__context__, AttributeError) else error
        if not _is_absent(name, first):
            raise first from None  # an error in the user's own module
        raise SettingsError(
            f"sidejob_app names {name!r}, and no app is found so: {first}. It is what `celery -A` is given, a module "
            "that can be imported from the tests, or module:app."
        ) from error
    if getattr(found, "sidejob", None) is None:
        raise SettingsError(f"sidejob_app names {name!r}, an app without a SideJob: call SideJob(app) there.")
    return found


def _is_absent(name: str, error: ImportError | AttributeError) -> bool:
    """Tell whether the app itself was not found, rather than something that its module imports."""
    if isinstance(error, AttributeError):
        return getattr(error.obj, "__name__", None) == name.partition(":")[0]
    return error.name is not None and f"{name}.".replace(":", ".").startswith(f"{error.name}.".replace(":", "."))


def kind_of(url: Any) -> str:
    """Return the kind of server that the URL of a broker or result backend needs: redis, postgres, amqp or other."""
    scheme = (url if isinstance(url, str) else next(iter(url or ()), "")).partition(":")[0]
    if scheme.startswith(("redis", "rediss", "valkey")) or scheme in ("sidejob", "sidejobs", "sentinel"):
        return "redis"
    if scheme == "sidejobpg" or scheme.startswith("db+postgres"):
        return "postgres"
    return "amqp" if scheme.startswith(("amqp", "pyamqp")) else "other"


def broker_url(app: Celery, part: RedisPart | None) -> str:
    """Return the URL of the test's broker: of the same kind as the app's."""
    own = app.conf.broker_url
    match kind_of(own):
        case "redis" if part is not None:
            return ("sidejob" if str(own).startswith("sidejob") else "redis") + "://" + part.url.partition("://")[2]
        case "postgres":
            return "sidejobpg://"  # alone: the store's database and schema
        case "amqp" if os.environ.get(AMQP):
            url = _vhost(os.environ[AMQP])
            reached = reaching(f"the RabbitMQ that {AMQP} names", Exception, remedy="or correct the variable")
            with reached, Connection(url, connect_timeout=CONNECT_S) as connection:  # its library may raise anything
                connection.connect()
            return url
    raise SettingsError(
        f"The app's broker is of a kind that cannot be started for a test ({str(own).partition(':')[0]}://). Name one "
        f"for tests: a RabbitMQ's vhost in {AMQP}, or override the fixture sidejob_broker_url."
    )


def _vhost(url: str) -> str:
    """Return the URL of this process's vhost; SettingsError if processes of pytest-xdist would share one."""
    process = os.environ.get(XDIST)
    if process and "{worker}" not in url:
        raise SettingsError(
            f"pytest-xdist runs these tests in several processes, and {AMQP} names one vhost for all of them: they "
            "would take each other's messages. Make a vhost for each, and write {worker} for the process: "
            "amqp://…/test_{worker} for test_gw0, test_gw1 …"
        )
    return url.replace("{worker}", process or "main")


def configuration(app: Celery, database_url: str, broker: str, part: RedisPart | None) -> dict[str, Any]:
    """Return the changes by which the app uses the servers of the tests."""
    schema = own_schema(app.sidejob.settings.schema, database_url)
    changes: dict[str, Any] = {
        **QUICK,
        "sidejob_database_url": database_url,
        "sidejob_direct_url": None,
        "sidejob_failover_urls": [],
        "sidejob_schema": schema,
        "broker_url": broker,
        "broker_read_url": None,
        "broker_write_url": None,
    }
    backend = app.conf.result_backend
    if "schema" in app.conf.broker_transport_options:
        changes["broker_transport_options"] = {**app.conf.broker_transport_options, "schema": schema}
    if part is not None and part.prefix:
        for key in ("broker_transport_options", "result_backend_transport_options"):
            changes[key] = {**app.conf[key], "global_keyprefix": part.prefix}
    match kind_of(backend):
        case "redis" if part is not None:
            changes["result_backend"] = part.url
        case "postgres":
            changes["result_backend"] = f"{backend.partition('://')[0]}://{database_url.partition('://')[2]}"
    return changes


@contextmanager
def configured(app: Celery, changes: Mapping[str, Any]) -> Iterator[None]:
    """Let the app use other servers within the block; the schema is made there."""
    url, before = changes["sidejob_database_url"], dict(app.conf.changes)
    check_is_for_tests(url)
    check_can_be_reached(url, "the database that the fixture sidejob_database_url returns", remedy="return another one")
    hidden = {name: os.environ.pop(name) for name in OVERRIDING if name in os.environ}
    try:
        for key, value in changes.items():
            app.conf[key] = value
        app.sidejob.reread_settings()
        drop_schema(url, app.sidejob.settings.schema)
        app.sidejob.upgrade_schema()
        yield
    finally:
        app.sidejob.reread_settings()
        app.conf.changes.clear()
        app.conf.changes.update(before)
        os.environ.update(hidden)


def empty_all(app: Celery, part: RedisPart | None) -> None:
    """Delete everything that a test has left behind in the store and in the broker."""
    app.sidejob.close()
    empty_store(app.sidejob)
    if part is not None:
        part.empty()
