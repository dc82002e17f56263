"""The task class of sidejob tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from celery import Celery
from celery.exceptions import MaxRetriesExceededError

from ...jobs.job import Job, enqueue
from ...jobs.running import RetryRun, RunningJob
from ...model.checks import in_seconds
from ...model.errors import IllegalMoveError, SettingsError
from ...model.port import PortOptions, parse_ports
from ...operations.runtime import Runtime
from ...unit.open_unit import active
from .. import bodies
from ..messages.doorbell import HEADER
from ..on_commit import OnCommit
from ..task_options import OWN_OPTIONS, check_options, given
from ..tasks import chord_transaction
from ..worker.received import checked
from .calls import check_arguments
from .eager import apply_eagerly
from .run import adopt_delivery, run_delivery


class SideJobTask(OnCommit):
    """A marker base: the class that is built from it is (marker, the app's own Task), so the project's stays in place.

    Subclass it for a task that is a class: ``name``, ``inports``, ``outports``, ``startup``, ``run``, ``shutdown``.
    """

    abstract = True
    sidejob = True
    Request = "celery_sidejob.hooks.jobs.job_request:JobRequest"
    acks_late = False  # the store holds the job from the claim on, whatever the app's default says
    track_started = False

    inports: Any = ()
    outports: Any = ()
    max_losses: int | None = None
    on_lost = "requeue"
    retention: float | timedelta | None = None
    lease_renewal = "auto"
    lease: float | None = None

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Refuse wrong options of a task that is a class, however it is registered."""
        super().on_bound(app)
        options = {name: getattr(cls, name) for name in OWN_OPTIONS if getattr(cls, name, None) is not None}
        check_options({**given(cls, app.Task), **options})
        for method in ("run", "startup", "shutdown"):
            bodies.check(getattr(cls, method), f"{method}() of {cls.name}")

    @property
    def parsed_inports(self) -> Mapping[str, PortOptions]:
        """The input ports every job of this task has."""
        return parse_ports(self.inports, where=f"inports of {self.name}")

    @property
    def parsed_outports(self) -> Mapping[str, PortOptions]:
        """The output ports every job of this task has."""
        return parse_ports(self.outports, where=f"outports of {self.name}")

    @property
    def job_columns(self) -> Mapping[str, Any]:
        """What its options say in columns of its jobs; ``on_lost="dead"`` allows no run to be repeated."""
        return {
            "max_losses": 1 if self.on_lost == "dead" else self.max_losses,
            "retention_s": in_seconds(self.retention),
        }

    def start_strategy(self, app: Celery, consumer: Any, **options: Any) -> Any:
        """Return what takes the task's messages in a worker's parent process."""
        return checked(super().start_strategy(app, consumer, **options))

    # -- what a class-based task overrides -----------------------------------------------------------------------

    def startup(self, job: RunningJob) -> None:
        """Is called before the first run, and committed with it."""

    def shutdown(self, job: RunningJob) -> None:
        """Is called when the job is terminated; what it raises is logged, and the job is terminated all the same."""

    def _hook(self, which: str) -> Callable[[RunningJob], None]:
        """Return the startup or the shutdown: the decorated function, or the class's method."""
        noted = getattr(self, "_hooks", {}).get(which)
        found: Callable[[RunningJob], None] = noted.__func__ if noted is not None else getattr(self, which)
        return found

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

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Make a job of this task and return a Celery result of its first asking, with the job as ``.job``."""
        if chord_transaction.is_lending():
            with chord_transaction.handed_over(options):
                return self.apply_async(args, kwargs, **options)
        if self._get_app().conf.task_always_eager and active() is None:  # in a run it belongs to the unit
            return apply_eagerly(self, args or (), kwargs, options)
        options = {**self._get_exec_options(), **options}
        options.pop("task_type", None)
        transaction = options.pop("transaction", None)
        repeated = self._repeated(options.get("task_id"))
        job = repeated or enqueue(self._runtime, self, args or (), kwargs, transaction=transaction, **options)
        result = self.AsyncResult(options.get("task_id") or job.task_id)
        result.job = job
        return result

    def apply(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Make a job of this task and run it here, with its children and wakes, until all is quiet."""
        return apply_eagerly(self, args or (), kwargs, options)

    def delay(self, *args: Any, **kwargs: Any) -> Any:
        """Make a job with these arguments; the short form of `apply_async`."""
        return self.apply_async(args, kwargs)

    def check_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise TypeError for arguments the body does not take; the running job is not among them."""
        if self.typing:
            check_arguments(self.run, self.name, args, kwargs)

    def _repeated(self, task_id: str | None) -> Job | None:
        """Return the job that an earlier attempt to publish this very continuation made."""
        if task_id is None:
            return None
        found: Job | None = self._get_app().sidejob.for_task_id(task_id)
        return found

    # -- running -------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """In a worker run the job that the delivery names; called by hand run the body with the job that is given."""
        if args and isinstance(args[0], Job):
            return self.run_body(args[0], args[1:], kwargs)
        request = self.request
        if request.called_directly:
            raise TypeError(
                f"{self.name}(...) runs the body, and the body's first argument is a job: call it with one, or make a "
                f"job with {self.name.rpartition('.')[2]}.delay(...)."
            )
        if request.get(HEADER):
            return run_delivery(self, request)
        return adopt_delivery(self, request, args, kwargs)

    def run_body(self, job: Job, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the body through the project's own ``__call__``, if its task class has one."""
        call = bodies.call_of(self, SideJobTask)
        value = self.run(job, *args, **kwargs) if call is None else call(self, job, *args, **kwargs)
        return bodies.done(value, f"The body of {self.name}, or one of its hooks,")

    def run_hook(self, which: str, job: RunningJob) -> None:
        """Run the startup or the shutdown in the surroundings of the body: through the same ``__call__``.

        That calls `run` of the task it is given, so it is given a copy of this one whose `run` is the hook, with the
        body's own arguments, of which it may make its surroundings. The task itself may be running in other threads.
        """
        hook = self._hook(which)
        if hook == getattr(SideJobTask, which).__get__(self):
            return  # it has none
        stand_in = object.__new__(type(self))
        stand_in.__dict__.update(self.__dict__, run=lambda job, *args, **kwargs: hook(job))
        stand_in.run_body(job, job.args, job.kwargs)

    def retry(  # noqa: PLR0913 - Celery's own signature
        self, args: Any = None, kwargs: Any = None, exc: BaseException | None = None, throw: bool = True,
        eta: Any = None, countdown: float | None = None, max_retries: int | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        """Discard this run and try it again later; Celery's `retry`, as a backoff of the job's message in the store."""
        if args is not None or kwargs is not None:
            raise IllegalMoveError(
                f"{self.name}.retry() cannot change a job's arguments; keep what changes in its state."
            )
        if eta is not None:
            aware = self._get_app().sidejob.runtime.tasks.localize(eta)
            countdown = max(0.0, (aware - datetime.now(UTC)).total_seconds())
        again = RetryRun(exc, countdown, max_retries)
        if throw:
            raise again
        return again

    def retries_left(self, retries: int, max_retries: int | None) -> bool:
        """Tell whether a run that was retried so often may be retried once more."""
        most = max_retries if max_retries is not None else getattr(self, "override_max_retries", None)
        most = most if most is not None else self.max_retries
        return most is None or retries < most

    def out_of_retries(self, exc: BaseException | None) -> BaseException:
        """Return what the job fails with when its retries are used up."""
        return exc or MaxRetriesExceededError(f"Can't retry {self.name} any more.", task_args=(), task_kwargs={})

    @property
    def _runtime(self) -> Runtime:
        app = self._get_app()
        sidejob = getattr(app, "sidejob", None)
        if sidejob is None:
            raise SettingsError(f"{self.name} is a sidejob task, but its app has no SideJob: call SideJob(app).")
        return cast(Runtime, sidejob.runtime)
