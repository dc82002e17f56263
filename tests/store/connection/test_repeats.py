"""Transactions that Postgres refuses for what another one was doing are repeated whole."""

from __future__ import annotations

import pytest
from psycopg import errors as pg

from celery_sidejob import StoreUnavailableError
from celery_sidejob.store import meta
from celery_sidejob.store.connection.own_executor import PREPARE_AFTER, OwnExecutor
from celery_sidejob.store.errors import OutcomeUnknown
from celery_sidejob.store.statement import Frequent, Statement
from tests.tools.crash_points import Arm, lost
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


@pytest.mark.parametrize("answers_lost", [1, 2])
def test_a_read_without_an_answer_is_repeated_once_and_is_never_of_unknown_outcome(
    stage: Stage, at: Arm, answers_lost: int
) -> None:
    lost_so_far = 0

    def lose() -> None:
        nonlocal lost_so_far
        lost_so_far += 1
        if lost_so_far < answers_lost:
            at("read:after-commit", lose)
        lost()

    at("read:after-commit", lose)
    read = stage.sidejob.runtime.connections.read
    if answers_lost == 1:
        assert read(meta.identity)
        return
    with pytest.raises(StoreUnavailableError) as error:
        read(meta.identity)
    assert not isinstance(error.value, OutcomeUnknown)


def test_a_transaction_that_postgres_ends_for_its_length_is_the_stores_failure(stage: Stage) -> None:
    """`transaction_timeout` of Postgres 17, which may be set for a role."""
    if stage.sql("SELECT 1 FROM pg_settings WHERE name = 'transaction_timeout'") == []:
        pytest.skip("this Postgres has no transaction_timeout")

    def dawdle(executor: OwnExecutor) -> None:
        executor.run(Statement("SELECT set_config('transaction_timeout', '1s', true)"))
        executor.run(Statement("SELECT pg_sleep(5)"))

    with pytest.raises(StoreUnavailableError, match="transaction timeout"):
        stage.sidejob.runtime.connections.transact("ask", dawdle)


def test_a_bound_within_a_bound_leaves_the_outer_one(stage: Stage) -> None:
    connections = stage.sidejob.runtime.connections
    slow = Statement("SELECT pg_sleep(0.6)")
    with connections.talking(within_s=0.3):
        with connections.talking():
            connections.run(slow)
        with pytest.raises(StoreUnavailableError):
            connections.run(slow)
    connections.run(slow)


ONE = Frequent("SELECT %(value)s::int AS value")
OFTEN = PREPARE_AFTER + 2


def test_prepared_statements_outlive_a_rollback(stage: Stage) -> None:
    """psycopg would drop all of them, also those prepared without it, if it saw the rollback."""
    transact = stage.sidejob.runtime.connections.transact

    def work(executor: OwnExecutor) -> list[int]:
        meta.identity(executor)  # which psycopg itself prepares
        return [row.value for row in executor.run(ONE, value=1)]

    def fail(executor: OwnExecutor) -> None:
        raise LookupError

    def prepared(executor: OwnExecutor) -> int:
        count: int = executor.run(Statement("SELECT count(*) AS found FROM pg_prepared_statements"))[0].found
        return count

    for _ in range(OFTEN):
        assert transact("read", work) == [1]
    before = transact("read", prepared)
    with pytest.raises(LookupError):
        transact("fail", fail)

    assert transact("read", work) == [1]
    assert transact("read", prepared) == before >= 2


def test_a_connection_whose_transaction_could_not_be_begun_is_not_used_again(stage: Stage) -> None:
    """Where a timeout of the role strikes between the statements of the BEGIN, for one."""
    transact = stage.sidejob.runtime.connections.transact
    transact("spoil", lambda executor: setattr(executor, "_begin", "BEGIN; SELECT 1 / 0"))
    with pytest.raises(pg.DivisionByZero):
        transact("read", meta.identity)

    assert transact("read", meta.identity)
