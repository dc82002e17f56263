"""What ends a body of the pool `asyncio` from outside, in place of its outcome."""

from __future__ import annotations


class CutOff(BaseException):
    """The body is not to go on: its task was revoked, or its worker stops."""


class TimeUp(CutOff):
    """The hard time limit has struck."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"its time limit of {seconds:g} s")
        self.seconds = seconds
