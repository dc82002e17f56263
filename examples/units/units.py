"""What one commit of a run covers: a task for each way to say it. docs/units.md explains them.

createdb units                                   # or name yours in DATABASE_URL
celery -A units sidejob db upgrade
celery -A units worker --loglevel info

python units.py each_turn 1 2 3                  # in another shell; prints the squares
"""

from __future__ import annotations

import os
import sys

from celery import Celery
from celery.utils.log import get_task_logger
from sqlalchemy import create_engine, text

from celery_sidejob import RunningJob, SideJob

SERVER = os.environ.get("DATABASE_URL", "postgresql:///units").partition("://")[2]

app = Celery("units", broker="sidejobpg://")
app.conf.sidejob_database_url = f"postgresql://{SERVER}"
sidejob = SideJob(app)
engine = create_engine(f"postgresql+psycopg://{SERVER}")
logger = get_task_logger(__name__)


def square(number: int) -> int:
    """Square a number, and log it: the log shows which turns a run repeats."""
    logger.info("squaring %s", number)
    if number < 0:
        raise ValueError(f"{number} is negative")
    return number * number


@sidejob.task(inports=["numbers"], outports=["squares"])
def each_turn(job: RunningJob) -> None:
    """Commit each turn."""
    for number in job.for_inputs("numbers"):
        job.output("squares").write(square(number))


@sidejob.task(inports=["numbers"], outports=["squares"])
def three_turns(job: RunningJob) -> None:
    """Commit three turns together."""
    for number in job.for_inputs("numbers", commit_every=3):
        job.output("squares").write(square(number))


@sidejob.task(inports=["numbers"], outports=["squares"])
def each_second(job: RunningJob) -> None:
    """Commit the turns of a second together."""
    for number in job.for_inputs("numbers", commit_within=1.0):
        job.output("squares").write(square(number))


@sidejob.task(inports=["numbers"], outports=["squares"])
def with_a_row(job: RunningJob) -> None:
    """Commit each turn together with a row of our own."""
    for number in job.for_inputs("numbers"):
        with engine.connect() as connection:
            with job.unit(transaction=connection):
                connection.execute(text("INSERT INTO squares VALUES (:n, :s)"), {"n": number, "s": square(number)})
                job.output("squares").write(number)
            connection.commit()


@sidejob.task(outports=["squares"])
def in_steps(job: RunningJob, last: int) -> None:
    """Commit without an input port, after each step that the job remembers as done."""
    for number in range(job.get("done", 0) + 1, last + 1):
        job.output("squares").write(square(number))
        job.set(done=number)
        job.checkpoint()


def main(task: str, *numbers: str) -> None:
    """Run a job of this task on these numbers, and print its squares."""
    given = [int(number) for number in numbers]
    if task == "in_steps":
        job = in_steps.enqueue((max(given),))
    else:
        with engine.begin() as connection:  # so that no run begins before all numbers are there, and another follows it
            job = app.tasks[f"units.{task}"].enqueue(transaction=connection)
            job.input("numbers").write_many(given, transaction=connection)
    print(job.wait(timeout=60).status, list(job.output("squares")))


if __name__ == "__main__":
    main(*sys.argv[1:])
