"""Registering the tasks that a worker serves, for clients that do not have their code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..model.changes import Change, Publish
from ..model.errors import InvalidChannelError
from ..model.names import channel_of_workers, check_channel
from ..store import registry
from .changes.unit_of_work import carry_out
from .log import UNLOGGED
from .runtime import Runtime


def register(runtime: Runtime, served: Sequence[Mapping[str, str]]) -> None:
    """Record the tasks, and publish the changed registry of each queue.

    If the process dies before the publication, the change is not published.
    """
    connections = runtime.connections
    changed = connections.transact("register", lambda executor: registry.register(executor, map(dict, served)))
    published: list[Change] = []
    for queue in changed:
        tasks: dict[str, Any] = {
            task: json.loads(text) for task, text in registry.registered_in(connections, queue).items()
        }
        try:
            name = check_channel(channel_of_workers(queue))
        except InvalidChannelError:  # some names of queues are not allowed for channels
            continue
        published.append(Publish(name, json.dumps(tasks), options=UNLOGGED))
    if published:
        carry_out(runtime, "register", published)
