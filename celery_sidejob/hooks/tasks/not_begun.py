"""How a delivery of a durable task ends that runs nothing: the exception's class tells the worker's parent why."""

from __future__ import annotations

from celery.exceptions import Ignore, Reject


class Copy(Ignore):
    """A copy of what runs, was finished, or is in the dead set."""


class AtGate(Copy):
    """The gate of its managed queue is closed: its row waits there, and its message is sent again."""


class Forged(Ignore):
    """It has the id of a task that waits or runs, and is another: that one goes on."""


class Left(Ignore):
    """Its store does not answer: the message is forgotten, and that store's sweeper sends it again."""


class SentBack(Reject):
    """Its store does not answer: the message goes back to the broker, if it was not acknowledged already."""
