"""Runs that end, or are retried, while the store is away, or while another process may publish their chord."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from typing import Any

import psycopg
import pytest
from celery import Celery, states

from celery_sidejob import LeaseLostError, StoreUnavailableError, embedded
from celery_sidejob.model.durable import Message, Terms
from celery_sidejob.operations.ledger import durable_ends, durable_runs
from celery_sidejob.operations.ledger.durable_runs import Run
from celery_sidejob.store import workers
from celery_sidejob.store.connection.own_executor import OwnExecutor
from celery_sidejob.store.schema.migrate import upgrade
from tests.tools.apps import make_app
from tests.tools.contents import content_of
from tests.tools.waiting import wait_until


@pytest.fixture
def mortal(own_postgres: embedded.Postgres) -> embedded.Postgres:
    """A Postgres that this test may kill."""
    upgrade(own_postgres.url)
    return own_postgres


@pytest.fixture
def app(mortal: embedded.Postgres, redis_url: str) -> Iterator[Celery]:
    made = make_app("ends", broker=redis_url, sidejob_database_url=mortal.url, sidejob_durable_tasks=["ends.*"])
    yield made
    made.sidejob.close()
    made.close()


def begun(app: Celery, task_id: str) -> Run:
    """A task that was called, and locked for its run by a worker of its own."""
    app.send_task("ends.one", task_id=task_id)
    runtime = app.sidejob.runtime
    worker_id = workers.register(runtime.connections, f"test:{os.urandom(6).hex()}")
    run = Run((task_id, 1), "ends.one", worker_id, runtime, content_of(runtime, task_id))
    assert durable_runs.begin(runtime, run, terms=Terms(os.getpid(), "dead", 3), is_here=False)
    return run


def rows(postgres: embedded.Postgres) -> list[str]:
    """The ids of the tasks that are not finished."""
    with closing(psycopg.connect(postgres.url)) as connection:
        return [row[0] for row in connection.execute("SELECT task_id FROM sidejob.messages ORDER BY task_id")]


def test_an_end_that_was_given_up_is_written_once_the_store_is_back(
    app: Celery, mortal: embedded.Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what follows it: a chord's body, which the backend takes for published, is known to this process alone."""
    monkeypatch.setattr(durable_ends, "patiently", lambda runtime, once: once())
    runtime = app.sidejob.runtime
    runs = [begun(app, task_id) for task_id in ("one", "two")]
    app.send_task("ends.next", task_id="next")
    runs[0].follows.append(Message("follows", "ends.one", "celery", "{}", b"[]"))
    mortal.kill()
    for run in runs:
        with pytest.raises(StoreUnavailableError):
            durable_ends.end(runtime, run)

    mortal.start()

    wait_until(lambda: rows(mortal) == ["follows", "next"], timeout=20, message="both ends to be written")


def test_a_retry_waits_for_a_store_that_is_away_for_a_moment(
    app: Celery, mortal: embedded.Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery takes a retry that cannot be sent for the task's failure."""
    runtime = app.sidejob.runtime
    run = begun(app, "one")
    mortal.kill()
    tries: list[str] = []
    transact = runtime.connections.transact

    def count(name: str, work: Any, **options: Any) -> Any:
        tries.append(name)
        return transact(name, work, **options)

    monkeypatch.setattr(runtime.connections, "transact", count)
    message = Message("one", "ends.one", "celery", "{}", b"[]", generation=2)
    with ThreadPoolExecutor(1) as threads:
        retried = threads.submit(durable_ends.go_on, runtime, run, message)
        wait_until(lambda: tries.count("durable-move") >= 2, message="it to be tried again")
        mortal.start()
        retried.result(timeout=20)

    assert rows(mortal) == ["one"]
    assert run.moved


def test_an_end_that_cannot_be_written_keeps_no_other_from_it(
    app: Celery, mortal: embedded.Postgres, caplog: pytest.LogCaptureFixture
) -> None:
    """A callback with a NUL in its task id, say, which no row can hold."""
    runs = [begun(app, task_id) for task_id in ("bad", "good")]
    for run, task_id in zip(runs, ("with\0nul", "follows"), strict=True):
        run.follows.append(Message(task_id, "ends.one", "celery", "{}", b"[]"))

    late = durable_ends._late_ends(app.sidejob.runtime)
    late.add(runs)
    late.write_now()

    assert rows(mortal) == ["bad", "follows"]
    assert "The end of task bad cannot be written" in caplog.text


class Right:
    """The right to publish one message, with its answers to `hold`, in their order; the last one stays."""

    def __init__(self, message: Message, *answers: bool | None) -> None:
        self.messages = [message]
        self.answers = list(answers)
        self.is_settled = False

    def hold(self) -> bool | None:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def settle(self) -> None:
        self.is_settled = True


@pytest.mark.parametrize(("decided", "left"), [(True, ["body"]), (False, [])])
def test_an_end_waits_while_another_process_may_publish_its_chord(
    app: Celery, mortal: embedded.Postgres, decided: bool, left: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    body = Message("body", "ends.one", "celery", "{}", b"[]")
    runs = [begun(app, task_id) for task_id in ("part", "other")]
    runs[0].follows, runs[0].claim, runs[0].has_waited = [body], (right := Right(body, None)), True
    durable_ends.end(app.sidejob.runtime, runs[0])
    late = durable_ends._late_ends(app.sidejob.runtime)
    late.add(runs[1:])
    late.write_now()
    assert rows(mortal) == ["part"]  # the end of the other run did not wait for it

    right.answers = [None, decided]

    wait_until(lambda: rows(mortal) == left, timeout=20, message="the run's end")
    assert right.is_settled == decided
    assert "Task part ends later" in caplog.text


@pytest.mark.parametrize("is_held", [True, False])
def test_a_result_is_kept_by_the_statement_that_ends_its_run(
    app: Celery, mortal: embedded.Postgres, monkeypatch: pytest.MonkeyPatch, is_held: bool
) -> None:
    app.conf.result_backend = "sidejobpg://"
    run = begun(app, "one")
    with app.backend.riding() as run.riders:
        app.backend.store_result("one", 1, states.SUCCESS)
    if not is_held:
        with closing(psycopg.connect(mortal.url, autocommit=True)) as connection:
            connection.execute("UPDATE sidejob.messages SET generation = 2")
    command, commands = OwnExecutor._command, []
    monkeypatch.setattr(OwnExecutor, "_command", lambda self, text: (commands.append(text), command(self, text))[1])

    with nullcontext() if is_held else pytest.raises(LeaseLostError):
        durable_ends.end(run.runtime, run)

    assert app.AsyncResult("one").state == (states.SUCCESS if is_held else states.PENDING)
    assert not is_held or commands == []
