"""The names users give: to jobs aliases, unique everywhere; to a child a name, unique under its parent; to channels.

A channel's name is like a path: a message published on a channel reaches its subscribers and those of each ancestor.
Postgres must be able to store and index every name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any
from uuid import UUID

from .errors import (
    AliasTakenError,
    ChildNameTakenError,
    CycleError,
    InvalidAliasError,
    InvalidChannelError,
    InvalidValueError,
)

MAX_LENGTH = 255
"""The most characters in an alias or a child's name."""
MOST_NAMES = 10_000
"""The most tags, aliases, channels, ports or state keys in one call. Each is a row, and one statement writes them all.
"""
SHOWN_OF_CIRCLE = 10
"""The most jobs that the error about a circle names."""


def check_alias(name: str) -> str:
    """Return `name` if it is a valid alias: it cannot be taken for a job's id or a task's id."""
    if not isinstance(name, str):
        raise InvalidAliasError(f"an alias is a string, not a {type(name).__name__}")
    problem = "it must start with a letter" if not name[:1].isalpha() else why_not_storable(name)
    if problem is None and _is_uuid(name):
        problem = "it reads as a UUID, and task ids are UUIDs; choose another"
    if problem:
        raise InvalidAliasError(f"{name[:100]!a} cannot be an alias: {problem}")
    return name


def check_child_name(name: str) -> str:
    """Return `name` if it is a valid child's name."""
    if not isinstance(name, str):
        raise InvalidValueError(f"a child's name is a string, not a {type(name).__name__}")
    problem = "it is empty" if not name else why_not_storable(name)
    if problem:
        raise InvalidValueError(f"{name[:100]!a} cannot be a child's name: {problem}")
    return name


def child_name_taken(*children: tuple[int | None, str | None]) -> ChildNameTakenError:
    """Return the error for children, (parent id, name), if one of the names belongs to another child."""
    named = ", ".join(f"{name!r} of job {parent_id}" for parent_id, name in children if name is not None)
    return ChildNameTakenError(f"A child's name is taken already: {named}. Choose another name, or see job.children.")


def circle(child_id: int, above: Sequence[int]) -> CycleError:
    """Return the error for a child that is among the jobs `above`: from its new parent up to the root."""
    line = [str(job_id) for job_id in reversed(above[: above.index(child_id) + 1])]
    if len(line) > SHOWN_OF_CIRCLE:
        line[SHOWN_OF_CIRCLE // 2 : -SHOWN_OF_CIRCLE // 2] = ["…"]
    return CycleError(
        f"Job {above[0]} cannot adopt job {child_id}, which is itself or one of its ancestors; the circle would be "
        f"{' > '.join([*line, line[0]])}, each the parent of the next."
    )


def alias_taken(name: str, owner_id: int) -> AliasTakenError:
    """Return the error for an alias that another job has."""
    return AliasTakenError(f"Alias {name!r} belongs to job {owner_id}. Remove it there first, or choose another.")


def at_most(names: Iterable[Any], what: str) -> tuple[Any, ...]:
    """Return the names of one call; raise InvalidValueError if they are more than `MOST_NAMES`."""
    given = tuple(islice(names, MOST_NAMES + 1))
    if len(given) > MOST_NAMES:
        raise InvalidValueError(f"One call takes at most {MOST_NAMES} {what}: give them in several calls.")
    return given


def check_key(key: Any) -> str:
    """Refuse a state key that is not a string, or that the store could not keep."""
    if not isinstance(key, str):
        raise InvalidValueError(f"A key of a job's state is a string, not a {type(key).__name__}.")
    problem = why_not_storable(key)
    if problem:
        raise InvalidValueError(f"{key[:100]!a} cannot be a key of a job's state: {problem}")
    return key


def check_tags(names: Any, *, where: str) -> tuple[str, ...]:
    """Return tags, each once, in their order; `where` names the argument that contains them."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise InvalidValueError(f"{where} takes a list of tags, not {ascii(names)[:100]}.")
    given = at_most(names, "tags")
    for name in given:
        problem = f"it is of type {type(name).__name__}, and a tag is a string" if not isinstance(name, str) else None
        problem = problem or ("it is empty" if not name else why_not_storable(name))
        if problem:
            raise InvalidValueError(f"{ascii(name)[:100]} cannot be a tag: {problem}")
    return tuple(dict.fromkeys(given))


def why_not_storable(name: str, *, max_length: int = MAX_LENGTH) -> str | None:
    """Return why the store could not keep this name, or None."""
    if len(name) > max_length:
        return f"it has {len(name)} characters; {max_length} are allowed"
    if "\0" in name:
        return "it holds a NUL character, which Postgres cannot store; leave it out"
    if not name.isascii() and any("\ud800" <= character <= "\udfff" for character in name):
        return "it holds a lone surrogate, which is no character; leave it out"
    return None


def storable(text: str) -> str:
    """Return a text from outside so that the store can keep it: NUL is replaced, and lone surrogates are escaped."""
    return text.replace("\x00", "\ufffd").encode("utf-8", "backslashreplace").decode()


def text_of(error: BaseException) -> str:
    """Return the text of a body's error, as the store can keep it; `str()` of the error may raise too."""
    try:
        return storable(str(error))
    except Exception:
        return "<its str() raises>"


def why_not_name(name: object) -> str | None:
    """Return why a task id or a queue's name cannot be kept and sent, or None; AMQP counts bytes."""
    if not isinstance(name, str):
        return f"it is a string, not a {type(name).__name__}"
    if not name:
        return "it is empty"
    problem = why_not_storable(name)
    if problem is None and (size := len(name.encode())) > MAX_LENGTH:
        return f"it takes {size} bytes in UTF-8; {MAX_LENGTH} are allowed"
    return problem


def _is_uuid(name: str) -> bool:
    try:
        UUID(name)
    except ValueError:
        return False
    return True


ROOT_CHANNEL = "/"
"""The ancestor of every channel."""

CHANNELS_OF_JOBS = "/sidejob/job/"
"""The beginning of the name of each job's channel."""

LOG_CHANNEL = "/sidejob/log"
"""The channel of the log's entries."""

TRACKED_CHANNEL = "/sidejob/tracked"
"""The channel on which the changes of tracked jobs are announced."""

LONGEST_CHANNEL = 512
"""The most characters in a name. Names are indexed, and Postgres refuses index entries above 2,700 bytes."""


def check_channel(name: str) -> str:
    """Return `name` if it is a valid channel name, else raise an error that says why not."""
    if not isinstance(name, str):
        raise InvalidChannelError(f"a channel's name is a string, not a {type(name).__name__}")
    problem = _problem_of_channel(name)
    if problem:
        raise InvalidChannelError(f"{name[:100]!a} is not a channel's name: {problem}")
    return name


def check_channels(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of channels, each once, if all are valid."""
    return tuple(dict.fromkeys(check_channel(name) for name in at_most(names, "channels")))


def channel_ancestors(name: str) -> list[str]:
    """Return the channel itself, then each of its ancestors up to ``/``."""
    found = [name]
    while name != ROOT_CHANNEL:
        name = name.rpartition("/")[0] or ROOT_CHANNEL
        found.append(name)
    return found


def channel_of_job(job_id: int) -> str:
    """Return the channel of one job: its changes of status, and its own publications."""
    return f"{CHANNELS_OF_JOBS}{job_id}"


def channel_of_workers(queue: str) -> str:
    """Return the channel of a queue's registry: the tasks that workers serve there."""
    return f"/sidejob/workers/{queue}"


def _problem_of_channel(name: str) -> str | None:
    if not name.startswith("/"):
        return f'it must begin with "/"; write {"/" + name[:100]!a}'
    if name != ROOT_CHANNEL and name.endswith("/"):
        return 'it must not end with "/"; leave the last one out'
    if "//" in name:
        return 'it has an empty part ("//"); put one "/" between two parts'
    return why_not_storable(name, max_length=LONGEST_CHANNEL)
