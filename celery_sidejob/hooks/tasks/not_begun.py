"""How deliveries of durable tasks end that run nothing: the exception's class tells the worker's parent the reason."""

from __future__ import annotations

from celery.exceptions import Ignore


class Copy(Ignore):
    """A copy of a message that runs, was finished, is in the dead set, or waits at the gate of its managed queue."""


class Forged(Ignore):
    """A message with the id of a waiting or running task and another content: the task itself goes on."""


class Left(Ignore):
    """Its store does not answer: the message is sent again; a message without a row goes back to the broker."""
