"""How soon a run begins again after the process that ran it was killed: real workers, `kill -9`, default settings.

    python -m benchmarks recovery --kills 300 [--broker sidejobpg]

Measured from just before the kill to the first line of the body's next run. What sets each time:

process of the pool    its parent looks every 0.25 s, takes the run back and rings; a free process begins it
worker                 the sweeper looks every 0.25 s whether a liveness lock is free, and gives its owner 1.5 s to beat
worker that sweeps     the same, after another has found within 0.35 s that nobody sweeps
worker that stands     the lock is still held, so its silence must tell: half a lease until it is suspected, half until
still                  it is declared dead (a lease of 6 s here, to save time)
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles

from benchmarks.servers import started_broker
from celery_sidejob import Job, embedded
from tests.acceptance.scene import Scene
from tests.tools.databases import prepare_template
from tests.tools.guard import Guard
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes, WorkerProcess

FOR_EVER = {"SIDEJOB_MAX_LOSSES": "1000000"}
LEASE_S = 6.0
SHORT_LEASE = {**FOR_EVER, "SIDEJOB_LEASE": str(LEASE_S), "SIDEJOB_HEARTBEAT_INTERVAL": "1"}
ASIDE = "elsewhere"
"""A queue with nothing in it: who serves it sweeps and does nothing else."""


@dataclass
class Series:
    """The times of one kind of death."""

    name: str
    share: float
    target_s: float
    times_s: list[float] = field(default_factory=list)

    @property
    def p99_s(self) -> float:
        """The 99th percentile."""
        return quantiles(self.times_s, n=100, method="inclusive")[98] if len(self.times_s) > 1 else self.times_s[0]

    @property
    def met(self) -> bool:
        """Whether the target was."""
        return self.p99_s <= self.target_s

    def __str__(self) -> str:
        middle = sorted(self.times_s)[len(self.times_s) // 2]
        return (
            f"{self.name:24}{len(self.times_s):6}{middle:9.2f}{self.p99_s:9.2f}{max(self.times_s):9.2f}"
            f"{self.target_s:9.1f}  {'' if self.met else 'MISSED'}"
        )


def main(arguments: list[str]) -> int:
    """Measure, print a table, and return 1 if a target was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks recovery", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=300, help="how many, of all kinds together (300)")
    parser.add_argument("--broker", default="redis", help="redis, sidejob, sidejobpg or amqp (redis)")
    given = parser.parse_args(arguments)
    kills = given.kills
    kinds: list[tuple[Series, Callable[[Scene, int], list[float]]]] = [
        (Series("process of the pool", 0.5, 1.5), kill_processes),
        (Series("worker", 0.25, 3.0), kill_workers),
        (Series("worker that sweeps", 0.17, 5.0), kill_sweepers),
        (Series("worker that stands still", 0.08, LEASE_S + 2.0), freeze_workers),
    ]
    print(f"{'seconds after the death of a':24}{'n':>6}{'p50':>9}{'p99':>9}{'max':>9}{'target':>9}", flush=True)
    for series, measure in kinds:
        with stage(given.broker) as scene:
            series.times_s = measure(scene, max(2, round(kills * series.share)))
        print(series, flush=True)
    print(__doc__[__doc__.index("Measured from") :].rstrip())
    return 0 if all(series.met for series, _ in kinds) else 1


@contextmanager
def stage(broker_kind: str) -> Iterator[Scene]:
    """Servers, a store and an empty scene within the block."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        postgres = stack.enter_context(embedded.Postgres(durable=False))
        prepare_template(postgres.url)
        broker = stack.enter_context(started_broker(broker_kind, postgres.url))
        processes = Processes(home / "processes", stack.enter_context(Guard()))
        stack.callback(processes.kill_all)
        scene = Scene(postgres.url, broker, Record(home / "record.jsonl"), processes)
        stack.callback(scene.close)
        # Just after a start of Postgres a free lock means nothing: its owner may be on its way back.
        settled = "SELECT now() - pg_postmaster_start_time() > interval '11 s' AS so"
        wait_until(lambda: scene.sql(settled)[0].so, timeout=20)
        yield scene


class Patient:
    """A job that is run again after each death."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._job: Job = scene.enqueue("holder")
        self._job.input("in").write(1)
        self._runs = 0
        self.pid = 0
        self.begins()

    def begins(self) -> float:
        """Wait for the next run and return when it began."""
        self._runs += 1
        line = self._scene.record.wait_for("holding", count=self._runs, timeout=60, job=self._job.id)[-1]
        self.pid = line["pid"]
        at: float = line["at"]
        return at


def kill_processes(scene: Scene, count: int) -> list[float]:
    """Kill the process of the pool that runs the job."""
    scene.worker(queues=ASIDE, **FOR_EVER)
    scene.worker(concurrency=2, **FOR_EVER)
    patient = Patient(scene)
    return [_time(patient, lambda: os.kill(patient.pid, signal.SIGKILL)) for _ in range(count)]


def kill_workers(scene: Scene, count: int) -> list[float]:
    """Kill workers that do not sweep."""
    scene.worker(queues=ASIDE, **FOR_EVER)
    return _one_after_the_other(scene, count, WorkerProcess.kill, FOR_EVER)


def kill_sweepers(scene: Scene, count: int) -> list[float]:
    """Kill the worker that runs the job and sweeps too: of two, the one that came first does both."""

    def kill(worker: WorkerProcess) -> None:
        assert scene.sweeper() == worker.pid
        worker.kill()

    return _one_after_the_other(scene, count, kill, FOR_EVER)


def freeze_workers(scene: Scene, count: int) -> list[float]:
    """Stop workers with all their processes, as a virtual machine that is moved."""
    scene.worker(queues=ASIDE, **SHORT_LEASE)
    return _one_after_the_other(scene, count, WorkerProcess.stop_signal, SHORT_LEASE)


def _one_after_the_other(
    scene: Scene, count: int, end: Callable[[WorkerProcess], None], env: dict[str, str]
) -> list[float]:
    """End the worker that runs the job, `count` times; there is always one more, ready to take over."""
    workers = [scene.worker(**env)]
    patient = Patient(scene)
    times = []
    for _ in range(count):
        workers.append(scene.worker(**env))
        ended = workers.pop(0)
        assert patient.pid in ended.children()
        times.append(_time(patient, lambda ended=ended: end(ended)))  # type: ignore[misc]
        ended.kill_group()
        wait_until(lambda: patient.pid in workers[0].children())
    return times


def _time(patient: Patient, end: Callable[[], None]) -> float:
    before = time.time()
    end()
    return patient.begins() - before
