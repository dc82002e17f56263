"""What a user's test run says where its app or a server is missing: which one, and what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest
from celery import Celery

from celery_sidejob import SettingsError, SideJob
from celery_sidejob.embedded import postgres as embedded_postgres
from celery_sidejob.embedded import valkey as embedded_valkey
from celery_sidejob.testing import servers
from celery_sidejob.testing.databases import Databases

NOWHERE = "127.0.0.1:1"


@pytest.mark.parametrize(
    ("variable", "value", "server", "message"),
    [
        (
            "SIDEJOB_TEST_DATABASE_URL", f"postgresql://{NOWHERE}/x", servers.postgres,
            "reach the Postgres that SIDEJOB_TEST_DATABASE_URL names: .*refused.*or unset it to have one started",
        ),
        (
            "SIDEJOB_TEST_DATABASE_URL", "no url", servers.postgres,
            "cannot reach the Postgres that SIDEJOB_TEST_DATABASE_URL names: .*correct the URL",
        ),
        (
            "SIDEJOB_TEST_REDIS_URL", f"redis://{NOWHERE}/0", servers.redis_part,
            "cannot reach the Redis that SIDEJOB_TEST_REDIS_URL names: .*refused.*or unset it to have one started",
        ),
        ("SIDEJOB_TEST_REDIS_URL", "no url", servers.redis_part, "TEST_REDIS_URL names: .*correct the variable"),
    ],
)  # fmt: skip
def test_a_given_server_that_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, server: Callable[[], Any], message: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError, match=message), server():
        pass


@pytest.mark.parametrize(
    ("variable", "server", "name"),
    [
        ("SIDEJOB_TEST_DATABASE_URL", servers.postgres, "Postgres"),
        ("SIDEJOB_TEST_REDIS_URL", servers.redis_part, "Redis"),
    ],
)
def test_no_server_at_all(monkeypatch: pytest.MonkeyPatch, variable: str, server: Callable[[], Any], name: str) -> None:
    monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(embedded_postgres, "_candidates", list)
    monkeypatch.setattr(embedded_valkey, "_candidates", list)
    with pytest.raises(SettingsError, match=rf"can be started .* Name one in {variable}, .*{name} here\. Install one"):
        with server():
            pass


def test_a_rabbitmq_that_is_not_named_or_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Celery("shop", broker="amqp://", set_as_current=False)
    monkeypatch.delenv("SIDEJOB_TEST_AMQP_URL", raising=False)
    with pytest.raises(SettingsError, match=r"cannot be started for a test \(amqp://\).*SIDEJOB_TEST_AMQP_URL"):
        servers.broker_url(app, None)
    monkeypatch.setenv("SIDEJOB_TEST_AMQP_URL", f"amqp://{NOWHERE}//")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    with pytest.raises(SettingsError, match=r"cannot reach the RabbitMQ that SIDEJOB_TEST_AMQP_URL names: .*refused"):
        servers.broker_url(app, None)


def test_a_database_of_the_user_s_that_cannot_be_reached() -> None:
    app = Celery("shop", set_as_current=False)
    SideJob(app)
    changes = {"sidejob_database_url": f"postgresql://{NOWHERE}/shop_test"}
    with pytest.raises(
        SettingsError, match="cannot reach the database that the fixture sidejob_database_url returns: "
    ):
        with servers.configured(app, changes):
            pass


def test_a_user_who_may_make_no_databases(databases: Databases, postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("CREATE ROLE sidejob_poor LOGIN PASSWORD 'poor'")
        try:
            host = connection.info.host, connection.info.port, connection.info.dbname
            url = "postgresql://sidejob_poor:poor@{}:{}/{}".format(*host)
            with pytest.raises(SettingsError, match=r"cannot make a database: .*denied.* Grant the user CREATEDB, or"):
                with Databases(url).fresh():
                    pass
        finally:
            connection.execute("DROP ROLE sidejob_poor")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_shop", "sidejob_app names 'no_such_shop', and no app is found so: No module named 'no_such_shop'"),
        ("empty_shop", "sidejob_app names 'empty_shop', and no app is found so"),
        ("empty_shop:app", "sidejob_app names 'empty_shop:app', and no app is found so"),
    ],
)
def test_an_app_that_is_not_there(monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    monkeypatch.setitem(sys.modules, "empty_shop", ModuleType("empty_shop"))
    with pytest.raises(SettingsError, match=message):
        servers.app_of(name)


@pytest.mark.parametrize(
    ("source", "error"), [("import no_such_library", ModuleNotFoundError), ("import json; json.no", AttributeError)]
)
def test_an_error_in_the_app_s_own_module_is_shown_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, error: type[Exception]
) -> None:
    (tmp_path / "broken_shop.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(error, match=r"no_such_library|has no attribute 'no'"):
        servers.app_of("broken_shop:app")
