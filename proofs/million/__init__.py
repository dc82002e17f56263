"""What statements cost over a million rows of each kind: those of workers one by one, those of people by the page.

    python -m proofs million [--rows 1000000] [--times 5] [--only statements|commands|web]

The store has so many finished jobs with an asking, an alias, a key of state, a port and a timer each; children of one
job that rests; queued jobs; packets on one port; messages of durable tasks; entries of the dead set, half of them
failed jobs; subscriptions; and notes on copies. Beside them jobs and durable tasks are made, run, ended, retried,
buried, rescued, swept and pruned, in this process, by the code of workers. Then each page of the commands is read,
and each page of the web and list of its HTTP API, from the request to the last byte of the answer.

Shown is the median, of the web's pages also the 95th percentile. The proof ends with 1 where a statement of a worker
takes more than 20 ms, a page of the commands more than 200 ms that does not state its cost in its docstring, or the
95th percentile of a page of the web is above 150 ms.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from statistics import median, quantiles

from celery_sidejob import embedded
from celery_sidejob.store.schema.migrate import upgrade
from celery_sidejob.web.server import settle
from tests.tools.in_process import Stage

from .doing import Workers
from .filling import fill
from .pages import pages_of
from .watch import Watch
from .web import web_pages_of

STATEMENT_MS = 20.0
PAGE_MS = 200.0
WEB_MS = 150.0
WEB_TIMES = 60
LONGEST_MS = 5000.0
PARTS = ("statements", "commands", "web")


def main(arguments: list[str]) -> int:
    """Fill, measure, print; return 1 if something takes longer than it may."""
    parser = argparse.ArgumentParser(prog="python -m proofs million", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--url", help="A database that this proof has filled before, with as many --rows.")
    parser.add_argument("--only", choices=PARTS, help="Measure this alone.")
    given = parser.parse_args(arguments)
    parts = PARTS if given.only is None else (given.only,)
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
        show = {"statements": _show_statements, "commands": _show_pages, "web": _show_web}
        are_slow = [show[part](stage, given.rows, given.times) for part in parts]
    return int(any(are_slow))


def _show_statements(stage: Stage, rows: int, times: int) -> bool:
    """Do what workers do, and print what statements took, the slowest first; True if one is too slow."""
    with Watch().watching() as watch:
        workers = Workers(stage, rows)
        for _ in range(times):
            workers.everything()
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


def _show_web(stage: Stage, rows: int, times: int) -> bool:
    """Ask for each page of the web and print what the answer took, at least `WEB_TIMES`; True if one is too slow."""
    are_slow = False
    print(f"\n{'page of the web':45}{'':6}{'least ms':>9}{'p50 ms':>9}{'p95 ms':>9}", flush=True)
    with web_pages_of(stage, rows) as pages:
        settle()  # as its server does
        for path, ask in pages.items():
            ask()  # the first answer opens connections and compiles templates
            took, codes = [], set()
            while len(took) < max(times, WEB_TIMES) and sum(took) < LONGEST_MS:
                begun = time.perf_counter()
                codes.add(ask())
                took.append(1e3 * (time.perf_counter() - begun))
            p95 = quantiles(took, n=20)[-1] if len(took) > 1 else took[0]
            is_slow = p95 > WEB_MS or not codes <= {200, 303}
            mark = "" if not is_slow else f"  TOO SLOW {sorted(codes)}"
            print(f"{path:52}{min(took):9.1f}{median(took):9.1f}{p95:9.1f}{mark}", flush=True)
            are_slow |= is_slow
    return are_slow
