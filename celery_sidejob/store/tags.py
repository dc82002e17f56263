"""Rows of `tags`: the tags of jobs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from .statement import Reader, Statement, Transaction

_ADD = Statement("""
INSERT INTO {tags} (tag, job_id)
SELECT r.tag, r.job_id FROM json_to_recordset(%(rows)s::json) AS r(job_id bigint, tag text, place int)
ORDER BY r.job_id, r.place
ON CONFLICT DO NOTHING""")


def add(executor: Transaction, tagged: Iterable[tuple[int, Sequence[str]]]) -> None:
    """Give jobs further tags: (job id, tags). A tag that a job already has keeps its position."""
    rows = [
        {"job_id": job_id, "tag": tag, "place": place} for job_id, names in tagged for place, tag in enumerate(names)
    ]
    executor.run(_ADD, rows=json.dumps(rows))


_REMOVE = Statement("DELETE FROM {tags} WHERE job_id = %(job_id)s AND tag = ANY(%(tags)s::text[])")


def remove(executor: Transaction, job_id: int, names: Iterable[str]) -> None:
    """Remove tags from a job; tags that it does not have are ignored."""
    executor.run(_REMOVE, job_id=job_id, tags=list(names))


_OF = Statement("SELECT tag FROM {tags} WHERE job_id = %(job_id)s ORDER BY place")


def of(executor: Reader, job_id: int) -> list[str]:
    """Read a job's tags, in the order in which it got them."""
    return [row.tag for row in executor.run(_OF, job_id=job_id)]


MOST = 1_000_000
"""The most rows that are counted, those of the newest jobs."""

_COUNTS = Statement("""
SELECT tag, count(*) AS jobs FROM (SELECT tag FROM {tags} ORDER BY job_id DESC LIMIT %(most)s) newest
GROUP BY tag ORDER BY jobs DESC, tag LIMIT %(limit)s""")


def counts(executor: Reader, limit: int) -> list[tuple[str, int]]:
    """Count how many jobs have each tag, and return the `limit` most common tags; reads up to `MOST` rows."""
    return [(row.tag, row.jobs) for row in executor.run(_COUNTS, most=MOST, limit=limit)]
