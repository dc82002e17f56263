"""Chords whose parts are counted in the store: what is counted, what is sent, and what a death leaves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from celery import Celery, states
from celery.app.task import Context
from celery.exceptions import ChordError
from celery.result import AsyncResult, GroupResult

from celery_sidejob.model.crash_points import Died
from celery_sidejob.results import backend as module
from tests.results.conftest import Rows
from tests.tools.apps import make_app
from tests.tools.brokers import in_postgres
from tests.tools.crash_points import Arm
from tests.tools.pgbouncer import direct
from tests.tools.versions import KOMBU_5_7
from tests.tools.waiting import wait_until

pytestmark = KOMBU_5_7

BODIES = ["plain.total", "durable.total"]


class Stage:
    """An app whose store is its broker and has its results, and one chord of which the parts are reported by hand."""

    def __init__(self, database_url: str, rows: Rows, broker: str | None = None) -> None:
        self.app: Celery = make_app(
            "chords", broker=broker or in_postgres(database_url), result_backend="sidejobpg://",
            sidejob_database_url=database_url, sidejob_durable_tasks=["durable.*"],
        )  # fmt: skip
        self.rows = rows

    def request(self, number: int, body: str = "plain.total", **options: Any) -> Context:
        """The request of the part with this number in the header."""
        call = self.app.signature(body, app=self.app).set(task_id="body", **options)
        return Context(id=f"part {number}", task="plain.part", group="g", group_index=number, chord=dict(call))

    def done(self, number: int, **options: Any) -> None:
        """Report that a part has ended well."""
        self.app.backend.mark_as_done(f"part {number}", number, self.request(number, **options))

    def late(self) -> int:
        """Do what the sweeper does, once the claim is no longer valid."""
        self.rows.run("UPDATE chords SET send_at = now() WHERE send_at IS NOT NULL")
        sent: int = self.app.backend.send_late_bodies()
        return sent

    def sent(self, task_id: str = "body") -> list[Any]:
        """The arguments of all messages of a task."""
        kept = self.rows.all("SELECT body FROM messages WHERE task_id = %s AND body IS NOT NULL", task_id)
        sent = self.rows.all(
            "SELECT body FROM broker_messages WHERE headers::json->>'id' = %s AND length(body) > 0", task_id
        )
        return [json.loads(body)[0] for (body,) in kept or sent]

    @property
    def open(self) -> list[Any]:
        """The chords that are not forgotten: key, number of counted parts, whether the body is owed."""
        return self.rows.all("SELECT key, counted, send_at IS NOT NULL FROM chords ORDER BY key")


@pytest.fixture
def stage(database_url: str, rows: Rows) -> Iterator[Stage]:
    """The store, and an app without workers."""
    made = Stage(database_url, rows)
    yield made
    made.app.sidejob.close()  # type: ignore[attr-defined]
    made.app.close()


@pytest.mark.parametrize("body", BODIES)
def test_the_last_part_sends_the_body_with_the_values_in_order(stage: Stage, body: str) -> None:
    stage.app.backend.set_chord_size("g", 12)
    for number in reversed(range(12)):
        assert (stage.sent(), len(stage.open)) == ([], 1)
        stage.done(number, body=body)
    assert (stage.sent(), stage.open) == ([[list(range(12))]], [])
    assert stage.rows.all("SELECT count(*) FROM chord_parts") == [(0,)]
    assert stage.app.AsyncResult("part 3").get() == 3


def test_a_part_that_is_reported_twice_is_counted_once(stage: Stage) -> None:
    stage.app.backend.set_chord_size("g", 2)
    for _ in range(3):
        stage.done(0)
    assert stage.open == [("g", 1, False)]
    stage.done(1)
    stage.done(1)
    assert (stage.sent(), stage.late()) == ([[[0, 1]]], 0)


@pytest.mark.parametrize("adds_first", [False, True])
def test_the_number_of_parts_may_be_known_last(stage: Stage, adds_first: bool) -> None:
    stage.done(0)
    told = [lambda: stage.app.backend.set_chord_size("g", 2), lambda: stage.app.backend.add_to_chord("g", None)]
    for tell in reversed(told) if adds_first else told:
        tell()
    stage.done(1)
    assert stage.sent() == []
    stage.done(2)
    assert stage.sent() == [[[0, 1, 2]]]


def test_a_part_without_a_result_is_counted(stage: Stage) -> None:
    stage.app.backend.set_chord_size("g", 1)
    request = stage.request(0)
    request.ignore_result = True
    stage.app.backend.mark_as_done("part 0", 0, request)
    assert (stage.sent(), stage.rows.keys) == ([[[0]]], [])


def test_a_state_of_the_user_s_own_counts_nothing(stage: Stage) -> None:
    stage.app.backend.set_chord_size("g", 1)
    stage.app.backend.store_result("part 0", {"done": 1}, states.SUCCESS, request=stage.request(0))
    assert stage.open == [("g", 0, False)]


def test_a_part_that_failed_fails_the_chord_once_all_have_ended(stage: Stage) -> None:
    stage.app.backend.set_chord_size("g", 2)
    errback = dict(stage.app.signature("durable.errback", app=stage.app).set(task_id="errback"))
    stage.app.backend.mark_as_failure("part 0", KeyError("x"), None, stage.request(0, link_error=[errback]))
    body = AsyncResult("body", app=stage.app)
    assert body.state == states.PENDING
    stage.done(1, link_error=[errback])
    with pytest.raises(ChordError, match=r"Dependency part 0 raised KeyError\('x'\)"):
        body.get()
    assert (stage.sent(), stage.sent("errback"), stage.open) == ([], [["body"]], [])


def test_the_structure_of_the_header_is_kept(stage: Stage) -> None:
    parts = [AsyncResult(f"part {number}", app=stage.app) for number in range(3)]
    stage.app.backend.apply_chord(("g", [parts[0], GroupResult("inner", parts[1:], app=stage.app)]), None)
    stage.app.backend.set_chord_size("g", 3)
    for number in range(3):
        stage.done(number)
    assert stage.sent() == [[[0, [1, 2]]]]


def test_a_chord_does_not_fail_because_the_store_does_not_answer(
    stage: Stage, at: Arm, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It stops answering while the values of nested groups are read, for which Celery has a timeout."""
    stage.app.conf.result_chord_join_timeout = 0.1
    inner = GroupResult("inner", [AsyncResult("part 0", app=stage.app)], app=stage.app)
    stage.app.backend.apply_chord(("g", [inner]), None)
    stage.app.backend.set_chord_size("g", 1)
    with psycopg.connect(direct(database_url), options="-c idle_in_transaction_session_timeout=4s") as locking:
        at("read:after-commit", lambda: locking.execute("LOCK TABLE sidejob.results"))
        stage.done(0)
        assert "The body of chord g is not sent yet, and tried again" in caplog.text
        locking.rollback()
    assert (stage.sent(), AsyncResult("body", app=stage.app).state) == ([], states.PENDING)
    assert (stage.late(), stage.sent()) == (1, [[[[0]]]])


def test_a_value_that_is_too_large_fails_the_chord(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 2000)
    stage.app.backend.set_chord_size("g", 1)
    stage.app.backend.mark_as_done("part 0", "x" * 2000, stage.request(0))
    with pytest.raises(ChordError, match="ResultTooLargeError"):
        AsyncResult("body", app=stage.app).get()
    assert stage.sent() == []


def test_a_chord_that_is_called_again_sends_its_body_again(app: Celery, rows: Rows) -> None:
    body = app.signature("total", app=app).set(task_id="body")
    request = Context(id="part", task="part", group="g", group_index=0, chord=dict(body))
    for run in (1, 2):
        app.backend.set_chord_size("g", 1)
        app.backend.mark_as_done("part", run, request)
        app.backend.mark_as_done("body", run)
        assert rows.all("SELECT count(*) FROM broker_messages WHERE headers::json->>'id' = 'body'") == [(run,)]


def test_a_durable_body_is_published_to_another_broker_at_once(database_url: str, redis_url: str, rows: Rows) -> None:
    stage = Stage(database_url, rows, redis_url)
    stage.app.backend.set_chord_size("g", 1)
    stage.done(0, body="durable.total")
    is_published = "SELECT published_at IS NOT NULL FROM messages WHERE task_id = 'body'"
    wait_until(lambda: rows.all(is_published) == [(True,)], message="the mark")
    stage.app.sidejob.close()  # type: ignore[attr-defined]
    stage.app.close()


def test_chords_that_nobody_completes_expire(stage: Stage) -> None:
    stage.done(0)
    stage.rows.run("UPDATE chords SET expires_at = now()")
    stage.app.backend.cleanup()
    assert (stage.open, stage.rows.all("SELECT * FROM chord_parts")) == ([], [])


@pytest.fixture
def for_ever(stage: Stage) -> None:
    """Chords do not expire."""
    stage.app.conf.update(result_expires=0, result_chord_expires=0)


@pytest.mark.usefixtures("for_ever")
def test_a_part_that_ends_again_once_its_chord_is_forgotten_leaves_nothing_for_ever(stage: Stage) -> None:
    stage.app.backend.set_chord_size("g", 1)
    stage.done(0)
    assert (stage.open, len(stage.sent())) == ([], 1)
    stage.done(0)
    stage.app.backend.add_to_chord("h", None)
    assert stage.open == [("g", 1, False), ("h", 0, False)]
    stage.rows.run("UPDATE chords SET expires_at = expires_at - interval '1 day'")
    stage.app.backend.cleanup()
    assert (stage.open, stage.rows.all("SELECT * FROM chord_parts")) == ([], [])


def test_a_header_by_the_name_of_our_note_counts_nothing(stage: Stage) -> None:
    stage.app.backend.mark_as_done("alone", 1, Context(id="alone", task="plain.part", sidejob_counts=True))
    assert AsyncResult("alone", app=stage.app).state == states.SUCCESS
    assert stage.open == []


@pytest.mark.usefixtures("for_ever")
def test_a_chord_whose_size_comes_late_does_not_expire_either(stage: Stage) -> None:
    stage.done(0)
    stage.app.backend.set_chord_size("g", 3)
    stage.done(1)
    stage.rows.run("UPDATE chords SET expires_at = expires_at - interval '10 days'")
    stage.app.backend.cleanup()
    stage.done(2)
    assert stage.sent() == [[[0, 1, 2]]]


def test_a_chord_whose_body_is_owed_does_not_expire(stage: Stage, at: Arm) -> None:
    stage.app.backend.set_chord_size("g", 1)
    at("chord-part:after-commit", die)
    with pytest.raises(Died):
        stage.done(0)
    stage.rows.run("UPDATE chords SET expires_at = now()")
    stage.app.backend.cleanup()
    assert (stage.late(), stage.sent()) == (1, [[[0]]])


# -- deaths ------------------------------------------------------------------------------------------------------------


def die() -> None:
    raise Died


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    ("point", "counted", "sent_before"),
    [
        ("chord-part:before-commit", 1, False),
        ("chord-part:after-commit", 2, False),
        ("chord-body:before-commit", 2, False),
        ("chord-body:after-commit", 2, True),
    ],
)
def test_a_death_at_the_last_part(
    stage: Stage, at: Arm, body: str, point: str, counted: int, sent_before: bool
) -> None:
    """The body is sent by the commit that forgets the chord, and that commit is owed from the last count on."""
    stage.app.backend.set_chord_size("g", 2)
    stage.done(0, body=body)
    at(point, die)
    with pytest.raises(Died):
        stage.done(1, body=body)
    assert bool(stage.sent()) is sent_before
    assert stage.open == ([] if sent_before else [("g", counted, counted == 2)])
    assert stage.late() == (0 if sent_before or counted == 1 else 1)
    stage.done(1, body=body)  # the part runs again
    assert stage.late() == 0
    assert (len(stage.sent()), stage.sent()[0]) == (1, [[0, 1]])


def test_a_late_process_sends_nothing_once_another_has_the_claim(stage: Stage, at: Arm) -> None:
    stage.app.backend.set_chord_size("g", 1)
    at("chord-part:after-commit", lambda: stage.rows.run("UPDATE chords SET send_at = now() + interval '1 min'"))
    stage.done(0)
    assert stage.app.backend.send_late_bodies() == 0, "nobody is late yet"
    assert (stage.sent(), stage.open) == ([], [("g", 1, True)])
