"""What a second attempt to break the promises found, each as it was broken."""

from __future__ import annotations

import contextvars
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from celery_sidejob import RunningJob, Status
from celery_sidejob.model.errors import IllegalMoveError, StoreUnavailableError
from celery_sidejob.operations.runs import runs
from celery_sidejob.services.sweep import results as sweep_results
from celery_sidejob.services.sweep.prune import Prune
from celery_sidejob.services.sweep.results import UnsentResults
from celery_sidejob.services.sweep.sweep import Sweep
from celery_sidejob.services.sweep.sweeper import Sweeper
from celery_sidejob.store.connection import own_executor
from tests.tools.crash_points import Arm
from tests.tools.databases import only_reading
from tests.tools.in_process import Stage
from tests.tools.threads import in_thread
from tests.tools.waiting import wait_until

pytestmark = pytest.mark.pooled_too


def raised_in_thread(context: contextvars.Context, call: Callable[[], Any]) -> BaseException | None:
    """What `call` raises in a thread of its own that has been given `context`."""
    try:
        with in_thread(lambda: context.run(call)):
            pass
    except BaseException as error:
        return error
    return None


# -- what outlives a run -----------------------------------------------------------------------------------------------


def test_a_thread_with_the_context_of_a_run_that_is_over_is_told_so(stage: Stage) -> None:
    kept: list[contextvars.Context] = []
    job = stage.job(lambda job: kept.append(contextvars.copy_context()))
    stage.run(job)
    error = raised_in_thread(kept[0], lambda: stage.sidejob.enqueue(stage.idle))
    assert isinstance(error, IllegalMoveError)
    assert stage.sidejob.count_jobs() == {"completed": 1}


def test_what_a_thread_asks_while_its_run_commits_is_in_one_unit_or_the_other(stage: Stage, at: Arm) -> None:
    def body(job: RunningJob) -> None:
        context = contextvars.copy_context()

        def strike() -> None:
            threads.append(threading.Thread(target=context.run, args=(write,)))
            threads[0].start()
            threads[0].join(0.5)  # it may wait for the commit

        def write() -> None:
            stage.sidejob.get(job.id).output("o").write("late")

        job.output("o").write("early")
        at("checkpoint:after-commit", strike)
        job.checkpoint()
        threads[0].join()

    threads: list[threading.Thread] = []
    job = stage.job(body)
    stage.run(job)
    assert list(job.output("o")) == ["early", "late"]


def test_what_a_forked_child_of_a_body_asks_happens(stage: Stage) -> None:
    """It can add nothing to the unit, of which it has a copy."""

    def body(job: RunningJob) -> None:
        job.set(x=1)
        pid = os.fork()
        if pid == 0:
            try:
                stage.sidejob.enqueue(stage.idle)
                with pytest.raises(IllegalMoveError, match="goes on in another process"):
                    job.checkpoint()
                os._exit(0)
            except BaseException:
                os._exit(1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    codes: list[int] = []
    stage.run(stage.job(body))
    assert (codes, stage.sidejob.count_jobs()) == ([0], {"completed": 1, "queued": 1})


# -- a store that stops in the middle ----------------------------------------------------------------------------------


@contextmanager
def slow_commits(stage: Stage, table: str) -> Iterator[None]:
    """Have commits that wrote to a table wait for an advisory lock, which is held within the block."""
    stage.sql(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN NULL; END $$"
    )
    stage.sql(
        f"CREATE CONSTRAINT TRIGGER slow AFTER INSERT OR UPDATE ON {table} DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION slow()"
    )
    try:
        with stage.connect() as holding:
            holding.execute("SELECT pg_advisory_lock(4711)")
            yield
    finally:
        stage.sql("DROP FUNCTION slow CASCADE")


def waits_in_commit(stage: Stage) -> bool:
    return bool(stage.sql("SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = 4711"))


def cut(executor: Any) -> None:
    """Break a connection as a network does: the server may go on with what it was asked."""
    with socket.socket(fileno=os.dup(executor.connection.fileno())) as wire:
        wire.shutdown(socket.SHUT_RDWR)


def test_a_commit_that_goes_on_behind_a_broken_connection_is_waited_for(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Any] = []
    real = own_executor.OwnExecutor.in_transaction

    def in_transaction(self: Any, name: str, *args: Any, **options: Any) -> Any:
        if name == "checkpoint":
            used.append(self)
        return real(self, name, *args, **options)

    monkeypatch.setattr(own_executor.OwnExecutor, "in_transaction", in_transaction)

    def body(job: RunningJob) -> None:
        job.set(x=1)
        job.checkpoint()

    job = stage.job(body)
    hold = stage.claim(job)
    assert hold is not None
    with slow_commits(stage, "state"):
        thread = threading.Thread(target=stage.perform, args=(hold,))
        thread.start()
        wait_until(lambda: waits_in_commit(stage))
        cut(used[0])
        wait_until(lambda: len(used) > 1)
    thread.join()
    assert (job.refresh().status, stage.ignored) == (Status.COMPLETED, {})


def test_a_store_that_only_reads_is_a_store_that_is_away(stage: Stage) -> None:
    stage.sidejob.close()
    with only_reading(stage.database_url), pytest.raises(StoreUnavailableError):
        stage.sidejob.enqueue(stage.idle)
    assert stage.sidejob.enqueue(stage.idle).exists


def test_a_run_whose_store_only_reads_for_a_while_is_not_failed(stage: Stage) -> None:
    reading = ExitStack()
    timer = threading.Timer(1.0, reading.close)

    def body(job: RunningJob) -> None:
        stage.sidejob.close()
        reading.enter_context(only_reading(stage.database_url))
        timer.start()
        job.set(x=1)

    job = stage.job(body)
    with reading:
        stage.run(job)
        timer.join()
    assert (job.refresh().status, job.get("x")) == (Status.COMPLETED, 1)


# -- results -----------------------------------------------------------------------------------------------------------


def test_a_finished_job_is_not_pruned_before_its_result_is_where_it_is_waited_for(stage: Stage) -> None:
    job = stage.sidejob.enqueue(stage.idle, link_error=stage.app.signature("unheard.of"))
    stage.drain()
    stage.sql("UPDATE askings SET stored_at = NULL")
    stage.sql("UPDATE jobs SET retention_s = 0, ended_at = now() - interval '1 hour'")
    Prune(Sweep(stage.runtime)).run_once()
    assert job.exists
    stage.sql("UPDATE askings SET stored_at = now()")
    Prune(Sweep(stage.runtime)).run_once()
    assert not job.exists


def test_results_that_the_backend_never_takes_keep_no_others_back(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_results, "PAGE", 2)
    monkeypatch.setattr(sweep_results, "RESULT_GRACE_S", 0.0)
    monkeypatch.setattr(UnsentResults, "interval_s", 0.0)
    refused = [stage.job(), stage.job()]
    other = stage.job()
    stage.drain()
    stage.sql("UPDATE askings SET stored_at = NULL")
    results = stage.runtime.results
    refused_ids = {job.task_id for job in refused}
    monkeypatch.setattr(type(results), "deliver", lambda self, outcome: outcome.task_id not in refused_ids)
    service = Sweeper(stage.runtime)
    service.run_once()
    service.run_once()
    assert stage.sql("SELECT job_id FROM askings WHERE stored_at IS NOT NULL") == [(other.id,)]


# -- a time limit that strikes in a commit -----------------------------------------------------------------------------


@pytest.mark.parametrize("caught", [True, False])
def test_a_soft_time_limit_in_the_middle_of_a_checkpoint_is_the_bodys_to_handle(
    stage: Stage, at: Arm, caught: bool
) -> None:
    def strike() -> None:
        raise SoftTimeLimitExceeded

    at("checkpoint:after-commit", strike)

    def body(job: RunningJob) -> None:
        job.output("o").write("once")
        try:
            job.checkpoint()
        except SoftTimeLimitExceeded:
            if not caught:
                raise
            job.output("o").write("then")

    job = stage.job(body)
    hold = stage.claim(job)
    assert hold is not None
    stage.perform(hold)
    assert job.refresh().status == (Status.COMPLETED if caught else Status.FAILED)
    assert list(job.output("o")) == (["once", "then"] if caught else ["once"])


def test_a_soft_time_limit_right_after_the_commit_of_a_unit(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    follow_up, struck = runs.follow_up, []

    def strike(*given: Any, **options: Any) -> None:
        if not struck:
            struck.append(True)
            raise SoftTimeLimitExceeded
        follow_up(*given, **options)

    monkeypatch.setattr(runs, "follow_up", strike)

    def body(job: RunningJob) -> None:
        job.output("o").write("once")
        with pytest.raises(SoftTimeLimitExceeded):
            job.checkpoint()
        job.output("o").write("then")
        job.checkpoint()
        job.output("o").write("last")

    job = stage.job(body)
    assert stage.run(job) == Status.COMPLETED
    assert list(job.output("o")) == ["once", "then", "last"]
