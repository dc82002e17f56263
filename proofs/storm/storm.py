"""One storm, from the first worker to the verdict."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import psycopg

from benchmarks.idle import scalar
from proofs.storm import audit, judge
from proofs.trial.faults import Scenery
from proofs.trial.fleet import Fleet
from proofs.trial.ground import Ground
from proofs.trial.schedule import Schedule
from tests.tools.guard import Guard
from tests.tools.recorder import Record
from tests.tools.workers import Processes

QUEUE = "storm"
TICK_S = 0.2
COUNT_S = 2.0
READY_S = 90.0
QUIET_S = 120.0
"""After the last fault, with workers that are ready, a row must go each time this and the longest wait for a look have
passed, until there are none: a message that died with whoever had received it is found only then. How long a
backlog takes says more about the machine."""
_LEFT = "SELECT count(*) FROM sidejob.messages"
_GONE = "SELECT count(*) FROM storm.moves WHERE move = 'gone'"
_LONGEST_CHECK = """
SELECT coalesce(extract(epoch FROM max(next_check_at - now())), 0)::float
FROM sidejob.messages WHERE locked_by IS NULL"""


class Storm:
    """Calls, faults and a judge on one broker."""

    def __init__(self, *, tasks: int, broker: str, seed: int, rate: float, clients: int, pools: list[str]) -> None:
        self._tasks = tasks
        self._broker = broker
        self._seed = seed
        self._home = Path(tempfile.mkdtemp(prefix="storm-"))
        self._record = Record(self._home / "promises.jsonl")
        self._notes = Record(self._home / "notes.jsonl")
        self._options = {"rate": rate, "clients": clients, "pools": pools}
        self._begun = time.monotonic()

    def run(self) -> list[str]:
        """Storm, print what happened, and return what is wrong."""
        print(f"a storm of {self._tasks} tasks on {self._broker}, seed {self._seed}; logs in {self._home}", flush=True)
        with ExitStack() as stack:
            ground = stack.enter_context(Ground(self._broker, queue=QUEUE, notes=audit.TRIGGERS, results_apart=True))
            processes = Processes(self._home / "processes", stack.enter_context(Guard()))
            stack.callback(processes.kill_all)
            fleet = Fleet(
                ground, processes, self._record, self._notes, self._seed, retention_s=3600.0, say=self._say,
                app="proofs.storm.tasks", client="proofs.storm.client", **self._options,
            )  # type: ignore[arg-type]  # fmt: skip
            wrong = self._storm(fleet)
        if wrong:
            print(f"{len(wrong)} WRONG; everything is in {self._home}:\n" + "\n".join(wrong), flush=True)
        else:
            print("every promise was kept", flush=True)
            shutil.rmtree(self._home)
        return wrong

    def _storm(self, fleet: Fleet) -> list[str]:
        scenery = Scenery(fleet.ground, fleet, random.Random(self._seed))
        fleet.wait_for_workers(READY_S)
        schedule = Schedule(scenery, say=self._say)
        self._begun = counted_at = time.monotonic()
        accepted = 0
        while accepted < self._tasks:
            fleet.tend()
            schedule.tick()
            if time.monotonic() - counted_at > COUNT_S:
                counted_at, accepted = time.monotonic(), self._accepted()
            time.sleep(TICK_S)
        schedule.heal_all()
        self._say(f"{accepted} tasks are accepted; faults and calls end")
        fleet.dismiss("client", "beat")
        quiet = self._settle(fleet)
        fleet.dismiss("worker")
        lines = self._record.read() + self._notes.read()
        stories = audit.read(fleet.ground.database_url, lines)
        wrong = quiet + judge.judge(stories, lines).wrong
        if wrong:
            self._keep_evidence(fleet)
        self._tell(stories, lines, schedule)
        return wrong

    def _accepted(self) -> int:
        return sum(len(line["ids"]) for line in self._record.of("accepted"))

    def _settle(self, fleet: Fleet) -> list[str]:
        """Wait until nothing is kept any more; return what is wrong with that."""
        begun = time.monotonic()
        try:
            fleet.wait_for_workers(READY_S)
            with psycopg.connect(fleet.ground.database_url, autocommit=True) as connection:
                gone, since = scalar(connection, _GONE), time.monotonic()
                while left := scalar(connection, _LEFT):
                    fleet.tend()
                    time.sleep(TICK_S)
                    before, gone = gone, scalar(connection, _GONE)
                    if gone > before:
                        since = time.monotonic()
                    elif time.monotonic() - since > (within_s := QUIET_S + scalar(connection, _LONGEST_CHECK)):
                        return [f"{left} rows are kept, and for {within_s:.0f} s none has gone"]
        except TimeoutError as error:
            return [str(error)]
        self._say(f"quiet after {time.monotonic() - begun:.1f} s")
        return []

    def _keep_evidence(self, fleet: Fleet) -> None:
        with psycopg.connect(fleet.ground.database_url, autocommit=True) as connection:
            for table in ("sidejob.messages", "sidejob.workers", "sidejob.dead", "storm.moves"):
                rows = connection.execute(f"SELECT row_to_json(t)::text FROM {table} t").fetchall()
                (self._home / f"{table}.jsonl").write_text("".join(f"{row}\n" for (row,) in rows))

    def _tell(self, stories: dict[str, audit.Story], lines: list[dict[str, object]], schedule: Schedule) -> None:
        events = Counter(line["event"] for line in lines)
        outcomes = Counter(outcome for story in stories.values() for outcome in story.outcomes)
        moves = Counter(move.move for story in stories.values() for move in story.moves)
        figures = {
            "seconds": round(time.monotonic() - self._begun),
            "calls accepted, tasks in them": f"{events['accepted']}, {self._accepted()}",
            "calls whose answer was lost": events["unknown"],
            "tasks kept": len(stories),
            "how they ended": dict(outcomes.most_common()),
            "bodies that began": events["begins"],
            "runs given back or lost": moves["released"],
            "called lost, and ended well after all": moves["dug out"],
            "faults": len(schedule.history),
            "of kinds": dict(Counter(happening.name for happening in schedule.history).most_common()),
        }
        for what, value in figures.items():
            print(f"{what:40} {value if not isinstance(value, dict) else json.dumps(value)}", flush=True)

    def _say(self, what: str) -> None:
        print(f"{time.monotonic() - self._begun:8.1f} s  {what}", flush=True)
