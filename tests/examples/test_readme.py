"""The README's quick start runs as it is written, on Postgres alone."""

from __future__ import annotations

import shlex
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from typing import LiteralString

import psycopg

from tests.examples.test_guides import blocks
from tests.tools.versions import KOMBU_5_7
from tests.tools.waiting import patient, wait_until
from tests.tools.workers import ROOT, Process, Processes, WorkerProcess, environment

README = ROOT / "README.md"
SESSION = "import doctest, sys; sys.exit(doctest.testfile('session.txt', module_relative=False).failed)"
NUMBERS = 2_000
"""Each is a commit; the README's own 20,000 take a minute."""
SUMS = f"""
>>> from shop import sidejob
>>> job = sidejob.get(2).wait(timeout={patient(40)})
>>> list(job.output("sums")) == {list(accumulate(range(NUMBERS)))}
True
"""


def shop_module() -> str:
    """Return the README's `shop.py`, which has the durable task, and then the job."""
    return "\n\n".join(text for text in blocks(README, "python") if text.startswith("# shop.py"))


class QuickStart:
    """A directory with the README's `shop.py`, on a database of this test's own."""

    def __init__(self, directory: Path, processes: Processes, database_url: str) -> None:
        self.directory = directory
        self._database_url = database_url
        self._processes = processes
        shown = shop_module()
        assert "redis" not in shown
        (directory / "shop.py").write_text(shown.replace("///shop", f"//{database_url.partition('://')[2]}"))

    def upgrade(self) -> None:
        """Run the quick start's first command of Celery; the second one is that of `worker`."""
        (shown,) = (text for text in blocks(README, "") if "sidejob db upgrade" in text)
        upgrade, worker = [line.partition("#")[0].split() for line in shown.splitlines()]
        assert worker == ["celery", "-A", "shop", "worker"]
        self._python("-m", *upgrade)

    def worker(self) -> WorkerProcess:
        """Start the worker; it is ready when this returns."""
        return self._processes.start_worker("shop", env={}, cwd=self.directory, concurrency=2)

    def call(self) -> Process:
        """Start the process that calls the durable task, and waits for its result."""
        (shown,) = (text for text in blocks(README, "") if "send_mail.delay" in text)
        (line,) = (line for line in shown.splitlines() if "send_mail.delay" in line)
        python, option, program, background = shlex.split(line)
        assert (python, background) == ("python", "&")
        return self._processes.start([sys.executable, option, program], env={}, cwd=self.directory, name="caller")

    def shown(self, containing: str) -> str:
        """Return the README's session in a Python shell that has this in it."""
        (found,) = (text for text in blocks(README, "python") if text.startswith(">>>") and containing in text)
        return found

    def shell(self, session: str) -> None:
        """Run a session in a Python shell, and compare its answers."""
        (self.directory / "session.txt").write_text(session)
        self._python("-c", SESSION)

    def total(self) -> int:
        """How far the second job has come: 0 before its first commit."""
        return self._number("SELECT value::text::int FROM sidejob.state WHERE job_id = 2")

    def running(self) -> int:
        """How many durable tasks run."""
        return self._number("SELECT count(*) FROM sidejob.messages WHERE locked_by IS NOT NULL")

    def _number(self, statement: LiteralString) -> int:
        with psycopg.connect(self._database_url) as connection:
            found = connection.execute(statement).fetchone()
        return found[0] if found else 0

    def _python(self, *arguments: str) -> None:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=self.directory, env=environment({}), timeout=patient(60), check=False,
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout


@KOMBU_5_7
def test_a_caller_waits_over_the_death_of_a_worker(
    tmp_path: Path, processes: Processes, empty_database_url: str
) -> None:
    shop = QuickStart(tmp_path, processes, empty_database_url)
    shop.upgrade()
    killed = shop.worker()
    caller = shop.call()
    wait_until(shop.running, timeout=30, message="the task to begin")
    killed.kill_group()
    assert caller.alive, "it waits for the task that it has called"
    shop.worker()

    assert caller.wait(patient(60)) == 0, caller.log()
    assert caller.log().endswith("sent to ada@example.com\n")


@KOMBU_5_7
def test_the_quick_start_runs_as_it_is_written(tmp_path: Path, processes: Processes, empty_database_url: str) -> None:
    shop = QuickStart(tmp_path, processes, empty_database_url)
    shop.upgrade()
    killed = shop.worker()
    shop.shell(shop.shown("range(20_000)").replace("20_000", str(NUMBERS)))
    wait_until(shop.total, timeout=30, message="the second job to begin")
    killed.kill()
    assert shop.total() < sum(range(NUMBERS)), "it was killed while it worked"
    shop.worker()

    shop.shell(SUMS)
