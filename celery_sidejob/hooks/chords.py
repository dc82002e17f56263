"""Parts of chords whose process died around their being counted: the body must be published, and only once.

Celery counts a part after it has stored its result, and whoever counts the last one publishes the body. Its Redis
backend counts a part once, however often it is told of it, and gives up the claim to publish when whoever has it is
silent. So telling it again is safe as long as nobody knows of the body. Databases are asked by a task that waits for
all results, which needs none of this; backends that only count cannot be told again.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from celery import states
from celery.app.task import Context
from celery.backends.redis import RedisBackend

from ..operations.runtime import Runtime
from ..store import durable

logger = logging.getLogger("celery_sidejob")

LONGEST_CLAIM_S = 60.0
LOOK_S = 0.2


def count_again(runtime: Runtime, backend: Any, request: Context, value: Any) -> bool:
    """Count a part that ended well; False while the body is owed by somebody who may have died."""
    if not request.chord or not request.group or not isinstance(backend, RedisBackend):
        return True
    if _body_is_known(runtime, backend, request):
        return True
    backend.on_chord_part_return(request, states.SUCCESS, value)
    return not _is_complete(backend, request.group) or _body_is_known(runtime, backend, request)


def wait_for_body(runtime: Runtime, backend: Any, request: Context, value: Any) -> None:
    """Return once nothing is owed for a part that was just counted: it keeps its row for so long.

    Mostly at once. Otherwise another part was the last, or the same in a run that was lost, and whoever publishes the
    body is about to, or died with it.
    """
    if not request.chord or not request.group or not isinstance(backend, RedisBackend):
        return
    deadline = time.monotonic() + LONGEST_CLAIM_S
    while _is_complete(backend, request.group) and not count_again(runtime, backend, request, value):
        if time.monotonic() > deadline:
            logger.error("The body of chord %s was not published by whoever has counted its last part", request.group)
            return
        time.sleep(LOOK_S)


def _is_complete(backend: RedisBackend, group: str) -> bool:
    """Tell whether all parts are counted; it is forgotten when the body was published."""
    counted, more, size = (backend.get_key_for_group(group, end) for end in (".j", ".t", ".s"))
    with backend.client.pipeline(transaction=False) as pipe:
        (pipe.zcard if backend._chord_zset else pipe.llen)(counted)
        found, added, wanted = pipe.get(more).get(size).execute()
    return wanted is not None and found >= int(wanted) + int(added or 0)


def _body_is_known(runtime: Runtime, backend: RedisBackend, request: Context) -> bool:
    """Tell whether the body was published: it is kept, or the backend knows how it stands."""
    task_id = request.chord["options"].get("task_id")
    if task_id is None:
        return False
    return durable.read(runtime.connections, task_id) is not None or backend.get_state(task_id) != states.PENDING
