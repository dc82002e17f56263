"""A message that kills its workers comes back so often and no more; then a person decides, or the row that it has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from kombu import Connection, Consumer, Queue

from celery_sidejob import RunningJob
from celery_sidejob.hooks.broker import broker_check
from celery_sidejob.store.broker import dead as dead_rows
from celery_sidejob.transport import message_buried
from celery_sidejob.transport.postgres.dead import DeadList, bound
from tests.tools.apps import make_app
from tests.tools.commands import Said, ask
from tests.tools.databases import Databases
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes
from tests.transport.consuming import Consuming, publish
from tests.transport.dead_lists import check_reading_on
from tests.transport.postgres.conftest import Tables

Connect = Callable[..., Connection]


class Deaths:
    """Consumers that die with what they hold."""

    def __init__(self, connect: Connect, tables: Tables) -> None:
        self._connect = connect
        self._tables = tables

    def take(self, count: int, *, prefetch: int = 0, **options: Any) -> Consuming:
        """A consumer that has taken so many messages of the queue."""
        consuming = Consuming(self._connect(**options), "queue", prefetch=prefetch or count)
        consuming.take(count)
        return consuming

    def die(self, consuming: Consuming) -> None:
        """Be as killed a while ago: nobody says goodbye, and what it held is free."""
        transport = consuming.connection.transport
        transport._heart.stop()
        self._tables.one("DELETE FROM broker_consumers WHERE id = %s RETURNING id", transport.consumer)
        self._tables.one(
            "WITH aged AS (UPDATE broker_messages SET held_at = held_at - interval '1 min' WHERE holder = %s "
            "RETURNING id) SELECT count(*) FROM aged", transport.consumer,
        )  # fmt: skip

    def kill(self, count: int, **options: Any) -> None:
        """Take so many, and die."""
        self.die(self.take(count, **options))


@pytest.fixture
def deaths(connect: Connect, tables: Tables) -> Deaths:
    return Deaths(connect, tables)


@pytest.fixture
def killed(connect: Connect, deaths: Deaths, tables: Tables) -> Any:
    """Has so many messages of the queue, the oldest, end in the dead list."""

    def kill(count: int = 1) -> None:
        before = dead_count(tables)
        deaths.kill(count, delivery_limit=1)
        consuming = Consuming(connect(delivery_limit=1), "queue", prefetch=count)
        wait_until(
            lambda: not consuming.drain() and dead_count(tables) == before + count, message="them to be given up"
        )
        consuming.close()

    return kill


def dead_count(tables: Tables) -> int:
    return int(tables.one("SELECT count(*) FROM broker_dead"))


# -- what is counted ---------------------------------------------------------------------------------------------------


def test_a_message_is_given_up_after_so_many_deaths(
    connect: Connect, deaths: Deaths, tables: Tables, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Any] = []
    receiver = message_buried.connect(lambda **facts: told.append((facts["queue"], facts["task_id"])))
    publish(connect(), "queue", 1, headers={"id": "one"})
    for count in range(3):
        consuming = deaths.take(1, delivery_limit=3)
        assert consuming.messages[0].properties.get("delivery_count") == (count or None)
        deaths.die(consuming)
    consuming = Consuming(connect(delivery_limit=3), "queue", prefetch=1)
    wait_until(lambda: not consuming.drain_once() and dead_count(tables) == 1, message="it to be given up")
    message_buried.disconnect(receiver)
    assert (tables.all, told) == (0, [("queue", "one")])
    assert "A message of queue 'queue' (task one) is dead: it came back 3 times after it had begun" in caplog.text


def test_there_may_be_no_limit(connect: Connect, deaths: Deaths, tables: Tables) -> None:
    publish(connect(), "queue", 1)
    tables.one("UPDATE broker_messages SET deaths = 1000, returns = 1000 RETURNING id")
    deaths.kill(1, delivery_limit=None)
    assert Consuming(connect(delivery_limit=None), "queue", prefetch=1).take(1) == [1]


def test_what_a_consumer_leaves_or_has_not_begun_is_not_counted(
    connect: Connect, deaths: Deaths, tables: Tables
) -> None:
    publish(connect(), "queue", 1)
    for _ in range(3):
        deaths.take(1, delivery_limit=1).close()
    leaving = deaths.take(1, delivery_limit=1)
    leaving.channel.give_back(leaving.messages[0].delivery_tag)
    leaving.drain()
    assert tables.one("SELECT returns FROM broker_messages") == 0


def test_a_message_over_which_its_consumer_ends_is_counted(connect: Connect, tables: Tables) -> None:
    publish(connect(), "queue", 1, 2)

    def fail(message: Any) -> None:
        raise KeyError(message.payload)

    with connect() as connection:
        channel = connection.channel()
        with Consumer(channel, [Queue("queue", routing_key="queue")], on_message=fail), pytest.raises(KeyError):
            connection.drain_events(timeout=10)
    counted = "SELECT array_agg(returns ORDER BY id) FROM broker_messages WHERE holder IS NULL"
    wait_until(lambda: tables.waiting == 2, message="both to be given back")
    assert tables.one(counted) == [1, 0]


def test_a_rejection_is_counted_unless_a_row_counts(connect: Connect, deaths: Deaths, tables: Tables) -> None:
    publish(connect(), "queue", 1)
    publish(connect(), "queue", 2, headers={"sidejob_durable": {}})
    consuming = deaths.take(2, delivery_limit=2)
    for message in consuming.messages:
        message.reject(requeue=True)
    assert consuming.take(2) == [1, 2]
    for message in consuming.messages[2:]:
        message.reject(requeue=True)
    assert consuming.take(1) == [2]
    assert dead_count(tables) == 1


def test_a_task_that_kills_each_process_of_the_pool_is_given_up(
    processes: Processes, broker_url: str, client: Celery, record: Record, tables: Tables
) -> None:
    settings = json.dumps({"broker_transport_options": {"delivery_limit": 2}})
    env = {"BROKER_URL": broker_url, "SETTINGS": settings, **record.env}
    processes.start_worker("tests.transport.worker_app", env=env)
    client.send_task("kill")
    wait_until(lambda: dead_count(tables) == 1, timeout=30, message="it to be given up")
    assert len(record.of("kill")) == 2


def test_a_task_that_kills_each_worker_is_given_up_and_the_others_run(
    processes: Processes, broker_url: str, client: Celery, record: Record, tables: Tables
) -> None:
    settings = json.dumps({"broker_transport_options": {"delivery_limit": 2}})
    env = {"BROKER_URL": broker_url, "SETTINGS": settings, **record.env}
    client.send_task("kill")
    names = [f"note{number}" for number in range(3)]
    for name in names:
        client.send_task("note", (name,))
    for deaths in (1, 2):
        worker = processes.start_worker("tests.transport.worker_app", env=env, pool="solo", ready_timeout=None)
        wait_until(lambda worker=worker: not worker.alive, timeout=20, message="it to kill its worker")
        assert len(record.of("kill")) == deaths
    processes.start_worker("tests.transport.worker_app", env=env, pool="solo")
    wait_until(lambda: dead_count(tables) == 1, message="it to be given up")
    for name in names:
        record.wait_for(name)
    wait_until(lambda: tables.all == 0, message="all to be acknowledged")
    assert len(record.of("kill")) == 2
    assert [len(record.of(name)) for name in names] == [1, 1, 1]


# -- who is to blame ---------------------------------------------------------------------------------------------------


def test_what_came_back_from_a_death_is_delivered_alone(connect: Connect, deaths: Deaths, tables: Tables) -> None:
    publish(connect(), "queue", 1, 2, 3)
    deaths.kill(2)
    alone = Consuming(connect(), "queue", prefetch=3)
    assert alone.take(1) == [1]
    alone.drain()
    other = Consuming(connect(), "queue", prefetch=3)
    assert other.take(1) == [2]
    assert (alone.bodies, tables.waiting) == ([1], 1), "the third waits for one of them"
    alone.messages[0].ack()
    assert alone.take(1) == [3]


def test_one_that_is_hardly_to_blame_is_alone_for_a_while_only(
    connect: Connect, deaths: Deaths, tables: Tables
) -> None:
    publish(connect(), "queue", 1, 2)
    deaths.kill(1)
    mild = Consuming(connect(consumer_timeout=0.6), "queue", prefetch=2)
    assert mild.take(2) == [1, 2]

    mild.close()
    tables.one("UPDATE broker_messages SET deaths = 10, returns = 10 WHERE deaths = 1 RETURNING id")
    grave = Consuming(connect(consumer_timeout=0.6), "queue", prefetch=2)
    assert grave.take(1) == [1]
    grave.drain(timeout=1.5)
    assert grave.bodies == [1]


def test_what_stands_before_it_is_delivered_first(connect: Connect, deaths: Deaths) -> None:
    publish(connect(), "queue", 1)
    deaths.kill(1)
    for body in (2, 3):
        publish(connect(), "queue", body, priority=5)
    consuming = Consuming(connect(), "queue", prefetch=3)
    assert consuming.take(2) == [2, 3]
    assert consuming.take(1) == [1]


# -- the list ----------------------------------------------------------------------------------------------------------


def test_it_is_read_on_from_a_place_and_anew_if_something_before_it_is_gone(
    connect: Connect, killed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_rows, "PAGE", 2)
    check_reading_on(connect, killed, DeadList.of(connect().default_channel))


def test_it_keeps_the_newest_and_none_for_ever(
    connect: Connect, tables: Tables, killed: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_rows, "PAGE", 2)
    for number in range(6):
        publish(connect(), "queue", number, headers={"id": f"task{number}"})
    killed(6)
    tables.one(
        "UPDATE broker_dead SET died_at = now() - interval '91 days' WHERE headers LIKE '%%task0%%' RETURNING id"
    )
    transport = connect().default_channel.connection
    run = transport.link.run
    bound(run, limit=None, days=None)
    assert dead_count(tables) == 6
    transport.bound_dead_list(run)
    assert "(task task0) was dropped from the dead list" in caplog.text
    assert dead_count(tables) == 5
    bound(run, limit=2, days=None)
    left = tables.one("SELECT array_agg(headers::json ->> 'id' ORDER BY id) FROM broker_dead")
    assert left == ["task4", "task5"]


def test_a_person_sees_retries_and_deletes_them(connect: Connect, tables: Tables, killed: Any, broker_url: str) -> None:
    def asked(*words: object) -> Said:
        with Celery("plain", broker=broker_url, set_as_current=False) as app:
            return ask(app, "transport", "dead", *words)

    for number in range(3):
        publish(connect(), "queue", number, headers={"id": f"task{number}", "task": "shop.mail"}, priority=3)
    killed(3)
    found = asked("list")
    assert (found.code, len(found.lines)) == (0, 4)
    assert all(sum(f"queue shop.mail task{number}" in line for line in found.lines) == 1 for number in range(3))
    assert "There are more" in asked("list", "--limit", 1).err

    publish(connect(), "queue", "next", priority=3)
    assert asked("retry", "task1").lines == ["1 message retried."]
    consuming = Consuming(connect(), "queue", prefetch=2)
    assert consuming.take(2) == ["next", 1]
    assert "delivery_count" not in consuming.messages[1].properties
    assert asked("retry", "task1").code == 1
    for verb in ("list", "retry", "delete"):
        assert asked(verb, "--queue", "queues").err == ("Nothing matches. Did you mean 'queue'? There are: 'queue'.\n")
    assert "Delete 2 messages of the dead list for good?" in asked("delete", "--queue", "queue").err
    assert asked("delete", "--queue", "queue", "--yes", "--json").document == {"deleted": 2}
    assert dead_count(tables) == 0


def test_doctor_says_who_holds_messages(connect: Connect, broker_url: str, database_url: str) -> None:
    publish(connect(), "queue", 1)
    assert Consuming(connect(), "queue").take(1) == [1]
    with make_app("shop", broker=broker_url, sidejob_database_url=database_url) as app:
        (found,) = [one for one in broker_check.findings(app) if one.check == "transport"]
    assert found.found == "1 consumer of sidejobpg:// holds 1 message; 0 are in the dead list"


def test_people_see_how_long_the_queues_are(
    connect: Connect, deaths: Deaths, killed: Any, tables: Tables, broker_url: str, database_url: str
) -> None:
    publish(connect(), "queue", 1, 2)
    killed(2)
    publish(connect(), "queue", 1, 2, 3)
    publish(connect(), "queue", 4, priority=9)
    publish(connect(), "queue", 5, headers={"eta": "2999-01-01T00:00:00+00:00"})
    Consuming(connect(), "empty").drain()
    holding = deaths.take(2)
    with make_app("shop", broker=broker_url, sidejob_database_url=database_url) as app:
        said = ask(app, "transport", "queues")
        assert [line.split() for line in said.lines] == [
            ["Queue", "Ready", "Held", "Later"], ["empty", "0", "0", "0"], ["queue", "2", "2", "1"]
        ]  # fmt: skip
        assert ask(app, "transport", "queues", "--json").document[1] == {
            "name": "queue", "ready": 2, "held": 2, "later": 1
        }  # fmt: skip
        (found,) = [one for one in broker_check.findings(app) if one.check == "transport"]
        assert (found.level, found.found) == (
            "warning", "3 consumers of sidejobpg:// hold 2 messages; 2 are in the dead list"
        )  # fmt: skip
        assert "this command is for sidejob://." in ask(app, "transport", "release").err
    holding.close()


# -- rows of the store -------------------------------------------------------------------------------------------------


@pytest.fixture
def other_url(databases: Databases, database_template: str) -> Iterator[str]:
    """A database with our schema that is not the broker."""
    with databases.fresh(template=database_template) as name:
        yield databases.url_of(name)


@pytest.fixture
def app(other_url: str, broker_url: str) -> Iterator[Celery]:
    """An app with a durable task and a job, and with a store that is not the broker."""
    made = make_app(
        "shop", broker=broker_url, result_backend="cache+memory://", sidejob_database_url=other_url,
        sidejob_durable_tasks=["shop.*"], task_default_queue="queue",
    )  # fmt: skip

    @made.sidejob.task(name="job")
    def job(job: RunningJob) -> None:
        """Never run here."""

    made.job = job
    yield made
    made.sidejob.close()
    made.close()


def test_the_sweeper_settles_what_has_a_row_and_leaves_the_rest(app: Celery, killed: Any, tables: Tables) -> None:
    app.send_task("shop.mail", task_id="one")
    app.send_task("ordinary", task_id="two")
    app.job.enqueue()
    killed(3)
    assert app.sidejob.stats()["dead_list"] == 3

    app.sidejob.poll()

    assert tables.one("SELECT array_agg(headers::json ->> 'id') FROM broker_dead") == ["two"]
    for _ in range(2):
        app.sidejob.poll()
    (entry,) = app.sidejob.dead.list()
    assert (entry.task_id, entry.reason, entry.group) == ("one", "lost", "PoisonedMessage")


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ("headers", '{"id": "one", "amount": {"__type__": "of another app", "__value__": 1}}'),
        ("headers", "{"),
        ("headers", "null"),
        ("properties", "[]"),
        ("properties", '{"body_encoding": "base64", "delivery_tag": "1", "delivery_info": {}}'),
        ("properties", '{"content-encoding": 5, "delivery_info": {}}'),
        ("properties", '{"content-type": ["text/plain"], "delivery_info": {}}'),
        ("properties", '{"delivery_info": "queue"}'),
        ("headers", '{"task": ["mail"], "id": "one"}'),
        ("headers", '{"task": "mail", "id": {}}'),
        ("headers", '{"task": "mail", "id": "one", "timelimit": 5}'),
    ],
)
def test_what_is_no_message_is_given_up_and_ends_nobody(
    connect: Connect, tables: Tables, broker_url: str, column: str, text: str
) -> None:
    publish(connect(), "queue", 1, 2, 3)
    tables.run(f"UPDATE broker_messages SET {column} = %s, returns = 1, deaths = 1 WHERE body <> '3'", text)
    with connect() as getting:
        got = getting.channel().basic_get("queue")
        assert (got.payload, dead_count(tables)) == (3, 2)
        got.reject(requeue=True)
    tables.run("INSERT INTO broker_messages (queue, priority, headers, properties, body) "
               "SELECT queue, 9, headers, properties, body FROM broker_dead")  # fmt: skip
    assert Consuming(connect(), "queue", prefetch=3).take(1) == [3]
    assert dead_count(tables) == 4
    reasons = {one.reason for one in DeadList.of(connect().channel())}
    assert len(reasons) == 1
    assert reasons.pop().startswith("it is no message: ")
