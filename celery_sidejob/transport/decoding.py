"""The elements of a queue that may be no messages: somebody else's, or with a type that only their sender knows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from kombu.transport import virtual

T = TypeVar("T")


class NotAMessageError(Exception):
    """An element of a queue is not a valid message."""

    @property
    def reason(self) -> str:
        """What is wrong with it."""
        return f"it is no message: {(self.__cause__ or self)!r}"


def made(make: Callable[[], T]) -> T:
    """Decode an element of a queue; NotAMessageError if a second try fails too, so it is no passing trouble."""
    try:
        return make()
    except Exception:
        try:
            make()
        except Exception as error:
            raise NotAMessageError from error
        raise  # a time limit, for example: this must end, and the message is still valid


class Message(virtual.Message):
    """kombu's, which tells when what it is to be made of is no message: its bytes are not as its encoding says, say."""

    def __init__(self, payload: Any, channel: Any = None, **options: Any) -> None:
        made(partial(super().__init__, payload, channel=channel, **options))
