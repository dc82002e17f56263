"""What `aio` of each handle has: its verbs as coroutines, and its attributes that ask the store.

Nothing is done here: a coroutine of a handle calls the handle's own method (`awaiting.py`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Generic, ParamSpec, Self, TypeVar, Unpack, overload

from .announcements.subscription import Announcement, Subscription
from .awaiting import Aio, Each, Parts, ask, in_thread, items_of, parted, reading, verb, whole
from .deadset import DeadEntry, DeadSet
from .extension import SideJob
from .jobs.batch import Batch, BatchCounts
from .jobs.capacity import CapacityPool
from .jobs.filters import JobFilters
from .jobs.job import Job
from .jobs.port import Port
from .jobs.queue import Queue, QueueCounts
from .jobs.running import RunningJob
from .jobs.schedule import Schedule
from .jobs.steps import RetryOn, StepInTransaction, Was
from .store.borrowed import lending
from .unit.open_unit import active

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=AbstractContextManager[Any])


def _read(work: Callable[[], R]) -> Parts[R]:
    """Read packets; if the coroutine is cancelled meanwhile, a run finds them on their port again."""
    unit = active()
    return (yield work) if unit is None else (yield from unit.reading(work))[0]


class reads(verb[P, R]):  # noqa: N801 - it is used as a function is
    """A method that reads packets as a coroutine function."""

    async def _called(self, method: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        if kwargs.get("transaction") is not None:
            return await ask(method, *args, **kwargs)
        return await whole(_read(partial(method, *args, **kwargs)))


def _of_job(read: Callable[[Job], R]) -> reading[Job, R]:
    return reading(read)


class AioPort(Aio[Port]):
    """The verbs of a port; ``async for value in port.aio`` reads until it is empty."""

    write = parted(Port.write, Port._writing)
    write_many = parted(Port.write_many, Port._writing_many)
    read, read_packet, read_many = reads(Port.read), reads(Port.read_packet), reads(Port.read_many)
    peek, connect_to, count = verb(Port.peek), verb(Port.connect_to), verb(Port.__len__)
    has_data = reading[Port, bool](lambda port: port.has_data)
    default = reading[Port, Any](lambda port: port.default)
    has_default = reading[Port, bool](lambda port: port.has_default)
    channels = reading[Port, list[str]](lambda port: port.channels)

    def __aiter__(self) -> Each[Any]:
        return Each(items_of(lambda: self._handle, _read))


class AioJob(Aio[Job]):
    """The verbs of a job, and its attributes: ``await job.aio.children``."""

    run, terminate, delete, wait = verb(Job.run), verb(Job.terminate), verb(Job.delete), parted(Job.wait, Job._waited)
    enqueue, adopt, disown, child = verb(Job.enqueue), verb(Job.adopt), verb(Job.disown), verb(Job.child)
    refresh, move, set_priority = verb(Job.refresh), verb(Job.move), verb(Job.set_priority)
    depend_on, undepend, cancel_timer = verb(Job.depend_on), verb(Job.undepend), verb(Job.cancel_timer)
    add_alias, remove_alias, tag, untag = verb(Job.add_alias), verb(Job.remove_alias), verb(Job.tag), verb(Job.untag)
    track, untrack, log, publish = verb(Job.track), verb(Job.untrack), verb(Job.log), verb(Job.publish)
    get, set, unset, forget = verb(Job.get), verb(Job.set), verb(Job.unset), verb(Job.forget)
    configure_ports = verb(Job.configure_ports)

    info, exists, state = _of_job(lambda j: j.info), _of_job(lambda j: j.exists), _of_job(lambda j: j.state)
    status, terminated = _of_job(lambda j: j.refresh().status), _of_job(lambda j: j.terminated)
    parent, children = _of_job(lambda j: j.parent), _of_job(lambda j: j.children)
    dependencies, dependents = _of_job(lambda j: j.dependencies), _of_job(lambda j: j.dependents)
    waiting_for, timers = _of_job(lambda j: j.waiting_for), _of_job(lambda j: j.timers)
    aliases, tags, tracked = _of_job(lambda j: j.aliases), _of_job(lambda j: j.tags), _of_job(lambda j: j.tracked)
    history, steps = _of_job(lambda j: j.history), _of_job(lambda j: j.steps)
    progress_of = _of_job(lambda j: j.progress_of)
    inports, outports = _of_job(lambda j: j.inports), _of_job(lambda j: j.outports)


class AioRunningJob(AioJob):
    """The verbs of the running job, for a body of `async def`."""

    _handle: RunningJob

    checkpoint, heartbeat = verb(RunningJob.checkpoint), verb(RunningJob.heartbeat)
    call, call_all, receive = verb(RunningJob.call), verb(RunningJob.call_all), verb(RunningJob.receive)
    sleep, sleep_until, since = verb(RunningJob.sleep), verb(RunningJob.sleep_until), verb(RunningJob.since)

    def for_inputs(self, *names: str, commit_every: int = 1, commit_within: float | None = None) -> Each[Any]:
        """Iterate as `RunningJob.for_inputs` does: ``async for order in job.aio.for_inputs("orders")``."""
        return Each(self._handle._turns(*names, commit_every=commit_every, commit_within=commit_within))

    @overload
    def step(self, name: str, /, *, transaction: Any, was: Was = None) -> AwaitedStep: ...
    @overload
    def step(
        self,
        name: str,
        function: Callable[..., Awaitable[R]],
        /,
        *args: Any,
        retries: int = 0,
        backoff: float | timedelta = 1.0,
        retry_on: RetryOn = Exception,
        was: Was = None,
        **kwargs: Any,
    ) -> Coroutine[Any, Any, R]: ...
    @overload
    def step(
        self,
        name: str,
        function: Callable[..., R],
        /,
        *args: Any,
        retries: int = 0,
        backoff: float | timedelta = 1.0,
        retry_on: RetryOn = Exception,
        was: Was = None,
        **kwargs: Any,
    ) -> Coroutine[Any, Any, R]: ...
    def step(self, name: str, function: Any = None, /, *args: Any, transaction: Any = None, **options: Any) -> Any:
        """Do a step, as `RunningJob.step` does. The function may be an `async def`; another is called in a thread.

        Without a function ``async with job.aio.step(name, transaction=session) as step:`` keeps the step in the same
        commit as your own rows: if `step.is_new`, write them, ``await step.keep(value)``, and commit.
        """
        if transaction is None:
            parts: Any = self._handle._step(name, function, *args, **options)
            return whole(parts)
        half, is_asynchronous = lending.half(transaction)
        made: Any = self._handle._step(name, function, *args, transaction=half, **options)
        return AwaitedStep(made, is_asynchronous=is_asynchronous)

    def unit(self, *, transaction: Any) -> AwaitedBlock[AbstractContextManager[None]]:
        """Have the unit and the caller's own SQL commit together, as `RunningJob.unit` does.

        ``async with job.aio.unit(transaction=session):`` and commit after the block.
        """
        half, is_asynchronous = lending.half(transaction)
        return AwaitedBlock(self._handle.unit(transaction=half), is_asynchronous=is_asynchronous)


class AwaitedBlock(Generic[M]):
    """A block whose beginning and end are awaited, with the caller's transaction."""

    def __init__(self, block: M, *, is_asynchronous: bool) -> None:
        self._block = block
        self._is_asynchronous = is_asynchronous

    async def __aenter__(self) -> Self:
        await self._do(self._block.__enter__)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._do(partial(self._block.__exit__, kind, error, trace))

    async def _do(self, work: Callable[[], R]) -> R:
        # A synchronous transaction has the caller's statements in this very thread, where they block the loop too.
        return await lending.spawn(work) if self._is_asynchronous else work()


class AwaitedStep(AwaitedBlock[StepInTransaction]):
    """A step in the caller's transaction, together with the caller's own rows."""

    @property
    def is_new(self) -> bool:
        """Whether it must still be done: it has no record."""
        return self._block.is_new

    @property
    def value(self) -> Any:
        """The value kept for the step."""
        return self._block.value

    async def keep(self, value: Any) -> None:
        """Set the value, which writes the record through the transaction: commit after that."""
        await self._do(partial(setattr, self._block, "value", value))


class AioQueue(Aio[Queue]):
    """The verbs of a queue."""

    pause, resume, peek = verb(Queue.pause), verb(Queue.resume), verb(Queue.peek)
    configure, unmanage = verb(Queue.configure), verb(Queue.unmanage)
    paused = reading[Queue, bool](lambda queue: queue.paused)
    counts = reading[Queue, QueueCounts](lambda queue: queue.counts)


class AioPool(Aio[CapacityPool]):
    """The verbs of a capacity pool."""

    apply_async, cast, resize = verb(CapacityPool.apply_async), verb(CapacityPool.cast), verb(CapacityPool.resize)
    children, stats = verb(CapacityPool.children), verb(CapacityPool.stats)
    used = reading[CapacityPool, int](lambda pool: pool.used)
    limit = reading[CapacityPool, int](lambda pool: pool.limit)


class AioBatch(Aio[Batch]):
    """The verbs of a batch."""

    add, close, delete, wait = verb(Batch.add), verb(Batch.close), verb(Batch.delete), parted(Batch.wait, Batch._waited)
    counts = reading[Batch, BatchCounts](lambda batch: batch.counts)
    progress = reading[Batch, float](lambda batch: batch.progress)


class AioSchedule(Aio[Schedule]):
    """The verbs of a schedule."""

    pause, resume, delete = verb(Schedule.pause), verb(Schedule.resume), verb(Schedule.delete)
    run_now, next_times = verb(Schedule.run_now), verb(Schedule.next_times)
    info = reading[Schedule, dict[str, Any]](lambda schedule: schedule.info)


class AioDeadSet(Aio[DeadSet]):
    """The verbs of the dead set; ``async for entry in sidejob.dead.aio`` reads a page at a time."""

    list, groups, count, tasks = verb(DeadSet.list), verb(DeadSet.groups), verb(DeadSet.count), verb(DeadSet.tasks)
    get, for_task_id, delete = verb(DeadSet.get), verb(DeadSet.for_task_id), verb(DeadSet.delete)
    retry, retry_all, purge = verb(DeadSet.retry), verb(DeadSet.retry_all), verb(DeadSet.purge)

    def __aiter__(self) -> Each[DeadEntry]:
        return Each(items_of(lambda: self._handle))


class AioSideJob(Aio[SideJob]):
    """The verbs of a `SideJob`."""

    enqueue, enqueue_many, send_many = verb(SideJob.enqueue), verb(SideJob.enqueue_many), verb(SideJob.send_many)
    fork, cancel, publish, log = verb(SideJob.fork), verb(SideJob.cancel), verb(SideJob.publish), verb(SideJob.log)
    find, get, for_task_id, jobs = verb(SideJob.find), verb(SideJob.get), verb(SideJob.for_task_id), verb(SideJob.jobs)
    count_jobs, tags, tracked = verb(SideJob.count_jobs), verb(SideJob.tags), verb(SideJob.tracked)
    workers, queues = verb(SideJob.workers), verb(SideJob.queues)
    schedule, schedules = verb(SideJob.schedule), verb(SideJob.schedules)
    get_schedule = verb(SideJob.get_schedule)
    batch, get_batch, batches = verb(SideJob.batch), verb(SideJob.get_batch), verb(SideJob.batches)
    poll, stats, statistics = verb(SideJob.poll), verb(SideJob.stats), verb(SideJob.statistics)

    def iter_jobs(self, *, page: int = 500, newest_first: bool = False, **filters: Unpack[JobFilters]) -> Each[Job]:
        """Iterate over all jobs that match, a page at a time, as `SideJob.iter_jobs` does."""
        return Each(items_of(lambda: self._handle.iter_jobs(page=page, newest_first=newest_first, **filters)))

    def subscribe(self, *channels: str, timeout: float | None = None) -> AwaitedSubscription:
        """Listen to announcements: ``async for channel, message in sidejob.aio.subscribe("/news")``.

        It listens from a second after the first `async for` or `async with`; the rest is as in `SideJob.subscribe`.
        """
        return AwaitedSubscription(partial(self._handle.subscribe, *channels, timeout=timeout))


class AwaitedSubscription(AsyncIterator[Announcement]):
    """A subscription that begins when it is first awaited."""

    def __init__(self, make: Callable[[], Subscription]) -> None:
        self._make = make
        self._made: Subscription | None = None

    async def __anext__(self) -> Announcement:
        await self.__aenter__()
        assert self._made is not None
        return await self._made.__anext__()

    async def __aenter__(self) -> Self:
        if self._made is None:
            self._made = await in_thread(self._make, is_brief=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._made is not None:
            await in_thread(self._made.close, is_brief=False)
