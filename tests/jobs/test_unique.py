"""Jobs with unique keys: no two that are open have the same, whoever asks at once and whatever is lost."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

from celery_sidejob import ChildNameTakenError, DuplicateError, IllegalMoveError, InvalidValueError, Job, RunningJob
from celery_sidejob.operations.changes.follow_up import apply_noted_asks
from tests.acceptance.lenders import LENDERS
from tests.tools.between import between_look_and_lock
from tests.tools.crash_points import Arm, lost
from tests.tools.in_process import Stage
from tests.tools.threads import in_thread

pytestmark = pytest.mark.pooled_too


def fails(job: RunningJob) -> None:
    raise ValueError("for good")


def holders(stage: Stage) -> list[tuple[str, int]]:
    return stage.sql(
        "SELECT unique_key, job_id FROM askings WHERE unique_key IS NOT NULL AND closed_at IS NULL ORDER BY job_id"
    )


# -- while it is open --------------------------------------------------------------------------------------------------


def test_a_second_job_of_a_key_is_the_first(stage: Stage) -> None:
    first = stage.job(unique="invoice:7")
    second = stage.job(unique="invoice:7")
    assert (second, second.task_id) == (first, first.task_id)
    assert stage.job(unique="invoice:8") != first
    assert stage.job() != first
    assert stage.sql("SELECT count(*) FROM jobs") == [(3,)]


@pytest.mark.parametrize("end", ["completed", "failed", "terminated"])
def test_the_key_is_free_when_the_job_has_ended(stage: Stage, end: str) -> None:
    first = stage.job(fails if end == "failed" else None, unique="k")
    if end == "terminated":
        first.terminate()
        assert stage.job(unique="k") == first, "its shutdown is due"
    stage.drain()
    assert first.refresh().status == end
    second = stage.job(unique="k")
    assert second != first
    first.run(force=True)
    assert stage.job(unique="k") == second, "a job that begins anew has its key no more"


def test_a_suspended_or_retried_job_keeps_its_key(stage: Stage) -> None:
    def suspends(job: RunningJob) -> None:
        job.suspend()

    def retries(job: RunningJob) -> None:
        raise job.retry(countdown=60)

    for body, status in ((suspends, "suspended"), (retries, "queued")):
        job = stage.inside(body, unique=status)
        assert job.status == status
        assert stage.job(unique=status) == job


@pytest.mark.parametrize("first", ["completed", "failed"])
def test_a_job_that_was_asked_again_during_its_run_keeps_its_key(stage: Stage, first: str) -> None:
    """It has not come to rest; a job that was terminated and is forced to run has."""

    def body(job: RunningJob) -> None:
        stage.outside(Job(job.id, runtime=stage.runtime).run)
        if first == "failed":
            fails(job)

    job = stage.job(body, unique="k")
    hold = stage.claim(job)
    assert hold is not None
    stage.perform(hold)
    assert (job.refresh().status, stage.job(unique="k")) == ("queued", job)
    job.terminate()
    job.run(force=True)
    stage.run(job)
    assert (job.refresh().status, holders(stage)) == ("queued", [])


@pytest.mark.parametrize("end", ["completed", "failed"])
def test_a_job_that_has_set_a_timer_in_its_run_keeps_its_key(stage: Stage, end: str) -> None:
    """So does one that asks itself again and again: it never rests."""

    def body(job: RunningJob) -> None:
        job.run(countdown=3600)
        if end == "failed":
            stage.outside(lambda: Job(job.id, runtime=stage.runtime).run(countdown=3600))
            fails(job)

    job = stage.job(body, unique="k")
    for _ in range(3):
        hold = stage.claim(job)
        assert hold is not None
        stage.perform(hold)
        assert (job.refresh().status, stage.job(unique="k")) == ("queued", job)
        stage.sql("UPDATE timers SET due_at = now()")
        apply_noted_asks(stage.runtime, [job.id])
    job.terminate()
    stage.drain()
    assert holders(stage) == []


@pytest.mark.parametrize("end", ["completed", "failed", "suspended"])
def test_a_job_whose_last_timer_is_cancelled_rests_and_leaves_its_key(stage: Stage, end: str) -> None:
    timers: list[Any] = []

    def body(job: RunningJob) -> None:
        if not timers:
            stage.outside(lambda: Job(job.id, runtime=stage.runtime).run(countdown=3600))
            timers.append(None)
        if end == "suspended":
            job.suspend()
        if end == "failed":
            fails(job)

    job = stage.job(body, unique="k")
    hold = stage.claim(job)
    assert hold is not None
    stage.perform(hold)
    task_id = job.refresh().task_id
    assert (job.status, stage.job(unique="k")) == ("queued", job)
    (timer,) = job.timers
    job.cancel_timer(timer)
    assert job.refresh().status == end
    assert (stage.job(unique="k") == job) == (end == "suspended")
    if end != "suspended":
        assert job.task_id != task_id, "the asking that was to begin with the timer is gone"
    assert len(stage.sidejob.dead) == (end == "failed")


@pytest.mark.parametrize("end", ["completed", "failed", "retried", "suspended"])
def test_a_job_that_is_terminated_in_its_run_has_its_key_until_its_shutdown_is_over(stage: Stage, end: str) -> None:
    def body(job: RunningJob) -> None:
        job.terminate()
        if end == "failed":
            fails(job)
        if end == "retried":
            raise job.retry(countdown=60)
        if end == "suspended":
            job.suspend()

    job = stage.job(body, unique="k")
    for terminates in ("run", "shutdown"):
        hold = stage.claim(job)
        assert hold is not None
        assert (hold.kind, stage.job(unique="k")) == (terminates, job)
        stage.perform(hold)
    assert (job.refresh().status, holders(stage)) == ("terminated", [])
    assert stage.job(unique="k") != job


def test_a_job_that_has_been_shut_down_has_no_key_when_it_is_forced_to_run_later(stage: Stage) -> None:
    job = stage.inside(lambda job: job.terminate(), unique="k")
    assert stage.job(unique="k") == job
    hold = stage.claim(job)
    assert hold is not None
    job.run(force=True, countdown=3600)
    stage.perform(hold)
    assert (job.refresh().status, holders(stage)) == ("queued", [])


def test_a_job_for_later_has_its_key_at_once(stage: Stage) -> None:
    later = stage.job(unique="k", countdown=3600)
    assert stage.job(unique="k") == later


def test_a_deleted_job_leaves_its_key(stage: Stage) -> None:
    job = stage.job(unique="k")
    job.terminate()
    stage.drain()
    assert job.delete()
    assert stage.job(unique="k").exists


def test_a_job_shows_its_key_while_it_is_open(stage: Stage) -> None:
    seen: list[str | None] = []

    def body(job: RunningJob) -> None:
        child = job.enqueue(stage.idle, child_name="new", unique="child")
        seen.extend(each.info["unique"] for each in (job, child))
        job.checkpoint()
        if job.run_no == 1:
            job.suspend()
        seen.extend(each.info["unique"] for each in (job.children["new"], child))

    job = stage.job(body, unique="k")
    assert [each.info["unique"] for each in (job, stage.job(), stage.sidejob.find(job.id))] == ["k", None, "k"]
    assert stage.sidejob.jobs(unique="k", status="queued") == [job]
    assert stage.sidejob.jobs(unique="k", status="running") == stage.sidejob.jobs(unique="other") == []
    stage.run(job)
    assert job.refresh().info["unique"] == "k"
    job.run()
    assert stage.run(job) == "completed"
    assert seen == ["k", "child", "k", "child", "child", "child"]
    assert job.refresh().info["unique"] is None
    assert stage.sidejob.jobs(unique="k") == []


# -- what happens to the second ----------------------------------------------------------------------------------------


def test_a_second_job_is_refused_and_told_of_the_first(stage: Stage) -> None:
    first = stage.job(unique="k")
    with pytest.raises(DuplicateError, match=f"Job {first.id} is open and has the unique key 'k'") as refused:
        stage.job(unique="k", on_duplicate="refuse")
    assert (refused.value.job, refused.value.job_id) == (first, first.id)
    assert stage.sql("SELECT count(*) FROM jobs") == [(1,)]


def test_a_waiting_job_is_replaced_and_terminated(stage: Stage) -> None:
    parent = stage.job()
    first = parent.enqueue(stage.idle, child_name="first", unique="k", countdown=60)
    second = stage.job(unique="k", on_duplicate="replace", aliases=["second"])
    assert second != first
    assert first.refresh().status == "terminating"
    assert holders(stage) == [("k", second.id)]
    stage.drain()
    assert (first.refresh().status, second.refresh().status) == ("terminated", "completed")


@pytest.mark.parametrize("begun", ["running", "suspended", "queued", "terminating"])
def test_a_job_that_has_begun_is_not_replaced(stage: Stage, begun: str) -> None:
    if begun in ("suspended", "queued"):
        first = stage.inside(lambda job: job.suspend(), unique="k")
        if begun == "queued":
            first.run()
    else:
        first = stage.job(unique="k")
        first.terminate() if begun == "terminating" else stage.claim(first)
    with pytest.raises(DuplicateError, match="its first run has begun"):
        stage.job(unique="k", on_duplicate="replace")
    assert first.refresh().status == begun


@pytest.mark.parametrize("meanwhile", ["runs", "ends", "goes"])
def test_a_job_that_begins_or_ends_just_before_it_is_replaced_is_left_alone(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    first = stage.job(unique="k")

    def happens() -> None:
        if meanwhile == "runs":
            stage.claim(first)
            return
        if meanwhile == "goes":
            first.terminate()
        stage.drain()
        assert meanwhile == "ends" or first.delete()

    between_look_and_lock(monkeypatch, stage.outside)(happens)
    if meanwhile == "runs":
        with pytest.raises(DuplicateError, match="its first run has begun"):
            stage.job(unique="k", on_duplicate="replace")
        assert first.refresh().status == "running"
        return
    second = stage.job(unique="k", on_duplicate="replace")
    assert holders(stage) == [("k", second.id)]
    assert meanwhile == "goes" or first.refresh().status == "completed"


def test_many_at_once_are_made_or_found(stage: Stage) -> None:
    old = stage.job(unique="old")
    items = [{"task": stage.idle, "unique": key} for key in ("new", "old", "new", None)]
    made = stage.sidejob.enqueue_many(items)
    assert made[1] == old
    assert made[0] == made[2]
    assert len({job.id for job in made}) == 3
    assert stage.sql("SELECT count(*) FROM jobs") == [(3,)]


def test_two_of_many_that_are_one_job_want_its_names_once(stage: Stage) -> None:
    parent = stage.job()
    item = {"task": stage.idle, "parent": parent, "child_name": "a", "aliases": ["a"], "unique": "k"}
    first, second = stage.sidejob.enqueue_many([item, item])
    assert first == second
    assert parent.children == {"a": first}
    with pytest.raises(ChildNameTakenError, match="2 new children"):
        stage.sidejob.enqueue_many([item, {**item, "unique": "other"}])


def test_of_many_at_once_all_are_refused_together(stage: Stage) -> None:
    stage.job(unique="old")
    items = [{"task": stage.idle, "unique": "new"}, {"task": stage.idle, "unique": "old", "on_duplicate": "refuse"}]
    with pytest.raises(DuplicateError):
        stage.sidejob.enqueue_many(items)
    assert [key for key, _ in holders(stage)] == ["old"]
    twice = [{"task": stage.idle, "unique": "new", "on_duplicate": "refuse"}] * 2
    with pytest.raises(InvalidValueError, match="Two of the new jobs have the unique key 'new'"):
        stage.sidejob.enqueue_many(twice)


def test_celery_s_calls_take_keys_too(stage: Stage) -> None:
    first = stage.idle.apply_async(unique="k")
    second = stage.idle.apply_async(unique="k", task_id="given")
    signature = stage.idle.s().set(unique="k").apply_async()
    assert {first.id, second.id, signature.id} == {first.job.task_id}
    assert second.job == signature.job == first.job


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unique": ""}, "it is empty"),
        ({"unique": 7}, "it is not a string"),
        ({"unique": "a\0"}, "NUL"),
        ({"unique": "x" * 256}, "256 characters"),
        ({"unique": "k", "on_duplicate": "replaced"}, "'return', 'refuse', 'replace', not 'replaced'"),
        ({"on_duplicate": "refuse"}, "give unique=, too"),
        ({"unique": "k", "link": [{"task": "stage.idle"}]}, "beside link= needs on_duplicate="),
        ({"link": {"task": "stage.idle", "options": {"unique": "k"}}}, "of stage.idle cannot be part of link="),
    ],
)
def test_what_is_no_key_is_refused(stage: Stage, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        stage.job(**options)
    assert stage.sql("SELECT count(*) FROM jobs") == [(0,)]


# -- at once -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_duplicate", ["return", "refuse", "replace"])
def test_of_sixteen_who_ask_at_once_one_makes_the_job(stage: Stage, on_duplicate: str) -> None:
    for turn in range(5):
        key, start, found = f"k{turn}", threading.Barrier(16), list[Job | None]()

        def ask(key: str = key, start: threading.Barrier = start, found: list[Job | None] = found) -> None:
            start.wait()
            try:
                found.append(stage.job(unique=key, on_duplicate=on_duplicate))
            except DuplicateError:
                found.append(None)

        threads = [threading.Thread(target=ask) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 16
        ((_, holder),) = [row for row in holders(stage) if row[0] == key]
        made = {job.id for job in found if job is not None}
        if on_duplicate == "replace":
            assert len(made) == 16
            queued = stage.sql("SELECT id FROM jobs WHERE status = 'queued' AND id = ANY(%s)", list(made))
            assert queued == [(holder,)]
        else:
            assert made == {holder}
            assert found.count(None) == (15 if on_duplicate == "refuse" else 0)


def test_of_many_who_ask_at_once_for_several_keys_all_find_the_same_jobs(stage: Stage) -> None:
    """Each two neighbours have a key in common, and ask for it in another order."""
    for turn in range(10):
        start, found = threading.Barrier(8), list[tuple[str, Job]]()

        def ask(
            n: int, turn: int = turn, start: threading.Barrier = start, found: list[tuple[str, Job]] = found
        ) -> None:
            keys = [f"{turn}-{n}", f"{turn}-{(n + 1) % 8}"]
            start.wait()
            made = stage.sidejob.enqueue_many([{"task": stage.idle, "unique": key} for key in keys])
            found.extend(zip(keys, made, strict=True))

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 16
        assert len(set(found)) == 8, "each key leads to one job"


@pytest.mark.parametrize("kind", ["psycopg", "session-psycopg"])
def test_who_asks_during_another_s_transaction_waits_for_its_end(stage: Stage, kind: str) -> None:
    for ends in ("commit", "rollback"):
        with LENDERS[kind](stage.database_url) as lender:
            first = stage.job(unique=ends, transaction=lender.transaction)
            assert stage.job(unique=ends, transaction=lender.transaction) == first
            found: list[Job] = []
            with in_thread(lambda found=found, ends=ends: found.append(stage.job(unique=ends))):
                stage.wait_for_waiters()
                lender.commit() if ends == "commit" else lender.rollback()
        assert (found == [first]) == (ends == "commit")
        assert holders(stage)[-1] == (ends, found[0].id)


def test_who_waits_for_another_s_transaction_locks_no_job_meanwhile(stage: Stage) -> None:
    parent = stage.job()
    found: list[Job] = []
    with LENDERS["psycopg"](stage.database_url) as lender:
        first = stage.job(unique="k", transaction=lender.transaction)
        with in_thread(lambda: found.append(parent.enqueue(stage.idle, child_name="a", unique="k"))):
            try:
                stage.wait_for_waiters()
                stage.sql("SELECT FROM jobs WHERE id = %s FOR UPDATE NOWAIT", parent.id)
            finally:
                lender.commit()
    assert found == [first]


def test_a_unit_in_another_s_transaction_that_waits_for_a_key_locks_not_even_its_own_job(stage: Stage) -> None:
    """Whoever has the key may want that job next: both would wait for ever."""
    found: list[Job] = []

    def body(job: RunningJob) -> None:
        with stage.connect(autocommit=False) as connection, job.unit(transaction=connection):
            found.append(stage.job(unique="k"))

    job = stage.job(body)
    with LENDERS["psycopg"](stage.database_url) as lender:
        stage.job(unique="k", transaction=lender.transaction)
        with in_thread(lambda: stage.run(job)):
            try:
                stage.wait_for_waiters()
                stage.sql("SELECT FROM jobs WHERE id = %s FOR UPDATE NOWAIT", job.id)
            finally:
                lender.rollback()
    assert holders(stage) == [("k", found[0].id)]
    assert job.refresh().status == "completed"


def test_two_of_a_key_in_one_transaction_are_one_job_that_can_be_read_there(stage: Stage) -> None:
    with LENDERS["psycopg"](stage.database_url) as lender:
        items = [{"task": stage.idle, "unique": "k", "created_by": "us"}] * 2
        first, second = stage.sidejob.enqueue_many(items, transaction=lender.transaction)
        assert (first, second.info["created_by"]) == (second, "us")
        lender.commit()
    assert holders(stage) == [("k", first.id)]


def test_a_transaction_that_sees_an_older_state_of_the_store_makes_no_second_job(stage: Stage) -> None:
    with stage.connect(autocommit=False) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT count(*) FROM jobs")
        first = stage.job(unique="k")
        with pytest.raises(DuplicateError, match="repeat the transaction"):
            stage.job(unique="k", transaction=connection)
        connection.rollback()
    assert holders(stage) == [("k", first.id)]


def test_nothing_is_replaced_in_another_s_transaction(stage: Stage) -> None:
    first = stage.job(unique="k")
    with LENDERS["psycopg"](stage.database_url) as lender:
        with pytest.raises(IllegalMoveError, match="cannot be part of transaction="):
            stage.job(unique="k", on_duplicate="replace", transaction=lender.transaction)
        assert stage.job(unique="new", on_duplicate="replace", transaction=lender.transaction).id > first.id
        lender.commit()
    assert first.refresh().status == "queued"


@pytest.mark.parametrize("on_duplicate", ["return", "refuse", "replace"])
def test_a_call_whose_answer_was_lost_makes_one_job(stage: Stage, at: Arm, on_duplicate: str) -> None:
    replaced = stage.job(unique="k") if on_duplicate == "replace" else None
    at("enqueue:after-commit", lost)
    job = stage.job(unique="k", on_duplicate=on_duplicate)
    assert holders(stage) == [("k", job.id)]
    assert stage.sql("SELECT count(*) FROM jobs WHERE status = 'queued'") == [(1,)]
    assert replaced is None or replaced.refresh().status == "terminating"


# -- in a run ----------------------------------------------------------------------------------------------------------


def test_a_run_finds_the_job_of_a_key_among_its_own_and_others(stage: Stage) -> None:
    other = stage.job(unique="other")
    seen: list[Any] = []

    def body(job: RunningJob) -> None:
        made = job.enqueue(stage.idle, child_name="a", unique="own")
        seen.append(job.enqueue(stage.idle, child_name="b", unique="own") == made)
        seen.append(stage.job(unique="other") == other)
        for key in ("own", "other"):
            with pytest.raises(DuplicateError) as refused:
                stage.job(unique=key, on_duplicate="refuse")
            seen.append(refused.value.job in (made, other))
        with pytest.raises(DuplicateError, match="cannot be replaced any more"):
            stage.job(unique="own", on_duplicate="replace")
        stage.job(unique="other", on_duplicate="replace")

    parent = stage.inside(body)
    assert seen == [True] * 4
    assert list(parent.children) == ["a"]
    assert other.refresh().status == "terminating"
    assert {key for key, _ in holders(stage)} == {"own", "other"}


def test_a_run_asks_again_for_the_child_that_it_has(stage: Stage) -> None:
    children: list[Job] = []

    def body(job: RunningJob) -> None:
        children.append(job.enqueue(stage.idle, child_name="only", aliases=["only"], unique="k"))
        job.suspend()

    parent = stage.inside(body)
    parent.run()
    assert stage.run(parent) == "suspended"
    assert children[0] == children[1]
    assert parent.children == {"only": children[0]}


def test_a_call_of_a_run_in_another_transaction_is_no_part_of_the_run(stage: Stage) -> None:
    """It finds what is committed, and its job is one that the run's commit finds."""
    found: list[Job] = []

    def body(job: RunningJob) -> None:
        found.append(stage.job(unique="k"))
        with stage.connect(autocommit=False) as connection:
            found.append(stage.job(unique="k", transaction=connection))
            connection.commit()

    job = stage.job(body)
    hold = stage.claim(job)
    assert hold is not None
    stage.perform(hold)
    assert "have changed hands" in stage.ignored[job.id]
    assert stage.run(job) == "completed"
    assert found[1:] == [found[1]] * 3
    assert holders(stage) == [("k", found[1].id)]


@pytest.mark.parametrize("commits", [True, False], ids=["its commit", "its end"])
def test_a_run_begins_again_if_another_job_got_the_key(stage: Stage, commits: bool) -> None:
    found: list[Job] = []
    rival: list[Job] = []

    def body(job: RunningJob) -> None:
        found.append(stage.job(unique="k"))
        if not rival:
            stage.outside(lambda: rival.append(stage.job(unique="k")))
        if commits:
            job.checkpoint()

    job = stage.job(body)
    hold = stage.claim(job)
    assert hold is not None
    stage.perform(hold)
    assert "have changed hands" in stage.ignored[job.id]
    assert stage.run(job) == "completed"
    assert found[-1] == rival[0]
    assert stage.sql("SELECT losses FROM jobs WHERE id = %s", job.id) == [(0,)]
    assert holders(stage) == [("k", rival[0].id)]


@pytest.mark.parametrize("meanwhile", ["runs", "ends", "goes"])
@pytest.mark.parametrize("commits", [True, False], ids=["its commit", "its end"])
def test_a_run_begins_again_if_the_job_that_it_replaces_has_begun_or_ended(
    stage: Stage, commits: bool, meanwhile: str
) -> None:
    first = stage.job(unique="k")
    made: list[Job] = []

    def happens() -> None:
        if meanwhile == "goes":
            first.terminate()
        stage.run(first)
        assert meanwhile != "goes" or first.delete()

    def body(job: RunningJob) -> None:
        made.append(stage.job(unique="k", on_duplicate="replace"))
        if len(made) == 1:
            stage.outside((lambda: stage.claim(first)) if meanwhile == "runs" else happens)
        if commits:
            job.checkpoint()

    job = stage.job(body)
    hold = stage.claim(job)
    assert hold is not None
    stage.perform(hold)
    assert "have changed hands" in stage.ignored[job.id]
    if meanwhile == "runs":
        with pytest.raises(DuplicateError, match="its first run has begun"):
            stage.run(job)
        assert holders(stage) == [("k", first.id)]
        return
    assert stage.run(job) == "completed"
    assert holders(stage) == [("k", made[-1].id)]


def test_the_keys_of_a_run_that_raises_are_free(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        stage.job(unique="k")
        fails(job)

    with pytest.raises(ValueError, match="for good"):
        stage.inside(body)
    assert holders(stage) == []
    assert isinstance(stage.job(unique="k"), Job)
