"""Ports: a job's mailboxes. Their names, their options, and the absence of data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from . import values
from .changes import PortKey
from .checks import shown
from .errors import FullPort, InvalidChannelError, InvalidPortError, InvalidValueError, PortFullError, PortNotFoundError
from .names import at_most, check_channels

MAX_LENGTH = 255
"""The most characters in a port's name."""

MOST_PACKETS = 2**31 - 1
"""The highest limit of a port."""

WILDCARD = "*"
"""Stands for every port that a task does not name."""


@final
class NoData:
    """The class of `NO_DATA`."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "NO_DATA"

    def __reduce__(self) -> str:
        # The name of a global: pickle and copy then return this single instance.
        return "NO_DATA"


NO_DATA: Final = NoData()
"""The value that a port without packets and without default returns. Null is data; this is not."""


@dataclass(frozen=True)
class PortOptions:
    """The options of a new port. `default` is the value that readers get; `limit=None` means no limit."""

    default: Any = NO_DATA
    channels: tuple[str, ...] = ()
    limit: int | None = None


def check_port_name(name: str, *, wildcard: bool = False) -> str:
    """Return `name` if it may name a port; with `wildcard`, also ``"*"``."""
    if not isinstance(name, str):
        raise InvalidPortError(f"a port's name is a string, not a {type(name).__name__}")
    if name == WILDCARD:
        if wildcard:
            return name
        raise InvalidPortError('"*" is no port: it only stands, among a task\'s own ports, for those it does not name')
    if not _NAME.fullmatch(name):
        raise InvalidPortError(
            f"{name[:100]!a} is not a port's name: use letters (a to z, A to Z), digits and underscores only"
        )
    if len(name) > MAX_LENGTH:
        raise InvalidPortError(f"a port's name of {len(name)} characters is too long: {MAX_LENGTH} are allowed")
    return name


def port_not_found(job_id: int, direction: str, name: str, ports: Iterable[tuple[str, str]]) -> PortNotFoundError:
    """Return the error for a port that a job does not have; `ports` are its ports, (direction, name)."""
    known = ", ".join(sorted(other for side, other in ports if side == direction)) or "none"
    return PortNotFoundError(
        f"Job {job_id} has no {direction}put port {name!r}; it has: {known}. Name it in the task's or the job's "
        f'{direction}ports=, or allow further ports with "*".'
    )


def value_of(packet: Any, port: PortKey) -> Any:
    """Return the value of a packet's row; if this version cannot read it, raises InvalidValueError, which names it.

    A newer version of this package may have written it, or another program.
    """
    try:
        if packet.context is not None:
            values.decode(packet.context)
        return values.decode(packet.value)
    except Exception as error:  # a forged text makes the classes that it names raise anything
        job_id, direction, name = port
        raise InvalidValueError(
            f"Packet {packet.id} of {direction}put port {name!r} of job {job_id} cannot be decoded, so it stays there: "
            f"{error}. Read it with the version that has written it; one that none can read is a row of the table "
            "`packets`, to be deleted there."
        ) from error


def port_full(full: Sequence[FullPort]) -> PortFullError:
    """Return the error for ports that have no room for the packets written to them."""
    port = full[0]
    text = f"{port.direction}put port {port.name!r} of job {port.job_id} has a limit of {port.limit} packets"
    if port.needs > port.limit:
        text = f"The {text}, and {port.needs} at once never fit. Write fewer at a time; in a run, commit in between."
    else:
        text = (
            f"The {text}, and {port.used} wait there: there is no room for {port.needs} more. Let its reader read, or "
            "give write() a time to wait for that: wait=."
        )
    return PortFullError(text, tuple(full))


def facing_ports(full: Sequence[FullPort], job_id: int, other: Any) -> PortFullError:
    """Return the error for a job that would wait for itself: `other` waits for room that only this job could make."""
    port = full[0]
    own = f"The {port.direction}put port {port.name!r} of job {port.job_id} is full, with {port.limit} packets"
    if other.job_id == job_id:
        text = f"{own}, and the writer, job {job_id}, is also its only reader: the job would wait for itself."
    else:
        text = (
            f"{own}, and job {job_id} would wait for room there, while job {other.job_id} waits for room on the "
            f"{other.direction}put port {other.name!r} of job {other.owner_id}, which only job {job_id} reads: neither "
            "would go on."
        )
    return PortFullError(
        f"{text} Raise a limit, or commit what was read before you write.", tuple(full), may_pass=False
    )


def parse_ports(spec: Any, *, where: str) -> dict[str, PortOptions]:
    """Return the options of each port that ``inports=`` or ``outports=`` names, in their order.

    `spec` is a list or tuple of names, or a mapping from name to a mapping of options (or None); None means no ports.
    `where` begins the messages: ``inports of task shop.add``.
    """
    if spec is None:
        return {}
    if isinstance(spec, Mapping):
        given = at_most(spec.items(), "ports")
    elif isinstance(spec, (list, tuple)):
        given = tuple((name, None) for name in at_most(spec, "ports"))
    else:
        raise InvalidPortError(
            f'{where}: pass a list of names, such as ["a", "b"], or a mapping from name to options, '
            f"not a {type(spec).__name__}"
        )
    ports: dict[str, PortOptions] = {}
    for name, options in given:
        try:
            check_port_name(name, wildcard=True)
        except InvalidPortError as error:
            raise InvalidPortError(f"{where}: {error}") from None
        if name in ports:
            raise InvalidPortError(f"{where}: the port {name!r} is named twice")
        ports[name] = _parse_options(options, f"{where}: port {name!r}")
    return ports


def ports_as_json(ports: Mapping[str, PortOptions]) -> dict[str, dict[str, Any]]:
    """Return the ports as JSON values, which `parse_ports` turns back into these ports."""
    return {
        name: {"channels": list(port.channels)}
        | ({} if port.default is NO_DATA else {"default": port.default})
        | ({} if port.limit is None else {"limit": port.limit})
        for name, port in ports.items()
    }


_NAME = re.compile(r"[a-zA-Z0-9_]+")

_OPTIONS = ("default", "channels", "limit")


def _parse_options(options: Any, where: str) -> PortOptions:
    if options is None:
        return PortOptions()
    if not isinstance(options, Mapping):
        raise InvalidPortError(f"{where}: options are a mapping or None, not a {type(options).__name__}")
    for option in options:
        if option not in _OPTIONS:
            raise InvalidPortError(f"{where}: unknown option {option!r}; the options are {', '.join(_OPTIONS)}")
    default, channels, limit = options.get("default", NO_DATA), options.get("channels", ()), options.get("limit")
    if default is not NO_DATA:
        # A copy as every reader will get it; the caller can no longer change it.
        default = values.decode(values.encode(default, what=f"{where}: default"))
    if not isinstance(channels, (list, tuple)):
        raise InvalidPortError(f'{where}: channels are a list, such as ["/sums"], not a {type(channels).__name__}')
    try:
        # A channel listed twice is one subscription.
        channels = check_channels(channels)
    except InvalidChannelError as error:
        raise InvalidChannelError(f"{where}: {error}") from None
    if limit is not None and (type(limit) is not int or not 0 < limit <= MOST_PACKETS):
        raise InvalidPortError(f"{where}: limit is a number of packets from 1 to {MOST_PACKETS}, not {shown(limit)}")
    return PortOptions(default, channels, limit)
