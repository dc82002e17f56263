"""pgqueuer as a side of `peers.py`: `python -m benchmarks.pgqueuer_app install|client|worker URL`.

The client speaks as `client.py` does, and sends by psycopg. The worker is one process on asyncpg that runs up to
20 coroutines at a time, with all its other settings as they come: pgqueuer refuses a limit below twice the batch size,
which is 10. As the body awaits nothing, no two of them overlap.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import asyncpg
import psycopg
from pgqueuer import AsyncpgDriver, Job, PgQueuer, Queries
from pgqueuer.db import SyncPsycopgDriver
from pgqueuer.queries import SyncQueries

from benchmarks.client import in_one_go, publish, serve, wait
from benchmarks.note import note

LIMIT = 20


def main(verb: str, url: str) -> None:
    """Make the tables, send what each line of the input says, or work until killed."""
    if verb != "client":
        asyncio.run(install(url) if verb == "install" else work(url))
        return
    with psycopg.connect(url, autocommit=True) as connection:
        enqueue = SyncQueries(SyncPsycopgDriver(connection)).enqueue

        def one() -> None:
            enqueue("stamp", None)

        serve(
            {
                "publish": lambda count: publish(one, count),
                "together": lambda count: in_one_go(
                    lambda: enqueue(["stamp"] * count, [None] * count, [0] * count), count
                ),
                "wait": lambda count: wait(one, count, Path(os.environ["STAMPS"])),
            }
        )


async def install(url: str) -> None:
    """Make the tables."""
    connection = await asyncpg.connect(url)
    await Queries(AsyncpgDriver(connection)).install()
    await connection.close()


async def work(url: str) -> None:
    """Run jobs until killed."""
    queuer = PgQueuer(AsyncpgDriver(await asyncpg.connect(url)))

    @queuer.entrypoint("stamp")
    async def stamp(job: Job) -> None:
        """Note the instant."""
        note()

    await queuer.run(max_concurrent_tasks=LIMIT)


if __name__ == "__main__":
    main(*sys.argv[1:])
