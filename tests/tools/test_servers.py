"""Each test has a database, a Redis and a vhost of its own, and servers it may break."""

from __future__ import annotations

import os
from collections.abc import Iterator
from urllib.parse import urlsplit

import kombu
import psycopg
import pytest
import redis

from celery_sidejob import embedded
from tests.tools import servers
from tests.tools.databases import Databases, close_for_cloning
from tests.tools.freezing import frozen
from tests.tools.proxy import TcpProxy


@pytest.mark.parametrize("turn", [1, 2])
def test_an_empty_database_is_empty_each_time(empty_database_url: str, turn: int) -> None:
    with psycopg.connect(empty_database_url) as connection:
        connection.execute("CREATE TABLE mine (id int)")


def test_a_clone_has_what_the_template_has_and_goes_away_while_in_use(databases: Databases) -> None:
    with databases.fresh() as template:
        with psycopg.connect(databases.url_of(template)) as forgotten:
            forgotten.execute("CREATE TABLE ours (id int)")
            forgotten.commit()
            close_for_cloning(databases, template)
        with databases.fresh(template=template) as clone:
            connection = psycopg.connect(databases.url_of(clone))
            assert connection.execute("SELECT count(*) FROM ours").fetchone() == (0,)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
        connection.close()

    with psycopg.connect(databases.admin_url) as admin:
        left = admin.execute("SELECT datname FROM pg_database WHERE datname IN (%s, %s)", [template, clone])
        assert left.fetchall() == []


def test_databases_of_tests_have_our_schema(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT to_regclass('sidejob.jobs') IS NOT NULL").fetchone() == (True,)


@pytest.mark.parametrize("turn", [1, 2])
def test_a_redis_database_is_empty_each_time(redis_url: str, turn: int) -> None:
    with redis.Redis.from_url(redis_url) as client:
        assert client.dbsize() == 0
        client.set("mine", turn)


def test_two_tests_in_a_row_have_different_redis_databases(
    redis_url: str, redis_database_numbers: Iterator[int]
) -> None:
    assert next(redis_database_numbers) != int(urlsplit(redis_url).path[1:])


def test_what_a_given_redis_has_is_left_alone(own_valkey: embedded.Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(number: int) -> redis.Redis:
        return redis.Redis.from_url(urlsplit(own_valkey.url)._replace(path=f"/{number}").geturl())

    monkeypatch.setenv("SIDEJOB_TEST_REDIS_URL", own_valkey.url)
    monkeypatch.setenv(servers.FREE, "")
    for number in (0, 3):
        with of(number) as client:
            client.set("somebody's", number)

    servers.claim_free_databases(7)
    assert os.environ[servers.FREE].split() == [str(number) for number in range(16) if number not in (0, 3)]
    with of(1) as client:
        client.set("a test's", 1)
    servers.give_back_databases()

    with of(0) as client:
        assert client.info("keyspace").keys() == {"db0", "db3"}
    with pytest.raises(pytest.UsageError, match="has 14 empty databases of 16, and 16 are needed"):
        servers.claim_free_databases(8)


def test_a_postgres_can_be_killed_and_started_again(own_postgres: embedded.Postgres) -> None:
    with psycopg.connect(own_postgres.url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 1 AS id")
        connection.commit()
        own_postgres.kill()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")

    own_postgres.start()
    with psycopg.connect(own_postgres.url) as connection:
        assert connection.execute("SELECT id FROM kept").fetchone() == (1,)


def test_a_frozen_postgres_does_not_answer_until_it_thaws(own_postgres: embedded.Postgres) -> None:
    with psycopg.connect(own_postgres.url) as connection:
        with frozen(own_postgres.pid):
            with pytest.raises(psycopg.OperationalError, match="timeout"):
                psycopg.connect(own_postgres.url, connect_timeout=2)

        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_valkey_can_be_killed_and_started_again(own_valkey: embedded.Valkey) -> None:
    with redis.Redis.from_url(own_valkey.url) as client:
        client.set("key", "value")
        own_valkey.kill()
        with pytest.raises(redis.ConnectionError):
            client.get("key")

        own_valkey.start()
        assert client.get("key") == b"value"


def test_a_server_left_frozen_or_dead_is_no_trouble_afterwards(
    own_postgres: embedded.Postgres, own_valkey: embedded.Valkey
) -> None:
    with frozen(own_valkey.pid):
        own_valkey.kill()
    own_postgres.kill()


def test_messages_go_through_a_vhost(amqp_url: str) -> None:
    with kombu.Connection(amqp_url) as connection:
        with connection.SimpleQueue("sidejob_test_tools") as queue:
            queue.put("message")
            assert queue.get(timeout=10).payload == "message"
        connection.default_channel.queue_delete("sidejob_test_tools")


def test_rabbitmq_goes_through_the_proxy(amqp_url: str) -> None:
    with TcpProxy.to(amqp_url) as proxy, kombu.Connection(proxy.url_for(amqp_url)) as connection:
        connection.connect()
        assert proxy.open_connections == 1
