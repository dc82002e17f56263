"""Rows of `tags`: the tags of jobs. How many jobs have a tag is counted in `tag_counts`, and in what it lacks yet.

Everybody who adds or removes tags appends to `tag_changes`, so that nobody waits for the counter of a common tag. The
sweeper adds the changes up. A count is always the counter plus the changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from .statement import Reader, Statement, Transaction

_ADD = Statement("""
WITH made AS (
  INSERT INTO {tags} (tag, job_id)
  SELECT r.tag, r.job_id FROM json_to_recordset(%(rows)s::json) AS r(job_id bigint, tag text, place int)
  ORDER BY r.job_id, r.place
  ON CONFLICT DO NOTHING RETURNING tag)
INSERT INTO {tag_changes} (tag, change) SELECT tag, count(*) FROM made GROUP BY tag""")


def add(executor: Transaction, tagged: Iterable[tuple[int, Sequence[str]]]) -> None:
    """Give jobs tags, after those that they have: (job id, tags). A tag that a job has keeps its place."""
    rows = [
        {"job_id": job_id, "tag": tag, "place": place}
        for job_id, names in tagged
        for place, tag in enumerate(names)
    ]  # fmt: skip
    executor.run(_ADD, rows=json.dumps(rows))


_REMOVE = Statement("DELETE FROM {tags} WHERE job_id = %(job_id)s AND tag = ANY(%(tags)s::text[])")


def remove(executor: Transaction, job_id: int, names: Iterable[str]) -> None:
    """Take tags from a job; those that it does not have do no harm. A trigger notes the change."""
    executor.run(_REMOVE, job_id=job_id, tags=list(names))


_OF = Statement("SELECT tag FROM {tags} WHERE job_id = %(job_id)s ORDER BY place")


def of(executor: Reader, job_id: int) -> list[str]:
    """Read a job's tags, in the order in which it got them."""
    return [row.tag for row in executor.run(_OF, job_id=job_id)]


# A tag whose changes are negative may fall behind others: as many more counters are read as there are such tags.
_COUNTS = Statement("""
WITH changed AS MATERIALIZED (SELECT tag, sum(change)::bigint AS change FROM {tag_changes} GROUP BY tag),
first AS MATERIALIZED (
  SELECT t.tag, t.jobs FROM {tag_counts} t ORDER BY t.jobs DESC, t.tag
  LIMIT %(limit)s + (SELECT count(*) FROM changed WHERE change < 0)),
found AS (
  SELECT f.tag, f.jobs + coalesce(c.change, 0) AS jobs FROM first f LEFT JOIN changed c ON c.tag = f.tag
  UNION
  SELECT c.tag, c.change + coalesce((SELECT t.jobs FROM {tag_counts} t WHERE t.tag = c.tag), 0) FROM changed c)
SELECT tag, jobs FROM found WHERE jobs > 0 ORDER BY jobs DESC, tag LIMIT %(limit)s""")


def counts(executor: Reader, limit: int) -> list[tuple[str, int]]:
    """Read the tags that most jobs have, and how many have each."""
    return [(row.tag, row.jobs) for row in executor.run(_COUNTS, limit=limit)]


PAGE = 5000
"""Changes that are added up in one statement."""

_ADD_UP = Statement("""
WITH taken AS (
  DELETE FROM {tag_changes} WHERE id = ANY(ARRAY(
    SELECT id FROM {tag_changes} ORDER BY id LIMIT %(limit)s FOR UPDATE SKIP LOCKED)) RETURNING tag, change),
summed AS (SELECT tag, sum(change) AS change FROM taken GROUP BY tag ORDER BY tag),
counted AS (
  INSERT INTO {tag_counts} AS t (tag, jobs) SELECT tag, change FROM summed WHERE change <> 0::numeric
  ON CONFLICT (tag) DO UPDATE SET jobs = t.jobs + excluded.jobs)
SELECT count(*) AS changes FROM taken""")
_FORGET = Statement("DELETE FROM {tag_counts} WHERE jobs = 0")


def add_up(executor: Transaction) -> int:
    """Add a page of changes to the counters, and forget counters that are zero; returns how many changes there were."""
    added = int(executor.run(_ADD_UP, limit=PAGE)[0].changes)
    if added:
        executor.run(_FORGET)
    return added
