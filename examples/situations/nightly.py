"""Situation 5: a nightly schedule."""

from __future__ import annotations

from datetime import timedelta

from situations import app, sidejob

from celery_sidejob import RunningJob

app.conf.sidejob_schedules = {
    "close the day": {
        "task": "nightly.close", "cron": "30 2 * * *", "timezone": "Europe/Berlin",
        "catch_up": "all",  # after an outage each missed night has its job
        "overlap": "wait",  # the next one begins when the one before has ended
    },
}  # fmt: skip


@sidejob.task(name="nightly.close", max_retries=5, autoretry_for=(OSError,), retry_backoff=60)
def close(job: RunningJob) -> str:
    """Close the books of the day before. No beat is needed: any worker makes the job, once a night."""
    day = job.nominal_time.date() - timedelta(days=1) if job.nominal_time else None
    return f"closed {day}"


if __name__ == "__main__":
    print("job", sidejob.get_schedule("close the day").run_now().id)  # the same by hand
