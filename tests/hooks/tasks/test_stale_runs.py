"""A run of a durable task that was taken for lost: what it comes to is told to nobody, once another run has the row."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
from celery import Task, chord, states
from celery.app.trace import build_tracer

from celery_sidejob import InvalidValueError
from celery_sidejob.hooks.tasks.present import RUNS
from celery_sidejob.model.durable import DIGEST, HEADER, WORKER, Address, Death, Digest, Terms, digest_of
from celery_sidejob.operations.ledger import burials, durable_runs
from celery_sidejob.operations.ledger.durable_runs import Run
from celery_sidejob.store import workers
from tests.tools.apps import make_app
from tests.tools.contents import content_of
from tests.tools.databases import SCHEMA
from tests.tools.pgbouncer import direct
from tests.tools.versions import CELERY_5_7

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # Celery's backend with redis-py 8

REPEATABLE: dict[str, Any] = {"acks_late": True, "reject_on_worker_lost": True, "shared": False}


class Shop:
    """An app whose durable tasks run in the test's process, by Celery's own tracer, for one worker after the other."""

    def __init__(self, database_url: str, redis_url: str, *, result_backend: str | None = None) -> None:
        self.url = direct(database_url)
        self.app = make_app(
            "stale",
            broker=redis_url,
            result_backend=result_backend or redis_url,
            sidejob_database_url=database_url,
            sidejob_durable_tasks=["stale.*"],
        )
        self.meanwhile: Callable[[], Any] = lambda: None
        """What happens while the body runs."""
        self.outcome: Any = None
        """What the body raises, or returns."""
        self.told: list[str] = []
        """Of which tasks an errback was told."""
        self.args: tuple[Any, ...] = ()
        """With what a body was called last."""

        def body() -> Callable[[], Any]:
            def work(*args: Any) -> Any:
                self.args = args
                self.meanwhile()
                if self.outcome is ValueError:
                    raise ValueError("in vain")
                if isinstance(self.outcome, Exception):
                    raise self.outcome
                return self.outcome

            return work

        def errback(request: Any, error: Any, trace: Any) -> None:
            self.told.append(request.id)

        self.work = self.app.task(body(), name="stale.work", **REPEATABLE)
        self.once = self.app.task(body(), name="stale.once", shared=False)
        self.body = self.app.task(body(), name="stale.body", shared=False)
        self.errback = self.app.task(errback, name="stale.errback", shared=False)
        self.runtime = self.app.sidejob.runtime

    def run(self, task: Any, task_id: str) -> None:
        """Deliver the first message of a task to a new worker, and have it run here."""
        ((publication, content),) = self.sql("SELECT publication, body FROM messages WHERE task_id = %s", task_id)
        args, kwargs, embedded = json.loads(bytes(content))
        request = json.loads(json.loads(publication)["about"])["headers"]
        request.update(embedded, headers=dict(request), delivery_info={}, is_eager=False)
        request.update({HEADER: {"v": 1, "n": 1}, DIGEST: Digest(digest_of(bytes(content)))})
        request[WORKER] = [(0, workers.register(self.runtime.connections, f"test:{uuid.uuid4()}"))]
        build_tracer(task.name, self.app.tasks[task.name], app=self.app)(task_id, args, kwargs, request)

    def lose(self) -> None:
        """Take all rows from their runs, as from workers that were silent for too long."""
        self.sql("UPDATE workers SET suspect_at = now(), suspect_by = 'silence', dead_at = now()")
        assert durable_runs.take_from_the_dead(self.runtime) == 1

    def begin_elsewhere(self, task_id: str) -> bool:
        """Have another worker begin the task, if it may."""
        worker_id = workers.register(self.runtime.connections, f"test:{uuid.uuid4()}")
        run = Run((task_id, 1), "stale.work", worker_id, self.runtime, content_of(self.runtime, task_id))
        return durable_runs.begin(self.runtime, run, Address(), terms=Terms(1, "requeue", 3), is_here=False)

    def bury(self, task_id: str) -> None:
        """Bury what is doomed, as the sweeper does."""
        assert burials.fail(self.runtime, (task_id, 1), Death("lost", "Lost: it"), by="sweeper", worker_id=None)

    def rows(self) -> list[tuple[Any, ...]]:
        """Return (whether it is held, why it is doomed) of each row."""
        return self.sql("SELECT locked_by IS NOT NULL, doom FROM messages ORDER BY task_id")

    def buried(self) -> list[str]:
        """Return why each entry is in the dead set."""
        return [reason for (reason,) in self.sql("SELECT reason FROM dead ORDER BY id")]

    def sql(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Look into the store, on a connection of the test's own."""
        with closing(psycopg.connect(self.url, autocommit=True, options=f"-c search_path={SCHEMA}")) as looking:
            cursor = looking.execute(statement, parameters or None)
            return cursor.fetchall() if cursor.description else []

    def close(self) -> None:
        """Close what is open."""
        self.app.sidejob.close()
        self.app.close()


@pytest.fixture(name="shop")
def shop_fixture(database_url: str, redis_url: str) -> Iterator[Shop]:
    made = Shop(database_url, redis_url)
    yield made
    made.close()


@pytest.mark.parametrize("outcome", [7, ValueError])
def test_what_a_stale_run_comes_to_is_told_to_nobody(shop: Shop, outcome: Any) -> None:
    result = shop.work.apply_async(link_error=shop.errback.s())

    def meanwhile() -> None:
        shop.lose()
        assert shop.begin_elsewhere(result.id)

    shop.outcome, shop.meanwhile = outcome, meanwhile
    shop.run(shop.work, result.id)

    assert (result.state, shop.told) == (states.PENDING, [])
    assert (shop.rows(), shop.buried()) == ([(True, None)], [])


def test_a_stale_success_does_not_hide_that_the_counting_run_has_failed(shop: Shop) -> None:
    result = shop.work.apply_async(link_error=shop.errback.s())

    def meanwhile() -> None:
        shop.lose()
        shop.outcome, shop.meanwhile = ValueError, lambda: None
        shop.run(shop.work, result.id)
        shop.outcome = 7

    shop.meanwhile = meanwhile
    shop.run(shop.work, result.id)

    assert (result.state, shop.told) == (states.FAILURE, [result.id])
    assert (shop.rows(), shop.buried()) == ([], ["failed"])


@CELERY_5_7  # before, a chord of one part takes no errback
@pytest.mark.parametrize("outcome", [7, ValueError])
def test_a_chord_gets_the_value_of_the_run_that_counts(shop: Shop, outcome: Any) -> None:
    value = chord([shop.work.s()], shop.body.s()).apply_async(link_error=shop.errback.s())
    (part,) = value.parent.results
    after: list[Any] = []

    def meanwhile() -> None:
        shop.lose()
        shop.outcome, shop.meanwhile = 8, lambda: None
        shop.run(shop.work, part.id)
        after.append(shop.rows())
        shop.outcome = outcome

    shop.meanwhile = meanwhile
    shop.run(shop.work, part.id)
    assert shop.rows() == after[0] == [(False, None)], "the chord's body"

    shop.outcome, shop.meanwhile = 9, lambda: None
    shop.run(shop.body, value.id)
    assert (part.get(timeout=5), value.get(timeout=5), shop.args, shop.told) == (8, 9, ([8],), [])


def test_nobody_begins_with_what_a_run_that_was_called_lost_has_ended_well(shop: Shop, monkeypatch: Any) -> None:
    result = shop.work.apply_async(link=shop.body.s())
    seen: list[Any] = []
    store = shop.app.backend.store_result

    def store_and_look(*args: Any, **options: Any) -> Any:
        assert not shop.begin_elsewhere(result.id)
        seen.extend(
            shop.sql("SELECT doom, next_check_at > now() + interval '1 s' FROM messages WHERE task_id = %s", result.id)
        )
        return store(*args, **options)

    monkeypatch.setattr(shop.app.backend, "store_result", store_and_look)
    shop.outcome, shop.meanwhile = 7, shop.lose
    shop.run(shop.work, result.id)

    assert seen == [("lost", True)], "if this process had died here, it would have been in the dead set"
    assert (result.state, shop.buried()) == (states.SUCCESS, [])
    assert shop.sql("SELECT task FROM messages") == [("stale.body",)]


@pytest.mark.parametrize(
    ("outcome", "state", "buried"), [(7, states.SUCCESS, []), (ValueError, states.PENDING, ["lost"])]
)
def test_what_is_in_the_dead_set_leaves_it_if_it_has_ended_well(
    shop: Shop, outcome: Any, state: str, buried: list[str]
) -> None:
    result = shop.once.apply_async(link_error=shop.errback.s())

    def meanwhile() -> None:
        shop.lose()
        shop.bury(result.id)

    shop.outcome, shop.meanwhile = outcome, meanwhile
    shop.run(shop.once, result.id)

    assert (result.state, shop.told) == (state, [])
    assert (shop.rows(), shop.buried()) == ([], buried)


def test_what_was_revoked_in_its_thread_is_no_success(shop: Shop) -> None:
    result = shop.work.apply_async()

    def meanwhile() -> None:
        RUNS[result.id].is_revoked = True

    shop.outcome, shop.meanwhile = 7, meanwhile
    shop.run(shop.work, result.id)

    assert result.state == states.PENDING


def test_a_run_that_goes_on_as_a_retry_cannot_go_on_as_another_message_too(shop: Shop) -> None:
    """Its id is taken, by its retry: what would be sent under it afterwards is refused as it is of any caller."""
    refused: list[Exception] = []

    class Twice(Task):
        def on_success(self, *_: Any) -> None:
            try:
                self.apply_async(("sent by on_success",), task_id=self.request.id)
            except Exception as error:
                refused.append(error)

    def again(self: Any, *args: Any) -> None:
        self.retry(("sent by retry",), countdown=3600, throw=False)

    task = shop.app.task(again, bind=True, base=Twice, name="stale.again", shared=False)
    result = task.apply_async(("first",))

    shop.run(task, result.id)

    assert [type(error) for error in refused] == [InvalidValueError]
    ((generation, body),) = shop.sql("SELECT generation, body FROM messages")
    assert (generation, json.loads(bytes(body))[0]) == (2, ["sent by retry"])
