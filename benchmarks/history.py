"""What history and statistics cost a run: the same runs with both and with neither, on one Postgres, in turns.

A run is claimed and ended in this process, without a broker and a body: nothing hides what the store does. `python
-m benchmarks history [--runs N] [--rounds N]`.
"""

from __future__ import annotations

import argparse
import time
import uuid
from typing import Any

from celery import Celery

from benchmarks.turns import Median, take_turns
from celery_sidejob import Job, SideJob, embedded
from celery_sidejob.model.status import RunEnd
from celery_sidejob.operations.runs import endings, runs
from celery_sidejob.operations.runs.endings import Ending
from celery_sidejob.operations.runs.runs import Unit
from celery_sidejob.store import workers
from celery_sidejob.store.measured import MeasuredConnections
from celery_sidejob.store.schema.migrate import upgrade

ALLOWED = 1.05
"""How much longer a run may take with both."""


class Side:
    """Runs in a schema of its own, with a history of so many runs and statistics, or (0) with neither."""

    def __init__(self, url: str, history: int) -> None:
        schema = f"with_{history}"
        upgrade(url, schema)
        app = Celery(schema, broker="memory://", set_as_current=False)
        app.conf.update(
            sidejob_database_url=url, sidejob_schema=schema, sidejob_history=history,
            sidejob_stats_history=30 if history else 0, task_ignore_result=True,
        )  # fmt: skip
        self.sidejob = SideJob(app)
        self._task = self.sidejob.task(noop, name="noop")
        self._runtime = self.sidejob.runtime
        connections = self._runtime.connections
        assert isinstance(connections, MeasuredConnections)
        connections.measures.begin()  # as a worker's process does
        self._worker_id = workers.register(self._runtime.connections, str(uuid.uuid4()))
        self._old = self.sidejob.enqueue(self._task)

    def once(self, count: int) -> float:
        """Make so many jobs and run each once; returns the seconds of one."""
        begun = time.perf_counter()
        for _ in range(count):
            self._run(self.sidejob.enqueue(self._task), 1)
        return (time.perf_counter() - begun) / count

    def again(self, count: int) -> float:
        """Run one job so many times; returns the seconds of one."""
        run_no = self._old.refresh().info["run_no"]
        begun = time.perf_counter()
        for number in range(run_no + 1, run_no + 1 + count):
            self._old.run()
            self._run(self._old, number)
        return (time.perf_counter() - begun) / count

    def _run(self, job: Job, number: int) -> None:
        hold = runs.claim(self._runtime, job.id, task="noop", for_run=number, worker_id=self._worker_id)
        assert hold is not None
        endings.end(self._runtime, hold, Unit(), Ending(RunEnd.COMPLETED))


def main(arguments: list[str]) -> int | None:
    """Measure, and print a table; 1 if a run takes too long."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks history", description=__doc__)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=31)
    options = parser.parse_args(arguments)
    late = False
    with embedded.Postgres(durable=True) as server:
        sides = {history: Side(server.url, history) for history in (100, 0)}
        for what in ("once", "again"):
            found = take_turns(
                {str(history): _turn(side, what, options.runs) for history, side in sides.items()}, options.rounds
            )
            ratio = Median.of_ratios(found["100"], found["0"])
            kind = "jobs that run once" if what == "once" else "one job that runs again and again"
            without, with_it = (Median.of(found[side]).middle * 1000 for side in ("0", "100"))
            shown = f"{ratio.middle:.3f} ({ratio.lower:.3f} to {ratio.upper:.3f})"
            print(f"{kind:36}{without:8.3f} ms without, {with_it:8.3f} ms with both: {shown}")
            late = late or ratio.middle > ALLOWED
        for side in sides.values():
            side.sidejob.close()
    return int(late)


def _turn(side: Side, what: str, runs_: int) -> Any:
    return lambda: getattr(side, what)(runs_)


def noop(job: Any) -> None:
    """Do nothing."""
