"""Large families cost those who read them, and nobody else: rows and statements are counted, not time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from celery_sidejob import Job, RunningJob
from celery_sidejob.inspection.jobs import JobViews
from celery_sidejob.store import audience, jobs, trees
from celery_sidejob.store.connection.own_executor import OwnExecutor
from celery_sidejob.store.statement import Statement
from tests.tools.in_process import Stage

Sent = list[tuple[Statement, int]]
"""Statements, each with the rows that Postgres returned."""


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """What this thread asks of the store from now on; another one marks what is published, whenever that may be.

    Who listens is asked again whenever a second has passed: that is left out.
    """
    noted: Sent = []
    run = OwnExecutor.run
    mine = threading.get_ident()

    def noting(self: OwnExecutor, statement: Statement, /, **parameters: Any) -> Any:
        found = run(self, statement, **parameters)
        if threading.get_ident() == mine and statement is not audience._ASK:
            noted.append((statement, len(found)))
        return found

    monkeypatch.setattr(OwnExecutor, "run", noting)
    return noted


def parent_of(stage: Stage, children: int, later: Callable[[RunningJob], Any]) -> Job:
    """A job at rest with so many finished children, whose later runs do `later`."""

    def body(job: RunningJob) -> None:
        if job.run_no > 1:
            later(job)

    parent = stage.job(body)
    stage.run(parent)
    stage.sql(
        "INSERT INTO jobs (task, queue, status, run_no, ended_run, ended_at, parent_id, name)"
        " SELECT 'stage.idle', 'q', 'completed', 1, 1, now(), %s, 'c' || n FROM generate_series(1, %s) n",
        parent.id,
        children,
    )
    return parent


def everything_but_all_children(job: RunningJob) -> None:
    """What a run may do with its children, one by one."""
    known = job.child("c7")
    assert known is not None
    known.run()
    job.enqueue("stage.idle", child_name=f"new{job.run_no}")
    job.checkpoint()
    assert job.child("nobody") is None
    job.disown("c8")
    job.adopt(Job(known.id + 1, runtime=job._runtime), "c8")
    job.suspend()


def test_a_parent_of_fifty_thousand_runs_at_the_price_of_one_with_ten(stage: Stage, sent: Sent) -> None:
    """A child's end, the claim, the run and its commits. With ten, the claim has read the child that is named."""
    costs: list[Sent] = []
    for number in (10, 50_000):
        parent = parent_of(stage, number, everything_but_all_children)
        child = parent.enqueue("stage.idle", child_name="ends")
        stage.sql("ANALYZE jobs")
        sent.clear()
        stage.run(child)
        assert stage.run(parent) == "suspended"
        costs.append(list(sent))
    few, many = costs
    by_name = (jobs._CHILD, 1)
    assert [one for one in many if one[0] is not jobs._CHILD] != []
    assert len(many) <= len(few) + 2, "two children are found by their names"
    assert many.count(by_name) <= few.count(by_name) + 2
    assert sum(rows for _, rows in many) <= sum(rows for _, rows in few)
    assert jobs._CHILDREN not in {statement for statement, _ in many}


def test_a_run_that_reads_fifty_thousand_children_reads_them_once(stage: Stage, sent: Sent) -> None:
    seen: list[int] = []

    def later(job: RunningJob) -> None:
        seen.extend([len(job.children), len(job.children)])

    parent = parent_of(stage, 50_000, later)
    parent.run()
    stage.run(parent)
    assert seen == [50_000] * 2
    assert [rows for _, rows in sent if rows > 1000] == [50_000]


LEVELS, BESIDE = 1000, 9


@pytest.fixture
def deep(stage: Stage) -> Job:
    """A tree of ten thousand jobs and a thousand levels, each with one job that goes on and nine leaves."""
    root = stage.job()
    stage.drain()
    stage.runtime.connections.write_behind_now()  # else it is written within a second, in whichever test
    stage.sql(
        "INSERT INTO jobs (id, task, queue, status, parent_id, name) SELECT %s + n, 'stage.idle', 'q', 'terminated',"
        " %s + n - 1, 'on' FROM generate_series(1, %s) n",
        *(root.id, root.id, LEVELS - 1),
    )
    stage.sql(
        "INSERT INTO jobs (id, task, queue, status, parent_id, name)"
        " SELECT %s + 1000000 + n * 10 + k, 'stage.idle', 'q', 'terminated', %s + n, 'leaf' || k"
        " FROM generate_series(0, %s) n, generate_series(1, %s) k",
        *(root.id, root.id, LEVELS - 1, BESIDE),
    )
    stage.sql("UPDATE jobs SET status = 'terminated' WHERE id = %s", root.id)
    return root


def test_ten_thousand_jobs_in_a_thousand_levels_are_one_statement_and_their_progress_another(
    stage: Stage, deep: Job, sent: Sent
) -> None:
    nodes = JobViews(stage.runtime).tree(deep, limit=20_000)
    assert sent == [(trees._TREE, 10_000), (jobs._PROGRESS, 0)]
    assert len(nodes) == 10_000
    assert [node.depth for node in nodes] == sorted(node.depth for node in nodes)
    assert {(node.depth, node.children) for node in nodes if node.children} == {
        *((level, 10) for level in range(LEVELS - 1)), (LEVELS - 1, 9)
    }  # fmt: skip
    sent.clear()
    assert deep.terminated
    assert sent == [(trees._REST, 1)]
    sent.clear()
    assert trees.ancestors(stage.runtime.connections, deep.id + LEVELS - 1)[-1] == deep.id
    assert sent == [(trees._ANCESTORS, LEVELS)]


def test_a_tree_is_read_up_to_its_limit(stage: Stage, deep: Job, sent: Sent) -> None:
    found = JobViews(stage.runtime).tree(deep, limit=25)
    assert sent == [(trees._TREE, 25), (jobs._PROGRESS, 0)]
    assert [(node.id, node.depth) for node in found[:12]] == [
        (deep.id, 0), (deep.id + 1, 1), *((deep.id + 1000000 + number, 1) for number in range(1, 10)), (deep.id + 2, 2)
    ]  # fmt: skip
    assert {node.depth for node in JobViews(stage.runtime).tree(deep, depth=3, limit=20_000)} == {0, 1, 2, 3}
