"""Thumbnails of an album, and one page when all are there. docs/batches.md explains it.

createdb thumbnails                              # or name yours in DATABASE_URL
celery -A thumbnails sidejob db upgrade
celery -A thumbnails worker --loglevel info --concurrency 4

python thumbnails.py                             # in another shell; prints what happened
"""

from __future__ import annotations

import os

from celery import Celery

from celery_sidejob import RunningJob, SideJob

SERVER = os.environ.get("DATABASE_URL", "postgresql:///thumbnails").partition("://")[2]

app = Celery("thumbnails", broker="sidejobpg://", backend=f"db+postgresql+psycopg://{SERVER}")
app.conf.sidejob_database_url = f"postgresql://{SERVER}"
sidejob = SideJob(app)


@sidejob.task
def shrink(job: RunningJob, picture: str) -> None:
    """Make a thumbnail; there is none of a picture that is no picture."""
    if picture == "broken.txt":
        raise ValueError(f"{picture} is no picture")


@app.task(durable=True, on_lost="requeue")  # type: ignore[untyped-decorator]
def count(album: str) -> int:
    """Count the pictures."""
    return 1


@sidejob.task
def publish(job: RunningJob, album: str) -> str:
    """Publish the album."""
    return f"{album} is published"


@sidejob.task
def tell(job: RunningJob, album: str) -> str:
    """Tell the owner that something is wrong."""
    return f"{album} has failed"


def main() -> None:
    """Publish an album, and find another one broken."""
    for album, pictures in {"summer": ["a.jpg", "b.jpg", "c.jpg"], "winter": ["a.jpg", "broken.txt"]}.items():
        with sidejob.batch(album, on_success=publish.s(album), on_failure=tell.s(album)) as batch:
            for picture in pictures:
                shrink.enqueue((picture,))
            count.delay(album)
        batch.wait(timeout=60)
        counts = batch.counts
        print(album, counts.completed, "of", counts.total, "are done,", counts.failed, "failed")
    for task in (publish, tell):
        for job in sidejob.jobs(task=task.name):
            print(job.result.get(timeout=60))


if __name__ == "__main__":
    main()
