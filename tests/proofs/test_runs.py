"""The judge of the proof `runs` finds what was broken."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from proofs.runs import judge

ORDER, UNITS = 1, 2
"""Ids of jobs; each has its id as key."""
JOBS = {"order": {ORDER: ORDER}, "units": {UNITS: UNITS}}
TASKS = {"repeated": "again", "single": "once", "buried": "once"}
DIED = {"job": ORDER, "run": 1, "units": 0, "before": 0, "after": 0, "ended": False, "undone": False}
"""The first death of a run in a row, which is not counted."""
DIED_AGAIN = {**DIED, "run": 2, "after": 1}
NOTED = f"""\
began {ORDER} 1 0.5
began {ORDER} 2 0.6
began repeated 0 0.7
began repeated 1 0.8
ended repeated 1 0.9
began single 0 1.0
ended single 0 1.1
began buried 0 1.2
"""


class Seen:
    """What is in a store, by a word of the statement that asks for it."""

    def __init__(self, **changed: Any) -> None:
        value = [ORDER, ORDER, ORDER, [10, 11, 12], ORDER, True, ORDER]
        self._rows: dict[str, list[dict[str, Any]]] = {
            "FROM jobs": [{"id": job_id, "status": "completed"} for job_id in (ORDER, UNITS)],
            "FROM askings": [{"job_id": ORDER, "outcome": "completed", "result": json.dumps(value)}],
            "FROM packets": [
                *({"job_id": ORDER, "name": name, "value": f"{ORDER}"} for name in ("inside", "done")),
                *({"job_id": UNITS, "name": "seen", "value": f"{one}"} for one in judge.packets_of(UNITS)),
            ],
            "GROUP BY": [{"task": "runs.reject", "reason": "failed", "count": 1}],
            "FROM public.ledger": [
                *({"what": what, "value": ORDER} for what in ("row", "packed", "undo", "give back")),
                *({"what": "unit", "value": one} for one in judge.packets_of(UNITS)),
            ],
            "FROM public.freed": [DIED, DIED_AGAIN],
            "job_id IS NULL": [{"task_id": "buried", "reason": "lost"}],
            "FROM public.gone": [{"task_id": "repeated", "losses": 0}],
        }
        for word, change in changed.items():
            self._rows[next(of for of in self._rows if word in of)] = change

    def rows(self, statement: str) -> list[Any]:
        """Return what this statement reads."""
        (found,) = [rows for word, rows in self._rows.items() if word in statement and not (
            word == "FROM jobs" and "FROM packets" in statement
        )]  # fmt: skip
        return [SimpleNamespace(**row) for row in found]


def found(noted: str = NOTED, **changed: Any) -> list[str]:
    """Return the complaints about a store that has been changed."""
    seen: Any = Seen(**changed)
    return [" ".join(wrong.split()) for wrong in judge.judge(seen, noted, JOBS, TASKS, []).wrong]


def without(word: str, number: int) -> Mapping[str, Any]:
    """Leave a row out of what is read by this statement."""
    rows = next(rows for of, rows in Seen()._rows.items() if word in of)
    return {word: rows[:number] + rows[number + 1 :]}


def twice(word: str, number: int) -> Mapping[str, Any]:
    """Have a row twice in what is read by this statement."""
    rows = next(rows for of, rows in Seen()._rows.items() if word in of)
    return {word: [*rows, rows[number]]}


def test_what_is_as_it_must_be_is_found_good() -> None:
    assert found() == []


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        (without("jobs", 0), "order 1 has not completed (1)"),
        (without("askings", 0), "order 1 has another value (1)"),
        (without("packets", 0), "order 1 has other packets (1)"),
        (twice("packets", 2), "units 2 has other packets (1)"),
        (without("GROUP", 0), "other jobs in the dead set (1)"),
        (without("ledger", 0), "rows that are missing (1): (('row', 1), 1)"),
        (twice("ledger", 4), "rows that are there too often (1): (('unit', 20), 1)"),
        ({"freed": [DIED, {**DIED_AGAIN, "after": 0}]}, "a death that was not counted (1)"),
        ({"freed": [DIED, {**DIED_AGAIN, "after": 2}]}, "a death counted twice (1)"),
        ({"freed": [{**DIED, "ended": True, "after": 1}]}, "losses after the end of a run (1)"),
        ({"freed": [{**DIED, "units": 1}]}, "a death that was not counted (1)"),
    ],
)  # fmt: skip
def test_what_is_broken_is_found(changed: Mapping[str, Any], complaint: str) -> None:
    assert [wrong for wrong in found(**changed) if wrong.startswith(complaint)], found(**changed)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("ended repeated 1 0.9\n", ""), "has not ended well (1): again repeated"),
        (("began single 0 1.0\n", "began single 0 1.0\nbegan single 1 1.0\n"), "was repeated (1): once single"),
        (("ended single 0 1.1\n", ""), "has not ended once (1): once single"),
        (("began repeated 1 0.8\n", "began repeated 1 0.8\n" * 2), "deaths that were not counted (1): again repeated"),
    ],
)  # fmt: skip
def test_a_task_that_was_not_run_as_it_must_be_is_found(change: tuple[str, str], complaint: str) -> None:
    told = found(NOTED.replace(*change))
    assert [wrong for wrong in told if wrong.startswith(complaint)], told


def test_a_run_of_which_nothing_was_heard_is_no_fault() -> None:
    assert found(NOTED.replace(f"began {ORDER} 2 0.6\n", "")) == []
