"""Jobs wired by ports and channels, whose workers are killed: each packet must count once, in order.

    python -m proofs wiring [--jobs 1000] [--packets 100000] [--workers 8] [--kill-every 5] [--seed 1]

Lines of five jobs: each enters a packet into a table and hands it on, by a port or by a channel, both in the
transaction of the unit that has read it. `--packets` counts them at each job. A worker is killed by SIGKILL every few
seconds, and another takes its place. In the end each job must have entered every packet once, in the order of its port,
no packet may be left, and nothing may be in the dead set.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.servers import servers
from tests.acceptance.scene import Scene
from tests.acceptance.wiring import STAGES, Wiring
from tests.tools.guard import Guard
from tests.tools.recorder import Record
from tests.tools.workers import Processes

STUCK_S, QUIET_S = 120.0, 120.0


def main(arguments: list[str]) -> int:
    """Wire, kill, print, and return 1 if a packet was lost, doubled or overtaken."""
    parser = argparse.ArgumentParser(prog="python -m proofs wiring", description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--packets", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--kill-every", type=float, default=5.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    packets = given.packets // given.jobs
    with servers() as (postgres, redis_url), tempfile.TemporaryDirectory() as directory, Guard() as guard:
        processes = Processes(Path(directory) / "processes", guard)
        scene = Scene(postgres.url, redis_url, Record(Path(directory) / "record.jsonl"), processes)
        try:
            wiring = Wiring(scene, workers=given.workers, seed=given.seed)
            wiring.lay(given.jobs // STAGES)
            began = time.monotonic()
            wiring.pass_through(packets, kill_every_s=given.kill_every, stuck_after_s=STUCK_S)
            took_s = time.monotonic() - began
            scene.settle(QUIET_S)
            wrong = wiring.judge(packets)
        finally:
            processes.kill_all()
            scene.close()
    print(
        f"{given.jobs // STAGES * STAGES} jobs, {packets} packets at each, {given.workers} workers, {wiring.kills} "
        f"kills in {took_s:.0f} s: " + ("each packet counted once, in order" if not wrong else "WRONG:"),
        *wrong[:10], sep="\n  ", flush=True,
    )  # fmt: skip
    return 1 if wrong else 0
