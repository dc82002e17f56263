"""procrastinate as a side of `peers.py` and `coroutines.py`.

    python -m benchmarks.procrastinate_app install|client|worker URL [LIMIT]

The client speaks as `client.py` does. The worker is one process that runs two coroutines at a time, or up to LIMIT and
then on uvloop. All its other settings are as they come: it fetches one job at a time, has four connections to Postgres,
and keeps the rows of jobs that have ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

import procrastinate
import uvloop

from benchmarks import done
from benchmarks.client import in_one_go, publish, serve, wait
from benchmarks.note import note


def main(verb: str, url: str, limit: str = "") -> None:
    """Make the tables, send what each line of the input says, or work until killed."""
    if verb == "worker":
        (uvloop.run if limit else asyncio.run)(work(url, int(limit or 2)))
        return
    app = make_app(procrastinate.SyncPsycopgConnector(conninfo=url))
    stamp, rest = app.tasks["stamp"], app.tasks["rest"]
    with app.open():
        if verb == "install":
            app.schema_manager.apply_schema()
            return
        serve(
            {
                "publish": lambda count: publish(stamp.defer, count),
                "together": lambda count: in_one_go(lambda: stamp.batch_defer(*({} for _ in range(count))), count),
                "wait": lambda count: wait(stamp.defer, count, Path(os.environ["STAMPS"])),
                "rest": lambda count, ms: in_one_go(
                    lambda: rest.batch_defer(*({"seconds": ms / 1000} for _ in range(count))), count
                ),
            }
        )


async def work(url: str, limit: int) -> None:
    """Run jobs until killed."""
    async with make_app(procrastinate.PsycopgConnector(conninfo=url)).open_async() as app:
        await app.run_worker_async(concurrency=limit)


def make_app(connector: procrastinate.BaseConnector) -> procrastinate.App:
    """Make an app with the tasks `stamp` and `rest`."""
    logging.getLogger("procrastinate.blueprints").setLevel(logging.ERROR)  # it warns of an app in the main module
    app = procrastinate.App(connector=connector)

    @app.task(name="stamp")
    async def stamp() -> None:
        """Note the instant."""
        note()

    app.task(name="rest")(done.rest)
    return app


if __name__ == "__main__":
    main(*sys.argv[1:])
