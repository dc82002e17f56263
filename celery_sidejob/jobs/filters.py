"""The filters by which jobs are listed and counted: checks them and converts them for the store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, TypedDict

from ..model.checks import MOST, SECONDS, check_age, check_texts, did_you_mean, is_number, shown
from ..model.errors import InvalidValueError
from ..model.status import statuses_of
from ..operations.runtime import Runtime
from ..store import job_lists
from .batch import get_batch
from .job import Job, get


class JobFilters(TypedDict, total=False):
    """The filters of `sidejob.jobs`, `iter_jobs` and `count_jobs`; None matches any job."""

    status: str | Iterable[str] | None
    task: Any
    queue: str | None
    created_by: str | None
    parent: Any
    after: int | Job | None
    unique: str | None
    tag: str | None
    batch: Any
    older_than: timedelta | float | None
    waiting_for: str | None
    schedule: Any
    since: datetime | timedelta | float | None
    before: int | Job | None


def check_filters(given: Mapping[str, Any], *, call: str) -> None:
    """Raise TypeError for an unknown filter."""
    known = JobFilters.__annotations__
    for name in given:
        if name not in known:
            said = f"{call} takes no {name}=, and looks at all jobs that match.{did_you_mean(name, known)}"
            raise TypeError(f"{said} Its filters are {', '.join(known)}.")


def filters_of(runtime: Runtime, given: Mapping[str, Any]) -> job_lists.Filters:
    """Check the filters of `sidejob.jobs`, all but `waiting_for`, and convert them for the store."""
    texts = {name: given.get(name) for name in ("task", "queue", "created_by", "unique", "tag", "schedule", "batch")}
    texts |= {name: getattr(texts[name], "name", texts[name]) for name in ("task", "schedule", "batch")}
    check_texts(**texts)
    batch = texts.pop("batch")
    since_at, since_s = _since(runtime, given.get("since"))
    status, parent = given.get("status"), given.get("parent")
    return job_lists.Filters(
        statuses=None if status is None else [str(one) for one in sorted(statuses_of(status))],
        parent_id=None if parent is None else get(runtime, parent).id,
        batch_id=None if batch is None else get_batch(runtime, batch)._id,
        older_s=check_age("older_than", given.get("older_than")),
        since=since_at,
        since_s=since_s,
        after=_id_of("after", given.get("after"), 0),
        before=_id_of("before", given.get("before"), MOST),
        **texts,
    )


def _since(runtime: Runtime, since: Any) -> tuple[datetime | None, float | None]:
    """Return a moment, or an age in seconds."""
    if isinstance(since, datetime):
        return runtime.tasks.localize(since), None
    return None, check_age("since", since, form=f"a datetime, or a timedelta or {SECONDS}")


def _id_of(name: str, job: int | Job | None, otherwise: int) -> int:
    """Return the id of a job that is given as a handle or as its id."""
    job_id = job.id if isinstance(job, Job) else otherwise if job is None else job
    if not is_number(job_id, least=-MOST):
        raise InvalidValueError(f"{name} is a job or its id, not {shown(job_id)}.")
    return job_id
