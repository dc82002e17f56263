"""Channels: names like paths. A message published on a channel reaches its subscribers and those of each ancestor."""

from __future__ import annotations

from collections.abc import Iterable

from .errors import InvalidChannelError
from .names import at_most, why_not_storable

ROOT = "/"
"""The ancestor of every channel."""

OF_JOBS = "/sidejob/job/"
"""The beginning of the name of each job's channel."""

LOG = "/sidejob/log"
"""The channel of the log's entries."""

TRACKED = "/sidejob/tracked"
"""The channel on which the changes of tracked jobs are announced."""

MAX_LENGTH = 512
"""The most characters in a name. Names are indexed, and Postgres refuses index entries above 2,700 bytes."""


def check(name: str) -> str:
    """Return `name` if it is a valid channel name, else raise an error that says why not."""
    if not isinstance(name, str):
        raise InvalidChannelError(f"a channel's name is a string, not a {type(name).__name__}")
    problem = _problem(name)
    if problem:
        raise InvalidChannelError(f"{name[:100]!a} is not a channel's name: {problem}")
    return name


def check_all(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of channels, each once, if all are valid."""
    return tuple(dict.fromkeys(check(name) for name in at_most(names, "channels")))


def ancestors(name: str) -> list[str]:
    """Return the channel itself, then each of its ancestors up to ``/``."""
    found = [name]
    while name != ROOT:
        name = name.rpartition("/")[0] or ROOT
        found.append(name)
    return found


def job(job_id: int) -> str:
    """Return the channel of one job: its changes of status, and its own publications."""
    return f"{OF_JOBS}{job_id}"


def workers(queue: str) -> str:
    """Return the channel of a queue's registry: the tasks that workers serve there."""
    return f"/sidejob/workers/{queue}"


def _problem(name: str) -> str | None:
    if not name.startswith("/"):
        return f'it must begin with "/"; write {"/" + name[:100]!a}'
    if name != ROOT and name.endswith("/"):
        return 'it must not end with "/"; leave the last one out'
    if "//" in name:
        return 'it has an empty part ("//"); put one "/" between two parts'
    return why_not_storable(name, max_length=MAX_LENGTH)
