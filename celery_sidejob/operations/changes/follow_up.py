"""The work that follows the commit of changes, in our own transaction or in the caller's.

A caller's commit may never be reported to us. The work is recorded in rows, and the sweeper does what is not done here:
it applies the asks that were only noted as due timers (by a borrowed transaction, by a timer, or for a job that was not
locked), and delivers publications to many subscribers, a page of jobs in each transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from ...model.errors import StoreUnavailableError
from ...model.events import JobMoved
from ...model.logger import logger
from ...model.messages import Doorbell
from ...store import asks, jobs, publications
from ...store.borrowed.borrowed import Borrowed
from ...store.errors import FAILURES
from ...store.outbox import doorbells
from ...store.statement import Transaction
from ..after_commit import AfterCommit, announce, dispatch, follow, leave_to_sweeper
from ..gates import capacity
from ..lock_set import LockSet
from ..runtime import LocalRuntime, Runtime
from .dependencies import look
from .mailboxes import deliver_to
from .tree_terminations import terminate_pages
from .wakes import Wakes

PAGE = 1000
"""How many packets one transaction delivers, unless a single job gets more."""
PAGES = 10
"""The most pages of a channel that a publisher delivers before its call returns; the sweeper delivers the others."""


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
    after_commit = AfterCommit()
    locked = jobs.lock(executor, [job_id], waits=False)
    if locked:
        Wakes(runtime, executor, LockSet.of_rows(executor, locked), after_commit).apply_due(job_id)
    return after_commit


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
    lock_set, after_commit = LockSet(executor, ()), AfterCommit()
    wakes = Wakes(runtime, executor, lock_set, after_commit)
    if page is None or not deliver_to(executor, channel, page, lock_set, wakes, noting=noting):
        return None
    wakes.apply()
    return after_commit
