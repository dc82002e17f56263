"""A process of a worker's pool: its start and its end, and what it and its worker tell each other.

By memory that they share the worker says that it stops, and the process on which run it works. With its outcome a run
says whether its end is left to the worker.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from billiard import current_process
from celery import signals

from ...model import native
from ...model.crash_points import reach
from ...store.connection.turns import share_one
from ...store.results import Ended
from ...store.write_behind import write_all_now


def install() -> None:
    """Have processes of pools share a connection, and write at their end what was put off; twice does no harm."""
    signals.worker_process_init.connect(_share_one_connection, weak=False)
    signals.worker_process_shutdown.connect(_write_what_was_put_off, weak=False)


def _share_one_connection(**_: Any) -> None:
    """All threads of the process take turns: what follows the commit of a lent transaction is done by one of its own.

    The signal is sent in the worker's own process too, by pools that have no others.
    """
    if current_process().name != "MainProcess":
        share_one()


def _write_what_was_put_off(**_: Any) -> None:
    """It ends without what Python does at an end."""
    write_all_now()


_flag: mmap.mmap | None = None


def share_flag() -> None:
    """Make the byte that says whether the worker stops; the worker's parent calls this before its pool forks."""
    global _flag
    if _flag is None:
        _flag = mmap.mmap(-1, 1)


def announce_stop() -> None:
    """Set the byte: the worker stops. Safe inside a signal handler."""
    if _flag is not None:
        _flag[0] = 1


def worker_is_stopping() -> bool:
    """Tell whether the worker has begun to stop; False in a spawned pool process, which cannot know."""
    return _flag is not None and _flag[0] == 1


_LINE = struct.Struct("qqq")
"""A process, the number of its job, and of that job's run."""
PROCESSES = 1024
"""Processes of a pool that have a line; no pool has as many."""

_board = mmap.mmap(-1, PROCESSES * _LINE.size)  # shared with the processes that are forked later


def write_run(pid: int, run: tuple[int, int] | None) -> None:
    """Note on the board the run of this process of a pool; None: it works on what its delivery names.

    In a managed queue a delivery is a permit, and only the process that claims learns for which run. It writes the run
    on the board, memory that it shares with its parent, before it runs the body. If the process is killed in between,
    the parent takes the delivery's own run for the one that was in progress, and finds the other in the store.
    """
    line = getattr(current_process(), "index", None)
    if line is not None and line < PROCESSES:
        _LINE.pack_into(_board, line * _LINE.size, pid if run is not None else 0, *(run or (0, 0)))


def runs_on_board() -> dict[int, tuple[int, int]]:
    """Return the runs that are on the board, by process."""
    lines = _LINE.iter_unpack(_board)
    return {pid: (job_id, run_no) for pid, job_id, run_no in lines if pid}


_TOLD: ContextVar[list[Any] | None] = ContextVar("celery_sidejob_told", default=None)
"""The facts for the worker about the run that is traced here: the run's name and its result, once it is over."""


def leave_end(over: Ended, point: str) -> bool:
    """Leave the end of a run to its worker: the body has ended well, and nothing follows it but its result, if any.

    False if no worker waits for it, as in a test that runs a task by itself. `point`: the crash point before any end.
    """
    told = _TOLD.get()
    if told is None:
        return False
    reach(point)
    told.append(over)
    return True


def trace_leaving(by: Callable[..., Any], *args: Any, **options: Any) -> Sequence[Any]:
    """Run a task `by` Celery's tracer; return its result, and the name of a run whose end was left to the worker.

    If the process dies before the worker has this, the run is lost.
    """
    told: list[Any] = []
    with native.within(_TOLD, told):
        return (*by(*args, **options), *told)
