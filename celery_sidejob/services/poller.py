"""Looks after the messages of ordinary durable tasks: what was not published, not heard of, lost, doomed or expired.

A part of the sweeper's turn. What no run has begun, and what does not wait in the broker (`backlog.py`), is published
again, the same bytes; what died under way follows its task's `on_lost`. A copy in the broker is harmless, because only
one delivery of a generation gets the row. Bounded pages, fair by queue; each row is judged by itself, so that one which
cannot be published or buried stops nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..model.buried import Buried, Place
from ..model.crash_points import reach
from ..model.durable import Address, Message
from ..model.errors import StoreUnavailableError
from ..model.protocols import Refused
from ..model.troubles import log_trouble
from ..operations import burials, copies, durable_locks, publishing
from ..operations.runtime import Runtime
from ..store import durable_looks
from ..store.statement import Executor
from .backlog import Backlog
from .durable_schema import DurableSchema
from .duties import Duties
from .unsendable import Unsendable

logger = logging.getLogger("celery_sidejob")

PER_QUEUE = 250
PAGE = 1000
"""Rows looked at in one step, of one queue and in all, without their bodies."""
TURN_S = 0.5
"""After which the sweeper's other duties come first again."""
BODIES = 200
"""How many messages are in memory at a time."""
LOOK_AGAIN_S = 5.0
"""How long what a broker or a backend did not take is left alone."""

LOST = (
    "WorkerLostError: the worker of this run died, and what it had begun must not be repeated unseen. "
    '`dead retry` begins it again; for tasks that may be repeated there is on_lost="requeue"'
)
LOST_TOO_OFTEN = "WorkerLostError: {losses} runs were lost with their workers"
EXPIRED = "TaskRevokedError: it expired before any run began"
REVOKED = "TaskRevokedError: the task was revoked"
POISONED = "PoisonedMessage: the workers that had begun it died, as often as the broker's delivery_limit says"
DOOMS = frozenset({"lost", "expired", "revoked"})


class Report(Protocol):
    """What one sweep found and did."""

    published: int
    missing: int
    unpublished: int
    tasks_taken: int
    tasks_buried: int


class Poller:
    """Polls one schema. `apart` runs what speaks to the result backend, and says whether it could take it.

    `may_go_on` tells, between two pages, whether nobody else has taken over.
    """

    def __init__(
        self, runtime: Runtime, apart: Callable[[Callable[[], None]], bool], backlog: Backlog,
        may_go_on: Callable[[], bool], unsendable: Unsendable,
    ) -> None:  # fmt: skip
        self._runtime = runtime
        self._apart = apart
        self._backlog = backlog
        self._may_go_on = may_go_on
        self._unsendable = unsendable
        self._schema = DurableSchema(runtime.connections)
        self._emptied = False
        self._buried = Place()
        self._report: Report
        # What is in no queue any more is looked at first: it would be missing, and be published again.
        self._duties = Duties(
            self._take_from_the_dead, self._look_at_all, self._look_at_buried, self._look_at_pages
        )  # fmt: skip

    def run_once(self, report: Report) -> None:
        """Do everything that is due."""
        self._report = report
        if self._schema.fits():
            self._duties.do()

    def broker_was_emptied(self) -> None:
        """Look at everything at the next turns, until that is done: the broker tells only once."""
        self._emptied = True

    def _take_from_the_dead(self) -> None:
        self._report.tasks_taken += durable_locks.take_from_the_dead(self._runtime)

    def _look_at_pages(self) -> None:
        until = time.monotonic() + TURN_S
        while self._may_publish() and self._look_at_a_page(self._report) and time.monotonic() < until:
            pass

    def _may_publish(self) -> bool:
        return self._runtime.publisher.ready and self._may_go_on()

    def _look_at_all(self) -> None:
        """Have everything published again that no run holds, and that the broker does not have.

        It was emptied, or has not seen a sweeper yet: then all may still be there.
        """
        if not self._emptied or not self._runtime.publisher.ready:
            return
        connections = self._runtime.connections
        self._backlog.begin_turn()  # what was seen before says nothing of what is read now
        after, seen_at = "", None
        while page := durable_looks.unheld(connections, after=after, limit=PAGE):
            seen_at = seen_at or page[0].read_at
            lost = [row for row in page if not self._backlog.is_whole(row.queue)]
            gone = self._backlog.without_what_waits(lost) if self._may_go_on() else None
            if gone is None:
                return

            def look(executor: Executor, gone: Sequence[str] = gone, seen_at: Any = seen_at) -> None:
                durable_looks.look_now(executor, gone, seen_at=seen_at)

            connections.transact("look-now", look, single=True)
            after = page[-1].task_id
        self._emptied = False

    def _look_at_buried(self) -> None:
        """Doom what the broker's transport has given up; of jobs it means nothing, of other tasks a person decides.

        Dying before an entry is removed leaves it, and the next sweeper finds the row doomed, or in the dead set.
        """
        publisher = self._runtime.publisher
        while self._may_publish():
            place, page = publisher.buried(self._buried)
            if not page:
                self._buried = place
                return
            seen_to = [one.text for one in page if one.is_doorbell or self._poison(one)]
            if seen_to and not publisher.forget_buried(seen_to):
                return
            self._buried = place.past([one.text for one in page if one.text not in seen_to])

    def _poison(self, buried: Buried) -> bool:
        """Doom the row of a message, if it is in this store; tells whether it is, or was."""
        stores = self._runtime.stores
        if buried.key is None or (stores.several and buried.store not in (None, stores.name_of(self._runtime))):
            return False
        try:
            return burials.poison(self._runtime, buried.key)
        except StoreUnavailableError:
            raise
        except Exception:  # the entries behind it must not wait for it
            log_trouble(
                logger,
                buried.key,
                "What the dead list of the transport has of task %.100r was left there",
                buried.key[0],
            )
            return False

    def _look_at_a_page(self, report: Report) -> bool:
        """Judge a page of rows that are due; False if there is no further one to be looked at now."""
        connections = self._runtime.connections
        found = durable_looks.candidates(connections, per_queue=PER_QUEUE, limit=PAGE)
        if found and self._backlog.pass_over_counted():
            found = durable_looks.candidates(connections, per_queue=PER_QUEUE, limit=PAGE)
        if not found:
            return False
        due = self._backlog.without_what_waits(found)
        if due is None:
            return False
        return all(self._judge(due[first : first + BODIES], report) for first in range(0, len(due), BODIES))

    def _judge(self, task_ids: Sequence[str], report: Report) -> bool:
        """Strike, publish or bury rows that do not wait, in this order; False if nothing can be published just now."""
        connections = self._runtime.connections

        def reserve(executor: Executor) -> Sequence[Any]:
            return durable_looks.reserve(executor, task_ids, strike_s=self._runtime.settings.lost_after)

        place = {task_id: number for number, task_id in enumerate(task_ids)}
        rows = sorted(connections.transact("reserve", reserve, single=True), key=lambda row: place[row.task_id])
        doomed = [row for row in rows if row.fate in DOOMS]
        if doomed and not self._apart(lambda: self._bury(doomed, report)):
            durable_looks.look_again(connections, [row.task_id for row in doomed], wait_s=LOOK_AGAIN_S)
        return self._publish([row for row in rows if row.fate == "publish"], report)

    def _publish(self, rows: Sequence[Any], report: Report) -> bool:
        messages = copies.of_rows(self._runtime, rows)
        report.missing += sum(row.missing for row in rows)
        reach("sweep:before-publish")
        refused: Refused = []
        sent = publishing.dispatch(self._runtime, messages, refused=refused)
        report.published += sent
        report.unpublished += len(messages) - sent
        if refused:
            self._apart(lambda: self._bury_refused(refused, report))  # else they come again, and are refused again
        if self._runtime.publisher.ready:
            return True  # what was passed over waits for the end of its reservation
        durable_looks.look_again(self._runtime.connections, [row.task_id for row in rows], wait_s=LOOK_AGAIN_S)
        return False

    def _bury_refused(self, refused: Refused, report: Report) -> None:
        report.tasks_buried += self._unsendable.bury(refused)

    def _bury(self, rows: Sequence[Any], report: Report) -> None:
        """Tell the backend of each, then move it to the dead set: a death in between only tells once more.

        What is buried apart may come too late for the report.
        """
        for row, address in zip(rows, copies.addresses_of(self._runtime, rows), strict=True):
            try:
                report.tasks_buried += self._bury_one(row, address)
            except Exception:
                log_trouble(
                    logger, row.task_id, "Task %s is doomed, and could not be buried; it is tried again", row.task_id
                )

    def _bury_one(self, row: Any, address: Address) -> bool:
        key = (row.task_id, row.generation)
        if row.fate == "revoked" and not copies.revoke(self._runtime, key, address):
            return False  # the copy that counts may be in a store that does not answer, and is not revoked there
        if copies.gives_way(self._runtime, key, address):
            return False
        if row.fate == "expired" and address.unconfirmed and self._runtime.stores.any_left_alone:
            return False  # a copy may have run to its end in a store that does not answer: there is time to ask it
        error = _error_of(row)
        message = Message.of_row(row)
        verdict = self._runtime.results.tell_of_doom(message, row.fate, error, place=self._runtime.place)
        reach("doom:told")
        if verdict == "bury":
            buried = burials.fail(
                self._runtime, key, by="sweeper", worker_id=None, reason=row.fate, error=error, address=address
            )
            if buried and row.fate == "revoked":
                self._runtime.results.announce_revoked(message)
            return buried
        if verdict == "remove":
            burials.forget(self._runtime, key)
        return False


def _error_of(row: Any) -> str:
    match row.fate:
        case "expired":
            return EXPIRED
        case "revoked":
            return REVOKED
    if row.on_lost is None:
        return POISONED
    return LOST_TOO_OFTEN.format(losses=row.losses) if row.losses > 1 else LOST
