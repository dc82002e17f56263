"""Workers on `sidejobpg://` that die, stand still and lose their Postgres: what is lost, and what runs twice and when.

    python -m proofs deaths [--kills 1000] [--sessions 100] [--restarts 20] [--freezes 20] [--silences 20]
                                [--pool solo] [--seed 1]

Tasks of a millisecond, every second one acknowledged early, run on two workers while all that happens, in an order that
the seed draws:

- a worker is killed by SIGKILL, at a random instant: while it starts, while it runs tasks, or after it was stopped
- a session is ended in the middle of a statement (`pg_terminate_backend`): of a fetch, of its commit, of a removal
- all processes of Postgres are killed, and it recovers
- a worker is stopped (SIGSTOP) for longer than `consumer_timeout`, and goes on
- a worker's network falls silent for longer than that, and speaks again

In the end one worker runs what there is, then messages of all priorities, and is stopped as usual. Nothing that was
sent may be lost; but a task that was acknowledged early ends with the worker that runs it. A task that runs twice must
first have begun at most `kills.WINDOW_S` before its worker was killed; after anything else, at most a prefetch of
tasks may run twice each time. No consumer and no message may be left, and Postgres may have found no deadlock.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

from celery_sidejob import embedded
from celery_sidejob.store.schema.migrate import upgrade
from proofs.deaths.accidents import Accident
from proofs.deaths.storm import Storm
from tests.tools.fork_server import ForkServer
from tests.tools.guard import Guard
from tests.tools.workers import Processes, environment

COUNTS = {"kills": 1000, "sessions": 100, "restarts": 20, "freezes": 20, "silences": 20}


def main(arguments: list[str]) -> int:
    """Have it all happen, print, and return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m proofs deaths", description=(__doc__ or "").splitlines()[0])
    for name, count in COUNTS.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--pool", default="solo")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args(arguments)
    print(f"seed {given.seed}, pool {given.pool}", flush=True)
    with (
        embedded.Postgres(durable=True) as postgres, tempfile.TemporaryDirectory() as directory, Guard() as guard,
        ForkServer(environment({})) as fork_server,
    ):  # fmt: skip
        upgrade(postgres.url)
        processes = Processes(Path(directory) / "processes", guard, fork_server, pool=given.pool)
        try:
            with Storm(processes, postgres, Path(directory), seed=given.seed) as storm:
                outcome = storm.run(planned(given, storm.dice), progress=True)
        finally:
            processes.kill_all()
    print(outcome, flush=True)
    return 1 if outcome.wrong else 0


def planned(given: argparse.Namespace, dice: random.Random) -> list[Accident]:
    """Return what is to happen, in an order that the dice give."""
    counts = {
        Accident.SESSION: given.sessions, Accident.RESTART: given.restarts, Accident.FREEZE: given.freezes,
        Accident.SILENCE: given.silences,
    }  # fmt: skip
    kills = [Accident.KILLED_STARTING, *[Accident.KILLED] * 3, Accident.KILLED_STOPPED]
    plan = [kills[number % len(kills)] for number in range(given.kills)]
    plan += [accident for accident, count in counts.items() for _ in range(count)]
    dice.shuffle(plan)
    return plan
