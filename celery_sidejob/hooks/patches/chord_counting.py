"""Replaces `on_chord_part_return` and `_chord_cleanup_script` of an app's Redis result backend.

Read in Celery 5.7.0; 5.5.0 has no such script, and is left alone. The backend counts a part of a chord; whoever counts
the last one takes a claim, publishes the body, and runs the script, called with `keys`, `args` (the claim's token
first) and `client`, which forgets the chord. Ours puts that off until the body is kept (`hooks/tasks/chords.py`). It
also relies on `_chord_claim_extend_script` to renew the claim, and on `_chord_zset` and `get_key_for_group` to find
what is counted. If a later Celery forgets chords in another way, a process that dies after it has published a body and
before that is kept has lost it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard

from .wrapping import wrap

if TYPE_CHECKING:
    from celery.backends.redis import RedisBackend


def is_redis(backend: Any) -> TypeGuard[RedisBackend]:
    """Tell whether a backend is Celery's on Redis; an app with another one does not import that."""
    module = sys.modules.get("celery.backends.redis")
    return module is not None and isinstance(backend, module.RedisBackend)


def install(backend: Any, *, count: Callable[..., Any], forget: Callable[..., Any]) -> None:
    """Have parts counted by `count`, and chords forgotten by `forget`; twice does no harm."""
    if not is_redis(backend) or not hasattr(type(backend), "_chord_cleanup_script"):
        return
    if "on_chord_part_return" not in vars(backend):
        wrap(backend, "_chord_cleanup_script", forget)
        wrap(backend, "on_chord_part_return", count)
