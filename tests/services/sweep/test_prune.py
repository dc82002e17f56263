"""The pruner removes what has been finished for longer than it is to be kept, and nothing else."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest

from celery_sidejob import Job, JobNotFoundError, RunningJob
from celery_sidejob.operations.changes import deletion
from celery_sidejob.services.duty import Report
from celery_sidejob.services.sweep import prune as module
from celery_sidejob.services.sweep.prune import Prune
from celery_sidejob.services.sweep.sweep import Sweep
from celery_sidejob.services.sweep.sweeper import Sweeper
from celery_sidejob.store import deletions
from tests.tools.in_process import Stage

pytestmark = pytest.mark.pooled_too


def soon_forgotten(stage: Stage) -> Job:
    """A job of a task whose finished jobs are kept for no time."""

    def forgettable(job: RunningJob) -> None:
        pass

    job: Job = stage.task(forgettable, name="pruner.forgettable", retention=0).enqueue()
    return job


def test_a_finished_job_goes_when_its_tasks_retention_is_over(stage: Stage) -> None:
    kept, gone = stage.job(), soon_forgotten(stage)
    stage.drain()
    assert Prune(Sweep(stage.runtime)).run_once() == Report(pruned_jobs=1)
    assert kept.exists
    assert not gone.exists


def test_a_job_stays_as_long_as_anything_below_it_is_not_finished(stage: Stage) -> None:
    parent = soon_forgotten(stage)
    stage.drain()
    child = parent.enqueue("stage.idle", child_name="c")
    pruner = Prune(Sweep(stage.runtime))
    assert pruner.run_once() == Report()
    stage.drain()
    assert pruner.run_once() == Report(pruned_jobs=1)
    assert not child.exists


def test_what_was_removed_before_an_error_is_counted(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROOTS", 1)
    stage.sidejob.enqueue(soon_forgotten(stage).task)
    stage.drain()
    delete = module.delete_finished

    def fails_for_the_last(runtime: Any, roots: Any, *args: Any, **more: Any) -> int:
        if stage.sql("SELECT count(*) FROM jobs") == [(1,)]:
            raise ValueError("injected")
        return delete(runtime, roots, *args, **more)

    monkeypatch.setattr(module, "delete_finished", fails_for_the_last)
    report = Report()
    with pytest.raises(ValueError, match="injected"):
        Prune(Sweep(stage.runtime)).run_once(report)
    assert report == Report(pruned_jobs=1)


def test_an_old_entry_of_the_dead_set_goes_together_with_its_job(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        raise ValueError("for good")

    old, young = stage.job(body), stage.job(body)
    for job in (old, young):
        with pytest.raises(ValueError, match="for good"):
            stage.run(job)
    stage.sql("UPDATE dead SET died_at = now() - interval '181 days' WHERE job_id = %s", old.id)
    assert Prune(Sweep(stage.runtime)).run_once() == Report(pruned_entries=1)
    assert not old.exists
    assert [job.id for job in stage.sidejob.jobs(status="failed")] == [young.id]


def test_old_entries_whose_jobs_must_stay_keep_no_others(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(job: RunningJob) -> None:
        raise ValueError("for good")

    monkeypatch.setattr(module, "PAGE", 1)
    parent, other = stage.job(body), stage.job(body)
    child = stage.job(parent=parent, child_name="c")
    for job in (parent, other):
        with pytest.raises(ValueError, match="for good"):
            stage.run(job)
    stage.sql("UPDATE dead SET died_at = now() - interval '181 days'")
    pruner = Prune(Sweep(stage.runtime))

    assert pruner.run_once() == Report(pruned_entries=1)

    assert (parent.exists, child.exists, other.exists) == (True, True, False)
    stage.drain()
    assert pruner.run_once() == Report(pruned_entries=1), "each pass begins anew"


@pytest.mark.parametrize("large", [False, True])
def test_an_old_entry_takes_no_young_failure_below_its_job_with_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    def body(job: RunningJob) -> None:
        raise ValueError("for good")

    monkeypatch.setattr(module, "PRUNED_TOGETHER", 1 if large else module.PRUNED_TOGETHER)
    parent = stage.job(body)
    child = stage.job(body, parent=parent, child_name="c")
    for job in (child, parent):
        with pytest.raises(ValueError, match="for good"):
            stage.run(job)
    stage.drain()
    stage.sql("UPDATE dead SET died_at = now() - interval '181 days' WHERE job_id = %s", parent.id)

    Prune(Sweep(stage.runtime)).run_once()
    assert (parent.exists, child.exists, len(stage.sidejob.dead)) == (True, True, 2)

    stage.sql("UPDATE dead SET died_at = now() - interval '181 days'")
    Prune(Sweep(stage.runtime)).run_once()
    assert (parent.exists, child.exists, len(stage.sidejob.dead)) == (False, False, 0)


def test_an_old_entry_of_an_ordinary_task_goes_by_itself(stage: Stage) -> None:
    stage.sql("""
        INSERT INTO dead (task_id, task, queue, reason, payload, body, died_at)
        SELECT 't' || n, 'mail', 'q', 'lost', '{}', 'x', now() - n * interval '100 days'
        FROM generate_series(1, 3) n""")
    assert Prune(Sweep(stage.runtime)).run_once() == Report(pruned_entries=2)
    assert stage.sql("SELECT task_id FROM dead") == [("t1",)]


def test_old_entries_of_ordinary_tasks_go_on_each_page(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE", 1)
    stage.sql("""
        INSERT INTO dead (task_id, task, queue, reason, payload, body, died_at)
        SELECT 't' || n, 'mail', 'q', 'lost', '{}', 'x', now() - n * interval '100 days'
        FROM generate_series(4, 1, -1) n""")
    assert Prune(Sweep(stage.runtime)).run_once() == Report(pruned_entries=3)
    assert stage.sql("SELECT task_id FROM dead") == [("t1",)]


def test_a_schema_with_many_jobs_is_pruned_to_its_end(stage: Stage) -> None:
    """Postgres takes small numbers of a statement for smallints, of which two do not add up to more than 32,767."""
    stage.sql("SELECT setval('jobs_id_seq', 40000)")
    job = soon_forgotten(stage)
    stage.drain()
    pruner = Prune(Sweep(stage.runtime))

    assert pruner.run_once() == Report(pruned_jobs=1)

    assert not job.exists


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass goes on at once, whatever a slice has removed."""
    monkeypatch.setattr(module, "FRUITLESS_S", 0)


# -- slices of time ----------------------------------------------------------------------------------------------------


def in_slices(stage: Stage) -> Prune:
    """A duty whose every turn takes one step."""
    made = Prune(Sweep(stage.runtime))
    made.slice_s = 0
    return made


class SweepingWorker:
    """A worker that may sweep."""

    lock_lost_at = float("-inf")

    def __init__(self, worker_id: int) -> None:
        self.worker_id = worker_id

    def sweep_is_due(self) -> bool:
        return True


def finished(stage: Stage, many: int) -> None:
    """So many finished jobs whose time is over."""
    stage.sql(
        "INSERT INTO jobs (task, queue, status, run_no, ended_run, ended_at, retention_s) "
        "SELECT 'stage.idle', 'q', 'completed', 1, 1, now() - interval '1 hour', 60 FROM generate_series(1, %s)",
        many,
    )


def test_a_pass_goes_on_where_its_slice_of_time_was_over(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROOTS", 10)
    finished(stage, 35)
    pruner = in_slices(stage)
    removed = []
    while pruner.is_due():
        removed.append(pruner.run_once()["pruned_jobs"])
    assert [number for number in removed if number] == [10, 10, 10, 5]
    assert len(stage.sidejob.jobs()) == 0


def test_what_a_worker_prunes_keeps_it_from_sweeping_for_a_moment_only(stage: Stage) -> None:
    finished(stage, 20_000)
    sweeper = Sweeper(stage.runtime, SweepingWorker(stage.worker_id))
    begun = time.monotonic()
    assert sweeper.run_once() is not None
    took_s = time.monotonic() - begun
    left = stage.sql("SELECT count(*) FROM jobs")[0][0]
    assert 0 < left < 20_000, f"one turn took {took_s:.2f} s and left {left} jobs"


def test_jobs_are_deleted_many_in_a_transaction(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(stage, 150)
    deleted: list[int] = []

    def delete(executor: Any, ids: list[int]) -> set[int]:
        deleted.append(len(ids))
        return original(executor, ids)

    original = deletions.delete
    monkeypatch.setattr(deletions, "delete", delete)
    assert Prune(Sweep(stage.runtime)).run_once() == Report(pruned_jobs=150)
    assert deleted == [150]


def test_a_job_that_somebody_has_locked_keeps_no_other_from_going(stage: Stage) -> None:
    finished(stage, 3)
    with stage.connect(autocommit=False) as other:
        other.execute("SELECT FROM jobs WHERE id = 2 FOR KEY SHARE")
        assert Prune(Sweep(stage.runtime)).run_once() == Report(pruned_jobs=2)
    assert [job.id for job in stage.sidejob.jobs()] == [2]


ASKS: dict[str, Callable[[Job, Any], Any]] = {
    "set": lambda job, transaction: job.set(page=2, transaction=transaction),
    "unset": lambda job, transaction: job.unset("page", transaction=transaction),
    "read": lambda job, transaction: job.output("left").read(transaction=transaction),
    "run": lambda job, transaction: job.run(transaction=transaction),
    "enqueue": lambda job, transaction: job.enqueue("stage.idle", child_name="c", transaction=transaction),
}
"""The asks that lock a row of a finished job until the caller's commit; the first three do not lock the job's own."""


def with_rows(stage: Stage, many: int) -> list[Job]:
    """So many finished jobs whose time is over, each with state and a packet on an output."""

    def body(job: RunningJob) -> None:
        job.set(page=1)
        job.output("left").write(1)

    task = stage.task(body, name="pruner.with_rows", outports=["left"], retention=0)
    made = [task.enqueue() for _ in range(many)]
    stage.drain()
    return made


@pytest.mark.parametrize("ask", ASKS)
def test_a_transaction_that_uses_one_job_keeps_no_other_from_going(stage: Stage, ask: str) -> None:
    """Neither does the pruner wait for the transaction: it would hold up whoever asks one of the others."""
    made = with_rows(stage, 9)
    with stage.connect(autocommit=False) as other:
        ASKS[ask](made[4], other)
        assert Prune(Sweep(stage.runtime)).run_once()["pruned_jobs"] == 8
        assert kept(stage) == [made[4].id]
        other.rollback()
    assert Prune(Sweep(stage.runtime)).run_once()["pruned_jobs"] == 1


def test_a_turn_ends_with_its_slice_of_time_though_all_jobs_have_locked_rows(stage: Stage) -> None:
    made = with_rows(stage, 4)
    pruner, turns = in_slices(stage), 0
    with stage.connect(autocommit=False) as other:
        for job in made:
            job.set(page=2, transaction=other)
        while pruner.is_due():
            assert pruner.run_once().total() == 0
            turns += 1
    assert turns > 7, "four jobs together, two pairs, and each job are a try each"
    assert len(stage.sidejob.jobs()) == 4


def test_who_asks_a_job_that_is_being_pruned_finds_it_gone_and_others_are_not_held_up(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(stage, 3)
    beside = stage.job()
    stage.drain()
    told: list[type[Exception]] = []

    def ask() -> None:
        with pytest.raises(JobNotFoundError):
            stage.sidejob.get(2).run()
        told.append(JobNotFoundError)

    def delete(executor: Any, ids: list[int]) -> set[int]:
        asker.start()
        stage.wait_for_waiters()
        stage.outside(lambda: beside.run())
        stage.outside(lambda: stage.job())
        return original(executor, ids)

    original, asker = deletions.delete, threading.Thread(target=ask)
    monkeypatch.setattr(deletions, "delete", delete)
    assert Prune(Sweep(stage.runtime)).run_once() == Report(pruned_jobs=3)
    asker.join()
    assert told == [JobNotFoundError]
    assert beside.refresh().status == "queued"


# -- trees -------------------------------------------------------------------------------------------------------------


def tree(stage: Stage, children: int) -> Job:
    """A finished job with finished children, each with a child of its own, whose time is over."""
    finished(stage, 1)
    root: int = stage.sql("SELECT max(id) FROM jobs")[0][0]
    for level in ("parent", "child"):
        stage.sql(f"""
            INSERT INTO jobs (task, queue, status, run_no, ended_run, ended_at, parent_id, name)
            SELECT 'stage.idle', 'q', 'completed', 1, 1, now() - interval '1 hour', p.id, '{level}' || n
            FROM jobs p, generate_series(1, CASE '{level}' WHEN 'parent' THEN {children} ELSE 1 END) n
            WHERE CASE '{level}' WHEN 'parent' THEN p.id = {root} ELSE p.parent_id = {root} END""")
    return stage.sidejob.get(root)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees of more than ten jobs are deleted in parts of seven."""
    monkeypatch.setattr(module, "PRUNED_TOGETHER", 10)
    monkeypatch.setattr(deletion, "PART", 7)


@pytest.mark.usefixtures("small_parts")
def test_a_large_tree_goes_in_parts_and_its_root_last(stage: Stage) -> None:
    root, beside = tree(stage, 20), tree(stage, 2)
    pruner, left = in_slices(stage), []
    while pruner.is_due():
        pruner.run_once()
        left.append(stage.sql("SELECT count(*), count(*) FILTER (WHERE id = %s) FROM jobs", root.id)[0])
    assert left[-1] == (0, 0)
    assert not beside.exists
    deleted = [one[0] - other[0] for one, other in itertools.pairwise(left) if one != other]
    assert max(deleted) <= 7, "no transaction takes more than a part"


@pytest.mark.usefixtures("small_parts")
def test_nothing_of_a_large_tree_goes_while_anything_of_it_is_not_finished(stage: Stage) -> None:
    root = tree(stage, 20)
    leaf: int = stage.sql("SELECT max(id) FROM jobs")[0][0]
    stage.sidejob.get(leaf).run(countdown=3600)
    pruner = Prune(Sweep(stage.runtime))
    assert pruner.run_once() == Report()
    assert stage.sql("SELECT count(*) FROM jobs") == [(41,)]
    assert root.exists


@pytest.mark.usefixtures("small_parts")
def test_a_large_tree_with_failed_jobs_goes_when_their_entries_may(stage: Stage) -> None:
    root = tree(stage, 20)
    stage.sql("UPDATE jobs SET status = 'failed' WHERE id %% 5 = 0".replace("%%", "%"))
    stage.sql("INSERT INTO dead (job_id, task, queue, reason, payload, died_at) SELECT id, task, queue, 'failed', '{}',"
              " now() - interval '181 days' FROM jobs WHERE status = 'failed'")  # fmt: skip
    stage.sql("UPDATE dead SET died_at = now() WHERE id = (SELECT max(id) FROM dead)")
    assert Prune(Sweep(stage.runtime)).run_once() == Report()
    stage.sql("UPDATE dead SET died_at = now() - interval '181 days'")
    assert Prune(Sweep(stage.runtime)).run_once()["pruned_jobs"] == 1
    assert not root.exists
    assert stage.sql("SELECT count(*) FROM jobs") == [(0,)]


@pytest.mark.usefixtures("small_parts")
def test_a_transaction_that_uses_a_job_of_a_large_tree_keeps_the_tree_and_holds_up_nothing(stage: Stage) -> None:
    root, beside = tree(stage, 20), tree(stage, 2)
    lowest = "SELECT id FROM jobs j WHERE id < %s AND NOT EXISTS (SELECT FROM jobs c WHERE c.parent_id = j.id)"
    leaves = [stage.sidejob.get(job_id) for (job_id,) in stage.sql(lowest, beside.id)]
    assert len(leaves) == 20, "the part that goes first has seven of these"
    for leaf in leaves:
        leaf.set(page=1)
    pruner = Prune(Sweep(stage.runtime))
    with stage.connect(autocommit=False) as other:
        for leaf in leaves:
            leaf.set(page=2, transaction=other)
        assert pruner.run_once()["pruned_jobs"] == 1
        assert (root.exists, beside.exists) == (True, False)
        assert stage.sql("SELECT count(*) FROM jobs") == [(41,)]


@pytest.mark.usefixtures("small_parts")
def test_a_run_that_is_asked_for_keeps_the_rest_of_a_large_tree(stage: Stage) -> None:
    root = tree(stage, 20)
    pruner = in_slices(stage)
    while stage.sql("SELECT count(*) FROM jobs") == [(41,)]:
        pruner.run_once()
    root.run()
    left = stage.sql("SELECT count(*) FROM jobs")
    while pruner.is_due():
        pruner.run_once()
    assert stage.sql("SELECT count(*) FROM jobs") == left
    assert root.refresh().status == "queued"


@pytest.mark.usefixtures("small_parts")
def test_a_job_that_comes_below_a_large_tree_keeps_what_is_above_it(stage: Stage) -> None:
    root = tree(stage, 20)
    leaf = stage.sidejob.get(stage.sql("SELECT id FROM jobs WHERE parent_id = %s ORDER BY id", root.id)[0][0])
    pruner = in_slices(stage)
    while stage.sql("SELECT count(*) FROM jobs") == [(41,)]:
        pruner.run_once()
    late = leaf.enqueue("stage.idle", child_name="late")
    while pruner.is_due():
        pruner.run_once()
    assert (root.exists, leaf.exists, late.refresh().parent.id) == (True, True, leaf.id)


# -- what would grow for ever ------------------------------------------------------------------------------------------


def family_at_rest(stage: Stage, **options: Any) -> tuple[Job, Job]:
    """A suspended parent that has seen the end of its only child."""

    def child(job: RunningJob) -> None:
        if job.outports:
            job.output("left").write(1)

    stage.task(child, name="pruner.child", **options)

    def body(job: RunningJob) -> None:
        if not job.children:
            job.enqueue("pruner.child", child_name="c")
        job.suspend()

    parent = stage.job(body)
    stage.drain()
    assert parent.refresh().status == "suspended"
    return parent, parent.children["c"]


def test_a_child_whose_own_task_has_a_retention_goes_before_its_parent(stage: Stage) -> None:
    parent, child = family_at_rest(stage, retention=0)
    assert Prune(Sweep(stage.runtime)).run_once() == Report(pruned_jobs=1)
    assert (parent.exists, child.exists) == (True, False)


def test_a_child_stays_until_its_parent_has_run_after_its_end(stage: Stage) -> None:
    parent, child = family_at_rest(stage, retention=0)
    child.run()
    stage.run(child)
    assert parent.refresh().status == "queued"
    assert Prune(Sweep(stage.runtime)).run_once() == Report()
    stage.drain()
    assert Prune(Sweep(stage.runtime)).run_once() == Report(pruned_jobs=1)


def test_a_child_stays_while_its_end_is_only_noted_for_its_parent(stage: Stage) -> None:
    """The parent was locked when the child ended: it rests still, and is to run."""
    parent, child = family_at_rest(stage, retention=0)
    stage.sql("UPDATE jobs SET ended_at = now() WHERE id = %s", child.id)
    assert Prune(Sweep(stage.runtime)).run_once() == Report()
    parent.run()
    stage.drain()
    assert Prune(Sweep(stage.runtime)).run_once() == Report(pruned_jobs=1)


def test_a_child_stays_with_a_packet_that_nobody_has_read(stage: Stage) -> None:
    _, child = family_at_rest(stage, retention=0, outports=["left"])
    pruner = Prune(Sweep(stage.runtime))
    assert pruner.run_once() == Report()
    assert child.output("left").read() == 1
    assert pruner.run_once() == Report(pruned_jobs=1)


def test_the_setting_alone_removes_no_child_of_a_parent_that_goes_on(stage: Stage) -> None:
    parent, child = family_at_rest(stage)
    stage.sql("UPDATE jobs SET ended_at = now() - interval '1 hour'")
    with closing(Stage(stage.database_url, sidejob_retention=60)) as keeping:
        assert Prune(Sweep(keeping.runtime)).run_once() == Report()
        assert child.exists
        parent.terminate(recursive=True)
        stage.drain()
        stage.sql("UPDATE jobs SET ended_at = now() - interval '1 hour'")
        assert Prune(Sweep(keeping.runtime)).run_once() == Report(pruned_jobs=1)
        assert not child.exists


# -- by number ---------------------------------------------------------------------------------------------------------


def keeping(stage: Stage, **settings: Any) -> Any:
    """Another app on the same store, with these settings."""
    return closing(Stage(stage.database_url, **settings))


def kept(stage: Stage) -> list[int]:
    return [job.id for job in stage.sidejob.iter_jobs()]


@pytest.mark.parametrize("window", [1, 3, 10_000])
def test_all_but_the_newest_of_all_go(stage: Stage, monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    monkeypatch.setattr(deletions, "WINDOW", window)
    for _ in range(7):
        stage.job()
    stage.drain()
    active, own = stage.job(), soon_forgotten(stage)
    stage.sql("UPDATE jobs SET status = 'completed', retention_s = 3600 WHERE id = %s", own.id)
    stage.sql("DELETE FROM messages WHERE job_id = %s", own.id)
    with keeping(stage, sidejob_retention={"keep": 2}) as other:
        assert Prune(Sweep(other.runtime)).run_once() == Report(pruned_jobs=5)
        assert kept(stage) == [6, 7, active.id, own.id]
        assert Prune(Sweep(other.runtime)).run_once() == Report()
    with keeping(stage, sidejob_retention={"older_than": 3600, "keep": 2}) as other:
        stage.sql("UPDATE jobs SET ended_at = now() - interval '2 hours' WHERE id = 7")
        assert Prune(Sweep(other.runtime)).run_once() == Report(pruned_jobs=1), "the older, though among the newest"
    assert kept(stage) == [6, active.id, own.id]


def of_task(stage: Stage, name: str, count: int, **options: Any) -> list[int]:
    """So many finished jobs of a task of this name."""

    def body(job: RunningJob) -> None:
        pass

    made = stage.task(body, name=name, **options)
    ids = [made.enqueue().id for _ in range(count)]
    stage.drain()
    return ids


@pytest.mark.parametrize("window", [2, 10_000])
def test_each_task_keeps_the_number_that_it_says(stage: Stage, monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    monkeypatch.setattr(deletions, "WINDOW", window)
    three, none = of_task(stage, "three", 5, retention={"keep": 3}), of_task(stage, "none", 2, retention={"keep": 0})
    plain, age = of_task(stage, "plain", 4), of_task(stage, "age", 2, retention=3600)
    both = of_task(stage, "both", 5, retention={"older_than": 3600, "keep": 3})
    stage.sql("UPDATE jobs SET ended_at = now() - interval '2 hours' WHERE id = ANY(%s)", [age[0], both[0], three[4]])
    with keeping(stage, sidejob_retention=86400) as other:
        pruner = Prune(Sweep(other.runtime))
        assert pruner.run_once() == Report(pruned_jobs=2 + 2 + 1 + 2)
        assert kept(stage) == [*three[2:], *plain, age[1], *both[2:]]
        assert none
        assert pruner.run_once() == Report()


def test_no_number_is_counted_where_none_is_kept(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    newest_page = deletions.newest_page
    monkeypatch.setattr(deletions, "newest_page", lambda *a, **k: counted.append(1) or newest_page(*a, **k))
    of_task(stage, "plain", 3)
    with keeping(stage, sidejob_retention=60) as other:
        Prune(Sweep(other.runtime)).run_once()
        assert counted == []
        of_task(stage, "counted", 3, retention={"keep": 1})
        assert Prune(Sweep(other.runtime)).run_once() == Report(pruned_jobs=2)
        assert counted == [1]


def test_children_of_a_living_parent_go_by_number_if_their_task_says_so(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        if not job.children:
            for number in range(5):
                job.enqueue("counted.child", child_name=f"c{number}")
        job.suspend()

    def child(job: RunningJob) -> None:
        pass

    stage.task(child, name="counted.child", retention={"keep": 2})
    parent = stage.job(body)
    stage.drain()
    assert Prune(Sweep(stage.runtime)).run_once() == Report(pruned_jobs=3)
    assert list(parent.children) == ["c3", "c4"]
    assert parent.refresh().status == "suspended"
    assert parent.child("c0") is None
    assert parent.enqueue("counted.child", child_name="c0").exists, "its name is free again"


def failing(job: RunningJob) -> None:
    raise ValueError("for good")


def failed(stage: Stage, **options: Any) -> Job:
    job = stage.job(failing, **options)
    with pytest.raises(ValueError, match="for good"):
        stage.run(job)
    return job


def test_dead_entries_go_by_number(stage: Stage) -> None:
    first, second, third = failed(stage), failed(stage), failed(stage)
    stage.sql("INSERT INTO dead (task_id, task, queue, reason, payload, body)"
              " SELECT 't' || n, 'mail', 'q', 'lost', '{}', 'x' FROM generate_series(1, 3) n")  # fmt: skip
    with keeping(stage, sidejob_dead_retention={"keep": 2}) as other:
        assert Prune(Sweep(other.runtime)).run_once() == Report(pruned_entries=3 + 1)
    assert [entry.task_id for entry in stage.sidejob.dead] == ["t2", "t3"]
    assert not any(job.exists for job in (first, second, third))


def test_entries_of_a_task_with_a_retention_of_its_own_go_by_that(stage: Stage) -> None:
    job = failed(stage)
    stage.sql("""
        INSERT INTO dead (task_id, task, queue, reason, payload, body, died_at)
        SELECT task || n, task, 'q', 'lost', '{}', 'x', now() - make_interval(days => 10 - n)
        FROM unnest('{mail,ship,bill,other}'::text[]) task, generate_series(1, 3) n""")
    tasks = {"mail": {"keep": 2}, "ship": timedelta(days=8, hours=1), "bill": None, "stage.call": {"keep": 0}}
    with keeping(stage, sidejob_dead_retention={"keep": 1, "tasks": tasks}) as other:
        assert Prune(Sweep(other.runtime)).run_once() == Report(pruned_entries=1 + 1 + 1 + 2, pruned_parts=0)
    left = ["bill1", "bill2", "bill3", "mail2", "mail3", "other3", "ship2", "ship3"]
    assert sorted(entry.task_id for entry in stage.sidejob.dead) == left
    assert not job.exists


@pytest.mark.parametrize("of", ["jobs", "tasks"])
def test_an_old_entry_is_found_behind_a_page_of_entries_that_stay(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    monkeypatch.setattr(module, "PAGE", 2)
    stage.sql("INSERT INTO dead (task_id, task, queue, reason, payload, body)"
              " SELECT 't' || n, 'mail', 'q', 'lost', '{}', 'x' FROM generate_series(1, 5) n")  # fmt: skip
    task = "stage.call" if of == "jobs" else "ship"
    if of == "jobs":
        failed(stage)
    else:
        stage.sql("INSERT INTO dead (task_id, task, queue, reason, payload, body)"
                  " VALUES ('s', 'ship', 'q', 'lost', '{}', 'x')")  # fmt: skip
    with keeping(stage, sidejob_dead_retention={"keep": 9, "tasks": {task: {"keep": 0}}}) as other:
        assert Prune(Sweep(other.runtime)).run_once() == Report(pruned_entries=1)
    assert {entry.task for entry in stage.sidejob.dead} == {"mail"}


def test_an_old_failure_keeps_no_finished_root_and_a_young_one_does(stage: Stage) -> None:
    root = soon_forgotten(stage)
    stage.drain()
    child = failed(stage, parent=root, child_name="c")
    stage.drain()
    assert Prune(Sweep(stage.runtime)).run_once() == Report()
    stage.sql("UPDATE dead SET died_at = now() - interval '181 days'")
    assert Prune(Sweep(stage.runtime)).run_once() == Report(pruned_jobs=1)
    assert (root.exists, child.exists) == (False, False)


def test_a_failed_child_of_a_living_parent_goes_with_its_old_entry_if_its_task_has_a_retention(stage: Stage) -> None:
    stage.task(failing, name="fails.kept")
    stage.task(failing, name="fails.gone", retention=60)

    def body(job: RunningJob) -> None:
        if not job.children:
            job.enqueue("fails.kept", child_name="kept")
            job.enqueue("fails.gone", child_name="gone")
        job.suspend()

    parent = stage.job(body)
    stage.drain()
    assert {job.status for job in parent.children.values()} == {"failed"}
    pruner = Prune(Sweep(stage.runtime))
    assert pruner.run_once() == Report()
    stage.sql("UPDATE dead SET died_at = now() - interval '181 days'")
    assert pruner.run_once() == Report(pruned_entries=1)
    assert list(parent.children) == ["kept"]
    assert len(stage.sidejob.dead) == 1


def test_tasks_that_nobody_has_served_for_long_leave_the_registry(stage: Stage) -> None:
    stage.sql("""
        INSERT INTO registry (task, queue, options, seen_at)
        SELECT 'task' || n, 'q', '{}', now() - n * interval '100 days' FROM generate_series(1, 3) n""")
    stage.sql("UPDATE workers SET started_at = now() - interval '250 days'")
    Prune(Sweep(stage.runtime)).run_once()
    assert stage.sql("SELECT task FROM registry WHERE task LIKE 'task%%' ORDER BY 1") == [("task1",), ("task2",)], (
        "a worker that lives began before the second was seen last"
    )
    stage.sql("UPDATE workers SET started_at = now()")
    Prune(Sweep(stage.runtime)).run_once()
    assert stage.sql("SELECT task FROM registry WHERE task LIKE 'task%%'") == [("task1",)]
