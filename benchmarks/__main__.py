"""Runs one of the benchmarks: `python -m benchmarks <name> [options]`; without a name it lists them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module

BENCHMARKS = {
    "packets": "packets that pass through three jobs, against plain tasks that call each other",
    "reads": "20,000 packets of one port, read at once, by iteration and one by one",
    "publications": "publications to ten and to ten thousand subscribers",
    "enqueue": "making jobs, against publishing plain tasks",
    "durable": "ordinary durable tasks, against plain Celery on the same Redis",
    "transport": "sidejob:// against kombu's redis://, plain and durable tasks",
    "peers": "Celery on redis:// and sidejobpg:// against procrastinate and pgqueuer",
    "steps": "steps of jobs against DBOS, absurd, and procrastinate with a column of one's own",
    "scale": "what statements cost on large tables",
    "finding": "lists of jobs by tag, age and failure group, in a store with a million jobs and in an empty one",
    "history": "what the history of jobs and the statistics cost a run",
    "retention": "what others notice while 50,000 finished jobs are removed at once",
    "suspended": "what a million suspended jobs cost a wake, other jobs and a worker's memory",
    "results": "results on sidejobpg:// against Redis and db+postgresql: round trips, drains, chords, many that wait",
    "coroutines": "bodies of async def in the pool asyncio, against prefork and threads, and other libraries",
    "memory": "how much memory a worker takes while it runs tens of thousands of jobs and durable tasks",
    "permits": "claims in managed queues, with ten and a million jobs waiting, against claims by name",
    "capacity": "admissions of capacity pools with one shard and eight, and how soon a full pool refuses",
    "overload": "how many calls are served well at ten times the capacity, with a capacity pool and without",
    "recovery": "how soon runs begin again after kills",
    "poll": "what the sweeper costs over a million durable tasks, a hundred thousand of which wait in Redis",
    "idle": "what workers that have nothing to do cost the store",
    "open_pages": "what fifty open pages of the web page cost the store",
    "broker": "what sidejobpg:// takes from its Postgres: a crowd of workers, a long transaction, a million messages",
    "fetch": "how soon a dead consumer's message on sidejob:// is with another, and what idle workers ask of Redis",
    "upstream": "Celery's and kombu's own integration tests on stock Redis, on sidejob://, and with all tasks durable",
}
"""Each is a module here with `main(arguments)`, which returns an exit code or None."""


def run(package: str, modules: Mapping[str, str], arguments: list[str], *, usage: str | None) -> int:
    """Run the module of a package that is named first with the rest of the arguments; without a name list them."""
    if not arguments or arguments[0] not in modules:
        print(usage)
        for name, what in modules.items():
            print(f"  {name:16} {what}")
        return 2 if arguments else 0
    code: int | None = import_module(f"{package}.{arguments[0]}").main(arguments[1:])
    return code or 0


if __name__ == "__main__":
    sys.exit(run("benchmarks", BENCHMARKS, sys.argv[1:], usage=__doc__))
