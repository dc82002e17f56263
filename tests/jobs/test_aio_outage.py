"""Calls of a web application in one event loop, while Postgres restarts."""

from __future__ import annotations

import asyncio
import threading

import httpx
import psycopg
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from celery_sidejob import StoreUnavailableError, embedded
from celery_sidejob.store.schema.migrate import upgrade
from tests.tools.apps import make_app
from tests.tools.threads import in_thread
from tests.tools.waiting import wait_until

CALLERS = 20


def test_a_call_is_kept_or_refused_while_postgres_restarts(own_postgres: embedded.Postgres, redis_url: str) -> None:
    upgrade(own_postgres.url)
    app = make_app(broker=redis_url, sidejob_database_url=own_postgres.url)

    @app.task(name="work", durable=True, shared=False)
    async def work() -> None:
        """Only its name counts."""

    web = FastAPI()

    @web.post("/")
    async def call() -> str:
        result = await work.adelay()
        return str(result.id)

    @web.exception_handler(StoreUnavailableError)
    async def refuse(request: Request, error: StoreUnavailableError) -> JSONResponse:
        return JSONResponse(None, status_code=503)

    found: list[httpx.Response] = []
    has_restarted = threading.Event()

    async def calls() -> None:
        async def call_again() -> None:
            while not has_restarted.is_set():
                found.append(await client.post("/"))
            while (answer := await client.post("/")).status_code != 200:
                found.append(answer)
            found.append(answer)

        transport = httpx.ASGITransport(web)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=None) as client:
            await asyncio.gather(*(call_again() for _ in range(CALLERS)))

    with in_thread(lambda: asyncio.run(calls())):
        wait_until(lambda: len(found) > CALLERS)
        own_postgres.restart()
        has_restarted.set()
    app.sidejob.close()
    app.close()
    assert {answer.status_code for answer in found} <= {200, 503}
    with psycopg.connect(own_postgres.url) as look:
        kept = [task_id for (task_id,) in look.execute("SELECT task_id FROM sidejob.messages")]
    told = [answer.json() for answer in found if answer.status_code == 200]
    assert len(told) >= CALLERS
    assert set(told) <= set(kept)
    assert len(kept) == len(set(kept))
