"""The sides in turns, and what they took."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlsplit

import psycopg

from benchmarks.idle import started_processes
from benchmarks.servers import servers
from benchmarks.steps.body import QUEUE, STEPS
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes, environment

SIDES = ("sidejob", "dbos", "absurd", "procrastinate")
PACKAGES = ("dbos", "absurd-sdk", "absurdctl", "procrastinate")
BOUNDS = {"dbos": 1.5, "absurd": 1.0}
"""How many times as fast this package is to be."""
LEAST = 10
"""The jobs of a drain, at least."""
RESTING = 100
"""The jobs that rest and are woken."""


def main(arguments: list[str]) -> int:
    """Measure and print; 1 if this package is slower than `BOUNDS` allow, 2 if a library is not installed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks steps", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3000, help="how many a drain has")
    parser.add_argument("--concurrency", type=int, default=2, help="jobs that a worker runs at a time")
    given = parser.parse_args(arguments)
    try:
        print(", ".join(f"{name} {version(name)}" for name in PACKAGES))
    except PackageNotFoundError as missing:
        print(f"{missing.name} is not installed: pip install {' '.join(PACKAGES)}", file=sys.stderr)
        return 2
    with ExitStack() as stack:
        processes = stack.enter_context(started_processes())
        postgres, _ = stack.enter_context(servers())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides = [Side(name, postgres.url, directory, processes, concurrency=given.concurrency) for name in SIDES]
        for side in sides:
            stack.callback(side.close)
        for _ in range(given.rounds):
            for steps in STEPS:
                for side in sides:
                    side.drain(max(LEAST, given.steps // steps), steps)
            for steps in (0, 100):
                for side in sides:
                    side.come_back(steps)
    return show(sides)


class Side:
    """A library with a database, a client and a worker, and what they took."""

    def __init__(self, name: str, server_url: str, directory: Path, processes: Processes, *, concurrency: int) -> None:
        self.name = name
        self.rates: dict[int, list[float]] = {steps: [] for steps in STEPS}
        self.returns: dict[int, list[float]] = {0: [], 100: []}
        self._stamps = directory / name
        self._stamps.touch()
        with psycopg.connect(server_url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE steps_{name}")
        url = urlsplit(server_url)._replace(path=f"/steps_{name}").geturl()
        env = {"STAMPS": str(self._stamps), "DATABASE_URL": url, "CONCURRENCY": f"{concurrency}"}
        program = [sys.executable, "-m", f"benchmarks.steps.{name}_side"]
        subprocess.run([*program, "install", url], check=True, env=environment(env), stdout=subprocess.DEVNULL)
        self._client = subprocess.Popen(
            [*program, "client", url], env=environment(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer("ready")
        if name == "sidejob":
            self._worker = processes.start_worker(
                f"benchmarks.steps.{name}_side", env=env, name=name, pool="prefork", concurrency=concurrency,
                queues=[QUEUE], extra=["--loglevel=WARNING"], ready_timeout=None,  # the others log nothing
            )  # fmt: skip
        else:
            self._worker = processes.start([*program, "worker", url], env=env, name=name)
        self._ask("make 20 10 0")
        self._wait_for(20)

    def drain(self, count: int, steps: int) -> None:
        """Have the worker run jobs that wait, and note how many steps a second it does."""
        self.rates[steps].append(steps * (count - 1) / self._work(f"make {count} {steps} 0", count))

    def come_back(self, steps: int) -> None:
        """Wake jobs that rest behind so many steps, and note how many milliseconds each takes."""
        self._work(f"make {RESTING} {steps} 1", RESTING)
        notes = 2 * RESTING if self.name in ("sidejob", "absurd") else RESTING
        self.returns[steps].append(1000 * self._work("wake", notes) / RESTING)

    def close(self) -> None:
        """End the client; its worker is ended with the others."""
        self._client.stdin.close()
        self._client.wait()

    def _work(self, line: str, count: int) -> float:
        """Have the client do this, and the worker what comes of it; returns the seconds from the first end to the last.

        The worker stands still until the client is done.
        """
        self._worker.stop_signal()
        os.truncate(self._stamps, 0)
        self._ask(line)
        self._worker.cont()
        self._wait_for(count)
        ends = sorted(memoryview(self._stamps.read_bytes()).cast("q"))
        return (ends[-1] - ends[0]) / 1e9

    def _wait_for(self, count: int) -> None:
        wait_until(
            lambda: self._stamps.stat().st_size // 8 >= count, timeout=300, interval=0.01,
            message=f"the worker of {self.name} to run {count} jobs",
        )  # fmt: skip

    def _ask(self, line: str) -> None:
        self._client.stdin.write(f"{line}\n")
        self._client.stdin.flush()
        self._answer("done")

    def _answer(self, expected: str) -> None:
        answer = self._client.stdout.readline().strip()
        assert answer == expected, f"the client of {self.name} said {answer!r}"


def show(sides: list[Side]) -> int:
    """Print the medians, and return 1 if a bound is not met."""
    print(f"{'':28}" + "".join(f"{side.name:>20}" for side in sides))
    ours, missed = sides[0], []
    for steps in STEPS:
        rates = {side.name: statistics.median(side.rates[steps]) for side in sides}
        print(f"{f'steps a second, jobs of {steps}':28}" + "".join(_shown(rates[side.name], rates) for side in sides))
        missed += [
            f"{rates['sidejob'] / rates[name]:.2f} of {name} in jobs of {steps} (bound {bound})"
            for name, bound in BOUNDS.items() if rates["sidejob"] < bound * rates[name]
        ]  # fmt: skip
    for steps in ours.returns:
        print(
            f"{f'ms to come back to {steps}':28}"
            + "".join(f"{statistics.median(side.returns[steps]):>20.2f}" for side in sides)
        )
    print(f"load {os.getloadavg()[0]:.1f}", *missed, sep="\n")
    return int(bool(missed))


def _shown(rate: float, rates: dict[str, float]) -> str:
    share = rate / rates["sidejob"]
    return f"{f'{rate:.0f} ({share:.2f})':>20}"
