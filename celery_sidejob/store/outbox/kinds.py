"""The two kinds of rows that share one life, and the two differences between their statements."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..statement import columns


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of outbox rows. Each change names a row's key and its generation, and therefore never hits a later row."""

    name: str
    rows: str
    """The condition, as SQL about `m`, that a row is of this kind."""
    key: str
    generation: str
    """The columns of the key and of the generation."""
    types: tuple[str, str]
    """The Postgres types of these two columns."""
    lowest: str | int
    """Less than every key."""

    def __str__(self) -> str:
        return self.name

    @property
    def given(self) -> str:
        """The relation `r` of the keys given to a statement, as SQL; see `parameters`."""
        return f"unnest(%(keys)s::{self.types[0]}[], %(generations)s::{self.types[1]}[]) AS r(key, generation)"

    @property
    def is_given(self) -> str:
        """The condition that `m` is the row of the key `r`, as SQL."""
        return f"m.{self.key} = r.key AND m.{self.generation} = r.generation"


JOBS = Kind(
    "jobs", "(m.job_id IS NOT NULL OR m.task_id LIKE 'continuation:%%')", "job_id", "for_run", ("bigint", "bigint"), 0
)
"""Doorbells of jobs, and the continuations of their askings; a continuation has no generation."""
TASKS = Kind("tasks", "m.generation IS NOT NULL", "task_id", "generation", ("text", "int"), "")
"""Whole messages of ordinary durable tasks."""
KINDS = (JOBS, TASKS)

SOON = "set_config('synchronous_commit', 'off', true)"
"""Commits without waiting for the disk: only for changes whose loss in a crash of Postgres costs one publication."""


def parameters(keys: Iterable[tuple[str | int, int]]) -> dict[str, Any]:
    """Return keys as parameters of a statement with `Kind.given`."""
    return columns(list(keys), "keys", "generations")


def free(given: str, condition: str, *, columns: str = "found.task_id", of_row: str = "m.task_id") -> str:
    """Return the CTE `free`: the rows `m` of the keys given as `r` that meet a condition and are not locked.

    The statement then holds their locks, whatever it does with the rows. Each key is looked up by itself (LATERAL), to
    keep every plan from reading the table once for each key. Postgres believes that a table is empty if a VACUUM found
    it empty and could not truncate it; any order of joins then costs nothing, and a hundred marks beside a thousand
    rows once took nine seconds. The page is a CTE, which is read once: the planner may read a sub-select in FROM again
    for each row.
    """
    return f"""
WITH free AS MATERIALIZED (
  SELECT {columns} FROM {given} CROSS JOIN LATERAL (
    SELECT {of_row} FROM {{messages}} m WHERE {condition}
    FOR UPDATE OF m SKIP LOCKED) found)"""


BY_TASK_ID = "unnest(%(task_ids)s::text[]) AS r(task_id)"
