"""One storm of kills on one broker, and what came of everything that was asked for."""

from __future__ import annotations

import enum
import os
import random
import signal
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import ExitStack, suppress
from pathlib import Path

from benchmarks.servers import started_broker
from celery_sidejob import Job, embedded
from proofs.runs import judge
from tests.acceptance import checker
from tests.acceptance.scene import Scene
from tests.tools.databases import prepare_template
from tests.tools.fork_server import ForkServers
from tests.tools.guard import Guard
from tests.tools.recorder import Record
from tests.tools.workers import ROOT, Processes, WorkerProcess, environment

APPS = {"prefork": ("proofs.runs.tasks", 2), "asyncio": ("proofs.runs.awaited_tasks", 30)}
"""The app of each pool, and how many bodies a worker of it runs at a time."""
WORKERS = 4
BACKLOG = 30
"""How many jobs and tasks are open at a time."""
GAP_S = (0.0, 0.6)
"""Between two kills."""
DYING_S = 5.0
"""After which the rest of a worker whose main process was killed is ended."""
QUIET_S = 240.0
SETTINGS = {"SIDEJOB_MAX_LOSSES": "1000000", "SIDEJOB_LOST_AFTER": "5"}


class Kill(enum.StrEnum):
    """What is killed."""

    PROCESS = "processes of a pool"
    MAIN = "main processes"
    WORKER = "workers with all their processes"


HOW_OFTEN = {Kill.PROCESS: 0.5, Kill.MAIN: 0.25, Kill.WORKER: 0.25}
KINDS = {"order": 4, "turns": 2, "units": 3, "quiet": 4, "again": 4, "once": 4}
"""What is asked for, and how often."""


def run(kind: str, kills: int, *, seed: int, pool: str = "prefork") -> int:
    """Kill so many on a broker of this kind, print what came of it, and return 1 if a promise was broken."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        postgres = stack.enter_context(embedded.Postgres(durable=False))
        prepare_template(postgres.url)
        broker = stack.enter_context(started_broker(kind, postgres.url))
        forks = stack.enter_context(ForkServers(environment({}), root=ROOT))
        processes = Processes(home / "processes", stack.enter_context(Guard()), forks)
        stack.callback(processes.kill_all)
        scene = Scene(postgres.url, broker, Record(home / "record.jsonl"), processes)
        stack.callback(scene.close)
        scene.sql(judge.TRIGGERS)
        storm = Storm(scene, home / "noted", random.Random(seed), pool)
        storm.run(kills)
        found = storm.judge()
    print(f"{kind}, {pool}: {found}", flush=True)
    return 1 if found.wrong else 0


class Storm:
    """Asks, kills, and judges."""

    def __init__(self, scene: Scene, noted: Path, dice: random.Random, pool: str) -> None:
        self._scene = scene
        self._pool = pool
        self._noted = noted
        self._dice = dice
        self._workers: list[WorkerProcess] = []
        self._dying: list[tuple[float, WorkerProcess]] = []
        self._kills = Counter[Kill]()
        self._asked = 0
        self._jobs: dict[str, dict[int, Job]] = defaultdict(dict)
        """By kind and key."""
        self._tasks: dict[str, str] = {}
        """The kind of each durable task, by its id."""

    def run(self, kills: int) -> None:
        """Kill so many, then wait until everything is done."""
        for _ in range(WORKERS):
            self._start()
        self._workers[0].wait_for_log("ready.", 60)  # the tasks are registered then
        began = time.monotonic()
        while self._kills.total() < kills:
            until = time.monotonic() + self._dice.uniform(*GAP_S)
            self._ask()
            time.sleep(max(0.0, until - time.monotonic()))
            self._kill()
            if self._kills.total() % 50 == 0:
                print(f"  {self._kills.total()} kills, {time.monotonic() - began:.0f} s", flush=True)
        self.took_s = time.monotonic() - began
        for _ in range(WORKERS - len(self._workers)):
            self._start()
        deadline = time.monotonic() + QUIET_S
        while (left := self._scene.sql(judge.OPEN)) and time.monotonic() < deadline:
            time.sleep(0.2)
        self.left = [f"{one}" for one in left]
        if not left:
            checker.wait_quiet(self._scene.eye, QUIET_S)

    def judge(self) -> judge.Outcome:
        """Compare what there is with what there must be."""
        eye = self._scene.eye
        jobs = {kind: {key: job.id for key, job in made.items()} for kind, made in self._jobs.items()}
        outcome = judge.judge(eye, self._noted.read_text(), jobs, self._tasks, checker.violations(eye, at_rest=True))
        outcome.complain("never ends", self.left)
        outcome.kills, outcome.took_s = self._kills, self.took_s
        return outcome

    def _start(self) -> None:
        env = {**self._scene.env, **SETTINGS, "NOTED": str(self._noted)}
        processes = self._scene.processes
        app, concurrency = APPS[self._pool]
        made = processes.start_worker(app, env=env, pool=self._pool, concurrency=concurrency, ready_timeout=None)
        self._workers.append(made)

    # -- what is asked for -------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        for _ in range(BACKLOG - len(self._scene.sql(judge.OPEN))):
            (kind,) = self._dice.choices(list(KINDS), list(KINDS.values()))
            self._asked += 1
            self._ask_for(kind, self._asked)

    def _ask_for(self, kind: str, key: int) -> None:
        if kind in ("again", "once"):
            self._tasks[self._scene.app.send_task(f"acceptance.{kind}_task", (key,)).id] = kind
            return
        job = self._scene.sidejob.enqueue(f"runs.{kind}", (key,) if kind in ("order", "quiet") else ())
        if kind == "order":
            job.input("answers").write(key)
        elif kind != "quiet":
            job.input("packets").write_many(judge.packets_of(key))
        self._jobs[kind][key] = job

    # -- kills ---------------------------------------------------------------------------------------------------------

    def _kill(self) -> None:
        (kill,) = self._dice.choices(list(HOW_OFTEN), list(HOW_OFTEN.values()))
        worker = self._dice.choice(self._workers)
        if kill is Kill.PROCESS and self._pool == "asyncio":  # it has no processes
            kill = Kill.MAIN
        if kill is Kill.PROCESS:
            pids = [pid for one in self._workers for pid in one.children()]
            if not pids:
                return
            with suppress(ProcessLookupError):
                os.kill(self._dice.choice(pids), signal.SIGKILL)
                self._kills[kill] += 1
            return
        self._workers.remove(worker)
        self._start()
        if kill is Kill.MAIN:
            worker.kill()
            self._dying.append((time.monotonic() + DYING_S, worker))
        else:
            self._scene.processes.end(worker)
        self._kills[kill] += 1
        for at, dying in list(self._dying):
            if at < time.monotonic():
                self._dying.remove((at, dying))
                self._scene.processes.end(dying)
