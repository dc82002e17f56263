"""What a claim costs in a managed queue, against a claim by name, with few and with a million jobs waiting.

All queues are in one store, and take turns, so each ratio is of one run. `python -m benchmarks permits [--waiting N]
[--times N]`.
"""

from __future__ import annotations

import argparse
import statistics
import time
import uuid
from typing import Any

import psycopg
from celery import Celery

from celery_sidejob import SideJob, embedded
from celery_sidejob.model.status import RunEnd
from celery_sidejob.operations.runs import endings, runs
from celery_sidejob.operations.runs.endings import Ending
from celery_sidejob.operations.runs.runs import Unit
from celery_sidejob.store import workers
from celery_sidejob.store.schema.migrate import upgrade

FEW = 10
KEYS = 100
ALLOWED = (0.8, 1.1)
"""A managed claim may take 1 / 0.8 of one by name, and with many waiting 1.1 times that with few."""

FILL = """
INSERT INTO sidejob.jobs (task, queue, priority, status, wakes, limit_key)
  SELECT 'noop', '{queue}', n % 10, 'queued', 1, {key} FROM generate_series(1, {rows}) n;
INSERT INTO sidejob.askings (task_id, job_id)
  SELECT gen_random_uuid()::text, id FROM sidejob.jobs WHERE queue = '{queue}';
INSERT INTO sidejob.messages (task_id, job_id, for_run, queue, check_interval, rank, limit_key, published_at,
    next_check_at)
  SELECT a.task_id, j.id, 1, j.queue, '1 h', j.priority, j.limit_key, now(), now() + interval '1 h'
  FROM sidejob.jobs j JOIN sidejob.askings a ON a.job_id = j.id WHERE j.queue = '{queue}'"""


def main(arguments: list[str]) -> int | None:
    """Measure, and print a table; 1 if a bound is not met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks permits", description=__doc__)
    parser.add_argument("--waiting", type=int, default=1_000_000)
    parser.add_argument("--times", type=int, default=400)
    options = parser.parse_args(arguments)
    with embedded.Postgres(durable=True) as server:
        bench = Bench(server.url, options.waiting)
        try:
            return bench.measure(options.times)
        finally:
            bench.close()


class Bench:
    """A store with queues of each kind."""

    def __init__(self, url: str, waiting: int) -> None:
        upgrade(url)
        self._app = Celery("permits", broker="memory://", set_as_current=False)
        self._app.conf.update(sidejob_database_url=url, task_ignore_result=True)
        self._sidejob = SideJob(self._app)
        self._task = self._sidejob.task(noop, name="noop")
        self._runtime = self._sidejob.runtime
        self._worker_id = workers.register(self._runtime.connections, str(uuid.uuid4()))
        key = f"'k' || n % {KEYS}"
        with psycopg.connect(url, autocommit=True) as connection:
            kinds: tuple[tuple[str, int, bool, dict[str, Any] | None], ...] = (
                ("by name", FEW, False, None),
                ("ordered, few wait", FEW, False, {"ordered": True}),
                ("ordered, many wait", waiting, False, {"ordered": True}),
                ("limited, few wait", FEW, False, {"limit": 100}),
                ("limited, many wait", waiting, False, {"limit": 100}),
                (f"{KEYS} keys, many wait", waiting // 10, True, {"limit_per_key": 100}),
            )
            for name, rows, keyed, settings in kinds:
                if settings is not None:
                    self._sidejob.queue(name).configure(**settings)
                for statement in FILL.format(queue=name, rows=rows, key=key if keyed else "NULL").split(";"):
                    connection.execute(statement)
            connection.execute("VACUUM ANALYZE")
        self.names = ["by name", *(queue.name for queue in self._sidejob.queues())]

    def measure(self, times: int) -> int:
        """Claim and end one job of each queue in turn."""
        seconds: dict[str, list[float]] = {name: [] for name in self.names}
        for _ in range(times):
            for name in self.names:
                job = self._sidejob.enqueue(self._task, queue=name, priority=9)
                begun = time.perf_counter()
                hold = runs.claim(
                    self._runtime, job.id, task="noop", for_run=1, worker_id=self._worker_id, queue=name,
                    tasks=lambda: ("noop",),
                )  # fmt: skip
                seconds[name].append(time.perf_counter() - begun)
                assert hold is not None
                endings.end(self._runtime, hold, Unit(), Ending(RunEnd.COMPLETED))
        medians = {name: statistics.median(taken) for name, taken in seconds.items()}
        print(f"{'claims':28}{'ms':>8}{'by name / this':>16}")
        for name, median in medians.items():
            print(f"{name:28}{median * 1000:8.3f}{medians['by name'] / median:16.2f}")
        managed = medians["by name"] / medians["ordered, few wait"]
        deep = medians["ordered, many wait"] / medians["ordered, few wait"]
        print(f"many wait / few wait: ordered {deep:.2f}, limited "
              f"{medians['limited, many wait'] / medians['limited, few wait']:.2f}")  # fmt: skip
        return int(managed < ALLOWED[0] or deep > ALLOWED[1])

    def close(self) -> None:
        """Close the connections."""
        self._sidejob.close()


def noop(job: Any) -> None:
    """Do nothing."""
