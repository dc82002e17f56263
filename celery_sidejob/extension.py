"""`SideJob`: the one object that connects an app with this package.

What it installs into the app, and the runtime that it makes for the app, are put together here alone.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, Unpack, overload

from celery import Celery, signals
from celery.canvas import Signature

from .announcements.announcer import Announcer
from .announcements.subscription import Subscription
from .awaiting import AioOf
from .deadset import DeadSet
from .hooks import announcing, apps, beat, configuration, control, logs
from .hooks.broker.connection import BrokerConnection
from .hooks.broker.publishing import CeleryPublisher
from .hooks.broker.view import CeleryBroker
from .hooks.call_options import pools_of
from .hooks.jobs.calls import CeleryTasks
from .hooks.jobs.eager import run_here
from .hooks.jobs.results import CeleryResults
from .hooks.jobs.sidejob_task import P, R, SharedSideJobTask, task_of
from .hooks.patches import app_methods
from .hooks.steps import DisconnectionStep, SideJobStep
from .hooks.tasks import calls, composing, durable_request, durable_run, durable_task
from .hooks.tasks.calls import send_many
from .hooks.tasks.present import calling
from .hooks.worker import pool_process, recording
from .inspection.jobs import JobViews
from .inspection.statistics import StatisticsViews
from .jobs import batch as batch_of
from .jobs import job as jobs_of
from .jobs import schedule as schedule_of
from .jobs import steps
from .jobs.batch import Batch
from .jobs.capacity import declare
from .jobs.filters import JobFilters, check_filters, filters_of
from .jobs.job import Job
from .jobs.log_entries import context, current_context, log_entry
from .jobs.port import port_options
from .jobs.queue import Queue
from .jobs.running import RunningJob
from .jobs.schedule import Schedule
from .jobs.steps import Tries
from .jobs.workers import WorkerInfo, present, register
from .model import values
from .model.changes import Publish
from .model.checks import MOST_S, check_number, check_texts, is_seconds, shown
from .model.errors import InvalidChannelError, InvalidValueError, SettingsError, StoreUnavailableError
from .model.logger import logger
from .model.names import check_channel, check_channels
from .model.settings import Settings
from .model.statistics import Statistics, day_of
from .model.status import MAY_WAIT
from .model.steps import check_name
from .operations.audience import Audience, Tracking
from .operations.runtime import Runtime
from .operations.stores import Store, stores_of
from .operations.waiting import check_reason
from .pools import coroutines
from .results.waiting import add_awaited_calls
from .services.heartbeat.heartbeat import Heartbeat
from .services.sweep.sweeper import PollReport, Sweeper
from .store import batches as batch_rows
from .store import job_lists, jobs, publications, queues
from .store import schedules as schedule_rows
from .store.connection import turns
from .store.measured import MeasuredConnections
from .store.schema import schema_check
from .unit.open_unit import submit

if TYPE_CHECKING:
    from .aio import AioSideJob


PAGE = 500
"""How many jobs are asked together why they wait."""

Q = ParamSpec("Q")
S = TypeVar("S")

_numbers = itertools.count(1)
"""Numbers the `SideJob`s of this process: apps are sorted by number, the oldest first."""


class SideJob:
    """Durable jobs and durable tasks for one Celery app.

    ``SideJob(app)``, or ``SideJob()`` and later ``init_app(app)``. Making it creates no app, reads no configuration
    and connects to nothing; settings are read, checked and frozen at their first use.
    """

    port_options = staticmethod(port_options)
    """``with sidejob.port_options(log=None, notify=None, set_default=None):`` options of each read and write inside."""
    context = staticmethod(context)
    """``with sidejob.context(**data):`` every packet written inside, and every entry of the log, carries `data`."""

    aio: AioOf[AioSideJob] = AioOf("AioSideJob")
    """The verbs as coroutines."""

    def __init__(self, app: Celery | None = None) -> None:
        self._app: Celery | None = None
        self._number = next(_numbers)
        self._lock = threading.Lock()
        self._runtime: Runtime | None = None
        self._globs: tuple[str, ...] | None = None
        self.heartbeats: Sequence[Heartbeat] = ()
        """The heartbeats of a worker, in its parent process: one for each store, the primary's first."""
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Celery) -> None:
        """Install everything into the app: worker services, the beat entry, commands. A second call has no effect."""
        if not isinstance(app, Celery):
            raise SettingsError(f"SideJob() and init_app() take the Celery app itself, not a {type(app).__name__}.")
        if self._app is not None and self._app is not app:
            raise SettingsError("This SideJob belongs to another app already: make one for each app.")
        first = getattr(app, "sidejob", None)
        if first is not None:
            self.__dict__ = first.__dict__  # the second SideJob of an app shares the state of the first
            return
        self._app = app
        app.sidejob = self
        app.fixups = {*app.fixups, f"{__name__}:{extend_copy.__name__}"}
        install(self, app)

    @property
    def heartbeat(self) -> Heartbeat | None:
        """The worker's heartbeat in the primary, in the parent process of a worker."""
        return self.heartbeats[0] if self.heartbeats else None

    @property
    def app(self) -> Celery:
        """The Celery app."""
        if self._app is None:
            raise SettingsError("This SideJob has no app yet: call init_app(app).")
        return self._app

    @property
    def settings(self) -> Settings:
        """The settings, read at first use, then frozen."""
        return self.runtime.settings

    @property
    def durable_globs(self) -> tuple[str, ...]:
        """The setting `durable_tasks`, read when the app is finalized, which is too early to freeze all settings."""
        if self._globs is None:
            self._globs = configuration.settings_of(self.app).durable_tasks
        return self._globs

    @property
    def runtime(self) -> Runtime:
        """The stores, the broker and the result backend, for the package's own layers; made at first use."""
        if self._runtime is None:
            with self._lock:
                if self._runtime is None:
                    self._runtime = runtime_of(self)
        return self._runtime

    # -- tasks ---------------------------------------------------------------------------------------------------

    @overload
    def task(self, function: Callable[Concatenate[RunningJob, P], R], /) -> SharedSideJobTask[P, R]: ...
    @overload
    def task(
        self, /, **options: Any
    ) -> Callable[[Callable[Concatenate[RunningJob, P], R]], SharedSideJobTask[P, R]]: ...
    def task(self, function: Any = None, /, **options: Any) -> Any:
        """Make a sidejob task of this app, as `@app.task` makes a Celery task."""
        return task_of(self.app, function, options)

    @overload
    def step(self, function: Callable[Q, S], /) -> Callable[Q, S]: ...
    @overload
    def step(
        self,
        /,
        *,
        name: str | None = None,
        retries: int = 0,
        backoff: float | timedelta = 1.0,
        retry_on: steps.RetryOn = Exception,
    ) -> Callable[[Callable[Q, S]], Callable[Q, S]]: ...
    def step(
        self,
        function: Any = None,
        /,
        *,
        name: str | None = None,
        retries: int = 0,
        backoff: float | timedelta = 1.0,
        retry_on: steps.RetryOn = Exception,
    ) -> Any:
        """Make a function a step if it is called in the body of a job; elsewhere it is called plainly.

        ``@sidejob.step`` or ``@sidejob.step(retries=5)``. The step has the function's name unless `name` gives another;
        the options are those of `RunningJob.step`.
        """
        tries = Tries.of(retries, backoff, retry_on)

        def made(function: Any) -> Any:
            return steps.of_function(function, name, tries)

        return made if function is None else made(function)

    # -- making jobs ---------------------------------------------------------------------------------------------

    def enqueue(self, /, task: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None, **options: Any) -> Job:
        """Make one job from a task, a task's name or a signature, in one transaction or not at all.

        Options: `queue`, `parent` with `child_name`, `eta`, `countdown`, `created_by`, `inports`, `outports`,
        `aliases`, `state`, `priority` (0 to 9, higher is sooner), `depends_on` (jobs, ids or aliases that must have
        completed first) with `on_failure` (see `Job.depend_on`), `transaction`, and Celery's own (`link`, `task_id`,
        `expires`, …). Raises UnknownTaskError, TypeError for arguments that the task does not take, and other errors
        for invalid values and names. All checks come before anything is written.
        """
        return jobs_of.enqueue(self.runtime, task, args, kwargs, **options)

    def fork(self, /, job: Job | int | str, before: str | None = None, **changed: Any) -> Job:
        """Make a job with the task, arguments, state and finished steps of an uncompleted job.

        With `before`, that step and all later steps are not copied: a corrected body continues from there. `changed`
        are options of `enqueue` that replace the copied values, such as `args`. Raises StepNameError if the job has not
        finished the step `before`, and the errors of `enqueue`.
        """
        return jobs_of.fork(self.runtime, self.get(job), before, changed)

    def enqueue_many(self, items: Iterable[Signature | Mapping[str, Any]], *, transaction: Any = None) -> list[Job]:
        """Make many jobs, all or none, in order: from signatures, or from mappings of `enqueue`'s parameters."""
        if isinstance(items, Mapping):  # a signature is a mapping too
            raise InvalidValueError(
                "enqueue_many() takes several items, not one: put it into a list, or use enqueue()."
            )
        given: list[Mapping[str, Any]] = []
        for index, item in enumerate(items):
            if isinstance(item, Signature):
                given.append({"task": item})
            elif isinstance(item, Mapping) and "task" in item:
                given.append(item)
            else:
                raise InvalidValueError(
                    f"items[{index}] of enqueue_many() is neither a signature nor a mapping with 'task': {shown(item)}."
                )
        return jobs_of.enqueue_many(self.runtime, given, transaction)

    def send_many(self, signatures: Iterable[Signature], *, transaction: Any = None) -> list[Any]:
        """Call many durable tasks, all or none, in order: one commit for all; returns their results.

        A signature is one task, or a chain that begins with a task. Raises InvalidValueError, before anything is
        written, for a value that is no signature, for a group or a chord, for a task that is not durable, and for a
        taken task id.
        """
        return send_many(self.app, signatures, transaction)

    def cancel(self, *jobs: Job | int | str, with_dependents: bool = False) -> list[Job]:
        """Terminate jobs together: all of them in one transaction, or none; returns the terminated jobs.

        Raises HasDependentsError, and changes nothing, if another job depends on one of them. `with_dependents`: all
        jobs that depend on them, directly or through others, are terminated as well. Inside a run the check is made
        now, and the run's commit terminates the jobs.
        """
        return jobs_of.cancel(self.runtime, jobs, with_dependents=with_dependents)

    def batch(self, name: str, *, on_complete: Any = None, on_success: Any = None, on_failure: Any = None) -> Batch:
        """Open a batch, or return the open batch of this name; a `with` block adds the work that is made there.

        When it is closed and all its members have ended, it makes these calls, once: `on_complete`, and `on_success` if
        all members have completed, else `on_failure`. Each is a sidejob task, a durable task, or a signature of one.
        Raises BatchClosedError if the batch of this name is closed and has not ended; an ended batch is replaced.
        """
        calls = {"on_complete": on_complete, "on_success": on_success, "on_failure": on_failure}
        return batch_of.open_batch(self.runtime, name, calls)

    def get_batch(self, name: str) -> Batch:
        """Return the batch of this name; raises BatchNotFoundError."""
        return batch_of.get_batch(self.runtime, name)

    def batches(self) -> list[Batch]:
        """Return all batches, oldest first."""
        return [Batch(row, runtime=self.runtime) for row in batch_rows.read_all(self.runtime.connections)]

    # -- finding jobs --------------------------------------------------------------------------------------------

    def find(self, id_or_alias: int | str | Job) -> Job | None:
        """Return the job with this id or alias; None only if there is none, never because the store is unreachable."""
        return jobs_of.find(self.runtime, id_or_alias)

    def get(self, id_or_alias: int | str | Job) -> Job:
        """Return the job with this id or alias; raises JobNotFoundError."""
        return jobs_of.get(self.runtime, id_or_alias)

    def for_task_id(self, task_id: str) -> Job | None:
        """Return the job that has an asking with this Celery task id."""
        return jobs_of.find_by_task_id(self.runtime, task_id)

    def jobs(  # noqa: PLR0913 - each is a filter
        self,
        status: str | Iterable[str] | None = None,
        task: Any = None,
        queue: str | None = None,
        created_by: str | None = None,
        parent: Any = None,
        limit: int = 100,
        after: int | Job | None = None,
        unique: str | None = None,
        tag: str | None = None,
        older_than: timedelta | float | None = None,
        waiting_for: str | None = None,
        schedule: Any = None,
        since: datetime | timedelta | float | None = None,
        before: int | Job | None = None,
        newest_first: bool = False,
        batch: Any = None,
    ) -> list[Job]:
        """Return up to `limit` jobs that match the filters, by id, after the id `after` and before the id `before`.

        These are the oldest matching jobs, the oldest first; with `newest_first` the newest jobs, the newest first.

        `older_than`: a timedelta or seconds; jobs that were made longer ago. `since`: jobs that were made at this
        datetime or later, or no longer ago than this timedelta or these seconds. Running jobs, up to 10,000 children of
        one job, the jobs of a tag or a batch, the open job that has the key `unique`, up to 1,000 jobs of that age, and
        up to 1,000 jobs made since then, are found by an index. Failed jobs, and the queued jobs of one queue, are read
        one by one until `limit` match; with other filters all jobs are read. Reading a million takes a second. The
        queued jobs of a queue take a second too beside a million timers. `waiting_for`: a reason why jobs do not run
        now, as in `Job.waiting_for`; every job is checked, page by page. `schedule`, `batch`: a handle of one, or its
        name.
        """
        check_number("limit", limit, least=1, of="jobs")
        given = {"status": status, "task": task, "queue": queue, "created_by": created_by, "parent": parent,
                 "unique": unique, "tag": tag, "older_than": older_than, "schedule": schedule, "since": since,
                 "after": after, "before": before, "batch": batch}  # fmt: skip
        if waiting_for is not None:
            return list(itertools.islice(self._waiting(waiting_for, newest_first, given), limit))
        which = filters_of(self.runtime, given)
        rows = job_lists.page(self.runtime.connections, which, limit=limit, newest_first=newest_first)
        return [Job(row.id, runtime=self.runtime, row=row) for row in rows]

    def iter_jobs(self, *, page: int = 500, newest_first: bool = False, **filters: Unpack[JobFilters]) -> Iterator[Job]:
        """Iterate over all jobs that match, a page at a time; the filters are those of `jobs`."""
        check_filters(filters, call="iter_jobs()")
        return itertools.chain.from_iterable(self._pages(page, newest_first, filters))

    def _pages(self, size: int, newest_first: bool, filters: Mapping[str, Any]) -> Iterator[list[Job]]:
        """Yield the jobs that match, a page at a time."""
        end = "before" if newest_first else "after"
        while found := self.jobs(**filters, limit=size, newest_first=newest_first):
            yield found
            filters = {**filters, end: found[-1]}

    def _waiting(self, reason: str, newest_first: bool, filters: Mapping[str, Any]) -> Iterator[Job]:
        """Iterate over the jobs that wait for this reason; the default statuses are those in which jobs may wait."""
        check_reason(reason)
        views = JobViews(self.runtime)
        for found in self._pages(PAGE, newest_first, {**filters, "status": filters["status"] or MAY_WAIT}):
            reasons = views.waiting_for(found)
            yield from (job for job in found if reason in reasons.get(job.id, ()))

    def count_jobs(self, by: str = "status", **filters: Unpack[JobFilters]) -> dict[str, int]:
        """Count jobs by ``status``, ``task``, ``queue`` or ``created_by``; the filters are those of `jobs`.

        Reads all matching jobs, a million in a second.
        """
        if not isinstance(by, str) or by not in job_lists.COUNTED_BY:
            raise InvalidValueError(f"Jobs are counted by {', '.join(job_lists.COUNTED_BY)}; not by {shown(by)}.")
        check_filters(filters, call="count_jobs()")
        if filters.get("waiting_for") is not None:
            return dict(Counter(getattr(job, by) for job in self.iter_jobs(**filters)))
        if all(value is None for value in filters.values()):
            return job_lists.count(self.runtime.connections, by)
        return job_lists.count_matching(self.runtime.connections, filters_of(self.runtime, filters), by)

    def tags(self, limit: int = 25) -> list[tuple[str, int]]:
        """Return the most common tags, each with its number of jobs, the most common first.

        Each call counts: up to a million rows, those of the newest jobs, in about a second.
        """
        check_number("limit", limit, least=1, of="tags")
        return jobs.tag_counts(self.runtime.connections, limit)

    def tracked(self, limit: int = 100) -> list[Job]:
        """Return the last `limit` tracked jobs, in the order in which they were tracked."""
        check_number("limit", limit, least=1, of="jobs")
        return [Job(row.id, runtime=self.runtime, row=row) for row in jobs.tracked(self.runtime.connections, limit)]

    def workers(self) -> list[WorkerInfo]:
        """Return the workers that are present: each with its start, its queues and its current runs."""
        return present(self.runtime)

    # -- queues --------------------------------------------------------------------------------------------------

    def queue(self, name: str) -> Queue:
        """Return a queue by its name, managed or not; does not ask the store."""
        return Queue(name, runtime=self.runtime)

    def queues(self) -> list[Queue]:
        """Return the managed queues, by name."""
        return [Queue(name, runtime=self.runtime) for name in queues.read(self.runtime.connections)]

    # -- schedules -----------------------------------------------------------------------------------------------

    def schedule(  # noqa: PLR0913 - each says something else of it
        self,
        /,
        name: str,
        task: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        every: float | timedelta | None = None,
        cron: str | None = None,
        timezone: Any = None,
        start: datetime | None = None,
        end: datetime | None = None,
        catch_up: str | int = "last",
        overlap: str = "allow",
        jitter: float | timedelta = 0,
        **options: Any,
    ) -> Schedule:
        """Make a job of a task, or a message of a durable task, at the given times; an existing schedule is changed.

        The times are `every` so many seconds, counted from `start` or from now, or those of a `cron` expression in a
        `timezone` (the app's by default); none is before `start` or after `end`. `catch_up`: how many missed times
        still get a job. `overlap`: what happens at a time while the previous job is still open ("allow", "skip",
        "wait"). `jitter`: the largest delay in seconds that is added to a time. `options` are those of `enqueue`, or of
        `apply_async`. It takes effect at once, also in a run. Raises InvalidValueError, UnknownTaskError, and TypeError
        for arguments that the task does not take, before anything is changed.
        """
        given = {"task": task, "args": args, "kwargs": kwargs, "every": every, "cron": cron, "timezone": timezone,
                 "start": start, "end": end, "catch_up": catch_up, "overlap": overlap, "jitter": jitter,
                 **options}  # fmt: skip
        schedule_of.declare(self.runtime, name, given)
        return Schedule(name, runtime=self.runtime)

    def schedules(self) -> list[Schedule]:
        """Return all schedules, by name."""
        return [Schedule(name, runtime=self.runtime) for name in schedule_rows.read(self.runtime.connections)]

    def get_schedule(self, name: str) -> Schedule:
        """Return the schedule of this name; raises ScheduleNotFoundError."""
        return Schedule(schedule_of.get(self.runtime, name).name, runtime=self.runtime)

    # -- channels ------------------------------------------------------------------------------------------------

    def publish(self, channel: str, message: Any, *, transaction: Any = None) -> int:
        """Write a message to every input port that subscribes to the channel or an ancestor; returns how many.

        Inside a run it is part of the unit, and the number counts the present subscribers.
        """
        check_channel(channel)
        runtime = self.runtime
        limit = runtime.settings.max_value_bytes
        change = Publish(channel, values.encode(message, limit=limit, what="message"), current_context(limit=limit))
        applied = submit(runtime, "publish", change, transaction=transaction)
        if applied is None:
            return publications.count_subscribers(runtime.connections, channel)
        return applied.after_commit.published.get(channel, 0)

    def subscribe(self, *channels: str, timeout: float | None = None) -> Subscription:
        """Listen to announcements on channels: iterate over the result, in threads or by ``async for``.

        Returns after a bit more than a second, when no further announcement can be missed. A channel is heard only by
        its exact name. With `timeout` the iteration raises TimeoutError if no announcement comes for so many seconds.
        Raises StoreUnavailableError if Redis (the store, in an app without Redis) does not answer.
        """
        if not channels:
            raise InvalidChannelError("subscribe() takes the names of channels, at least one.")
        check_channels(channels)
        if timeout is not None and not is_seconds(timeout):
            raise InvalidValueError(f"timeout= takes seconds, {MOST_S}, not {shown(timeout)}.")
        return Subscription(lambda names: self.runtime.announcer.listen(names), channels, timeout=timeout)

    def log(self, entry: Any) -> None:
        """Make an entry of the log: a mapping, a string (its `message`), an exception (its `error` and `backtrace`).

        The entry also has the context and a timestamp. It goes to the ports that subscribe to ``/sidejob/log``, and to
        the listeners of that channel. In a run it belongs to the unit.
        """
        log_entry(self.runtime, entry)

    # -- operations ----------------------------------------------------------------------------------------------

    def poll(self) -> PollReport:
        """Sweep once, even while a worker sweeps: publish due and missing messages, mature timers, rescue lost runs.

        It sweeps all stores that answer; if the primary does not, it raises StoreUnavailableError after the others.
        """
        runtime = self.runtime
        report = PollReport()
        failure: StoreUnavailableError | None = None
        with recording.counting(runtime):
            for there in runtime.in_each_store():
                try:
                    found = Sweeper(there).run_once()
                    report += found if found is not None else PollReport()
                except StoreUnavailableError as error:
                    logger.warning("%s cannot be swept: %s", there.store.where, error)
                    failure = failure or (error if there.store is runtime.store else None)
        if failure is not None:
            raise failure
        return report

    @property
    def dead(self) -> DeadSet:
        """The dead set: work that needs a person."""
        return DeadSet(self.runtime)

    def stats(self) -> dict[str, Any]:
        """Return each queue's depth and oldest due age, the jobs by status, the dead set's size, and the workers."""
        return StatisticsViews(self.runtime).stats()

    def statistics(
        self, queue: str | None = None, task: Any = None, day: date | str | None = None, step: str | None = None
    ) -> Statistics:
        """Return how long the runs of a task in a queue waited and ran on a day, and how many failed.

        None means all queues, all tasks, all days that are kept (`sidejob_stats_history`). `task` is a task or its
        name; `day` is a date in UTC, a text such as 2026-11-26, or ``"today"``. With the name of a `step` it tells
        this of the executions of the step. Each process of a worker stores its counts within 15 seconds, and two or
        three seconds after its last run.
        """
        task = getattr(task, "name", task)
        check_texts(queue=queue, task=task)
        if step is not None:
            check_name(step)
        return StatisticsViews(self.runtime).statistics(queue, task, day_of(day), step)

    @property
    def owner(self) -> dict[str, str]:
        """The owner of the store's schema: the app and the broker, as recorded by `db upgrade`."""
        return {"app": self.app.main or "celery", "broker": configuration.broker_identity(self.app)}

    def check_schema(self) -> None:
        """Raise SchemaError if a schema is missing, too old, too new, or belongs to another app or broker."""
        self.settings.require_database_url()
        for store in self.runtime.stores:
            self.check_store(store)

    def check_store(self, store: Store) -> None:
        """Raise SchemaError if the schema of one of the stores does not fit."""
        url = store.settings.require_database_url()
        setting = store.connections.setting
        schema_check.check(url, store.settings.schema, owner=self.owner, setting=setting)

    def upgrade_schema(self) -> None:
        """Create the schema or bring it up to date, as `db upgrade` does; for tests that make their own database."""
        from .store.schema import migrate  # here, because it imports Alembic and SQLAlchemy, which no worker needs

        self.settings.require_database_url()
        for store in self.runtime.stores:
            if store.settings.direct_url is not None:
                schema_check.check_urls(store.settings.require_database_url(), store.settings.direct_url)
            url, setting = store.direct_url()
            migrate.upgrade(url, store.settings.schema, owner=self.owner, setting=setting)

    def close(self) -> None:
        """Close this process's idle connections to the store and the broker; they open again at the next use.

        For tests that drop their database; otherwise idle connections to the store close after five seconds.
        """
        if self._runtime is not None:
            self._runtime.announcer.close()
            for store in self._runtime.stores:
                store.connections.write_behind_now()
                store.connections.close()
            self._runtime.publisher.close()

    def reread_settings(self) -> None:
        """Close this process's connections, and read the settings anew at the next use: for tests that change them."""
        self.close()
        self._runtime = self._globs = None

    def register_tasks(self) -> None:
        """Tell the store which sidejob tasks this app serves, for clients that do not have their code.

        The capacity pools of the tasks are made too: those clients, and calls that follow other works, need them.
        """
        for pool in pools_of(self.app):
            declare(pool, self.runtime)
        served = self.runtime.tasks.served()
        if served:
            register(self.runtime, served)


def extend_copy(app: Celery) -> None:
    """Give a spawned process's copy of an app its SideJob, before it imports the app's modules.

    It is one of the app's fixups, which run when the copy is made.
    """
    signals.import_modules.connect(_extend, sender=app, weak=False)


def _extend(sender: Celery, **_: Any) -> None:
    SideJob(sender)


SHORTEST_PAUSE_S = 5.0
"""The shortest limit for a pause in a transaction, however short the lease: encoding a large unit takes time."""


def install(sidejob: SideJob, app: Celery) -> None:
    """Install our hooks into the app; reads no configuration, and connects to nothing."""
    app.steps["worker"].add(SideJobStep)
    app.steps["consumer"].add(DisconnectionStep)
    pool_process.install()
    app.on_after_finalize.connect(partial(beat.add_entry, app), weak=False)
    app_methods.resolve_urls(app, configuration.broker_in_store)
    app_methods.mask_report(app)
    app_methods.mask_settings(app)
    app_methods.send_messages_by(app, composing.KeepingAMQP)
    app_methods.send_by(app, calls.send_task)
    control.install(app)
    durable_run.install()
    durable_task.end_rows_of_others()
    durable_task.watch_tasks(app)
    durable_request.install()
    add_awaited_calls()
    turns.wait_elsewhere_by(coroutines.elsewhere)
    app_methods.lend_transactions(calling)
    app.on_after_finalize.connect(lambda **_: durable_task.mark(app), weak=False)
    recording.install()
    announcing.install()
    logs.install(sidejob)
    jobs_of.use_apps(apps.runtime_of, apps.origin_of)


def runtime_of(sidejob: SideJob) -> Runtime:
    """Make the stores, the broker and the result backend of an app, from its settings."""
    app = sidejob.app
    settings = configuration.settings_of(app)
    announcing.check_redis_url(settings.redis_url)
    pause_s = max(settings.lease / 2, SHORTEST_PAUSE_S)
    connections = MeasuredConnections(
        settings.database_url,
        settings.schema,
        prepare=settings.direct_url is None,
        longest_pause_s=pause_s,
        is_broker=configuration.broker_is_store(app),
        task_history=settings.task_history,
    )
    to_broker = BrokerConnection(app)
    stores = stores_of(settings, connections, longest_pause_s=pause_s)
    return Runtime(
        store=stores[0],
        stores=stores,
        publisher=CeleryPublisher(app, to_broker, partial(run_here, sidejob)),
        broker=CeleryBroker(app, to_broker, connections),
        results=CeleryResults(app),
        observer=announcing.AnnouncingObserver(
            connections.measures, lambda: sidejob.runtime, keeps_statistics=settings.stats_history > 0
        ),
        tasks=CeleryTasks(app, connections),
        announcer=Announcer(lambda: announcing.way_of(app, sidejob.runtime)),
        audience=Audience(connections),
        tracking=Tracking(connections),
    )
