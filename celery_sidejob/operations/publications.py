"""Delivers a publication to many subscribers after its commit: a page of jobs in each transaction."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ..model.errors import StoreUnavailableError
from ..store import publications
from ..store.errors import FAILURES
from ..store.statement import Transaction
from .after_commit import AfterCommit, follow
from .fan_out import deliver_to
from .lock_set import LockSet
from .noted_asks import apply_noted_asks
from .runtime import LocalRuntime, Runtime
from .wakes import Wakes

logger = logging.getLogger("celery_sidejob")

PAGE = 1000
"""Packets that one transaction delivers, unless a single job takes more."""

PAGES = 10
"""Pages of a channel that a publisher delivers before its call returns; the sweeper delivers the others."""


def deliver(runtime: Runtime, channels: Iterable[str]) -> None:
    """Deliver what waits on channels, right after the commit that published on them.

    The messages are kept, so no error here may make the publisher's call fail. The sweeper delivers what is left by an
    error, by this process' death, or after `PAGES`. Another publisher of the channel may be delivering: it goes on with
    our message after its own, because it looks again after each page.
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
            "Messages on %s are kept, and the sweeper delivers them: %s", ", ".join(sorted(mine)), error,
            exc_info=not isinstance(error, StoreUnavailableError),
        )  # fmt: skip


def deliver_page(runtime: Runtime, channel: str, *, noting: bool = False) -> bool:
    """Deliver the next page of a channel's oldest publication; False if there is none, or somebody is in the way.

    `noting`: all asks are only noted, so the job that cannot be asked does not keep the packets from the others.
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
