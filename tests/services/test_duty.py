"""An error in one duty of a service keeps no other duty from being done, whichever statement raises it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from celery_sidejob import CapacityPool, StoreUnavailableError
from celery_sidejob.inspection.statistics import COUNTED
from celery_sidejob.jobs.capacity import declare
from celery_sidejob.services.duty import Duties, Duty, Report
from celery_sidejob.services.heartbeat.heartbeat import Heartbeat, Prefetched
from celery_sidejob.services.sweep.sweeper import COUNTS, DUTIES, PollReport, Sweeper
from celery_sidejob.store.connection.own_executor import OwnExecutor
from celery_sidejob.store.errors import RowsLocked, StoreDown, in_the_way
from celery_sidejob.store.statement import Statement
from tests.tools.in_process import EMPTY, Stage


class Made(Duty):
    """Notes in `done` that it was done, or fails."""

    def __init__(self, name: str, done: list[str], error: Exception | None = None) -> None:
        super().__init__()
        self._name = name
        self._done = done
        self._error = error

    def _do(self, report: Report) -> None:
        self._done.append(self._name)
        report[self._name] += 1
        if self._error is not None:
            raise self._error


def test_all_are_done_and_the_first_error_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []
    report = Report()
    failing, other = (Made(name, done, ValueError(name)) for name in ("first", "second"))
    duties = Duties(failing, Made("a", done), other, Made("b", done))

    with pytest.raises(ValueError, match="first"):
        duties.do(report)

    assert done == ["first", "a", "second", "b"]
    assert report == Report(done), "what was done before an error is counted"
    assert "Made failed, and another duty too: second" in caplog.text


def test_a_store_that_is_away_is_raised_whatever_failed_before_it(caplog: pytest.LogCaptureFixture) -> None:
    """The sweeper must learn of it: free liveness locks mean nothing for a while then."""
    done: list[str] = []
    duties = Duties(Made("broken", done, ValueError("broken")), Made("away", done, StoreDown("gone")))

    with pytest.raises(StoreUnavailableError, match="gone"):
        duties.do(Report())

    assert done == ["broken", "away"]
    assert "Made failed, and another duty too: broken" in caplog.text


def test_a_store_that_is_away_ends_the_turn_and_what_cuts_two_turns_short_keeps_nothing_from_being_done() -> None:
    done: list[str] = []
    away = Made("away", done, StoreDown("gone"))
    duties = Duties(Made("a", done), away, Made("b", done))
    for expected in (["a", "away"], ["a", "away"], ["b", "a", "away"], ["b", "a", "away"]):
        with pytest.raises(StoreUnavailableError):
            duties.do(Report())
        assert done == expected
        done.clear()


@pytest.mark.parametrize("error", [RowsLocked("a row is locked"), in_the_way("sweep", ValueError("deadlock"))])
def test_what_others_do_in_the_store_ends_no_turn(error: StoreUnavailableError) -> None:
    """The store answers: a duty that meets others there is no reason to leave out the duties behind it."""
    done: list[str] = []

    with pytest.raises(type(error)):
        Duties(Made("locked", done, error), Made("behind it", done)).do(Report())
    assert done == ["locked", "behind it"]


def test_a_duty_is_done_as_often_as_its_interval_says_whether_or_not_it_fails() -> None:
    done: list[str] = []
    often, seldom = Made("often", done), Made("seldom", done, ValueError("no"))
    seldom.interval_s = 3600
    duties = Duties(seldom, often)

    with pytest.raises(ValueError, match="no"):
        duties.do(Report())
    duties.do(Report())
    assert done == ["seldom", "often", "often"]

    seldom.due_at = 0.0
    with pytest.raises(ValueError, match="no"):
        duties.do(Report())


def test_what_the_sweeper_tells_people_is_what_its_duties_declare() -> None:
    names = {count.name for duty in DUTIES for count in duty.counts}
    assert {field.name for field in fields(PollReport)} == names == COUNTS.keys()
    assert {count.total for count in COUNTS.values()} - {None} <= COUNTED.keys()

    report = PollReport(suspected=1)
    assert not report, "a suspicion is nothing done"
    report += PollReport(rescued=2, broker_emptied=True)
    report += PollReport(rescued=1, broker_emptied=True)
    assert report
    assert (report.suspected, report.rescued, report.broker_emptied) == (1, 3, True)


class Injected:
    """Notes which duty of a service runs which statement, and has one statement fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run_by: dict[Statement, set[str]] = defaultdict(set)
        self.failing: Statement | None = None
        self.error: Exception = RuntimeError()
        self.doing: str | None = None
        run, do = OwnExecutor.run, Duties.do

        def noting(executor: OwnExecutor, statement: Statement, /, **parameters: Any) -> Any:
            if self.doing is not None:
                self.run_by[statement].add(self.doing)
                if statement is self.failing:
                    raise self.error
            return run(executor, statement, **parameters)

        def named(duties: Duties, report: Report) -> None:
            duties._duties = tuple(duty if isinstance(duty, Named) else Named(duty, self) for duty in duties._duties)
            do(duties, report)

        monkeypatch.setattr(OwnExecutor, "run", noting)
        monkeypatch.setattr(Duties, "do", named)


class Named:
    """A duty that says while it is done, or asked whether it is due, that it is."""

    def __init__(self, duty: Duty, injected: Injected) -> None:
        self.name = duty.name
        self.duty = duty
        self._injected = injected

    def is_due(self) -> bool:
        with self._named():
            return self.duty.is_due()

    def run_once(self, report: Report) -> Report:
        with self._named():
            return self.duty.run_once(report)

    @contextmanager
    def _named(self) -> Iterator[None]:
        self._injected.doing = self.name
        try:
            yield
        finally:
            self._injected.doing = None


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
    """Have something due of each duty; returns what shows that it was done: {effect: (its duty, whether it was)}."""
    shop.sql(EMPTY)
    shop.worker_id = shop.new_worker()
    dead = shop.new_worker()
    mail = shop.app.tasks["mail"]
    lost, timed, owed, ended, old, left, gone = (
        shop.job(**how) for how in ({}, {"countdown": 3600}, {}, {}, {}, {}, {})
    )
    for job in (ended, old, gone):
        shop.run(job)
    assert shop.claim(lost, worker_id=dead)
    for name in ("taken", "due", "doomed"):
        mail.apply_async(task_id=name)
    shop.runtime.connections.write_behind_now()
    shop.sql("UPDATE messages SET next_check_at = now(), published_at = NULL WHERE locked_by IS NULL")
    shop.sql("UPDATE messages SET locked_by = %s, locked_pid = 1, locked_at = now(), on_lost = 'requeue',"
             " max_losses = 3, next_check_at = 'infinity' WHERE task_id = 'taken'", dead)  # fmt: skip
    shop.sql("UPDATE messages SET doom = 'revoked' WHERE task_id = 'doomed'")
    shop.sql("UPDATE timers SET due_at = now() WHERE job_id = %s", timed.id)
    shop.sql("UPDATE askings SET stored_at = NULL, closed_at = now() - interval '1 hour' WHERE job_id = %s", ended.id)
    shop.sql("UPDATE askings SET stored_at = now() WHERE job_id = %s", old.id)
    shop.sql("UPDATE jobs SET ended_at = now() - interval '2 days' WHERE id = %s", old.id)
    shop.sql("UPDATE jobs SET status = 'terminated' WHERE id = %s", gone.id)
    shop.sql("INSERT INTO tree_deletions VALUES (%s)", gone.id)
    shop.sql("INSERT INTO tree_terminations VALUES (%s, %s, true)", left.id, left.id)
    shop.sql("INSERT INTO capacity_pools (name, capacity, declared, shards, refused) VALUES ('pool', 1, 1, 1, 7)")
    shop.sql("INSERT INTO capacity_shards VALUES ('pool', 0, 1)")
    declare(CapacityPool("filled", 1), shop.runtime)
    filled = CapacityPool("filled", 1).apply_async(shop.idle, on_full="wait").job
    shop.sql("UPDATE messages SET pool_shard = NULL, published_at = NULL, gate = 2,"
             " next_check_at = 'infinity' WHERE job_id = %s", filled.id)  # fmt: skip
    shop.sql("UPDATE capacity_shards SET used = 0")
    port = "INSERT INTO ports (job_id, direction, name, packet_limit) VALUES (%s, 'in', 'full', 1) RETURNING id"
    shop.sql("INSERT INTO port_waiters (port_id, job_id, run_no, needs, woken_at)"
             " VALUES (%s, 1, 1, 1, now() - interval '1 hour')", shop.sql(port, owed.id)[0][0])  # fmt: skip
    shop.sql("INSERT INTO results VALUES ('task:x', 'SUCCESS', '', now()) ON CONFLICT DO NOTHING")
    shop.sidejob.batch("done").close()
    shop.sidejob.schedule("tick", shop.idle, every=3600, start=datetime(2026, 1, 1, tzinfo=UTC))
    shop.declare_dead(dead)

    def holds(statement: str, *parameters: Any) -> Callable[[], bool]:
        return lambda: bool(shop.sql(f"SELECT 1 WHERE {statement}", *parameters))

    return {
        "rescued": ("LostRuns", holds("(SELECT losses = 1 FROM jobs WHERE id = %s)", lost.id)),
        "passed on": ("UnusedRoom", holds("NOT EXISTS (SELECT FROM port_waiters)")),
        "matured": ("Timers", holds("NOT EXISTS (SELECT FROM timers)")),
        "batches": ("Batches", holds("EXISTS (SELECT FROM batches WHERE ended_at IS NOT NULL)")),
        "scheduled": ("Schedules", holds("EXISTS (SELECT FROM jobs WHERE schedule = 'tick')")),
        "terminated": ("TreeTerminations", holds("(SELECT status <> 'queued' FROM jobs WHERE id = %s)", left.id)),
        "deleted": ("TreeDeletions", holds("NOT EXISTS (SELECT FROM jobs WHERE id = %s)", gone.id)),
        "published": (
            "DueJobs", holds("EXISTS (SELECT FROM messages WHERE job_id = %s AND published_at IS NOT NULL)", owed.id),
        ),
        "stored": ("UnsentResults", holds("EXISTS (SELECT FROM askings WHERE job_id = %s AND stored_at IS NOT NULL)",
                                           ended.id)),
        "sampled": ("CapacitySamples", holds("EXISTS (SELECT FROM capacity_samples WHERE refused = 7)")),
        "counted": ("RunSamples", holds("EXISTS (SELECT FROM run_samples)")),
        "filled": (
            "CapacityPools", holds("(SELECT pool_shard = 0 FROM messages WHERE job_id = %s)", filled.id)
        ),
        "expired": ("ExpiredResults", holds("NOT EXISTS (SELECT FROM results)")),
        "pruned": ("Prune", holds("NOT EXISTS (SELECT FROM jobs WHERE id = %s)", old.id)),
        "taken": ("LostRuns", holds("(SELECT losses = 1 FROM messages WHERE task_id = 'taken')")),
        "sent": (
            "DueTasks", holds("(SELECT published_at IS NOT NULL FROM messages WHERE task_id = 'due')"),
        ),
        "buried": ("DueTasks", holds("EXISTS (SELECT FROM dead WHERE task_id = 'doomed')")),
    }  # fmt: skip


ERRORS = {
    "an error": (psycopg.errors.InternalError_("injected"), 2),
    "an error as of a store that is away": (StoreDown("injected"), 10),
}
"""Each with the turns after which all others are done: four duties begin with the same look at the schema, and each
cuts two turns short."""


@pytest.mark.few(1)
@pytest.mark.parametrize(("error", "turns"), ERRORS.values(), ids=ERRORS)
def test_an_error_in_any_statement_of_a_sweepers_turn_keeps_no_other_duty_from_being_done(
    shop: Stage, injected: Injected, error: Exception, turns: int
) -> None:
    def swept(effects: dict[str, tuple[str, Callable[[], bool]]], turns: int, may_fail: set[str]) -> bool:
        """Whether within so many turns all is done but what these duties do."""
        sweeper = Sweeper(shop.runtime)
        for _ in range(turns):
            with suppress(type(error)):
                sweeper.run_once()
            if all(done() for duty, done in effects.values() if duty not in may_fail):
                return True
            for named in sweeper._duties._duties:
                named.duty.due_at = float("-inf")
        return False

    assert swept(prepare(shop), 2, set()), "without an error all is done"
    statements = list(injected.run_by)
    assert len(statements) > 20

    injected.error = error
    for statement in statements:
        injected.failing = None
        effects = prepare(shop)
        injected.failing = statement
        assert swept(effects, turns, injected.run_by[statement]), statement.text


def test_an_error_in_any_statement_of_a_heartbeat_keeps_it_beating_and_vouching(
    shop: Stage, injected: Injected, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat = Heartbeat(shop.runtime)
    heartbeat.register()

    def due() -> None:
        shop.sql("UPDATE workers SET beat_at = now() - interval '1 h'")
        heartbeat._beat_at = heartbeat.jobs._strays_at = heartbeat.tasks._strays_at = float("-inf")

    def beat_s() -> float:
        return float(shop.sql("SELECT extract(epoch FROM now() - beat_at) FROM workers WHERE id = %s",
                              heartbeat.worker_id)[0][0])  # fmt: skip

    vouched: list[None] = []
    monkeypatch.setattr(Prefetched, "_do", lambda duty, report: vouched.append(None))
    try:
        due()
        heartbeat.run_once()
        statements = [statement for statement, duties in injected.run_by.items() if "Beat" not in duties]
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
