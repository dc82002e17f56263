"""Lists of jobs and of the dead set, in a store with a million jobs and 10,000 tags, against an empty one.

"Empty" has a page of each list and nothing else, so both return as many rows. Both take turns. `python -m benchmarks
finding [--jobs N] [--times N]`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import psycopg
from celery import Celery

from celery_sidejob import Job, SideJob, embedded
from celery_sidejob.store.schema.migrate import upgrade

TAGS = 10_000
GROUPS = 1000
PAGE = 25
OLD_S = 30 * 86400
"""An age that five jobs of each store have."""
ALLOWED = 1.5
"""How much longer a page may take among a million."""

FILL = """
INSERT INTO sidejob.jobs (id, task, queue, status, run_no, ended_at, created_at)
  SELECT n, 'task-' || n % 50, 'queue-' || n % 7, CASE WHEN n % 10 = 0 THEN 'failed' ELSE 'completed' END, 1, now(),
    now() - interval '1 day' FROM generate_series(1, {jobs}) n;
INSERT INTO sidejob.askings (task_id, job_id, closed_at, outcome, result, stored_at)
  SELECT 'asking-' || n, n, now(), 'completed', '1', now() FROM generate_series(1, {jobs}) n;
INSERT INTO sidejob.tags (tag, job_id) SELECT 'tag-' || n % {tags}, n FROM generate_series(1, {jobs}) n;
INSERT INTO sidejob.tracked (job_id) SELECT n FROM generate_series(1, {jobs}, 10) n;
INSERT INTO sidejob.dead (job_id, task_id, task, queue, reason, error, payload)
  SELECT id, 'asking-' || id, task, queue, 'failed', 'Error' || id % {groups} || ': it', '{{"v": 1}}'
  FROM sidejob.jobs WHERE status = 'failed';
UPDATE sidejob.jobs SET created_at = created_at - interval '1 year' WHERE id % ({jobs} / 5) = 1;
SELECT setval('sidejob.jobs_id_seq', {jobs} + 1);
VACUUM ANALYZE"""


def main(arguments: list[str]) -> int | None:
    """Measure, and print a table; 1 if a page takes too long among many."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks finding", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--times", type=int, default=300)
    options = parser.parse_args(arguments)
    with embedded.Postgres(durable=True) as many, embedded.Postgres(durable=True) as few:
        full = _store(many.url, jobs=options.jobs, tags=TAGS, groups=GROUPS)
        small = _store(few.url, jobs=10 * PAGE, tags=10, groups=1)
        try:
            return _compare(_pages(full), _pages(small), options.times)
        finally:
            full.close()
            small.close()


def _store(url: str, **numbers: int) -> SideJob:
    upgrade(url)
    with psycopg.connect(url, autocommit=True, options="-c synchronous_commit=off") as connection:
        for statement in FILL.format(**numbers).split(";\n"):
            connection.execute(statement)
    app = Celery("finding", broker="memory://", set_as_current=False)
    app.conf.update(sidejob_database_url=url)
    return SideJob(app)


def _pages(sidejob: SideJob) -> dict[str, Callable[[], Any]]:
    dead, job = sidejob.dead, Job(7, runtime=sidejob.runtime)
    newest = dead.list(group="Error0", limit=5)[-1].id
    return {
        "jobs(tag)": lambda: sidejob.jobs(tag="tag-7", limit=PAGE),
        "jobs(tag), the next page": lambda: sidejob.jobs(tag="tag-7", limit=PAGE // 2, after=117),
        "jobs(tag, status)": lambda: sidejob.jobs(tag="tag-7", status="completed", limit=PAGE),
        "jobs(tag), of none": lambda: sidejob.jobs(tag="none", limit=PAGE),
        "jobs()": lambda: sidejob.jobs(limit=PAGE),
        "jobs(newest_first)": lambda: sidejob.jobs(newest_first=True, limit=PAGE),
        "jobs(newest_first), the next page": lambda: sidejob.jobs(newest_first=True, limit=PAGE, before=117),
        "jobs(tag, newest_first)": lambda: sidejob.jobs(tag="tag-7", newest_first=True, limit=PAGE),
        "jobs(since, newest_first)": lambda: sidejob.jobs(since=OLD_S, newest_first=True, limit=PAGE),
        "jobs(since), of none": lambda: sidejob.jobs(since=0, limit=PAGE),
        "jobs(older_than)": lambda: sidejob.jobs(older_than=3600, limit=PAGE),
        "jobs(older_than), the next page": lambda: sidejob.jobs(older_than=3600, limit=PAGE, after=PAGE),
        "jobs(older_than, status), of few": lambda: sidejob.jobs(older_than=OLD_S, status="completed", limit=PAGE),
        "jobs(older_than), of few": lambda: sidejob.jobs(older_than=OLD_S, limit=PAGE),
        "jobs(older_than), of none": lambda: sidejob.jobs(older_than=20 * OLD_S, limit=PAGE),
        "job.tags": lambda: job.tags,
        "tracked()": lambda: sidejob.tracked(PAGE),
        "job.tracked": lambda: job.tracked,
        "dead.list(group)": lambda: dead.list(group="Error0", limit=PAGE),
        "dead.list(group), the next page": lambda: dead.list(group="Error0", limit=5, after=newest),
        "dead.list(group), of none": lambda: dead.list(group="none", limit=PAGE),
        "dead.list(task)": lambda: dead.list(task="task-0", limit=5),
    }


def _compare(full: dict[str, Callable[[], Any]], small: dict[str, Callable[[], Any]], times: int) -> int:
    seconds: dict[tuple[str, bool], list[float]] = {(name, is_full): [] for name in full for is_full in (True, False)}
    for turn in range(times + 20):
        for name in full:
            for is_full, pages in ((True, full), (False, small)):
                begun = time.perf_counter()
                pages[name]()
                if turn >= 20:
                    seconds[name, is_full].append(time.perf_counter() - begun)
    print(f"{'page':36}{'empty, ms':>12}{'full, ms':>12}{'ratio':>8}{'rows':>8}")
    late = []
    for name in full:
        few, many = (statistics.median(seconds[name, is_full]) * 1000 for is_full in (False, True))
        rows = [len(pages[name]()) if "job." not in name else 1 for pages in (small, full)]
        print(f"{name:36}{few:12.3f}{many:12.3f}{many / few:8.2f}{'/'.join(map(str, rows)):>8}")
        late += [name] if many > ALLOWED * few else []
    print("later than allowed: " + (", ".join(late) or "none"))
    return len(late) > 0
