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
JOB_PROBES = 1.2
"""A job's work beside the parsing, in all processes together and Postgres too, in units of `probe()`."""
PARSED_PER_PROBE = 38_000
"""Bytes of Python that are parsed and counted in the time of one `probe()`."""
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
    size = sum(file.stat().st_size for file in files)
    one_in = math.ceil(_estimate_s(len(found) + len(files), size) / BUDGET_S)
    paths = {path: one_in}
    if not always.is_relative_to(path):
        paths[always] = 1
    counted = [walked for part, n in paths.items() for walked in walk(part, n)]
    return Plan(
        paths=paths,
        directories=len(counted),
        files=sum(len(files) for _, files in counted),
        all_files=len(files) + (0 if always.is_relative_to(path) else len(list(always.iterdir()))),
    )


def _estimate_s(jobs: int, size: int) -> float:
    """Estimate how long a census takes: the jobs on all cores (Postgres needs one of them), the plain count on one."""
    unit = min(probe() for _ in range(3))
    cores = min(2, os.cpu_count() or 1)
    parsing = size / PARSED_PER_PROBE
    return unit * ((jobs * JOB_PROBES + parsing) / cores + parsing)


def probe() -> float:
    """Measure how fast this machine is, by the kind of work to be done; returns seconds."""
    began = time.process_time()
    list(ast.walk(ast.parse(PROBE)))
    return time.process_time() - began
