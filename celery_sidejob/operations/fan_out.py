"""One page of a publication, as a part of a transaction: packets for its ports, and one wake for each of its jobs.

It waits for nobody. A job that somebody has locked gets its packets all the same, and its ask is noted. If a job or a
port may be about to be removed, the whole page is left for later.
"""

from __future__ import annotations

from ..store import jobs, publications
from ..store.publications import Page
from ..store.statement import Transaction
from .lock_set import LockSet
from .wakes import Wakes


def deliver_to(
    executor: Transaction, channel: str, page: Page, lock_set: LockSet, wakes: Wakes, *, noting: bool = False
) -> bool:
    """Deliver a page, and have its jobs woken by `wakes`; False, and nothing done, if somebody is in the way.

    `noting`: all asks are only noted.
    """
    if not noting:
        lock_set.add(jobs.lock_all_free(executor, page.job_ids))
    late = {job_id for job_id in page.job_ids if noting or not lock_set.knows(job_id)}
    if late and late != jobs.keep(executor, late):
        return False
    delivered = publications.deliver(executor, channel, page)
    for job_id in sorted(delivered or ()):
        if job_id in late:
            wakes.note(job_id)
        else:
            wakes.wake(job_id)
    return delivered is not None
