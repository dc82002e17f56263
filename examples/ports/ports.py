"""A port with a limit, and ports that are connected. docs/ports.md explains them.

createdb ports                                   # or name yours in DATABASE_URL
celery -A ports sidejob db upgrade
celery -A ports worker --loglevel info

python ports.py 100                              # in another shell; prints what has come through
"""

from __future__ import annotations

import os
import sys

from celery import Celery

from celery_sidejob import PortFullError, RunningJob, SideJob

SERVER = os.environ.get("DATABASE_URL", "postgresql:///ports").partition("://")[2]

app = Celery("ports", broker="sidejobpg://")
app.conf.sidejob_database_url = f"postgresql://{SERVER}"
sidejob = SideJob(app)


@sidejob.task(inports={"numbers": {"limit": 10}}, outports=["squares"])
def square(job: RunningJob) -> None:
    """Square what comes; at most ten numbers wait."""
    for number in job.for_inputs("numbers"):
        job.output("squares").write(number * number)


@sidejob.task
def count(job: RunningJob, reader: int, last: int) -> None:
    """Write numbers to another job, faster than it reads."""
    numbers = sidejob.get(reader).input("numbers")
    for number in range(job.get("done", 0) + 1, last + 1):
        numbers.write(number)
        job.set(done=number)
        job.checkpoint()


@sidejob.task(inports=["squares"])
def archive(job: RunningJob) -> None:
    """Keep squares."""


def main(last: int) -> None:
    """Have numbers counted and squared, and connect the squares to an archive."""
    reader, shelf = square.enqueue(), archive.enqueue()
    print(count.enqueue((reader.id, last)).wait(timeout=60).status)
    print(reader.wait(timeout=60).status)
    moved = reader.output("squares").connect_to(shelf.input("squares"))
    print(moved == [number * number for number in range(1, last + 1)], len(shelf.input("squares")))
    try:
        reader.input("numbers").write_many(range(11))
    except PortFullError as error:
        print(error.port, error.limit)


if __name__ == "__main__":
    main(int(sys.argv[1]))
