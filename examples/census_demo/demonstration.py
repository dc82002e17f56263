"""The demo, from its first line of output to its last."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import sysconfig
import tempfile
import threading
import time
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import code_census
import psycopg
import redis
from kombu.exceptions import KombuError
from rich.console import Console
from sqlalchemy.exc import SQLAlchemyError

from celery_sidejob import Job, SideJobError, Status
from celery_sidejob.embedded import ServerError
from celery_sidejob.store.schema.migrate import upgrade
from census_demo.accidents import Accidents
from census_demo.brokers import KINDS
from census_demo.display import Bars, recovery_table, results_table, write
from census_demo.drawing import draw_tree
from census_demo.interruption import Interrupted, Interruption
from census_demo.plain import count_all
from census_demo.plan import Plan, UnusablePathError, make_plan
from census_demo.servers import running_servers
from census_demo.store import Store
from census_demo.workers import Workers, running_workers

READY_DEADLINE_S = 60.0
STANDSTILL_S = 60.0
LOOKS = 50
"""How often a census is checked at least. A small one is checked faster, so that it is not over before an accident."""
FAILURES = (SideJobError, ServerError, KombuError, psycopg.Error, SQLAlchemyError, redis.RedisError, OSError)
"""Errors of the machine or of given servers: the message is enough."""


class DemoFailedError(Exception):
    """The census did not end. The message says why, and has the last lines of the logs."""


def main() -> int:
    """Run the demo; returns 0 if the jobs and a plain loop have counted the same, 2 for bad arguments, else 1."""
    interruption = Interruption()
    if sys.stdout is not None:  # None if it is closed
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    console = Console(highlight=False, markup=False, emoji=False)
    started = ExitStack()
    try:
        parser = make_parser()
        try:
            arguments = parser.parse_args()
            plan = make_plan(arguments.path)
        except UnusablePathError as error:
            parser.error(str(error))
        return demonstrate(console, plan, arguments, interruption, started)
    except Interrupted as interrupted:
        console.print(f"{interrupted}: ending everything that was started here")
        return interrupted.exit_code
    except (DemoFailedError, *FAILURES) as failed:
        console.print(f"{type(failed).__name__}: {failed}", style="red", soft_wrap=True)
        return 1
    finally:
        interruption.ignore()  # a second Ctrl-C must not stop the cleanup
        started.close()


def make_parser() -> argparse.ArgumentParser:
    """Return the reader of the command line: a broker, and a PATH, by default the interpreter's standard library."""
    parser = argparse.ArgumentParser(prog="./run demo", description="A census of Python files by durable jobs.")
    default = sysconfig.get_path("stdlib")
    parser.add_argument("path", nargs="?", default=default, help=f"a directory; by default {default}")
    parser.add_argument(
        "--broker", choices=KINDS, help="what Celery's messages are in; by default postgres, which is the store as well"
    )
    parser.add_argument("--web", action="store_true", help="serve the web page of the census, until Ctrl-C")
    return parser


def demonstrate(
    console: Console, plan: Plan, arguments: argparse.Namespace, interruption: Interruption, started: ExitStack
) -> int:
    """Run the census, disturb it, and compare its result with that of a plain loop."""
    describe(console, plan)
    began_at = time.monotonic()
    servers = started.enter_context(running_servers(partial(write, console), arguments.broker))
    os.environ.update(servers.environment)  # before the app first reads its settings
    code_census.app.conf.task_default_queue = servers.queue  # in the workers the environment says so
    upgrade(servers.database_url, servers.schema, owner=code_census.sidejob.owner)
    store = started.enter_context(closing(Store(servers.database_url, servers.schema)))
    with interruption.held():
        workers = started.enter_context(running_workers(servers.environment, lambda: interruption.heard is not None))
    wait_for_workers(store, workers, interruption)
    console.print(f"Up after {time.monotonic() - began_at:.1f} s\n")
    if arguments.web:
        serve_page(console)

    accidents = Accidents(store, workers, servers.broker, servers.queue)
    root, collector = code_census.start({str(plan.path): plan.one_in})
    with Bars(console, {"jobs made": plan.jobs, "jobs done": plan.jobs}) as bars:
        watch(root, plan, bars, accidents, workers, interruption)
    collector.terminate().wait(Status.TERMINATED, timeout=READY_DEADLINE_S)
    totals, unparsable = root.state["totals"], set(collector.state)
    drawing = draw(plan, root, collector, accidents)
    if not arguments.web:
        workers.stop()  # so that the plain loop has the machine to itself

    with Bars(console, {"compared": plan.files}) as bars:
        plainly, plainly_unparsable = count_plainly(plan, bars)
    console.print(results_table(totals, plainly))
    console.print(recovery_table(accidents.losses))
    for note in accidents.notes:
        write(console, note, style="bright_black")
    console.print(f"\nThe graph of the jobs: {drawing}", soft_wrap=True)
    if totals != plainly or unparsable != plainly_unparsable:
        console.print("The jobs and the plain loop differ.", style="bold red")
        return 1
    console.print("The jobs and the plain loop have counted the same.", style="bold green")
    if arguments.web:
        console.print("The web page stays until Ctrl-C.")
        while True:
            interruption.check()
            time.sleep(0.2)
    return 0


def serve_page(console: Console) -> None:
    """Serve the web page in a thread, which ends with the demo."""
    from celery_sidejob.web.server import serve  # imported here: without --web nothing of it is needed

    password = secrets.token_urlsafe(6)
    said = threading.Event()

    def say(text: str) -> None:
        console.print(f"{text} Log in as demo with {password}\n", soft_wrap=True)
        said.set()

    options = {"users": {"demo": password}, "said": say}
    page = threading.Thread(target=serve, args=(code_census.sidejob, "127.0.0.1", 0), kwargs=options, daemon=True)
    page.start()
    said.wait(READY_DEADLINE_S)


def describe(console: Console, plan: Plan) -> None:
    """Say what will be counted."""
    write(console, f"A census of {plan.path}")
    if plan.is_sample:
        write(
            console,
            f"It has {plan.all_files:,} files, too many for a demo on this machine: one in {plan.one_in} is "
            "taken, always the same ones",
        )
    console.print(f"{plan.directories:,} directories and {plan.files:,} files: {plan.jobs:,} jobs")


def wait_for_workers(store: Store, workers: Workers, interruption: Interruption) -> None:
    """Wait until the workers have registered in the store."""
    end_at = time.monotonic() + READY_DEADLINE_S
    while not {worker.pid for worker in workers.workers} <= store.workers():
        interruption.check()
        check_alive(workers)
        if time.monotonic() > end_at:
            raise DemoFailedError(f"The workers were not ready within {READY_DEADLINE_S:.0f} s.\n{workers.logs()}")
        time.sleep(0.05)


def check_alive(workers: Workers) -> None:
    """Raise DemoFailedError if a process has ended that nobody killed."""
    dead = workers.dead()
    if dead is not None:
        raise DemoFailedError(f"The {dead.name} ended by itself.\n{workers.logs()}")


def watch(
    root: Job, plan: Plan, bars: Bars, accidents: Accidents, workers: Workers, interruption: Interruption
) -> None:
    """Wait until the root is completed, and cause the accidents meanwhile."""
    pause_s = min(0.2, plan.jobs / 100 / LOOKS)
    moved_at, before = time.monotonic(), dict[str, int]()
    while True:
        interruption.check()
        check_alive(workers)
        counts = code_census.sidejob.count_jobs()
        done = counts.get(Status.COMPLETED, 0)
        bars.show({"jobs made": sum(counts.values()) - 1, "jobs done": done})  # the collector is never done
        happened = accidents.happen(done / plan.jobs)
        if happened:
            bars.say(happened)
        if root.refresh().status == Status.COMPLETED:
            accidents.look()
            bars.show({"jobs made": plan.jobs, "jobs done": plan.jobs})
            bars.say(f"{plan.jobs:,} jobs are done")
            return
        if counts != before:
            moved_at, before = time.monotonic(), counts
        if counts.get(Status.FAILED) or time.monotonic() - moved_at > STANDSTILL_S:
            raise DemoFailedError(f"The census does not go on: {counts}.\n{workers.logs()}")
        time.sleep(pause_s)


def count_plainly(plan: Plan, bars: Bars) -> tuple[dict[str, int], set[str]]:
    """Count the same files in one loop of this process."""
    compared = 0

    def counted() -> None:
        nonlocal compared
        compared += 1
        bars.show({"compared": compared})

    return count_all(plan.path, plan.one_in, counted)


def draw(plan: Plan, root: Job, collector: Job, accidents: Accidents) -> Path:
    """Draw all jobs into census.svg, here or else in a temporary directory, and return its path."""
    rows = []
    for job in code_census.sidejob.iter_jobs():
        info = job.info
        label = {root.id: "census", collector.id: "collector"}.get(job.id) or Path(info["child_name"]).name
        rows.append((job.id, info["parent"], label, info["status"]))
    path = Path("census.svg").absolute()
    title = f"A census of {plan.path}"
    try:
        draw_tree(rows, path, title=title, recovered=accidents.recovered)
    except OSError:
        path = Path(tempfile.mkdtemp(prefix="census-")) / path.name
        draw_tree(rows, path, title=title, recovered=accidents.recovered)
    return path
