"""Replaces the methods by which Celery calls chords and counts their parts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeGuard

from celery.canvas import _chord

if TYPE_CHECKING:
    from celery.backends.redis import RedisBackend


def lend_transactions(calling: Callable[..., AbstractContextManager[None]]) -> None:
    """Make all chords call their tasks within ``calling(transaction=...)``. A second call has no effect.

    Chords of an app without SideJob are as they were.

    Replaces `_chord.apply_async`, of all chords of this process; read in Celery 5.5.0 and 5.7.0.

    Celery copies the options of such a call for the chord's body, and a transaction cannot be copied. Ours takes the
    transaction out of the options, and sent tasks find it in `hooks/tasks/chord_transaction.py`. A group with a
    follow-up is called by this method too. If a later Celery calls chords in another way, a chord with a transaction
    fails with TypeError before anything is sent.
    """
    before = _chord.apply_async
    if hasattr(before, "_keeps_transaction"):
        return

    @wraps(before)
    def apply(self: Any, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        if options.get("transaction") is None or getattr(self.app, "sidejob", None) is None:
            return before(self, args, kwargs, *more, **options)
        with calling(transaction=options.pop("transaction")):
            return before(self, args, kwargs, *more, **options)

    apply._keeps_transaction = True  # type: ignore[attr-defined]
    _chord.apply_async = apply


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
    that until the body is kept (`hooks/tasks/chords.py`). It also relies on `_chord_claim_extend_script` to renew the
    claim, and on `_chord_zset` and `get_key_for_group` to find the counted parts. If a later Celery forgets chords in
    another way, a body is lost if its process dies after it has published the body and before the body is kept.

    If the parts cannot be joined, the backend calls `chord_error_from_stack` from within the error's handler, and then
    `client.delete` to forget the number of parts. Ours does neither if the backend was unreachable. If a later Celery
    does this in another way, a chord fails if its backend is unreachable for a moment.
    """
    if is_redis(backend) and hasattr(type(backend), "_chord_cleanup_script"):
        vars(backend).setdefault("on_chord_part_return", count)


def count(
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
