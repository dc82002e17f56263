"""The running job: the first argument of a sidejob task's body."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast, overload

from ..awaiting import AioOf, Item, Items, Parts, each, here
from ..model import values
from ..model.changes import RememberInputs
from ..model.checks import SECONDS, check_age, check_number, is_seconds, shown
from ..model.errors import IllegalMoveError, InvalidPortError, InvalidValueError, LeaseLostError
from ..model.port import NO_DATA
from ..model.status import check_progress
from ..operations.ledger import durable_runs
from ..unit.open_unit import OpenUnit, Suspend, active
from ..unit.steps import turn_key
from . import steps
from .drafts import stage_of, when
from .job import Job
from .log_entries import one_entry
from .port import Port
from .steps import RetryOn, StepInTransaction, Tries, Was, steps_of

if TYPE_CHECKING:
    from ..aio import AioRunningJob

R = TypeVar("R")


class RetryRun(BaseException):
    """Ends a run that is to be tried again; what `raise job.retry(...)` raises."""

    def __init__(self, exc: BaseException | None, countdown: float | None, max_retries: int | None) -> None:
        super().__init__(exc, countdown, max_retries)
        self.exc = exc
        self.countdown = countdown
        self.max_retries = max_retries


class RunningJob(Job):
    """The job whose run this is. Everything asked through this package inside the run belongs to its unit."""

    __slots__ = ("_unit", "request")

    aio: AioOf[AioRunningJob] = AioOf("AioRunningJob")
    """The verbs as coroutines, for a body of `async def`."""

    def __init__(self, unit: OpenUnit, row: Any, *, request: Any = None) -> None:
        super().__init__(unit.hold.job_id, runtime=unit.runtime, row=row)
        self._unit = unit
        self.request = request

    @property
    def run_no(self) -> int:
        """The number of this run: the fencing token. It grows with every run, also with lost ones."""
        return self._unit.hold.run_no

    @property
    def info(self) -> dict[str, Any]:
        """Everything about the job as the store has it now; of this run only committed units are seen there."""
        return Job(self.id, runtime=self._runtime).info

    @property
    def stopping(self) -> bool:
        """Whether the worker wants to stop: commit what is done and end soon, or the run is begun again elsewhere.

        In a body in the worker's own process it is also True once the run was revoked or lost: no commit is accepted.
        """
        return self._unit.stopping()

    def heartbeat(self) -> None:
        """Say that the run makes progress: it moves the deadline of a task with ``lease_renewal="manual"``.

        Raises LeaseLostError if the run is no longer the job's current one. With ``"auto"`` the worker renews.
        """
        self._unit.renew()

    def suspend(self, *, timeout: float | timedelta | None = None) -> NoReturn:
        """End the run here, commit it and rest as suspended, until something is asked of the job.

        With `timeout` it is asked to run after that many seconds, counted from the commit. The next run, whatever it
        was asked by, removes this timer.
        """
        self._unit.check_not_apart("suspend()")
        raise Suspend(self.id, check_age("timeout", timeout))

    def retry(
        self, exc: BaseException | None = None, *, countdown: float | None = None, max_retries: int | None = None
    ) -> RetryRun:
        """Return what to raise so that the run is discarded and tried again after `countdown` seconds.

        ``raise job.retry(countdown=60)``. Without arguments the task's own `default_retry_delay` and `max_retries`
        hold. When the retries are used up the job fails with `exc`.
        """
        wait_s, _ = when(self._runtime, eta=None, countdown=countdown)
        return RetryRun(exc, None if countdown is None else wait_s or 0.0, max_retries)

    def progress(self, done: float | None = None, total: float | None = None, note: str | None = None) -> None:
        """Say how far the run is: `done` of `total`, and a note; each may be left out. `job.progress_of` reads it.

        It is kept at once, but at most once a second, and the last word with the end of the body. It is no part of the
        unit, so it is seen while the run goes on; a run that begins again tells anew.
        """
        check_progress(done, total, note)
        self._unit.told.tell(done, total, note)

    def then(
        self,
        task: Any = None,
        args: Any = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        queue: str | None = None,
        priority: int | None = None,
        countdown: float | timedelta | None = None,
    ) -> None:
        """Have the job go on with another task, other arguments or in another queue if this run completes.

        It stays the same job: its id, ports, state and children, and its asking. What follows the asking (its result,
        `link`, a chain) and the parent hear of it after the last stage. Nothing is changed if the run does not
        complete. A second call replaces the first; without arguments the same is run once more. None leaves something
        as it is, but the queue of another `task` is that task's own.
        """
        self._unit.check_not_apart("then()")
        if self._unit.hold.kind == "shutdown":
            raise IllegalMoveError(f"then() in the shutdown of job {self.id}: the job ends, and nothing can follow.")
        stage = stage_of(self._runtime, self._read(), task, args, kwargs, queue=queue, priority=priority)
        wait_s, _ = when(self._runtime, eta=None, countdown=countdown)
        self._unit.then = stage, wait_s or 0.0

    def checkpoint(self, *, transaction: Any = None) -> None:
        """Commit what the run did so far; with `transaction=` as part of the caller's, which the caller commits."""
        if transaction is None:
            self._unit.commit()
        else:
            self._unit.commit_with(transaction)
        self._row = None

    @contextmanager
    def unit(self, *, transaction: Any) -> Iterator[None]:
        """Have the unit and the caller's own SQL commit together or not at all.

        On leaving the block the job's lock, the fence and everything buffered are written through the caller's
        connection; the caller commits. LeaseLostError there means that the run is no longer ours, and nothing was
        written. After an error in the block, and after a rollback, the run goes on from before the block: repeat it, or
        what was read for it is on its port again, and UnitNotCommittedError is raised as the body reads on or ends.
        CommitInDoubtError means that the last block was committed without an answer, and must not be repeated.
        """
        with self._unit.block(transaction):
            yield
        self._row = None

    # -- steps ---------------------------------------------------------------------------------------------------

    @overload
    def step(self, name: str, /, *, transaction: Any, was: Was = None) -> StepInTransaction: ...
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
    ) -> R: ...
    def step(  # noqa: PLR0913 - what is called, and how often
        self,
        name: str,
        function: Any = None,
        /,
        *args: Any,
        retries: int = 0,
        backoff: float | timedelta = 1.0,
        retry_on: RetryOn = Exception,
        was: Was = None,
        transaction: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Call the function once, whatever happens to the runs of this job, and return its value, a JSON value.

        The value is kept in the same commit as what the function does through this package. If the job has it already,
        nothing is called. The same name again is another step. What the body does outside of steps is committed when
        the run completes. If the function raises, it is tried again after `backoff` seconds (1), then after twice as
        long, up to `retries` times, for errors of the class `retry_on`; the job rests meanwhile. `was` are former
        names of the step.

        Raises the function's error once its tries are used up, or a StepFailedError if that error cannot be made again;
        StepNameError for a bad name; InvalidValueError for a value that is no JSON value; and IllegalMoveError where no
        step may be, such as in another step.

        Without a function ``with job.step(name, transaction=session) as step:`` keeps the step in the same commit as
        your own rows: if `step.is_new`, write them, set `step.value`, and commit.
        """
        given = {"retries": retries, "backoff": backoff, "retry_on": retry_on, "was": was, "transaction": transaction}
        made = self._step(name, function, *args, **given, **kwargs)
        return made if isinstance(made, StepInTransaction) else here(made)

    def _step(  # noqa: PLR0913 - as in `step`
        self,
        name: str,
        function: Any = None,
        /,
        *args: Any,
        retries: int = 0,
        backoff: float | timedelta = 1.0,
        retry_on: RetryOn = Exception,
        was: Was = None,
        transaction: Any = None,
        **kwargs: Any,
    ) -> Parts[Any] | StepInTransaction:
        if transaction is None:
            if not callable(function):
                raise InvalidValueError(
                    f"step({shown(name)}, …) takes a function to call, not {shown(function)}; or transaction= in a "
                    "`with` statement."
                )
            tries = Tries.of(retries, backoff, retry_on)
            return steps.step(self._unit, name, partial(function, *args, **kwargs), tries=tries, was=was)
        if function is not None or args or kwargs or (retries, backoff, retry_on) != (0, 1.0, Exception):
            raise InvalidValueError(
                f"step({shown(name)}, transaction=…) is used in a `with` statement, and takes no function and no "
                "retries: do the step in the block."
            )
        return StepInTransaction(self._unit, name, transaction, was)

    def call(
        self, /, name: str, task: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None, **enqueue_options: Any
    ) -> Any:
        """Make a child job once, rest until it has ended, and return the value of its body.

        The options are those of `enqueue`. Raises ChildFailedError if the child has failed, was terminated or is gone.
        """
        return steps.call(self._unit, name, {"task": task, "args": args, "kwargs": kwargs, **enqueue_options})

    def call_all(self, name: str, signatures: Iterable[Any], limit: int | None = None) -> list[Any]:
        """Make a child job of each signature, rest until all have ended, and return their values in order.

        With `limit` so many at a time. Raises ChildFailedError, once all have ended, if some have failed.
        """
        return steps.call_all(self._unit, name, signatures, limit)

    def sleep(self, /, name: str, length: timedelta | None = None, **parts: float) -> None:
        """Rest for a time, which begins when the body first comes here: ``job.sleep("cool off", days=3)``."""
        steps.sleep(self._unit, name, wait_s=steps.seconds_of(name, length, parts))

    def sleep_until(self, name: str, at: datetime) -> None:
        """Rest until this time; what the body names when it first comes here counts."""
        if not isinstance(at, datetime):
            raise InvalidValueError(f"sleep_until({shown(name)}, …) takes a datetime, not {shown(at)}.")
        steps.sleep(self._unit, name, due_at=self._runtime.tasks.localize(at))

    def receive(self, port: str | Port, timeout: float | timedelta | None = None) -> Any:
        """Return the next packet of a port; rest until there is one, or NO_DATA once `timeout` seconds are over.

        `port` is the name of an input port, or any port, such as a child's output. It never returns a default.
        """
        return steps.receive(self._unit, port if isinstance(port, Port) else self.input(port), timeout)

    def since(self, name: str) -> bool:
        """Tell whether the job came to this place first with code that has this call: True unless it had gone on.

        ``if job.since("new pricing"):`` lets jobs that wait behind this place finish as they began.
        """
        return steps_of(self._unit).since(name)

    def forget(self, *names: str) -> None:
        """Have steps done again: the next call of the name, or of a number such as ``"charge#2"``, has no record.

        A name means its last call in this run, or each of them if there was none.
        """
        known = steps_of(self._unit)
        for name in names:
            known.forget(name)

    def for_inputs(self, *names: str, commit_every: int = 1, commit_within: float | None = None) -> Iterator[Any]:
        """Yield one value from each port, in the order of the names, as long as every port has one.

        One name yields values, several yield tuples. Each turn is committed when the next begins, or every
        `commit_every` turns, or when `commit_within` seconds have passed since the last commit. A port's default stands
        in while another port has data. When some ports have data and another has neither, the run suspends; when all
        have only defaults, they are yielded once and what the turn writes becomes the default of the ports written to.
        """
        return each(self._turns(*names, commit_every=commit_every, commit_within=commit_within))

    def _turns(self, *names: str, commit_every: int = 1, commit_within: float | None = None) -> Items:
        check_number("commit_every", commit_every, least=1, of="turns")
        if commit_within is not None and not is_seconds(commit_within):
            raise InvalidValueError(f"commit_within is {SECONDS}, not {shown(commit_within)}.")
        if len(set(names)) < len(names):
            raise InvalidPortError(f"for_inputs reads each port once in a turn, and {names!r} names one twice.")
        if names:
            ports = yield lambda: [self.input(name) for name in names]
            yield from _Turns(self, self._unit, ports, commit_every, commit_within).items()


class _Turns:
    """The turns of one `for_inputs`."""

    def __init__(
        self, job: RunningJob, unit: OpenUnit, ports: list[Port], commit_every: int, commit_within: float | None
    ) -> None:
        self._job = job
        self._unit = unit
        self._ports = ports
        for port in ports:
            unit.note_reader(port._key)
        self._every = commit_every
        self._within = commit_within

    def items(self) -> Items:
        """Yield the values of each turn."""
        unit = self._unit
        turns, since = 0, time.monotonic()
        if (yield self._has_begun_with_defaults):
            yield from self._only_defaults()  # this turn has begun in an earlier run, and packets have come since
        while True:
            with one_entry():
                values, packets = yield from unit.reading(self._next)
                if values is None:
                    break
                with self._turn(packets, values):
                    yield Item(self._shape(values))
            if unit.in_block:  # which commits the turns in it
                continue
            turns += 1
            if turns >= self._every or (self._within is not None and time.monotonic() - since >= self._within):
                if not unit.unit.empty:  # the body may have committed the turn itself
                    yield self._job.checkpoint
                turns, since = 0, time.monotonic()
        yield from self._only_defaults()

    @contextmanager
    def _turn(self, packets: Sequence[tuple[int, int]], values: Sequence[Any]) -> Iterator[None]:
        """Have the body do a turn with these packets, and these values.

        Raises UnitNotCommittedError if it leaves a block behind that was not committed.
        """
        unit = self._unit
        unit.turn = packets, values
        try:
            yield
        finally:
            unit.turn, unit.turns_over = None, True
        if not unit.in_block:
            unit.leave_turn()

    def _next(self) -> list[Any] | None:
        """Read one value of each port; None when no further turn is complete."""
        waiting = [self._unit.has_packet(port._key) for port in self._ports]
        if not any(waiting):
            return None
        if not all(has or port.has_default for has, port in zip(waiting, self._ports, strict=True)):
            self._job.suspend()
        late = self._late()
        return [port.default if port in late else port.read() for port in self._ports]

    def _late(self) -> set[Port]:
        """Return the ports whose packets came after the turn had begun with their defaults, in a run that has ended.

        The turn goes on with the packets that it had, because its steps belong to them; a later turn has these.
        """
        begun = self._unit.begun_turns()
        heads = {port: str(head) for port in self._ports if begun and (head := self._unit.head(port._key))}
        for turn in begun:
            packets = set(turn.split(","))
            late = {port for port, head in heads.items() if head not in packets}
            if packets <= set(heads.values()) and all(port.has_default for port in late):
                return late
        return set()

    def _has_begun_with_defaults(self) -> bool:
        """Tell whether an earlier run has begun the turn that has these defaults only."""
        begun = self._unit.begun_turns()
        return bool(begun) and all(port.has_default for port in self._ports) and turn_key((), self._defaults()) in begun

    def _defaults(self) -> list[Any]:
        return [port.default for port in self._ports]

    def _only_defaults(self) -> Items:
        """Yield the defaults once, if every port has one, and again only after one of them has changed."""
        defaults = yield self._defaults
        if any(value is NO_DATA for value in defaults):
            return
        by_name = sorted((port.name, values.encode(value)) for port, value in zip(self._ports, defaults, strict=True))
        names, now = ",".join(name for name, _ in by_name), [text for _, text in by_name]
        memo = yield self._unit.inputs_memo
        if memo.get(names) == now:
            return
        memo[names] = now
        # Before the turn, so that it goes with the body's own commit.
        self._unit.add(RememberInputs(self._job.id, json.dumps(memo)))
        before, self._unit.has_defaults_only = self._unit.has_defaults_only, True
        try:  # by no context: another task may come for the next turn than for this one
            with one_entry(), self._turn((), defaults):
                yield Item(self._shape(defaults))
        finally:
            self._unit.has_defaults_only = before

    def _shape(self, values: list[Any]) -> Any:
        return values[0] if len(self._ports) == 1 else tuple(values)


class _CurrentJob:
    """Stands for the running job of the place where it is used, as Celery's ``current_task`` does for the task."""

    def _get(self) -> RunningJob:
        unit = active()
        if unit is None or unit.job is None:
            raise IllegalMoveError("current_job is used outside of a run of a sidejob task.")
        job: RunningJob = unit.job
        return job

    def __getattr__(self, name: str) -> Any:
        return getattr(self._get(), name)

    def __eq__(self, other: object) -> bool:
        return self._get() == other

    def __hash__(self) -> int:
        return hash(self._get())

    def __bool__(self) -> bool:
        unit = active()
        return unit is not None and unit.job is not None

    def __repr__(self) -> str:
        return repr(self._get()) if self else "<current_job outside of a run>"


current_job = cast(RunningJob, _CurrentJob())
"""The running job, wherever in its body's calls."""


def heartbeat(strict: bool = False) -> bool:
    """Renew the lease of the run in progress here, and tell whether it is still the current one.

    In the body of an ordinary durable task it only tells: such a task's lease is renewed by its worker. With `strict` a
    lost lease raises LeaseLostError. Outside of runs nothing happens and the answer is True; with `strict` that raises
    IllegalMoveError.
    """
    unit = active()
    try:
        if unit is not None and unit.job is not None:
            unit.job.heartbeat()
            return True
        in_durable_run = unit is None and durable_runs.check_hold()
    except LeaseLostError:
        if strict:
            raise
        return False
    if strict and not in_durable_run:
        raise IllegalMoveError(
            "heartbeat(strict=True) outside of a run: there is no lease to renew. A thread that a body starts is part "
            "of the run only with the body's context (contextvars.copy_context())."
        )
    return True


def stopping() -> bool:
    """Tell whether the worker of the run in progress here wants to stop: what `job.stopping` tells, for any task.

    False outside of runs. A durable task that ends early by ``raise self.retry(countdown=0)`` goes on elsewhere.
    """
    unit = active()
    if unit is not None:
        return unit.stopping()
    return durable_runs.is_to_stop()
