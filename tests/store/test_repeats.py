"""Transactions that Postgres refuses for what another one was doing are repeated whole."""

from __future__ import annotations

import pytest
from psycopg import errors as pg

from celery_sidejob.store.connection import OwnExecutor
from celery_sidejob.store.statement import Statement
from tests.tools.in_process import Stage

TWICE = Statement("INSERT INTO {messages} SELECT * FROM {messages} LIMIT 1")
"""What Postgres makes of an ask that did not see the message which another transaction was just marking."""


def test_an_ask_that_did_not_see_a_message_which_was_being_marked_is_repeated(stage: Stage) -> None:
    stage.job()
    tries = 0

    def work(executor: OwnExecutor) -> str:
        nonlocal tries
        tries += 1
        if tries == 1:
            executor.run(TWICE)
        return "done"

    assert stage.sidejob.runtime.connections.transact("ask", work) == "done"
    assert tries == 2


def test_a_message_that_is_there_for_good_is_an_error(stage: Stage) -> None:
    stage.job()
    with pytest.raises(pg.UniqueViolation):
        stage.sidejob.runtime.connections.transact("ask", lambda executor: executor.run(TWICE))
