"""The words of steps: their names, their records, and how the error of a step is raised again."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from typing import Any, Literal

from .checks import shown
from .errors import InvalidValueError, StepFailedError, StepNameError
from .names import text_of, why_not_storable
from .values import decode, encode

StepKind = Literal["step", "call", "calls", "sleep", "receive", "since"]

StepKey = tuple[str, str, int]
"""(turn, name, number): the turn of `for_inputs` as its packets or values tell it, empty outside of turns."""

MOST_STEPS = 10_000
"""The most records of one job: with more, each of its runs would be slow to begin."""
LONGEST_BACKOFF_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepStep:
    """The new record of a step; value and error are JSON texts.

    While it is not `done`, the value of a call is a list: the ids of its children, how many there will be, and the ids
    of failed ones that are still to be asked again; `due_at` or `wait_s` tell how long a receive waits, or when a
    failed step is tried again. A sleep is done once that time has come.
    """

    job_id: int
    turn: str
    name: str
    number: int
    kind: StepKind
    run_no: int
    worker_id: int
    done: bool = True
    value: str | None = None
    error: str | None = None
    tries: int = 1
    due_at: datetime | None = None
    wait_s: float | None = None
    took_s: float = 0.0

    @property
    def key(self) -> StepKey:
        """The key under which it is found."""
        return self.turn, self.name, self.number


@dataclass(frozen=True, slots=True)
class ForgetSteps:
    """Records that are removed from the job: of these names, (name, number), with None for all numbers of a name."""

    job_id: int
    names: tuple[tuple[str, int | None], ...]
    turn: str | None = None
    """The turn whose records they are; None for those of all turns, and of none."""


@dataclass(frozen=True, slots=True)
class LeaveTurns:
    """The records of the job's turns, which are committed, so that their packets will not come again."""

    job_id: int


@dataclass(frozen=True, slots=True)
class FinishSteps:
    """All records of a job whose run completes; its history lists them."""

    job_id: int
    run_no: int
    worker_id: int
    of_body: bool
    """Whether some records belong to no turn: then late events do not ask the job for a further run."""
    reads: tuple[str, ...]
    """Input ports that the body has read outside of steps: late packets on these ask for a further run."""


@dataclass(frozen=True, slots=True)
class BeginAnew:
    """Removes all records of a job, and those that the run in progress will still make.

    Without `force` this is done only if the job may be asked.
    """

    job_id: int
    force: bool


@dataclass(frozen=True, slots=True)
class CopySteps:
    """The finished records of another job, from before the step `before`; None for all of them."""

    job_id: int
    source: int
    before: tuple[str, int] | None


StepChange = KeepStep | ForgetSteps | LeaveTurns | FinishSteps | BeginAnew | CopySteps


def check_name(name: Any) -> str:
    """Return the name of a step; StepNameError for one that no step can have."""
    if not isinstance(name, str):
        raise StepNameError(f"The name of a step is a text, not {shown(name)}.")
    problem = "it is empty" if not name else why_not_storable(name)
    if problem is None and "#" in name:
        problem = "'#' stands before the number of a step whose name comes again"
    if problem:
        raise StepNameError(f"{name[:100]!a} cannot be the name of a step: {problem}.")
    return name


def label(name: str, number: int) -> str:
    """Return the name of a step as people read it: its number is shown from the second on."""
    return name if number == 1 else f"{name}#{number}"


def parse_label(text: Any) -> tuple[str, int | None]:
    """Return the name and the number that a label means; None for a number that it does not tell."""
    name, _, number = text.partition("#") if isinstance(text, str) else (text, "", "")
    check_name(name)
    if number and not (number.isascii() and number.isdigit() and 0 < int(number[:9]) <= MOST_STEPS):
        raise StepNameError(f"{shown(text)} names no step: behind '#' is its number, as in {name[:50]}#2.")
    return name, int(number) if number else None


def backoff_s(first_s: float, tries: int) -> float:
    """Return the seconds before the next try of a step, after so many failed tries."""
    return min(first_s * 2.0 ** min(tries - 1, 60), LONGEST_BACKOFF_S)


# -- errors ----------------------------------------------------------------------------------------------------


def failure_of(error: Exception) -> str:
    """Return an error in the form of its step's record: JSON text."""
    kind = type(error)
    kept = {"type": kind.__qualname__, "module": kind.__module__, "message": text_of(error), "args": None}
    with suppress(InvalidValueError):
        kept["args"] = json.loads(encode(list(error.args), limit=100_000))
    return json.dumps(kept)


def error_of(step: str, job_id: int, failure: str, cause: Exception | None = None) -> Exception:
    """Return the error in a step's record, as it is raised each time: an equal error, or else a StepFailedError."""
    kept = json.loads(failure)
    again = _made_again(kept, cause)
    if again is not None:
        return again if cause is None else cause
    return StepFailedError(f"Step {step!r} of job {job_id} has failed: {kept['type']}: {kept['message']}", kept["type"])


def _made_again(kept: Any, like: Exception | None) -> Exception | None:
    """Return the error made from the class and the arguments in a record; None if it is not the same error."""
    if kept["args"] is None:
        return None
    try:
        found: Any = import_module(kept["module"])
        for part in kept["type"].split("."):
            found = getattr(found, part)
        if not issubclass(found, Exception):
            return None
        made: Exception = found(*decode(json.dumps(kept["args"])))
    except Exception:  # the class is foreign: it may have changed, or want other arguments
        return None
    if type(made) is not found or text_of(made) != kept["message"]:
        return None
    return made if like is None or type(like) is found else None
