"""The web application of questions.py in aiohttp; docs/coroutines.md explains it.

python questions_aiohttp.py                      # curl "http://127.0.0.1:8080/ask?question=why"
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from aiohttp import web
from answers import SERVER, ask_for_sure, ask_together
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

ENGINE = web.AppKey("ENGINE", AsyncEngine)


async def engine_of(app: web.Application) -> AsyncIterator[None]:
    """Keep one engine, in the event loop of the application."""
    app[ENGINE] = create_async_engine(f"postgresql+psycopg://{SERVER}")
    yield
    await app[ENGINE].dispose()


async def ask(request: web.Request) -> web.Response:
    """Ask, wait without a thread, and answer."""
    result = await ask_for_sure.adelay(request.query["question"])
    return web.json_response({"answer": await result.aget(timeout=30)})


async def ask_all(request: web.Request) -> web.Response:
    """Ask all questions in the body in one transaction, and answer when all are answered."""
    async with AsyncSession(request.app[ENGINE]) as session:
        asked = await ask_together(session, await request.json())
    return web.json_response(await asyncio.gather(*(result.aget(timeout=30) for result in asked)))


def make_app() -> web.Application:
    """Make the application."""
    app = web.Application()
    app.cleanup_ctx.append(engine_of)
    app.add_routes([web.get("/ask", ask), web.post("/ask", ask_all)])
    return app


if __name__ == "__main__":
    web.run_app(make_app())
