"""`sidejob.subscribe`: what is announced, over Redis and over Postgres, and who waits for whom."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import redis
import sqlalchemy
from sqlalchemy.orm import Session

from celery_sidejob import InvalidChannelError, InvalidValueError, RunningJob
from celery_sidejob.announcements.announcer import MOST, Announcer
from celery_sidejob.announcements.subscription import Subscription
from celery_sidejob.announcements.ways import LISTENING, PIECE, name_of, parts_of
from celery_sidejob.operations.audience import KNOWN_S
from celery_sidejob.store import audience
from celery_sidejob.store.borrowed.of_sqlalchemy import AFTER_COMMIT
from tests.tools.databases import SCHEMA
from tests.tools.in_process import EMPTY, Stage
from tests.tools.waiting import wait_until

WAYS = ("postgres", "redis")


@pytest.fixture(params=WAYS)
def told(request: pytest.FixtureRequest, stage_database_url: str, store_url: Callable[[str], str]) -> Iterator[Stage]:
    """An app whose announcements go over Postgres, which has no Redis, or over Redis."""
    broker = request.getfixturevalue("redis_url") if request.param == "redis" else "memory://"
    made = Stage(store_url(stage_database_url), broker=broker)
    try:
        yield made
        assert made.broken_rules() == []
    finally:
        made.sql(EMPTY)
        made.close()


def heard(subscription: Subscription, count: int) -> list[tuple[str, Any]]:
    """The next announcements, as plain pairs."""
    return [tuple(next(subscription)) for _ in range(count)]


def test_a_message_is_heard_on_exactly_its_channel(told: Stage) -> None:
    sidejob = told.sidejob
    with sidejob.subscribe("/a", "/a/b", timeout=10) as subscription:
        sidejob.publish("/a/b/c", "not heard")
        sidejob.publish("/a/b", {"n": [1, None]})
        sidejob.publish("/a", 2)
        found = next(subscription)
        assert (found.channel, found.message) == ("/a/b", {"n": [1, None]})
        assert next(iter(subscription)) == ("/a", 2)
    assert list(subscription) == []


def test_what_others_publish_there_and_is_no_json_is_left_out(redis_url: str, stage_database_url: str) -> None:
    stage = Stage(stage_database_url, broker=redis_url)
    with closing(stage), closing(redis.Redis.from_url(redis_url)) as client:
        with stage.sidejob.subscribe("/a", timeout=10) as subscription:
            for text in ("{", b"\xff", "[" * 100_000, '"this is"'):
                client.publish("/a", text)
            assert next(subscription) == ("/a", "this is")
        stage.sql(EMPTY)


@pytest.mark.parametrize("payload", ["", "junk", "a.b 1", "a.b.c.d 1", "a.x.1 1", "a.0.x 1", "a.5.9 1", "a.-1.0 1"])
def test_what_others_notify_interrupts_no_subscription(stage: Stage, payload: str) -> None:
    with stage.sidejob.subscribe("/a", timeout=10) as subscription:
        stage.sql("SELECT pg_notify(%s, %s)", name_of(SCHEMA, "/a"), payload)
        stage.sidejob.publish("/a", 1)
        assert next(subscription) == ("/a", 1)


def test_what_finds_no_room_in_the_server_is_counted(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audience, "FULLEST", 0.0)
    with stage.sidejob.subscribe("/a"):
        stage.sidejob.publish("/a", 1)
        stage.runtime.announcer.flush(10)
        assert stage.runtime.announcer.dropped == 1


def test_a_quiet_thread_ends_and_the_next_announcement_has_another(
    told: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_sidejob.announcements.announcer.IDLE_S", 0.05)
    before = set(threading.enumerate())

    def ours() -> list[threading.Thread]:
        now = set(threading.enumerate()) - before
        return [thread for thread in now if thread.name == "sidejob-announcements"]

    with told.sidejob.subscribe("/a", timeout=30) as subscription:
        for number in range(3):
            told.sidejob.publish("/a", number)
            assert next(subscription) == ("/a", number)
            wait_until(lambda: not ours(), message="the end of the thread")


def test_one_who_waits_for_a_moment_again_and_again_is_not_remembered(stage: Stage) -> None:
    with stage.sidejob.subscribe("/a", timeout=0.001) as subscription:

        async def look() -> None:
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await anext(subscription)
                assert subscription._waiting == []
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await anext(subscription)
            assert subscription._waiting == []

        asyncio.run(look())


def test_jobs_announce_their_status_and_their_deletion(told: Stage) -> None:
    sidejob = told.sidejob
    job = told.job()
    told.runtime.announcer.flush(10)
    with sidejob.subscribe(f"/sidejob/job/{job.id}", timeout=10) as subscription:
        told.run(job)
        job.publish("hello")
        job.run()
        told.run(job)
        job.terminate()
        told.drain()
        job.refresh().delete()
        said = [message for _, message in heard(subscription, 9)]
    assert [one.get("status", one) if isinstance(one, dict) else one for one in said] == [
        "running", "completed", "hello", "queued", "running", "completed", "terminating", "terminated",
        {"deleted": True},
    ]  # fmt: skip
    changes = [one["change"] for one in said if isinstance(one, dict) and "status" in one]
    assert changes == sorted(set(changes))


def test_of_a_tree_that_is_deleted_the_lowest_is_told_first_and_nothing_is_left_then(told: Stage) -> None:
    root = told.job()
    child = root.enqueue(told.idle, child_name="child")
    leaf = child.enqueue(told.idle, child_name="leaf")
    root.terminate(recursive=True)
    told.drain()
    told.runtime.announcer.flush(10)
    tree = (root, child, leaf)
    with told.sidejob.subscribe(*(f"/sidejob/job/{job.id}" for job in tree), timeout=10) as subscription:
        assert root.delete()
        assert heard(subscription, 3) == [(f"/sidejob/job/{job.id}", {"deleted": True}) for job in reversed(tree)]
        assert told.sidejob.jobs() == []


def test_a_task_may_keep_its_status_to_itself(told: Stage) -> None:
    @told.task(name="quiet", publish_status=False)
    def quiet(job: RunningJob) -> None:
        job.step("charge", str)

    loud = told.task(nothing, name="loud")
    first, second = quiet.enqueue(), loud.enqueue()
    told.runtime.announcer.flush(10)
    with told.sidejob.subscribe(*(f"/sidejob/job/{job.id}" for job in (first, second)), timeout=10) as subscription:
        told.run(first)
        told.run(second)
        assert heard(subscription, 1) == [(f"/sidejob/job/{second.id}", {"status": "running", "change": 1})]


def test_what_a_unit_publishes_is_announced_with_its_commit(told: Stage) -> None:
    def body(job: RunningJob) -> None:
        told.sidejob.publish("/a", 1)
        job.output("o").write(2)
        told.outside(lambda: told.sidejob.publish("/a", 0))
        job.checkpoint()
        told.sidejob.publish("/a", "discarded")
        raise ValueError("no")

    job = told.job(body, outports={"o": {"channels": ["/a"]}})
    with told.sidejob.subscribe("/a", timeout=10) as subscription:
        with pytest.raises(ValueError, match="no"):
            told.run(job)
        told.sidejob.publish("/a", "last")
        assert [message for _, message in heard(subscription, 4)] == [0, 1, 2, "last"]


@pytest.fixture
def engine(told: Stage) -> Iterator[sqlalchemy.Engine]:
    made = sqlalchemy.create_engine(told.database_url.replace("postgresql://", "postgresql+psycopg://", 1))
    yield made
    made.dispose()


def test_a_message_in_the_caller_s_transaction_is_announced_after_its_commit(
    told: Stage, engine: sqlalchemy.Engine
) -> None:
    with told.sidejob.subscribe("/a", timeout=10) as subscription:
        with engine.connect() as connection:
            told.sidejob.publish("/a", "rolled back", transaction=connection)
            connection.rollback()
            told.sidejob.publish("/a", "committed", transaction=connection)
            connection.commit()
        assert heard(subscription, 1) == [("/a", "committed")]


@pytest.mark.parametrize("owner", [sqlalchemy.Connection, Session])
def test_what_a_savepoint_takes_back_is_not_announced(told: Stage, engine: sqlalchemy.Engine, owner: Any) -> None:
    with told.sidejob.subscribe("/a", timeout=10) as subscription, owner(engine) as transaction:

        def publish(message: str) -> None:
            told.sidejob.publish("/a", message, transaction=transaction)

        with transaction.begin():
            unheard_of = transaction.begin_nested()
            publish("first")
            unheard_of.rollback()
            publish("1")
            outer = transaction.begin_nested()
            publish("outer")
            with transaction.begin_nested():
                publish("inner, released")
            outer.rollback()
            with transaction.begin_nested():
                publish("2")
                inner = transaction.begin_nested()
                publish("inner, rolled back")
                inner.rollback()
            publish("3")
        publish("4")
        transaction.commit()
        assert [message for _, message in heard(subscription, 4)] == ["1", "2", "3", "4"]


@pytest.mark.parametrize("mode", ["create_savepoint", "conditional_savepoint", "rollback_only"])
def test_a_session_that_joins_a_transaction_announces_with_its_commit(
    told: Stage, engine: sqlalchemy.Engine, mode: Any
) -> None:
    with told.sidejob.subscribe("/a", timeout=10) as subscription, engine.connect() as outer:

        def publish(message: str) -> None:
            with Session(outer, join_transaction_mode=mode) as session:
                told.sidejob.publish("/a", message, transaction=session)
                session.commit()

        with outer.begin() as transaction:
            publish("rolled back")
            transaction.rollback()
        with outer.begin():
            savepoint = outer.begin_nested()
            publish("in a savepoint")
            savepoint.rollback()
            told.sidejob.publish("/a", 1, transaction=outer)
            publish("2")
        assert [message for _, message in heard(subscription, 2)] == [1, "2"]


def test_a_session_that_is_closed_without_a_commit_announces_nothing(told: Stage, engine: sqlalchemy.Engine) -> None:
    with told.sidejob.subscribe("/a", timeout=10) as subscription, Session(engine) as session:
        told.sidejob.publish("/a", "closed", transaction=session)
        session.close()
        told.sidejob.publish("/a", "committed", transaction=session)
        session.commit()
        assert heard(subscription, 1) == [("/a", "committed")]


def test_a_commit_that_is_refused_announces_nothing(told: Stage, engine: sqlalchemy.Engine) -> None:
    told.sql("CREATE TABLE once (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    try:
        with told.sidejob.subscribe("/a", timeout=10) as subscription, engine.connect() as connection:
            connection.exec_driver_sql("INSERT INTO sidejob.once VALUES (1), (1)")
            told.sidejob.publish("/a", "refused", transaction=connection)
            with pytest.raises(sqlalchemy.exc.IntegrityError):
                connection.commit()
            connection.rollback()
            for thread in threading.enumerate():
                if thread.name == AFTER_COMMIT:
                    thread.join(10)
            told.sidejob.publish("/a", "committed", transaction=connection)
            connection.commit()
            assert heard(subscription, 1) == [("/a", "committed")]
    finally:
        told.sql("DROP TABLE once")


def test_large_and_strange_messages_arrive_whole(told: Stage) -> None:
    messages = ["x" * 100_000, "é€😀\0" * 5000, {"__type__": "datetime"}, "same", "same", ""]
    with told.sidejob.subscribe("/a", timeout=10) as subscription:
        for message in messages:
            told.sidejob.publish("/a", message)
        assert [message for _, message in heard(subscription, len(messages))] == messages


@pytest.mark.parametrize("text", ["", "a", "a" * PIECE, "a" * (PIECE + 1), "€" * PIECE, "😀" * PIECE])
def test_no_part_is_too_long_for_a_notification(text: str) -> None:
    parts = list(parts_of("k", text))
    assert all(len(part.encode()) < 8000 for part in parts)
    assert "".join(part.partition(" ")[2] for part in parts) == text
    assert len(set(parts)) == len(parts)


def test_nothing_comes_in_time(told: Stage) -> None:
    with told.sidejob.subscribe("/a", timeout=0.05) as subscription, pytest.raises(TimeoutError, match="/a within"):
        next(subscription)


def test_closing_ends_those_who_wait(told: Stage) -> None:
    subscription = told.sidejob.subscribe("/a")
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.extend(subscription))
    reader.start()
    told.sidejob.publish("/a", 1)
    wait_until(lambda: found)
    subscription.close()
    reader.join(10)
    assert not reader.is_alive()
    assert found == [("/a", 1)]
    told.sidejob.publish("/a", 2)
    assert list(subscription) == []


def test_in_asyncio(told: Stage) -> None:
    async def listen() -> list[Any]:
        found = []
        async with await asyncio.to_thread(told.sidejob.subscribe, "/a", timeout=10) as subscription:
            for number in range(3):
                await asyncio.to_thread(told.sidejob.publish, "/a", number)
            async for channel, message in subscription:
                found.append((channel, message))
                if len(found) == 3:
                    break
            waiting = asyncio.ensure_future(anext(subscription))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.to_thread(told.sidejob.publish, "/a", "after")
            found.append(tuple(await anext(subscription)))
        assert [one async for one in subscription] == []
        return found

    assert asyncio.run(listen()) == [("/a", 0), ("/a", 1), ("/a", 2), ("/a", "after")]


def test_bad_arguments_are_refused(stage: Stage) -> None:
    with pytest.raises(InvalidChannelError, match="at least one"):
        stage.sidejob.subscribe()
    with pytest.raises(InvalidChannelError, match="must begin"):
        stage.sidejob.subscribe("sums")
    with pytest.raises(InvalidValueError, match="timeout="):
        stage.sidejob.subscribe("/a", timeout="1")


def test_a_plain_client_of_redis_hears_the_plain_message(stage_database_url: str, redis_url: str) -> None:
    stage = Stage(stage_database_url, broker=redis_url)
    try:
        with redis.Redis.from_url(redis_url) as client, closing(client.pubsub()) as listener:
            listener.subscribe("/sums")
            assert listener.get_message(timeout=5)["type"] == "subscribe"
            stage.sidejob.publish("/sums", {"a": 1})
            assert wait_until(lambda: listener.get_message(timeout=1))["data"] == b'{"a":1}'
    finally:
        stage.close()


def test_a_plain_client_hears_of_jobs_if_it_is_marked(stage_database_url: str, redis_url: str) -> None:
    stage = Stage(stage_database_url, broker=redis_url)
    try:
        jobs = [stage.job() for _ in range(3)]
        with redis.Redis.from_url(redis_url) as client, closing(client.pubsub()) as listener:
            listener.subscribe(LISTENING, f"/sidejob/job/{jobs[2].id}")
            assert [listener.get_message(timeout=5)["type"] for _ in range(2)] == ["subscribe"] * 2
            way = stage.runtime.announcer.way
            wait_until(lambda: way.hears("/a") is None)  # which a subscription of ours waits for
            for job in jobs:
                stage.run(job)
            said = [wait_until(lambda: listener.get_message(timeout=1))["data"] for _ in range(2)]
            assert said == [b'{"status": "running", "change": 1}', b'{"status": "completed", "change": 3}']
    finally:
        stage.sql(EMPTY)
        stage.close()


def test_without_listeners_redis_is_asked_once_a_second(stage_database_url: str, redis_url: str) -> None:
    stage = Stage(stage_database_url, broker=redis_url)
    try:
        with redis.Redis.from_url(redis_url) as client:

            def commands(name: str) -> int:
                return int(client.info("commandstats").get(f"cmdstat_{name}", {}).get("calls", 0))

            announcer = stage.runtime.announcer
            announcer.announce("/sidejob/job/1", "1")
            assert announcer.flush(10)
            began, asked, published = time.monotonic(), commands("pubsub|numsub"), commands("publish")
            for number in range(20_000):
                announcer.announce(f"/sidejob/job/{number}", "1")
                announcer.announce("/sidejob/log", "1")
                announcer.may_be_heard("/a")
            assert announcer.flush(10)
            seconds = time.monotonic() - began
            assert commands("pubsub|numsub") - asked <= 2 * (1 + seconds / KNOWN_S)
            assert commands("publish") == published
            assert announcer.dropped == 0
    finally:
        stage.close()


def test_a_subscriber_that_does_not_read_loses_the_oldest(told: Stage) -> None:
    with told.sidejob.subscribe("/a", timeout=10) as subscription:
        announcer = told.runtime.announcer
        for number in range(MOST + 10):
            announcer.announce("/a", str(number))
            if number % 1000 == 0:
                assert announcer.flush(10)
        wait_until(lambda: subscription.dropped == 10 - announcer.dropped)
        assert announcer.dropped == 0
        assert next(subscription).message == 10


def test_a_signal_handler_announces_in_the_middle_of_an_announcement(told: Stage) -> None:
    announcer, lines = told.runtime.announcer, 0

    def handle(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_globals["__name__"] not in ("threading", Announcer.__module__):
            return None
        if event == "line":
            lines += 1
            announcer.announce("/a", "0")
        return handle

    def announce() -> None:
        sys.settrace(handle)
        announcer.announce("/a", "1")
        sys.settrace(None)

    with told.sidejob.subscribe("/a", timeout=10) as subscription:
        interrupted = threading.Thread(target=announce, daemon=True)
        interrupted.start()
        interrupted.join(10)
        assert not interrupted.is_alive(), "it waits for itself"
        assert lines > 5
        assert sorted(message for _, message in heard(subscription, lines + 1)) == [0] * lines + [1]


def test_several_subscriptions_and_the_end_of_one(told: Stage) -> None:
    first = told.sidejob.subscribe("/a", timeout=10)
    with told.sidejob.subscribe("/a", timeout=10) as second:
        told.sidejob.publish("/a", 1)
        assert heard(first, 1) == heard(second, 1) == [("/a", 1)]
        first.close()
        told.sidejob.publish("/a", 2)
        assert heard(second, 1) == [("/a", 2)]


def test_the_registry_of_a_queue_is_published_when_it_changes(told: Stage) -> None:
    collected = told.job(inports={"registry": {"channels": ["/sidejob/workers"]}}).input("registry")
    told.task(nothing, name="one", queue="q")
    with told.sidejob.subscribe("/sidejob/workers/q", timeout=10) as subscription:
        told.sidejob.register_tasks()
        told.sidejob.register_tasks()
        told.task(nothing, name="two", queue="q", inports=["a"])
        told.sidejob.register_tasks()
        (_, first), (_, second) = heard(subscription, 2)
    assert list(first) == ["one"]
    assert list(second) == ["one", "two"]
    assert second["two"]["inports"] == {"a": {"channels": []}}
    assert [set(message) for message in collected if "one" in message] == [{"one"}, {"one", "two"}]


def test_a_task_whose_address_leads_nowhere_does_not_keep_others_from_the_registry(
    told: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    told.task(nothing, name="lost", exchange="nowhere", routing_key="none")
    told.task(nothing, name="found", queue="q")
    with told.sidejob.subscribe("/sidejob/workers/q", timeout=10) as subscription:
        told.sidejob.register_tasks()
        [(_, registered)] = heard(subscription, 1)
    assert list(registered) == ["found"]
    assert "Task lost is not announced" in caplog.text


def nothing(job: RunningJob) -> None:
    pass
