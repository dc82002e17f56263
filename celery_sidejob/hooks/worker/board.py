"""Which run each process of the pool works on, where that is not the run that its delivery names.

In a managed queue a delivery is a permit, and only the process that claims learns for which run. It writes the run on
the board, memory that it shares with its parent, before it runs the body. If the process is killed in between, the
parent takes the delivery's own run for the one that was in progress, and finds the other in the store.
"""

from __future__ import annotations

import mmap
import struct

from billiard import current_process

_LINE = struct.Struct("qqq")
"""A process, the number of its job, and of that job's run."""
PROCESSES = 1024
"""Processes of a pool that have a line; no pool has as many."""

_board = mmap.mmap(-1, PROCESSES * _LINE.size)  # shared with the processes that are forked later


def write(pid: int, run: tuple[int, int] | None) -> None:
    """Note the run of this process of a pool; None: it works on what its delivery names."""
    line = getattr(current_process(), "index", None)
    if line is not None and line < PROCESSES:
        _LINE.pack_into(_board, line * _LINE.size, pid if run is not None else 0, *(run or (0, 0)))


def read() -> dict[int, tuple[int, int]]:
    """Return the runs that are on the board, by process."""
    lines = _LINE.iter_unpack(_board)
    return {pid: (job_id, run_no) for pid, job_id, run_no in lines if pid}
