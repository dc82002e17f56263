"""Finds the heartbeats of a worker that a message concerns: those of the stores in which its row may be."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ...model.durable import Address, Content, Death, Key
from ...services.heartbeat.heartbeat import Heartbeat


def holders(app: Any, header: Any) -> Sequence[Heartbeat]:
    """Return them; none where this is no worker's parent process."""
    known: Sequence[Heartbeat] = getattr(getattr(app, "sidejob", None), "heartbeats", ())
    if header is None:
        return known[:1]  # without a row it gets one in the primary
    store = Address.of(header).store
    return [heartbeat for heartbeat in known if heartbeat.runtime.store.name == store] or known


def revoke(heartbeats: Sequence[Heartbeat], key: Key) -> None:
    """Have the task's revocation kept in the store that has its row, as soon as that can be done."""
    for heartbeat in heartbeats:
        heartbeat.errands.soon(partial(heartbeat.tasks.revoke, key))


def bury(heartbeats: Sequence[Heartbeat], key: Key, death: Death, *, address: Address, content: Content) -> None:
    """Have the task buried in the store that has its row, as soon as that can be done."""
    for heartbeat in heartbeats:
        heartbeat.errands.soon(partial(heartbeat.tasks.fail, key, death, address=address, content=content))
