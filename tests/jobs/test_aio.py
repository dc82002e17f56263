"""The verbs of handles as coroutines: they do what the verbs do, and an event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from celery_sidejob import (
    NO_DATA,
    CapacityPool,
    ChildFailedError,
    IllegalMoveError,
    InvalidValueError,
    Job,
    Port,
    PortFullError,
    Queue,
    RunningJob,
    SideJob,
    UnitNotCommittedError,
    current_job,
)
from celery_sidejob import aio as aio_of
from celery_sidejob.awaiting import THREADS, Own, in_thread
from celery_sidejob.deadset import DeadSet
from celery_sidejob.jobs.batch import Batch, settle_all
from celery_sidejob.jobs.schedule import Schedule
from celery_sidejob.model.crash_points import Died, acting
from celery_sidejob.operations.runs import recovery
from celery_sidejob.pools import coroutines
from celery_sidejob.store.connection import turns
from celery_sidejob.unit.open_unit import OpenUnit
from tests.tools.in_process import Stage
from tests.tools.waiting import patient, wait_until

WITHOUT_THE_STORE = {
    Job: {"aio", "id", "input", "output", "result", "args", "kwargs", "task", "queue", "created_at", "created_by",
          "schedule", "schedule_number", "nominal_time", "ran_at", "task_id"},
    RunningJob: {"aio", "request", "run_no", "stopping", "suspend", "retry", "progress", "then"},
    Port: {"aio", "direction", "job", "name"},
    Queue: {"aio", "name"},
    CapacityPool: {"aio", "name", "spec", "for_key", "call"},
    Batch: {"aio", "name"},
    Schedule: {"aio", "name"},
    DeadSet: {"aio"},
    SideJob: {"aio", "app", "heartbeat", "heartbeats", "settings", "durable_globs", "runtime", "init_app",
              "task", "step", "queue", "dead", "owner", "port_options", "context", "check_schema", "check_store",
              "upgrade_schema", "close", "reread_settings", "register_tasks"},
}  # fmt: skip
"""What each handle has that asks no store, or that no coroutine is for: attributes of its row are read by `refresh`."""
OF_THE_ROW = {
    Queue: {"paused_at", "pause_reason", "managed", "ordered", "limit", "limit_per_key", "rate"},
    Batch: {"closed", "ended_at", "jobs"},
    Schedule: {"task", "args", "kwargs", "options", "every", "cron", "timezone", "start", "end", "catch_up", "overlap",
               "jitter", "last", "last_time", "count", "paused", "paused_at", "pause_reason", "declared", "trouble",
               "exists"},
}  # fmt: skip
"""Attributes that ask the store, each of which `info`, `counts` or `paused` has too."""


@pytest.mark.parametrize("handle", WITHOUT_THE_STORE, ids=lambda handle: handle.__name__)
def test_each_verb_has_its_coroutine(handle: Any) -> None:
    cls = getattr(aio_of, "Aio" + {"CapacityPool": "Pool"}.get(handle.__name__, handle.__name__))
    has = {name for name in dir(handle) if not name.startswith("_")}
    has -= WITHOUT_THE_STORE[handle] | OF_THE_ROW.get(handle, set())
    if handle is RunningJob:
        has -= WITHOUT_THE_STORE[Job]
    awaited = {name for name in dir(cls) if not name.startswith("_")} - {"count"}
    assert has - {"count"} <= awaited
    assert awaited <= has, "and nothing else"


def awaited(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(work())


def dies_at(point: str) -> Callable[[str], None]:
    def act(name: str) -> None:
        if name == point:
            raise Died(point)

    return act


def killed_at(stage: Stage, job: Job, point: str) -> None:
    """Do a run that dies at this point, and have it rescued."""
    hold = stage.claim(job, worker_id=stage.new_worker())
    assert hold is not None
    with pytest.raises(Died), acting(dies_at(point)):
        stage.perform(hold)
    assert recovery.rescue(
        stage.runtime, job.id, run_no=hold.run_no, worker_id=hold.worker_id, own=True, has_begun=True
    )


async def ticks_while(work: Awaitable[Any]) -> int:
    """Count how often another task of the loop goes on until the work is done."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.001)

    ticking = asyncio.create_task(tick())
    try:
        await work
    finally:
        ticking.cancel()
    return ticks


# -- handles ----------------------------------------------------------------------------------------------------------


def test_clients_make_find_follow_and_end_jobs(stage: Stage) -> None:
    async def client() -> None:
        sidejob = stage.sidejob.aio
        job = await sidejob.enqueue(stage.idle, aliases=["mine"], inports=["a"], tags=["new"])
        assert await sidejob.find("mine") == job
        assert await job.aio.tags == ["new"]
        await job.input("a").aio.write_many([1, 2])
        await job.input("a").aio.write(3)
        assert await job.input("a").aio.count() == 3
        assert [value async for value in job.input("a").aio] == [1, 2, 3]
        assert await job.input("a").aio.read() is NO_DATA
        child = await job.aio.enqueue(stage.idle, child_name="first")
        assert await job.aio.children == {"first": child}
        assert [each async for each in sidejob.iter_jobs(page=1)] == [job, child]
        await job.aio.set(page=7)
        assert await job.aio.get("page") == 7
        await asyncio.to_thread(stage.drain)
        assert (await job.aio.wait()).status == "completed"
        await job.aio.terminate(recursive=True)
        await asyncio.to_thread(stage.drain)
        assert await job.aio.terminated
        assert await job.aio.delete()

    awaited(client)
    assert stage.sidejob.count_jobs() == {}


def test_queues_batches_schedules_pools_and_the_dead_set(stage: Stage) -> None:
    async def client() -> None:
        await stage.sidejob.queue("mail").aio.pause("rest")
        assert await stage.sidejob.queue("mail").aio.paused
        batch = await stage.sidejob.aio.batch("letters")
        await batch.aio.add(await stage.sidejob.aio.enqueue(stage.idle))
        await batch.aio.close()
        assert (await batch.aio.counts).open == 1
        await asyncio.to_thread(stage.drain)
        waiting = asyncio.create_task(batch.aio.wait(timeout=60))
        await asyncio.to_thread(settle_all, stage.runtime)
        await waiting
        schedule = await stage.sidejob.aio.schedule("nightly", stage.idle, every=3600)
        assert len(await schedule.aio.next_times(3)) == 3
        pool = CapacityPool("printers", 1)
        await pool.aio.apply_async(stage.idle)
        assert await pool.aio.used == 1
        assert await stage.sidejob.dead.aio.list() == []
        assert [entry async for entry in stage.sidejob.dead.aio] == []

    awaited(client)


@contextmanager
def locked(stage: Stage, job: Job) -> Iterator[psycopg.Connection[Any]]:
    """Another transaction that has the row of a job locked, until it is rolled back."""
    with stage.connect(autocommit=False) as held:
        held.execute("SELECT 1 FROM jobs WHERE id = %s FOR UPDATE", [job.id])
        yield held


def test_the_loop_goes_on_while_a_verb_waits(stage: Stage) -> None:
    job = stage.job()
    with locked(stage, job) as held:

        async def client() -> int:
            asking = asyncio.create_task(job.aio.set(page=7))
            await asyncio.to_thread(stage.wait_for_waiters)
            ticks = await ticks_while(asyncio.sleep(0.05))
            held.rollback()
            await asking
            return ticks

        assert awaited(client) > 1
    assert job.get("page") == 7


def test_more_coroutines_wait_than_there_are_threads(stage: Stage) -> None:
    jobs = [stage.job() for _ in range(3 * THREADS)]

    async def client() -> None:
        waiting = [asyncio.create_task(job.aio.wait()) for job in jobs]
        await asyncio.to_thread(stage.drain)
        await asyncio.gather(*waiting)

    awaited(client)


def test_a_wait_says_for_what_it_has_waited(stage: Stage) -> None:
    stage.sidejob.queue("mail").pause()
    job = stage.job(queue="mail")
    with pytest.raises(TimeoutError, match=r"is still queued after 0.01 s; .* It waits for: pause"):
        awaited(lambda: job.aio.wait(timeout=0.01))


def test_a_full_port_is_waited_for_without_a_thread(stage: Stage) -> None:
    job = stage.job(inports={"a": {"limit": 1}})

    async def client() -> None:
        await job.input("a").aio.write(0)
        with pytest.raises(PortFullError):
            await job.input("a").aio.write(1)
        writing = [asyncio.create_task(job.input("a").aio.write(n, wait=30)) for n in range(2 * THREADS)]
        for _ in range(2 * THREADS + 1):
            while await job.input("a").aio.read() is NO_DATA:
                await asyncio.sleep(0.001)
        await asyncio.gather(*writing)

    awaited(client)


def test_the_user_s_functions_keep_no_thread_of_the_verbs() -> None:
    go = threading.Event()

    async def client() -> list[bool]:
        blocking = [asyncio.create_task(Own(partial(go.wait, patient(10))).awaited()) for _ in range(THREADS)]
        await asyncio.sleep(0)
        await in_thread(go.set)
        return await asyncio.gather(*blocking)

    assert awaited(client) == [True] * THREADS


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_threads_and_an_event_loop_of_its_own() -> None:
    async def loop() -> Any:
        return await in_thread(lambda: 7), asyncio.get_running_loop()

    parent = coroutines.run(loop())
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(20)
            number, own = coroutines.run(loop())
            code = 0 if number == 7 and own is not parent[1] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_announcements(stage: Stage) -> None:
    async def client() -> list[Any]:
        heard = []
        async with stage.sidejob.aio.subscribe("/news", timeout=30) as news:
            await stage.sidejob.aio.publish("/news", 7)
            async for channel, message in news:
                heard.append((channel, message))
                break
        return heard

    assert awaited(client) == [("/news", 7)]


def test_a_cancelled_verb_is_over_before_its_caller_goes_on(stage: Stage) -> None:
    """Otherwise the next verb of a body would meet it in the unit."""
    job = stage.job()
    with locked(stage, job) as held:

        async def client() -> None:
            asking = asyncio.create_task(job.aio.set(page=7))
            await asyncio.to_thread(stage.wait_for_waiters)
            asking.cancel()
            await asyncio.sleep(0.05)
            assert not asking.done()
            held.rollback()
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert job.get("page") == 7

        awaited(client)


# -- in a run ---------------------------------------------------------------------------------------------------------


def test_steps_await_their_functions_once(stage: Stage) -> None:
    called = []

    async def charge(amount: int) -> int:
        called.append(("charge", amount))
        await asyncio.sleep(0)
        return amount + 1

    def pack() -> str:
        called.append(("pack", threading.current_thread() is threading.main_thread()))
        return "parcel"

    async def body(job: RunningJob) -> Any:
        first = await job.aio.step("charge", charge, 6)
        second = await job.aio.step("pack", pack)
        third = await job.aio.step("late", lambda: charge(8))
        return [first, second, third]

    job = stage.job(body)
    killed_at(stage, job, "step[pack]:after-commit")
    assert called == [("charge", 6), ("pack", False)], "an ordinary function is called in a thread"
    assert stage.run(job) == "completed"
    assert called == [("charge", 6), ("pack", False), ("charge", 8)]


def test_steps_that_are_gathered_are_refused_and_nothing_of_the_body_is_lost(stage: Stage) -> None:
    refused: list[str] = []

    async def double(number: int) -> int:
        await asyncio.sleep(0)
        return 2 * number

    async def body(job: RunningJob) -> None:
        await job.aio.set(before=1)
        steps = (job.aio.step(f"step {number}", double, number) for number in range(4))
        found = await asyncio.gather(*steps, return_exceptions=True)
        refused.extend(str(error) for error in found if isinstance(error, IllegalMoveError))
        assert [value for value in found if not isinstance(value, BaseException)]

    job = stage.job(body)
    assert stage.run(job) == "completed"
    assert all("in two threads or tasks at a time" in error for error in refused)
    assert job.get("before") == 1


def test_a_step_that_fails_is_tried_again_and_then_raises(stage: Stage) -> None:
    tries = []

    async def fails() -> None:
        tries.append(1)
        raise ValueError(f"try {len(tries)}")

    async def body(job: RunningJob) -> str:
        try:
            await job.aio.step("fails", fails, retries=1, backoff=0)
        except ValueError as error:
            return str(error)
        raise AssertionError

    job = stage.job(body)
    stage.drain()
    assert (job.refresh().status, len(tries)) == ("completed", 2)
    assert [step.error for step in job.steps] == []


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_synchronous_step_runs_an_async_def_too(stage: Stage, asynchronous: bool) -> None:
    async def charge() -> int:
        await asyncio.sleep(0)
        await current_job.aio.set(charged=True)
        return 7

    async def awaiting(job: RunningJob) -> int:
        return job.step("charge", charge)  # type: ignore[no-any-return]

    seen: list[int] = []

    def calling(job: RunningJob) -> None:
        seen.append(job.step("charge", charge))  # type: ignore[arg-type]

    job = stage.job(awaiting if asynchronous else calling)
    assert stage.run(job) == "completed"
    assert asynchronous or seen == [7]
    assert job.get("charged"), "the function is part of the run"


def test_a_decorated_async_def_is_a_step_in_a_body_and_a_coroutine_elsewhere(stage: Stage) -> None:
    called = []

    @stage.sidejob.step(name="parcel")
    async def pack(what: str) -> str:
        called.append(what)
        return what.upper()

    async def body(job: RunningJob) -> None:
        assert await pack("toys") == "TOYS"

    job = stage.job(body)
    killed_at(stage, job, "step[parcel]:after-commit")
    assert stage.run(job) == "completed"
    assert awaited(lambda: pack("books")) == "BOOKS"
    assert called == ["toys", "books"]


def test_turns_are_committed_as_the_next_begins(stage: Stage) -> None:
    seen = []

    async def body(job: RunningJob) -> None:
        async for number, name in job.aio.for_inputs("numbers", "names"):
            seen.append((number, name))
            await job.output("both").aio.write(f"{number} {name}")
            if len(seen) == 2:
                raise Died("in the second turn")

    job = stage.job(body)
    job.input("numbers").write_many([1, 2])
    job.input("names").write_many(["a", "b"])
    hold = stage.claim(job, worker_id=stage.new_worker())
    assert hold is not None
    with pytest.raises(Died):
        stage.perform(hold)
    recovery.rescue(stage.runtime, job.id, run_no=hold.run_no, worker_id=hold.worker_id, own=True, has_begun=True)
    stage.run(job)
    assert seen == [(1, "a"), (2, "b"), (2, "b")]
    assert list(job.output("both")) == ["1 a", "2 b"]


def test_a_turn_of_defaults_only_sets_defaults(stage: Stage) -> None:
    async def body(job: RunningJob) -> None:
        async for number in job.aio.for_inputs("number"):
            await job.output("double").aio.write(2 * number)

    job = stage.job(body, inports={"number": {"default": 3}}, outports=["double"])
    stage.run(job)
    assert job.output("double").default == 6


@pytest.mark.parametrize("of_body", [True, False], ids=["in the body", "in a task for each"])
def test_turns_may_be_fetched_by_tasks_of_their_own(stage: Stage, *, of_body: bool) -> None:
    async def body(job: RunningJob) -> None:
        turns = job.aio.for_inputs("number", "factor")
        while (values := await asyncio.create_task(_next_or_none(turns))) is not None:
            written = job.output("product").aio.write(math.prod(values))
            await (written if of_body else asyncio.create_task(written))

    factor = {"factor": {"default": 10}, "number": {"default": 3}}
    job = stage.job(body, inports=factor, outports=["product"])
    job.input("number").write(4)
    stage.run(job)
    assert list(job.output("product")) == [40], "a turn that has a packet writes packets"
    assert job.output("product").default == 30, "one that has none writes defaults"


async def _next_or_none(turns: Any) -> Any:
    return await anext(turns, None)


def test_an_iteration_that_is_left_leaves_nothing_behind(stage: Stage) -> None:
    async def body(job: RunningJob) -> None:
        async for number in job.aio.for_inputs("numbers"):
            if number == 1:
                break
        assert await job.input("numbers").aio.read() == 2

    job = stage.job(body)
    job.input("numbers").write_many([1, 2, 3])
    stage.run(job)
    assert list(job.input("numbers")) == [3]


def test_a_body_calls_children_sleeps_and_receives(stage: Stage) -> None:
    async def child(job: RunningJob) -> int:
        return 6

    async def body(job: RunningJob) -> list[Any]:
        one = await job.aio.call("one", stage.call, (number,))
        await job.aio.sleep("a moment", seconds=0)
        got = await job.aio.receive("orders")
        return [one, got, await job.aio.since("now")]

    stage.job(child).delete()
    number = max(stage._bodies)
    job = stage.job(body)
    stage.drain()
    assert job.refresh().status == "suspended"
    job.input("orders").write("book")
    stage.drain()
    assert job.refresh().status == "completed"


def test_a_body_hears_of_a_child_that_has_failed(stage: Stage) -> None:
    def child(job: RunningJob) -> None:
        raise ValueError

    seen = []

    async def body(job: RunningJob) -> None:
        try:
            await job.aio.call_all("all", [stage.call.s(number)])
        except ChildFailedError as error:
            seen.append(error)

    stage.job(child)
    number = max(stage._bodies)
    job = stage.job(body)
    stage.drain()
    assert job.refresh().status == "completed"
    assert len(seen) == 1


def test_a_unit_reads_its_own_writes_and_is_given_up_by_an_error(stage: Stage) -> None:
    async def body(job: RunningJob) -> None:
        await job.aio.set(page=1)
        assert await job.aio.get("page") == 1
        await job.aio.checkpoint()
        await job.aio.set(page=2)
        made = await job.aio.enqueue(stage.idle, child_name="a")
        assert await job.aio.children == {"a": made}
        raise ValueError

    job = stage.job(body)
    with pytest.raises(ValueError, match=r"^$"):
        stage.run(job)
    assert (job.get("page"), job.children) == (1, {})


# -- with the caller's transaction ------------------------------------------------------------------------------------


@asynccontextmanager
async def session_of(stage: Stage) -> AsyncIterator[AsyncSession]:
    engine = create_async_engine(stage.database_url.replace("postgresql://", "postgresql+psycopg://", 1))
    try:
        async with AsyncSession(engine) as session:
            yield session
    finally:
        await engine.dispose()


@pytest.fixture
def mine(stage: Stage) -> Callable[[], list[Any]]:
    """A table of the user's, and what is in it."""
    stage.sql("CREATE TABLE IF NOT EXISTS public.rows_of_mine (what text)")
    stage.sql("TRUNCATE public.rows_of_mine")
    return lambda: [what for (what,) in stage.sql("SELECT what FROM public.rows_of_mine ORDER BY 1")]


INSERT = "INSERT INTO public.rows_of_mine VALUES ('a row')"


def test_a_client_s_rows_and_jobs_are_committed_together_or_not_at_all(
    stage: Stage, mine: Callable[[], list[Any]]
) -> None:
    async def client() -> None:
        async with session_of(stage) as session:
            await stage.idle.aenqueue(transaction=session)
            await session.rollback()
            await session.execute(text(INSERT))
            await stage.sidejob.aio.enqueue(stage.idle, aliases=["kept"], transaction=session)
            await session.commit()
            job = await stage.sidejob.aio.get("kept")
            await job.input("a").aio.write(7, transaction=session)
            assert await job.input("a").aio.count() == 0
            await session.commit()
            assert await job.input("a").aio.count() == 1

    awaited(client)
    assert mine() == ["a row"]
    assert stage.sidejob.count_jobs() == {"queued": 1}
    wait_until(lambda: stage.sql("SELECT count(*) FROM messages WHERE published_at IS NULL") == [(0,)])


def test_psycopg_s_asynchronous_connection(stage: Stage, mine: Callable[[], list[Any]]) -> None:
    async def client() -> None:
        async with await psycopg.AsyncConnection.connect(stage.database_url) as connection:
            await stage.idle.aenqueue(transaction=connection)
            await connection.rollback()
            await connection.execute(INSERT)
            job = await stage.idle.aenqueue(transaction=connection)
            await job.aio.set(page=7, transaction=connection)
            await connection.commit()
            assert await job.aio.get("page") == 7

    awaited(client)
    assert mine() == ["a row"]
    assert stage.sidejob.count_jobs() == {"queued": 1}


@pytest.mark.parametrize("kind", ["connection", "scoped session"])
def test_other_asynchronous_transactions_of_sqlalchemy(stage: Stage, kind: str) -> None:
    async def client() -> None:
        async with session_of(stage) as session:
            scoped = async_scoped_session(lambda: session, scopefunc=asyncio.current_task)  # type: ignore[arg-type]
            lent = scoped if kind == "scoped session" else await session.connection()
            await stage.idle.aenqueue(transaction=lent)
            assert await stage.sidejob.aio.count_jobs() == {}
            await session.commit()

    awaited(client)
    assert stage.sidejob.count_jobs() == {"queued": 1}


def test_a_connection_in_autocommit_commits_each_call(stage: Stage) -> None:
    async def client() -> None:
        async with await psycopg.AsyncConnection.connect(stage.database_url, autocommit=True) as connection:
            await stage.idle.aenqueue(transaction=connection)
            async with connection.transaction():
                await stage.idle.aenqueue(transaction=connection)
                assert await stage.sidejob.aio.count_jobs() == {"queued": 1}

    awaited(client)
    assert stage.sidejob.count_jobs() == {"queued": 2}


def test_a_synchronous_session_of_a_body_has_its_step_and_its_unit(stage: Stage, mine: Callable[[], list[Any]]) -> None:
    engine = create_engine(stage.database_url.replace("postgresql://", "postgresql+psycopg://", 1))

    async def body(job: RunningJob) -> None:
        with Session(engine) as session:
            async with job.aio.step("import", transaction=session) as step:
                session.execute(text(INSERT))
                await step.keep(7)
            session.commit()
            async with job.aio.unit(transaction=session):
                await job.aio.set(page=step.value)
                session.execute(text(INSERT))
            session.commit()

    job = stage.job(body)
    assert stage.run(job) == "completed"
    engine.dispose()
    assert (mine(), job.get("page")) == (["a row"] * 2, 7)


@pytest.mark.parametrize("kind", ["session", "psycopg"])
def test_a_step_and_the_body_s_rows(stage: Stage, mine: Callable[[], list[Any]], kind: str) -> None:
    async def body(job: RunningJob) -> None:
        async with session_of(stage) as session, await psycopg.AsyncConnection.connect(stage.database_url) as plain:
            lent = session if kind == "session" else plain
            async with job.aio.step("import", transaction=lent) as step:
                if step.is_new:
                    await lent.execute(text(INSERT) if kind == "session" else INSERT)  # type: ignore[arg-type]
                    await step.keep(7)
                assert step.value == 7
            await lent.commit()
            await job.aio.step("after", asyncio.sleep, 0)

    job = stage.job(body)
    killed_at(stage, job, "step[after]:before-commit")
    assert stage.run(job) == "completed"
    assert mine() == ["a row"]


def test_a_step_whose_transaction_is_rolled_back_must_be_repeated(stage: Stage, mine: Callable[[], list[Any]]) -> None:
    async def body(job: RunningJob) -> None:
        async with session_of(stage) as session:
            async with job.aio.step("import", transaction=session) as step:
                await session.execute(text(INSERT))
                await step.keep(7)
            await session.rollback()
        await job.aio.checkpoint()

    with pytest.raises(UnitNotCommittedError, match="repeat the step before the run goes on"):
        stage.run(stage.job(body))
    assert mine() == []


def test_a_unit_and_the_body_s_rows(stage: Stage, mine: Callable[[], list[Any]]) -> None:
    runs = []

    async def body(job: RunningJob) -> None:
        runs.append(job.run_no)
        async with session_of(stage) as session:
            async for number in job.aio.for_inputs("numbers"):
                async with job.aio.unit(transaction=session):
                    await session.execute(text("INSERT INTO public.rows_of_mine VALUES (:n)"), {"n": str(number)})
                    await job.output("done").aio.write(number)
                if len(runs) == 1 and number == 2:
                    await session.rollback()
                    raise Died("with the block undone")
                await session.commit()

    job = stage.job(body)
    job.input("numbers").write_many([1, 2, 3])
    hold = stage.claim(job, worker_id=stage.new_worker())
    assert hold is not None
    with pytest.raises(Died):
        stage.perform(hold)
    recovery.rescue(stage.runtime, job.id, run_no=hold.run_no, worker_id=hold.worker_id, own=True, has_begun=True)
    stage.run(job)
    assert mine() == ["1", "2", "3"]
    assert list(job.output("done")) == [1, 2, 3]


@pytest.mark.parametrize("kind", ["session", "psycopg"])
def test_a_transaction_that_a_body_leaves_open_does_not_hold_up_its_end(
    stage: Stage, mine: Callable[[], list[Any]], kind: str
) -> None:
    kept: list[Any] = []

    async def body(job: RunningJob) -> None:
        if kind == "session":
            engine = create_async_engine(stage.database_url.replace("postgresql://", "postgresql+psycopg://", 1))
            session = AsyncSession(engine)
            kept.extend([session.close, engine.dispose])
            async with job.aio.unit(transaction=session):
                await session.execute(text(INSERT))
        else:
            connection = await psycopg.AsyncConnection.connect(stage.database_url)
            kept.append(connection.close)
            async with job.aio.unit(transaction=connection):
                await connection.execute(INSERT)
        raise ValueError("with the transaction open")

    async def close(job: RunningJob) -> None:
        for each in kept:
            await each()

    with pytest.raises(ValueError, match="with the transaction open"):
        stage.run(stage.job(body))
    assert mine() == []
    assert stage.sql("SELECT count(*) FROM pg_stat_activity WHERE state ~ 'in transaction'") == [(0,)]
    stage.run(stage.job(close))  # in the event loop of its connections


def test_a_synchronous_session_of_a_thread_s_registry_is_the_caller_s(stage: Stage) -> None:
    engine = create_engine(stage.database_url.replace("postgresql://", "postgresql+psycopg://", 1))
    sessions: scoped_session[Session] = scoped_session(sessionmaker(engine))

    async def client() -> None:
        await stage.idle.aenqueue(transaction=sessions)
        assert stage.sidejob.count_jobs() == {}
        sessions.commit()

    awaited(client)
    sessions.remove()
    engine.dispose()
    assert stage.sidejob.count_jobs() == {"queued": 1}


def test_a_connection_of_django_is_refused(stage: Stage) -> None:
    """It is another one in another thread: the job would be committed at once, without the caller's rows."""
    with pytest.raises(TypeError, match=r"belongs to the thread of its transaction. .*sync_to_async\(\)"):
        awaited(lambda: stage.idle.aenqueue(transaction="default"))
    assert stage.sidejob.count_jobs() == {}


def plainly(word: str) -> int:
    return len(word)


# -- calls and results ------------------------------------------------------------------------------------------------


def test_tasks_are_called(stage: Stage) -> None:
    async def client() -> None:
        result = await stage.call.adelay(0)
        assert await result.job.aio.exists
        plain = stage.app.task(name="stage.plain", shared=False)(plainly)
        assert (await plain.adelay("abc")).id
        assert (await plain.aapply_async(("abc",))).id

    awaited(client)


# -- what is told -----------------------------------------------------------------------------------------------------


def test_a_verb_that_blocks_the_loop_is_named_once(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    turns._told_of.clear()
    job = stage.job()

    async def client() -> None:
        with caplog.at_level(logging.WARNING, "celery_sidejob"):
            job.set(page=1)
            job.set(page=2)
            job.input("a").write(1)
            stage.idle.enqueue()
            await job.aio.set(page=3)

    line = inspect.getsourcelines(client)[1] + 2
    awaited(client)
    told = [record.getMessage() for record in caplog.records if "stands still" in record.getMessage()]
    assert len(told) == 3
    assert told[0].startswith(f"set() in line {line} of {__file__} asks the store, and the event loop")
    assert [message.split("instead: ")[1].split(".")[0] for message in told] == ["await …", "await …", "await …"]
    assert "await ….aio.set(…)" in told[0]
    assert "await ….aio.write(…)" in told[1]
    assert "await ….aenqueue(…)" in told[2]


def test_a_loop_over_inputs_that_blocks_is_named_too(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    turns._told_of.clear()

    async def body(job: RunningJob) -> None:
        for _ in job.for_inputs("a"):
            break

    job = stage.job(body)
    job.input("a").write(1)
    with caplog.at_level(logging.WARNING, "celery_sidejob"):
        stage.run(job)
    assert "Await it instead: async for … in job.aio.for_inputs(…)." in caplog.text


def test_bad_input_is_refused_as_elsewhere(stage: Stage) -> None:
    job = stage.job()

    async def in_a_step(job: RunningJob) -> None:
        async def inner() -> None:
            await job.aio.step("inner", asyncio.sleep, 0)

        await job.aio.step("outer", inner)

    async def of_no_function(job: RunningJob) -> None:
        await job.aio.step("a", 3)  # type: ignore[call-overload]

    with pytest.raises(InvalidValueError, match=r"wait\(\) takes statuses"):
        awaited(lambda: job.aio.wait(3))  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="takes a function to call, not 3"):
        stage.run(stage.job(of_no_function))
    with pytest.raises(IllegalMoveError, match="inside a step, or in two threads"):
        stage.run(stage.job(in_a_step))


def test_a_commit_of_a_thread_that_the_body_has_left_behind_is_over_before_the_run_ends(stage: Stage) -> None:
    has_begun, ends_in = threading.Event(), threading.get_ident()

    def waits_for_the_lock() -> bool:
        return sys._current_frames()[ends_in].f_code in (OpenUnit.finish.__code__, OpenUnit.end.__code__)

    def wait(point: str) -> None:
        if point == "checkpoint:before-commit":
            has_begun.set()
            wait_until(waits_for_the_lock)

    def body(job: RunningJob) -> None:
        job.output("seen").write(1)
        threading.Thread(target=copy_context().run, args=(job.checkpoint,)).start()
        assert has_begun.wait(patient(10))

    job = stage.job(body)
    with acting(wait):
        assert stage.run(job) == "completed"
    assert list(job.output("seen")) == [1]
