"""Workers that are killed while they fetch tasks of a millisecond, and what is lost, on `sidejob://` and on `redis://`.

    python -m proofs kills [--kills 1000] [--stock-kills 60] [--seed 1] [--pool solo]

First those of `sidejob://`, then, with the same seed, those of kombu's transport, each on a Redis of its own; 0 kills
leave one out, and only what `sidejob://` loses is a failure.

Two workers at a time; the older one is killed by SIGKILL at a random instant, one in five while it starts, and another
takes its place. One in five is first stopped (SIGSTOP) and then published for, half of these when they have nothing to
do: the answer to what they asked of Redis goes to a process that never reads. There is no delivery limit. In the end
one worker runs what there is, and is stopped as usual. Then each task must have run, and nothing may be left in Redis
that nobody would ever look at: no message, no name of a consumer. What is in the hash `unacked` of kombu's transport
comes back after an hour: late, not lost. SIGINT (Ctrl-C) ends the killing of one kind, and what was done until then is
judged.
"""

from __future__ import annotations

import argparse
import enum
import random
import re
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import redis
from kombu import Connection, Producer

import celery_sidejob.transport  # noqa: F401  # makes sidejob:// known
from celery_sidejob import embedded
from tests.tools.guard import Guard
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes, WorkerProcess

BACKLOG = 400
"""How many messages there are to fetch at any time."""
STARTING_S, RUNNING_S = 2.0, 0.7
"""Within which time of its start, or of its readiness, a worker is killed."""
FOR_THE_FROZEN = 4
"""How many messages are published when a worker stands still: it is not the only one that waits for them."""
QUIET_S = 60.0
HARMLESS = ("_kombu.binding", "_sidejob.bell.", "_sidejob.era")
"""Keys that may stay: kombu's routing, and bells, which expire by themselves."""


class Death(enum.StrEnum):
    """When a worker is killed."""

    STARTING = "while it started"
    FETCHING = "while it fetched"
    FROZEN = "stopped while it fetched"
    IDLE = "stopped while it waited"


HOW_OFTEN = {Death.STARTING: 0.2, Death.FETCHING: 0.6, Death.FROZEN: 0.1, Death.IDLE: 0.1}


@dataclass(frozen=True)
class Outcome:
    """What a run of kills has left."""

    published: int
    lost: int
    late: int
    """Messages in kombu's `unacked`."""
    doubled: int
    left: tuple[str, ...]
    """Keys that nobody would look at again."""
    deaths: Counter[Death]
    recovered: int
    """Messages that workers say they gave back for dead ones."""
    last_recovered_s: float
    """From the last kill until all had run."""

    @property
    def kept(self) -> bool:
        """Whether every promise was kept."""
        return not self.lost and not self.late and not self.left

    def __str__(self) -> str:
        deaths = ", ".join(f"{count} {death}" for death, count in sorted(self.deaths.items()))
        return (
            f"{self.deaths.total()} kills ({deaths}), {self.published} tasks: {self.lost} lost, {self.late} come back "
            f"after an hour, {self.recovered} given back for the dead, {self.doubled} ran twice; all had run "
            f"{self.last_recovered_s:.1f} s after the last kill; left in Redis: {', '.join(self.left) or 'nothing'}"
        )


def main(arguments: list[str]) -> int:
    """Kill, print, and return 1 if anything was lost or left on `sidejob://`."""
    parser = argparse.ArgumentParser(prog="python -m proofs kills", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000, help="on sidejob://")
    parser.add_argument("--stock-kills", type=int, default=60, help="on redis://")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--pool", default="solo")
    given = parser.parse_args(arguments)
    print(f"seed {given.seed}", flush=True)
    kept = True
    for transport, kills in (("sidejob", given.kills), ("redis", given.stock_kills)):
        if kills:
            outcome = run(transport, kills, seed=given.seed, pool=given.pool)
            print(f"{transport}://  {outcome}", flush=True)
            kept &= outcome.kept or transport != "sidejob"
    return 0 if kept else 1


def run(transport: str, kills: int, *, seed: int, pool: str) -> Outcome:
    """Kill so many workers on an empty Redis."""
    with embedded.Valkey() as server, tempfile.TemporaryDirectory() as directory, Guard() as guard:
        processes = Processes(Path(directory) / "processes", guard, pool=pool)
        try:
            storm = Storm(processes, server.url, Path(directory), transport=transport, seed=seed)
            signal.signal(signal.SIGINT, lambda *_: storm.end_soon())
            return storm.run(kills, progress=True)
        finally:
            processes.kill_all()


class Storm:
    """One run of kills on one Redis database."""

    def __init__(self, processes: Processes, redis_url: str, directory: Path, *, transport: str, seed: int) -> None:
        self._processes = processes
        self._redis = redis.Redis.from_url(redis_url)
        self._url = urlsplit(redis_url)._replace(scheme=transport).geturl()
        self._ran = directory / "ran"
        self._random = random.Random(seed)
        self._published = 0
        self._recovered = 0
        self._is_enough = False
        self._connection = Connection(self._url)

    def run(self, kills: int, *, progress: bool = False) -> Outcome:
        """Kill so many workers, let another one finish, and count."""
        with self._connection, self._redis:
            self._publish()
            workers = [self._worker(), self._worker()]
            deaths = Counter[Death]()
            for number in range(1, kills + 1):
                workers.append(self._worker())
                (death,) = self._random.choices(list(HOW_OFTEN), list(HOW_OFTEN.values()))
                self._kill(workers.pop(0), death)
                deaths[death] += 1
                if progress and number % 50 == 0:
                    print(f"{number} kills, {self._published} tasks", flush=True)
                if self._is_enough:
                    break
            for worker in workers[1:]:
                self._end(worker)
            return self._settle(workers[0], deaths)

    def end_soon(self) -> None:
        """Kill no more after the present one."""
        self._is_enough = True

    def _worker(self) -> WorkerProcess:
        env = {"BROKER_URL": self._url, "RAN": str(self._ran)}
        return self._processes.start_worker("proofs.killed_app", env=env, ready_timeout=None)

    def _publish(self) -> None:
        """See to it that there is something to fetch."""
        with self._connection.Producer() as producer:
            for _ in range(BACKLOG - self._redis.llen("celery")):
                self._publish_one(producer)

    def _publish_one(self, producer: Producer) -> None:
        self._published += 1
        headers = {"lang": "py", "task": "ran", "id": f"task-{self._published}"}
        producer.publish(([self._published], {}, {}), routing_key="celery", headers=headers)

    def _kill(self, worker: WorkerProcess, death: Death) -> None:
        """Kill a worker at a random instant of its life, publishing until then."""
        if death is Death.STARTING:
            deadline = time.monotonic() + self._random.uniform(0, STARTING_S)
        else:
            worker.wait_for_log("ready.", 60)
            deadline = time.monotonic() + self._random.uniform(0, RUNNING_S)
        while (left := deadline - time.monotonic()) > 0:
            if death is not Death.IDLE:
                self._publish()
            time.sleep(min(left, 0.05))
        if death is Death.IDLE:
            wait_until(lambda: not self._redis.llen("celery"), timeout=QUIET_S, message="the queue to be empty")
        if death in (Death.FROZEN, Death.IDLE):
            worker.stop_signal()
            with self._connection.Producer() as producer:
                for _ in range(FOR_THE_FROZEN):
                    self._publish_one(producer)
        self._end(worker)

    def _end(self, worker: WorkerProcess) -> None:
        self._processes.end(worker)
        self._note(worker)

    def _note(self, worker: WorkerProcess) -> None:
        """Count what a worker says it gave back, which shows that the kills hit something."""
        self._recovered += sum(int(count) for count in re.findall(r"Recovered (\d+) messages of", worker.log()))

    def _settle(self, worker: WorkerProcess, deaths: Counter[Death]) -> Outcome:
        """Have the last worker run all there is, and stop it."""
        killed_at = time.monotonic()
        wait_until(self._is_quiet, timeout=QUIET_S + 0.05 * self._published, message="the queue to be empty")
        took_s = time.monotonic() - killed_at
        worker.terminate()
        worker.wait(30)
        self._note(worker)
        runs = Counter(int(line) for line in self._ran.read_text().split())
        late = self._redis.hlen("unacked")
        keys = sorted(key.decode() for key in self._redis.scan_iter())
        return Outcome(
            published=self._published,
            lost=self._published - len(runs) - late,
            late=late,
            doubled=sum(count - 1 for count in runs.values()),
            left=tuple(key for key in keys if not key.startswith(HARMLESS)),
            deaths=deaths,
            recovered=self._recovered,
            last_recovered_s=took_s,
        )

    def _is_quiet(self) -> bool:
        """Nothing waits, nobody holds anything, and of the consumers only the last worker's is still known."""
        return (
            not self._redis.llen("celery")
            and not any(self._redis.scan_iter("_sidejob.held.*"))
            and self._redis.zcard("_sidejob.consumers") <= 1
        )
