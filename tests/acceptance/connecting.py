"""A client that connects a port to two others, and may be killed meanwhile.

python -m tests.acceptance.connecting JOB
"""

from __future__ import annotations

import sys

from celery import Celery

from celery_sidejob import SideJob
from tests.tools.brokers import Broker


def main(job_id: int) -> None:
    """Move what is on the input port of a job to its outputs."""
    app = Celery("acceptance")
    app.conf.update(Broker.from_env().configuration)
    job = SideJob(app).get(job_id)
    job.input("in").connect_to(job.output("x"), job.output("y"))


if __name__ == "__main__":
    main(int(sys.argv[1]))
