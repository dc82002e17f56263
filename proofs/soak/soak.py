"""One soak, from the first worker to the verdict."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
import time
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import psycopg

from proofs.soak import judge
from proofs.soak.figures import Figures
from proofs.soak.load import prepare
from proofs.trial.faults import Scenery
from proofs.trial.fleet import Fleet
from proofs.trial.ground import Ground
from proofs.trial.schedule import Schedule
from tests.acceptance import checker
from tests.acceptance.scene import LEDGER
from tests.tools.databases import Eye
from tests.tools.guard import Guard
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes

QUEUE = "acceptance"
TICK_S = 0.2
LOOK_S = 3.0
"""How often the rules that always hold are looked at."""
QUIET_S = 60.0
"""After the last fault, with workers that are ready, everything must be at rest within this, and within the longest
`check_interval` of a message beside: one that was lost with whoever had received it is found only then."""
_CHECK_INTERVAL = """
SELECT coalesce(extract(epoch FROM max(check_interval)), 0)::float FROM sidejob.messages WHERE locked_by IS NULL"""
READY_S = 60.0
IDLE_S = 20.0
RETENTION_S = 180.0
RESCUES = """
CREATE SCHEMA soak;
CREATE TABLE soak.rescues (
  at timestamptz NOT NULL DEFAULT clock_timestamp(), job bigint, run bigint, pid int, lost boolean);
CREATE FUNCTION soak.note_rescue() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO soak.rescues (job, run, pid, lost) VALUES (
    old.id, old.run_no, (SELECT locked_pid FROM sidejob.messages WHERE job_id = old.id), new.losses > old.losses);
  RETURN NULL;
END $$;
CREATE TRIGGER soak_rescues AFTER UPDATE ON sidejob.jobs FOR EACH ROW
  WHEN (old.unit_no IS NOT NULL AND new.unit_no IS NULL AND new.ended_run IS NOT DISTINCT FROM old.ended_run)
  EXECUTE FUNCTION soak.note_rescue()"""
"""Every run that was freed and not ended is noted by the store itself: nobody has to be looking just then."""


class Soak:
    """Load, faults and a judge on one broker."""

    def __init__(
        self, *, minutes: float, broker: str, seed: int, rate: float, clients: int, pools: list[str], out: str | None
    ) -> None:
        self._minutes = minutes
        self._out = out
        self._broker = broker
        self._seed = seed
        self._home = Path(tempfile.mkdtemp(prefix="soak-"))
        self._record = Record(self._home / "promises.jsonl")
        self._figures = Figures(broker=broker, seed=seed, rate=rate * clients, pools=pools)
        self._options: dict[str, Any] = {"rate": rate, "clients": clients, "pools": pools}
        self._begun = time.monotonic()
        self._wrong: list[str] = []
        self._looked_at = 0.0

    def run(self) -> int:
        """Soak, print and write the figures, and return how much is wrong."""
        print(
            f"a soak of {self._minutes:g} minutes on {self._broker}, seed {self._seed}; logs in {self._home}",
            flush=True,
        )
        with ExitStack() as stack:
            ground = stack.enter_context(Ground(self._broker, queue=QUEUE, notes=f"{LEDGER};{RESCUES}"))
            guard = stack.enter_context(Guard())
            processes = Processes(self._home / "processes", guard)
            stack.callback(processes.kill_all)
            fleet = Fleet(
                ground, processes, self._record, Record(self._home / "notes.jsonl"), self._seed,
                retention_s=RETENTION_S, say=self._say, app="proofs.soak.tasks", client="proofs.soak.client",
                **self._options,
            )  # fmt: skip
            self._prepare(ground)
            self._soak(fleet)
        children = [child for child in psutil.Process().children(recursive=True) if child.is_running()]
        self._complain(f"a process is left: {child}" for child in children)
        self._tell()
        return len(self._wrong)

    # ------------------------------------------------------------------------------------------------------------

    def _soak(self, fleet: Fleet) -> None:
        scenery = Scenery(fleet.ground, fleet, random.Random(self._seed))
        fleet.wait_for_workers(READY_S)
        self._figures.measure_idle(fleet.ground.aside_url, IDLE_S)
        schedule = Schedule(scenery, say=self._say)
        self._begun = time.monotonic()
        ends_at = self._begun + self._minutes * 60
        while time.monotonic() < ends_at and not self._wrong:
            fleet.tend()
            schedule.tick()
            store = not schedule.is_on("store")
            if store:
                self._look(fleet.ground.database_url)
            self._figures.tick(fleet, store=store)
            time.sleep(TICK_S)
        minutes = (time.monotonic() - self._begun) / 60
        schedule.heal_all()
        self._say("faults and load end")
        quiet_s = self._settle(fleet)
        lines = self._record.read()
        verdict = judge.judge(judge.read(fleet.ground.database_url, lines))
        self._complain(verdict.wrong)
        if self._wrong:
            self._keep_evidence(fleet)
        self._stop(fleet)
        self._figures.finish(
            fleet, minutes=minutes, quiet_s=quiet_s, history=schedule.history, losses=scenery.losses,
            kinds=verdict.kinds, lines=lines,
        )  # fmt: skip

    def _prepare(self, ground: Ground) -> None:
        """Make what is there from the beginning, as a client that nothing happens to."""
        os.environ.update({**ground.env, "SIDEJOB_DATABASE_URL": ground.database_url})
        tasks = import_module("proofs.soak.tasks")
        with psycopg.connect(ground.database_url, autocommit=True) as connection:
            prepare(tasks.sidejob, connection)
        tasks.sidejob.runtime.connections.close()

    def _look(self, url: str) -> None:
        if time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        self._complain(judge.look(url))

    def _settle(self, fleet: Fleet) -> float | None:
        """Return after how many seconds everything was quiet."""
        fleet.dismiss("client")
        url = fleet.ground.database_url
        with Eye(url) as eye:
            return self._settled(fleet, eye, QUIET_S + self._longest_check_interval_s(url))

    def _settled(self, fleet: Fleet, eye: Eye, within_s: float) -> float | None:
        try:
            fleet.wait_for_workers(READY_S)
            self._say("all workers are ready")
            quiet_s = checker.wait_quiet(eye, within_s)
            self._say(f"quiet after {quiet_s:.1f} s, within {within_s:.0f} s")
            wait_until(lambda: not checker.violations(eye, at_rest=True), timeout=QUIET_S, interval=0.5)
        except (TimeoutError, AssertionError) as error:
            self._complain([str(error)])
            with suppress(psycopg.Error):
                self._complain(checker.violations(eye, at_rest=True))
            return None
        return quiet_s

    def _longest_check_interval_s(self, url: str) -> float:
        with psycopg.connect(url, autocommit=True) as connection:
            row = connection.execute(_CHECK_INTERVAL).fetchone()
        assert row is not None
        return float(row[0])

    def _stop(self, fleet: Fleet) -> None:
        """Stop everything in good order; what hangs is no promise broken, but told."""
        fleet.dismiss("worker", "beat")
        for end in fleet.hung:
            print(f"a warm stop was not over in time:\n{end}")

    def _keep_evidence(self, fleet: Fleet) -> None:
        """Write down the whole store, and where every process stands, before anything changes."""
        for process in fleet.processes.started:
            for pid in process.group():
                with suppress(ProcessLookupError):
                    if "beat" not in process.name:
                        psutil.Process(pid).send_signal(signal.SIGUSR2)
        with psycopg.connect(fleet.ground.database_url, autocommit=True) as connection:
            for table in ("jobs", "messages", "timers", "askings", "workers", "dead", "packets", "ports", "leases"):
                rows = connection.execute(f"SELECT row_to_json(t)::text FROM sidejob.{table} t").fetchall()
                (self._home / f"{table}.jsonl").write_text("".join(f"{row}\n" for (row,) in rows))
            rows = connection.execute("SELECT row_to_json(t)::text FROM ledger t").fetchall()
            (self._home / "ledger.jsonl").write_text("".join(f"{row}\n" for (row,) in rows))
            rows = connection.execute("SELECT row_to_json(t)::text FROM soak.rescues t").fetchall()
            (self._home / "rescues.jsonl").write_text("".join(f"{row}\n" for (row,) in rows))

    def _complain(self, wrong: Any) -> None:
        for one in wrong:
            self._say(f"WRONG: {one}")
            self._wrong.append(str(one))

    def _tell(self) -> None:
        text = self._figures.as_markdown()
        print(f"\n{text}")
        if self._out:
            path = Path(self._out)
            if self._figures.setting["broker"] != "redis" and path.exists():
                path = path.with_stem(f"{path.stem}-{self._broker}")
            report = {**self._figures.report, "wrong": self._wrong}
            path.write_text(text if path.suffix == ".md" else json.dumps(report, indent=2) + "\n")
        if self._wrong:
            print(f"{len(self._wrong)} WRONG; everything is in {self._home}:")
            print("\n".join(self._wrong))
        else:
            print("every promise was kept")
            shutil.rmtree(self._home)

    def _say(self, what: str) -> None:
        print(f"{time.monotonic() - self._begun:8.1f} s  {what}", flush=True)
