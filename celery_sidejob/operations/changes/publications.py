"""Delivers a publication to many subscribers after its commit: a page of jobs in each transaction."""

from __future__ import annotations

from collections.abc import Iterable

from ...model.errors import StoreUnavailableError
from ...model.logger import logger
from ...store import jobs, publications
from ...store.errors import FAILURES
from ...store.publications import Page
from ...store.statement import Transaction
from ..after_commit import AfterCommit, follow
from ..lock_set import LockSet
from ..runtime import LocalRuntime, Runtime
from .noted_asks import apply_noted_asks
from .wakes import Wakes

PAGE = 1000
"""How many packets one transaction delivers, unless a single job gets more."""

PAGES = 10
"""The most pages of a channel that a publisher delivers before its call returns; the sweeper delivers the others."""


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
        logger.warning(
            "Messages on %s are kept, and the sweeper delivers them: %s",
            ", ".join(sorted(mine)),
            error,
            exc_info=not isinstance(error, StoreUnavailableError),
        )


def deliver_page(runtime: Runtime, channel: str, *, noting: bool = False) -> bool:
    """Deliver the next page of a channel's oldest publication; False if there is none, or a transaction is in the way.

    `noting`: all asks are only noted, so a job that cannot be asked does not keep the packets from other jobs.
    """

    def work(executor: Transaction) -> AfterCommit | None:
        return _deliver(runtime, executor, channel, noting=noting)

    after_commit = runtime.connections.transact("deliver", work)
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


def deliver_to(
    executor: Transaction, channel: str, page: Page, lock_set: LockSet, wakes: Wakes, *, noting: bool = False
) -> bool:
    """Deliver a page, and have its jobs woken by `wakes`; do nothing and return False if a transaction is in the way.

    It never waits. A locked job gets its packets all the same, and its ask is noted. If a job or a port may be about to
    be removed, the whole page waits for later.

    `noting`: all asks are only noted.
    """
    if not noting:
        lock_set.add(jobs.lock_all_free(executor, page.job_ids))
    late = {job_id for job_id in page.job_ids if noting or not lock_set.knows(job_id)}
    if late and late != jobs.keep(executor, late):
        return False
    delivered = publications.deliver(executor, channel, page)
    for job_id, is_woken in sorted((delivered or {}).items()):
        if job_id in late:
            wakes.note(job_id, looks=not is_woken)
        elif is_woken:
            wakes.wake(job_id)
        else:
            wakes.look(job_id)
    return delivered is not None
