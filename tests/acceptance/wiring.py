"""Lines of jobs wired by ports and channels, through which packets pass while workers are killed.

Each job enters a packet into a table in the transaction of the unit that reads it and hands it on. So the table shows
what has counted, whatever died: of each job every packet once, in the order in which they came.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from celery_sidejob import Job
from tests.acceptance.scene import Scene
from tests.tools.workers import WorkerProcess

APP, TASK, QUEUE = "tests.acceptance.wired_app", "wired.node", "wired"
STAGES = 5
"""Jobs of a line; the links are ports and channels in turn."""
SETTINGS = {
    "SIDEJOB_LEASE": "6",
    "SIDEJOB_HEARTBEAT_INTERVAL": "1",
    "SIDEJOB_LOST_AFTER": "5",
    "SIDEJOB_MAX_LOSSES": "1000",
}
ENTRIES = """
CREATE TABLE public.entries (id bigint GENERATED ALWAYS AS IDENTITY, job bigint, run bigint, packet bigint)"""
WRITTEN_AT_ONCE = 10
TICK_S = 0.2


class Wiring:
    """Workers, lines of jobs, and a client that writes to the first of each."""

    def __init__(self, scene: Scene, *, workers: int, seed: int, say: Callable[[str], None] = print) -> None:
        self._scene = scene
        self._dice = random.Random(seed)
        self._say = say
        self._begun = time.monotonic()
        self.kills = 0
        scene.sql(ENTRIES)
        self._workers = [self._worker(ready_timeout=60)]
        self._workers += [self._worker() for _ in range(workers - 1)]
        self.lines: list[list[Job]] = []

    def lay(self, lines: int) -> None:
        """Make the jobs, the last of each line first: a job has to know the next one."""
        stages: list[list[Job]] = []
        for stage in reversed(range(STAGES)):
            following = stages[0] if stages else [None] * lines
            items = [self._node(stage, line, job) for line, job in enumerate(following)]
            stages.insert(0, self._scene.sidejob.enqueue_many(items))
        self.lines = [list(line) for line in zip(*stages, strict=True)]

    def _node(self, stage: int, line: int, following: Any) -> dict[str, Any]:
        """A job's options: it hands on by a port to the next one, or by the channel to which that subscribes."""
        by_port = stage % 2 == 0 and stage < STAGES - 1
        channel = f"/wired/{line}/{stage}"
        return {
            "task": TASK,
            "queue": QUEUE,
            "args": (following.id if by_port else None, line % 4 != 0),
            "inports": {"in": {"channels": [f"/wired/{line}/{stage - 1}"] if stage % 2 == 0 and stage else []}},
            "outports": {"out": {"channels": [] if by_port or stage == STAGES - 1 else [channel]}},
        }

    def pass_through(
        self, packets: int, *, kill_every_s: float, kills: int | None = None, stuck_after_s: float
    ) -> None:
        """Write so many packets to each line, and kill workers, until every job has entered them all.

        With a number of `kills` there are so many, before and after that.
        """
        total = packets * STAGES * len(self.lines)
        writing = self._write(packets)
        since, seen, killed_at = time.monotonic(), 0, time.monotonic()
        while True:
            next(writing, None)
            if time.monotonic() - killed_at > kill_every_s and self.kills != kills:
                killed_at = time.monotonic()
                self._kill()
            entered = self._scene.sql("SELECT count(*) AS n FROM public.entries")[0].n
            if entered > seen:
                since, seen = time.monotonic(), entered
            if entered >= total and self.kills >= (kills or 0):
                return
            if entered < total and time.monotonic() - since > stuck_after_s:
                raise AssertionError(f"{entered} of {total} packets are entered, and for {stuck_after_s:g} s none more")

    def _write(self, packets: int) -> Iterator[None]:
        """Write a part of the packets to each line at a time."""
        for first in range(0, packets, WRITTEN_AT_ONCE):
            for line in self.lines:
                line[0].input("in").write_many(range(first, min(first + WRITTEN_AT_ONCE, packets)))
            yield
        while True:
            time.sleep(TICK_S)
            yield

    def _kill(self) -> None:
        """Kill a worker that is ready, and start another in its place."""
        ready = [worker for worker in self._workers if " ready." in worker.log()]
        if not ready:
            return
        worker = self._dice.choice(ready)
        self._workers.remove(worker)
        self._scene.processes.end(worker)
        self._workers.append(self._worker())
        self.kills += 1
        if self.kills % 10 == 0:
            entered = self._scene.sql("SELECT count(*) AS n FROM public.entries")[0].n
            self._say(f"{time.monotonic() - self._begun:7.0f} s  {self.kills} kills, {entered} packets entered")

    def judge(self, packets: int) -> list[str]:
        """Return what is wrong: each job must have entered every packet once, in order, and nothing may be left."""
        rows = self._scene.sql("SELECT job, array_agg(packet ORDER BY id) AS packets FROM public.entries GROUP BY job")
        entered = {row.job: row.packets for row in rows}
        wanted = list(range(packets))
        wrong = [
            f"job {job.id}, stage {stage} of line {number}, entered {entered.get(job.id)}"
            for number, line in enumerate(self.lines)
            for stage, job in enumerate(line)
            if entered.get(job.id) != wanted
        ]
        left = self._scene.sql(
            "SELECT o.job_id, o.direction, array_agg(p.value::text::bigint ORDER BY p.id) AS packets"
            " FROM packets p JOIN ports o ON o.id = p.port_id GROUP BY o.id"
        )  # nobody reads the output ports: what was written there stays beside what was published
        wrong += [
            f"left on port {row.direction} of job {row.job_id}: {row.packets}"
            for row in left
            if row.direction == "in" or row.packets != wanted
        ]
        return wrong + [f"in the dead set: {entry}" for entry in self._scene.sidejob.dead.list(limit=10)]

    def _worker(self, ready_timeout: float | None = None) -> WorkerProcess:
        env = {**self._scene.env, **SETTINGS}
        return self._scene.processes.start_worker(APP, env=env, pool="solo", queues=QUEUE, ready_timeout=ready_timeout)
