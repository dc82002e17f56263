"""What open pages of the web page cost the store: statements a second, with fifty of them open.

    python -m benchmarks open_pages [--pages 50] [--seconds 30]

The pages are the overview, queues, workers, batches, graphs, and a page of a job each for the rest. In the first time
nothing happens; in the second, each of these jobs changes twice a second. A page renews itself when it is told to, as
in a browser. Statements are those of the site's role in pg_stat_statements, BEGIN and COMMIT too.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import socket
import threading
import time
from collections import Counter
from contextlib import ExitStack, closing
from typing import Any

import httpx
import psycopg
import uvicorn

from benchmarks.idle import scalar, store
from celery_sidejob.web.app import site_app
from celery_sidejob.web.site import Site
from celery_sidejob.web.users import Users
from tests.tools.browsers import ENTRIES, PASSWORDS
from tests.tools.in_process import Stage
from tests.tools.waiting import wait_until

ALLOWED = 20.0
COMMON = {"/": 12, "/queues": 5, "/workers": 5, "/batches": 3}
GRAPHS = 5
CHANGER = "changer"
COUNT = f"SELECT coalesce(sum(calls), 0)::bigint FROM pg_stat_statements WHERE userid <> '{CHANGER}'::regrole"


def main(arguments: list[str]) -> int:
    """Measure, print, and return 1 if it costs more than is allowed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks open_pages", description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args(arguments)
    with ExitStack() as stack:
        postgres, _ = store(stack, argparse.Namespace(pgbouncer=False))
        looking = stack.enter_context(psycopg.connect(postgres.url, autocommit=True))
        looking.execute(f"CREATE ROLE {CHANGER} SUPERUSER LOGIN")
        stage = stack.enter_context(closing(Stage(postgres.url)))
        ids = [stage.job().id for _ in range(given.pages - sum(COMMON.values()))]
        paths = [path for path, number in COMMON.items() for _ in range(number)]
        paths += [f"/jobs/{job_id}" + ("/graph" if place < GRAPHS else "") for place, job_id in enumerate(ids)]
        pages = stack.enter_context(OpenPages(served(stack, stage), paths[: given.pages]))
        looking.execute(f"SET ROLE {CHANGER}")
        costs = []
        for what, changing in (("nothing happens", []), ("jobs change", ids)):
            told = Counter(pages.told)
            statements, took = counted(looking, given.seconds, changing)
            told = pages.told - told
            costs.append(statements / took)
            renewals = told["changed"] / took
            print(f"{what:16} {statements / took:6.1f} statements a second   {renewals:6.1f} renewals a second")
    print(f"{given.pages} open pages; allowed are {ALLOWED:g} statements a second")
    return 0 if max(costs) <= ALLOWED else 1


def served(stack: ExitStack, stage: Stage) -> str:
    """Serve the site of a stage, and return its address."""
    listener = stack.enter_context(socket.socket())
    listener.bind(("127.0.0.1", 0))
    site = site_app(Site(stage.sidejob, Users(ENTRIES), None))
    server = uvicorn.Server(uvicorn.Config(site, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    stack.callback(thread.join)
    stack.callback(setattr, server, "should_exit", True)
    wait_until(lambda: server.started, message="the site to listen")
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def counted(looking: psycopg.Connection[Any], seconds: float, changing: list[int]) -> tuple[int, float]:
    """Count the site's statements for so long; meanwhile these jobs change."""
    looking.execute("SELECT pg_stat_statements_reset()")
    begun = time.monotonic()
    while time.monotonic() < begun + seconds:
        looking.execute("UPDATE sidejob.jobs SET ran_at = now() WHERE id = ANY(%s)", [changing])
        time.sleep(0.5)
    return scalar(looking, COUNT), time.monotonic() - begun


class OpenPages:
    """Browsers, as far as they cost anything: each follows a page and renews it."""

    def __init__(self, address: str, paths: list[str]) -> None:
        self.told: Counter[str] = Counter()
        self._address = address
        self._paths = paths
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._all(),))
        self._over = asyncio.Event()

    def __enter__(self) -> OpenPages:
        self._thread.start()
        try:
            wait_until(lambda: self.told["listening"] == len(self._paths), timeout=60, message="all pages to be live")
        except TimeoutError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *why: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def _all(self) -> None:
        async with httpx.AsyncClient(base_url=self._address, timeout=300) as client:
            await client.post("/login", data={"name": "ron", "password": PASSWORDS["ron"]})
            client.headers["cookie"] = "; ".join(f"{each.name}={each.value}" for each in client.cookies.jar)
            tasks = [asyncio.create_task(self._follow(client, path)) for path in self._paths]
            await self._over.wait()
            for task in tasks:
                task.cancel()

    async def _follow(self, client: httpx.AsyncClient, path: str) -> None:
        found = None
        while found is None:  # a page that was too slow, as fifty were asked for at once, is asked for again
            found = re.search(r'data-live="([^"]+)"', (await client.get(path)).text)
        async with client.stream("GET", found[1].replace("&amp;", "&")) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("event: "):
                    event = line.removeprefix("event: ")
                    self.told[event] += 1
                    if event == "changed":
                        assert (await client.get(path, headers={"x-renews": "1"})).status_code == 200
