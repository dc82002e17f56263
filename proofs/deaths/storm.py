"""One storm: two workers, a sender, and what happens to them."""

from __future__ import annotations

import itertools
import json
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import psycopg
from kombu import Connection
from kombu.exceptions import BatchPublishError

import celery_sidejob.transport  # noqa: F401  # makes sidejobpg:// known
from celery_sidejob import embedded
from celery_sidejob.transport.postgres.link import APPLICATION
from proofs.deaths.accidents import Accident
from proofs.deaths.judge import Happened, Outcome, begins_in, doubled
from tests.tools.brokers import in_postgres
from tests.tools.proxy import TcpProxy
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes, WorkerProcess

BACKLOG = 200
"""How many messages wait at any time, and twice as many at most."""
STARTING_S, RUNNING_S = 2.0, 0.7
"""Within which time of its start, or of its readiness, a worker is killed."""
TIMEOUT_S = 3.0
"""The workers' `consumer_timeout`."""
QUIET_S = 120.0
PRIORITIES = 10
LAST = 200
"""How many messages are sent at the end to see their order."""
TASKS = ("begun", "begun_early")
SETTINGS = {
    "broker_connection_retry_on_startup": True,
    "broker_connection_max_retries": None,
    "broker_transport_options": {"consumer_timeout": TIMEOUT_S, "delivery_limit": None},
}
_END = f"""
SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity a
WHERE a.application_name = '{APPLICATION}' AND a.state = 'active' LIMIT 1"""
_DEADLOCKS = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
_LEFT = """
SELECT 'consumer ' || ident FROM sidejob.broker_consumers UNION ALL
SELECT 'message ' || id || ' in ' || queue FROM sidejob.broker_messages"""


class Storm:
    """A sender and two workers, each behind a network of its own, on one Postgres."""

    def __init__(self, processes: Processes, postgres: embedded.Postgres, directory: Path, *, seed: int) -> None:
        self.dice = random.Random(seed)
        self._processes = processes
        self._postgres = postgres
        self._url = in_postgres(postgres.url)
        self._ran = directory / "ran"
        self._ran.touch()
        self._numbers = itertools.count()
        self._promised: set[int] = set()
        self._unknown: set[int] = set()
        self._happened: list[Happened] = []
        self._deadlocks = 0
        self._workers: list[WorkerProcess] = []
        self._nets: dict[int, TcpProxy] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._free_nets = [stack.enter_context(TcpProxy.to(self._postgres.url)) for _ in range(3)]
            self._connection = stack.enter_context(Connection(self._url))
            self._connect()
            stack.callback(lambda: self._looking.close())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(self, plan: Sequence[Accident], *, progress: bool = False) -> Outcome:
        """Have all that happen, let one worker finish, and judge."""
        self._send()
        self._start()
        self._start()
        for number, accident in enumerate(plan, start=1):
            self._have(accident)
            if progress and number % 50 == 0:
                print(f"{number} accidents, {len(self._promised)} tasks", flush=True)
        return self._settle(Counter(plan))

    # -- the workers and the sender --------------------------------------------------------------------------------

    def _start(self) -> WorkerProcess:
        net = self._free_nets.pop()
        # The URL keeps the scheme that the proxy knows until it leads there.
        url = in_postgres(net.url_for(self._postgres.url))
        env = {"BROKER_URL": url, "RAN": str(self._ran), "SETTINGS": json.dumps(SETTINGS)}
        worker = self._processes.start_worker("proofs.killed_app", env=env, concurrency=2, ready_timeout=None)
        self._workers.append(worker)
        self._nets[worker.pid] = net
        return worker

    def _end(self, worker: WorkerProcess) -> None:
        self._processes.end(worker)
        self._workers.remove(worker)
        self._free_nets.append(self._nets.pop(worker.pid))

    def _send(self, count: int = BACKLOG, *, priorities: bool = False) -> list[int]:
        """Send messages, all or none, and return their numbers in the order in which they are to begin."""
        numbers = list(itertools.islice(self._numbers, count))
        drawn = [self.dice.randrange(PRIORITIES) if priorities else 0 for _ in numbers]
        try:
            with self._connection.Producer() as producer, producer.batch():
                for number, priority in zip(numbers, drawn, strict=True):
                    headers = {"lang": "py", "task": TASKS[number % 2], "id": f"task-{number}"}
                    producer.publish(
                        ([number], {}, {}), routing_key="celery", headers=headers, serializer="json", priority=priority
                    )
        except (BatchPublishError, *self._connection.connection_errors):
            self._unknown.update(numbers)
            self._connection.close()  # the next use opens another
        else:
            self._promised.update(numbers)
        return [number for _, number in sorted(zip([-one for one in drawn], numbers, strict=True))]

    def _feed(self, until: float) -> None:
        """See to it that there is something to fetch, until then."""
        while time.monotonic() < until:
            if self._waiting() < BACKLOG:
                self._send()
            time.sleep(min(0.05, max(0.0, until - time.monotonic())))

    # -- what happens ------------------------------------------------------------------------------------------------

    def _have(self, accident: Accident) -> None:
        match accident:
            case Accident.SESSION:
                self._end_session()
            case Accident.RESTART:
                self._restart()
            case Accident.FREEZE | Accident.SILENCE:
                self._away(accident)
            case _:
                self._kill(accident)

    def _kill(self, accident: Accident) -> None:
        """Kill the older worker; a third one is there by then."""
        worker, span_s = self._workers[0], RUNNING_S
        self._start()
        if accident is Accident.KILLED_STARTING:
            worker, span_s = self._workers[-1], STARTING_S
        else:
            worker.wait_for_log("ready.", 60)
        self._feed(time.monotonic() + self.dice.uniform(0, span_s))
        self._strike(accident, worker)
        if accident is Accident.KILLED_STOPPED:
            self._send()
        self._end(worker)

    def _end_session(self) -> None:
        """End a session in the middle of a statement: tell once one was caught."""
        self._workers[0].wait_for_log("ready.", 60)
        deadline = time.monotonic() + QUIET_S
        while not self._looking.execute(_END).fetchone():
            if self._waiting() < BACKLOG:
                self._send()
            assert time.monotonic() < deadline, "no session is ever active"
        self._note(Accident.SESSION, self._workers)
        self._feed(time.monotonic() + self.dice.uniform(0, RUNNING_S))

    def _restart(self) -> None:
        self._workers[0].wait_for_log("ready.", 60)
        self._feed(time.monotonic() + self.dice.uniform(0, RUNNING_S))
        self._deadlocks += self._one(_DEADLOCKS)  # which Postgres forgets
        self._looking.close()
        self._postgres.kill()
        self._note(Accident.RESTART, self._workers)
        self._postgres.start()
        self._connect()
        self._feed(time.monotonic() + self.dice.uniform(0, RUNNING_S))

    def _away(self, accident: Accident) -> None:
        """Have a worker stand still, or its network, until others have its messages; then it goes on."""
        worker = self._workers[0]
        worker.wait_for_log("ready.", 60)
        self._feed(time.monotonic() + self.dice.uniform(0, RUNNING_S))
        net = self._nets[worker.pid]
        ident = f"%:{worker.pid}"
        if accident is Accident.FREEZE:
            self._strike(accident, worker)
        else:
            net.black_hole()
            self._note(accident, [worker])
        self._send()
        gone = "SELECT count(*) FROM sidejob.broker_consumers WHERE ident LIKE %s"
        wait_until(lambda: not self._one(gone, ident), timeout=QUIET_S, message="the silent worker to count as dead")
        if accident is Accident.FREEZE:
            worker.cont()
        else:
            net.pass_through()
        self._feed(time.monotonic() + self.dice.uniform(0, RUNNING_S))

    def _strike(self, accident: Accident, worker: WorkerProcess) -> None:
        """Kill or stop a worker, and note when: as soon as its main process has the signal."""
        stops = accident in (Accident.KILLED_STOPPED, Accident.FREEZE)
        worker.send_signal(signal.SIGSTOP if stops else signal.SIGKILL)
        self._note(accident, [worker])
        if stops:
            worker.stop_signal()

    def _note(self, accident: Accident, workers: Sequence[WorkerProcess]) -> None:
        self._happened.append(Happened(accident, time.time(), frozenset(worker.pid for worker in workers)))

    # -- the end -----------------------------------------------------------------------------------------------------

    def _settle(self, happened: Counter[Accident]) -> Outcome:
        for worker in self._workers[1:]:
            self._strike(Accident.KILLED, worker)
            self._end(worker)
        began = time.monotonic()
        (worker,) = self._workers
        wait_until(lambda: not self._one("SELECT count(*) FROM sidejob.broker_messages"), timeout=QUIET_S + 60)
        took_s = time.monotonic() - began
        begins = begins_in(self._ran.read_text())
        expected = self._send(LAST, priorities=True)
        wait_until(lambda: not self._one("SELECT count(*) FROM sidejob.broker_messages"), timeout=QUIET_S)
        worker.terminate()
        worker.wait(60)
        ran = sorted((runs[0].at, number) for number, runs in begins_in(self._ran.read_text()).items())
        missing = sorted(self._promised - begins.keys() - set(expected))
        return Outcome(
            happened=happened,
            sent=len(self._promised),
            unknown=len(self._unknown),
            lost=[number for number in missing if number % 2 == 0],
            lost_early=[number for number in missing if number % 2],
            doubled=doubled(begins, self._happened),
            recovered_s=took_s,
            left=[one for (one,) in self._looking.execute(_LEFT)]
            + ["a deadlock"] * (self._deadlocks + self._one(_DEADLOCKS)),
            in_order=self._processes.pool != "solo" or [number for _, number in ran][-LAST:] == expected,
        )

    # -- looks -------------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        self._looking = psycopg.connect(self._postgres.url, autocommit=True)

    def _waiting(self) -> int:
        return int(self._one("SELECT count(*) FROM sidejob.broker_messages WHERE holder IS NULL"))

    def _one(self, statement: str, *parameters: Any) -> Any:
        row = self._looking.execute(statement, parameters).fetchone()
        assert row is not None
        return row[0]
