"""Jobs and durable tasks where the broker is their store: their rows lead to them, and nothing is sent beside these.

No sweeper helps: it would look for a missing message only after ten minutes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy
from celery import Celery, chord, group

from tests.tools.apps import make_app
from tests.tools.pgbouncer import direct
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes
from tests.transport.postgres.conftest import Tables

APP = "tests.transport.postgres.references_app"
KINDS = ["plain", "once", "repeatable"]
DURABLE = ("once", "repeatable", "stubborn")


@pytest.fixture
def env(database_url: str, record: Record) -> Mapping[str, str]:
    """What workers are told of their store, and where they note what they do."""
    return {"SIDEJOB_DATABASE_URL": database_url, **record.env}


@pytest.fixture
def shop(database_url: str) -> Iterator[Any]:
    """A client of theirs."""
    with make_app(
        broker="sidejobpg://", sidejob_database_url=database_url, sidejob_durable_tasks=DURABLE,
        sidejob_lost_after=600.0, task_ignore_result=True,
    ) as app:  # fmt: skip
        yield app
        app.sidejob.close()


def ask(shop: Any, name: str, *args: Any, **options: Any) -> None:
    """Call a task, or make a job."""
    if name == "job":
        shop.sidejob.enqueue("job", args, **options)
    else:
        shop.send_task(name, args, **options)


def ran(record: Record) -> list[str]:
    """The names of what has ended, in order."""
    return [line["name"] for line in record.of("ended")]


@pytest.mark.parametrize("name", [*KINDS, "job"])
def test_what_is_sent_in_a_transaction_is_sent_by_its_commit(
    processes: Processes, shop: Any, env: Mapping[str, str], record: Record, tables: Tables, database_url: str,
    name: str,
) -> None:  # fmt: skip
    if name == "job":
        processes.start_worker(APP, env=env)  # which makes the task known, and waits
    with psycopg.connect(direct(database_url)) as transaction:
        ask(shop, name, "rolled back", transaction=transaction)
        transaction.rollback()
        ask(shop, name, "committed", transaction=transaction)
        with transaction.transaction(force_rollback=True):
            ask(shop, name, "in a savepoint", transaction=transaction)
        assert tables.all == 0
        transaction.commit()
    if name != "job":
        assert tables.waiting == 1
        processes.start_worker(APP, env=env)

    record.wait_for("ended")
    wait_until(lambda: tables.all == 0, message="it to be acknowledged")
    wait_until(lambda: not tables.one("SELECT count(*) FROM messages"), message="its row to be removed")

    assert ran(record) == ["committed"]


@pytest.mark.parametrize("name", KINDS)
def test_a_group_and_a_chord_are_sent_by_the_commit(shop: Any, tables: Tables, database_url: str, name: str) -> None:
    shop.conf.result_backend = "cache+memory://"
    header = [shop.signature(name, (event,), immutable=True) for event in ("one", "two")]
    for canvas in (group(header, app=shop), chord(header, shop.signature(name, ("last",), immutable=True), app=shop)):
        before = tables.all
        with psycopg.connect(direct(database_url)) as transaction:
            canvas.apply_async(transaction=transaction)
            transaction.rollback()
            canvas.clone().apply_async(transaction=transaction)
            assert tables.all == before
        assert tables.all == before + 2


def test_a_worker_that_waits_is_woken_after_the_commit(
    processes: Processes, shop: Any, env: Mapping[str, str], record: Record, database_url: str
) -> None:
    worker = processes.start_worker(APP, env=env)
    engine = sqlalchemy.create_engine(database_url.replace("postgresql:", "postgresql+psycopg:", 1))
    rung: list[str] = []
    ring = shop.sidejob.runtime.publisher.ring_queues
    shop.sidejob.runtime.publisher.ring_queues = lambda queues: (rung.extend(queues), ring(queues))
    with engine.begin() as transaction:
        ask(shop, "plain", "woken", transaction=transaction)
        assert rung == []
    wait_until(lambda: rung == ["celery"], message="the worker to be woken")
    record.wait_for("ended")
    engine.dispose()
    assert worker.alive


@pytest.mark.parametrize("name", ["once", "repeatable", "job"])
def test_a_worker_killed_before_it_locks_a_row_leaves_its_message_to_others(
    processes: Processes, shop: Any, env: Mapping[str, str], record: Record, tables: Tables, tmp_path: Path, name: str
) -> None:
    points = "durable-begin:before-commit=stop,claim:before-commit=stop"
    gate = tmp_path / "gate"
    killed = processes.start_worker(APP, env={**env, "SIDEJOB_CRASH_POINTS": points})
    ask(shop, name, "free", str(gate))
    if name == "repeatable":
        record.wait_for("began")  # it is held since the fetch
    else:
        wait_until(lambda: tables.held == 1, message="it to be fetched")
    killed.wait_for_log("received")

    killed.kill_group()
    gate.touch()
    processes.start_worker(APP, env=env)

    record.wait_for("ended")
    wait_until(lambda: tables.all == 0, message="it to be acknowledged")
    assert ran(record) == ["free"]


@pytest.mark.parametrize("name", ["once", "repeatable", "job"])
def test_the_reference_of_a_run_in_progress_is_there_until_its_end_unless_the_fetch_holds_its_row(
    processes: Processes, shop: Any, env: Mapping[str, str], record: Record, tables: Tables, tmp_path: Path, name: str
) -> None:
    gate = tmp_path / "gate"
    processes.start_worker(APP, env=env)
    if name == "job":
        wait_until(lambda: tables.one("SELECT count(*) FROM registry"), message="the task to be known")
    ask(shop, name, "held", str(gate))
    wait_until(
        lambda: tables.one("SELECT count(*) FROM messages WHERE locked_by IS NOT NULL"), message="its row to be locked"
    )
    assert tables.held == (name != "repeatable")
    gate.touch()
    record.wait_for("ended")
    wait_until(lambda: tables.all == 0, message="it to be acknowledged")
    assert ran(record) == ["held"]


def test_retries_and_times_to_come_are_rows(
    processes: Processes, shop: Any, env: Mapping[str, str], record: Record, tables: Tables
) -> None:
    ask(shop, "once", "in a year", countdown=365 * 86400)
    ask(shop, "once", "soon", countdown=0.5)
    ask(shop, "stubborn", "try")
    assert tables.one("SELECT count(*) FROM messages WHERE published_at IS NULL") == 0
    assert tables.one("SELECT count(*) FROM broker_messages WHERE due_at IS NOT NULL") == 2
    processes.start_worker(APP, env=env)

    record.wait_for("ended", count=4)
    wait_until(lambda: tables.all == 1, message="all but one to be acknowledged")

    assert sorted(ran(record)) == ["soon", "try 0", "try 1", "try 2"]
    assert tables.one("SELECT due_at > now() + interval '364 days' FROM broker_messages")


def test_a_reference_to_an_earlier_generation_leads_to_nothing(
    processes: Processes, shop: Any, env: Mapping[str, str], record: Record, tables: Tables, database_url: str
) -> None:
    shop.send_task("once", ("only",), task_id="only")
    with psycopg.connect(direct(database_url), autocommit=True) as connection:
        for task_id, generation in [("only", 7), ("nobody", 1)]:
            connection.execute(
                "INSERT INTO sidejob.broker_messages (queue, priority, task_id, generation) "
                "VALUES ('celery', 9, %s, %s)",
                [task_id, generation],
            )
    worker = processes.start_worker(APP, env=env)
    wait_until(lambda: tables.all == 0, message="all to be gone")
    assert ran(record) == ["only"]
    assert worker.log().count("received") == 1


def test_copies_of_references_run_nothing_twice(
    processes: Processes, shop: Any, env: Mapping[str, str], record: Record, tables: Tables
) -> None:
    for _ in range(2):
        processes.start_worker(APP, env=env, concurrency=2)
    wait_until(lambda: tables.one("SELECT count(*) FROM registry"), message="the job's task to be known")
    names = [f"{name} {number}" for name in ("once", "repeatable", "job") for number in range(10)]
    for name in names:
        ask(shop, name.split()[0], name, queue="aside")
    tables.run(
        "INSERT INTO broker_messages (queue, priority, task_id, generation, again) "
        "SELECT 'celery', 0, task_id, generation, true FROM broker_messages, generate_series(1, 3) "
        "WHERE queue = 'aside'"
    )
    tables.run("DELETE FROM broker_messages WHERE queue = 'aside'")
    wait_until(lambda: tables.all == 0, message="all to be gone")
    wait_until(lambda: not tables.one("SELECT count(*) FROM messages"), message="their rows to be removed")
    assert sorted(ran(record)) == sorted(names)


@pytest.mark.parametrize(
    "forged",
    [
        {"headers": None},
        {"properties": [1]},
        {"content_encoding": 5},
        {"headers": {"amount": {"__type__": "decimal", "__value__": "x"}}},
        {"headers": {"task": ["once"], "id": "forged"}},
        {"headers": {"task": "once", "id": "forged", "timelimit": 5}},
    ],
)
def test_a_row_that_nobody_can_read_ends_no_worker_and_no_sweeper(
    processes: Processes, shop: Any, env: Mapping[str, str], record: Record, tables: Tables, forged: dict[str, Any]
) -> None:
    ask(shop, "once", "forged", task_id="forged")
    kept = json.loads(tables.one("SELECT publication FROM messages"))
    kept["about"] = json.dumps(json.loads(kept["about"]) | forged)
    tables.run("UPDATE messages SET publication = %s", json.dumps(kept))
    ask(shop, "once", "good", task_id="good")
    worker = processes.start_worker(APP, env=env)
    record.wait_for("ended")
    wait_until(lambda: tables.all == 0, message="both to be gone")
    assert worker.alive
    assert "message forged cannot be read" in worker.log()
    tables.run("UPDATE messages SET next_check_at = now(), published_at = NULL")
    shop.sidejob.poll()
    assert [entry.task_id for entry in shop.sidejob.dead] == ["forged"]
    assert ran(record) == ["good"]


def test_a_message_whose_reference_was_purged_is_sent_again(
    processes: Processes, shop: Any, env: Mapping[str, str], record: Record, tables: Tables
) -> None:
    ask(shop, "once", "purged")
    assert shop.control.purge() == 1
    assert tables.all == 0
    with make_app(
        broker="sidejobpg://", sidejob_database_url=env["SIDEJOB_DATABASE_URL"], sidejob_durable_tasks=DURABLE,
        sidejob_lost_after=0.1,
    ) as hasty:  # fmt: skip
        tables.run("UPDATE messages SET next_check_at = now(), check_interval = interval '0.1 s'")
        wait_until(lambda: hasty.sidejob.poll() and tables.waiting, message="the sweeper to send it again")
        hasty.sidejob.close()
    assert tables.one("SELECT again FROM broker_messages")
    processes.start_worker(APP, env=env)
    record.wait_for("ended")
    assert ran(record) == ["purged"]


@pytest.mark.few(0)
def test_a_worker_without_sidejob_leaves_references_to_others(
    processes: Processes, shop: Any, env: Mapping[str, str], record: Record, client: Celery, tables: Tables,
    broker_url: str,
) -> None:  # fmt: skip
    ask(shop, "once", "kept")
    client.send_task("note", ("plain",))
    processes.start_worker("tests.transport.worker_app", env={"BROKER_URL": broker_url, **record.env})
    wait_until(lambda: tables.all == 1, message="the plain task to be taken")
    assert tables.waiting == 1
    processes.start_worker(APP, env=env)
    record.wait_for("ended")
    assert ran(record) == ["kept"]
