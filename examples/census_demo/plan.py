"""How many files there are, and how many of them a demo has the time to count."""

from __future__ import annotations

import ast
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from census_demo.plain import walk

BUDGET_S = 50.0
"""For the jobs and the plain count. Starting, recovering and drawing take ten to thirty seconds more."""
JOB_PROBES = 0.9
"""The work of a job without the parsing, in all processes and in Postgres, in units of `probe()`."""
PARSED_PER_PROBE = 49_000
"""Bytes of Python that one process parses and counts in the time of one `probe()`."""
PROBES = 20
PROBE = "def probe(first, *rest):\n    return [first + other for other in rest if other in {1: first}]\n\n\n" * 300


class UnusablePathError(Exception):
    """This path cannot be counted. The message says why."""


@dataclass(frozen=True)
class Plan:
    """The path to count, the n of "one file in n", and the number of jobs for it."""

    path: Path
    one_in: int
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


def make_plan(given: str) -> Plan:
    """Plan a census of a path, complete or of a sample that fits the budget.

    Raises UnusablePathError if it is no directory with Python files, or has too many directories.
    """
    path = _checked(given)
    jobs_s = probe() * JOB_PROBES / min(2, os.cpu_count() or 1)  # the four processes gain little from more than two
    most = int(BUDGET_S / jobs_s)
    found = list(islice(walk(path, 1), most + 1))
    if len(found) > most:
        raise UnusablePathError(
            f"{path} has more than {most:,} directories, too many for a demo on this machine: name one of them"
        )
    files = [file for _, files in found for file in files]
    if not files:
        raise UnusablePathError(f"there is no Python file in {path}, nor below it")
    one_in = _one_in(len(found), files, jobs_s)
    counted = sum(len(files) for _, files in walk(path, one_in))
    return Plan(path=path, one_in=one_in, directories=len(found), files=counted, all_files=len(files))


def _checked(given: str) -> Path:
    path = Path(os.path.realpath(given))
    if not os.path.lexists(path):
        raise UnusablePathError(f"there is no {path}")
    if not path.is_dir():
        raise UnusablePathError(f"{path} is not a directory")
    if not os.access(path, os.R_OK | os.X_OK):
        raise UnusablePathError(f"{path} may not be read by this user")
    if not str(path).isprintable():
        raise UnusablePathError(f"the name {str(path)!r} is not text, as a job's arguments must be")
    return path


def _one_in(directories: int, files: Sequence[Path], jobs_s: float) -> int:
    """Return the n of "one file in n" that fits the budget: 1 if all do. A directory's job is made in any case."""
    size = sum(os.path.getsize(file) for file in files)
    parsing_s = jobs_s / JOB_PROBES * size / PARSED_PER_PROBE
    cores = min(2, os.cpu_count() or 1)
    # The jobs parse on all cores; then the plain loop does on one.
    needed_s = len(files) * jobs_s + parsing_s * (1 + cores)
    return max(1, math.ceil(needed_s / max(1.0, BUDGET_S - directories * jobs_s)))


def probe() -> float:
    """Measure how many seconds a small part of the work takes on this machine, with its present load."""
    began_at = time.perf_counter()
    for _ in range(PROBES):
        list(ast.walk(ast.parse(PROBE)))
    return (time.perf_counter() - began_at) / PROBES
