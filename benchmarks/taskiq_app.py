"""taskiq as a side of `coroutines.py`: `python -m benchmarks.taskiq_app client|worker URL [LIMIT]`.

The broker is the stream of taskiq-redis, whose messages are acknowledged; the list would lose them with the worker. The
client speaks as `client.py` does. The worker is taskiq's own command with one process, which acknowledges a message
after its run; it runs up to LIMIT coroutines at a time. Its other settings are as they come.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

from taskiq.cli.worker.cmd import WorkerCMD
from taskiq_redis import RedisStreamBroker

from benchmarks import done
from benchmarks.client import serve


def main(verb: str, url: str, limit: str = "100") -> None:
    """Send what each line of the input says, or work until killed."""
    os.environ["BROKER_URL"] = url
    if verb == "worker":
        WorkerCMD().exec(
            ["benchmarks.taskiq_app:broker", "--workers=1", f"--max-async-tasks={limit}", "--log-level=WARNING"]
        )
    else:
        serve({"rest": lambda count, ms: asyncio.run(publish(count, ms / 1000))})


def broker() -> RedisStreamBroker:
    """Make the broker with its task, as the command and the client need it."""
    made = RedisStreamBroker(os.environ["BROKER_URL"])
    made.register_task(done.rest, task_name="rest")
    return made


async def publish(count: int, seconds: float) -> float:
    """One call after the other, when the stream has its group: the group begins with the messages that come then."""
    sending = broker()
    await sending.startup()
    rest = sending.find_task("rest")
    begun = time.perf_counter()
    for _ in range(count):
        await rest.kiq(seconds)
    took = time.perf_counter() - begun
    await sending.shutdown()
    return count / took


if __name__ == "__main__":
    main(*sys.argv[1:])
