"""How much there is to count, and how much of it in the time that a demo may take."""

from __future__ import annotations

import ast
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

from census_demo.plain import walk

BUDGET_S = 60.0
"""For the jobs and the plain count. Starting, recovering and drawing take some twenty seconds more."""
JOB_PROBES = 0.9
"""A job's work beside the parsing, in all processes together and Postgres too, in units of `probe()`."""
PARSED_PER_PROBE = 49_000
"""Bytes of Python that are parsed and counted in the time of one `probe()`."""
PROBES = 20
PROBE = "def probe(first, *rest):\n    return [first + other for other in rest if other in {1: first}]\n\n\n" * 300


@dataclass(frozen=True)
class Plan:
    """Which paths are counted, each with the n of "one file in n", and how many jobs that will be."""

    paths: dict[Path, int]
    directories: int
    files: int
    all_files: int

    @property
    def jobs(self) -> int:
        """Jobs that will be completed: one for each directory and file, and the root."""
        return self.directories + self.files + 1

    @property
    def is_sample(self) -> bool:
        """Whether only some of the files are counted."""
        return self.files < self.all_files


def make_plan(path: Path, always: Path) -> Plan:
    """Plan a census of `path`, of all of it or of a sample that fits the budget, and of all of `always`."""
    found = list(walk(path, 1))
    files = [file for _, files in found for file in files]
    paths = {path: _one_in(len(found), len(files), sum(file.stat().st_size for file in files))}
    if not always.is_relative_to(path):
        paths[always] = 1
    counted = [walked for part, one_in in paths.items() for walked in walk(part, one_in)]
    more = sum(len(files) for part in paths.keys() - {path} for _, files in walk(part, 1))
    return Plan(
        paths=paths,
        directories=len(counted),
        files=sum(len(files) for _, files in counted),
        all_files=len(files) + more,
    )


def _one_in(directories: int, files: int, size: int) -> int:
    """Return the n of "one file in n" that fits the budget: 1 if all do. A directory's job is made in any case."""
    unit = probe()
    cores = min(2, os.cpu_count() or 1)  # of more than two our four processes make little more
    jobs_s = unit * JOB_PROBES / cores
    parsing_s = unit * size / PARSED_PER_PROBE * (1 / cores + 1)  # once by the jobs, once by the plain loop
    return max(1, math.ceil((files * jobs_s + parsing_s) / max(1.0, BUDGET_S - directories * jobs_s)))


def probe() -> float:
    """Measure how long a little of the work takes here and now; in seconds.

    On a busy machine that is between the processor's time and the clock's: our several processes will be given more of
    it than this one is.
    """
    clock, processor = time.perf_counter(), time.process_time()
    for _ in range(PROBES):
        list(ast.walk(ast.parse(PROBE)))
    return math.sqrt((time.perf_counter() - clock) * (time.process_time() - processor)) / PROBES
