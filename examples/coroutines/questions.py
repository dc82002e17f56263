"""A web application beside the worker of answers.py, in Starlette; docs/coroutines.md explains it.

uvicorn questions:app                            # curl "http://127.0.0.1:8000/ask?question=why"
"""

from __future__ import annotations

from answers import ask_for_sure, sidejob, survey
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route


async def ask(request: Request) -> JSONResponse:
    """Ask, wait without a thread, and answer."""
    result = await ask_for_sure.adelay(request.query_params["question"])
    return JSONResponse({"answer": await result.aget(timeout=30)})


async def begin(request: Request) -> JSONResponse:
    """Begin a survey of all questions in the body."""
    job = await survey.aenqueue()
    await job.input("questions").aio.write_many(await request.json())
    return JSONResponse({"job": job.id}, status_code=201)


async def look(request: Request) -> JSONResponse:
    """Tell how far a survey is."""
    job = await sidejob.aio.get(request.path_params["job"])
    answers = [packet.value for packet in await job.output("answers").aio.peek(100)]
    return JSONResponse({"status": job.status, "answers": answers})


app = Starlette(
    routes=[
        Route("/ask", ask),
        Route("/surveys", begin, methods=["POST"]),
        Route("/surveys/{job:int}", look),
    ]
)
