"""The words of steps: their names, and how the error of a step is raised again."""

from __future__ import annotations

import json
from contextlib import suppress
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
