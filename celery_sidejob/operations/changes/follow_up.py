"""The work that follows the commit of changes, in our own transaction or in the caller's.

A caller's commit may never be reported to us. The work is recorded in rows, and the sweeper does what is not done here:
it applies the asks that were only noted as due timers (by a borrowed transaction, by a timer, or for a job that was not
locked), and delivers publications to many subscribers, a page of jobs in each transaction.

Everything below a terminated job is terminated in pages too, if it is too much for one transaction. The root is
terminating before the first page, so it takes no new children. A job that is reached takes no new children either, and
its children are read under its lock. The parts that the termination has not reached are recorded in rows, so it
continues after any death.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from ...model.errors import StoreUnavailableError
from ...model.events import JobMoved
from ...model.logger import logger
from ...model.messages import Doorbell
from ...store import asks, jobs, publications, room, trees
from ...store.borrowed.borrowed import Borrowed
from ...store.errors import FAILURES
from ...store.outbox import doorbells
from ...store.statement import Transaction
from ..after_commit import AfterCommit, announce, dispatch, follow, leave_to_sweeper
from ..gates import capacity
from ..lock_set import LockSet
from ..runtime import LocalRuntime, Runtime
from .dependencies import look
from .mailboxes import deliver_to, make_room
from .wakes import Wakes

PAGE = 1000
"""How many packets one transaction delivers, unless a single job gets more."""
PAGES = 10
"""The most pages of a channel that a publisher delivers before its call returns; the sweeper delivers the others."""
TREE_PAGE = 2000
"""How many jobs of large trees one transaction terminates."""
TREE_PAGES = 5
"""The most such pages that follow the commit of a run, or of a caller's transaction; the sweeper does the others."""


def follow_up(runtime: Runtime, after_commit: AfterCommit, *, to_the_end: bool = False) -> None:
    """Do the work that follows a commit, in its order.

    Report events, publish messages and store results. Then apply the noted asks, free jobs that waited for others,
    terminate pages of large trees, and deliver publications.

    All of this is recorded in rows by now, so no error here makes the call fail, and the sweeper does the rest, also if
    this process dies. `to_the_end`: return only when the large trees are terminated.
    """
    follow(runtime, after_commit)
    if after_commit.noted or after_commit.trees:
        apply_noted_asks(runtime, after_commit.noted, () if to_the_end else after_commit.trees)
    if after_commit.looks:
        look(runtime, after_commit.looks)
    if to_the_end:
        terminate_pages(runtime, after_commit.trees, to_the_end=True)
    if after_commit.undelivered:
        deliver(runtime, after_commit.undelivered)
    if after_commit.pools:
        capacity.ring(runtime, after_commit.pools)


def follow_commit_of(runtime: Runtime, borrowed: Borrowed, after_commit: AfterCommit) -> Callable[[], None]:
    """Do the follow-up work when the caller's transaction commits; never after its rollback.

    Returns a function that does the work, for a caller that learns of the commit in another way.

    The rows are read again then: a savepoint inside the transaction may have been rolled back.
    """
    job_ids = [doorbell.job_id for doorbell in after_commit.doorbells]
    noted = sorted(set(after_commit.noted))

    def committed() -> None:
        unpublished = not runtime.connections.is_broker
        rows = doorbells.waiting(runtime.connections, job_ids, unpublished=unpublished) if job_ids else ()
        there = {row.job_id for row in rows}
        for event in after_commit.events:
            if isinstance(event, JobMoved) and event.job_id in there:
                runtime.observer.tell(event)
        announce(runtime, after_commit)
        dispatch(runtime, map(Doorbell.of_row, rows), armed_now=True)
        for job_id in noted:
            apply_noted_asks(runtime, [job_id])
        look(runtime, after_commit.looks)
        deliver(runtime, after_commit.undelivered)
        capacity.ring(runtime, after_commit.pools)

    work = partial(do_after_commit, committed)
    more = after_commit.looks, after_commit.undelivered, after_commit.announcements, after_commit.pools
    if any((job_ids, noted, *more)):
        borrowed.after_commit(work)
    return work


def do_after_commit(work: Callable[[], None]) -> None:
    """Do the work that follows the caller's commit; never raises, because the commit must not seem to have failed."""
    try:
        work()
    except StoreUnavailableError as error:
        logger.warning("The transaction is committed; the sweeper will publish its messages: %s", error)
    except Exception:
        logger.exception("The transaction is committed; the sweeper will do what should have followed it")


# -- noted asks --------------------------------------------------------------------------------------------------------


def apply_noted_asks(runtime: Runtime, job_ids: Iterable[int], trees: Iterable[int] = ()) -> None:
    """Judge and apply the due timers of jobs, each job in its own transaction; then terminate pages of the `trees`.

    The transaction that noted them is committed, so no error here may make its call fail. The sweeper handles a locked
    job, or an ask that the store does not accept now.
    """
    terminate_pages(runtime, {*trees, *_apply(runtime, job_ids, leaves=FAILURES)})


def apply_due(runtime: Runtime, limit: int) -> None:
    """Do now, for up to `limit` jobs, the work that the sweeper would do in its next turns."""
    found = asks.due(runtime.connections, limit)
    look(runtime, [row.job_id for row in found if row.depends])
    apply_noted_asks(runtime, [row.job_id for row in found])


def apply_due_timers(runtime: Runtime, job_id: int) -> None:
    """Apply a job's due timers for the sweeper, which must learn of an error: it then sets the job aside.

    Only while the store is unavailable do the timers wait for a later turn.
    """
    _apply(runtime, [job_id], leaves=(StoreUnavailableError,))


def _apply(runtime: Runtime, job_ids: Iterable[int], *, leaves: tuple[type[Exception], ...]) -> set[int]:
    """Apply the due timers of jobs, and return the roots of trees whose termination has begun."""
    waiting, trees = sorted(set(job_ids), reverse=True), set[int]()
    while waiting:
        job_id = waiting.pop()
        try:
            after_commit = runtime.connections.transact("mature", partial(mature, runtime, job_id=job_id))
        except leaves as error:
            leave_to_sweeper(error, "The ask of job %d is noted, and the sweeper applies it", job_id)
            break
        follow(runtime, after_commit)
        waiting += after_commit.noted
        look(runtime, after_commit.looks)
        trees |= after_commit.trees
    return trees


def mature(runtime: LocalRuntime, executor: Transaction, job_id: int) -> AfterCommit:
    """Apply a job's due timers, unless its row is locked."""
    locked = LockSet.of_rows(runtime, executor, jobs.lock(executor, [job_id], waits=False))
    if locked.rows:
        Wakes(locked).apply_due(job_id)
    return locked.after_commit


def pass_on(runtime: Runtime, job_id: int) -> None:
    """Give the room that was kept for a job to other waiting jobs: its run is over, or it was woken long ago.

    The end of a run calls this after its commit. If the process dies before, the sweeper does this (`kept_too_long`).
    """

    def work(executor: Transaction) -> AfterCommit:
        after_commit = AfterCommit()
        make_room(executor, room.waited_for(executor, job_id), after_commit)
        return after_commit

    apply_noted_asks(runtime, runtime.connections.transact("pass-on", work).noted)


# -- publications ------------------------------------------------------------------------------------------------------


def deliver(runtime: Runtime, channels: Iterable[str]) -> None:
    """Deliver the messages that wait on channels, right after the commit that published them.

    The messages are kept, so no error here may make the publisher's call fail. The sweeper delivers the rest after an
    error, after this process' death, or after `PAGES`. Another publisher of the channel may be delivering: it continues
    with our message after its own, because it reads again after each page.
    """
    mine = list(channels)
    try:
        for _ in range(PAGES):
            mine = [channel for channel in mine if deliver_page(runtime, channel)]
            if not mine:
                return
            left = publications.waiting(runtime.connections, mine)
            mine = [channel for channel in mine if channel in left]
    except FAILURES as error:
        leave_to_sweeper(error, "Messages on %s are kept, and the sweeper delivers them", ", ".join(sorted(mine)))


def deliver_page(runtime: Runtime, channel: str, *, noting: bool = False) -> bool:
    """Deliver the next page of a channel's oldest publication; False if there is none, or a transaction is in the way.

    `noting`: all asks are only noted, so a job that cannot be asked does not keep the packets from other jobs.
    """
    deliver_next = partial(_deliver, runtime, channel=channel, noting=noting)
    after_commit = runtime.connections.transact("deliver", deliver_next)
    if after_commit is None:
        return False
    follow(runtime, after_commit)
    apply_noted_asks(runtime, after_commit.noted)
    return True


def _deliver(runtime: LocalRuntime, executor: Transaction, channel: str, *, noting: bool) -> AfterCommit | None:
    page = publications.lock_next(executor, channel, packets=PAGE)
    lock_set = LockSet(runtime, executor)
    wakes = Wakes(lock_set)
    if page is None or not deliver_to(channel, page, lock_set, wakes, noting=noting):
        return None
    wakes.apply()
    return lock_set.after_commit


# -- terminations of large trees ---------------------------------------------------------------------------------------


def terminate_pages(runtime: Runtime, roots: Iterable[int], *, to_the_end: bool = False) -> None:
    """Terminate pages of trees whose termination is committed: some, or all (`to_the_end`), waiting for locked jobs.

    No error here may make the call fail that asked for the termination: the sweeper continues.
    """
    mine, done = set(roots), 0
    try:
        while mine and (to_the_end or done < TREE_PAGES):
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
    found = trees.find_page(executor, places, most=TREE_PAGE)
    locked = _joined(places, found, jobs.lock(executor, {row.id for row in found}, waits=waits))
    lock_set = LockSet.of_rows(runtime, executor, locked)
    Wakes(lock_set).terminate(list(locked), tree=True)
    finished = _leave(executor, places, found, locked.keys())
    return lock_set.after_commit if locked or finished else None


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
    whole = len(found) < TREE_PAGE
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
