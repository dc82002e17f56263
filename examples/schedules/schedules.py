"""A shop that counts its orders every second and reports in the morning. docs/schedules.md explains it.

createdb schedules                               # or name yours in DATABASE_URL
celery -A schedules sidejob db upgrade
celery -A schedules worker --loglevel info

python schedules.py                              # in another shell; prints what happened
celery -A schedules sidejob schedules list
"""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from celery import Celery

from celery_sidejob import RunningJob, SideJob

SERVER = os.environ.get("DATABASE_URL", "postgresql:///schedules").partition("://")[2]

app = Celery("schedules", broker="sidejobpg://", backend=f"db+postgresql+psycopg://{SERVER}")
app.conf.sidejob_database_url = f"postgresql://{SERVER}"
app.conf.sidejob_schedules = {
    "report": {"task": "schedules.report", "cron": "0 6 * * mon-fri", "timezone": "Europe/Berlin"},
    "count": {"task": "schedules.count", "every": 1, "catch_up": "all", "overlap": "wait"},
}
sidejob = SideJob(app)


@sidejob.task(name="schedules.report")
def report(job: RunningJob, by: str = "mail") -> str:
    """Report on the day before."""
    return f"reported by {by}"


@sidejob.task(name="schedules.count")
def count(job: RunningJob) -> None:
    """Count the orders of the second that begins at the nominal time, however late this runs."""
    assert job.nominal_time is not None


def main() -> None:
    """Wait for a few counts, catch up on an outage, and report now."""
    counting = sidejob.get_schedule("count")
    while counting.count < 3:
        time.sleep(0.1)
    counting.pause("stocktaking")
    counted = [job for job in sidejob.jobs(task="schedules.count") if job.schedule == "count"]
    print("numbers:", *(job.schedule_number for job in counted[:3]))
    times = [due for job in counted[:3] if (due := job.nominal_time) is not None]
    print("apart:", *{later - sooner for sooner, later in pairwise(times)})

    an_hour_ago = datetime.now(UTC) - timedelta(hours=1)
    missed = sidejob.schedule("missed", report, ("fax",), every=60, start=an_hour_ago, end=an_hour_ago, catch_up=2)
    while missed.count < 1:
        time.sleep(0.1)
    print("caught up:", missed.last.wait(timeout=60).result.get(timeout=60))
    job = sidejob.get_schedule("report").run_now()
    print("now:", job.wait(timeout=60).result.get(timeout=60), f"as number {job.schedule_number}")
    print("next reports on weekdays:", all(day.weekday() < 5 for day in sidejob.get_schedule("report").next_times(7)))
    missed.delete()


if __name__ == "__main__":
    main()
