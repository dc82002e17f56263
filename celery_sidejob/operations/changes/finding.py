"""The changes of one transaction to tags, tracking and histories of jobs; the end of a run writes its own row."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence

from ...model.changes import FindingChange, Log, NewJob, Tag, Track, Untag
from ...model.names import TRACKED_CHANNEL
from ...store import history, jobs
from ...store.statement import Transaction
from ..after_commit import AfterCommit


def apply(executor: Transaction, change: FindingChange, after_commit: AfterCommit) -> None:
    """Change tags, or whether a job is tracked; the listeners of tracked jobs are told of the latter."""
    match change:
        case Tag():
            jobs.add_tags(executor, [(change.job_id, change.names)])
        case Untag():
            jobs.remove_tags(executor, change.job_id, change.names)
        case Track():
            jobs.track(executor, change.job_id, on=change.on)
            after_commit.tracking_changed = True
            after_commit.announcements.append(
                (TRACKED_CHANNEL, json.dumps({"job": change.job_id, "tracked": change.on}))
            )


def tag_new(executor: Transaction, new: Sequence[NewJob]) -> None:
    """Give new jobs their tags."""
    tagged = [(job.id, job.tags) for job in new if job.tags]
    if tagged:
        jobs.add_tags(executor, tagged)


def write_history(executor: Transaction, found: Sequence[Log], *, keep: int) -> None:
    """Write new entries of jobs into their histories, and keep the last `keep` entries of each job."""
    if not found or not keep:
        return
    kept: dict[int, deque[Log]] = {}
    for change in found:
        kept.setdefault(change.job_id, deque(maxlen=keep)).append(change)
    history.log(executor, [one for entries in kept.values() for one in entries], keep=keep)
