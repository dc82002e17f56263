"""Every error that this package raises for its users.

A message says what was asked, of which job, and what to do. `docs/errors.md` lists the messages.
Bad input is refused before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_OF_GROUP = 255
"""The most characters in the name of a failure group."""


@dataclass(frozen=True, slots=True)
class FullPort:
    """A port with too little room for a write: it has `used` up its `limit`, and the writer `needs` more."""

    id: int
    job_id: int
    direction: str
    name: str
    limit: int
    used: int
    needs: int


class SideJobError(Exception):
    """The root of every error this package raises."""


class MissingLibraryError(SideJobError, ImportError):
    """A library is not installed, or cannot be loaded. The message names the extra of this package that brings it."""


class JobNotFoundError(SideJobError, LookupError):
    """No job has this id or alias. Never raised for a store that cannot be reached."""


def job_not_found(which: object) -> JobNotFoundError:
    """Return the error for a job that does not exist, given its id or alias."""
    return JobNotFoundError(f"There is no job {which!r}: it was deleted, or never committed.")


class ScheduleNotFoundError(SideJobError, LookupError):
    """There is no schedule of this name."""


class UnknownTaskError(SideJobError, LookupError):
    """No task of this name is registered, or the task is not a sidejob task."""


class IllegalMoveError(SideJobError):
    """The job's status does not allow this call, or the call is not allowed where it is made, as in a run."""


class PortNotFoundError(SideJobError, LookupError):
    """The job has no port of this name and direction, and its task does not allow further ports with ``"*"``."""


class InvalidPortError(SideJobError, ValueError):
    """A port's name or its options break the rules."""


class PortFullError(SideJobError):
    """A port with a limit has no room for these packets: `port` of `job_id`, with its `limit` and its `used` room.

    A run that writes there waits for room. It only gets this error if the port could never have enough room, or if only
    the job itself could make room.
    """

    def __init__(self, message: str, full: tuple[FullPort, ...] = (), *, may_pass: bool = True) -> None:
        super().__init__(message)
        self.full = full
        self.may_pass = may_pass and all(port.needs <= port.limit for port in full)
        """Whether the same write may succeed later."""
        if full:
            self.job_id, self.direction, self.port = full[0].job_id, full[0].direction, full[0].name
            self.limit, self.used = full[0].limit, full[0].used


class InvalidChannelError(SideJobError, ValueError):
    """A channel's name breaks the rules: it begins with ``/`` and has no empty part."""


class InvalidAliasError(SideJobError, ValueError):
    """An alias must start with a letter and must not look like a UUID."""


class InvalidValueError(SideJobError, ValueError):
    """A value is not JSON, or it is too large. The message contains the path to the offending part."""


class ResultTooLargeError(SideJobError):
    """A task has ended, but its result takes more bytes than the result backend keeps. `get()` raises it."""


class AliasTakenError(SideJobError):
    """Another job has this alias."""


class DuplicateError(SideJobError):
    """An open job or durable task already has this unique key.

    If it is a job, `job_id` and `job` (its handle) are set; if it is a durable task, `task_id` is. The others are None.
    """

    def __init__(self, message: str, job_id: int | None = None, task_id: str | None = None) -> None:
        super().__init__(message)
        self.job_id = job_id
        self.job: Any = None
        self.task_id = task_id


class PoolConflictError(SideJobError):
    """A capacity pool exists with another declaration. Two processes must not count by different rules."""


class Overloaded(SideJobError):
    """A capacity pool is full, and nothing was written.

    `pool` is its name, `limit` its slots, and `used` how many of them are taken. `retry_after` is the number of seconds
    after which a slot is likely to be free, estimated from the slots that were freed lately.
    """

    def __init__(
        self, message: str, *, pool: str = "", limit: int = 0, used: int = 0, retry_after: float = 0.0
    ) -> None:
        super().__init__(message)
        self.pool = pool
        self.limit = limit
        self.used = used
        self.retry_after = retry_after


class ChildNameTakenError(SideJobError):
    """The parent has another child of this name."""


class HasParentError(SideJobError):
    """The job to be adopted has a parent already."""


class NotAChildError(SideJobError, LookupError):
    """The job to be disowned is not a child of this job."""


class CycleError(SideJobError):
    """The adoption would make a job its own ancestor, or the dependency would make it wait for itself."""


class HasDependentsError(SideJobError):
    """Jobs outside the cancelled set depend on jobs in it: `dependents` is {job id: ids of the jobs that wait}."""

    def __init__(self, message: str, dependents: Mapping[int, tuple[int, ...]]) -> None:
        super().__init__(message, dependents)
        self.dependents = dict(dependents)

    def __str__(self) -> str:
        return str(self.args[0])


class DependencyFailedError(SideJobError):
    """A job on which this job depended with ``on_failure="fail"`` has failed or was terminated.

    The body was not called.
    """


class BatchClosedError(SideJobError):
    """The batch is closed and takes no more members."""


class BatchNotFoundError(SideJobError, LookupError):
    """No batch has this name."""


def batch_not_found(name: str) -> BatchNotFoundError:
    """Return the error for a batch that does not exist."""
    return BatchNotFoundError(f"There is no batch {name!r}: it was never opened, or was deleted.")


class StepNameError(SideJobError, ValueError):
    """A step's name breaks the rules, or the step of this name is of another kind."""


class StepFailedError(SideJobError):
    """A step has failed, with an error that cannot be made again from its class and arguments; `error` is the class.

    It is raised each time the body comes to the step. In the run in which it was raised first, `__cause__` is the
    error itself.
    """

    def __init__(self, message: str, error: str = "") -> None:
        super().__init__(message, error)
        self.error = error

    def __str__(self) -> str:
        return str(self.args[0])


class ChildFailedError(SideJobError):
    """Children called by a step have failed or were terminated; `children` has their ids."""

    def __init__(self, message: str, children: Sequence[int] = ()) -> None:
        super().__init__(message, list(children))
        self.children = list(children)

    def __str__(self) -> str:
        return str(self.args[0])


class LeaseLostError(SideJobError):
    """This run is no longer the job's current run; nothing of this unit was applied. The body should end at once."""


class UnitNotCommittedError(SideJobError):
    """The body went on without committing the unit's transaction. The packets that it read are on their ports again."""


class TaskRevokedError(SideJobError):
    """The asking was revoked, or expired before its run. It has failed; later askings run."""


class JobFailed(SideJobError):
    """Raised by a body to fail, and to name the group of its failure: `JobFailed("no stock", "Shelf 7 is empty.")`.

    Entries of the dead set are found and retried by their group. For any other exception the group is its class.
    """

    def __init__(self, group: str, message: str = "") -> None:
        problem = _why_no_group(group)
        if problem:
            raise InvalidValueError(f"JobFailed(group, message): {ascii(group)[:100]} cannot be a group: {problem}.")
        super().__init__(group, message)
        self.group = group
        self.message = message

    def __str__(self) -> str:
        return str(self.message or self.group)


def _why_no_group(group: Any) -> str | None:
    if not isinstance(group, str):
        return f"it is a string, not a {type(group).__name__}"
    if not group:
        return "it is empty"
    if len(group) > MOST_OF_GROUP:
        return f"it has {len(group)} characters; {MOST_OF_GROUP} are allowed"
    if "\0" in group or any("\ud800" <= character <= "\udfff" for character in group):
        return "it holds a character that Postgres cannot store; leave it out"
    return None


class StoreUnavailableError(SideJobError):
    """The store could not be reached, or went away. The message says whether the call may have been applied."""


class CommitInDoubtError(StoreUnavailableError):
    """The answer to the caller's own commit was lost. A run that ends with this begins again from its last commit."""


class SchemaError(SideJobError):
    """The schema is missing, incomplete, too old, too new, or belongs to another app or broker."""


class SettingsError(SideJobError, ValueError):
    """A ``sidejob_*`` setting is unknown, malformed or contradicts another."""
