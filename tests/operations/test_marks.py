"""A mark that a message was published may be written late; it says nothing of what has become of it by then."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from celery import Celery

from celery_sidejob.model.durable import Terms
from celery_sidejob.model.loss import Loss, LossKind
from celery_sidejob.operations import after_commit
from celery_sidejob.operations.ledger import durable_runs
from celery_sidejob.operations.ledger.durable_runs import Run
from celery_sidejob.store import workers
from tests.tools.apps import make_app
from tests.tools.contents import content_of
from tests.tools.pgbouncer import direct


@pytest.fixture
def app(database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    """Marks are written when the test says so."""
    monkeypatch.setattr(after_commit, "MARK_S", 3600.0)
    made = make_app("marks", broker=redis_url, sidejob_database_url=database_url, sidejob_durable_tasks=["marks.*"])
    yield made
    made.sidejob.close()
    made.close()


def begun(app: Celery) -> Run:
    """The run of a task that was just called."""
    app.send_task("marks.one", task_id="one")
    runtime = app.sidejob.runtime
    worker_id = workers.register(runtime.connections, f"test:{os.urandom(6).hex()}")
    run = Run(("one", 1), "marks.one", worker_id, runtime, content_of(runtime, "one"))
    assert durable_runs.begin(runtime, run, terms=Terms(os.getpid(), "requeue", 3), is_here=False)
    return run


def row(app: Celery) -> tuple[Any, ...]:
    """Whether it is marked, whether the sweeper looks at it now, and its losses."""
    with psycopg.connect(direct(app.conf.sidejob_database_url)) as connection:
        found = connection.execute(
            "SELECT published_at IS NOT NULL, next_check_at <= now(), losses FROM sidejob.messages"
        )
        (only,) = found.fetchall()
        return tuple(only)


@pytest.mark.parametrize("loss", [True, False])
def test_what_was_given_back_meanwhile_is_not_hidden_by_it(app: Celery, loss: bool) -> None:
    """Neither what was lost nor what a worker that stops has given back."""
    run = begun(app)
    given = Loss(LossKind.UNKNOWN if loss else LossKind.STOPPED)
    assert durable_runs.give_back(run.runtime, ["one"], worker_id=run.worker_id, loss=given) == 1

    run.runtime.connections.write_behind_now()

    assert row(app) == (False, True, int(loss))
    assert app.sidejob.poll().published == 1
    assert row(app) == (True, False, int(loss)), "what the sweeper has published is marked"
