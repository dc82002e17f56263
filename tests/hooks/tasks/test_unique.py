"""Durable tasks with unique keys: no two of a key wait or run, whoever calls at once and whatever is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from celery import Celery, chord, group
from celery.signals import before_task_publish

from celery_sidejob import (
    CapacityPool,
    DuplicateError,
    IllegalMoveError,
    InvalidValueError,
    Overloaded,
    StoreUnavailableError,
)
from celery_sidejob.operations import stores
from celery_sidejob.operations.ledger.burials import revoke
from celery_sidejob.store.outbox import tasks
from celery_sidejob.store.statement import Statement
from celery_sidejob.testing.inline import run_until_quiet
from tests.acceptance.lenders import LENDERS
from tests.tools.apps import make_app
from tests.tools.crash_points import Arm, lost
from tests.tools.waiting import wait_until

ROWS = Statement("SELECT task_id, unique_key, doom FROM {messages} ORDER BY task_id")
BEGIN = Statement("""
UPDATE {messages} SET locked_by = 1, locked_at = now(), next_check_at = 'infinity' WHERE task_id = %(task_id)s""")
LOSE = Statement("UPDATE {messages} SET losses = 1 WHERE task_id = %(task_id)s")
RETRY = Statement("UPDATE {messages} SET generation = 2 WHERE task_id = %(task_id)s")
END = Statement("DELETE FROM {messages} WHERE task_id = %(task_id)s")


@pytest.fixture
def app(database_url: str) -> Iterator[Celery]:
    made = make_app(
        "unique", result_backend="cache+memory://", sidejob_database_url=database_url, sidejob_durable_tasks=["mail"]
    )
    yield made
    made.sidejob.close()
    made.close()


def call(app: Celery, task_id: str, **options: Any) -> str:
    return str(app.send_task("mail", task_id=task_id, **{"unique": "k", **options}).id)


def rows(app: Celery) -> dict[str, tuple[str | None, str | None]]:
    """The key and the doom of each message."""
    found = app.sidejob.runtime.connections.run(ROWS)
    return {row.task_id: (row.unique_key, row.doom) for row in found}


def does(app: Celery, statement: Statement, task_id: str) -> None:
    app.sidejob.runtime.connections.run(statement, task_id=task_id)


def test_a_second_call_of_a_key_is_the_first_until_that_is_done(app: Celery) -> None:
    assert call(app, "one") == "one"
    assert call(app, "two") == "one"
    does(app, BEGIN, "one")
    assert call(app, "two") == "one"
    assert call(app, "other", unique="other") == "other"
    assert call(app, "none", unique=None) == "none"
    does(app, END, "one")
    assert call(app, "two") == "two"
    assert rows(app) == {"other": ("other", None), "none": (None, None), "two": ("k", None)}


def test_a_second_call_is_refused_and_told_of_the_first(app: Celery) -> None:
    call(app, "one")
    with pytest.raises(DuplicateError, match="Task one is not done and has the unique key 'k'") as refused:
        call(app, "two", on_duplicate="refuse")
    assert (refused.value.task_id, refused.value.job_id, refused.value.job) == ("one", None, None)
    assert list(rows(app)) == ["one"]


def test_a_waiting_task_is_replaced_and_revoked(app: Celery) -> None:
    call(app, "one", countdown=3600)
    assert call(app, "two", on_duplicate="replace") == "two"
    assert rows(app) == {"one": (None, "revoked"), "two": ("k", None)}
    app.sidejob.poll()  # a thread of its own tells the result backend, and buries the task
    wait_until(lambda: rows(app) == {"two": ("k", None)}, message="the replaced task to be buried")
    assert [(entry.task_id, entry.reason) for entry in app.sidejob.dead] == [("one", "revoked")]


@pytest.mark.parametrize("meanwhile", [BEGIN, LOSE, RETRY, END], ids=["begins", "is lost", "is retried", "ends"])
def test_a_task_that_begins_or_ends_after_the_look_at_it_does_not_give_way(
    app: Celery, monkeypatch: pytest.MonkeyPatch, meanwhile: Statement
) -> None:
    call(app, "one")
    give_way = tasks.give_way

    def happens_just_before(*given: Any, **named: Any) -> bool:
        does(app, meanwhile, "one")
        return give_way(*given, **named)

    monkeypatch.setattr(tasks, "give_way", happens_just_before)
    if meanwhile is END:
        assert call(app, "two", on_duplicate="replace") == "two"
        assert rows(app) == {"two": ("k", None)}
        return
    with pytest.raises(DuplicateError, match="its first run has begun"):
        call(app, "two", on_duplicate="replace")
    assert rows(app) == {"one": ("k", None)}


@pytest.mark.parametrize("begun", [BEGIN, LOSE, RETRY], ids=["runs", "was lost", "is retried"])
def test_a_task_that_has_begun_is_not_replaced(app: Celery, begun: Statement) -> None:
    call(app, "one")
    does(app, begun, "one")
    with pytest.raises(DuplicateError, match="its first run has begun"):
        call(app, "two", on_duplicate="replace")
    assert rows(app) == {"one": ("k", None)}


def test_a_revoked_task_has_its_key_as_long_as_it_runs(app: Celery) -> None:
    call(app, "waits", unique="w")
    revoke(app.sidejob.runtime, ["waits"])
    assert call(app, "next", unique="w") == "next"
    assert call(app, "third", unique="w") == "next"
    call(app, "runs", unique="r")
    does(app, BEGIN, "runs")
    revoke(app.sidejob.runtime, ["runs"])
    assert call(app, "next one", unique="r") == "runs"


@pytest.mark.parametrize("meanwhile", [BEGIN, END], ids=["begins", "ends"])
def test_a_task_that_begins_or_ends_just_before_it_is_replaced_is_left_alone(
    app: Celery, at: Arm, meanwhile: Statement
) -> None:
    call(app, "one")
    at("durable-keep:before-commit", lambda: does(app, meanwhile, "one"))
    if meanwhile is END:
        assert call(app, "two", on_duplicate="replace") == "two"
        assert rows(app) == {"two": ("k", None)}
        return
    with pytest.raises(DuplicateError, match="its first run has begun"):
        call(app, "two", on_duplicate="replace")
    assert rows(app) == {"one": ("k", None)}


@pytest.mark.parametrize("on_duplicate", ["return", "refuse", "replace"])
def test_a_call_is_kept_if_the_task_with_its_key_ends_meanwhile(app: Celery, at: Arm, on_duplicate: str) -> None:
    """Its own message was refused, and by the time it looks for the other nobody has the key."""
    call(app, "one")
    at("durable-keep:after-commit", lambda: does(app, END, "one"))
    assert call(app, "two", on_duplicate=on_duplicate) == "two"
    assert rows(app) == {"two": ("k", None)}


def test_a_call_in_a_transaction_is_kept_if_the_task_with_its_key_ends_meanwhile(
    app: Celery, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(app, "one")
    look = tasks.in_the_way

    def ends_just_before(*given: Any, **named: Any) -> Any:
        does(app, END, "one")
        return look(*given, **named)

    monkeypatch.setattr(tasks, "in_the_way", ends_just_before)
    with LENDERS["psycopg"](database_url) as lender:
        assert call(app, "two", transaction=lender.transaction) == "two"
        lender.commit()
    assert rows(app) == {"two": ("k", None)}


def test_a_call_repeated_with_its_task_id_is_the_task_that_is_not_done(app: Celery) -> None:
    call(app, "one")
    assert call(app, "one") == "one"
    with pytest.raises(DuplicateError, match="Task one is not done"):
        call(app, "one", on_duplicate="refuse")
    with pytest.raises(InvalidValueError, match="task_id='one' is taken"):
        call(app, "one", on_duplicate="replace")
    with pytest.raises(InvalidValueError, match="task_id='one' is taken"):
        call(app, "one", unique="another")
    assert rows(app) == {"one": ("k", None)}


def test_nothing_is_replaced_by_a_call_that_is_refused(app: Celery) -> None:
    call(app, "waits")
    call(app, "taken", unique=None)
    with pytest.raises(InvalidValueError, match="task_id='taken' is taken"):
        call(app, "taken", on_duplicate="replace")
    assert rows(app) == {"waits": ("k", None), "taken": (None, None)}


@pytest.mark.parametrize("on_duplicate", ["return", "refuse", "replace"])
def test_of_sixteen_who_call_at_once_one_is_kept(app: Celery, on_duplicate: str) -> None:
    call(app, "opens-connections", unique=None)
    for turn in range(5):
        start, found = threading.Barrier(16), list[str]()

        def ask(n: int, turn: int = turn, start: threading.Barrier = start, found: list[str] = found) -> None:
            start.wait()
            try:
                found.append(call(app, f"{turn}-{n}", unique=str(turn), on_duplicate=on_duplicate))
            except DuplicateError as error:
                found.append(str(error.task_id))

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        kept = {task_id: row for task_id, row in rows(app).items() if task_id.startswith(f"{turn}-")}
        (holder,) = [task_id for task_id, (key, _) in kept.items() if key is not None]
        assert len(found) == 16
        if on_duplicate == "replace":
            assert set(found) == kept.keys()
            assert len(kept) == 16
            assert [task_id for task_id, (_, doom) in kept.items() if doom is None] == [holder]
        else:
            assert (set(found), list(kept)) == ({holder}, [holder])


@pytest.mark.parametrize("on_duplicate", ["return", "refuse", "replace"])
def test_a_call_whose_answer_was_lost_is_kept_once(app: Celery, at: Arm, on_duplicate: str) -> None:
    if on_duplicate == "replace":
        call(app, "replaced")
    at("durable-keep:after-commit", lost)
    assert call(app, "one", on_duplicate=on_duplicate) == "one"
    assert {task_id: row for task_id, row in rows(app).items() if row[0]} == {"one": ("k", None)}


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_who_calls_during_another_s_transaction_waits_for_its_end(app: Celery, database_url: str, ends: str) -> None:
    found: list[str] = []
    with LENDERS["psycopg"](database_url) as lender, psycopg.connect(database_url, autocommit=True) as looking:
        call(app, "one", transaction=lender.transaction)
        assert call(app, "two", transaction=lender.transaction) == "one"
        with pytest.raises(IllegalMoveError, match="cannot be part of transaction="):
            call(app, "two", transaction=lender.transaction, on_duplicate="replace")
        other = threading.Thread(target=lambda: found.append(call(app, "three")))
        other.start()
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        wait_until(lambda: looking.execute(waits).fetchone() == (1,), message="the other call to wait")
        getattr(lender, ends)()
        other.join()
    assert found == ["one" if ends == "commit" else "three"]
    assert list(rows(app)) == found


@pytest.mark.parametrize("kind", ["psycopg", "session-psycopg"])
def test_a_transaction_that_sees_an_older_state_of_the_store_keeps_no_second_task(
    app: Celery, database_url: str, kind: str
) -> None:
    with LENDERS[kind](database_url) as lender:
        lender.sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        lender.sql("SELECT count(*) FROM sidejob.messages")
        call(app, "one")
        with pytest.raises(DuplicateError, match="A task that your transaction does not see yet has"):
            call(app, "two", transaction=lender.transaction)
        assert call(app, "three", unique="other", transaction=lender.transaction) == "three", "it is not aborted"
        lender.commit()
    assert rows(app) == {"one": ("k", None), "three": ("other", None)}


def test_a_transaction_that_takes_long_is_no_failure_of_the_store(
    app: Celery, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store answers, only not to this call: other calls go on, and this one can be made once that has ended."""
    monkeypatch.setattr(stores, "LONGEST_WAIT_S", 2.5)
    with LENDERS["psycopg"](database_url) as lender:
        call(app, "one", transaction=lender.transaction)
        with pytest.raises(StoreUnavailableError, match="has been locked for too long"):
            call(app, "two")
        assert call(app, "other", unique=None) == "other"
        assert call(app, "elsewhere", unique="elsewhere") == "elsewhere"
        lender.commit()
    assert call(app, "two") == "one"
    assert rows(app) == {"one": ("k", None), "other": (None, None), "elsewhere": ("elsewhere", None)}


def test_a_key_without_a_row_is_refused(app: Celery) -> None:
    with pytest.raises(InvalidValueError, match="A message of plain has no row, and unique= needs one: make it so"):
        app.send_task("plain", unique="k")
    with pytest.raises(InvalidValueError, match="give unique=, too"):
        app.send_task("mail", on_duplicate="refuse")
    with pytest.raises(InvalidValueError, match="for single calls"):
        app.sidejob.send_many([app.signature("mail", options={"unique": "k"})])
    assert rows(app) == {}


def test_nothing_that_follows_a_call_is_lost_with_it(app: Celery) -> None:
    """Another task would be used instead of it, and nobody would run its links, or tell its group."""
    mail = app.signature("mail", options={"unique": "k"})
    calls = [
        group([mail, mail], app=app), mail | app.signature("mail"), mail.clone().on_error(app.signature("mail")),
        chord([mail, mail], app.signature("mail"), app=app),
    ]  # fmt: skip
    for canvas in calls:
        with pytest.raises(InvalidValueError, match=r"beside \w+= needs on_duplicate="):
            canvas.apply_async()
    assert rows(app) == {}
    refused = app.signature("mail", options={"unique": "k", "on_duplicate": "refuse", "task_id": "one"})
    (refused | app.signature("mail")).apply_async()
    with pytest.raises(DuplicateError):
        (refused.clone(task_id="two") | app.signature("mail")).apply_async()
    assert rows(app) == {"one": ("k", None)}


def test_a_call_within_a_call_does_not_get_its_key(app: Celery) -> None:
    """As a receiver of `before_task_publish` makes it."""

    def calls(headers: Any = None, **given: Any) -> None:
        if headers["id"] == "one":
            call(app, "within", unique=None)

    before_task_publish.connect(calls)
    try:
        assert call(app, "one") == "one"
    finally:
        before_task_publish.disconnect(calls)
    assert rows(app) == {"one": ("k", None), "within": (None, None)}


def test_a_second_call_of_a_key_needs_no_slot_of_a_full_pool(app: Celery, database_url: str) -> None:
    @app.task(durable=True, name="pooled", capacity=CapacityPool("one", 1), shared=False)  # type: ignore[untyped-decorator]
    def pooled() -> None:
        pass

    pooled.apply_async(task_id="first", unique="k")
    assert pooled.apply_async(unique="k").id == "first"
    with pytest.raises(DuplicateError):
        pooled.apply_async(unique="k", on_duplicate="refuse")
    with LENDERS["psycopg"](database_url) as lender:
        assert pooled.apply_async(unique="k", transaction=lender.transaction).id == "first"
        with pytest.raises(Overloaded):
            pooled.apply_async(unique="other", transaction=lender.transaction)
    with pytest.raises(Overloaded):
        pooled.apply_async(unique="other")
    assert rows(app) == {"first": ("k", None)}


def test_a_task_that_goes_on_as_another_keeps_its_own_key(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[dict[str, tuple[str | None, str | None]]] = []

    @app.task(durable=True, name="goes_on", bind=True, shared=False)  # type: ignore[untyped-decorator]
    def goes_on(self: Any, step: int) -> None:
        seen.append(rows(app))
        if step == 0:
            raise self.replace(goes_on.s(1).set(unique="another"))
        if step == 1 and self.request.retries == 0:
            raise self.retry(countdown=0)

    goes_on.apply_async((0,), task_id="one", unique="k")
    run_until_quiet(app.sidejob)
    assert seen == [{"one": ("k", None)}] * 3
    assert "unique= of goes_on has no effect" in caplog.text


def test_what_follows_a_call_has_no_key(app: Celery) -> None:
    """A worker calls it, and nobody would be told that another has the key."""
    first, keyed = app.signature("mail"), app.signature("mail", immutable=True, options={"unique": "k"})
    plain = app.signature("plain")
    nested = [
        first | keyed, plain | keyed, first | first | keyed | first, first.clone().on_error(keyed),
        first | first.clone().on_error(first.clone().on_error(keyed)),
        first | group([first, keyed], app=app), first | chord([first, first | keyed], first, app=app),
        chord([first, first], keyed, app=app), first | chord([keyed, first], first, app=app),
    ]  # fmt: skip
    for canvas in nested:
        with pytest.raises(InvalidValueError, match="unique= of mail cannot be part of"):
            canvas.apply_async()
    app.send_task("mail", link=[], chain=None, link_error=app.signature("other", options={"queue": "x"}))
    assert len(rows(app)) == 1


def test_a_key_is_not_passed_over_while_no_store_answers(database_url: str) -> None:
    made = make_app(
        "unique", sidejob_database_url="postgresql://127.0.0.1:1/nowhere", sidejob_durable_tasks=["mail"],
        sidejob_on_store_down="publish",
    )  # fmt: skip
    try:
        with pytest.raises(StoreUnavailableError):
            call(made, "one")
        call(made, "one", unique=None)
    finally:
        made.sidejob.close()
        made.close()


def test_in_eager_mode_there_is_no_row_and_a_key_has_no_effect() -> None:
    app = make_app("eager", task_always_eager=True, sidejob_database_url="postgresql://nobody@127.0.0.1:1/nothing")

    @app.task(durable=True, name="downward", shared=False)  # type: ignore[untyped-decorator]
    def downward(n: int) -> list[int]:
        below = downward.apply_async((n - 1,), unique="k", on_duplicate="refuse") if n else None
        return [n] if below is None else [n, *below.get(disable_sync_subtasks=False)]

    assert downward.apply_async((2,), unique="k").get() == [2, 1, 0]
    app.close()
