"""Replaces methods of an app's result backend, also those by which it counts the parts of chords."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

from . import wrap

if TYPE_CHECKING:
    from celery.backends.redis import RedisBackend


def ask_by(backend: Any, ask: Callable[..., Any]) -> None:
    """Call `ask` with the backend, its own method, and that method's arguments; a second call has no effect.

    Replaces `Backend.on_task_call` of an app's result backend; read in Celery 5.5.0 and 5.7.0.

    `send_task` calls ``backend.on_task_call(producer, task_id)`` before it sends a message: Redis subscribes to the
    result there, and fails the call after twenty seconds if it is unreachable. Ours lets
    `hooks/tasks/calls.py` decide when the backend is asked for a kept message. If a later Celery asks in another way, a
    call fails again if the backend is unreachable, after a wait, and its message is not kept.
    """
    if "on_task_call" not in vars(backend):
        wrap(backend, "on_task_call", partial(ask, backend))


def tell_by(backend: Any, **by: Callable[..., Any]) -> None:
    """Redirect calls of these methods to `by`; a second call has no effect.

    Replaces the methods of an app's result backend by which Celery's tracer reports a task's outcome.

    Read in Celery 5.5.0 and 5.7.0. The tracer calls `store_result` with STARTED before the body, and afterwards
    `mark_as_done`, `mark_as_failure` or `mark_as_retry`, all with the task's request. It treats an error of theirs as
    the task's failure, reports that failure to the backend too, and sends `task_postrun` without an outcome. If a later
    Celery calls other methods, a durable task whose backend was unreachable is in the dead set as failed, though it
    ended well (`hooks/tasks/results.py`).

    A backend calls and sends all errbacks of a failure by one call of its `_call_task_errbacks(request, exc,
    traceback)`, which raises if an errback cannot be sent. If a later Celery does not, each such errback makes the
    others run again.

    `celery.chord_unlock` calls `chord_error_from_stack` of the app's backend, from within the error's handler, when it
    cannot read the parts of its chord. If a later Celery does not, a chord fails if its backend is unreachable for a
    moment.
    """
    for name, told in by.items():
        if name not in vars(backend):
            wrap(backend, name, told)


def is_redis(backend: Any) -> TypeGuard[RedisBackend]:
    """Tell whether a backend is Celery's on Redis; an app with another backend does not import that one."""
    module = sys.modules.get("celery.backends.redis")
    return module is not None and isinstance(backend, module.RedisBackend)


def count_by(backend: Any, *, count: Callable[..., Any]) -> None:
    """Count parts with `count`, called like `on_chord_part_return`; a second call has no effect.

    Replaces `on_chord_part_return` of an app's Redis result backend, and in it three attributes that it uses.

    Read in Celery 5.7.0; 5.5.0 has no `_chord_cleanup_script`, and is not changed. The backend counts a part of a
    chord. The process that counts the last part takes a claim, joins the parts, publishes the body, and runs that
    script, called with `keys`, `args` (the claim's token first) and `client`, which forgets the chord. Ours postpones
    that until the body is kept (`hooks/tasks/results.py`). It also relies on `_chord_claim_extend_script` to renew the
    claim, and on `_chord_zset` and `get_key_for_group` to find the counted parts. If a later Celery forgets chords in
    another way, a body is lost if its process dies after it has published the body and before the body is kept.

    If the parts cannot be joined, the backend calls `chord_error_from_stack` from within the error's handler, and then
    `client.delete` to forget the number of parts. Ours does neither if the backend was unreachable. If a later Celery
    does this in another way, a chord fails if its backend is unreachable for a moment.
    """
    if is_redis(backend) and hasattr(type(backend), "_chord_cleanup_script"):
        vars(backend).setdefault("on_chord_part_return", count)


def count_part(
    backend: RedisBackend,
    request: Any,
    *args: Any,
    tell: Callable[..., Any],
    forget: Callable[..., Any],
    **options: Any,
) -> Any:
    """Count a part as the backend does; but `tell` reports a chord's failure, and `forget` forgets the chord.

    Both get the replaced method before the arguments. If `tell` raises, nothing is forgotten.
    """
    client = _Client(backend.client)

    def tell_or_keep(*given: Any, **further: Any) -> Any:
        client.keeps = True
        told = tell(backend.chord_error_from_stack, *given, **further)
        client.keeps = False
        return told

    def forget_or_keep(*given: Any, **further: Any) -> Any:
        return client.keeps or forget(backend._chord_cleanup_script, *given, **further)

    view = object.__new__(type(backend))
    vars(view).update(
        vars(backend), client=client, chord_error_from_stack=tell_or_keep, _chord_cleanup_script=forget_or_keep
    )
    return type(backend).on_chord_part_return(view, request, *args, **options)


class _Client:
    """The backend's client; while it `keeps` a chord, it deletes no key of it."""

    keeps = False

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def delete(self, *keys: Any) -> Any:
        return 0 if self.keeps else self._client.delete(*keys)
