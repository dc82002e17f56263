"""The task class of sidejob tasks."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from celery import Celery

from ...awaiting import ask
from ...jobs.capacity import CapacityPool
from ...jobs.job import Job, enqueue, find_by_task_id
from ...jobs.running import RetryRun
from ...model.capacity import Admission
from ...model.checks import check_function
from ...model.errors import IllegalMoveError
from ...model.port import PortOptions, parse_ports
from ...model.queue import parse_rate
from ...model.retention import Retention
from ...operations.runtime import Runtime
from ...unit.open_unit import active
from .. import bodies
from ..apps import runtime_for
from ..messages.doorbell import HEADER
from ..task_options import OWN_OPTIONS, check_options, given
from ..tasks import chord_transaction
from .eager import apply_eagerly
from .run import adopt_delivery, run_delivery
from .task_body import TaskBody


class SideJobTask(TaskBody):
    """A marker base: the final class is (marker, the app's own Task), so that the project's task class stays a base.

    Subclass it to write a task as a class: ``name``, ``inports``, ``outports``, ``startup``, ``run``, ``shutdown``.
    """

    abstract = True
    sidejob = True
    Request = "celery_sidejob.hooks.jobs.job_request:JobRequest"
    acks_late = False  # the store holds the job from the claim on, whatever the app's default is
    track_started = False

    inports: Any = ()
    outports: Any = ()
    max_losses: int | None = None
    on_lost = "requeue"
    retention: float | timedelta | Mapping[str, Any] | None = None
    run_rate: str | float | None = None
    on_run_rate = "delay"
    lease_renewal = "auto"
    lease: float | None = None
    publish_status = True
    capacity: CapacityPool | None = None

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Refuse wrong options of a class-based task, however it is registered."""
        super().on_bound(app)
        options = {name: getattr(cls, name) for name in OWN_OPTIONS if getattr(cls, name, None) is not None}
        check_options({**given(cls, app.Task), **options})
        check_function(cls.run, f"run() of {cls.name}", may_await=True)
        for hook in ("startup", "shutdown"):
            bodies.check_hook(getattr(object.__new__(cls), hook), f"{hook}() of {cls.name}")

    @property
    def parsed_inports(self) -> Mapping[str, PortOptions]:
        """The input ports that every job of this task has."""
        return parse_ports(self.inports, where=f"inports of {self.name}")

    @property
    def parsed_outports(self) -> Mapping[str, PortOptions]:
        """The output ports that every job of this task has."""
        return parse_ports(self.outports, where=f"outports of {self.name}")

    @property
    def job_columns(self) -> Mapping[str, Any]:
        """The columns of its jobs that follow from its options; ``on_lost="dead"`` allows no run to be repeated."""
        retention = Retention() if self.retention is None else Retention.of(self.retention)
        columns: dict[str, Any] = {
            "max_losses": 1 if self.on_lost == "dead" else self.max_losses,
            "retention_s": retention.age_s,
            "retention_keep": retention.keep,
        }
        if self.capacity is not None:
            columns |= Admission.of(self.capacity.spec).columns
        rate = parse_rate(self.run_rate)
        if rate is None:
            return columns
        return {
            **columns,
            "rate_interval_s": rate.interval_s,
            "rate_burst": rate.burst,
            "rate_terminates": self.on_run_rate == "terminate",
        }

    # -- asking --------------------------------------------------------------------------------------------------

    def enqueue(self, args: Any = (), kwargs: Mapping[str, Any] | None = None, *positional: Any, **options: Any) -> Job:
        """Make a job of this task; the parameters are those of `sidejob.enqueue`."""
        if positional or not isinstance(args, list | tuple) or not isinstance(kwargs, Mapping | None):
            loose = (args, *((kwargs,) if kwargs is not None else ()), *positional)
            given = ", ".join(map(repr, loose))
            raise TypeError(
                f"{self.name}.enqueue({given}): the task's arguments go into one tuple: enqueue({loose!r}); "
                f"or call delay({given})."
            )
        return enqueue(self._runtime, self, args, kwargs, **options)

    async def aenqueue(self, args: Any = (), kwargs: Mapping[str, Any] | None = None, **options: Any) -> Job:
        """Make a job as `enqueue` does, while the event loop goes on; `transaction=` may be asynchronous."""
        return await ask(self.enqueue, args, kwargs, **options)

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Make a job of this task and return a Celery result of its first asking, with the job as ``.job``."""
        if chord_transaction.is_lending():
            with chord_transaction.handed_over(options):
                return self.apply_async(args, kwargs, **options)
        if self._get_app().conf.task_always_eager and active() is None:  # in a run the call belongs to the unit
            return self.apply(args, kwargs, **options)
        options = {**self._get_exec_options(), **options}
        options.pop("task_type", None)
        task_id = options.get("task_id")
        job = None if task_id is None else find_by_task_id(self._runtime, task_id)
        if job is None:  # otherwise an earlier attempt to publish this continuation has made the job
            job = enqueue(self._runtime, self, args or (), kwargs, **options)
        given = None if options.get("unique") else task_id  # an open job with this key has another task id
        result = self.AsyncResult(given or job._first_task_id or job.task_id)
        result.job = job
        return result

    def apply(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Make a job of this task and run it here, with its children and wakes, until all is quiet."""
        return apply_eagerly(self, self._runtime, args or (), kwargs, options)

    # -- running -------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """In a worker, run the job that the delivery names; in a direct call, run the body with the given job."""
        if args and isinstance(args[0], Job):
            return self.run_body(args[0], args[1:], kwargs)
        request = self.request
        if request.called_directly:
            raise TypeError(
                f"{self.name}(...) runs the body, and the body's first argument is a job: call it with one, or make a "
                f"job with {self.name.rpartition('.')[2]}.delay(...)."
            )
        if request.get(HEADER):
            return run_delivery(self, self._runtime, request)
        return adopt_delivery(self, self._runtime, request, args, kwargs)

    def retry(  # noqa: PLR0913 - Celery's own signature
        self,
        args: Any = None,
        kwargs: Any = None,
        exc: BaseException | None = None,
        throw: bool = True,
        eta: Any = None,
        countdown: float | None = None,
        max_retries: int | None = None,
        **options: Any,
    ) -> Any:
        """Discard this run and try it again later; Celery's `retry`, as a backoff of the job's message in the store."""
        if args is not None or kwargs is not None:
            raise IllegalMoveError(
                f"{self.name}.retry() cannot change a job's arguments; keep what changes in its state."
            )
        if eta is not None:
            aware = self._runtime.tasks.localize(eta)
            countdown = max(0.0, (aware - datetime.now(UTC)).total_seconds())
        again = RetryRun(exc, countdown, max_retries)
        if throw:
            raise again
        return again

    @property
    def _runtime(self) -> Runtime:
        app: Any = self._get_app()
        runtime: Runtime = (
            app.sidejob.runtime if hasattr(app, "sidejob") else runtime_for(app, f"{self.name} is a sidejob task")
        )
        return runtime
