"""The accidents of the demo: a worker is killed, the broker is emptied; and how long recovery takes."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime

from census_demo.brokers import Broker
from census_demo.store import Store
from census_demo.workers import CeleryProcess, Workers

KILL_AT, KILL_BY = 0.3, 0.55
EMPTY_AT = 0.6
"""The part of the jobs that is done at each accident; the kill comes later than `KILL_AT` on a young Postgres."""
YOUNG_S = 10.0
"""The age of a Postgres up to which a free lock means nothing."""
TRIES = 500
SETTLED_AFTER_S = 0.1
"""After this time Postgres has executed the last statements of a frozen worker."""


@dataclass
class Loss:
    """Runs that must begin again, {job id: run number}, and the seconds until each was queued again and until it began.

    A run that is queued again waits in the queue like every other, for longer than it takes to notice the loss.
    """

    what: str
    thing: str
    at: datetime
    awaited: dict[int, int]
    announced: dict[int, float] = field(default_factory=dict)
    back: dict[int, float] = field(default_factory=dict)

    def look(self, store: Store) -> None:
        """Note which runs were queued again, or began, since the last call."""
        for job_id, run in store.runs(self.awaited).items() if self.awaited else ():
            if run.announced_at is not None and run.announced_at > self.at:
                self.announced.setdefault(job_id, (run.announced_at - self.at).total_seconds())
            if run.began_at is not None and run.number >= self.awaited[job_id]:
                del self.awaited[job_id]
                self.back[job_id] = (run.began_at - self.at).total_seconds()

    @property
    def extent(self) -> str:
        """How many were lost."""
        return _number(len(self.awaited) + len(self.back), self.thing)


class Accidents:
    """Kills a worker and later empties the broker, each once, when a given part of the census is done."""

    def __init__(self, store: Store, workers: Workers, broker: Broker, queue: str) -> None:
        self._store = store
        self._workers = workers
        self._broker = broker
        self._queue = queue
        self._killed = self._emptied = False
        self.losses: list[Loss] = []
        self.recovered: dict[int, str] = {}
        """The jobs whose run was lost with the killed worker, each with a sentence that says so."""
        self.notes: list[str] = []
        """Remarks on the times."""

    def happen(self, done: float) -> str | None:
        """Cause the accident that is due when this part of the census is done, and return a sentence about it."""
        self.look()
        if not self._killed:
            if done >= KILL_BY or (done >= KILL_AT and self._store.age_s() > YOUNG_S + 1):
                self._killed = True
                return self._kill_a_worker()
        elif not self._emptied and done >= EMPTY_AT:
            self._emptied = True
            return self._empty_the_broker()
        return None

    def look(self) -> None:
        """Note which losses have been recovered from."""
        for loss in self.losses:
            loss.look(self._store)

    def _kill_a_worker(self) -> str:
        """Kill a worker in the middle of a run. Runs are short, so we look until we find one."""
        sweeper, age_s = self._store.sweeper(), self._store.age_s()
        worker, at, lost = self._meet_a_run()
        self.losses.append(Loss(f"kill -9 of {worker.name}", "run", at, lost))
        self.recovered = dict.fromkeys(lost, f"its run was lost with {worker.name}, and begun again")
        if age_s < YOUNG_S - 1:
            self.notes.append(
                f"Postgres was {int(age_s)} s old at the kill. In its first ten seconds a free lock is no proof that a "
                "worker is dead: later it takes two to four seconds."
            )
        role = ", the one that sweeps" if worker.pid == sweeper else ""
        return (
            f"kill -9 of {worker.name}, process {worker.pid}{role}, with {_number(len(lost), 'run')} under way; "
            "the other worker goes on alone"
        )

    def _meet_a_run(self) -> tuple[CeleryProcess, datetime, dict[int, int]]:
        """Kill the first worker found in a run; returns it, the time, and the runs that must begin.

        All workers are frozen while we look, so that even a census of a few files is not over before we find one.
        """
        for attempt in range(TRIES):
            with ExitStack() as still:
                for worker in self._workers.workers:
                    still.enter_context(worker.frozen())
                for worker in self._workers.workers:
                    if self._holds(worker) or attempt == TRIES - 1:
                        at, held = self._store.now(), self._store.held_by(worker.pid)
                        self._workers.kill(worker)
                        return worker, at, {job_id: run_no + 1 for job_id, run_no in held.items()}
            time.sleep(0.001)
        raise AssertionError("the last attempt kills a worker")

    def _holds(self, worker: CeleryProcess) -> bool:
        """Tell whether a frozen worker is in the middle of a run, and has not just sent its end."""
        if not self._store.held_by(worker.pid):
            return False
        time.sleep(SETTLED_AFTER_S)
        return bool(self._store.held_by(worker.pid))

    def _empty_the_broker(self) -> str:
        at = self._store.now()
        gone = self._broker.empty(self._queue)
        if gone is None:
            return "the broker is not ours, so it is not emptied"
        runs = self._store.runs(gone.announced)
        lost = {job_id: for_run for job_id, for_run in gone.announced.items() if runs[job_id].number < for_run}
        self.losses.append(Loss("broker emptied", "message", at, lost))
        messages = _number(gone.messages, "message")
        return f"emptied the broker: {messages} gone, {len(lost):,} of them for runs that had not begun"


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
