"""Asynchronous sessions and connections of the caller, in awaited calls and by SQLAlchemy's `run_sync`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session, create_async_engine

from celery_sidejob import NO_DATA, Job
from tests.tools.in_process import Stage
from tests.tools.waiting import wait_until


@asynccontextmanager
async def engine_of(stage: Stage) -> AsyncIterator[AsyncEngine]:
    """An engine of the caller's own, which leads to the store."""
    engine = create_async_engine(stage.database_url.replace("postgresql://", "postgresql+psycopg://", 1))
    try:
        yield engine
    finally:
        await engine.dispose()


def published(stage: Stage) -> bool:
    return stage.sql("SELECT count(*) FROM messages WHERE published_at IS NULL") == [(0,)]


@pytest.mark.parametrize("kind", ["session", "scoped session", "connection", "psycopg"])
def test_an_asynchronous_transaction_is_refused_in_a_call_that_is_not_awaited(stage: Stage, kind: str) -> None:
    async def given() -> None:
        async with (
            engine_of(stage) as engine, AsyncSession(engine) as session, engine.connect() as connection,
            await psycopg.AsyncConnection.connect(stage.database_url) as of_psycopg,
        ):  # fmt: skip
            scoped = async_scoped_session(lambda: session, scopefunc=asyncio.current_task)  # type: ignore[arg-type]
            lent = {"session": session, "scoped session": scoped, "connection": connection, "psycopg": of_psycopg}[kind]
            stage.idle.enqueue(transaction=lent)

    with pytest.raises(TypeError, match=r"not awaited: await it, as in `await task.aenqueue\(..., transaction=session"):
        asyncio.run(given())
    assert stage.sidejob.count_jobs() == {}


Lent = AsyncSession | AsyncConnection


async def with_session(engine: AsyncEngine, work: Callable[[Lent], Awaitable[None]]) -> None:
    async with AsyncSession(engine) as session:
        await work(session)


async def with_connection(engine: AsyncEngine, work: Callable[[Lent], Awaitable[None]]) -> None:
    async with engine.connect() as connection:
        await work(connection)


@pytest.mark.parametrize("lend", [with_session, with_connection])
def test_with_run_sync_rows_and_jobs_commit_together_or_not_at_all(stage: Stage, lend: Callable[..., Any]) -> None:
    stage.sql("CREATE TABLE IF NOT EXISTS public.mine (job_id bigint)")
    stage.sql("DELETE FROM public.mine")
    made: list[Job] = []

    async def add(lent: Lent) -> None:
        job = await lent.run_sync(lambda s: stage.idle.enqueue(transaction=s))
        await lent.execute(text("INSERT INTO public.mine VALUES (:job)"), {"job": job.id})
        made.append(job)

    async def work(lent: Lent) -> None:
        await add(lent)
        await lent.rollback()
        await add(lent)
        savepoint = await lent.begin_nested()
        await add(lent)
        await savepoint.rollback()
        assert not made[1].exists, "others do not see it yet"
        await lent.commit()

    async def main() -> None:
        async with engine_of(stage) as engine:
            await lend(engine, work)

    asyncio.run(main())
    assert stage.sql("SELECT id FROM jobs") == stage.sql("SELECT job_id FROM public.mine") == [(made[1].id,)]
    wait_until(lambda: published(stage), message="the job to be published by what follows the commit")


def test_with_run_sync_a_port_is_written_and_read(stage: Stage) -> None:
    job = stage.job()
    read: list[Any] = []

    async def main() -> None:
        async with engine_of(stage) as engine, AsyncSession(engine) as session:
            await session.run_sync(lambda s: job.input("a").write_many([1, 2, 3], transaction=s))
            assert len(job.input("a")) == 0
            await session.commit()
            read.append(await session.run_sync(lambda s: job.input("a").read_many(2, transaction=s)))
            await session.rollback()
            read.append(await session.run_sync(lambda s: job.input("a").read(transaction=s)))
            await session.commit()

    asyncio.run(main())
    assert read == [[1, 2], 1]
    assert (list(job.input("a")), job.input("a").read()) == ([2, 3], NO_DATA)


def test_a_connection_that_breaks_is_given_up_as_any_other(stage: Stage) -> None:
    async def main() -> None:
        async with engine_of(stage) as engine, AsyncSession(engine) as session:
            await session.run_sync(lambda s: stage.idle.enqueue(transaction=s))
            pid = await session.scalar(text("SELECT pg_backend_pid()"))
            stage.sql("SELECT pg_terminate_backend(%s)", pid)
            with pytest.raises(DBAPIError):
                await session.execute(text("SELECT 1"))
            await session.rollback()
            await session.run_sync(lambda s: stage.idle.enqueue(transaction=s))
            await session.commit()

    asyncio.run(main())
    assert stage.sidejob.count_jobs() == {"queued": 1}
