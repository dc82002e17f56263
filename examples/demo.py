"""The demo: a census of real Python files by two real workers, one of which is killed, and the broker emptied.

    ./run demo [PATH]     or     python examples/demo.py [PATH]

It needs no servers: it starts a Postgres and a Valkey of its own, unless SIDEJOB_DATABASE_URL or CELERY_BROKER_URL name
yours. What it started is gone when it ends, however it ends. The jobs themselves are in code_census.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path

import code_census
from census_demo.accidents import Accidents
from census_demo.display import Bars, recovery_table, results_table
from census_demo.interruption import Interrupted, Interruption
from census_demo.plain import count_all
from census_demo.plan import Plan, make_plan
from census_demo.servers import running_servers
from census_demo.store import Store
from census_demo.workers import HASTE_DEADLINE_S, STOP_DEADLINE_S, Workers
from rich.console import Console

from celery_sidejob import Job, SideJobError, Status
from celery_sidejob.cli.drawing import draw_tree
from celery_sidejob.embedded import ServerError
from celery_sidejob.store.migrate import upgrade

BROKEN = Path(__file__).resolve().parent / "broken"
READY_DEADLINE_S = 60.0
STANDSTILL_S = 60.0
LOOKS = 50
"""A small census is looked at more often, so that it is not over before anything has happened to it."""


class DemoFailedError(Exception):
    """The census did not come to its end. The message says why, and holds the ends of the logs."""


def main() -> int:
    """Run the demo; returns 0 if the jobs and a plain loop have counted the same, else 1."""
    path = parse_path()
    console = Console(highlight=False)
    interruption = Interruption()
    started = ExitStack()
    try:
        return demonstrate(console, path, interruption, started)
    except Interrupted as interrupted:
        console.print(f"\n{interrupted}: ending everything that was started here")
        return interrupted.exit_code
    except (DemoFailedError, ServerError, SideJobError) as failed:
        console.print(f"{type(failed).__name__}: {failed}", style="red", markup=False, soft_wrap=True)
        return 1
    finally:
        interruption.ignore()  # nothing must keep us from ending what was started
        started.close()


def parse_path() -> Path:
    """Return the PATH of the command line, by default the interpreter's own standard library."""
    parser = argparse.ArgumentParser(prog="./run demo", description="A census of Python files by durable jobs.")
    default = sysconfig.get_path("stdlib")
    parser.add_argument("path", nargs="?", default=default, help=f"a directory; by default {default}")
    path = Path(parser.parse_args().path).resolve()
    if not path.exists():
        parser.error(f"there is no {path}")
    return path


def demonstrate(console: Console, path: Path, interruption: Interruption, started: ExitStack) -> int:
    """Run the census, disturb it, and hold its result beside that of a plain loop."""
    plan = make_plan(path, BROKEN)
    describe(console, path, plan)
    with interruption.held():
        servers = started.enter_context(running_servers())
    os.environ.update(servers.environment)  # before the app first reads its settings
    code_census.app.conf.task_default_queue = servers.queue  # in the workers the environment says so
    upgrade(servers.database_url, servers.schema, owner=code_census.sidejob.owner)
    store = started.enter_context(closing(Store(servers.database_url, servers.schema)))
    directory = Path(started.enter_context(tempfile.TemporaryDirectory(prefix="census-")))
    # A worker that is killed leaves its temporary files behind: here they go with the rest.
    workers = Workers(directory, {**servers.environment, "TMPDIR": str(directory)})
    started.callback(lambda: workers.stop(HASTE_DEADLINE_S if interruption.heard else STOP_DEADLINE_S))
    with interruption.held():
        workers.start()
    wait_for_workers(store, workers)
    console.print(f"Up: {servers.description}, two workers of two processes each, a beat", soft_wrap=True)

    accidents = Accidents(store, workers, servers.own_broker, servers.queue)
    root, collector = code_census.start({str(part): one_in for part, one_in in plan.paths.items()})
    with Bars(console, made=plan.jobs, done=plan.jobs) as bars:
        watch(root, plan, bars, accidents, workers, interruption)
    collector.terminate().wait(Status.TERMINATED, timeout=READY_DEADLINE_S)
    totals, unparsable = root.state["totals"], set(collector.state)
    drawing = draw(root, collector)
    workers.stop()  # so that the plain loop has the machine to itself

    with Bars(console, compared=plan.files) as bars:
        plainly, plainly_unparsable = count_plainly(plan, bars)
    console.print(results_table(totals, plainly))
    console.print(recovery_table(accidents.losses))
    console.print(f"the graph of the jobs: {drawing}", soft_wrap=True)
    if totals != plainly or unparsable != plainly_unparsable:
        console.print("The jobs and the plain loop differ.", style="red")
        return 1
    console.print("The jobs and the plain loop have counted the same.", style="green")
    return 0


def describe(console: Console, path: Path, plan: Plan) -> None:
    """Say what will be counted."""
    console.print(f"A census of {path}, and of {BROKEN.name}/, whose files do not parse", soft_wrap=True)
    if plan.is_sample:
        console.print(
            f"It has {plan.all_files:,} files, too many for a demo on this machine: one in {plan.paths[path]} is "
            "taken, always the same ones",
            soft_wrap=True,
        )
    console.print(f"{plan.directories:,} directories and {plan.files:,} files: {plan.jobs:,} jobs")


def wait_for_workers(store: Store, workers: Workers) -> None:
    """Return when the workers have entered themselves in the store."""
    end_at = time.monotonic() + READY_DEADLINE_S
    while not {worker.pid for worker in workers.workers} <= store.workers():
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
    """Look on until the root is completed, and have happen what is to happen meanwhile."""
    pause_s = min(0.2, plan.jobs / 100 / LOOKS)
    moved_at, before = time.monotonic(), dict[str, int]()
    while True:
        interruption.check()
        check_alive(workers)
        counts = code_census.sidejob.count_jobs()
        done = counts.get(Status.COMPLETED, 0)
        bars.show(made=sum(counts.values()) - 1, done=done)  # the collector is never done
        happened = accidents.happen(done / plan.jobs)
        if happened:
            bars.say(happened)
        if root.refresh().status == Status.COMPLETED:
            accidents.look()
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
        bars.show(compared=compared)

    return count_all(plan.paths, counted)


def draw(root: Job, collector: Job) -> Path:
    """Draw all jobs into census.svg here, or where there is room for it, and return where that is."""
    rows = []
    for job in code_census.sidejob.iter_jobs():
        info = job.info
        label = {root.id: "census", collector.id: "collector"}.get(job.id) or Path(info["child_name"]).name
        rows.append((job.id, info["parent"], label, info["status"]))
    path = Path("census.svg").absolute()
    try:
        draw_tree(rows, path)
    except OSError:
        path = Path(tempfile.mkdtemp(prefix="census-")) / path.name
        draw_tree(rows, path)
    return path


if __name__ == "__main__":
    sys.exit(main())
