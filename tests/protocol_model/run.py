#!/usr/bin/env python3
"""Every tempting mistake ends in a trace and the protocol as we run it ends in none; otherwise exit with 1.

    python tests/protocol_model/run.py            all of it (`./run model`)
    python tests/protocol_model/run.py --quick    the mistakes and the small instances

The instances stand in mut.py, good.py and extra.py, which explore them as they are read. Here they are only collected
from those files, then explored one by one, each with the verdict it must end in.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import runpy
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent

# The instances of good.py and extra.py that stay below 21,000 states: all of them together take twenty seconds.
SMALL = frozenset(
    {
        "term|force unknown commit",
        "term,del|force crash",
        "timer|run S/F crash",
        "timer|term client dies",
        "run retry|term wrong lost",
        "parent+child run child crash,lose",
        "parent+child run both",
        "parent+child, delete parent",
        "2 crashes + child death, max losses 2",
        "2 pauses + dup",
        "lent term|force client dies",
        "lent term,force|run crash",
        "lent force|term,del client dies",
        "lent term,forced timer|timer S/F",
        "lent term|forced timer,run",
        "lent term|timer,forced timer S/F",
        "lent run|term|force",
        "lent run,timer|timer S/F crash",
        "lent timer|run C/F crash",
        "lent timer|run, losses, client dies",
        "lent timer|term,force",
        "timer,timer|cancel S client dies",
        "forced timer,cancel|term",
        "forced timer,cancel of a failed job|force",
        "term,forced timer|cancel given up",
        "lent timer|cancel,run C/F",
        "run retry,timer,cancel",
        "lent tree|run child",
        "lent tree|term,del client dies",
        "lent child|lent tree",
        "lent child|term client dies",
        "slow claims run crash,pause",
        "slow claims parent+child run child,term",
        "slow claims lent child|tree",
        "siblings write units unknown commit,dup",
        "retry at once: run|term crash",
    }
)


@dataclass(frozen=True)
class Instance:
    """A model with a name, and whether exploring it has to end in a trace."""

    name: str
    model: Any
    limits: dict[str, Any] = field(default_factory=dict)
    must_fail: bool = False


@dataclass(frozen=True)
class Verdict:
    """What exploring an instance said, and the trace that led there."""

    instance: Instance
    result: str
    trace: str
    seconds: float

    @property
    def as_expected(self) -> bool:
        """A mistake was found, or a protocol said to be right has no counterexample within its bounds."""
        if self.instance.must_fail:
            return self.result.startswith(("VIOLATION", "STUCK"))
        bound_reached = self.result.startswith("no violation") and "bound reached" in self.result
        return self.result.startswith("OK") or bound_reached

    def __str__(self) -> str:
        mark = "ok  " if self.as_expected else "FAIL"
        return f"{mark} {self.seconds:5.1f}s  {self.instance.name}: {self.result}"


def mistakes() -> list[Instance]:
    """The instances of mut.py: each has one defect switched in."""
    return _collect("mut.py", must_fail=True)


def every_mistake() -> frozenset[str]:
    """The names of all that can be switched in."""
    names: frozenset[str] = _checker().MISTAKES
    return names


def protocols() -> list[Instance]:
    """The instances of good.py and extra.py: the protocol, and its variant in which a wake cuts a backoff."""
    return _collect("good.py", "0", "1") + _collect("extra.py")


def small(instances: Sequence[Instance]) -> list[Instance]:
    """Those of `instances` that are named in SMALL; a name in SMALL that no file knows is an error."""
    unknown = SMALL - {instance.name for instance in instances}
    if unknown:
        raise LookupError(f"SMALL names instances that no longer exist: {sorted(unknown)}")
    return [instance for instance in instances if instance.name in SMALL]


def explore(instance: Instance) -> Verdict:
    """Walk through all interleavings of one instance, quietly."""
    noise = io.StringIO()
    started = time.monotonic()
    with contextlib.redirect_stdout(noise):
        result = _checker().explore(instance.model, instance.name, **instance.limits)
    trace = "\n".join(noise.getvalue().splitlines()[1:])
    return Verdict(instance, result, trace, time.monotonic() - started)


def main(argv: Sequence[str] | None = None) -> int:
    """Explore, print one line for each instance, and return 1 if one of them did not end as it must."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--quick", action="store_true", help="the mistakes and the small instances only")
    arguments.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="instances at a time")
    options = arguments.parse_args(argv)

    right = protocols()
    chosen = mistakes() + (small(right) if options.quick else right)
    unexpected = 0
    for verdict in _explore_all(chosen, jobs=options.jobs):
        print(verdict, flush=True)
        if not verdict.as_expected:
            unexpected += 1
            print(verdict.trace or "     (no trace: the defect was not noticed)", flush=True)
    print(f"{len(chosen)} instances, {unexpected} of them not as expected")
    return 1 if unexpected else 0


def _explore_all(instances: Sequence[Instance], *, jobs: int) -> Iterator[Verdict]:
    if jobs == 1:
        yield from map(explore, instances)
        return
    with ProcessPoolExecutor(max_workers=jobs) as pool:
        yield from pool.map(explore, instances)


def _checker() -> Any:
    """The module mc, under the name by which the files beside it import it."""
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    return importlib.import_module("mc")


def _collect(filename: str, *argv: str, must_fail: bool = False) -> list[Instance]:
    """The instances that `filename` would explore when it is run with `argv`."""
    found: list[Instance] = []

    def note(model: Any, name: str, **limits: Any) -> None:
        found.append(Instance(name, model, limits, must_fail))

    with mock.patch.object(_checker(), "explore", note), mock.patch.object(sys, "argv", [filename, *argv]):
        runpy.run_path(str(HERE / filename))
    return found


if __name__ == "__main__":
    sys.exit(main())
