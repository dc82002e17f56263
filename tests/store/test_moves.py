"""The statements that change a job's status make the moves of `MOVES`, all of them and no other."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg import sql
from psycopg.errors import CheckViolation

from celery_sidejob.model.status import MOVES, Status
from celery_sidejob.store import asks, claims, permits, run_ends
from celery_sidejob.store.statement import Statement
from tests.tools.databases import SCHEMA
from tests.tools.in_process import Stage
from tests.tools.statements import assignments, statements

ID, RUN_NO, WAKES = 1000, 3, 2

GIVEN: dict[str, tuple[Any, ...]] = {
    "id": (ID,), "ids": ([ID],), "task": ("t",), "for_run": (RUN_NO + 1,), "run_no": (RUN_NO,), "pid": (1,),
    "unit_no": (0,), "quiet": (False, True), "retry": (False, True), "then": (False, True), "most": (1,),
    "max_losses": (3,),
    "leaves": (False, True),
    "applied": (True,),
    "outcome": ("completed", "suspended", "failed"), "result": ("null",), "error": (None,), "unwanted": (True,),
    "own": (True,), "loss": (True,), "undone": (False, True), "force": (False, True), "tree": (False,),
    "ask": ("run", "force"), "timers_before": (None,), "timer_id": (10**9,), "due_at": ("2099-01-01 00:00+00",),
    "wait_s": (1.0,), "late_s": (0.0,), "check_interval_s": (30.0,), "first_check_s": (2.0,),
    "how": ("completed",), "kind": ("run",), "detail": (None,), "history": (0,),
    "queue": ("q",), "tasks": (["t"],), "passes": (False, True), "for_runs": ([RUN_NO + 1],), "run_nos": ([RUN_NO],),
    "schema": (None,), "key": ("task:a",), "state": ("SUCCESS",), "body": (b"{}",), "expires_s": (None,),
    "replaces": (False,), "results": (["null"],), "keys": (["task:a"],), "states": (["SUCCESS"],), "bodies": ([b"{}"],),
    "lifetimes": ([None],),
}  # fmt: skip
"""What each parameter may be."""

ANNOUNCED = {(Status.QUEUED, Status.SUSPENDED), (Status.QUEUED, Status.COMPLETED)}
"""Told of a run during which its job was asked again; the row stays queued."""


def writers() -> dict[str, Statement]:
    """The statements that set `jobs.status`, by where they are."""
    return {where: statement for where, statement in statements().items() if "status" in assignments(statement)}


def rows() -> Iterator[dict[str, Any]]:
    """Rows of jobs in every status, in a run or not, asked again or not, with a timer of the run or not."""
    in_run = [{"unit_no": 0, "run_kind": kind} for kind in ("run", "shutdown")]
    for status, run, taken, timer in itertools.product(Status, [{}, *in_run], (WAKES, WAKES - 1), (False, True)):
        yield {
            "id": ID, "task": "t", "queue": "q", "status": str(status), "run_no": RUN_NO, "wakes": WAKES,
            "wakes_taken": taken, "timer_in_run": timer, **run,
        }  # fmt: skip


def moves_of(stage: Stage) -> set[tuple[Status | None, Status]]:
    """Run every such statement on every row that the schema allows, and return the moves that they make.

    Each move has a greater number than those before it, also the end of a run that is announced as two moves.
    """
    found: set[tuple[Status | None, Status]] = set()
    with psycopg.connect(stage.database_url, options=f"-c search_path={SCHEMA}") as connection:
        connection.execute("INSERT INTO queues (name) VALUES ('q')")
        for row, timers in itertools.product(rows(), ((), ("run",), ("force",))):
            with connection.transaction(force_rollback=True):
                if insert(connection, row, timers, stage.worker_id):
                    for statement in writers().values():
                        for given in calls(statement, row, stage.worker_id):
                            after, more = run(connection, statement, given)
                            if after != row["status"]:
                                found.add((Status(row["status"]), after))
                                assert more == (2 if "kind" in given else 1), statement.text
    return found


def insert(connection: psycopg.Connection[Any], row: dict[str, Any], timers: tuple[str, ...], worker_id: int) -> bool:
    """Make the job with its timers and, where one is due, its message; False if the schema allows no such job."""
    in_run = "unit_no" in row
    given = row | ({"worker_id": worker_id} if in_run else {})
    names, values = sql.SQL(", ").join(map(sql.Identifier, given)), sql.SQL(", ").join(map(sql.Literal, given.values()))
    try:
        connection.execute(sql.SQL("INSERT INTO jobs ({}) VALUES ({})").format(names, values))
    except CheckViolation:
        return False
    for ask in timers:
        connection.execute("INSERT INTO timers (job_id, due_at, ask, accepted) VALUES (%s, now(), %s, true)", [ID, ask])
    if in_run or row["status"] in (Status.QUEUED, Status.TERMINATING):
        connection.execute(
            """INSERT INTO messages (task_id, job_id, for_run, queue, check_interval, locked_by, locked_at)
            VALUES ('m', %s, %s, 'q', '30 s', %s, %s)""",
            [ID, RUN_NO + (not in_run), *((worker_id, "now") if in_run else (None, None))],
        )
    return True


def calls(statement: Statement, row: dict[str, Any], worker_id: int) -> Iterator[dict[str, Any]]:
    """All parameters that such a statement is given; the outcome of a shutdown is that the job is terminated."""
    given = GIVEN | {"worker_id": (worker_id,)}
    if row.get("run_kind") == "shutdown":
        given["outcome"] = ("terminated",)
    _, names = statement.positional(SCHEMA)
    for values in itertools.product(*(given[name] for name in names)):
        yield dict(zip(names, values, strict=True))


def run(connection: psycopg.Connection[Any], statement: Statement, given: dict[str, Any]) -> tuple[Status, int]:
    """Return the job's status after this statement, and the increase of its number of changes; undo it."""
    with connection.transaction(force_rollback=True):
        connection.execute(statement.render(SCHEMA), given)
        found = connection.execute("SELECT status, changes FROM jobs WHERE id = %s", [ID]).fetchone()
        assert found is not None
        return Status(found[0]), found[1]


def test_the_statements_make_every_legal_move_and_no_other(stage: Stage) -> None:
    new = {(None, Status(stage.job(**options).status)) for options in ({}, {"countdown": 3600})}

    assert moves_of(stage) | new | ANNOUNCED == {
        (before, after) for before, afters in MOVES.items() for after in afters
    }


def test_every_statement_that_sets_a_status_is_among_those_that_are_run() -> None:
    assert {
        claims._CLAIM,
        claims._CLAIM_AGAIN,
        claims._CLAIM_PAGE,
        run_ends._END_PAGE,
        run_ends._END,
        run_ends._RELEASE,
        run_ends._GIVE_UP,
        permits._CLAIM,
        asks._ASK,
        asks._TERMINATE,
    } < set(writers().values())


def test_a_job_is_compared_with_statuses_that_there_are() -> None:
    """A status that is misspelled, or was renamed in the model alone, would silently never be met."""
    words = {
        (where, word)
        for where, statement in statements().items()
        for found in re.findall(r"(?<! AS )\bstatus (?:= |<> |(?:NOT )?IN \(|WHEN )('\w+'(?:, '\w+')*)", statement.text)
        for word in re.findall(r"\w+", found)
        if "{jobs}" in statement.text
    }

    assert {word for _, word in words} == set(Status), sorted(words)
