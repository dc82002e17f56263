"""Situation 4: a pipeline of stages."""

from __future__ import annotations

import sys
from pathlib import Path

from situations import sidejob

from celery_sidejob import RunningJob


@sidejob.task(name="pipeline.read", inports=["paths"], outports={"texts": {"channels": ["/texts"]}})
def read(job: RunningJob) -> None:
    """Read files. Each turn of the loop is one commit: the path is taken exactly when its text is passed on."""
    for path in job.for_inputs("paths"):
        job.output("texts").write(Path(path).read_text())


@sidejob.task(
    name="pipeline.count",
    inports={"texts": {"channels": ["/texts"]}}, outports={"counts": {"channels": ["/counts"]}},
)  # fmt: skip
def count(job: RunningJob) -> None:
    """Count the words of each text."""
    for text in job.for_inputs("texts"):
        job.output("counts").write(len(text.split()))


@sidejob.task(name="pipeline.add", inports={"counts": {"channels": ["/counts"]}})
def add(job: RunningJob) -> None:
    """Add up the counts."""
    for words in job.for_inputs("counts"):
        job.set(words=job.get("words", 0) + words, files=job.get("files", 0) + 1)


if __name__ == "__main__":
    if sidejob.find("add") is None:
        sidejob.enqueue_many([{"task": stage, "aliases": [stage.__name__]} for stage in (add, count, read)])
    sidejob.get("read").input("paths").write_many(sys.argv[1:])
