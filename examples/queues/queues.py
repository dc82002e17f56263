"""A mail queue with a limit, priorities and a pause. docs/queues.md explains them.

createdb queues                                  # or name yours in DATABASE_URL
celery -A queues sidejob db upgrade
celery -A queues worker --loglevel info --concurrency 4

python queues.py                                 # in another shell; prints what happened
"""

from __future__ import annotations

import os
import time

from celery import Celery

from celery_sidejob import RunningJob, SideJob

SERVER = os.environ.get("DATABASE_URL", "postgresql:///queues").partition("://")[2]

app = Celery("queues", broker="sidejobpg://", backend=f"db+postgresql+psycopg://{SERVER}")
app.conf.sidejob_database_url = f"postgresql://{SERVER}"
app.conf.task_default_queue = "mail"
app.conf.sidejob_queues = {"mail": {"limit": 2, "rate": "6000/m"}}
sidejob = SideJob(app)


@sidejob.task
def send(job: RunningJob, to: str) -> str:
    """Send a mail, and say when."""
    time.sleep(0.1)
    job.set(sent_at=time.time())
    return to


def main() -> None:
    """Have mails wait while the server is down, and the urgent ones sent first."""
    mail = sidejob.queue("mail")
    mail.pause("the mail server is down")
    news = [send.enqueue((f"reader {number}",), priority=1) for number in range(10)]
    urgent = send.enqueue(("the admin",), priority=1)
    urgent.set_priority(9)
    print("next:", *(job.args[0] for job in mail.peek(2)))
    print("waits for", *urgent.waiting_for)
    print("paused:", mail.counts.waiting, "wait,", mail.counts.running, "run")
    mail.resume()
    for job in (urgent, *news):
        job.wait(timeout=60)
    times = [job.get("sent_at") for job in (urgent, *news)]
    print("among the first two:", "the admin" if times[0] in sorted(times)[:2] else "others")
    print("limit", mail.limit, "rate", mail.rate)


if __name__ == "__main__":
    main()
