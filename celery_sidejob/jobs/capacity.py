"""Capacity pools: a pool bounds how many jobs and tasks wait or run at once, and refuses further calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..awaiting import AioOf
from ..model.capacity import ON_FULL, Admission, PoolSpec, check_limit
from ..model.checks import MOST_S, is_seconds, shown
from ..model.errors import IllegalMoveError, InvalidValueError, Overloaded
from ..operations.gates import capacity
from ..operations.runtime import Runtime
from ..store import capacity as rows
from ..store.statement import picked
from .job import Job, runtime_here

if TYPE_CHECKING:
    from ..aio import AioPool


@dataclass(frozen=True, slots=True)
class SlotHolder:
    """A job or a durable task that holds slots of a pool; `job` is None for a durable task."""

    task_id: str
    job: Job | None
    task: str
    queue: str
    weight: int
    running: bool


class CapacityPool:
    """A bound of `limit` unfinished works (jobs and durable tasks) over all processes; a full pool refuses calls.

    With ``covers="running"`` at most `limit` works run at once, and the others wait: no call is refused. A work holds
    its slot from the moment it may run, when its message is sent, to the end of that run.

    A pool may be declared before any app exists; the store gets it at its first use. With `shards` its counter is split
    over several rows, so that concurrent callers do not wait for each other; together the rows have exactly `limit`
    slots. Raises InvalidValueError for a declaration that no pool can have.
    """

    aio: AioOf[AioPool] = AioOf("AioPool")
    """The verbs as coroutines."""

    def __init__(self, name: str, limit: int, *, covers: str = "queued", shards: int = 1) -> None:
        self.spec = PoolSpec(name, limit, shards, covers).check()

    @property
    def name(self) -> str:
        """Its name, which means the same pool in all processes."""
        return self.spec.name

    def __repr__(self) -> str:
        covers = f", covers={self.spec.covers!r}" if self.spec.covers != "queued" else ""
        shards = f", shards={self.spec.shards}" if self.spec.shards > 1 else ""
        return f"CapacityPool({self.name!r}, {self.spec.limit}{covers}{shards})"

    # -- calling -------------------------------------------------------------------------------------------------

    def apply_async(
        self,
        /,
        task: Any,
        args: Any = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        on_full: str = "refuse",
        weight: int = 1,
        bounded: bool = True,
        **options: Any,
    ) -> Any:
        """Call a sidejob task or a durable task (or its name, or a signature), which takes `weight` slots of this pool.

        Returns Celery's result. If the pool is full, nothing is written: raises Overloaded, or with
        ``on_full="drop"`` returns None. With ``on_full="wait"`` the work is made, and runs when slots are free. With
        ``bounded=False`` the work takes its slots even from a full pool, and `used` may exceed the limit. `options` go
        to the task's own `apply_async`.
        """
        if on_full not in ON_FULL:
            raise InvalidValueError(f"on_full is one of {', '.join(map(repr, ON_FULL))}, not {shown(on_full)}.")
        if not isinstance(bounded, bool):
            raise InvalidValueError(f"bounded is True or False, not {shown(bounded)}.")
        if not bounded and on_full != "refuse":
            raise InvalidValueError("bounded=False takes slots of a full pool too: leave on_full= out.")
        admission = self._admission(weight, on_full, bounded).check()
        try:
            return self._runtime.tasks.apply_async(task, args, kwargs, {**options, "capacity": admission})
        except Overloaded as full:
            if on_full == "drop" and full.pool == self.name:
                return None
            raise

    def call(
        self,
        /,
        task: Any,
        args: Any = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        **options: Any,
    ) -> Any:
        """Call a task as `apply_async` does, and wait for its result, at most `timeout` seconds: then TimeoutError.

        A work that has not begun by then no longer runs, and frees its slots. Raises IllegalMoveError inside a task:
        the task would occupy its worker while it waits.
        """
        if self._runtime.tasks.in_task:
            raise IllegalMoveError(
                f"call() of capacity pool {self.name!r} is refused in a task: the task would wait for a worker while "
                "it occupies one. Call apply_async(), or make the job a child."
            )
        if timeout is not None and not is_seconds(timeout):
            raise InvalidValueError(f"timeout= takes seconds, {MOST_S}, not {shown(timeout)}.")
        expires = {} if timeout is None else {"expires": timeout}
        return self.apply_async(task, args, kwargs, **{**expires, **options}).get(timeout=timeout)

    def cast(self, /, task: Any, args: Any = None, kwargs: Mapping[str, Any] | None = None, **options: Any) -> None:
        """Call a task as `apply_async` does, and discard its result."""
        self.apply_async(task, args, kwargs, **options)

    def for_key(self, key: Any) -> CapacityPool:
        """Return the pool of one key, such as a customer: it has the same limit and shards, and counts on its own."""
        text = str(key)
        if not text:
            raise InvalidValueError(f"The key of a capacity pool is empty ({self.name}).")
        return CapacityPool(
            f"{self.name}:{text}", self.spec.limit or 0, covers=self.spec.covers, shards=self.spec.shards
        )

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def limit(self) -> int:
        """How many slots it has, as declared or as last resized."""
        row = self._row()
        return (self.spec.limit or 0) if row is None else int(row.capacity)

    @property
    def used(self) -> int:
        """How many slots are taken."""
        row = self._row()
        return 0 if row is None else int(row.used)

    def children(self) -> list[SlotHolder]:
        """Return the jobs and tasks that hold slots, all read at one moment."""
        runtime = self._runtime
        return [
            SlotHolder(
                **picked(row, "task_id", "task", "queue", "weight", "running"),
                job=None if row.job_id is None else Job(row.job_id, runtime=runtime),
            )
            for row in rows.holders(runtime.connections, self.name)
        ]

    def stats(self) -> dict[str, Any]:
        """Return `limit`, `used`, and how many works came `in`, went `out` and were `refused`.

        Each of the three is ``{"total": n, "last_60s": n}``. A refusal is counted within a second. `last_60s` covers
        the last 60 to 70 seconds, because a worker's sweeper records the totals every ten seconds.
        """
        row = self._row()
        if row is None:
            return {"limit": self.spec.limit, "used": 0, **{name: _counted(0, 0) for name in ("in", "out", "refused")}}
        return {
            "limit": row.capacity,
            "used": row.used,
            "in": _counted(row.admitted, row.admitted_before),
            "out": _counted(row.freed, row.freed_before),
            "refused": _counted(row.refused, row.refused_before),
        }

    def resize(self, limit: int) -> None:
        """Give the pool another limit, at once, for all processes.

        Works that hold slots keep them: a pool with more `used` than the new limit admits nothing until enough are
        freed. A declaration with the first limit or with the present limit means this pool.
        """
        check_limit(self.name, limit)
        capacity.resize(self._runtime, self.spec, limit)

    # ------------------------------------------------------------------------------------------------------------

    def _admission(self, weight: int, on_full: str, bounded: bool) -> Admission:
        if on_full == "drop" and self.spec.covers == "running":
            raise InvalidValueError(
                f"Capacity pool {self.name!r} covers running work: no call is refused, so there is nothing to drop."
            )
        if not bounded:
            return Admission(self.spec, weight, "exceed")
        return Admission(self.spec, weight, "wait") if on_full == "wait" else Admission.of(self.spec, weight)

    @property
    def _runtime(self) -> Runtime:
        return runtime_here()

    def _row(self) -> Any | None:
        return self._runtime.connections.read(lambda executor: rows.read(executor, self.name))


def declare(pool: CapacityPool, runtime: Runtime) -> None:
    """Make a pool in an app's store, as its first use does; workers call this when they start."""
    runtime.connections.transact("declare", lambda executor: capacity.ensure(executor, pool.spec))


def _counted(total: int, before: int) -> dict[str, int]:
    return {"total": total, "last_60s": total - before}
