"""What a project's tasks module looks like: decorated with no app in sight. Importing it must touch nothing."""

from __future__ import annotations

from typing import Any

from celery_sidejob import RunningJob, SideJobTask, current_job, sidejob_task

seen: list[tuple[Any, ...]] = []


@sidejob_task
def bare(job: RunningJob, value: int = 0) -> int:
    """Its own words."""
    return value


@sidejob_task(name="decorated.add", inports=["a", "b"], outports={"sum": {"channels": ["/sums"]}}, queue="math")
def add(job: RunningJob, scale: int = 1) -> int:
    seen.append(("run", job.id, scale, current_job.id))
    return scale


@add.on_startup
def begin(job: RunningJob) -> None:
    seen.append(("startup", job.id))


@add.on_shutdown
def end(job: RunningJob) -> None:
    seen.append(("shutdown", job.id))


@sidejob_task(bind=True, name="decorated.bound")
def bound(self: Any, job: RunningJob, value: int) -> list[Any]:
    return [self.name, self.request.id == job.request.id, job.args, value]


@sidejob_task(inports=["a"], outports=["b"])
class Classy(SideJobTask):
    name = "decorated.classy"

    def startup(self, job: RunningJob) -> None:
        seen.append(("startup", job.id))

    def run(self, job: RunningJob, value: int, *, more: int = 0) -> int:
        return value + more

    def shutdown(self, job: RunningJob) -> None:
        seen.append(("shutdown", job.id))
