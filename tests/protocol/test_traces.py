"""Each trace by which a simpler protocol loses something, step by step on a real Postgres.

The numbers are those of the protocol's list of defects. Where a trace needs a killed process or a server that goes
away, it is among the acceptance tests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
import redis

from celery_sidejob import NO_DATA, IllegalMoveError, Job, LeaseLostError, RunningJob
from celery_sidejob.model.changes import Ask, Change, Write
from celery_sidejob.model.status import RunEnd
from celery_sidejob.operations.changes.unit_of_work import Applied
from celery_sidejob.operations.runs import endings, recovery, runs
from celery_sidejob.operations.runs.endings import Ending
from celery_sidejob.operations.runs.runs import Unit
from celery_sidejob.store import claims, workers
from celery_sidejob.store.claims import Owed, Try
from celery_sidejob.store.outbox.kinds import JOBS
from celery_sidejob.store.outbox.publishing import mark_published
from tests.tools.in_process import Stage
from tests.tools.proxy import TcpProxy
from tests.tools.waiting import wait_until

pytestmark = pytest.mark.pooled_too


@contextmanager
def held_open(stage: Stage, work: Callable[[Any], Any]) -> Iterator[Callable[[], Any]]:
    """Do `work` in a transaction that stays open in the block until the function this yields is called."""
    done, go = threading.Event(), threading.Event()

    def working(executor: Any) -> Any:
        result = work(executor)
        done.set()
        assert go.wait(60)
        return result

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(stage.runtime.connections.transact, "held-open", working)
        wait_until(lambda: done.is_set() or future.done())

        def finish() -> Any:
            go.set()
            return future.result(60)

        try:
            yield finish
        finally:
            finish()


def applying(stage: Stage, *changes: Change) -> Callable[[Any], Applied]:
    """Return work that applies changes, as every call from outside does."""

    def work(executor: Any) -> Applied:
        applied = Applied(stage.runtime, executor, changes)
        applied.lock()
        applied.apply()
        return applied

    return work


def row(stage: Stage, job: Job, columns: str = "status, run_no, unit_no, losses") -> tuple[Any, ...]:
    """The job's row, as it stands."""
    return stage.sql(f"SELECT {columns} FROM jobs WHERE id = %s", job.id)[0]


def test_p01_a_zombie_ends_nothing_even_before_the_next_claim(stage: Stage) -> None:
    job = stage.job(inports=["a"])
    zombie = stage.claim(job, worker_id=stage.new_worker())
    assert zombie is not None
    stage.declare_dead(zombie.worker_id)
    stage.sidejob.poll()
    assert row(stage, job) == ("queued", 1, None, 1)

    for again in (False, True):
        with pytest.raises(LeaseLostError):
            runs.commit(stage.runtime, zombie, Unit())
        with pytest.raises(LeaseLostError):
            endings.end(stage.runtime, zombie, Unit(), Ending(RunEnd.COMPLETED))
        if not again:
            heir = stage.claim(job)
    assert heir is not None
    stage.perform(heir)
    assert row(stage, job) == ("completed", 2, None, 0)


@pytest.mark.parametrize("ends", ["before the claim", "after the run"])
def test_p02_a_packet_written_across_a_claim_or_a_run_is_read(
    stage: Stage, aside: Callable[..., Future[Any]], ends: str
) -> None:
    read: list[Any] = []
    job = stage.job(lambda job: read.extend(job.input("a")), inports=["a"])
    if ends == "before the claim":
        with held_open(stage, applying(stage, Write(job.id, "in", "a", (("1", None, None),)))) as finish:
            claiming = aside(stage.claim, job)
            stage.wait_for_waiters()
            finish()
        stage.perform(claiming.result(10))
    else:
        with stage.connect(autocommit=False) as borrowed:
            job.input("a").write(1, transaction=borrowed)
            stage.run(job)
            assert read == []
            borrowed.commit()
        stage.sidejob.poll()  # bare psycopg tells nobody of its commit
    stage.drain()

    assert read == [1]
    assert job.refresh().status == "completed"


def test_p03_of_two_claims_around_an_ask_one_gets_the_run(stage: Stage, aside: Callable[..., Future[Any]]) -> None:
    job = stage.job()
    other = stage.new_worker()

    def first(executor: Any) -> Any:
        owed = Owed(job.id, 1, job.task)
        return claims.claim(executor, owed, worker_id=stage.worker_id, most=1, how=Try.AT_ONCE)

    with held_open(stage, first) as finish:
        asking = aside(job.run)
        stage.wait_for_waiters(1)
        second = aside(stage.claim, job, worker_id=other, for_run=1)
        stage.wait_for_waiters(2)
        assert finish() is not None

    assert second.result(10) is None
    assert asking.result(10) == job
    assert row(stage, job, "status, run_no, worker_id") == ("queued", 1, stage.worker_id)
    stage.sql("UPDATE workers SET dead_at = now()")
    stage.sidejob.poll()


def test_p04_timers_outlive_other_runs_and_die_with_a_terminate(stage: Stage) -> None:
    job = stage.job(lambda job: job.suspend())
    job.run(countdown=3600)  # while a message waits
    hold = stage.claim(job)
    assert hold is not None
    job.run(countdown=7200)  # while it runs
    stage.sql("UPDATE timers SET due_at = now() WHERE id = (SELECT min(id) FROM timers)")  # passes during the run
    stage.perform(hold)
    assert stage.row_counts()["timers"] == 2
    assert stage.drain() == 1
    assert (job.refresh().status, stage.row_counts()["timers"]) == ("suspended", 1)
    for _ in range(2):
        job.run()
        stage.drain()
    assert stage.row_counts()["timers"] == 1
    job.terminate()
    assert stage.row_counts()["timers"] == 0
    stage.drain()


def test_p04_a_due_wake_does_not_wait_for_a_timer(stage: Stage) -> None:
    job = stage.job()
    job.run(countdown=3600)
    assert stage.drain() == 1
    job.run()
    assert stage.drain() == 1
    assert stage.row_counts()["timers"] == 1


def test_p05_a_forced_run_while_terminating_follows_the_shutdown(stage: Stage) -> None:
    happened: list[str] = []

    @stage.task(name="p05")
    def p05(job: RunningJob) -> None:
        happened.append("run")

    p05.on_shutdown(lambda job: happened.append("shutdown"))
    job = p05.enqueue()
    job.terminate()
    job.run(force=True)
    assert job.refresh().status == "terminating"
    stage.drain()
    assert happened == ["shutdown", "run"]
    assert job.refresh().status == "completed"

    job.terminate()
    job.run(force=True)
    job.terminate()  # cancels the forced run
    stage.drain()
    assert happened == ["shutdown", "run", "shutdown"]
    assert job.refresh().status == "terminated"


@pytest.mark.parametrize("at", ["claim", "unit", "end"])
def test_p06_p11_a_commit_whose_answer_is_lost_counts_once(database_url: str, at: str) -> None:
    with TcpProxy.to(database_url) as proxy:
        stage = Stage(proxy.url_for(database_url), outside=database_url)
        cuts: list[threading.Event] = []

        def body(job: RunningJob) -> None:
            for value in job.for_inputs("a"):
                job.output("o").write(value)
                if at == "unit" and value == 1:
                    cuts.append(proxy.cut_after(b"COMMIT"))
            job.set(done=True)
            if at == "end":
                cuts.append(proxy.cut_after(b"COMMIT"))

        try:
            job = stage.job(body, inports=["a"], outports=["o"])
            with stage.sidejob.port_options(notify=False):
                job.input("a").write_many(range(4))
            stage.runtime.connections.close()  # a new connection: the claim is sent as text, not by its prepared name
            if at == "claim":
                cuts.append(proxy.cut_after(b"run_no = j.run_no + 1"))
            assert stage.run(job) == "completed"

            assert cuts[0].is_set()
            assert list(job.output("o")) == list(range(4))
            assert (job.get("done"), len(job.input("a"))) == (True, 0)
            assert row(stage, job) == ("completed", 1, None, 0)
            assert stage.broken_rules() == []
        finally:
            stage.close()


def test_p06_an_end_that_is_done_behind_a_broken_connection_is_the_runs_own(
    database_url: str, aside: Callable[..., Future[Any]]
) -> None:
    """Its statement waits for the job's lock when the connection breaks, and so does the next try behind it."""
    with TcpProxy.to(database_url) as proxy:
        stage = Stage(proxy.url_for(database_url), outside=database_url)
        try:
            job = stage.job()
            hold = stage.claim(job)
            with stage.connect(autocommit=False) as other:
                other.execute("SELECT FROM jobs FOR UPDATE")
                ending = aside(stage.perform, hold)
                stage.wait_for_waiters(1)
                proxy.cut()
                stage.wait_for_waiters(2)
                other.commit()
            ending.result(10)
            assert stage.ignored == {}  # a refused end would say that the run was lost
            assert row(stage, job) == ("completed", 1, None, 0)
            assert stage.broken_rules() == []
        finally:
            stage.close()


def test_p08_a_worker_that_beats_between_look_and_mark_is_alive(stage: Stage) -> None:
    job = stage.job()
    assert stage.claim(job) is not None
    connections = stage.runtime.connections
    stage.sql("UPDATE workers SET beat_at = now() - interval '1 hour'")

    (seen,) = workers.liveness(connections, schema="sidejob", silence_s=10)
    assert seen.silent
    assert workers.beat(connections, stage.worker_id, schema="sidejob")  # it wakes up
    assert not workers.suspect(connections, stage.worker_id, by="silence", seen=seen.beat_at)

    stage.sql("UPDATE workers SET beat_at = now() - interval '1 hour'")
    (seen,) = workers.liveness(connections, schema="sidejob", silence_s=10)
    assert workers.suspect(connections, stage.worker_id, by="silence", seen=seen.beat_at)
    assert workers.beat(connections, stage.worker_id, schema="sidejob")
    assert not workers.declare_dead(connections, stage.worker_id, lock_grace_s=0, silence_s=0)
    assert not recovery.rescue(stage.runtime, job.id, run_no=1, worker_id=stage.worker_id)
    assert row(stage, job) == ("running", 1, 0, 0)


def test_p08_death_is_declared_once_and_irrevocably(stage: Stage) -> None:
    connections = stage.runtime.connections
    stage.sql("UPDATE workers SET beat_at = now() - interval '1 hour'")
    (seen,) = workers.liveness(connections, schema="sidejob", silence_s=10)
    assert workers.suspect(connections, stage.worker_id, by="lock", seen=seen.beat_at)
    assert not workers.declare_dead(connections, stage.worker_id, lock_grace_s=60, silence_s=0)
    assert workers.declare_dead(connections, stage.worker_id, lock_grace_s=0, silence_s=60)
    assert not workers.beat(connections, stage.worker_id, schema="sidejob")
    job = stage.job()
    assert stage.claim(job) is None  # a dead identity claims nothing


def test_p09_a_childs_end_and_its_parents_wake_are_one_commit(stage: Stage) -> None:
    parent = stage.inside(lambda job: None)
    child = stage.idle.enqueue(parent=parent, child_name="kid")
    stage.run(child)

    written_by = {stage.sql("SELECT xmin::text FROM jobs WHERE id = %s", job.id)[0] for job in (parent, child)}
    assert len(written_by) == 1
    assert parent.refresh().status == "queued"


def test_p10_a_late_mark_does_not_mark_the_next_ask(stage: Stage) -> None:
    job = stage.job()
    stage.run(job)
    job.run()
    stage.runtime.connections.write_behind_now()
    stage.sql("UPDATE messages SET published_at = NULL")  # as if the second ask were not published yet

    def mark(for_run: int) -> bool:
        stage.runtime.connections.transact("mark", lambda executor: mark_published(executor, JOBS, [(job.id, for_run)]))
        return bool(stage.sql("SELECT published_at IS NOT NULL FROM messages")[0][0])

    assert mark(1) is False
    assert mark(2) is True


def test_p12_a_run_asked_for_during_a_failing_run_follows(stage: Stage) -> None:
    job = stage.job(lambda job: 1 / 0 if job.run_no == 1 else None)
    hold = stage.claim(job)
    assert hold is not None
    job.run()
    stage.perform(hold)

    assert (job.refresh().status, job.info["error"]["type"]) == ("queued", "ZeroDivisionError")
    assert stage.drain() == 1
    assert job.refresh().status == "completed"


@pytest.mark.few(1)
def test_p13_two_jobs_that_write_to_each_other_never_deadlock(stage: Stage, aside: Callable[..., Future[Any]]) -> None:
    before = deadlocks(stage)
    times = 500
    together = threading.Barrier(2)
    others: dict[int, Job] = {}

    def body(job: RunningJob) -> None:
        together.wait(30)
        for n in range(times):
            others[job.id].input("a").write(n)
            job.checkpoint()

    one, two = stage.job(body, inports=["a"]), stage.job(body, inports=["a"])
    others.update({one.id: two, two.id: one})
    holds = [stage.claim(one), stage.claim(two)]
    ends = [aside(stage.perform, hold) for hold in holds]
    for end in ends:
        end.result(100)
    assert stage.raised == {}

    assert [list(job.input("a")) for job in (one, two)] == [list(range(times))] * 2
    assert [job.refresh().status for job in (one, two)] == ["queued", "queued"]
    assert deadlocks(stage) == before


def deadlocks(stage: Stage) -> int:
    """How many deadlocks this database has seen; a backend tells so at its end at the latest."""
    stage.runtime.connections.close()
    others = [
        pid
        for (pid,) in stage.sql("""
        SELECT pid FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'""")
    ]
    stage.sql("SELECT pg_terminate_backend(pid) FROM unnest(%s::int[]) pid", others)  # a proxy keeps them
    wait_until(lambda: stage.sql("SELECT 1 FROM pg_stat_activity WHERE pid = ANY(%s::int[])", others) == [])
    return int(stage.sql("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")[0][0])


def test_p16_messages_the_broker_loses_are_no_losses_of_the_job(database_url: str, redis_url: str) -> None:
    stage = Stage(database_url, broker=redis_url, sidejob_max_losses=2)
    try:
        jobs = [stage.job() for _ in range(5)]
        with redis.Redis.from_url(redis_url) as client:
            for _ in range(4):
                assert client.llen("celery") >= 5
                stage.runtime.connections.write_behind_now()
                client.flushdb()
                assert stage.sidejob.poll().broker_emptied
        assert stage.sidejob.poll().published == 0
        assert stage.drain() == 5
        assert [row(stage, job) for job in jobs] == [("completed", 1, None, 0)] * 5
        assert len(stage.sidejob.dead) == 0
    finally:
        stage.close()


def test_p17_a_long_backlog_is_published_again_at_doubling_intervals(stage: Stage) -> None:
    stage.job()
    stage.runtime.connections.write_behind_now()
    waits = []
    for _ in range(12):
        stage.sql("UPDATE messages SET next_check_at = now()")
        assert stage.sidejob.poll().missing == 1
        waits.append(int(stage.sql("SELECT extract(epoch FROM next_check_at - published_at) FROM messages")[0][0]))
    assert waits == [min(30 * 2**n, 6 * 3600) for n in range(1, 13)]


def test_p18_the_sweeper_locks_nothing_while_it_publishes(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    job = stage.job()
    stage.runtime.connections.write_behind_now()
    stage.sql("UPDATE messages SET next_check_at = now(), published_at = NULL")
    seen: list[Any] = []

    def publish(waiting: Any, **_: Any) -> Any:
        seen.append(stage.sql("SELECT 1 FROM jobs, messages FOR UPDATE NOWAIT"))
        seen.append(stage.claim(job))  # in the middle of a slow broker's answer
        return waiting

    monkeypatch.setattr(stage.runtime.publisher, "publish", publish)
    assert stage.sidejob.poll().published == 1
    assert seen[0] == [(1,)]
    stage.perform(seen[1])
    assert row(stage, job) == ("completed", 1, None, 0)


def test_p19_a_borrowed_transaction_locks_no_job(stage: Stage) -> None:
    job, target = stage.job(), stage.job(inports=["a"])
    with stage.connect(autocommit=False) as borrowed:
        for ask in (target.run, target.terminate):
            ask(transaction=borrowed)
        target.input("a").write(1, transaction=borrowed)
        stage.sql("SELECT 1 FROM jobs ORDER BY id FOR NO KEY UPDATE NOWAIT")
        assert stage.run(job) == "completed"
        borrowed.rollback()
    stage.sidejob.poll()
    assert (target.refresh().status, len(target.input("a"))) == ("queued", 0)


def test_p20_what_a_failed_run_asked_is_not_asked(stage: Stage) -> None:
    other = stage.inside(lambda job: None)

    def body(job: RunningJob) -> None:
        job.run()
        job.run(countdown=3600)
        other.run()
        other.terminate()
        raise RuntimeError

    job = stage.job(body)
    assert stage.drain() == 1
    assert (job.refresh().status, other.refresh().status) == ("failed", "completed")
    assert stage.row_counts()["timers"] == 0


def test_p22_no_child_survives_below_a_recursive_terminate(stage: Stage) -> None:
    parent = stage.job(lambda job: job.enqueue(stage.idle, child_name="late") and None)
    hold = stage.claim(parent)
    assert hold is not None
    parent.terminate(recursive=True)
    with pytest.raises(IllegalMoveError):
        parent.enqueue(stage.idle, child_name="from outside")
    stage.perform(hold)
    child = parent.child("late")
    assert child is not None
    assert child.status == "queued"
    stage.drain()
    assert (parent.refresh().status, child.refresh().status) == ("terminated", "terminated")


def test_p23_an_end_that_waited_for_a_timer_sees_it(stage: Stage, aside: Callable[..., Future[Any]]) -> None:
    job = stage.job()
    hold = stage.claim(job)
    with held_open(stage, applying(stage, Ask(job.id, wait_s=3600.0))) as finish:
        ending = aside(stage.perform, hold)
        stage.wait_for_waiters()
        finish()
    ending.result(10)
    assert (job.refresh().status, stage.row_counts()["timers"]) == ("queued", 1)


def test_p24_packets_of_a_port_are_in_the_order_of_their_commits(
    stage: Stage, aside: Callable[..., Future[Any]]
) -> None:
    job = stage.job(inports=["a"])
    with held_open(stage, applying(stage, Write(job.id, "in", "a", (('"first"', None, None),)))) as finish:
        second = aside(job.input("a").write, "second")
        stage.wait_for_waiters()
        assert job.input("a").read() is NO_DATA
        finish()
    second.result(10)
    assert list(job.input("a")) == ["first", "second"]


def test_an_early_duplicate_during_a_backoff_is_stale(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        if job.run_no == 1:
            raise job.retry(countdown=3600)

    job = stage.inside(body)
    assert stage.claim(job, for_run=2) is None
    assert stage.claim(job, for_run=1) is None
    stage.sql("UPDATE messages SET due_at = now(), next_check_at = now()")
    assert stage.run(job) == "completed"
    assert stage.claim(job, for_run=2) is None


def test_a_claim_that_cannot_have_its_lock_is_left_to_the_sweeper(stage: Stage) -> None:
    """Whoever holds the row for long is an operator with a shell; a rescue passes it over."""
    job = stage.job()
    hold = stage.claim(job, worker_id=stage.new_worker())
    assert hold is not None
    stage.declare_dead(hold.worker_id)
    with stage.connect(autocommit=False) as shell:
        shell.execute("SELECT 1 FROM jobs FOR UPDATE")
        assert stage.sidejob.poll().rescued == 0
        shell.rollback()
    assert stage.sidejob.poll().rescued == 1
    with pytest.raises(psycopg.errors.CheckViolation):
        stage.sql("UPDATE jobs SET status = 'running'")  # and illegal rows are impossible
