"""The example of docs/coroutines.md: bodies that wait for answers, a hundred at a time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.examples.shops import Shop
from tests.tools.versions import KOMBU_5_7
from tests.tools.workers import Processes

pytestmark = KOMBU_5_7


class Answers(Shop):
    """`examples/coroutines`."""

    celery_app = "answers"


def test_a_hundred_bodies_wait_at_once(tmp_path: Path, processes: Processes, empty_database_url: str) -> None:
    shop = Answers("coroutines", tmp_path, processes, empty_database_url)
    shop.celery("sidejob", "db", "upgrade")
    processes.start_worker(shop.celery_app, env=shop.env, cwd=shop.directory, pool="asyncio", concurrency=100)

    said = shop.run("python", "answers.py", "why", "how").split("\n")
    assert [line for line in said if line.startswith("[")] == [str(["why? because", "how? because"])] * 3

    began = time.monotonic()
    questions = [f"why {number}" for number in range(100)]
    program = f"from answers import *; print(len(group(ask.s(q) for q in {questions})().get(timeout=60)))"
    assert "100" in shop.run("python", "-c", program)
    assert time.monotonic() - began < 50, "each of them waits a second"


CLIENT = """
import asyncio, httpx
from questions import app

async def main():
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        print((await client.get("/ask", params={"question": "why"})).json())
        job = (await client.post("/surveys", json=["how", "who"])).json()["job"]
        while len((found := (await client.get(f"/surveys/{job}")).json())["answers"]) < 2:
            await asyncio.sleep(0.05)
        print(found["answers"])

asyncio.run(main())
"""


AIOHTTP_CLIENT = """
import asyncio
from aiohttp.test_utils import TestClient, TestServer
from questions_aiohttp import make_app

async def main():
    async with TestClient(TestServer(make_app())) as client:
        print(await (await client.get("/ask", params={"question": "why"})).json())
        print(await (await client.post("/ask", json=["how", "who"])).json())

asyncio.run(main())
"""


@pytest.mark.few(0)
def test_an_application_of_aiohttp_awaits_answers(
    tmp_path: Path, processes: Processes, empty_database_url: str
) -> None:
    shop = Answers("coroutines", tmp_path, processes, empty_database_url)
    shop.celery("sidejob", "db", "upgrade")
    processes.start_worker(shop.celery_app, env=shop.env, cwd=shop.directory, pool="asyncio", concurrency=100)
    said = shop.run("python", "-c", AIOHTTP_CLIENT).splitlines()
    assert said[-2:] == ["{'answer': 'why? because'}", "['how? because', 'who? because']"]


def test_a_web_application_awaits_answers(tmp_path: Path, processes: Processes, empty_database_url: str) -> None:
    shop = Answers("coroutines", tmp_path, processes, empty_database_url)
    shop.celery("sidejob", "db", "upgrade")
    processes.start_worker(shop.celery_app, env=shop.env, cwd=shop.directory, pool="asyncio", concurrency=100)
    said = shop.run("python", "-c", CLIENT).splitlines()
    assert said[-2:] == ["{'answer': 'why? because'}", "['how? because', 'who? because']"]
