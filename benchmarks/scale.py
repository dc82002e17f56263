"""Enqueue, claim and end beside a million finished and a million waiting jobs, and in an empty store, in turns."""

from __future__ import annotations

import argparse
import re
import time
import uuid
from collections.abc import Callable
from statistics import median
from typing import Any

import psycopg
from celery import Celery

from celery_sidejob import SideJob, embedded
from celery_sidejob.model.status import RunEnd
from celery_sidejob.operations.runs import endings, runs
from celery_sidejob.operations.runs.endings import Ending
from celery_sidejob.operations.runs.runs import Unit
from celery_sidejob.store import claims, jobs, run_ends, workers
from celery_sidejob.store.schema.migrate import upgrade

ALLOWED = 1.25
"""How much slower a step may be in the full store."""

FILL = """
INSERT INTO sidejob.jobs (task, queue, status, run_no, ended_run)
  SELECT 'noop', 'old', 'completed', 1, 1 FROM generate_series(1, {rows});
INSERT INTO sidejob.jobs (task, queue) SELECT 'noop', 'elsewhere' FROM generate_series(1, {rows});
INSERT INTO sidejob.messages (task_id, job_id, for_run, queue, published_at, next_check_at, check_interval)
  SELECT 'm' || id, id, 1, queue, now(), now() + interval '1 hour', '30 s' FROM sidejob.jobs WHERE status = 'queued';
INSERT INTO sidejob.askings (task_id, job_id) SELECT 'm' || id, id FROM sidejob.jobs WHERE status = 'queued';
VACUUM ANALYZE sidejob.jobs, sidejob.messages, sidejob.askings"""

SHOWN = {"enqueue": jobs._INSERT, "claim": claims._CLAIM, "end": run_ends._END}


def main(arguments: list[str]) -> None:
    """Measure, print the medians and the plans; exit with 1 if a step is too slow."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks scale", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args(arguments)
    with embedded.Postgres(durable=True) as server:
        empty, full = Side(server.url, "empty"), Side(server.url, "full")
        begun = time.perf_counter()
        full.fill(given.rows)
        print(f"filled with 2 x {given.rows} jobs in {time.perf_counter() - begun:.0f} s")
        for number in range(given.rounds + 1):
            for side in (empty, full) if number % 2 else (full, empty):
                side.measure(20, keep=number > 0)
        slow = False
        for step in SHOWN:
            without, with_all = median(empty.seconds[step]) * 1e6, median(full.seconds[step]) * 1e6
            slow |= with_all > ALLOWED * without
            print(f"{step:8} p50 {without:7.0f} us empty {with_all:7.0f} us full: {with_all / without:.2f} times")
        for step, plan in full.plans().items():
            print(f"\n{step}\n{plan}")
        empty.close()
        full.close()
    if slow:
        raise SystemExit(f"a step takes more than {ALLOWED} times as long in the full store")


class Side:
    """One store."""

    def __init__(self, admin_url: str, name: str) -> None:
        with psycopg.connect(admin_url, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        self._url = re.sub(r"/[^/?]*(\?|$)", rf"/{name}\1", admin_url)
        upgrade(self._url)
        app = Celery(name, broker="memory://", set_as_current=False)
        app.conf.update(sidejob_database_url=self._url, task_ignore_result=True)
        self._sidejob = SideJob(app)
        self._sidejob.task(_noop, name="noop")
        self._runtime = self._sidejob.runtime
        self._worker_id = workers.register(self._runtime.connections, str(uuid.uuid4()))
        self.seconds: dict[str, list[float]] = {step: [] for step in SHOWN}

    def fill(self, rows: int) -> None:
        """Make as many finished and as many waiting jobs."""
        with psycopg.connect(self._url, autocommit=True) as connection:
            for statement in FILL.format(rows=rows).split(";"):
                connection.execute(statement)

    def measure(self, times: int, *, keep: bool) -> None:
        """Make, claim and end so many jobs, one after the other."""
        for _ in range(times):
            job = self._timed("enqueue", keep, lambda: self._sidejob.enqueue("noop"))
            hold = self._timed("claim", keep, lambda job=job: runs.claim(
                self._runtime, job.id, task="noop", for_run=1, worker_id=self._worker_id))  # fmt: skip
            self._timed("end", keep, lambda hold=hold: endings.end(
                self._runtime, hold, Unit(), Ending(RunEnd.COMPLETED)))  # fmt: skip

    def plans(self) -> dict[str, str]:
        """The generic plans of the statements behind the steps."""
        found = {}
        with psycopg.connect(self._url, autocommit=True, prepare_threshold=None) as connection:
            connection.execute("SET plan_cache_mode = force_generic_plan")
            for step, statement in SHOWN.items():
                names = sorted(statement.parameters)
                text = re.sub(
                    r"%\((\w+)\)s", lambda m, names=names: f"${names.index(m[1]) + 1}", statement.render("sidejob")
                )
                connection.execute(f"PREPARE shown AS {text}")
                nothing = ", ".join("NULL" for _ in names)
                lines = connection.execute(f"EXPLAIN EXECUTE shown ({nothing})").fetchall()
                found[step] = "\n".join(line for (line,) in lines)
                connection.execute("DEALLOCATE shown")
        return found

    def close(self) -> None:
        """Close the connections."""
        self._runtime.connections.close()

    def _timed(self, step: str, keep: bool, work: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        result = work()
        if keep:
            self.seconds[step].append(time.perf_counter() - begun)
        return result


def _noop(job: Any) -> None:
    """Do nothing."""
