"""Four jobs wired by channels: the first adds up three numbers, two others read its sum, and the last adds up theirs.

createdb channels                                # or name yours in DATABASE_URL
celery -A channels sidejob db upgrade
celery -A channels worker --loglevel info

python channels.py 1 2 4                         # in another shell; prints 14
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from celery import Celery

from celery_sidejob import RunningJob, SideJob

SERVER = os.environ.get("DATABASE_URL", "postgresql:///channels").partition("://")[2]

app = Celery("channels", broker="sidejobpg://")
app.conf.sidejob_database_url = f"postgresql://{SERVER}"
sidejob = SideJob(app)


@sidejob.task(inports=["numbers"], outports=["sum"])
def add_up(job: RunningJob, count: int) -> None:
    """Write the sum of so many numbers, as soon as they are there."""
    if job.get("done"):
        return  # it was asked for this run by a number that the last one has read
    numbers = job.input("numbers")
    if len(numbers) < count:
        job.suspend()
    job.output("sum").write(sum(numbers.read_many(count)))
    job.set(done=True)


def main(numbers: Sequence[int]) -> None:
    """Wire the jobs, write the numbers to the first, and print what the last has written."""
    name = f"/sums/{os.getpid()}"
    first = add_up.enqueue((len(numbers),), outports={"sum": {"channels": [f"{name}/first"]}})
    for _ in range(2):
        add_up.enqueue(
            (1,),
            inports={"numbers": {"channels": [f"{name}/first"]}},
            outports={"sum": {"channels": [f"{name}/both"]}},
        )
    last = add_up.enqueue((2,), inports={"numbers": {"channels": [f"{name}/both"]}})
    first.input("numbers").write_many(numbers)
    last.wait(timeout=60)
    print(last.output("sum").read())


if __name__ == "__main__":
    main([int(number) for number in sys.argv[1:]])
