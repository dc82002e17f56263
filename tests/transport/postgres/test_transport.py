"""The transport on Postgres in the test's own process: what it stores, what it gives back, what it refuses."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Sequence
from typing import Any

import psycopg
import pytest
from kombu import Connection, Exchange, Queue
from kombu.exceptions import BatchPublishError

from celery_sidejob import SchemaError, SettingsError
from celery_sidejob.model.native import Pipe
from celery_sidejob.store.broker import messages
from celery_sidejob.store.broker.messages import HIGHEST_PRIORITY
from celery_sidejob.store.connection import own_executor
from celery_sidejob.store.connection.own_executor import OwnExecutor
from celery_sidejob.transport import message_refused
from celery_sidejob.transport.postgres.fetching import WHOLE_S
from tests.tools.brokers import in_postgres
from tests.tools.pgbouncer import direct
from tests.tools.waiting import wait_until
from tests.transport.consuming import Consuming, publish
from tests.transport.postgres.conftest import Tables

Connect = Callable[..., Connection]


# -- URLs and options ------------------------------------------------------------------------------------------------


def test_a_password_is_not_shown(connect: Connect) -> None:
    connection = connect("sidejobpg://someone:secret@127.0.0.1:1/shop?sslmode=disable")
    assert connection.as_uri() == "sidejobpg://someone:**@127.0.0.1:1/shop?sslmode=disable"
    assert "secret" in connection.as_uri(include_password=True)


@pytest.mark.parametrize("url", ["sidejobpg://u:secret@h/shop", "sidejobpg://h/shop?user=u&password=secret"])
def test_what_inspect_stats_shows_of_a_connection_has_no_password(connect: Connect, url: str) -> None:
    connection = connect(url)
    assert "secret" not in connection.as_uri()

    info = connection.info()

    del info["password"]  # as Celery's `inspect stats` does
    assert "secret" not in str(info)
    assert connection.clone().as_uri(include_password=True) == url


def test_parameters_of_libpq_are_in_the_url(connect: Connect, broker_url: str) -> None:
    connection = connect(f"{broker_url}?sslmode=disable")
    publish(connection, "queue", 1)
    assert Consuming(connection, "queue").take(1) == [1]
    with pytest.raises(connection.connection_errors, match="does not support SSL"):
        connect(f"{broker_url}?sslmode=require").connect()


@pytest.mark.parametrize("url", ["sidejobpg://", "sidejobpg:///"])
def test_a_url_without_a_database_is_refused(connect: Connect, url: str) -> None:
    connection = connect(url)
    assert connection.as_uri() == "sidejobpg://"
    with pytest.raises(SettingsError, match=r"call SideJob\(app\) and set sidejob_database_url, or name the database"):
        connection.connect()


def test_a_url_that_cannot_be_read_is_refused_without_its_password(connect: Connect) -> None:
    with pytest.raises(SettingsError, match="broker_url cannot be read") as refusal:
        connect("sidejobpg://someone:secret@host:port/shop?nonsense=1").connect()
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("consumer_timeout", 0, "a number of seconds above 0, at most 10000000000, not 0"),
        ("consumer_timeout", True, "not True"),
        ("loop_timeout", "2", "not '2'"),
        ("schema", 3, "the name of a schema"),
        ("delivery_limit", 0, "a whole number above 0, or None, not 0"),
        ("dead_list_limit", 2.5, "not 2.5"),
        ("dead_list_days", "9", "not '9'"),
        ("synchronous_commit", False, "synchronous_commit is 'on' or 'off', not False"),
        ("synchronous_commit", "remote_write", "not 'remote_write'"),
        ("synchronous_comit", "off", "Did you mean synchronous_commit"),
        ("schem", "x", "Did you mean schema"),
        ("consumer_timout", 3, "Did you mean consumer_timeout"),
    ],
)
def test_an_option_that_cannot_be_meant_is_refused(connect: Connect, name: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        connect(**{name: value}).connect()


def test_a_database_without_the_schema_is_refused(connect: Connect, empty_database_url: str) -> None:
    with pytest.raises(SchemaError, match=r"^Schema 'sidejob' is missing or incomplete .*sidejob db upgrade"):
        connect(in_postgres(empty_database_url)).connect()


def test_a_postgres_that_is_down_is_an_error_of_the_connection(connect: Connect) -> None:
    connection = connect("sidejobpg://nobody@127.0.0.1:1/shop")
    with pytest.raises(connection.connection_errors, match="Cannot connect"):
        connection.connect()


# -- what is stored --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", ["text", "a\0b", "\N{SNOWMAN}"])
def test_texts_arrive_as_they_were_sent(connect: Connect, body: str) -> None:
    connect().Producer().publish(body, routing_key="queue", content_type="text/plain", content_encoding="utf-8")
    (message,) = _taken(connect, 1)
    assert message.body in (body, body.encode())


@pytest.mark.parametrize("options", [{"serializer": "pickle"}, {"serializer": "json", "compression": "zlib"}])
def test_bytes_arrive_as_they_were_sent(connect: Connect, options: dict[str, Any]) -> None:
    connect().Producer().publish({"a": [1]}, routing_key="queue", headers={"h": 1}, **options)
    consuming = Consuming(connect(), "queue", accept=["json", "pickle"])
    assert consuming.take(1) == [{"a": [1]}]
    assert consuming.messages[0].headers["h"] == 1


def test_a_json_is_stored_as_it_is(connect: Connect, tables: Tables) -> None:
    publish(connect(), "queue", {"key": "value"})
    assert tables.one("SELECT body::json ->> 'key' FROM broker_messages") == "value"


def test_a_batch_is_sent_as_a_whole_or_not_at_all(connect: Connect, tables: Tables) -> None:
    def send(*queues: str) -> None:
        with connect().Producer() as producer, producer.batch():
            for number, queue in enumerate(queues):
                publish_by(producer, number, queue=queue)
            assert tables.all == 0

    with pytest.raises(BatchPublishError):
        send("queue", "no\0name")
    assert tables.all == 0
    send("queue", "queue", "queue")
    assert _bodies(_taken(connect, 3)) == [0, 1, 2]


def publish_by(producer: Any, body: Any, *, queue: str = "queue") -> None:
    producer.publish(body, routing_key=queue, serializer="json")


def _taken(connect: Connect, count: int) -> list[Any]:
    consuming = Consuming(connect(), "queue", prefetch=100)
    consuming.take(count)
    return consuming.messages


def _bodies(messages: list[Any]) -> list[Any]:
    return [message.payload for message in messages]


# -- who has a message -----------------------------------------------------------------------------------------------


def test_what_is_requeued_comes_back_to_its_place(connect: Connect) -> None:
    publish(connect(), "queue", *range(4))
    consuming = Consuming(connect(), "queue", prefetch=2)
    consuming.take(2)
    consuming.messages[0].reject(requeue=True)
    consuming.messages[1].ack()
    assert consuming.take(2) == [0, 2]
    again = consuming.messages[2]
    assert again.delivery_info["redelivered"]
    assert again.headers["redelivered"]
    assert again.properties["delivery_count"] == 1


def test_who_leaves_gives_back_all_in_their_order(connect: Connect, tables: Tables) -> None:
    publish(connect(), "queue", *range(5))
    leaving = Consuming(connect(), "queue", prefetch=3)
    leaving.take(3)
    leaving.messages[1].ack()
    other = Consuming(connect(), "queue", prefetch=10)
    other.take(2)
    assert tables.waiting == 0
    leaving.close()
    assert other.take(2) == [0, 2]


def test_acknowledgements_may_come_from_any_thread(connect: Connect, tables: Tables) -> None:
    publish(connect(), "queue", *range(50))
    consuming = Consuming(connect(), "queue", prefetch=50)
    consuming.take(50)
    threads = [threading.Thread(target=message.ack) for message in consuming.messages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: tables.all == 0, message="the heart to remove them, as nobody drains")


def test_a_message_of_a_consumer_that_was_taken_for_dead_is_another_s(connect: Connect, tables: Tables) -> None:
    refused: list[dict[str, Any]] = []
    receiver = message_refused.connect(lambda **facts: refused.append(facts))
    publish(connect(), "queue", "mine")
    zombie = Consuming(connect(consumer_timeout=0.6), "queue", prefetch=1)
    zombie.take(1)
    heart = zombie.channel.connection._heart
    heart.stop()  # as if it stood still
    owner = Consuming(connect(consumer_timeout=0.6), "queue", prefetch=1)
    assert owner.take(1) == ["mine"]
    zombie.messages[0].ack()
    with pytest.raises(psycopg.OperationalError, match="declared dead"):
        zombie.drain()
    message_refused.disconnect(receiver)
    assert [facts["verb"] for facts in refused] == ["ack"]
    assert tables.held == 1
    owner.messages[0].ack()
    wait_until(lambda: tables.all == 0, message="the owner's acknowledgement to count")


def test_a_turn_that_waits_for_its_own_rows_has_locked_no_others(
    connect: Connect, tables: Tables, database_url: str
) -> None:
    """Else two that wait for each other's fetch would be a deadlock, and one would lose its connection."""
    publish(connect(), "queue", "mine", "free")
    consuming = Consuming(connect(), "queue", prefetch=1)
    consuming.take(1)
    holder, mine = consuming.channel.connection.consumer, consuming.messages[0].delivery_tag
    watermarks = [messages.Watermark("queue", 0, 0)]

    def fetch() -> None:
        connect().default_channel.link.run(
            "fetch",
            lambda executor: messages.fetch(
                executor, holder=holder, done=[mine], watermarks=watermarks, room=1, reads=False
            ),
        )

    with psycopg.connect(direct(database_url), options="-c search_path=sidejob") as other:
        other.execute("SELECT FROM broker_messages WHERE id = %s FOR UPDATE", [mine])
        fetching = threading.Thread(target=fetch)
        fetching.start()
        wait_until(
            lambda: tables.one("SELECT count(*) FROM pg_locks WHERE NOT granted"),
            message="the fetch to wait for its row",
        )
        other.execute("SELECT FROM broker_messages WHERE id <> %s FOR UPDATE NOWAIT", [mine])
    fetching.join(10)
    assert not fetching.is_alive()


@pytest.mark.parametrize("verb", ["remove", "fetch", "release"])
def test_a_consumer_ends_no_message_that_another_holds(connect: Connect, tables: Tables, verb: str) -> None:
    publish(connect(), "queue", "mine")
    owner = Consuming(connect(), "queue", prefetch=1)
    owner.take(1)
    other = Consuming(connect(), "queue", prefetch=1)
    other.drain()
    holder, message_id = other.channel.connection.consumer, owner.messages[0].delivery_tag
    statements: dict[str, Callable[[OwnExecutor], frozenset[int]]] = {
        "remove": lambda executor: messages.remove(executor, holder=holder, done=[message_id])[0],
        "fetch": lambda executor: (
            messages.fetch(executor, holder=holder, done=[message_id], watermarks=[], room=1, reads=False).refused
        ),
        "release": lambda executor: messages.release(executor, holder=holder, ids=[message_id], begun=[]),
    }

    assert other.channel.link.run(verb, statements[verb]) == {message_id}

    assert tables.one("SELECT holder FROM broker_messages") == owner.channel.connection.consumer


def test_a_purge_leaves_what_a_consumer_holds(connect: Connect, tables: Tables) -> None:
    publish(connect(), "queue", *range(3))
    consuming = Consuming(connect(), "queue", prefetch=1)
    consuming.take(1)
    assert connect().default_channel.queue_purge("queue") == 2
    assert (tables.held, tables.all) == (1, 1)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # from 3.12 on; billiard forks all the same
def test_a_forked_process_gives_back_nothing_of_its_parent(connect: Connect, tables: Tables) -> None:
    publish(connect(), "queue", "mine")
    consuming = Consuming(connect(), "queue", prefetch=1)
    consuming.take(1)
    child = os.fork()
    if child == 0:
        try:
            consuming.channel.leave()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    assert tables.held == 1


def test_a_consumer_that_beats_keeps_its_messages(connect: Connect, tables: Tables) -> None:
    publish(connect(), "queue", "mine")
    busy = Consuming(connect(consumer_timeout=0.6), "queue", prefetch=1)
    busy.take(1)
    other = Consuming(connect(consumer_timeout=0.6), "queue", prefetch=1)
    other.drain(2 * WHOLE_S)  # and does nothing else
    assert other.messages == []
    busy.messages[0].ack()
    busy.drain(0.05)
    assert tables.all == 0


def test_ends_are_carried_out_though_the_loop_was_left(connect: Connect, tables: Tables) -> None:
    """In a warm stop of prefork Celery's event loop runs no more, and tasks end for as long as they last."""
    publish(connect(), "queue", *range(6))
    consuming = Consuming(connect(), "queue", prefetch=6)
    consuming.take(6)
    consuming.channel.connection.has_loop = True
    for number in range(3):  # one of them could meet a beat, which looks for ends too
        consuming.messages[2 * number].ack()
        wait_until(lambda: tables.all == 5 - number, timeout=0.5, message="it to be removed")  # noqa: B023
        consuming.messages[2 * number + 1].requeue()
        wait_until(lambda: tables.waiting == number + 1, timeout=0.5, message="it to be free")  # noqa: B023


def test_without_a_session_of_its_own_a_consumer_looks_and_beats(
    connect: Connect, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        own_executor, "read_settings", lambda executor: (0, [])
    )  # another process than the connect has reported
    consuming = Consuming(connect(), "queue", prefetch=2)
    consuming.drain(0.3)
    assert not consuming.channel.connection._heart.listens
    assert tables.one("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0
    publish(connect(), "queue", 1)
    assert consuming.take(1, timeout=2) == [1]


def test_a_pipe_that_is_written_while_it_is_drained_can_be_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Pipe()
    read = os.read

    def written_before(descriptor: int, size: int) -> bytes:
        pipe.write()
        return read(descriptor, size)

    pipe.write()
    with monkeypatch.context() as patch:
        patch.setattr(os, "read", written_before)
        pipe.drain()
    pipe.write()
    assert select.select([pipe.fileno()], [], [], 0)[0]
    pipe.drain()
    assert not select.select([pipe.fileno()], [], [], 0)[0]
    pipe.close()


# -- what a look costs -----------------------------------------------------------------------------------------------


def test_a_fetch_reads_by_queue_and_priority_also_where_there_is_but_one(connect: Connect, tables: Tables) -> None:
    publish(connect(), "queue", *range(200))
    tables.one("WITH gone AS (DELETE FROM broker_messages WHERE id %% 100 > 0 RETURNING 1) SELECT count(*) FROM gone")
    tables.analyse()
    consuming = Consuming(connect(), "queue", prefetch=2)
    consuming.take(2)
    consuming.connection.close()  # a session that ends reports what it has read
    scans = "SELECT idx_scan FROM pg_stat_user_indexes WHERE indexrelname = 'broker_messages_ready_idx'"
    wait_until(lambda: tables.one(scans) >= HIGHEST_PRIORITY, message="each priority to be read by the index")


def test_a_fetch_changes_no_index(connect: Connect, tables: Tables) -> None:
    publish(connect(), "queue", *range(30))
    consuming = Consuming(connect(), "queue", prefetch=30)
    consuming.take(30)
    consuming.connection.close()  # gives back; and a session that ends reports its statistics

    def shares() -> list[int]:
        columns = "pg_stat_clear_snapshot()::text || n_tup_upd || ' ' || n_tup_hot_upd"
        found = tables.one(f"SELECT {columns} FROM pg_stat_user_tables WHERE relname = 'broker_messages'")
        return [int(number) for number in found.split()]

    wait_until(lambda: shares()[0] == 60, message="30 fetched and given back")
    assert shares()[1] >= 54, "but where a page is full"


def test_a_turn_sees_nothing_below_its_bounds(connect: Connect, tables: Tables) -> None:
    publish(connect(), "queue", 1, 2)
    low = tables.one("SELECT max(id) FROM broker_messages")
    assert [row.id for row in taken(connect, low)] == [low]
    assert tables.one("SELECT id FROM broker_messages") < low


def test_a_message_of_an_unknown_consumer_is_free_once_it_is_held_for_a_second(
    connect: Connect, tables: Tables
) -> None:
    """Whoever has just taken it may be registered since the statement began."""
    publish(connect(), "queue", 1)
    tables.run("UPDATE broker_messages SET holder = 12345, held_at = now() + interval '1 min'")
    assert not taken(connect)
    tables.run("UPDATE broker_messages SET held_at = now() - interval '1 min'")
    assert len(taken(connect)) == 1


def taken(connect: Connect, low: int = 0) -> Sequence[Any]:
    """What one statement takes out of the queue, from an id on."""
    watermarks = [messages.Watermark("queue", 0, low)]
    return connect().default_channel.link.run(
        "take", lambda executor: messages.take(executor, watermarks=watermarks, room=8, reads=False)
    )


def test_a_late_commit_below_the_bound_is_found(connect: Connect, database_url: str) -> None:
    with psycopg.connect(database_url) as slow:
        slow.execute(
            "INSERT INTO sidejob.broker_messages (queue, priority, headers, properties, body) "
            "VALUES ('queue', 0, '{}', "
            """'{"content-type": "application/json", "content-encoding": "utf-8", "delivery_info": {}}', '"slow"')"""
        )
        publish(connect(), "queue", "fast")
        consuming = Consuming(connect(), "queue", prefetch=10)
        assert consuming.take(1) == ["fast"]
        slow.commit()
    assert consuming.take(1, timeout=3 * WHOLE_S) == ["slow"]


def test_a_transient_message_of_a_topic_goes_to_who_listens(connect: Connect, tables: Tables) -> None:
    topic = Exchange("topic", type="topic")
    listening = Consuming(
        connect(), Queue("listening", topic, routing_key="log.#", auto_delete=True, durable=False), no_ack=True
    )
    durable = Consuming(connect(), Queue("durable", topic, routing_key="log.*.error"))
    with connect().Producer() as producer:
        for key in ("log.shop.error", "log.shop.info", "other"):
            producer.publish(key, exchange=topic, routing_key=key, declare=[topic], delivery_mode=1)
    assert sorted(listening.take(2)) == ["log.shop.error", "log.shop.info"]
    assert durable.take(1) == ["log.shop.error"]
    assert tables.one("SELECT count(*) FROM broker_broadcasts") == 2, "what nobody listens to is not written"


@pytest.mark.timeout(60)
def test_no_pattern_of_who_listens_takes_long(connect: Connect) -> None:
    topic, slow = Exchange("topic", type="topic"), ".".join("#" * 12) + ".end"
    queues = [Queue(key, topic, routing_key=key, auto_delete=True, durable=False) for key in (slow, "#")]
    listening = Consuming(connect(), *queues, no_ack=True)
    with connect().Producer() as producer:
        producer.publish("long", exchange=topic, routing_key=".".join("a" * 60), declare=[topic], delivery_mode=1)
    assert listening.take(1) == ["long"]


def test_nobody_rings_for_events_and_all_arrive(connect: Connect) -> None:
    topic = Exchange("events", type="topic")
    listening = Consuming(connect(), Queue("watch", topic, routing_key="#", auto_delete=True), no_ack=True)
    listening.drain()
    sending = connect()
    with sending.Producer() as producer:
        ring, rung = sending.default_channel.link.ring, []
        sending.default_channel.link.ring = lambda payload: (rung.append(payload), ring(payload))
        for number in range(100):
            producer.publish(number, exchange=topic, routing_key="one", declare=[topic], delivery_mode=1)
            listening.drain_once(0.001)
    listening.take(100 - len(listening.messages))
    assert sorted(listening.bodies) == list(range(100))
    assert not rung


def test_events_of_who_consumes_go_with_its_beats_in_order(connect: Connect, tables: Tables) -> None:
    """They are no statements of their own; what waits when the last heart ends is sent all the same."""
    topic = Exchange("events", type="topic")
    listening = Consuming(connect(), Queue("watch", topic, routing_key="#", auto_delete=True), no_ack=True)
    listening.drain()
    working, sending = Consuming(connect(), "queue"), connect()
    run, names = sending.default_channel.link.run, []
    sending.default_channel.link.run = lambda name, work: (names.append(name), run(name, work))[1]
    with sending.Producer() as producer:
        for number in range(100):
            producer.publish(number, exchange=topic, routing_key="one", declare=[topic], delivery_mode=1)
        listening.take(100)
        assert listening.bodies == list(range(100))
        producer.publish("last", exchange=topic, routing_key="one", delivery_mode=1)
    assert "broadcast" not in names
    working.connection.close()
    listening.connection.close()
    assert tables.one("SELECT count(*) FROM broker_broadcasts") == 101


def test_a_broadcast_that_is_no_message_is_left_out(connect: Connect, tables: Tables) -> None:
    fanout = Exchange("all", type="fanout")
    listening = Consuming(connect(), Queue("mine", fanout, expires=10))
    tables.run(
        "INSERT INTO broker_broadcasts (exchange, routing_key, headers, properties, body) "
        "VALUES ('all', '', '{', '{}', '1')"
    )
    with connect().Producer() as producer:
        producer.publish("good", exchange=fanout, declare=[fanout])
    assert listening.take(1) == ["good"]


@pytest.mark.parametrize("end", ["ack", "requeue", "nothing"])
def test_a_broadcast_may_be_acknowledged_and_comes_once(connect: Connect, tables: Tables, end: str) -> None:
    fanout = Exchange("all", type="fanout")
    listening = Consuming(connect(), Queue("mine", fanout, expires=10), "own")
    with connect().Producer() as producer:
        producer.publish("told", exchange=fanout, declare=[fanout])
    assert listening.take(1) == ["told"]
    if end != "nothing":
        getattr(listening.messages[0], end)()
    publish(connect(), "own", "next")
    assert listening.take(1) == ["next"]
    listening.messages[1].ack()
    listening.close()
    assert tables.all == 0


def test_the_use_of_queues_is_noted_that_would_be_missed(connect: Connect) -> None:
    topic, fanout = Exchange("events", type="topic"), Exchange("all", type="fanout")
    queues = [Queue("reply", expires=10), Queue("watch", topic, routing_key="#", expires=10)]
    consuming = Consuming(connect(), *queues, Queue("pidbox", fanout, expires=10))
    transport = consuming.channel.connection
    transport.topology._used_at.clear()  # the heart has noted them meanwhile
    assert sorted(transport.expiring_queues()) == ["reply", "watch"]
    assert transport.expiring_queues() == []


def test_queues_are_found_by_other_connections(connect: Connect) -> None:
    direct = Exchange("replies", type="direct")
    Queue("mine", direct, routing_key="me")(connect().default_channel).declare()
    with connect().Producer() as producer:
        producer.publish("hello", exchange=direct, routing_key="me", declare=[direct])
    assert Consuming(connect(), "mine").take(1) == ["hello"]
