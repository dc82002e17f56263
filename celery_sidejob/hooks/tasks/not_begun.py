"""How a delivery of a durable task ends that runs nothing: the exception's class tells the worker's parent why."""

from __future__ import annotations

from celery.exceptions import Ignore


class Copy(Ignore):
    """A copy of what runs, was finished, is in the dead set, or waits at the gate of its managed queue."""


class Forged(Ignore):
    """It has the id of a task that waits or runs, and is another: that one goes on."""


class Left(Ignore):
    """Its store does not answer: the worker has it sent again, or gives a message without a row back to the broker."""
