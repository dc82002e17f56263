"""`sidejobpg://` alone: the broker is the store, for everything that connects to it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import pytest
from kombu import Connection

from tests.tools.apps import make_app
from tests.tools.brokers import in_postgres
from tests.tools.commands import ask
from tests.tools.recorder import Record
from tests.tools.workers import Processes

APP = "tests.transport.postgres.store_app"


@pytest.fixture
def env(database_url: str, record: Record) -> Mapping[str, str]:
    """What processes of the app are told of their store."""
    return {"SIDEJOB_DATABASE_URL": database_url, **record.env}


def shown(database_url: str) -> str:
    """The broker's URL for people."""
    return Connection(in_postgres(database_url)).as_uri()


def test_workers_beat_clients_and_remote_control_find_the_store(
    processes: Processes, env: Mapping[str, str], record: Record, database_url: str
) -> None:
    worker = processes.start_worker(APP, env=env)
    worker.wait_for_log(f"Connected to {shown(database_url)}")
    with make_app("client", broker="sidejobpg://", sidejob_database_url=database_url) as client:
        client.send_task("note", ("sent",))
        record.wait_for("sent")
        assert client.control.inspect(timeout=5, limit=1).ping() == {worker.nodename: {"ok": "pong"}}
    processes.start_beat(APP, env=env)
    record.wait_for("tick")


def test_inspect_shows_a_durable_task_that_waits_for_its_time(
    processes: Processes, env: Mapping[str, str], database_url: str
) -> None:
    worker = processes.start_worker(APP, env=env)
    eta = datetime.now(UTC) + timedelta(hours=1)
    with make_app(
        "client", broker="sidejobpg://", sidejob_database_url=database_url, sidejob_durable_tasks=["kept"]
    ) as client:
        client.send_task("kept", ("later",), eta=eta, task_id="waits")
        (found,) = client.control.inspect(timeout=5, limit=1).scheduled()[worker.nodename]
        client.sidejob.close()
    assert (found["request"]["id"], found["request"]["args"]) == ("waits", ["later"])
    assert abs(datetime.fromisoformat(found["eta"]) - eta) < timedelta(seconds=1)


def test_a_body_sees_its_priority_and_its_eta(
    processes: Processes, env: Mapping[str, str], record: Record, database_url: str
) -> None:
    processes.start_worker(APP, env=env)
    eta = datetime.now(UTC) + timedelta(seconds=2)
    calls = {"job": "job_told", "durable": "kept_told", "plain": "told"}
    with make_app(
        "client", broker="sidejobpg://", sidejob_database_url=database_url, sidejob_durable_tasks=["kept_told"]
    ) as client:
        for event, task in calls.items():
            if event == "job":
                client.sidejob.enqueue(task, (event,), priority=5)
            else:
                client.send_task(task, (event,), priority=5, eta=eta)
        client.sidejob.close()
    for event in calls:
        (told,) = record.wait_for(event)
        assert told["priority"] == 5, event
        assert event == "job" or datetime.fromisoformat(told["eta"]) == eta, event
        (child,) = record.wait_for(f"child of {event}")
        assert child["priority"] == 5, event


def test_doctor_shows_where_the_broker_is(database_url: str) -> None:
    app = make_app("shop", broker="sidejobpg://", sidejob_database_url=database_url)
    found = ask(app, "doctor", "--json").document["findings"]
    (broker,) = [finding["found"] for finding in found if finding["check"] == "broker"]
    assert f"{shown(database_url)}, the store itself, answers after" in broker


def test_doctor_says_what_is_missing() -> None:
    app = make_app("shop", broker="sidejobpg://")
    said = ask(app, "doctor")
    assert "broker_url is sidejobpg:// alone" in said.err
    assert "sidejob_database_url is not set" in said.err
