"""Tags of jobs and the tracking of jobs, as the changes of one transaction make them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..model.changes import FindingChange, NewJob, Tag, Track, Untag
from ..model.channel import TRACKED
from ..store import tags, tracked
from ..store.statement import Transaction
from .after_commit import AfterCommit


def apply(executor: Transaction, change: FindingChange, after_commit: AfterCommit) -> None:
    """Change tags, or whether a job is tracked; those who follow tracked jobs are told of the latter."""
    match change:
        case Tag():
            tags.add(executor, [(change.job_id, change.names)])
        case Untag():
            tags.remove(executor, change.job_id, change.names)
        case Track():
            tracked.track(executor, change.job_id, on=change.on)
            after_commit.tracking_changed = True
            after_commit.announcements.append((TRACKED, json.dumps({"job": change.job_id, "tracked": change.on})))


def tag_new(executor: Transaction, new: Sequence[NewJob]) -> None:
    """Give new jobs their tags."""
    tagged = [(job.id, job.tags) for job in new if job.tags]
    if tagged:
        tags.add(executor, tagged)
