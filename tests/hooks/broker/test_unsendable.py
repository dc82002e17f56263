"""What a broker cannot carry is refused at the call; what is in the store already is set aside, and stops no queue."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import kombu
import psycopg
import pytest

from celery_sidejob import IllegalMoveError, InvalidValueError, RunningJob, StoreUnavailableError
from tests.tools.apps import make_app
from tests.tools.brokers import Broker
from tests.tools.databases import SCHEMA
from tests.tools.pgbouncer import direct
from tests.tools.waiting import wait_until

LONG = "x" * 300
ON_RABBITMQ = pytest.mark.brokers("amqp", only=["amqp", "quorum"], reason="carries it")


class Shop:
    """An app with a durable task and a sidejob task, and a broker to which nobody listens."""

    def __init__(self, database_url: str, broker: Broker) -> None:
        self.app = make_app(
            "shop",
            broker=None,
            **{**broker.configuration, "result_backend": "cache+memory://"},
            sidejob_database_url=database_url,
        )
        self.sidejob = self.app.sidejob
        self.broker = broker
        self._looking = psycopg.connect(
            direct(database_url), autocommit=True, options=f"-c search_path={SCHEMA}",
            row_factory=psycopg.rows.namedtuple_row,
        )  # fmt: skip

        @self.app.task(name="mail", durable=True, shared=False)
        def mail(*args: object) -> None:
            pass

        @self.sidejob.task(name="bill")
        def bill(job: RunningJob, *args: object) -> int:
            return 1

        self.app.finalize()
        self.mail, self.bill = self.app.tasks["mail"], self.app.tasks["bill"]
        self.sidejob.poll()  # its first look at a new broker takes it for an emptied one

    def close(self) -> None:
        self._looking.close()
        self.sidejob.close()
        self.app.close()

    def sql(self, statement: str, *parameters: Any) -> list[Any]:
        cursor = self._looking.execute(statement, parameters or None)
        return cursor.fetchall() if cursor.description else []

    def poll(self) -> None:
        """Sweep once, when all that is kept is due to be looked at and unpublished."""
        self.sidejob.runtime.connections.write_behind_now()
        self.sql(
            "UPDATE messages SET next_check_at = now() - interval '1 s', published_at = NULL WHERE locked_by IS NULL"
        )
        self.sidejob.poll()

    def published(self, queue: str) -> list[str]:
        """The task ids of the messages in a queue, which it loses by that."""
        ids = []
        with kombu.Connection(self.broker.url) as connection:
            channel = connection.default_channel
            channel.queue_declare(queue, durable=True, auto_delete=False)
            while (message := channel.basic_get(queue, no_ack=True)) is not None:
                ids.append(message.headers["id"])
        return ids

    def dead(self) -> dict[str, str]:
        """Why each is in the dead set, by its task id."""
        return {row.task_id: row.reason for row in self.sql("SELECT task_id, reason FROM dead")}


@pytest.fixture
def shop(database_url: str, broker: Broker) -> Iterator[Shop]:
    made = Shop(database_url, broker)
    yield made
    made.close()


NOWHERE = {
    "a priority below 0": {"priority": -1},
    "a priority above 255": {"priority": 300},
    "a task id of 300 characters": {"task_id": LONG},
    "a task id of 150 umlauts": {"task_id": "ä" * 150},
    "a task id with NUL": {"task_id": "a\x00b"},
    "a queue of 300 characters": {"queue": LONG},
    "a queue with NUL": {"queue": "a\x00b"},
}
"""What no broker may be given."""
RABBITMQ = {
    "the key of a header": {"headers": {LONG: 1}},
    "an integer in a header": {"headers": {"n": 2**70}},
    "an integer deep in a header": {"headers": {"n": [{"m": 2**70}]}},
    "a header of a megabyte": {"headers": {"big": "x" * 1_000_000}},
    "a shadow of a megabyte": {"shadow": "x" * 1_000_000},
}


@pytest.mark.parametrize("task", ["mail", "bill"])
@pytest.mark.parametrize("options", NOWHERE.values(), ids=NOWHERE)
def test_what_no_broker_carries_is_refused_at_the_call(shop: Shop, task: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError):
        shop.app.tasks[task].apply_async(**options)

    assert shop.sql("SELECT task_id FROM messages UNION ALL SELECT id::text FROM jobs") == []


@ON_RABBITMQ
def test_what_rabbitmq_does_not_carry_is_refused_at_the_call(shop: Shop) -> None:
    for task in (shop.mail, shop.bill):
        for options in RABBITMQ.values():
            with pytest.raises(InvalidValueError):
                task.apply_async(**options)
    with pytest.raises(InvalidValueError):
        shop.sidejob.send_many([shop.mail.s(), shop.mail.s().set(headers={"n": 2**70})])
    with pytest.raises(InvalidValueError):
        shop.mail.apply_async(reply_to=LONG)
    with pytest.raises(InvalidValueError):
        shop.mail.apply_async(exchange="amq.direct", routing_key=LONG)

    assert shop.sql("SELECT task_id FROM messages UNION ALL SELECT id::text FROM jobs") == []


@pytest.mark.parametrize("expires", [60, 0.5])
def test_a_call_that_expires_is_sent(shop: Shop, expires: float) -> None:
    """Celery gives the seconds to kombu, and kombu sends them as a text."""
    task_ids = [shop.mail.apply_async(expires=expires).id]
    task_ids += [result.id for result in shop.sidejob.send_many([shop.mail.s().set(expires=expires)])]
    assert {row.task_id for row in shop.sql("SELECT task_id FROM messages")} == set(task_ids)


@pytest.mark.parametrize("headers", [{"task": "other"}, {"id": "other"}, 5], ids=str)
def test_headers_that_would_say_what_a_message_is_are_refused(shop: Shop, headers: Any) -> None:
    for task in (shop.mail, shop.bill):
        with pytest.raises(InvalidValueError):
            task.apply_async(headers=headers)


def spoil_headers(**headers: Any) -> Callable[[Shop, str], None]:
    """Have the row of a task say that it has these headers, as one of an older version would."""

    def spoil(shop: Shop, task_id: str) -> None:
        (row,) = shop.sql("SELECT publication FROM messages WHERE task_id = %s", task_id)
        kept = json.loads(row.publication)
        about = json.loads(kept["about"])
        about["headers"].update(headers)
        kept["about"] = json.dumps(about)
        shop.sql("UPDATE messages SET publication = %s WHERE task_id = %s", json.dumps(kept), task_id)

    return spoil


def spoil_property(name: str, value: Any) -> Callable[[Shop, str], None]:
    def spoil(shop: Shop, task_id: str) -> None:
        shop.sql(
            "UPDATE messages SET publication = json_build_object('v', 2, 'about', jsonb_set("
            " (publication::jsonb->>'about')::jsonb, ARRAY['properties', %s], %s::jsonb)::text)::text"
            " WHERE task_id = %s", name, json.dumps(value), task_id,
        )  # fmt: skip

    return spoil


def spoil_text(text: str) -> Callable[[Shop, str], None]:
    def spoil(shop: Shop, task_id: str) -> None:
        shop.sql("UPDATE messages SET publication = %s WHERE task_id = %s", text, task_id)

    return spoil


UNREADABLE = {
    "no JSON": "no JSON",
    "no mapping": "[1]",
    "nothing around it": '{"v": 2}',
    "not text": '{"v": 2, "about": 5}',
}
SPOILT = {
    "key of a header": spoil_headers(**{LONG: 1}),
    "integer": spoil_headers(n=2**70),
    "megabyte": spoil_headers(big="x" * 1_000_000),
    "priority": spoil_property("priority", 300),
    "user, which RabbitMQ itself refuses": spoil_property("user_id", "nobody"),
    **{name: spoil_text(text) for name, text in UNREADABLE.items()},
}


@ON_RABBITMQ
def test_tasks_in_the_store_that_rabbitmq_does_not_carry_go_to_the_dead_set_and_stop_no_others(shop: Shop) -> None:
    for place, spoil in enumerate(SPOILT.values()):
        shop.mail.apply_async(task_id=f"bad{place}", queue="same")
        shop.sidejob.runtime.connections.write_behind_now()
        spoil(shop, f"bad{place}")
    shop.mail.apply_async(task_id="good", queue="same")
    shop.mail.apply_async(task_id="other", queue="another")
    shop.published("same"), shop.published("another")

    wait_until(lambda: shop.poll() or len(shop.dead()) == len(SPOILT), message="all to be buried")

    assert shop.dead() == {f"bad{place}": "unsendable" for place in range(len(SPOILT))}
    assert "good" in shop.published("same")
    assert "other" in shop.published("another")
    assert [row.task_id for row in shop.sql("SELECT task_id FROM messages ORDER BY 1")] == ["good", "other"]


def test_what_is_not_readable_of_a_task_goes_to_the_dead_set_on_redis_too(shop: Shop) -> None:
    for place, text in enumerate(UNREADABLE.values()):
        shop.mail.apply_async(task_id=f"bad{place}")
        shop.sidejob.runtime.connections.write_behind_now()
        spoil_text(text)(shop, f"bad{place}")
    shop.mail.apply_async(task_id="good")

    shop.poll()

    assert shop.dead() == {f"bad{place}": "unsendable" for place in range(len(UNREADABLE))}
    assert len(shop.sidejob.dead.list()) == len(UNREADABLE)


@ON_RABBITMQ
def test_jobs_in_the_store_that_rabbitmq_does_not_carry_fail_and_stop_no_others(shop: Shop) -> None:
    bad = [shop.bill.apply_async(queue="same").job for _ in range(3)]
    good = shop.bill.apply_async(queue="same").job
    for job, headers in zip(bad, ({LONG: 1}, {"n": 2**70}, {"big": "x" * 1_000_000}), strict=True):
        shop.sql("UPDATE askings SET options = %s WHERE job_id = %s", json.dumps({"headers": headers}), job.id)
    shop.published("same")

    shop.poll()

    assert [job.refresh().status for job in (*bad, good)] == ["failed"] * 3 + ["queued"]
    assert set(shop.dead().values()) == {"unsendable"}
    assert good.task_id in shop.published("same")
    assert shop.sql("SELECT id FROM workers WHERE dead_at IS NULL") == []
    retried = shop.sidejob.dead.retry(shop.sidejob.dead.list()[0].id)
    assert retried.task_id in shop.published("same"), "it is asked for anew, without those headers"


@ON_RABBITMQ
def test_a_job_that_is_terminated_and_cannot_be_sent_is_terminated(shop: Shop) -> None:
    job = shop.bill.apply_async(queue="same").job
    job.terminate()
    shop.sql("UPDATE jobs SET queue = %s", LONG)
    shop.sql("UPDATE messages SET queue = %s", LONG)

    shop.poll()

    assert job.refresh().status == "terminated"


CONTINUATIONS = {
    "no JSON": "no JSON",
    "no mapping": "[1]",
    "a version that is none": '{"v": "x"}',
    "nothing in it": '{"v": 1}',
    "no signature": '{"v": 1, "signature": 5, "args": [], "options": {}}',
    "no list": '{"v": 1, "signature": {"task": "mail", "args": [], "kwargs": {}, "options": {}, "subtask_type": null,'
    ' "immutable": false}, "args": 5, "options": {}}',
    "a priority": '{"v": 1, "signature": {"task": "mail", "args": [], "kwargs": {}, "options": {"priority": 300},'
    ' "subtask_type": null, "immutable": false}, "args": [], "options": {}}',
    "arguments that its task does not take": '{"v": 1, "signature": {"task": "mail", "args": [], "kwargs": {"a": 1},'
    ' "options": {}, "subtask_type": null, "immutable": false}, "args": [], "options": {}}',
}
GOOD = (
    '{"v": 1, "signature": {"task": "mail", "args": [], "kwargs": {}, "options": {}, "subtask_type": null,'
    ' "immutable": false}, "args": [1], "options": {}}'
)


def continue_with(shop: Shop, task_id: str, publication: str) -> None:
    shop.sql(
        "INSERT INTO messages (task_id, queue, publication, next_check_at, check_interval)"
        " VALUES ('continuation:' || %s, 'celery', %s, now(), '30 s')", task_id, publication,
    )  # fmt: skip


@pytest.mark.brokers("redis", "amqp")
def test_continuations_that_cannot_be_sent_go_to_the_dead_set_and_stop_no_others(shop: Shop) -> None:
    for place, text in enumerate(CONTINUATIONS.values()):
        continue_with(shop, f"bad{place}", text)
    continue_with(shop, "good", GOOD)

    shop.poll()

    assert shop.dead() == {f"bad{place}": "unsendable" for place in range(len(CONTINUATIONS))}
    assert [row.task_id for row in shop.sql("SELECT task_id FROM messages")] == ["good"], "it is a task now"


def test_a_continuation_in_the_dead_set_can_be_retried_and_deleted(shop: Shop) -> None:
    continue_with(shop, "bad", CONTINUATIONS["arguments that its task does not take"])
    continue_with(shop, "gone", CONTINUATIONS["no JSON"])
    shop.poll()
    bad, gone = sorted(shop.sidejob.dead.list(), key=lambda entry: str(entry.task_id))
    assert (bad.task, bad.task_id, bad.error.partition(":")[0]) == ("mail", "bad", "TypeError")
    shop.sql(
        "UPDATE dead SET payload = json_build_object('v', 1, 'continuation', %s::text) WHERE id = %s", GOOD, bad.id
    )

    assert shop.sidejob.dead.retry(bad.id).id == "bad"
    assert shop.sidejob.dead.delete(gone.id)

    assert [row.task_id for row in shop.sql("SELECT task_id FROM messages")] == ["continuation:bad"]
    shop.poll()
    assert shop.dead() == {}
    assert [row.task_id for row in shop.sql("SELECT task_id FROM messages")] == ["bad"]


def test_two_continuations_of_one_id_leave_the_dead_set_one_after_the_other(shop: Shop) -> None:
    for _ in range(2):
        continue_with(shop, "same", CONTINUATIONS["no JSON"])
        shop.poll()
    older, newer = sorted(shop.sidejob.dead.list(), key=lambda entry: int(entry.id))
    shop.sql("UPDATE dead SET payload = json_build_object('v', 1, 'continuation', %s::text)", GOOD)

    assert shop.sidejob.dead.retry_all() == 1
    assert [entry.id for entry in shop.sidejob.dead.list()] == [older.id], "nothing is lost"
    with pytest.raises(IllegalMoveError, match="waits or runs already"):
        shop.sidejob.dead.retry(older.id)
    assert [entry.id for entry in shop.sidejob.dead.list()] == [older.id]

    shop.sql("DELETE FROM messages")
    assert shop.sidejob.dead.retry_all() == 1
    assert newer.task_id == older.task_id == "same"
    assert [row.task_id for row in shop.sql("SELECT task_id FROM messages")] == ["continuation:same"]


def test_a_store_that_goes_away_ends_the_burials_of_a_turn(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other messages would each wait for it as long."""
    for task_id in ("bad", "worse"):
        continue_with(shop, task_id, CONTINUATIONS["no JSON"])
    tried: list[str] = []

    def away(runtime: Any, continuation: Any, **_: Any) -> bool:
        tried.append(continuation.task_id)
        raise StoreUnavailableError("injected")

    with monkeypatch.context() as patched:
        patched.setattr("celery_sidejob.services.sweep.due.burials.bury_continuation", away)
        with pytest.raises(StoreUnavailableError):
            shop.poll()
    assert len(tried) == 1

    shop.poll()
    assert shop.dead() == {"bad": "unsendable", "worse": "unsendable"}


def test_an_error_that_is_not_known_to_be_the_messages_own_buries_nothing(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that does not fit raises TypeError for every message."""
    monkeypatch.setattr("celery_sidejob.hooks.messages.kept_message.publish", lambda *_, **__: len(5))  # type: ignore[arg-type]
    shop.mail.apply_async(task_id="kept")

    shop.poll()

    assert shop.dead() == {}
    assert [row.task_id for row in shop.sql("SELECT task_id FROM messages")] == ["kept"]
