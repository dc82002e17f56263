"""What statements cost over a million rows of each kind: those of workers one by one, those of commands by the page.

    python -m benchmarks million [--rows 1000000] [--times 5]

The store has so many finished jobs with an asking, an alias, a key of state, a port and a timer each; children of one
job that rests; queued jobs; packets on one port; messages of durable tasks; entries of the dead set, half of them
failed jobs; subscriptions; and notes on copies. Beside them jobs and durable tasks are made, run, ended, retried,
buried, rescued, swept and pruned, in this process, by the code of workers. Then each page of the commands is read.

Shown is the median. The benchmark ends with 1 where a statement of a worker takes more than 20 ms, or a page more than
200 ms that does not state its cost in its docstring.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from statistics import median

from celery_sidejob import embedded
from celery_sidejob.store.schema.migrate import upgrade
from tests.tools.in_process import Stage

from .doing import Workers
from .filling import fill
from .pages import pages_of
from .watch import Watch

STATEMENT_MS = 20.0
PAGE_MS = 200.0


def main(arguments: list[str]) -> int:
    """Fill, measure, print; return 1 if something takes longer than it may."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks million", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--url", help="A database that this benchmark has filled before, with as many --rows.")
    given = parser.parse_args(arguments)
    with ExitStack() as stack:
        url = given.url
        if url is None:
            url = stack.enter_context(embedded.Postgres()).url
            upgrade(url)
            begun = time.perf_counter()
            fill(url, given.rows)
            print(f"filled in {time.perf_counter() - begun:.0f} s", flush=True)
        stage = Stage(url, sidejob_durable_tasks=["bench.*"], sidejob_retention=86400, sidejob_lease=3600)
        stack.callback(stage.close)
        with Watch().watching() as watch:
            workers = Workers(stage, given.rows)
            for _ in range(given.times):
                workers.everything()
        are_slow = [_show_statements(watch), _show_pages(stage, given.rows, given.times)]
    return int(any(are_slow))


def _show_statements(watch: Watch) -> bool:
    """Print what statements took, the slowest first; True if one is too slow."""
    print(f"\n{'statement of a worker':45}{'times':>7}{'p50 ms':>9}{'max ms':>9}")
    found = sorted(((median(took), max(took), len(took), name) for name, took in watch.seconds.items()), reverse=True)
    for p50, most, times, name in found:
        mark = "  TOO SLOW" if 1e3 * p50 > STATEMENT_MS else ""
        print(f"{name:45}{times:7}{1e3 * p50:9.2f}{1e3 * most:9.2f}{mark}")
    return any(1e3 * p50 > STATEMENT_MS for p50, *_ in found)


def _show_pages(stage: Stage, rows: int, times: int) -> bool:
    """Read each page and print what that took; True if one is too slow and does not say so."""
    are_slow = False
    print(f"\n{'page':45}{'':7}{'p50 ms':>9}{'max ms':>9}", flush=True)
    for name, page in pages_of(stage, rows).items():
        took = []
        while len(took) < times and sum(took) < 1:
            begun = time.perf_counter()
            page.read()
            took.append(time.perf_counter() - begun)
        is_slow = 1e3 * median(took) > PAGE_MS
        mark = "" if not is_slow else "  (its docstring says so)" if page.is_stated else "  TOO SLOW"
        print(f"{name:52}{1e3 * median(took):9.1f}{1e3 * max(took):9.1f}{mark}", flush=True)
        are_slow |= is_slow and not page.is_stated
    return are_slow
