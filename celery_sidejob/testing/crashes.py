"""Crash points for users' own tests: at a named point this process, or a worker, dies as in a power cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

from ..model.checks import did_you_mean, is_number, is_seconds, shown
from ..model.crash_points import Died, acting
from ..model.errors import InvalidValueError
from .waiting import wait_until

if TYPE_CHECKING:
    from .worker import Worker

ENDS = ("end", "durable-end", "durable-move", "durable-bury")
COMMITS: Mapping[str, tuple[str, ...]] = {
    "enqueue": ("enqueue", "durable-keep"),
    "claim": ("claim", "claim-page", "durable-begin"),
    "commit": ("checkpoint", "step", "unit", *ENDS),
    "step": ("step", "unit"),
    "end": ENDS,
}
"""The package's transactions behind each public name of a point."""
CALLS: Mapping[str, tuple[str, ...]] = {"publish": ("publish", "publish-together")}
"""The package's broker calls behind each public name of a point."""
POINTS = (*COMMITS, *CALLS)


@contextmanager
def crash_before(point: str, *, count: int = 1, timeout: float = 30.0) -> Iterator[None]:
    """Let the process that reaches this point within the block die just before it; otherwise like `crash_after`."""
    with _crashing(Crash("before", point, count, timeout)):
        yield


@contextmanager
def crash_after(point: str, *, count: int = 1, timeout: float = 30.0) -> Iterator[None]:
    """Let the process that reaches this point within the block die right after it.

    `point` is ``"enqueue"`` (the commit that makes a job, or keeps the message of a durable task), ``"publish"`` (the
    broker is given a message), ``"claim"`` (the commit that begins a run), ``"commit"`` (each commit of a run),
    ``"step"`` (the commit of a step; ``"step:charge"`` means the step charge) or ``"end"`` (the last commit of a run).
    With `count=2` the process dies when it reaches the point for the second time.

    A worker that is started in the block is killed with all its processes, and the block ends when they are gone. In a
    block that starts no worker this process seems to die: the block ends when the point is reached, and a run in
    progress is lost. Raises AssertionError if the point is not reached, by a worker within `timeout` seconds.
    """
    with _crashing(Crash("after", point, count, timeout)):
        yield


class Crash:
    """The death that a test has planned: the point, and the process that dies there."""

    def __init__(self, side: str, point: str, count: int, timeout: float) -> None:
        step = point.partition(":")[2] if isinstance(point, str) and point.startswith("step:") else ""
        if point not in POINTS and not step:
            known = did_you_mean(point, POINTS) if isinstance(point, str) else ""
            raise InvalidValueError(f"There is no crash point {shown(point)}; there are {', '.join(POINTS)}.{known}")
        if not is_number(count, least=1):
            raise InvalidValueError(f"count of a crash point is a number from 1 on, not {shown(count)}.")
        if not is_seconds(timeout):
            raise InvalidValueError(f"timeout of a crash point is seconds, not {shown(timeout)}.")
        end = f"{side}-commit" if point in COMMITS or step else side
        of_step = {point: (f"step[{step}]",)} if step else {}
        self.names = tuple(f"{name}:{end}" for name in {**COMMITS, **CALLS, **of_step}[point])
        self.workers: list[Worker] = []
        """The workers that were started in the block."""
        self._what = f"crash_{side}({point!r})"
        self._count = count
        self._timeout = timeout
        self._left = count

    def act(self, name: str) -> None:
        """Raise Died in the block from the planned moment on: a dead process writes nothing more.

        The block's coroutines and their threads are in its context; threads of the package's own services are not.
        """
        if self.workers or not _in_block.get():
            return
        self._left -= self._left > 0 and name in self.names
        if self._left == 0:
            raise Died(f"{self._what}: this process is dead now, as far as its test can tell")

    def variables(self, worker: Worker, home: Path) -> Mapping[str, str]:
        """Note a worker that starts in the block, and return the variables that make it die at the point."""
        self.workers.append(worker)
        once = home / f"{id(self):x}.crashed"
        return {
            "SIDEJOB_CRASH_POINTS": f"{'|'.join(self.names)}=kill-group@{self._count}",
            "SIDEJOB_CRASH_ONCE": str(once),
        }

    def finish(self) -> None:
        """Return once a worker has died; AssertionError if none does, or if the block started none."""
        if not self.workers:
            raise AssertionError(
                f"{self._what}: the block did not come to this point{self._times()}. A worker dies there only if it "
                "is started in the block."
            )
        try:
            wait_until(lambda: not all(worker.alive for worker in self.workers), timeout=self._timeout)
        except TimeoutError:
            names = ", ".join(worker.name for worker in self.workers)
            raise AssertionError(
                f"{self._what}: no worker came to this point{self._times()} within {self._timeout:g} s ({names})."
            ) from None
        for worker in self.workers:
            if not worker.alive:
                worker.kill()  # returns when its last process is gone

    def _times(self) -> str:
        return f" {self._count} times" if self._count > 1 else ""


present: Crash | None = None
"""The death that is planned in the present block; to be read as `crashes.present`, for it changes."""
_in_block: ContextVar[bool] = ContextVar("celery_sidejob_crashing", default=False)


@contextmanager
def _crashing(crash: Crash) -> Iterator[None]:
    global present
    if present is not None:
        raise RuntimeError("crash_before() and crash_after() cannot be nested: who is dead does not die again.")
    present = crash
    _in_block.set(True)
    try:
        with acting(crash.act):
            yield
    except Died:
        return
    finally:
        present = None
        _in_block.set(False)
    crash.finish()
