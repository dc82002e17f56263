"""Recursive terminations and deletions: one transaction up to a size, pages beyond it, and nothing stays half done."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import pytest

from celery_sidejob import IllegalMoveError, Job, Status
from celery_sidejob.operations import lock_set
from celery_sidejob.operations.changes import deletion, follow_up
from celery_sidejob.operations.changes.follow_up import apply_noted_asks
from celery_sidejob.operations.lock_set import TOGETHER
from celery_sidejob.services.duty import Report
from celery_sidejob.services.sweep import ends as sweep
from celery_sidejob.services.sweep.ends import TreeDeletions, TreeTerminations
from celery_sidejob.services.sweep.sweep import Sweep
from celery_sidejob.store.connection.own_executor import OwnExecutor
from celery_sidejob.store.statement import Statement
from tests.tools.between import Between, between_look_and_lock
from tests.tools.crash_points import Arm
from tests.tools.in_process import Stage
from tests.tools.pgbouncer import direct
from tests.tools.statements import statements
from tests.tools.workers import Processes


def tree(stage: Stage, jobs: int, status: str = "completed") -> Job:
    """A tree of so many jobs at rest: a root, its children, and below each of them some leaves."""
    sides = min(100, jobs // 3)
    root: int = stage.sql("SELECT nextval('jobs_id_seq')")[0][0]
    stage.sql(
        f"""
        INSERT INTO jobs (id, task, queue, status, run_no, ended_run, ended_at, parent_id, name)
        SELECT CASE n WHEN 0 THEN {root} ELSE nextval('jobs_id_seq') END, 'stage.idle', 'q', '{status}', 1, 1, now(),
          CASE WHEN n = 0 THEN NULL WHEN n <= {sides} THEN {root} ELSE {root} + 1 + (n - 1) %% {sides} END,
          CASE WHEN n > 0 THEN 'c' || n END
        FROM generate_series(0, {jobs - 1}) n ORDER BY n""".replace("%%", "%")
    )
    stage.sql("ANALYZE jobs")
    return stage.sidejob.get(root)


def statuses(stage: Stage) -> dict[str, int]:
    return dict(stage.sql("SELECT status, count(*) FROM jobs GROUP BY 1"))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees of more than ten jobs take several transactions, each of seven jobs."""
    for module in (lock_set, deletion):
        monkeypatch.setattr(module, "TOGETHER", 10)
    monkeypatch.setattr(deletion, "PART", 7)
    monkeypatch.setattr(follow_up, "TREE_PAGE", 7)


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many jobs are terminated in one transaction: a tenth of the real number, and a larger tree as many pages."""
    monkeypatch.setattr(lock_set, "TOGETHER", TOGETHER // 10)
    monkeypatch.setattr(follow_up, "TREE_PAGE", follow_up.TREE_PAGE // 10)
    return TOGETHER // 10


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the statements of the transactions from now on, without those that tell others of a commit."""
    names = {id(statement): name for name, statement in statements().items()}
    noted: list[str] = []
    run = OwnExecutor.run

    def noting(self: OwnExecutor, statement: Statement, /, **parameters: Any) -> Any:
        if not names[id(statement)].startswith(("audience.", "outbox.publishing.", "connection.")):
            noted.append(names[id(statement)])
        return run(self, statement, **parameters)

    monkeypatch.setattr(OwnExecutor, "run", noting)
    return noted


# -- statements --------------------------------------------------------------------------------------------------------


def test_a_tree_is_terminated_in_one_transaction_of_few_statements(stage: Stage, sent: list[str], most: int) -> None:
    root = tree(stage, most)
    sent.clear()
    root.terminate(recursive=True)
    assert sent == ["trees._SUBTREE", "jobs._LOCK", "trees._SUBTREE", "asks._TERMINATE"]
    assert statuses(stage) == {"terminating": most}


def test_ten_thousand_jobs_are_deleted_in_one_transaction_of_few_statements(stage: Stage, sent: list[str]) -> None:
    root = tree(stage, TOGETHER, "terminated")
    sent.clear()
    assert root.terminated
    assert root.delete()
    assert sent == [
        "trees._REST", "trees._SUBTREE", "jobs._LOCK_EXCLUSIVELY", "trees._SUBTREE", "outbox.doorbells._PENDING",
        "deletions._DELETE",
    ]  # fmt: skip
    assert statuses(stage) == {}


EACH_PAGE = [f"trees.{name}" for name in ("_TAKE", "_FIND")] + [
    "jobs._LOCK", "asks._TERMINATE", "trees._GO_ON", "trees._REMOVE"
]  # fmt: skip


def test_a_larger_tree_is_terminated_a_page_in_each_transaction(stage: Stage, sent: list[str], most: int) -> None:
    root = tree(stage, most + 1)
    sent.clear()
    root.terminate(recursive=True)
    assert sent[:4] == ["trees._SUBTREE", "jobs._LOCK", "asks._TERMINATE", "trees._BEGIN"]
    pages = sent.count("trees._FIND")
    assert sent[4:] == EACH_PAGE * pages + ["trees._TAKE", "trees._LEFT"]
    assert pages <= most / follow_up.TREE_PAGE + 2
    assert statuses(stage) == {"terminating": most + 1}
    assert stage.row_counts()["tree_terminations"] == 0


def test_a_larger_tree_is_deleted_a_part_in_each_transaction(stage: Stage, sent: list[str]) -> None:
    root = tree(stage, TOGETHER + 1, "terminated")
    sent.clear()
    assert root.delete()
    assert sent.count("deletions._DELETE") == TOGETHER // deletion.PART + 1
    assert statuses(stage) == {}
    assert stage.row_counts()["tree_deletions"] == 0


def test_a_parent_of_many_and_a_long_line_are_terminated_in_pages_too(stage: Stage, sent: list[str], most: int) -> None:
    parent, line = stage.job(), stage.job()
    stage.drain()
    for root in (parent, line):
        stage.sql(f"""
            INSERT INTO jobs (id, task, queue, status, run_no, ended_run, ended_at, parent_id, name)
            SELECT {root.id} * 100000 + n, 'stage.idle', 'q', 'completed', 1, 1, now(),
              CASE WHEN n = 1 OR {root.id} = {parent.id} THEN {root.id} ELSE {root.id} * 100000 + n - 1 END, 'c' || n
            FROM generate_series(1, {most}) n""")
        sent.clear()
        root.terminate(recursive=True)
        assert sent.count("trees._FIND") <= most / follow_up.TREE_PAGE + 2
    assert statuses(stage) == {"terminating": 2 * most + 2}


# -- others meanwhile --------------------------------------------------------------------------------------------------


@pytest.fixture
def between(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Between:
    """Has a call done by another client between the next transaction's look and its lock."""
    return between_look_and_lock(monkeypatch, stage.outside)


WHEN = [
    "between look and lock", "terminate:after-commit", "between the page's look and lock",
    "terminate-page:before-commit", "terminate-page:after-commit",
]  # fmt: skip


@pytest.mark.few(4)
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("how", ["enqueue", "adopt", "transaction"])
@pytest.mark.parametrize("when", WHEN)
def test_a_job_that_comes_below_meanwhile_is_refused_or_terminated(
    stage: Stage, at: Arm, between: Between, aside: Callable[..., Future[Any]], how: str, when: str
) -> None:
    root = tree(stage, 60)
    parents = stage.sql("SELECT id FROM jobs WHERE id <= %s + 3 OR id > %s + 57 ORDER BY id", root.id, root.id)
    newcomers = [stage.job() for _ in parents]
    came: list[Job] = []

    def come(parent: Job, newcomer: Job) -> None:
        try:
            if how == "adopt":
                parent.adopt(newcomer, "late")
                came.append(newcomer)
            elif how == "enqueue":
                came.append(parent.enqueue(stage.idle, child_name="a"))
            else:
                with stage.connect(autocommit=False) as connection:
                    came.append(parent.enqueue(stage.idle, child_name="a", transaction=connection))
        except IllegalMoveError:
            pass  # it takes no more children

    def all_come() -> list[Future[Any]]:
        return [
            aside(come, stage.sidejob.get(parent), newcomer)
            for (parent,), newcomer in zip(parents, newcomers, strict=True)
        ]

    coming: list[Future[Any]] = []

    def come_at_last() -> None:
        coming.extend(all_come())
        if when != "terminate-page:before-commit":  # there some wait for the locks of the page
            wait(coming)

    if when == "between look and lock":
        between(come_at_last)
    elif when == "between the page's look and lock":
        at("terminate:after-commit", lambda: between(come_at_last))
    else:
        at(when, come_at_last)
    root.terminate(recursive=True)
    for one in coming:
        one.result()
    stage.drain()
    assert coming
    assert {job.refresh().status for job in came} <= {Status.TERMINATED}
    others = {job.id for job in newcomers} - {job.id for job in came}
    assert {row[0] for row in stage.sql("SELECT id FROM jobs WHERE status <> 'terminated'")} == others


@pytest.mark.usefixtures("small")
def test_a_child_that_sorts_before_those_that_a_page_has_read_is_not_passed_over(
    stage: Stage, at: Arm, between: Between, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page goes on after the last name that it has read; its parent was not locked yet."""
    monkeypatch.setattr(follow_up, "TREE_PAGE", 50)
    root = tree(stage, 60)
    parent = stage.sidejob.get(root.id + 1)
    came: list[Job] = []

    def comes() -> None:
        came.append(parent.enqueue(stage.idle, child_name="a"))

    at("terminate:after-commit", lambda: between(comes))
    root.terminate(recursive=True)
    assert [job.refresh().status for job in came] == [Status.TERMINATING]
    assert statuses(stage) == {"terminating": 61}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("when", ["terminate:after-commit", "terminate-page:after-commit"])
def test_what_is_left_of_a_termination_reaches_no_child_of_a_forced_run(stage: Stage, at: Arm, when: str) -> None:
    """The termination was asked first: it takes the children of that moment, and none that come after the force."""
    root = tree(stage, 300)
    came: list[Job] = []

    def force() -> None:
        stage.outside(lambda: root.run(force=True))
        stage.run(root)  # its shutdown
        stage.outside(lambda: came.append(root.enqueue(stage.idle, child_name="a")))

    at(when, force)
    root.terminate(recursive=True)
    assert (root.refresh().status, came[0].refresh().status) == (Status.QUEUED, Status.QUEUED)
    assert statuses(stage) == {"queued": 2, "terminating": 299}


@pytest.mark.usefixtures("small")
def test_a_job_in_the_way_is_waited_for_by_a_caller_and_left_by_the_sweeper(
    stage: Stage, aside: Callable[..., Future[Any]]
) -> None:
    root = tree(stage, 300)
    child = stage.sql("SELECT min(id) FROM jobs WHERE parent_id = %s", root.id)[0][0]
    with stage.connect(autocommit=False) as connection:
        connection.execute("SELECT FROM jobs WHERE id = %s FOR UPDATE", (child,))
        with stage.connect(autocommit=False) as another:
            root.terminate(recursive=True, transaction=another)
        apply_noted_asks(stage.runtime, [root.id])
        swept(stage)
        assert statuses(stage) == {"terminating": 300 - 3, "completed": 3}, "it, and two below it"
        waiting = aside(root.terminate, recursive=True)
        stage.wait_for_waiters()
    waiting.result()
    swept(stage)
    assert statuses(stage) == {"terminating": 300}
    assert stage.row_counts()["tree_terminations"] == 0


# -- deletions ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
def test_a_large_tree_with_a_job_that_goes_on_stays_as_it_is(stage: Stage) -> None:
    root = tree(stage, 300, "terminated")
    leaf = last(stage)
    leaf.run(force=True)
    before = stage.everything()
    assert not root.delete()
    assert stage.everything() == before
    with stage.connect(autocommit=False) as connection:
        stage.drain()
        leaf.terminate()
        stage.drain()
        leaf.run(force=True, transaction=connection)
    stage.sql("UPDATE timers SET due_at = now() + interval '1 hour', accepted = true, ask = 'force'")
    assert not root.delete(), "something is due below it"
    stage.sql("DELETE FROM timers")
    assert root.delete()


@pytest.mark.usefixtures("small")
def test_a_deletion_that_has_begun_is_final(stage: Stage, at: Arm) -> None:
    root, above = tree(stage, 300, "terminated"), stage.job()
    first, leaf = stage.sidejob.get(root.id + 1), last(stage)

    def others() -> None:
        assert root.run(force=True) is None
        assert first.run(force=True) is None
        assert first.run(force=True, countdown=5) is None
        with pytest.raises(IllegalMoveError, match="is being deleted with the tree"):
            root.disown(first)
        with pytest.raises(IllegalMoveError, match="it takes no more children"):
            first.enqueue(stage.idle, child_name="late")
        with pytest.raises(IllegalMoveError, match="it takes no more children"):
            first.adopt(above, "late")
        with stage.connect(autocommit=False) as connection:
            leaf.run(force=True, transaction=connection)
        above.adopt(root, "in between")
        assert first.run(force=True) is None
        assert first.terminated

    at("delete:after-commit", lambda: stage.outside(others))
    assert root.delete()
    assert (root.exists, above.exists) == (False, True)
    assert stage.sql("SELECT count(*) FROM jobs") == [(1,)]
    assert not stage.sql("SELECT FROM tree_deletions")


@pytest.mark.usefixtures("small")
def test_a_job_that_is_being_forced_to_run_is_not_deleted(
    stage: Stage, at: Arm, aside: Callable[..., Future[Any]]
) -> None:
    """The force has the lock of its job, and the deletion reads no locked row: it waits at the root."""
    root = tree(stage, 300, "terminated")
    leaf = last(stage)
    deleting: list[Future[Any]] = []

    def delete() -> None:
        deleting.append(aside(root.delete))
        stage.wait_for_waiters()

    at("run:before-commit", delete)
    assert leaf.run(force=True) is not None
    assert deleting[0].result() is False
    assert stage.sql("SELECT count(*) FROM jobs") == [(300,)]


@pytest.mark.usefixtures("small")
def test_a_child_of_a_callers_own_transaction_is_seen_and_the_deletion_goes_on_after_it(stage: Stage, at: Arm) -> None:
    """It was made before its parent was terminated, and is committed when the tree is half gone."""
    root = tree(stage, 300, "terminated")
    stage.sql("UPDATE jobs SET terminate_tree = true")
    first = stage.sidejob.get(root.id + 1)
    stage.sql("UPDATE jobs SET status = 'completed' WHERE id = %s", first.id)
    with stage.connect(autocommit=False) as connection:
        child = first.enqueue(stage.idle, child_name="late", transaction=connection)
        stage.sql("UPDATE jobs SET status = 'terminated' WHERE id = %s", first.id)
        at("delete:after-commit", connection.commit)
        assert root.delete()
    assert (first.exists, child.exists, root.exists) == (True, True, True)
    stage.drain()
    assert child.refresh().status == Status.TERMINATED, "its parent was terminated with all below it"
    deleted(stage)
    assert statuses(stage) == {}


# -- deaths ------------------------------------------------------------------------------------------------------------


POINTS = ["terminate:before-commit=kill", "terminate:after-commit=kill"] + [
    f"terminate-page:{side}-commit=kill@{page}" for side in ("before", "after") for page in (1, 2, 5)
]  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.parametrize("plan", POINTS)
def test_a_caller_that_is_killed_leaves_no_half_terminated_tree(stage: Stage, processes: Processes, plan: str) -> None:
    root = tree(stage, 300)
    killed(processes, stage, "terminate", root, plan)
    if plan == POINTS[0]:
        assert statuses(stage) == {"completed": 300}
        return
    assert 0 < statuses(stage)["completed"] < 300
    with pytest.raises(IllegalMoveError):
        root.enqueue(stage.idle, child_name="late")
    swept(stage)
    assert statuses(stage) == {"terminating": 300}


@pytest.mark.few(3)
@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("part", [1, 2, 5])
def test_a_caller_that_is_killed_leaves_no_half_deleted_tree(
    stage: Stage, processes: Processes, side: str, part: int
) -> None:
    root = tree(stage, 300, "terminated")
    killed(processes, stage, "delete", root, f"delete:{side}-commit=kill@{part}")
    if (side, part) == ("before", 1):
        assert statuses(stage) == {"terminated": 300}
        return
    assert 0 < statuses(stage)["terminated"] <= 300
    assert root.exists
    deleted(stage)
    assert statuses(stage) == {}
    assert stage.row_counts()["tree_deletions"] == 0


@pytest.mark.usefixtures("small")
def test_trees_that_cannot_go_now_keep_no_later_one_from_going(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "PAGE", 2)
    roots = [stage.job() for _ in range(5)]
    stage.drain()
    stage.sql("INSERT INTO tree_deletions SELECT id FROM jobs")
    stage.sql("UPDATE jobs SET status = 'terminated' WHERE id = ANY(%s)", [roots[2].id, roots[4].id])
    assert TreeDeletions(Sweep(stage.runtime)).run_once() == Report(deleted_parts=2)
    assert [root.exists for root in roots] == [True, True, False, True, False]


def killed(processes: Processes, stage: Stage, verb: str, root: Job, plan: str) -> None:
    """Have a process terminate or delete the tree in pages of seven jobs; it is killed on its way."""
    client = processes.start(
        [sys.executable, "-m", "tests.jobs.of_large_trees", verb, str(root.id)],
        env={"DATABASE_URL": direct(stage.database_url), "SIDEJOB_CRASH_POINTS": plan},
    )
    assert client.wait(60) == -signal.SIGKILL


def swept(stage: Stage) -> Report:
    """What the sweeper terminates of trees that callers have left."""
    return TreeTerminations(Sweep(stage.runtime)).run_once()


def deleted(stage: Stage) -> Report:
    """What the sweeper deletes of trees that callers have left."""
    return TreeDeletions(Sweep(stage.runtime)).run_once()


def last(stage: Stage) -> Job:
    """The youngest job."""
    return stage.sidejob.get(stage.sql("SELECT max(id) FROM jobs")[0][0])


def test_a_call_waits_for_pages_that_the_sweeper_has_begun(
    stage: Stage, small: None, at: Arm, aside: Callable[..., Future[Any]]
) -> None:
    root = tree(stage, 30)
    with stage.connect(autocommit=False) as sweeper:
        at("terminate:after-commit", lambda: sweeper.execute("SELECT FROM tree_terminations FOR UPDATE"))
        call = aside(root.terminate, recursive=True)
        stage.wait_for_waiters()
        sweeper.rollback()
        call.result()
    assert statuses(stage) == {"terminating": 30}
    assert stage.row_counts()["tree_terminations"] == 0
