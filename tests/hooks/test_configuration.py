"""Which broker an app has: its family, its virtual host or database, its key prefix, whatever node it names."""

from __future__ import annotations

from typing import Any

import kombu
import pytest
from celery import Celery

from celery_sidejob.hooks.configuration import broker_identity, broker_is_store, settings_of
from celery_sidejob.model.errors import SettingsError
from tests.tools.apps import make_app

in_postgres = pytest.mark.skipif(kombu.VERSION[:2] < (5, 7), reason="sidejobpg:// needs kombu 5.7")


def identity(broker: Any, **configuration: Any) -> str:
    app = Celery("shop", broker=broker, set_as_current=False)
    app.conf.update(configuration)
    return broker_identity(app)


@pytest.mark.parametrize(
    ("same", "urls"),
    [
        ("redis 0", ["redis://h", "redis://h/", "redis://h/0", "rediss://:secret@other:6380/0", "redis+socket:///s"]),
        ("redis 3", ["redis://h/3", "redis://a/3;redis://b:1/3", "sentinel://a:26379/3;sentinel://b/3",
                     "redis+socket:///tmp/s?virtual_host=3", ["redis://a/3", "redis://b/3"]]),
        ("amqp /", ["amqp://h", "amqp://h/", "amqp://h//", "amqp://h/%2F", "pyamqp://u:p@h:1//"]),
        ("amqp shop", ["amqp://h/shop", "amqps://u:p@other/shop", "pyamqp://a/shop;pyamqp://b/shop"]),
        ("memory /", ["memory://"]),
    ],
)  # fmt: skip
def test_hosts_ports_and_credentials_make_no_difference(same: str, urls: list[Any]) -> None:
    assert {str(url): identity(url) for url in urls} == {str(url): same for url in urls}


def test_a_key_prefix_makes_another_broker() -> None:
    options = {"broker_transport_options": {"global_keyprefix": "shop:"}}
    assert identity("redis://h/1", **options) == "redis 1 shop:"


@pytest.mark.parametrize(
    ("broker", "configuration", "said"),
    [
        ("redis://:secret@a/1;redis://b/2", {}, "number 1 to write to is 'redis 1', number 2 to write to is 'redis 2'"),
        ("amqp://a/shop;redis://b/1", {}, "number 2 to write to is 'redis 1'"),
        ("redis://a/1", {"broker_write_url": "redis://a/2"}, "the one to write to is 'redis 2', the one to read from"),
    ],
)
def test_nodes_of_several_brokers_are_refused(broker: str, configuration: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        identity(broker, **configuration)

    assert said in str(refused.value)
    assert "Name nodes of one broker" in str(refused.value)
    assert "secret" not in str(refused.value)


@in_postgres
def test_in_postgres_the_database_and_the_schema_make_the_broker() -> None:
    urls = ["sidejobpg://h/shop", "sidejobpg://u:p@other:6432/shop?sslmode=require", "sidejobpg://a,b/shop"]
    assert {url: identity(url) for url in urls} == dict.fromkeys(urls, "postgres shop sidejob")
    assert identity("sidejobpg://shop@h", broker_transport_options={"schema": "other"}) == "postgres shop other"


ALONE = {"sidejob_database_url": "postgresql+psycopg://u:a%3Ab;c@h:1/shop?sslmode=require", "sidejob_schema": "own"}


def urls(app: Celery) -> list[str]:
    return [connection.as_uri(include_password=True) for connection in (app.connection(), app.connection_for_read())]


@in_postgres
@pytest.mark.parametrize("broker", ["sidejobpg://", "sidejobpg:///", ["sidejobpg://"]])
def test_the_scheme_alone_means_the_store(broker: Any) -> None:
    app = make_app(broker=broker, **ALONE)

    assert urls(app) == ["sidejobpg://u:a%3Ab%3Bc@h:1/shop?sslmode=require"] * 2
    assert broker_is_store(app)
    assert broker_identity(app) == "postgres shop own"


@in_postgres
def test_the_scheme_alone_may_be_one_of_several_urls() -> None:
    to_read = make_app(broker="sidejobpg://u@i/shop", broker_read_url="sidejobpg://", **ALONE)
    assert urls(to_read) == ["sidejobpg://u@i/shop", "sidejobpg://u:a%3Ab%3Bc@h:1/shop?sslmode=require"]
    assert not broker_is_store(to_read)

    node = make_app(broker="sidejobpg://;sidejobpg://u@i/shop", **ALONE)
    assert node.connection().alt == ["sidejobpg://u:a%3Ab%3Bc@h:1/shop?sslmode=require", "sidejobpg://u@i/shop"]
    assert not broker_is_store(node)


@in_postgres
def test_the_scheme_alone_leads_past_the_proxy_too() -> None:
    app = make_app(broker="sidejobpg://", sidejob_direct_url="postgresql://h:2/shop", **ALONE)
    assert app.connection().transport_options["direct_url"] == "postgresql://h:2/shop"


@in_postgres
def test_a_schema_of_the_brokers_own_goes_before_the_stores() -> None:
    app = make_app(broker="sidejobpg://", broker_transport_options={"schema": "other", "consumer_timeout": 5}, **ALONE)
    assert not broker_is_store(app)
    assert app.connection().transport_options == {"schema": "other", "consumer_timeout": 5, "direct_url": None}


@in_postgres
def test_the_store_is_looked_up_when_the_broker_is_needed() -> None:
    app = make_app(broker="sidejobpg://")
    with pytest.raises(SettingsError, match=r"broker_url is sidejobpg:// alone.*sidejob_database_url is not set: give"):
        app.connection()

    app.conf.sidejob_database_url = "postgresql://h/shop"

    assert app.connection().as_uri() == "sidejobpg://h/shop"


def is_store(broker: Any, **configuration: Any) -> bool:
    return broker_is_store(make_app(broker=broker, **configuration))


@in_postgres
@pytest.mark.parametrize(
    ("store", "broker"),
    [
        ("postgresql://u:p@h/shop", "sidejobpg://other:user@H:5432/shop?sslmode=require"),
        ("postgresql+psycopg://h,i:1/shop", "sidejobpg://i:1,h/shop"),
        ("postgresql:///shop?host=/run/pg&port=1", "sidejobpg:///shop?port=1&host=/run/pg"),
        ("postgresql://shop@h", "sidejobpg://h/shop"),
        ("postgresql://h/shop", "sidejobpg://h/shop;sidejobpg://u@h:5432/shop"),
        ("postgresql://h/shop", ["sidejobpg://h/shop", "sidejobpg://u@h:5432/shop"]),
    ],
)
def test_a_broker_that_is_the_store_may_be_spelled_in_another_way(store: str, broker: Any) -> None:
    assert is_store(broker, sidejob_database_url=store)


@in_postgres
@pytest.mark.parametrize(
    "broker",
    [
        "sidejobpg://h/other", "sidejobpg://i/shop", "sidejobpg://h:5433/shop", "sidejobpg://h,i/shop",
        "sidejobpg://shop@h/other", "sidejobpg://h/shop?hostaddr=10.0.0.1", "sidejobpg://h/shop;sidejobpg://i/shop",
        "sidejob://h/0", "redis://h/0", "amqp://h/shop",
    ],
)  # fmt: skip
def test_another_host_port_database_or_kind_is_another_broker(broker: str) -> None:
    assert not is_store(broker, sidejob_database_url="postgresql://h/shop")


@in_postgres
def test_only_its_schema_in_its_one_database_is_the_store() -> None:
    url, broker = "postgresql://h/shop", "sidejobpg://h/shop"
    in_other = {"broker_transport_options": {"schema": "other"}}

    assert not is_store(broker, sidejob_database_url=url, sidejob_schema="other")
    assert not is_store(broker, sidejob_database_url=url, **in_other)
    assert is_store(broker, sidejob_database_url=url, sidejob_schema="other", **in_other)
    assert not is_store(broker, sidejob_database_url=url, sidejob_failover_urls=["postgresql://i/shop"])
    assert not is_store(broker, sidejob_database_url=url, broker_write_url="sidejobpg://i/shop")
    assert not is_store(broker, sidejob_database_url=url, broker_read_url="sidejobpg://i/shop")
    assert not is_store(broker)
    assert not broker_is_store(Celery("plain", broker=broker, set_as_current=False))


@in_postgres
def test_a_broker_past_the_proxy_is_the_store_too() -> None:
    urls = {"sidejob_database_url": "postgresql://proxy:6432/shop", "sidejob_direct_url": "postgresql://h/shop"}

    assert is_store("sidejobpg://h/shop", **urls)
    assert is_store("sidejobpg://proxy:6432/shop", **urls)
    assert not is_store("sidejobpg://i/shop", **urls)


@in_postgres
def test_the_environment_of_libpq_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPORT", "6432")
    monkeypatch.setenv("PGDATABASE", "shop")

    assert is_store("sidejobpg://h:6432/", sidejob_database_url="postgresql://h/shop")
    assert not is_store("sidejobpg://h:5432/", sidejob_database_url="postgresql://h/shop")


def test_a_value_given_to_the_app_goes_before_the_loaded_one_however_it_is_spelled() -> None:
    app = Celery("shop", set_as_current=False)
    app.config_from_object({"CELERY_SIDEJOB_LEASE": 30, "CELERY_SIDEJOB_MAX_LOSSES": 5}, namespace="CELERY")
    app.conf["sidejob_lease"] = 40

    found = settings_of(app)
    assert (found.lease, found.max_losses) == (40, 5)


def test_two_spellings_in_one_place_contradict_each_other() -> None:
    app = Celery("shop", set_as_current=False)
    app.config_from_object({"CELERY_SIDEJOB_LEASE": 30, "CELERY_sidejob_lease": 40}, namespace="CELERY")

    with pytest.raises(SettingsError, match="same setting with two values"):
        settings_of(app)
