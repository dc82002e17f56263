"""The ends of runs that a worker's parent writes: quiet ends, many in one statement, and ends of runs that it stops.

A quiet end leaves nothing else to be done but to keep a result. The process of such a run only tells its worker that
the body has ended well. The row of a durable task stays locked until the worker has removed it a few milliseconds
later, at most `WITH_OTHERS_S`: with its next fetch, where the store is the broker. A job is in its run until the worker
has ended that, with the next runs that it claims. If the worker dies before, the run is repeated, or lost; a result is
kept with its end or not at all.

The worker ends a run from outside if it was stopped by a time limit, or its asking was revoked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Any, TypeVar

from ...model import native
from ...model.errors import LeaseLostError
from ...model.logger import logger
from ...model.status import RunEnd
from ...operations.hold import Hold
from ...operations.runs import endings, runs
from ...operations.runs.endings import Ending
from ...operations.runs.run_pages import RunKey
from ...operations.runtime import Runtime
from ...store import claims
from ...store.errors import RowsLocked, first_line, will_be_refused_again
from ...store.results import Ended

T = TypeVar("T")

SOON_S = 0.005
"""How long after a statement that took ends the next one may follow."""
WITH_OTHERS_S = 0.05
"""How long an end waits at most for a statement that does other work and can write it too."""
REST_S = 1.0


@dataclass(eq=False, slots=True)
class QuietEnd:
    """The end of one run."""

    over: Ended
    """How the statement names it, and its result; see `broker.holds.ended` and `run_ends.end_page`."""
    content: Callable[[], Any]
    """Returns what else its end needs: what a task has run, or a job's hold."""
    is_unknown: bool = False
    """A statement that was to write it had no answer, and may have written it."""

    @property
    def key(self) -> tuple[Any, int]:
        """The key of its run: (task id, generation) or (job id, run number)."""
        return self.over.run[0], self.over.run[1]


class Page:
    """Ends that one statement is to write."""

    def __init__(self, ends: Sequence[QuietEnd]) -> None:
        self._ends = ends
        self.runs = [end.over for end in ends]
        self.over: Set[Any] | None = None
        """The ids of tasks and jobs whose ends are written, once that is known; to be set by who runs the statement."""

    @property
    def left(self) -> list[QuietEnd]:
        """Those that are not: their rows are locked by a transaction, or are held by these runs no more."""
        return [end for end in self._ends if self.over is not None and end.key[0] not in self.over]

    @property
    def written(self) -> list[QuietEnd]:
        """Those that are."""
        return [end for end in self._ends if self.over is not None and end.key[0] in self.over]


class QuietEnds:
    """The ends of one worker in one store that are to be written; safe to use from any thread."""

    def __init__(self, name: str, write: Callable[[Page], object], later: Callable[[QuietEnd], None]) -> None:
        """`write` writes a page by itself; `later` is given each end that cannot be written so."""
        self.name = name
        self._write = write
        self._later = later
        self._bell = native.Bell()
        self._lock = native.lock()
        self._ends: set[QuietEnd] = set()
        self._waiting: list[QuietEnd] = []
        self._due_at = inf
        """When the first of these is due; never if none waits."""
        self._looks_at = 0.0
        """When the loop looks without being rung for."""
        self._written_at = 0.0

    def add(self, end: QuietEnd, *, waits: bool = True) -> None:
        """Have an end written: at once unless others were written just now, or it `waits` for another statement."""
        with self._lock:
            due_at = monotonic() + WITH_OTHERS_S if waits else self._written_at + SOON_S
            self._ends.add(end)
            self._waiting.append(end)
            self._due_at = min(due_at, self._due_at)
            comes_too_late = self._due_at < self._looks_at
        if comes_too_late:
            self._bell.ring()

    def has(self, key: tuple[Any, int]) -> bool:
        """Tell whether an end of this run is not written yet."""
        with self._lock:
            return any(end.key == key for end in self._ends)

    # -- in a loop of its own ----------------------------------------------------------------------------------------

    def run_once(self) -> int:
        """Write the ends that have waited long enough; returns how many there were."""
        return self.write() if self._due_at <= monotonic() else 0

    def write(self) -> int:
        """Write all ends that wait; returns how many there were."""
        with self._page() as page:
            if page.runs:
                self._write(page)
        return len(page.runs)

    def wait_s(self) -> float:
        """Wait until there is something to write."""
        with self._lock:
            now = monotonic()
            self._looks_at = min(now + REST_S, self._due_at)
        self._bell.wait(max(0.0, self._looks_at - now))
        self._looks_at = 0.0
        return 0.0

    def close(self) -> None:
        """Nothing is open: what is left is written when the worker leaves."""

    # -- in any statement --------------------------------------------------------------------------------------------

    def go_with(self, statement: Callable[[Page], T]) -> T:
        """Run a statement that does other work and is to write the ends that are due; without them if it is refused."""
        while True:
            with self._page() as page:
                return statement(page)

    @contextmanager
    def _page(self) -> Iterator[Page]:
        """Yield the ends that are due, for one statement; if that raises they are due again.

        If the store refuses the statement, one of them may be why: then the block is left, and each is to be written
        alone.
        """
        with self._lock:
            ends, self._waiting, self._due_at = self._waiting, [], inf
            self._written_at = monotonic()
        page = Page(ends)
        try:
            yield page
        except Exception as error:
            is_refused = isinstance(error, RowsLocked) or will_be_refused_again(error)
            if page.over is not None or not ends or not is_refused:
                raise
            page.over = frozenset()
            logger.warning("%d ends of runs are written one by one: %s", len(ends), first_line(error))
        finally:
            left = page.left
            with self._lock:
                if page.over is None:
                    for end in ends:
                        end.is_unknown = True
                    self._waiting = [*ends, *self._waiting]
                    self._due_at = self._written_at
                else:
                    self._ends.difference_update(page.written)
            for end in left:
                self._later(end)

    def written(self, end: QuietEnd) -> None:
        """Note that an end was written otherwise, or refused."""
        with self._lock:
            self._ends.discard(end)


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a run is ended: the error of its asking, and the reason in the dead set."""

    kind: str
    """The name of the error's class."""
    message: str
    reason: str = "failed"


def end_from_outside(runtime: Runtime, key: RunKey, task: str | None, stop: Stop, *, worker_id: int) -> bool:
    """End, as failed, a run that this worker holds; a run not claimed yet is claimed first.

    False if it ended by itself, runs elsewhere, or its job has another `task` than the message; `task` is None if no
    message names the run. Its committed units stay. Later commits of its process are refused.
    """
    job_id, run_no = key
    if task is None:
        held = claims.read_claimed(runtime.connections, job_id)
        if held is None:
            return False
        task = str(held.task)
    hold = runs.claim(runtime, job_id, task=task, for_run=run_no, worker_id=worker_id, passes=True)
    if hold is None:
        row = claims.read_claimed(runtime.connections, job_id)
        if row is None or (row.task, row.run_no, row.worker_id) != (task, run_no, worker_id):
            return False
        hold = Hold(job_id, run_no, row.worker_id, row.run_kind, row.unit_no, row.started, row=row)
    error = endings.error_json(stop.kind, stop.message, runtime.results.module_of(stop.kind))
    ending = Ending(RunEnd.FAILED, result=error, error=error, reason=stop.reason)
    if hold.kind == "shutdown":
        ending = Ending(RunEnd.TERMINATED, error=error)
    try:
        endings.end(runtime, hold, None, ending, from_outside=True)
    except LeaseLostError:
        logger.info("Run %d of job %d ended by itself just before it was stopped", run_no, job_id)
        return False
    return True
