"""The one place where a run of a job ends, whether the run, the worker that stopped it, or a rescue ends it.

Code that belongs to every end goes into `end_job_run`. It knows the run, how it ended and the job's new status, in the
transaction that ends the run. A termination ends no run: it asks for a shutdown, which is a run and ends here. A
deletion ends no run either: only jobs at rest are deleted.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ..model.changes import Change, Stage
from ..model.errors import FullPort
from ..model.events import JobBuried, RunFailed
from ..model.loss import Loss
from ..model.messages import Outcome
from ..model.status import RunEnd, Status
from ..store import askings, asks, claims, dead, moving, packets, ports
from ..store.outbox import arming, continuations
from ..store.statement import Transaction
from . import measuring
from .after_commit import AfterCommit
from .dependencies import mark_ended
from .hold import Hold
from .mailboxes import add_ports
from .runs import Unit
from .runtime import LocalRuntime

MOST_OF_MESSAGE = 200
"""Characters of an error's message that the history keeps."""

TAKEN = (RunEnd.LOST, RunEnd.GIVEN_BACK)
"""Ends that the run did not decide: the run was taken from its worker."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended; `result` is the asking's result as JSON text."""

    how: RunEnd
    result: str = "null"
    error: str | None = None
    traceback: str | None = None
    retry_in_s: float = 0.0
    reason: str = "failed"
    asked: Sequence[Change] = ()
    """The part that is applied of the unit of a run that raised: the termination of its own job."""
    gives_up: Status | None = None
    """The status in which the job rests because this run was one loss too many."""
    waits_for: Sequence[FullPort] = ()
    """Ports without room for what this run has written: it begins again when there is room."""
    then: Stage | None = None
    """What the job goes on with, in the same asking, if this run completes."""
    loss: Loss | None = None
    """Why the run was lost, if it was."""
    takes: bool = False
    """The next run is claimed by its process and takes its packets before it uses them.

    Another reader took packets that this run had read, or nobody knows whether this run had begun.
    """

    undone: bool = False
    """It was claimed and has not begun: it leaves no trace, and its message is valid again."""

    @property
    def outcome(self) -> Status | None:
        """The status in which the job would rest; None if it runs again."""
        if self.how in TAKEN:
            return self.gives_up
        return Status.FAILED if self.how == RunEnd.RETRIED else Status(self.how)


def end_job_run(  # noqa: PLR0913 - a run, how it ended, and where that is written
    runtime: LocalRuntime, executor: Transaction, hold: Hold, unit: Unit | None, ending: Ending,
    after_commit: AfterCommit, *, by_worker: bool = False, quiet: bool = False,
) -> Any | None:  # fmt: skip
    """End a run; update the asking, the message and the dead set as the job's new status requires.

    `unit` is the run's last unit, applied already; None if the run's unit was discarded. `by_worker`: the worker ends
    its own run, whatever units that run committed. `quiet`: see `claims.end`. Returns the job's new row; None if the
    run was no longer current: then nothing was written.
    """
    row = _write(runtime, executor, hold, unit, ending, by_worker=by_worker, quiet=quiet)
    if row is None:
        return None
    # Readers may have found nothing while the run held the packets. A rescue has not locked the parent: note its ask.
    to_ask = packets.release(executor, hold.job_id, hold.run_no) if unit is None or unit.took else set()
    if ending.gives_up and row.parent_id is not None:
        to_ask.add(row.parent_id)
    if to_ask:
        asks.note(executor, to_ask, "run")
        after_commit.noted += to_ask
    if row.task_id is not None:
        _follow_closing(runtime, executor, hold, row, ending, after_commit)
    if row.goes_on:
        _arm_next_run(runtime, executor, hold, row, ending, after_commit)
    if row.has_dependents:
        mark_ended(executor, hold.job_id, row.status, after_commit)
    if row.status == Status.TERMINATED:
        asks.drop_runs(executor, hold.job_id)
        ports.unsubscribe(executor, hold.job_id)  # nobody would read the messages of its channels
    _note_failure(hold, ending, after_commit)
    after_commit.events += measuring.ended(hold, ending.how, gives_up=ending.gives_up == Status.FAILED)
    if row.status in (Status.FAILED, ending.gives_up):
        _bury(executor, hold, row, ending, after_commit)
    return row


def end_page(
    runtime: LocalRuntime, executor: Transaction, runs: Collection[tuple[int, int]], *, worker_id: int
) -> Sequence[Any]:
    """End runs that leave nothing else to be written; see `claims.end_page`."""
    return claims.end_page(executor, runs, worker_id=worker_id, history=runtime.settings.history) if runs else ()


def _note_failure(hold: Hold, ending: Ending, after_commit: AfterCommit) -> None:
    """Note the event of a run that ended with an error and is not tried again."""
    if ending.error and ending.how != RunEnd.RETRIED:
        shown = json.loads(ending.error)
        error = shown["message"] or shown["type"]
        after_commit.events.append(
            RunFailed(hold.job_id, hold.row.task, hold.run_no, error, ending.traceback or shown.get("traceback"))
        )


def _write(  # noqa: PLR0913 - as above
    runtime: LocalRuntime, executor: Transaction, hold: Hold, unit: Unit | None, ending: Ending, *, by_worker: bool,
    quiet: bool,
) -> Any | None:  # fmt: skip
    unwanted = not runtime.results.wanted(hold.row.task, None)
    run: dict[str, Any] = {"run_no": hold.run_no, "worker_id": hold.worker_id, "past": _past(runtime, hold, ending)}
    if ending.how in TAKEN:
        gives_up = None if ending.gives_up is None else str(ending.gives_up)
        return claims.release(
            executor, hold.job_id, **run, own=by_worker, loss=ending.how == RunEnd.LOST, undone=ending.undone,
            outcome=gives_up, error=ending.error, unwanted=unwanted,
        )  # fmt: skip
    return claims.end(
        executor, hold.job_id, **run, unit_no=None if by_worker else hold.unit_no, outcome=str(ending.outcome),
        result=ending.result, unwanted=unwanted, applied=unit is not None,
        retry=ending.how == RunEnd.RETRIED or ending.then is not None,
        error=ending.error, then=ending.then is not None, quiet=quiet,
    )  # fmt: skip


def _past(runtime: LocalRuntime, hold: Hold, ending: Ending) -> claims.Past:
    """Return what the history keeps of the end.

    That is the facts of a loss; of an error its class, its group and the beginning of its message.
    """
    keeps, shown = (
        0 if ending.undone else runtime.settings.history,
        {} if ending.loss is None else dict(ending.loss.facts),
    )
    if keeps and ending.error:
        error = json.loads(ending.error)
        group = error.get("group") or error["type"]
        shown |= {"error": error["type"], "group": group, "message": error["message"][:MOST_OF_MESSAGE]}
    how = "terminated" if ending.gives_up == Status.TERMINATED else str(ending.how)
    return {"how": how, "kind": hold.kind, "detail": json.dumps(shown) if shown else None, "history": keeps}


def _follow_closing(
    runtime: LocalRuntime, executor: Transaction, hold: Hold, row: Any, ending: Ending, after_commit: AfterCommit
) -> None:
    """Write the continuations of the asking that was just closed, and have its result stored in the backend.

    A job that now waits for a timer alone keeps the asking's unique key, as one that goes on does.
    """
    job, options = hold.row, json.loads(row.options) if row.options else None
    ended = Outcome(
        row.task_id, job.id, job.task, job.queue, str(ending.outcome), ending.result, options, job.args, job.kwargs
    )
    for continuation in runtime.results.continuations(ended):
        continuations.add(
            executor, key=continuation.key, queue=continuation.queue, publication=continuation.publication,
            check_interval_s=runtime.settings.lost_after,
        )  # fmt: skip
        after_commit.continuations.append(continuation)
    if runtime.results.wanted(ended.task, options):
        after_commit.outcomes.append(ended)
    elif options:
        askings.mark_stored(executor, [row.task_id])
    if row.status == Status.QUEUED and not row.goes_on:
        askings.keep_key(executor, hold.job_id)


def _arm_next_run(
    runtime: LocalRuntime, executor: Transaction, hold: Hold, row: Any, ending: Ending, after_commit: AfterCommit
) -> None:
    """Turn the run's message into the next run's; after a retry the sweeper publishes it when its backoff is over."""
    is_queued = row.status == Status.QUEUED
    stage = _begin_stage(executor, hold, ending, after_commit) if is_queued and ending.then is not None else None
    task_id = None
    if is_queued and (row.task_id or ending.outcome == Status.TERMINATED):
        task_id = askings.open_next(executor, hold.job_id)
    elif row.task_id:
        task_id = askings.keep_key(executor, hold.job_id) or str(uuid.uuid4())  # of the shutdown
    wait_s = ending.retry_in_s if is_queued else 0.0
    armed = arming.rearm(
        executor, hold.job_id, task_id=task_id, wait_s=wait_s, takes=ending.takes,
        check_interval_s=runtime.settings.lost_after,
    )  # fmt: skip
    if stage is not None or armed.for_run is not None:
        after_commit.ring(hold.row if stage is None else hold.row._replace(**stage._asdict()), armed)


def _begin_stage(executor: Transaction, hold: Hold, ending: Ending, after_commit: AfterCommit) -> Any:
    """Give the job the stage that its run has asked for; returns what has changed in its row."""
    assert ending.then is not None
    add_ports(executor, hold.job_id, ending.then.ports, after_commit)
    return moving.change(executor, hold.job_id, ending.then)


def _bury(executor: Transaction, hold: Hold, row: Any, ending: Ending, after_commit: AfterCommit) -> None:
    """Enter the job in the dead set, with the wake that was pending when its last run was lost."""
    job, reason = hold.row, ending.reason
    shown = json.loads(ending.error) if ending.error else {}
    entry = dead.bury(
        executor, job.id, task_id=row.task_id, reason=reason, traceback=ending.traceback,
        error=f"{shown.get('type', '')}: {shown.get('message', '')}",
        retries=job.retries,
        wake_pending=ending.gives_up == Status.FAILED and job.status == Status.QUEUED,
        given_group=shown.get("group"), loss=None if ending.loss is None else ending.loss.json,
    )  # fmt: skip
    after_commit.events.append(JobBuried(job.id, job.task, entry, reason))
