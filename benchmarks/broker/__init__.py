"""What `sidejobpg://` takes from its Postgres, with plain Celery.

    python -m benchmarks broker [--only crowd,pinned,waiting,idle] [--minutes 10] [--rounds 6] [--workers 50]

- crowd: the rate of 16 workers with the pool solo on one queue against that of 2, Postgres' processor time for a task,
  how even their shares are, and deadlocks
- pinned: the rate while a transaction stays open for so many minutes, and the dead rows then and after it
- waiting: what a fetch costs with a million messages waiting, against a thousand
- idle: the statements of so many workers that have nothing to do, with Celery's gossip and without

The bounds are printed beside the figures; 1 is returned if one is missed.
"""

from __future__ import annotations

import argparse

SECTIONS = ("crowd", "pinned", "waiting", "idle")


def main(arguments: list[str]) -> int:
    """Measure, print, and return 1 if a bound is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks broker", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--minutes", type=float, default=10.0, help="pinned: how long the transaction stays open")
    parser.add_argument("--rounds", type=int, default=6, help="crowd: drains of each side")
    parser.add_argument("--workers", type=int, default=50, help="idle: how many")
    given = parser.parse_args(arguments)
    if unknown := set(given.only.split(",")) - set(SECTIONS):
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    from benchmarks.broker import crowd, idle, pinned, waiting
    from benchmarks.broker.stage import Stage

    with Stage.opened() as stage:
        runs = {
            "crowd": lambda: crowd.measure(stage, given.rounds),
            "pinned": lambda: pinned.measure(stage, given.minutes),
            "waiting": lambda: waiting.measure(stage),
            "idle": lambda: idle.measure(stage, given.workers),
        }
        missed = [name for name in given.only.split(",") if not runs[name]()]
    print(f"missed: {', '.join(missed)}" if missed else "all bounds are met")
    return 1 if missed else 0
