"""An error in one duty of a service keeps no other duty from being done, whichever statement raises it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psycopg
import pytest

from celery_sidejob import StoreUnavailableError
from celery_sidejob.services.duties import Duties
from celery_sidejob.services.heartbeat import Heartbeat
from celery_sidejob.services.sweeper import Sweeper
from celery_sidejob.store.errors import RowsLocked
from celery_sidejob.store.own_executor import OwnExecutor
from celery_sidejob.store.statement import Statement
from tests.tools.in_process import EMPTY, Stage


def test_all_are_done_and_the_first_error_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []

    def fails(text: str) -> Callable[[], None]:
        def fail() -> None:
            raise ValueError(text)

        return fail

    duties = Duties(fails("first"), lambda: done.append("a"), fails("second"), lambda: done.append("b"))

    with pytest.raises(ValueError, match="first"):
        duties.do()

    assert done == ["a", "b"]
    assert "second" in caplog.text


def test_a_store_that_is_away_ends_the_turn_and_what_cuts_two_turns_short_keeps_nothing_from_being_done() -> None:
    done: list[str] = []

    def away() -> None:
        done.append("away")
        raise StoreUnavailableError("gone")

    duties = Duties(lambda: done.append("a"), away, lambda: done.append("b"))
    for expected in (["a", "away"], ["a", "away"], ["b", "a", "away"], ["b", "a", "away"]):
        with pytest.raises(StoreUnavailableError):
            duties.do()
        assert done == expected
        done.clear()


def test_rows_that_somebody_has_locked_end_no_turn() -> None:
    """The store answers: a duty that meets such a row is no reason to leave out those behind it."""
    done: list[str] = []

    def locked() -> None:
        raise RowsLocked("a row is locked")

    with pytest.raises(RowsLocked):
        Duties(locked, lambda: done.append("behind it")).do()
    assert done == ["behind it"]


class Injected:
    """Notes which duty of a service runs which statement, and has one statement fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run_by: dict[Statement, set[str]] = defaultdict(set)
        self.failing: Statement | None = None
        self.error: Exception = RuntimeError()
        self._duties: list[str] = []
        run, do = OwnExecutor.run, Duties.do

        def noting(executor: OwnExecutor, statement: Statement, /, **parameters: Any) -> Any:
            if self._duties:
                self.run_by[statement].add(self._duties[-1])
                if statement is self.failing:
                    raise self.error
            return run(executor, statement, **parameters)

        def named(duties: Duties) -> None:
            duties._duties = [self._named(duty) for duty in duties._duties]
            do(duties)

        monkeypatch.setattr(OwnExecutor, "run", noting)
        monkeypatch.setattr(Duties, "do", named)

    def _named(self, duty: Any) -> Callable[[], object]:
        if isinstance(duty, Named):
            return duty
        return Named(duty, self._duties)


class Named:
    """A duty that says while it is done that it is."""

    def __init__(self, duty: Any, running: list[str]) -> None:
        self._duty = duty
        self._running = running

    def __call__(self) -> object:
        self._running.append(self._duty.__name__)
        try:
            return self._duty()
        finally:
            self._running.pop()


@pytest.fixture
def injected(monkeypatch: pytest.MonkeyPatch) -> Injected:
    return Injected(monkeypatch)


@pytest.fixture
def shop(stage_database_url: str) -> Iterator[Stage]:
    """A stage with a durable task, results and a retention."""
    made = Stage(stage_database_url, result_backend="cache+memory://", sidejob_retention=3600, sidejob_lost_after=30)

    @made.app.task(name="mail", durable=True, shared=False)
    def mail() -> None:
        pass

    made.app.finalize()
    yield made
    made.sql(EMPTY)
    made.close()


def prepare(shop: Stage) -> dict[str, tuple[str, Callable[[], bool]]]:
    """Have something due of each duty; returns what shows that it was done: {effect: (its duties, whether it was)}."""
    shop.sql(EMPTY)
    shop.worker_id = shop.new_worker()
    dead = shop.new_worker()
    mail = shop.app.tasks["mail"]
    lost, timed, owed, ended, old = (shop.job(**how) for how in ({}, {"countdown": 3600}, {}, {}, {}))
    for job in (ended, old):
        shop.run(job)
    assert shop.claim(lost, worker_id=dead)
    for name in ("taken", "due", "doomed"):
        mail.apply_async(task_id=name)
    shop.runtime.connections.write_put_off()
    shop.sql("UPDATE messages SET look_at = now(), published_at = NULL WHERE locked_by IS NULL")
    shop.sql("UPDATE messages SET locked_by = %s, locked_at = now(), on_lost = 'requeue', max_losses = 3,"
             " look_at = 'infinity' WHERE task_id = 'taken'", dead)  # fmt: skip
    shop.sql("UPDATE messages SET doom = 'revoked' WHERE task_id = 'doomed'")
    shop.sql("UPDATE timers SET due_at = now() WHERE job_id = %s", timed.id)
    shop.sql("UPDATE askings SET stored_at = NULL, closed_at = now() - interval '1 hour' WHERE job_id = %s", ended.id)
    shop.sql("UPDATE askings SET stored_at = now() WHERE job_id = %s", old.id)
    shop.sql("UPDATE jobs SET ended_at = now() - interval '2 days' WHERE id = %s", old.id)
    shop.declare_dead(dead)

    def holds(statement: str, *parameters: Any) -> Callable[[], bool]:
        return lambda: bool(shop.sql(f"SELECT 1 WHERE {statement}", *parameters))

    return {
        "rescued": ("_look_at_workers", holds("(SELECT losses = 1 FROM jobs WHERE id = %s)", lost.id)),
        "matured": ("_mature_timers", holds("NOT EXISTS (SELECT FROM timers)")),
        "published": (
            "_publish", holds("EXISTS (SELECT FROM messages WHERE job_id = %s AND published_at IS NOT NULL)", owed.id),
        ),
        "stored": ("_store_results", holds("EXISTS (SELECT FROM askings WHERE job_id = %s AND stored_at IS NOT NULL)",
                                           ended.id)),
        "pruned": ("_prune", holds("NOT EXISTS (SELECT FROM jobs WHERE id = %s)", old.id)),
        "taken": ("_poll _take_from_the_dead", holds("(SELECT losses = 1 FROM messages WHERE task_id = 'taken')")),
        "sent": (
            "_poll _look_at_pages", holds("(SELECT published_at IS NOT NULL FROM messages WHERE task_id = 'due')"),
        ),
        "buried": ("_poll _look_at_pages", holds("EXISTS (SELECT FROM dead WHERE task_id = 'doomed')")),
    }  # fmt: skip


ERRORS = {
    "an error": (psycopg.errors.InternalError_("injected"), 2),
    "an error as of a store that is away": (StoreUnavailableError("injected"), 6),
}


@pytest.mark.parametrize(("error", "turns"), ERRORS.values(), ids=ERRORS)
def test_an_error_in_any_statement_of_a_sweepers_turn_keeps_no_other_duty_from_being_done(
    shop: Stage, injected: Injected, error: Exception, turns: int
) -> None:
    def sweep(turns: int) -> None:
        sweeper = Sweeper(shop.runtime)
        for _ in range(turns):
            with suppress(type(error)):
                sweeper.run_once()
            sweeper._looked_at.clear()

    effects = prepare(shop)
    sweep(2)
    assert [effect for effect, (_, done) in effects.items() if not done()] == [], "without an error all is done"
    statements = list(injected.run_by)
    assert len(statements) > 20

    injected.error = error
    for statement in statements:
        injected.failing = None
        effects = prepare(shop)
        injected.failing = statement
        sweep(turns)
        undone = {effect for effect, (_, done) in effects.items() if not done()}
        allowed = {effect for effect, (duty, _) in effects.items() if injected.run_by[statement] & {*duty.split()}}
        assert undone <= allowed, statement.text


def test_an_error_in_any_statement_of_a_heartbeat_keeps_it_beating_and_vouching(
    shop: Stage, injected: Injected, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat = Heartbeat(shop.runtime)
    heartbeat.register()

    def due() -> None:
        shop.sql("UPDATE workers SET beat_at = now() - interval '1 h'")
        heartbeat._beat_at = heartbeat._held._reconciled_at = heartbeat.tasks._reconciled_at = float("-inf")

    def beat_s() -> float:
        return float(shop.sql("SELECT extract(epoch FROM now() - beat_at) FROM workers WHERE id = %s",
                              heartbeat.worker_id)[0][0])  # fmt: skip

    vouched: list[None] = []
    monkeypatch.setattr(heartbeat._waiting, "vouch", lambda: vouched.append(None))
    try:
        due()
        heartbeat.run_once()
        statements = [statement for statement, duties in injected.run_by.items() if "_keep_beating" not in duties]
        assert statements, "it has something else to do"
        injected.error = psycopg.errors.InternalError_("injected")
        for statement in statements:
            injected.failing = statement
            vouched.clear()
            due()
            with suppress(psycopg.errors.InternalError_):
                heartbeat.run_once()
            assert beat_s() < 60, statement.text
            assert vouched, statement.text
    finally:
        injected.failing = None
        heartbeat.leave()
        heartbeat.close()
