"""arq as a side of `coroutines.py`: `python -m benchmarks.arq_app client|worker URL [LIMIT]`.

The client speaks as `client.py` does. The worker runs up to LIMIT coroutines at a time and keeps no results; its other
settings are as they come.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import uvloop
from arq import create_pool, func
from arq.connections import RedisSettings
from arq.worker import Worker

from benchmarks import done
from benchmarks.client import serve


def main(verb: str, url: str, limit: str = "10") -> None:
    """Send what each line of the input says, or work until killed."""
    if verb == "worker":
        uvloop.run(work(url, int(limit)))
    else:
        serve({"rest": lambda count, ms: asyncio.run(publish(url, count, ms / 1000))})


async def publish(url: str, count: int, seconds: float) -> float:
    """One call after the other."""
    pool = await create_pool(RedisSettings.from_dsn(url))
    begun = time.perf_counter()
    for _ in range(count):
        await pool.enqueue_job("rest", seconds)
    took = time.perf_counter() - begun
    await pool.aclose()
    return count / took


async def work(url: str, limit: int) -> None:
    """Run jobs until killed."""
    functions = [func(rest, name="rest")]
    await Worker(functions, redis_settings=RedisSettings.from_dsn(url), max_jobs=limit, keep_result=0).async_run()


async def rest(context: dict[str, Any], seconds: float) -> None:
    """Wait so long, and be done."""
    await done.rest(seconds)


if __name__ == "__main__":
    main(*sys.argv[1:])
