"""Durable tasks with unique keys: no two of a key wait or run, whoever calls at once and whatever is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from celery import Celery, chord, group

from celery_sidejob import DuplicateError, IllegalMoveError, InvalidValueError, StoreUnavailableError
from celery_sidejob.operations.revocation import revoke
from celery_sidejob.store.statement import Statement
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
