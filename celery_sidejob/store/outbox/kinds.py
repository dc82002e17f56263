"""The two kinds of rows that share one life, and the two things in which their statements differ."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of rows of the outbox. Each change names a row's key and its generation, so that it meets no later row."""

    name: str
    rows: str
    """Which rows these are, as SQL about `m`."""
    key: str
    generation: str
    """The columns of the key and of the generation."""
    types: tuple[str, str]
    """What Postgres calls the types of the two."""

    def __str__(self) -> str:
        return self.name

    @property
    def given(self) -> str:
        """The relation `r` of the keys that a statement is given, as SQL; `parameters` of these."""
        return f"unnest(%(keys)s::{self.types[0]}[], %(generations)s::{self.types[1]}[]) AS r(key, generation)"

    @property
    def is_given(self) -> str:
        """The condition that `m` is the row of the key `r`, as SQL."""
        return f"m.{self.key} = r.key AND m.{self.generation} = r.generation"


JOBS = Kind(
    "jobs", "(m.job_id IS NOT NULL OR m.task_id LIKE 'continuation:%%')", "job_id", "for_run", ("bigint", "bigint")
)
"""Doorbells of jobs, and the continuations of their askings; a continuation has no generation."""
TASKS = Kind("tasks", "m.generation IS NOT NULL", "task_id", "generation", ("text", "int"))
"""Whole messages of ordinary durable tasks."""
KINDS = (JOBS, TASKS)

SOON = "set_config('synchronous_commit', 'off', true)"
"""Has the commit wait for no disk: for a change which, if a crash of Postgres undoes it, only costs one publication."""


def parameters(keys: Iterable[tuple[str | int, int]]) -> dict[str, Any]:
    """Return keys as a statement with `Kind.given` takes them."""
    pairs = list(keys)
    return {"keys": [key for key, _ in pairs], "generations": [generation for _, generation in pairs]}


def free(given: str, condition: str, *, columns: str = "found.task_id", of_row: str = "m.task_id") -> str:
    """Return the CTE `free`: the rows `m` of what is given as `r` that meet a condition and that nobody has locked.

    They are locked then, whatever the statement does with them. Each key is looked up by itself (LATERAL), so that no
    plan reads the table once for each key: Postgres takes a table for empty that a VACUUM found empty and could not
    truncate, and then any order of joins costs nothing. A hundred marks beside a thousand rows took nine seconds so.
    The page is a CTE, which is read once: a sub-select in FROM is read again for each row where the planner sees fit.
    """
    return f"""
WITH free AS MATERIALIZED (
  SELECT {columns} FROM {given} CROSS JOIN LATERAL (
    SELECT {of_row} FROM {{messages}} m WHERE {condition}
    FOR UPDATE OF m SKIP LOCKED) found)"""


BY_TASK_ID = "unnest(%(task_ids)s::text[]) AS r(task_id)"
