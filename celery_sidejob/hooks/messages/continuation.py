"""A continuation of an asking (a callback, or the rest of a chain), as stored text and as a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery import Celery
from celery.canvas import maybe_signature
from kombu.utils.json import dumps as kombu_dumps
from kombu.utils.json import loads as kombu_loads

from ...model.errors import InvalidValueError
from ...model.messages import FORMAT, Continuation
from .encoding import readable


def publication(signature: Any, args: Sequence[Any], options: dict[str, Any]) -> str:
    """Return a continuation as text: the signature, the arguments that precede its own, and its options."""
    text: str = kombu_dumps({"v": FORMAT, "signature": dict(signature), "args": readable(args), "options": options})
    return text


def send(app: Celery, continuation: Continuation, **how: Any) -> None:
    """Send a callback or the rest of a chain, as a message; for a sidejob task, make a job.

    Its task id was fixed when the asking ended, so that a repetition is recognised as one.
    """
    try:
        kept = kombu_loads(continuation.publication)
        signature, args, options = maybe_signature(kept["signature"], app=app), tuple(kept["args"]), kept["options"]
    except (LookupError, AttributeError, TypeError, ValueError) as error:
        raise InvalidValueError(f"it cannot be read: {type(error).__name__}: {error}") from error
    signature.apply_async(args, task_id=continuation.task_id, **how, **options)
