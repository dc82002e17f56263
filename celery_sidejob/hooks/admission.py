"""How a call gets slots of a capacity pool: by `CapacityPool.apply_async`, or by its task's option `capacity`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from celery import Celery

from ..jobs.capacity import CapacityPool
from ..model.capacity import Admission
from ..model.checks import shown
from ..model.errors import InvalidValueError

OF_FOLLOWERS = ("root_id", "parent_id", "chord", "group_id")
"""Options of calls by Celery itself: links, errbacks, the rest of a chain, parts and bodies of chords and groups."""


def pools_of(app: Celery) -> list[CapacityPool]:
    """Return the capacity pools of an app's tasks and queues."""
    pools = [getattr(task, "capacity", None) for task in app.tasks.values()]
    pools += [settings.get("pool") for settings in (app.sidejob.settings.queues or {}).values()]
    return list({pool.spec: pool for pool in pools if isinstance(pool, CapacityPool)}.values())


def admission_to(app: Celery, queue: str, *, follows: bool) -> Admission | None:
    """Return how a work gets slots of the pool that `sidejob_queues` gives to its queue; None without a pool."""
    pool = (app.sidejob.settings.queues or {}).get(queue, {}).get("pool")
    if pool is None:
        return None
    admission = Admission.of(pool.spec)
    return replace(admission, mode="wait") if follows else admission


def waiting_in(app: Celery, task: str, queue: str) -> Admission | None:
    """Return how a work without a caller waits for slots in a queue; None without a pool."""
    own = admission_of(app.tasks.get(task), {})
    return admission_to(app, queue, follows=True) if own is None else replace(own, mode="wait")


def is_follower(options: Mapping[str, Any]) -> bool:
    """Tell by its options whether a call follows another call, made by Celery: such a call is never refused."""
    return any(options.get(name) for name in OF_FOLLOWERS)


def admission_of(task: Any, options: dict[str, Any]) -> Admission | None:
    """Take `capacity` out of the options of a call, and return how its work gets slots; None without a pool.

    A call that follows another call is never refused: its own follow-ups would be lost.
    """
    given = options.pop("capacity", None)
    if given is not None:
        if not isinstance(given, Admission):
            raise InvalidValueError(
                f"capacity= is an option of tasks, and no option of a call: call CapacityPool.apply_async(task, ...); "
                f"got {shown(given)}."
            )
        return given
    pool = getattr(task, "capacity", None)
    return following(Admission.of(pool.spec), options) if isinstance(pool, CapacityPool) else None


def following(admission: Admission, options: Mapping[str, Any]) -> Admission:
    """Return the admission of a call with these options: if the call follows another call, that of a follower."""
    return replace(admission, mode="wait") if is_follower(options) else admission
