"""Decodes elements of a queue that may be no messages: another program's, or with a type that only the sender knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from kombu.transport import virtual

T = TypeVar("T")


class NotAMessageError(Exception):
    """An element of a queue is not a valid message."""

    @property
    def reason(self) -> str:
        """The fault, as text."""
        return f"it is no message: {(self.__cause__ or self)!r}"


def made(make: Callable[[], T]) -> T:
    """Decode an element of a queue; NotAMessageError if a second try fails too, so that it is no passing trouble."""
    try:
        return make()
    except Exception:
        try:
            make()
        except Exception as error:
            raise NotAMessageError from error
        raise  # a time limit, for example: this must end, and the message is still valid


class Payload(dict[str, Any]):
    """The ingredients of kombu's message, from a row of the outbox; no received text can be one, whatever it says."""

    held: Any = None


class Message(virtual.Message):
    """kombu's message, which reports invalid ingredients, such as bytes that do not fit their encoding."""

    held: Any = None
    """The hold of the message's row and the facts for its process, if this worker holds the row."""

    def __init__(self, payload: Any, channel: Any = None, **options: Any) -> None:
        made(partial(super().__init__, payload, channel=channel, **options))
        made(self._check)
        if isinstance(payload, Payload):
            self.held = payload.held

    def _check(self) -> None:
        """Raise TypeError for a fault that would end a consumer, and in Celery the worker, and then the next worker."""
        for name in ("content_type", "content_encoding"):
            if not isinstance(getattr(self, name), str | None):
                raise TypeError(f"{name} is no text")
        for name in ("headers", "properties", "delivery_info"):
            if not isinstance(getattr(self, name), Mapping | None):
                raise TypeError(f"{name} is no object")
        if self.headers and "task" in self.headers:
            check_task(self.headers)


def check_task(headers: Mapping[str, Any]) -> None:
    """Raise TypeError for headers of a task that would end a worker rather than fail the task."""
    for name in ("task", "id"):
        if isinstance(headers.get(name), list | dict):
            raise TypeError(f"the header {name} is no text")
    limits = headers.get("timelimit")
    if limits and not (
        isinstance(limits, list | tuple)
        and len(limits) == 2
        and all(isinstance(one, int | float | None) for one in limits)
    ):
        raise TypeError("the header timelimit is no pair of numbers")
