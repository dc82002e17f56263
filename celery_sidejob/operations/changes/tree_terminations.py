"""Terminating everything below a job, a page of jobs in each transaction.

The root is terminating before the first page, so it takes no new children. A job that is reached takes no new children
either, and its children are read under its lock. The parts that the termination has not reached are recorded in rows,
so it continues after any death.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from ...store import jobs, trees
from ...store.errors import FAILURES
from ...store.statement import Transaction
from ..after_commit import AfterCommit, follow, leave_to_sweeper
from ..lock_set import LockSet
from ..runtime import LocalRuntime, Runtime
from .wakes import Wakes

PAGE = 2000
"""How many jobs one transaction terminates."""
PAGES = 5
"""The most pages that follow the commit of a run, or of a caller's own transaction; the sweeper does the others."""


def terminate_pages(runtime: Runtime, roots: Iterable[int], *, to_the_end: bool = False) -> None:
    """Terminate pages of trees whose termination is committed: some, or all (`to_the_end`), waiting for locked jobs.

    No error here may make the call fail that asked for the termination: the sweeper continues.
    """
    mine, done = set(roots), 0
    try:
        while mine and (to_the_end or done < PAGES):
            if not terminate_page(runtime, mine, waits=to_the_end) and not (to_the_end and _others_work(runtime, mine)):
                return
            done += 1
    except FAILURES as error:
        jobs_left = ", ".join(map(str, sorted(mine)))
        leave_to_sweeper(error, "The sweeper goes on terminating everything below job %s", jobs_left)


def _others_work(runtime: Runtime, roots: Iterable[int]) -> bool:
    """Wait for a page that another process has begun, such as the sweeper; False if no page remains."""
    return runtime.connections.transact("wait", lambda executor: trees.wait_for_places(executor, roots))


def terminate_page(runtime: Runtime, roots: Iterable[int] | None = None, *, waits: bool = False) -> bool:
    """Terminate the next page of jobs below these roots, or any; False if no page can be terminated now.

    With `waits` it waits for locked jobs; otherwise these are for a later page.
    """
    terminate = partial(_terminate, runtime, roots=roots, waits=waits)
    after_commit = runtime.connections.transact("terminate-page", terminate)
    if after_commit is None:
        return False
    follow(runtime, after_commit)
    return True


def _terminate(
    runtime: LocalRuntime, executor: Transaction, roots: Iterable[int] | None, *, waits: bool
) -> AfterCommit | None:
    places = trees.take_places(executor, roots)
    if not places:
        return None
    found = trees.find_page(executor, places, most=PAGE)
    locked = _joined(places, found, jobs.lock(executor, {row.id for row in found}, waits=waits))
    after_commit = AfterCommit()
    Wakes(runtime, executor, LockSet.of_rows(executor, locked), after_commit).terminate(list(locked), tree=True)
    finished = _leave(executor, places, found, locked.keys())
    return after_commit if locked or finished else None


def _joined(places: Sequence[Any], found: Sequence[Any], locked: dict[int, Any]) -> dict[int, Any]:
    """Return the locked jobs with an unbroken line of locked jobs up to a row of `places`; other jobs come later.

    Jobs below a job that another transaction has locked come later too. Otherwise each page would reach them again.
    """
    joined = {place.job_id for place in places if not place.itself}
    for row in found:  # a parent before its children
        if row.id in locked and (row.parent_id is None or row.parent_id in joined):
            joined.add(row.id)
    return {job_id: row for job_id, row in locked.items() if job_id in joined}


def _leave(executor: Transaction, places: Sequence[Any], found: Sequence[Any], locked: Iterable[int]) -> set[int]:
    """Record where the next pages begin, and return the rows below which no job remains."""
    whole = len(found) < PAGE
    there, locked = {row.id for row in found}, set(locked)
    left = {  # a job that another transaction has locked, or that is not read yet
        place.job_id
        for place in places
        if place.itself and place.job_id not in locked and (place.job_id in there or not whole)
    }
    done = [place for place in places if place.job_id not in left]
    seen = {place.job_id: place.root for place in done}
    seen.update({row.id: row.root for row in found if row.id in locked})
    first = {place.job_id: place.after for place in done}
    last = dict(first)
    last.update({row.parent_id: row.name for row in found if row.parent_id is not None})
    places_done = [place.job_id for place in done]
    finished = set(places_done) - trees.go_on(executor, seen, first=first, last=last, places=places_done)
    trees.remove_places(executor, finished)
    return finished
