"""Runs one of the benchmarks: `python -m benchmarks <name> [options]`; without a name it lists them."""

from __future__ import annotations

import sys
from importlib import import_module

BENCHMARKS = {
    "packets": "packets that pass through three jobs, against plain tasks that call each other",
    "reads": "20,000 packets of one port, read at once, by iteration and one by one",
    "publications": "publications to ten and to ten thousand subscribers",
    "enqueue": "making jobs, against publishing plain tasks",
    "durable": "ordinary durable tasks, against plain Celery on the same Redis",
    "transport": "sidejob:// against kombu's redis://, plain and durable tasks",
    "peers": "Celery on redis:// and sidejobpg:// against procrastinate and pgqueuer",
    "scale": "what statements cost on large tables",
    "finding": "lists of jobs by tag, age and failure group, in a store with a million jobs and in an empty one",
    "history": "what the history of jobs and the statistics cost a run",
    "retention": "what others notice while 50,000 finished jobs are removed at once",
    "million": "what each statement of workers and each page of commands costs over a million rows of each kind",
    "suspended": "what a million suspended jobs cost a wake, other jobs and a worker's memory",
    "memory": "how much memory a worker takes while it runs tens of thousands of jobs and durable tasks",
    "permits": "claims in managed queues, with ten and a million jobs waiting, against claims by name",
    "capacity": "admissions of capacity pools with one shard and eight, and how soon a full pool refuses",
    "overload": "how many calls are served well at ten times the capacity, with a capacity pool and without",
    "recovery": "how soon runs begin again after kills",
    "poll": "what the sweeper costs over a million durable tasks, a hundred thousand of which wait in Redis",
    "idle": "what workers that have nothing to do cost the store",
    "kills": "workers killed while they fetch, on sidejob:// and on kombu's redis://, and what is lost",
    "deaths": "workers on sidejobpg:// that die, stand still and lose their Postgres, and what is lost or runs twice",
    "broker": "what sidejobpg:// takes from its Postgres: a crowd of workers, a long transaction, a million messages",
    "fetch": "how soon a dead consumer's message on sidejob:// is with another, and what idle workers ask of Redis",
    "upstream": "Celery's and kombu's own integration tests on stock Redis, on sidejob://, and with all tasks durable",
    "dataflow": "200,000 operations on ports, channels and runs, compared with a plain model after each",
    "graph": "200,000 operations on jobs, families, timers and deaths, compared with a plain model after each",
    "wiring": "jobs wired by ports and channels, whose workers are killed, and whether each packet counts once",
    "parity_mutations": "lines of the package that are broken, and whether the tests that prove them fail",
    "storm": "durable tasks of all forms in a storm of kills and outages, and whether each has ended once",
    "soak": "hours of mixed load with outages in every state, and whether every promise was kept",
}
"""Each is a module here with `main(arguments)`, which returns an exit code or None."""


def main(arguments: list[str]) -> int:
    """Run the benchmark that is named first with the rest of the arguments."""
    if not arguments or arguments[0] not in BENCHMARKS:
        print(__doc__)
        for name, what in BENCHMARKS.items():
            print(f"  {name:16} {what}")
        return 2 if arguments else 0
    code: int | None = import_module(f"benchmarks.{arguments[0]}").main(arguments[1:])
    return code or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
