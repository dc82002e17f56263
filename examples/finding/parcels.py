"""Parcels of several customers: found by their tags, followed while they are on their way, and asked for their past.

docs/finding.md explains it.

createdb parcels                                 # or name yours in DATABASE_URL
celery -A parcels sidejob db upgrade
celery -A parcels worker --loglevel info

python parcels.py                                # in another shell; prints what happened
"""

from __future__ import annotations

import os

from celery import Celery

from celery_sidejob import JobFailed, RunningJob, SideJob

SERVER = os.environ.get("DATABASE_URL", "postgresql:///parcels").partition("://")[2]

app = Celery("parcels", broker="sidejobpg://", backend=f"db+postgresql+psycopg://{SERVER}")
app.conf.sidejob_database_url = f"postgresql://{SERVER}"
sidejob = SideJob(app)


@sidejob.task
def deliver(job: RunningJob, to: str) -> None:
    """Deliver a parcel; nobody opens at the first ring, and at one address never."""
    job.log("rang the bell", at=to)
    if job.request.retries == 0:
        raise job.retry(countdown=0.1)
    if to == "Nowhere 1":
        job.tag("returned")
        job.checkpoint()  # what a run that fails has not committed is not kept
        raise JobFailed("no such address", f"Nobody knows {to}.")
    job.tag("delivered")


def main() -> None:
    """Send three parcels, follow one, and look who got what."""
    with sidejob.subscribe("/sidejob/tracked", timeout=60) as announcements:
        followed = deliver.enqueue(("Elm Street 3",), tags=["customer:7", "express"], countdown=2).track()
        others = [deliver.enqueue((to,), tags=["customer:7"]) for to in ("Oak Lane 9", "Nowhere 1")]
        for _, message in announcements:
            if message.get("status") in ("running", "completed"):
                print("run", message["run"], "is", message["status"])
            if message.get("status") == "completed":
                break
    for job in others:
        job.wait(timeout=60)

    for entry in followed.history:
        print(entry.what, entry.detail or "")
    for job in sidejob.jobs(tag="customer:7", status="failed"):
        print("failed:", *job.args, job.tags)
    print(sidejob.dead.groups(), sidejob.tags())
    there = {worker.name for worker in sidejob.workers()}
    print("its worker is there:", {entry.worker for entry in followed.history[1:]} <= there)


if __name__ == "__main__":
    main()
