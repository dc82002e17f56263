"""The part of a sidejob task that its runs call: the body, the startup and the shutdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...jobs.job import Job
from ...jobs.running import RunningJob
from .. import bodies
from ..on_commit import OnCommit


class TaskBody(OnCommit):
    """The part of a sidejob task that its runs use; `SideJobTask` adds the part for its callers."""

    abstract = True

    def startup(self, job: RunningJob) -> None:
        """Called before the first run, and committed with it."""

    def shutdown(self, job: RunningJob) -> None:
        """Called when the job is terminated; an error is logged, and the job is terminated all the same."""

    def run_body(self, job: Job, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the body through the project's own ``__call__``, if its task class has one."""
        call = bodies.call_of(self, TaskBody)
        value = self.run(job, *args, **kwargs) if call is None else call(self, job, *args, **kwargs)
        return bodies.result_of(value, f"The body of {self.name}, or one of its hooks,")

    def run_hook(self, which: str, job: RunningJob) -> None:
        """Run the startup or the shutdown like the body: through the project's own ``__call__``.

        ``__call__`` calls `run` of its task, so it gets a copy of this task whose `run` is the hook, with the body's
        own arguments: it may need them to prepare the run. The task itself may be running in other threads.
        """
        hook = getattr(self, "_hooks", {}).get(which) or getattr(self, which)  # decorated functions come first
        if hook == getattr(TaskBody, which).__get__(self):
            return  # this task has no such hook
        stand_in = object.__new__(type(self))
        stand_in.__dict__.update(self.__dict__, run=lambda job, *args, **kwargs: hook(job))
        stand_in.run_body(job, job.args, job.kwargs)
