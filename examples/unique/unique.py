"""Jobs and durable tasks with unique keys: many ask at once, and one is made. docs/unique.md explains them.

createdb unique                                  # or name yours in DATABASE_URL
celery -A unique sidejob db upgrade
celery -A unique worker --loglevel info

python unique.py                                 # in another shell; prints what was made
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from celery import Celery
from celery.result import AsyncResult

from celery_sidejob import DuplicateError, Job, RunningJob, SideJob

SERVER = os.environ.get("DATABASE_URL", "postgresql:///unique").partition("://")[2]

app = Celery("unique", broker="sidejobpg://", backend=f"db+postgresql+psycopg://{SERVER}")
app.conf.sidejob_database_url = f"postgresql://{SERVER}"
sidejob = SideJob(app)


@sidejob.task(inports=["changes"])
def reindex(job: RunningJob, customer: int) -> int:
    """Take in all changes of a customer that have come until now."""
    return sum(1 for _ in job.for_inputs("changes"))


@app.task(durable=True)  # type: ignore[untyped-decorator]
def report(customer: int) -> str:
    """Write a report."""
    return f"report of customer {customer}"


def changed(customer: int) -> Job:
    """Have a customer's changes taken in soon: all of the next two seconds by one job."""
    return reindex.enqueue((customer,), unique=f"reindex:{customer}", countdown=2)


def main() -> None:
    """Ask sixteen times at once for the same customer."""
    with ThreadPoolExecutor(16) as clients:
        jobs = set(clients.map(changed, [7] * 16))
        results = {result.id for result in clients.map(lambda _: later(), range(16))}
    print(len(jobs), "job,", len(results), "task")
    (job,) = jobs
    print(job.wait(timeout=60).status)
    later_job = changed(7)
    print(later_job != job, later_job.wait(timeout=60).status)
    first = reindex.enqueue((8,), unique="reindex:8", countdown=3600)
    try:
        reindex.enqueue((8,), unique="reindex:8", on_duplicate="refuse")
    except DuplicateError as error:
        print(error.job == first)
    sooner = reindex.enqueue((8,), unique="reindex:8", on_duplicate="replace")
    print(sooner.wait(timeout=60).status, first.wait(timeout=60).status)


def later() -> AsyncResult:
    """Ask for a report in an hour, once."""
    return report.apply_async((7,), countdown=3600, unique="report:7")


if __name__ == "__main__":
    main()
