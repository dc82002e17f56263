"""The end or the burial of a durable task writes its result, and counts its part of a chord."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from typing import Any

import pytest
from celery import chord, states
from celery.exceptions import InvalidTaskError

from celery_sidejob.hooks.worker import received
from celery_sidejob.model.crash_points import Died
from celery_sidejob.model.errors import StoreUnavailableError
from celery_sidejob.operations.ledger import durable_ends
from celery_sidejob.operations.runtime import patiently
from celery_sidejob.services.heartbeat.heartbeat import Heartbeat
from celery_sidejob.services.sweep.sweeper import Sweeper
from celery_sidejob.store.outbox.kinds import TASKS
from tests.hooks.tasks.test_stale_runs import Shop
from tests.results.test_job_ends import Dying
from tests.tools.crash_points import Arm, lost


@pytest.fixture
def shop(database_url: str, redis_url: str) -> Iterator[Shop]:
    """An app whose results are in its store, and whose durable tasks run when the test says so."""
    made = Shop(database_url, redis_url, result_backend="sidejobpg://")
    yield made
    made.close()


def die() -> None:
    raise Died


def _is_due(shop: Shop, task_id: str) -> None:
    """Let the next sweeper look at a row at once, whoever swept before it."""
    shop.sql("UPDATE messages SET next_check_at = now() WHERE task_id = %s", task_id)
    shop.sql("UPDATE leases SET holder = NULL, expires_at = now()")


@pytest.mark.parametrize("is_part", [False, True], ids=["alone", "part"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("doom", "state"), [("lost", states.FAILURE), ("revoked", states.REVOKED)])
def test_a_death_around_the_burial(shop: Shop, at: Arm, doom: str, state: str, when: str, is_part: bool) -> None:
    result: Any = chord([shop.once.s(), shop.once.s()])(shop.body.s()).parent[0] if is_part else shop.once.delay()
    shop.sql("UPDATE messages SET doom = %s, check_interval = interval '1 s' WHERE task_id = %s", doom, result.id)
    _is_due(shop, result.id)
    at(f"durable-bury:{when}-commit", die)
    with suppress(Died):
        Sweeper(shop.runtime).run_once()
        pytest.fail("the point was not reached")

    kept = [found for (found,) in shop.sql("SELECT state FROM results WHERE key = %s", f"task:{result.id}")]
    counted = [part for (part,) in shop.sql("SELECT task_id FROM chord_parts")]
    if when == "before":
        assert (shop.buried(), kept, counted) == ([], [], [])
        _is_due(shop, result.id)
        Sweeper(shop.runtime).run_once()
        assert (shop.buried(), result.state) == ([doom], state)
    else:
        assert (shop.buried(), kept, counted) == ([doom], [state], [result.id] * is_part)


def _decline_after_a_day(shop: Shop, task_id: str) -> None:
    """Have a worker receive a message that no worker could run for a day, and decline it too."""
    shop.runtime.connections.write_behind_now()
    shop.sql("UPDATE messages SET declined_at = now() - interval '25 h' WHERE task_id = %s", task_id)
    with (
        shop.app.connection_for_read() as connection,
        closing(connection.SimpleQueue(shop.app.conf.task_default_queue)) as queue,
    ):
        while (message := queue.get(timeout=5)).headers["id"] != task_id:
            pass
    heartbeat = Heartbeat(shop.runtime)
    heartbeat.register()
    try:
        error = InvalidTaskError("it has an option of tomorrow")
        received.decline_in(shop.app, heartbeat, (TASKS, (task_id, 1)), message, "stale.once", error)
    finally:
        heartbeat.close()


@pytest.mark.parametrize("is_part", [False, True], ids=["alone", "part"])
@pytest.mark.parametrize("when", ["", "before", "after"])
def test_a_death_around_the_burial_of_a_task_that_no_worker_could_run(
    shop: Shop, at: Arm, when: str, is_part: bool
) -> None:
    result: Any = chord([shop.once.s(), shop.once.s()])(shop.body.s()).parent[0] if is_part else shop.once.delay()
    if when:
        at(f"durable-bury:{when}-commit", die)
    with suppress(Died):
        _decline_after_a_day(shop, result.id)
        assert not when, "the point was not reached"

    is_over = when != "before"
    assert (shop.buried(), result.state) == ((["failed"], states.FAILURE) if is_over else ([], states.PENDING))
    assert shop.sql("SELECT task_id FROM chord_parts") == [(result.id,)] * (is_part and is_over)
    if is_over:
        assert isinstance(result.result, InvalidTaskError)


def test_an_errback_is_called_for_a_task_that_no_worker_could_run(shop: Shop) -> None:
    result = shop.once.apply_async(link_error=shop.errback.s())
    _decline_after_a_day(shop, result.id)
    assert (shop.told, shop.buried(), result.state) == ([result.id], ["failed"], states.FAILURE)


@pytest.mark.parametrize("is_part", [False, True], ids=["alone", "part"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("outcome", "point", "state"),
    [(None, "durable-end", states.SUCCESS), (ValueError, "durable-bury", states.FAILURE)],
)
def test_a_repeated_end_writes_the_result_again(
    shop: Shop, at: Arm, outcome: Any, point: str, state: str, when: str, is_part: bool
) -> None:
    """The connection breaks around the commit: the end is repeated, and what its first try wrote may be gone."""
    result: Any = chord([shop.once.s(), shop.once.s()])(shop.body.s()).parent[0] if is_part else shop.once.delay()
    shop.outcome = outcome
    at(f"{point}:{when}-commit", lost)
    shop.run(shop.once, result.id)

    assert (shop.sql("SELECT 1 FROM messages WHERE task_id = %s", result.id), result.state) == ([], state)
    assert shop.sql("SELECT task_id FROM chord_parts") == [(result.id,)] * is_part


def test_a_run_that_counts_after_all_leaves_its_result(shop: Shop, at: Arm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first try to end is rolled back, and its row is taken from it before the second."""
    result = shop.work.delay()
    shop.outcome = 7

    def rolled_back_and_lost(runtime: Any, once: Callable[[], Any]) -> Any:
        monkeypatch.undo()
        with suppress(StoreUnavailableError):
            once()
            pytest.fail("the point was not reached")
        shop.lose()
        return patiently(runtime, once)

    monkeypatch.setattr(durable_ends, "patiently", rolled_back_and_lost)
    at("durable-end:before-commit", lost)
    shop.run(shop.work, result.id)
    assert (shop.sql("SELECT 1 FROM messages"), shop.buried(), result.get(timeout=5)) == ([], [], 7)


def test_each_app_of_a_process_writes_the_results_of_its_tasks_with_their_ends(
    shop: Shop, database_url: str, redis_url: str, at: Arm
) -> None:
    """As where a factory makes the app again for the same store."""
    assert shop.app.backend.is_in(shop.runtime.connections)
    other = Shop(database_url, redis_url, result_backend="sidejobpg://")
    assert other.app.backend.place.ear is shop.app.backend.place.ear  # all that wait cost one session
    result = other.once.delay()
    at("durable-end:before-commit", die)
    with suppress(Died):
        other.run(other.once, result.id)
        pytest.fail("the point was not reached")
    assert (other.rows(), result.state) == ([(True, None)], states.PENDING)
    other.close()


def test_the_result_of_an_earlier_task_with_this_id_is_no_end(shop: Shop) -> None:
    shop.app.backend.mark_as_done("again", 7)
    chord([shop.once.s().set(task_id="again"), shop.once.s()])(shop.body.s())
    shop.sql("UPDATE messages SET doom = 'lost', check_interval = interval '1 s' WHERE task_id = 'again'")
    _is_due(shop, "again")
    Sweeper(shop.runtime).run_once()
    assert (shop.buried(), shop.sql("SELECT task_id FROM chord_parts")) == (["lost"], [("again",)])


@pytest.mark.parametrize("dies", ["", "before", "after"])
def test_what_is_retried_from_the_dead_set_has_no_result_until_it_ends(shop: Shop, at: Arm, dies: str) -> None:
    result, shop.outcome = shop.once.delay(), ValueError
    shop.run(shop.once, result.id)
    (entry,) = shop.app.sidejob.dead
    if dies:
        at(f"durable-revive:{dies}-commit", die)
    with suppress(Died):
        shop.app.sidejob.dead.retry(entry.id)
    is_retried = dies != "before"
    assert (shop.buried(), len(shop.rows())) == (([], 1) if is_retried else (["failed"], 0))
    assert shop.app.AsyncResult(result.id).state == (states.PENDING if is_retried else states.FAILURE)


@pytest.mark.parametrize("refused", ["SUCCESS", "%"])
def test_an_end_that_the_store_refuses_is_a_failure_that_has_its_result(shop: Shop, refused: str) -> None:
    shop.sql(f"ALTER TABLE results ADD CONSTRAINT refusing CHECK (state NOT LIKE '{refused}')")
    result = shop.once.delay()
    shop.run(shop.once, result.id)

    assert (shop.sql("SELECT 1 FROM messages"), shop.buried()) == ([], ["failed"])
    assert result.state == (states.FAILURE if refused == "SUCCESS" else states.PENDING)


@pytest.mark.parametrize(("outcome", "state"), [(7, states.SUCCESS), (ValueError(), states.FAILURE)])
def test_a_death_at_each_statement_of_an_end(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, outcome: Any, state: str
) -> None:
    dying, has_died, before = Dying(monkeypatch), True, 0
    shop.outcome = outcome
    while has_died:
        before += 1
        part: Any = chord([shop.once.s(), shop.once.s()])(shop.body.s()).parent[0]
        has_died = dying.dies(before, partial(shop.run, shop.once, part.id))
        is_there = bool(shop.sql("SELECT 1 FROM messages WHERE task_id = %s", part.id))
        kept = [found for (found,) in shop.sql("SELECT state FROM results WHERE key = %s", f"task:{part.id}")]
        counted = [counted for (counted,) in shop.sql("SELECT task_id FROM chord_parts")]
        shop.sql("DELETE FROM chord_parts")
        assert (kept, counted) == (([], []) if is_there else ([state], [part.id])), before


@pytest.mark.parametrize("is_doomed", [False, True], ids=["fails", "doomed"])
def test_an_errback_finds_the_result(shop: Shop, is_doomed: bool) -> None:
    found: list[str] = []

    def errback(request: Any, error: Any, trace: Any) -> None:
        found.append(shop.app.AsyncResult(request.id).state)

    link = shop.app.task(errback, name="reading", shared=False).s()
    result = shop.once.apply_async(link_error=link)
    if is_doomed:
        shop.sql("UPDATE messages SET doom = 'lost'")
        _is_due(shop, result.id)
        Sweeper(shop.runtime).run_once()
    else:
        shop.outcome = ValueError()
        shop.run(shop.once, result.id)
    assert (found, result.state) == ([states.FAILURE], states.FAILURE)


def test_an_end_whose_result_the_store_refuses_is_one_without(shop: Shop) -> None:
    shop.sql("ALTER TABLE results ADD CONSTRAINT none CHECK (false)")
    result = shop.once.delay()
    shop.run(shop.once, result.id)
    assert (shop.rows(), shop.buried()) == ([], ["failed"])
