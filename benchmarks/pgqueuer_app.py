"""pgqueuer as a side of `peers.py` and `coroutines.py`.

    python -m benchmarks.pgqueuer_app install|client|worker URL [LIMIT BATCH]

The client speaks as `client.py` does, and sends by psycopg. The worker is one process on asyncpg that runs up to
20 coroutines at a time, with all its other settings as they come: pgqueuer refuses a limit below twice the batch size,
which is 10. As the body of `stamp` awaits nothing, no two of them overlap. With LIMIT and BATCH it has those instead,
and uvloop, as pgqueuer's own command.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import asyncpg
import psycopg
import uvloop
from pgqueuer import AsyncpgDriver, Job, PgQueuer, Queries
from pgqueuer.db import SyncPsycopgDriver
from pgqueuer.queries import SyncQueries

from benchmarks import done
from benchmarks.client import in_one_go, publish, serve, wait
from benchmarks.note import note

LIMIT, BATCH = 20, 10


def main(verb: str, url: str, *limits: str) -> None:
    """Make the tables, send what each line of the input says, or work until killed."""
    if verb == "install":
        asyncio.run(install(url))
        return
    if verb == "worker":
        (uvloop.run if limits else asyncio.run)(work(url, *map(int, limits or (LIMIT, BATCH))))
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
                "rest": lambda count, ms: in_one_go(
                    lambda: enqueue(["rest"] * count, [str(ms / 1000).encode()] * count, [0] * count), count
                ),
            }
        )


async def install(url: str) -> None:
    """Make the tables."""
    connection = await asyncpg.connect(url)
    await Queries(AsyncpgDriver(connection)).install()
    await connection.close()


async def work(url: str, limit: int, batch: int) -> None:
    """Run jobs until killed."""
    queuer = PgQueuer(AsyncpgDriver(await asyncpg.connect(url)))

    @queuer.entrypoint("stamp")
    async def stamp(job: Job) -> None:
        """Note the instant."""
        note()

    @queuer.entrypoint("rest")
    async def rest(job: Job) -> None:
        """Wait so long as the payload says, and be done."""
        await done.rest(float(job.payload))

    await queuer.run(max_concurrent_tasks=limit, batch_size=batch)


if __name__ == "__main__":
    main(*sys.argv[1:])
