"""A message of an ordinary durable task, as a value, and the header that leads from a message to its row."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from .capacity import Admission
from .checks import is_number
from .names import why_not_name

HEADER = "sidejob_durable"
"""The message's header: ``{"v": 1, "n": generation}``. A message without it has no row.

If there are several stores, ``"s"`` names the store that has the row. ``"c"`` names the call of a message of which
another store may have a copy: the stores in ``"t"``, or any store (``"u"``) if its publisher may not know of the row.
"""
CALL = "sidejob_call"
"""The header of a message published without a row, because all stores are unavailable: some may have a copy."""
REPUBLISHED = "sidejob_republished"
"""A header of copies: the store has published the message before, or may have, and the first copy was silent."""
WORKER = "sidejob_worker"
"""The request's key for the identity under which the worker claims; the parent sets it for each delivery."""
ADOPTED = "sidejob_adopted"
"""The request's key for the whole message of a publisher without this package; the parent sets it."""
HELD = "sidejob_held"
"""The request's key for a run whose row this worker has held since the fetch, a `HeldRun`; the parent sets it."""
DIGEST = "sidejob_digest"
"""The request's key for the digest of the received body, a `Digest`; the parent sets it."""
DEATHS = "sidejob_deaths"
"""A header of messages taken out of the dead set: their earlier deaths, the oldest first; retries keep it."""
KEPT_FORMAT = 2
"""The version of a publication. Code that knows only continuations (format 1) leaves such a row to other processes."""
HEADER_FORMAT = 1

ON_LOST = ("requeue", "dead")

MOST_GENERATIONS = 2**31 - 1

Key = tuple[str, int]
"""(task id, generation)"""


class Held(NamedTuple):
    """A row that a worker holds, because it has fetched the row's message or a process has locked the row."""

    task_id: str
    generation: int
    worker_id: int
    at: datetime
    """The number of the hold: the same worker may hold the same row again, and only a hold of its own ends a run."""
    place: int | None = None
    """The place in its queue to which the message goes back if the run does not begin here; None: it is sent again."""


class HeldRun(NamedTuple):
    """The facts that a run's process gets about the row that its worker holds."""

    held: Held
    queue: str
    waited_s: float
    """Seconds between the moment at which it was due and its fetch."""
    stands: bool
    """Whether it may begin as it is; otherwise its process first releases the row, and locks it like any other."""


class Terms(NamedTuple):
    """What the lock of a run writes into its row: the process that has it, and the rules for its loss."""

    pid: int
    on_lost: str
    max_losses: int


class Content(NamedTuple):
    """The content that a delivery runs. If its row's content differs, it is forged, and the row stays as it is."""

    task: str
    digest: str
    """The body's digest, by `digest_of`."""
    unpack: Callable[[bytes], bytes] | None = None
    """Decompresses the row's body, if the delivery says that it is compressed.

    The received body is not compressed any more.
    """


def digest_of(body: bytes) -> str:
    """Return the digest of a body; the store computes the same for a row's body."""
    return hashlib.sha256(body).hexdigest()


class Digest(str):
    """A body's digest, from `digest_of` in the worker's parent; a value from the message itself is a plain str."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Death:
    """The reason why a job or a durable task is buried, for its entry in the dead set."""

    reason: str
    error: str
    traceback: str | None = None
    retries: int = 0
    """How many of Celery's retries it had used."""
    group: str | None = None
    """The failure group that its body has named; None for the class at the beginning of `error`."""


@dataclass(frozen=True, slots=True)
class Message:
    """A whole message: `body` is the bytes as published, `publication` (JSON text) is everything around them.

    `generation` counts the messages published under this task id: a retry is the next one, a copy is the same.
    """

    task_id: str
    task: str
    queue: str
    publication: str
    body: bytes
    generation: int = 1
    eta: datetime | None = None
    expires_at: datetime | None = None
    priority: int | None = None
    """From 0, the lowest, to 9, if the message goes to its `queue`; None if an exchange routes it."""
    again: bool = False
    """Whether it may be a copy (`REPUBLISHED`)."""
    about: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    """The parsed `publication`, if this process has just made it, which saves the parsing."""
    store: str | None = None
    """The name of the store that has the row; None in an app with one store."""
    call: str | None = None
    """The name of the call that made the message, if another store may receive a copy."""
    tried: tuple[str, ...] = ()
    """The stores that may have a copy: they took the message and did not answer."""
    unconfirmed: bool = False
    """Whether its publisher may not know of the row and may have given a copy to another store."""
    unique_key: str | None = None
    replaces: str | None = None
    """The task id of the message whose unique key this message takes over, if no run of it has begun."""
    admission: Admission | None = None
    slot: int | None = None
    """The shard of its capacity pool in which it has its slots, once it was admitted."""

    @property
    def content(self) -> Content:
        """The content that a delivery of this message runs."""
        return Content(self.task, digest_of(self.body))

    @classmethod
    def of_row(cls, row: Any) -> Message:
        """Make the message from a row that is published again."""
        return cls(
            row.task_id,
            row.task,
            row.queue,
            row.publication,
            bytes(row.body),
            row.generation,
            expires_at=row.expires_at,
            again=True,
        )


DELAYED = "w"
"""The first letter in the name of a call whose message waits in the store first; its publisher is long done by then."""


def header_of(message: Message) -> dict[str, Any]:
    """Return the value of a message's header."""
    header: dict[str, Any] = {"v": HEADER_FORMAT, "n": message.generation}
    if message.store is not None:
        header["s"] = message.store
    if message.call is not None and (message.tried or message.unconfirmed):
        header["c"] = message.call
        if message.tried:
            header["t"] = list(message.tried)
        if message.unconfirmed:
            header["u"] = True
    return header


@dataclass(frozen=True, slots=True)
class Address:
    """The location of a message's row, from the message's header."""

    store: str | None = None
    call: str | None = None
    tried: tuple[str, ...] = ()
    unconfirmed: bool = False

    @classmethod
    def of(cls, header: Any) -> Address:
        """Read the header; a message without one has no row."""
        if not isinstance(header, Mapping) or why_no_header(header) is not None:
            return cls()
        return cls(header.get("s"), header.get("c"), tuple(header.get("t") or ()), bool(header.get("u")))


NOWHERE = Address()
"""The address of a message that can have no copy, as far as is known."""


def headers_of(publication: str) -> Mapping[str, Any]:
    """Return the headers of a kept message, for people; none if this version cannot read them."""
    try:
        headers = json.loads(json.loads(publication)["about"])["headers"]
    except (ValueError, LookupError, TypeError):
        return {}
    return headers if isinstance(headers, Mapping) else {}


def why_no_header(header: object) -> str | None:
    """Say why the header of a durable task's message is invalid, or return None; newer formats are not checked."""
    if not isinstance(header, Mapping):
        return "it is no mapping"
    if not is_number(header.get("v", HEADER_FORMAT)):
        return "its version is no number"
    if header.get("v", HEADER_FORMAT) > HEADER_FORMAT:
        return None
    if not is_number(header.get("n"), most=MOST_GENERATIONS):
        return "its 'n' is no number"
    tried = header.get("t") or ()
    if not isinstance(tried, list | tuple):
        return "its 't' is no list"
    wrong = [text for text in (header.get("s"), header.get("c"), *tried) if text is not None and why_not_name(text)]
    return f"it holds {str(wrong[0])[:60]!a}, which is no name" if wrong else None


def is_newer(header: object) -> bool:
    """Tell whether a newer version wrote a valid header."""
    return isinstance(header, Mapping) and why_no_header(header) is None and header.get("v", 1) > HEADER_FORMAT


def key_of(task_id: str, header: Any) -> Key | None:
    """Return the key of a delivery's row.

    None if its publisher had no or a newer version of this package, or if this package never writes such a header.
    """
    if header is None or why_no_header(header) is not None or is_newer(header):
        return None
    return task_id, int(header["n"])


def call_of(publication: str) -> str | None:
    """Return the name of the call that made a message; None if there was only one store, or it cannot be read."""
    try:
        call: str | None = json.loads(publication).get("call")
    except (ValueError, AttributeError):
        return None
    return call
