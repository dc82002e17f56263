"""A report that is built when the figures of three regions are there, then printed and sent by the same job.

docs/dependencies.md explains it.

createdb report                                  # or name yours in DATABASE_URL
celery -A report sidejob db upgrade
celery -A report worker --loglevel info --concurrency 4 --queues fetch,build,post

python report.py                                 # in another shell; prints what happened
"""

from __future__ import annotations

import os

from celery import Celery

from celery_sidejob import HasDependentsError, RunningJob, SideJob

SERVER = os.environ.get("DATABASE_URL", "postgresql:///report").partition("://")[2]

app = Celery("report", broker="sidejobpg://", backend=f"db+postgresql+psycopg://{SERVER}")
app.conf.sidejob_database_url = f"postgresql://{SERVER}"
sidejob = SideJob(app)


@sidejob.task(queue="fetch")
def fetch(job: RunningJob, region: str) -> None:
    """Fetch the figures of a region."""
    job.set(figures=len(region))


@sidejob.task(queue="build")
def build(job: RunningJob, sources: list[int]) -> None:
    """Add the figures up, and go on in the queue of those who send."""
    job.set(total=sum(sidejob.get(source).get("figures") for source in sources))
    job.then(send, ("the board",))


@sidejob.task(queue="post")
def send(job: RunningJob, to: str) -> str:
    """Send what the stage before has left on the job."""
    return f"{job.get('total')} to {to}"


def main() -> None:
    """Have a report built and sent, and call another one off."""
    sources = [fetch.enqueue((region,), countdown=0.5) for region in ("north", "south", "west")]
    report = build.enqueue(([source.id for source in sources],), depends_on=sources, on_failure="fail")
    print("the report waits for", *report.waiting_for)
    print("sent:", report.result.get(timeout=60), "by", report.refresh().task)

    held = fetch.enqueue(("east",), countdown=3600)
    second = build.enqueue(([held.id],), depends_on=[held])
    try:
        sidejob.cancel(held)
    except HasDependentsError as error:
        print("not called off, because", len(error.dependents[held.id]), "other waits for it")
    called_off = sidejob.cancel(held, with_dependents=True)
    print("called off:", [job.id for job in called_off] == [held.id, second.id])


if __name__ == "__main__":
    main()
