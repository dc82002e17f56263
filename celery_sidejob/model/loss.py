"""Why a run was lost: what happened to its process or its worker, as far as the observer could tell."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, get_type_hints

from .checks import shown

MOST_OF_CAUSE = 200
"""The most characters of an error's text in a loss."""
OUT_OF_MEMORY = {True: ", out of memory", False: ", not because memory ran out", None: ""}


class LossKind(StrEnum):
    """What was noticed of a lost run. Each kind has a sentence in `SENTENCES`."""

    KILLED = "killed"
    """A signal ended its process; the worker lives on."""
    EXITED = "exited"
    """Its process ended by itself in the middle of the run."""
    ENDED = "ended"
    """Its process has ended, and its pool has read the exit code first."""
    DISCONNECTED = "disconnected"
    """Its worker's connection to Postgres has ended, and no heartbeat followed."""
    SILENT = "silent"
    """Its worker sent no heartbeat."""
    OVERDUE = "overdue"
    """It did not renew its own lease. Its process is killed, unless it is the worker's own."""
    DROPPED = "dropped"
    """Its worker held the run and did not execute it."""
    LEFT = "left"
    """Its body raised an exception that ends processes."""
    STOPPED = "stopped"
    """Its worker stopped as planned. It does not count as a loss, but a task that must not be repeated does not begin
    again."""
    STORE = "store"
    """It could not reach Postgres."""
    REFUSED = "refused"
    """Its body ended well, and Postgres refuses that end."""
    UNKNOWN = "unknown"
    """Only the loss itself was noticed."""


SENTENCES = {
    LossKind.KILLED: "process killed by {signal}{memory} (process {process} of worker {worker})",
    LossKind.EXITED: "process exited with code {exit_code} in the middle of the run (process {process} of "
    "worker {worker})",
    LossKind.ENDED: "process ended, its exit code is not known (process {process} of worker {worker})",
    LossKind.DISCONNECTED: "worker gone: its connection to Postgres ended, and no heartbeat followed. It was killed, "
    "or its host is down or cut off (worker {worker})",
    LossKind.SILENT: "worker silent for {silent_s:.0f} seconds: it was killed, is frozen or cut off, or its host is "
    "down (worker {worker})",
    LossKind.OVERDUE: "lease not renewed: the run did not renew its own lease in time "
    "(process {process} of worker {worker})",
    LossKind.DROPPED: "run dropped: its worker held it and did not execute it (worker {worker})",
    LossKind.LEFT: "body ended with {cause}, which ends a process (worker {worker})",
    LossKind.STOPPED: "worker stopped before the run ended (worker {worker})",
    LossKind.STORE: "Postgres out of reach of the run: {cause}",
    LossKind.REFUSED: "end refused by Postgres: {cause}",
    LossKind.UNKNOWN: "worker died",
}
"""The sentence of each kind. It begins with the fact, because lists show only the beginning."""


@dataclass(frozen=True, slots=True)
class Loss:
    """One loss. A fact that is None is not known.

    `worker` is the worker's name in the list of `workers`, "host:process:random". `out_of_memory`: whether, in the
    seconds before, the kernel has killed a process of the worker's control group for want of memory; None if unknown.
    """

    kind: LossKind = LossKind.UNKNOWN
    worker: str | None = None
    process: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    out_of_memory: bool | None = None
    silent_s: int | float | None = None
    cause: str | None = None

    @classmethod
    def of_process(cls, worker: str, process: int, status: int | None, *, out_of_memory: bool | None) -> Loss:
        """Return the loss of a run whose process ended: `status` is its exit code, or minus its signal, or None."""
        if status is None:
            return cls(LossKind.ENDED, worker, process)
        if status >= 0:
            return cls(LossKind.EXITED, worker, process, exit_code=status)
        killed = -status == signal.SIGKILL  # the only signal that the kernel sends for want of memory
        return cls(
            LossKind.KILLED,
            worker,
            process,
            signal=signal_name(-status),
            out_of_memory=out_of_memory if killed else None,
        )

    @classmethod
    def of_body(cls, worker: str | None, error: BaseException) -> Loss:
        """Return the loss of a run whose body ended its process with `error`, even if `repr(error)` raises."""
        text = shown(error, most=MOST_OF_CAUSE).replace("\x00", "\\x00")  # Postgres cannot store NUL
        return cls(LossKind.LEFT, worker, cause=text)

    @classmethod
    def of_json(cls, text: str) -> Loss:
        """Return the loss that was kept as this JSON text."""
        return cls.of_facts(json.loads(text))

    @classmethod
    def of_facts(cls, kept: object) -> Loss:
        """Return the loss with these facts; facts that only a newer version knows are dropped."""
        if not isinstance(kept, dict):
            return cls()
        known = {name: kept[name] for name, form in FORMS.items() if name in kept and isinstance(kept[name], form)}
        kind = kept.get("kind")
        return cls(next((one for one in LossKind if one == kind), LossKind.UNKNOWN), **known)

    def redacted(self, hide: Callable[[Any], Any]) -> Loss:
        """Return the loss as people and listeners may see it: `hide` hides the secrets in its cause."""
        return self if self.cause is None else replace(self, cause=str(hide(self.cause)))

    @property
    def counts(self) -> bool:
        """Whether it is counted and reported as a loss."""
        return self.kind != LossKind.STOPPED

    @property
    def why(self) -> str:
        """The loss as a sentence without its full stop."""
        facts = {**asdict(self), "silent_s": self.silent_s or 0.0}
        return SENTENCES[self.kind].format(memory=OUT_OF_MEMORY[self.out_of_memory], **facts)

    @property
    def facts(self) -> Mapping[str, Any]:
        """`why` and `host`, and all known facts."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        host = {} if self.worker is None else {"host": self.worker.split(":")[0]}
        return {"why": self.why, **known, "kind": str(self.kind), **host}

    @property
    def json(self) -> str:
        """The facts as JSON text."""
        return json.dumps(self.facts)


FORMS = {name: form for name, form in get_type_hints(Loss).items() if name != "kind"}
"""The other facts of a loss, and their types; a fact of another type comes from another version."""


def signal_name(number: int) -> str:
    """Return a signal's name, "signal 64" if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
