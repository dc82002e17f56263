"""Which broker an app has: its family, its virtual host or database, its key prefix, whatever node it names."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_sidejob.hooks.configuration import broker_identity
from celery_sidejob.model.errors import SettingsError


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
