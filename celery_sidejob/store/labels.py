"""Rows of `aliases`, `tags` and `tracked`: what people find a job by."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from .jobs import HANDLE
from .statement import Reader, Statement, Transaction

_ADD_ALIASES = Statement("""
INSERT INTO {aliases} (name, job_id)
SELECT r.name, r.job_id FROM json_to_recordset(%(rows)s::json) AS r(name text, job_id bigint) ORDER BY r.name
ON CONFLICT (name) DO UPDATE SET job_id = {aliases}.job_id RETURNING name, job_id""")


def add_aliases(executor: Transaction, names: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Add aliases and return each name's job: a name that was already taken keeps its job."""
    rows = [{"name": name, "job_id": job_id} for name, job_id in names]
    return {row.name: row.job_id for row in executor.run(_ADD_ALIASES, rows=json.dumps(rows))}


_REMOVE_ALIAS = Statement("DELETE FROM {aliases} WHERE name = %(name)s AND job_id = %(job_id)s RETURNING name")


def remove_alias(executor: Transaction, name: str, job_id: int) -> bool:
    """Remove an alias of the job; False if the job does not have it."""
    return bool(executor.run(_REMOVE_ALIAS, name=name, job_id=job_id))


_ALIASES_OF = Statement("SELECT name FROM {aliases} WHERE job_id = %(job_id)s ORDER BY name")


def aliases_of(executor: Reader, job_id: int) -> list[str]:
    """Read a job's aliases."""
    return [row.name for row in executor.run(_ALIASES_OF, job_id=job_id)]


_ADD_TAGS = Statement("""
INSERT INTO {tags} (tag, job_id)
SELECT r.tag, r.job_id FROM json_to_recordset(%(rows)s::json) AS r(job_id bigint, tag text, place int)
ORDER BY r.job_id, r.place
ON CONFLICT DO NOTHING""")


def add_tags(executor: Transaction, tagged: Iterable[tuple[int, Sequence[str]]]) -> None:
    """Give jobs further tags: (job id, tags). A tag that a job already has keeps its position."""
    rows = [
        {"job_id": job_id, "tag": tag, "place": place} for job_id, names in tagged for place, tag in enumerate(names)
    ]
    executor.run(_ADD_TAGS, rows=json.dumps(rows))


_REMOVE_TAGS = Statement("DELETE FROM {tags} WHERE job_id = %(job_id)s AND tag = ANY(%(tags)s::text[])")


def remove_tags(executor: Transaction, job_id: int, names: Iterable[str]) -> None:
    """Remove tags from a job; tags that it does not have are ignored."""
    executor.run(_REMOVE_TAGS, job_id=job_id, tags=list(names))


_TAGS_OF = Statement("SELECT tag FROM {tags} WHERE job_id = %(job_id)s ORDER BY place")


def tags_of(executor: Reader, job_id: int) -> list[str]:
    """Read a job's tags, in the order in which it got them."""
    return [row.tag for row in executor.run(_TAGS_OF, job_id=job_id)]


MOST_COUNTED = 1_000_000
"""The most rows that are counted, those of the newest jobs."""

_TAG_COUNTS = Statement("""
SELECT tag, count(*) AS jobs FROM (SELECT tag FROM {tags} ORDER BY job_id DESC LIMIT %(most)s) newest
GROUP BY tag ORDER BY jobs DESC, tag LIMIT %(limit)s""")


def tag_counts(executor: Reader, limit: int) -> list[tuple[str, int]]:
    """Count how many jobs have each tag, and return the `limit` most common tags; reads up to `MOST_COUNTED` rows."""
    return [(row.tag, row.jobs) for row in executor.run(_TAG_COUNTS, most=MOST_COUNTED, limit=limit)]


MOST_TRACKED = 10_000
"""The most tracked jobs that are followed at once; the last ones count."""

_TRACK = Statement("INSERT INTO {tracked} (job_id) VALUES (%(job_id)s) ON CONFLICT DO NOTHING")
_UNTRACK = Statement("DELETE FROM {tracked} WHERE job_id = %(job_id)s")


def track(executor: Transaction, job_id: int, *, on: bool) -> None:
    """Begin or cease to track a job; repeating it has no effect."""
    executor.run(_TRACK if on else _UNTRACK, job_id=job_id)


_IS_TRACKED = Statement("SELECT job_id FROM {tracked} WHERE job_id = %(job_id)s")


def is_tracked(executor: Reader, job_id: int) -> bool:
    """Tell whether a job is tracked."""
    return bool(executor.run(_IS_TRACKED, job_id=job_id))


_TRACKED = Statement(f"""
SELECT {HANDLE} FROM (SELECT job_id, place FROM {{tracked}} ORDER BY place DESC LIMIT %(limit)s) t
CROSS JOIN LATERAL (SELECT * FROM {{jobs}} x WHERE x.id = t.job_id OFFSET 0) j ORDER BY t.place""")


def tracked(executor: Reader, limit: int) -> Sequence[Any]:
    """Read the jobs that were tracked last, in the order in which they were tracked."""
    return executor.run(_TRACKED, limit=limit)


_TRACKED_IDS = Statement("SELECT job_id FROM {tracked} ORDER BY place DESC LIMIT %(limit)s")


def tracked_ids(executor: Reader) -> frozenset[int]:
    """Read the ids of the tracked jobs."""
    return frozenset(row.job_id for row in executor.run(_TRACKED_IDS, limit=MOST_TRACKED))
