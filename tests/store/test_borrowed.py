"""A transaction that we were lent, while it breaks, and the order of what follows its commits."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import sqlalchemy

from celery_sidejob import InvalidValueError
from celery_sidejob.store.borrowed.lending import borrow, owners
from celery_sidejob.store.statement import Statement
from tests.acceptance.lenders import LENDERS
from tests.tools.databases import SCHEMA
from tests.tools.in_process import Stage
from tests.tools.waiting import wait_until


@pytest.mark.parametrize("kind", [kind for kind in LENDERS if not kind.startswith("django")])
def test_the_caller_is_told_why_the_connection_broke(stage: Stage, kind: str) -> None:
    """And not that going back to our savepoint failed, which is nothing that a task's autoretry_for would name."""
    told: BaseException | None = None
    with suppress(Exception), LENDERS[kind](stage.database_url) as lender:  # closing it may raise, as it is broken
        (pid,) = lender.sql("SELECT pg_backend_pid()")[0]
        borrowed = stage.runtime.connections.borrow(lender.transaction)
        try:
            with borrowed.atomic():
                stage.sql("SELECT pg_terminate_backend(%s, 5000)", pid)
                borrowed.run(Statement("SELECT 1"))
        except Exception as error:
            told = error
    assert "OperationalError" in {known.__name__ for known in type(told).__mro__}, repr(told)
    assert "terminat" in str(told), "by the server, and not: this connection is closed"


@pytest.mark.parametrize("kind", LENDERS)
@pytest.mark.parametrize(
    ("before", "why"), [("SELECT 1/0", "was aborted by an error before"), ("SET TRANSACTION READ ONLY", "only reads")]
)
def test_a_transaction_in_which_nothing_can_be_written(stage: Stage, kind: str, before: str, why: str) -> None:
    told: BaseException | None = None
    with suppress(Exception), LENDERS[kind](stage.database_url) as lender:  # closing it may raise, as it has failed
        with suppress(Exception):
            lender.sql(before)
        try:
            stage.job(transaction=lender.transaction)
        except Exception as error:
            told = error
    assert isinstance(told, InvalidValueError), repr(told)
    assert why in str(told)


@pytest.mark.parametrize("ask", [lambda alias: borrow(alias, "sidejob"), owners])
def test_an_alias_that_django_does_not_know_is_refused_by_us(ask: Callable[[str], Any]) -> None:
    importlib.import_module("django.db")
    with pytest.raises(TypeError, match="'nowhere' names no connection of Django's DATABASES"):
        ask("nowhere")


def test_what_follows_two_commits_of_a_sqlalchemy_connection_keeps_their_order(stage: Stage) -> None:
    """The first is given the time in which the second would overtake it."""
    second = threading.Event()
    done: list[str] = []

    def first() -> None:
        second.wait(0.3)
        done.append("first")

    engine = sqlalchemy.create_engine(stage.database_url.replace("postgresql://", "postgresql+psycopg://", 1))
    with engine.connect() as connection:
        for call in (first, lambda: (done.append("second"), second.set())):
            connection.execute(sqlalchemy.text("SELECT 1"))
            borrow(connection, SCHEMA).after_commit(call)
            connection.commit()
        wait_until(lambda: len(done) == 2, message="what follows both commits")
    engine.dispose()
    assert done == ["first", "second"]
