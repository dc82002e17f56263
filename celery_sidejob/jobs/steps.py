"""The steps of a body: each is executed, called or waited for only once, whatever happens to the runs of the job."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial, wraps
from typing import Any, NoReturn

from ..awaiting import Own, Parts, here, whole
from ..model import values
from ..model.changes import Ask, MarkReceived, NewJob
from ..model.checks import LONGEST_S, SECONDS, check_age, check_function, check_number, in_seconds, is_seconds, shown
from ..model.errors import ChildFailedError, IllegalMoveError, InvalidValueError
from ..model.names import check_child_name
from ..model.port import NO_DATA
from ..model.status import RunEnd, Status
from ..model.steps import StepKind, backoff_s, check_name, error_of, failure_of, label
from ..operations.runs.runs import NO_END
from ..store import steps as rows
from ..store.statement import picked
from ..unit.open_unit import OpenUnit, active
from ..unit.steps import Place, Steps
from .creation import create
from .drafts import Drafts

Was = str | Sequence[str] | None
RetryOn = type[Exception] | tuple[type[Exception], ...]
"""The class of the errors after which a step is tried again, or several."""


@dataclass(frozen=True, slots=True)
class Step:
    """The record of a step; a job has records until it completes."""

    name: str
    number: int
    """The number of this call among the calls of the same name, from 1."""
    kind: StepKind
    done: bool
    """Whether it is over; otherwise the job waits in it, or tries it again."""
    value: Any
    error: dict[str, Any] | None
    """The `type` and `message` of its last error."""
    tries: int
    began_at: datetime
    """When its last try began, or its wait."""
    took_s: float
    """The duration of its last try, or of its wait, in seconds.

    It is 0 while a call or a receive waits, and for a receive without `timeout`, whose beginning is not kept.
    """
    worker: str | None
    due_at: datetime | None
    """When its wait ends, or its next try begins."""

    def __str__(self) -> str:
        return label(self.name, self.number)


@dataclass(frozen=True, slots=True)
class Tries:
    """How often a step is tried, and at which times."""

    retries: int = 0
    backoff_s: float = 1.0
    on: RetryOn = Exception

    @classmethod
    def of(cls, retries: Any, backoff: Any, retry_on: Any) -> Tries:
        """Check the values that a caller has given."""
        check_number("retries", retries, of="tries after the first")
        first_s = in_seconds(backoff)
        if not is_seconds(first_s):
            raise InvalidValueError(f"backoff is a timedelta or {SECONDS}, not {shown(backoff)}.")
        kinds = retry_on if isinstance(retry_on, tuple) else (retry_on,)
        if not all(inspect.isclass(kind) and issubclass(kind, Exception) for kind in kinds):
            raise InvalidValueError(f"retry_on is a class of exceptions, or a tuple of them, not {shown(retry_on)}.")
        return cls(retries, float(first_s), kinds)


ONCE = Tries()


def steps_of(unit: OpenUnit) -> Steps:
    """Return the steps of a run; IllegalMoveError in a thread that is not part of it."""
    if active() is not unit:
        raise IllegalMoveError(
            f"A step of job {unit.hold.job_id} outside of its run, or in a thread without the run's context: begin it "
            "in the body, or start the thread with contextvars.copy_context()."
        )
    unit.settle()
    unit.check_rest()
    if unit.steps is None:
        unit.steps = Steps(unit)
    return unit.steps


def step(  # noqa: PLR0915 - the ways in which it ends
    unit: OpenUnit, name: str, function: Callable[[], Any], *, tries: Tries = ONCE, was: Was = None
) -> Parts[Any]:
    """Call the function, unless a record has its value, and keep the value.

    Raises the function's error, or StepFailedError for it, once its tries are used up; InvalidValueError for a value
    that is no JSON value.
    """
    steps = yield partial(steps_of, unit)
    place = yield partial(steps.place, name, "step", _former_names(was))
    if place.record is not None and place.record.done:
        return _kept(unit, place)
    number = _wait_for_try(steps, place)
    with ExitStack() as apart:
        yield partial(apart.enter_context, steps.begun())
        began = time.monotonic()
        try:
            with steps.span(place, number):
                value = yield Own(function)
            try:
                text = _encoded(unit, place, value)
            except InvalidValueError:
                tries = ONCE  # the function would only make such a value again
                raise
            yield partial(steps.keep, place, value=text, tries=number, took_s=time.monotonic() - began)
            return values.decode(text)
        except NO_END:
            raise
        except Exception as error:
            if steps.has_failed(place):  # a time limit has struck in the commit, or right after it
                raise
            if steps.is_kept(place):  # the body was interrupted while its thread committed
                tries = ONCE
            _fail(unit, steps, place, error, tries, number, time.monotonic() - began)


def _fail(  # noqa: PLR0913 - the step, and how it has failed
    unit: OpenUnit, steps: Steps, place: Place, error: Exception, tries: Tries, number: int, took_s: float
) -> NoReturn:
    """Rest until the next try, or raise the error that the body gets."""
    unit.drop()
    failure = failure_of(error)
    if number <= tries.retries and isinstance(error, tries.on):
        wait_s = backoff_s(tries.backoff_s, number)
        record = steps.record(place, done=False, wait_s=wait_s, error=failure, tries=number, took_s=took_s)
        unit.report(record, RunEnd.RETRIED)
        steps.rest(record, wait_s=wait_s)
    steps.fail(place, error=failure, tries=number, took_s=took_s)
    raised = error_of(place.label, unit.hold.job_id, failure, error)
    if raised is error:
        raise error
    raise raised from error


def _wait_for_try(steps: Steps, place: Place) -> int:
    """Return the number of the next try of a step; the run rests if that try begins later."""
    record = place.record
    if record is None:
        return 1
    if record.left_s is not None and record.left_s > 0:
        steps.rest(due_at=record.due_at)
    return int(record.tries) + 1


class StepInTransaction(AbstractContextManager["StepInTransaction"]):
    """A step in the caller's transaction, together with the caller's own rows."""

    def __init__(self, unit: OpenUnit, name: str, transaction: Any, was: Was) -> None:
        self._is_new: bool | None = None
        self._unit = unit
        self._name = name
        self._transaction = transaction
        self._was = _former_names(was)
        self._value: Any = None
        self._is_set = False

    def __enter__(self) -> StepInTransaction:
        self._steps = steps_of(self._unit)
        self._place = place = self._steps.place(self._name, "step", self._was)
        if place.record is not None and place.record.done:
            self._is_new, self._value = False, _kept(self._unit, place)
            return self
        self._is_new = True
        self._number = _wait_for_try(self._steps, place)
        self._began = time.monotonic()
        self._apart = ExitStack()
        self._apart.enter_context(self._steps.begun())
        self._apart.enter_context(self._steps.span(place, self._number))
        return self

    @property
    def is_new(self) -> bool:
        """Whether it must still be done: it has no record."""
        if self._is_new is None:
            raise IllegalMoveError(
                f"Step {self._name!r} of job {self._unit.hold.job_id} has not begun: do it in the block of `with "
                "job.step(name, transaction=session) as step:`."
            )
        return self._is_new

    @property
    def value(self) -> Any:
        """The value kept for the step. Setting it writes the record through the transaction: commit after that."""
        return None if self.is_new and not self._is_set else self._value

    @value.setter
    def value(self, value: Any) -> None:
        if not self.is_new or self._is_set:
            raise IllegalMoveError(
                f"The value of step {self._place.label!r} of job {self._unit.hold.job_id} is set already: set it once, "
                "and only if step.is_new."
            )
        text = _encoded(self._unit, self._place, value)
        took_s = time.monotonic() - self._began
        self._steps.keep_with(self._place, self._transaction, value=text, tries=self._number, took_s=took_s)
        self._value, self._is_set = values.decode(text), True

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not self.is_new:
            return
        if error is None and not self._is_set:
            try:
                self.value = None
            except BaseException as refusal:
                self._leave(refusal)
                raise
        else:
            self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        """Go on with the body's own unit; raises the StepFailedError for an error that cannot be made again."""
        self._apart.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
        if self._is_set or not isinstance(error, Exception) or isinstance(error, NO_END):
            return
        failure = failure_of(error)
        self._steps.fail(self._place, error=failure, tries=self._number, took_s=time.monotonic() - self._began)
        raised = error_of(self._place.label, self._unit.hold.job_id, failure, error)
        if raised is not error:
            raise raised from error


def sleep(unit: OpenUnit, name: str, *, wait_s: float | None = None, due_at: datetime | None = None) -> None:
    """Rest until the time that the first call of the step has kept; its record and its timer are one commit."""
    steps = steps_of(unit)
    place = steps.place(name, "sleep")
    record = place.record
    if record is not None:
        if not record.done:
            steps.rest(due_at=record.due_at)
        return
    with steps.begun():
        if wait_s is not None and wait_s <= 0:
            steps.keep(place, wait_s=0.0)
        else:
            steps.rest(steps.record(place, wait_s=wait_s, due_at=due_at), wait_s=wait_s, due_at=due_at)


def seconds_of(name: Any, given: Any, parts: Mapping[str, Any]) -> float:
    """Return how long `sleep` lasts: a timedelta, or the parts of one; InvalidValueError for anything else."""
    check_name(name)
    told = ([] if given is None else [shown(given)]) + [f"{part}={shown(value)}" for part, value in parts.items()]
    try:
        length = timedelta(**parts) if parts and given is None else given
    except (TypeError, ValueError, OverflowError):
        length = None
    if not isinstance(length, timedelta) or (given is not None and parts):
        raise InvalidValueError(
            f"sleep({name!r}, …) takes a timedelta, or parts of one, such as days=3 or seconds=10, not "
            f"{' with '.join(told) or 'nothing'}."
        )
    if not is_seconds(length.total_seconds()):
        raise InvalidValueError(
            f"sleep({name!r}, …) lasts from 0 to {LONGEST_S:.0f} seconds, not {' with '.join(told)}."
        )
    return length.total_seconds()


def receive(unit: OpenUnit, port: Any, timeout: Any) -> Any:
    """Return the next packet of a port, or NO_DATA after the time that the first call of the step has kept."""
    timeout_s = check_age("timeout", timeout)
    steps = steps_of(unit)
    place = steps.place(port.name, "receive")
    record = place.record
    if record is not None and record.done:
        return NO_DATA if record.value is None and record.error is None else _kept(unit, place)
    with steps.begun():
        packet = port.read_packet()
        left_s = timeout_s if record is None else record.left_s
        if packet is not None or (left_s is not None and left_s <= 0):
            if port.direction == "in" and port.job.id == unit.hold.job_id:
                unit.add(MarkReceived(port.job.id, port.direction, port.name))
            value = None if packet is None else values.encode(packet.value)
            steps.keep(place, value=value, took_s=steps.waited_s(place))
            return NO_DATA if packet is None else packet.value
        if record is not None:
            steps.rest(due_at=record.due_at)
        if timeout_s is not None:
            steps.rest(steps.record(place, done=False, wait_s=timeout_s), wait_s=timeout_s)
        steps.rest()


# -- children --------------------------------------------------------------------------------------------------


def call(unit: OpenUnit, name: str, item: Mapping[str, Any]) -> Any:
    """Make a child, and return its value once it has completed; ChildFailedError if it has ended otherwise."""
    steps = steps_of(unit)
    place = steps.place(name, "call")
    return _Called(unit, steps, place, [item], None).values()[0]


def call_all(unit: OpenUnit, name: str, signatures: Any, limit: int | None) -> list[Any]:
    """Make a child for each signature, at most `limit` at a time, and return their values in this order."""
    if isinstance(signatures, str | Mapping) or not hasattr(signatures, "__iter__"):
        raise InvalidValueError(f"call_all({shown(name)}, …) takes a list of signatures, not {shown(signatures)}.")
    if limit is not None:
        check_number("limit", limit, least=1, of="children at a time")
    # A signature is a dict too, but of a class of its own.
    items = [one if type(one) is dict and "task" in one else {"task": one} for one in signatures]
    steps = steps_of(unit)
    place = steps.place(name, "calls")
    return _Called(unit, steps, place, items, limit).values()


@dataclass(frozen=True, slots=True)
class _Called:
    """The children that a step has called, and will call."""

    unit: OpenUnit
    steps: Steps
    place: Place
    items: Sequence[Mapping[str, Any]]
    limit: int | None

    def __post_init__(self) -> None:
        if any("transaction" in item for item in self.items):
            raise InvalidValueError(
                f"Step {self.place.label!r} of job {self.unit.hold.job_id} calls a job with transaction=: leave it "
                "out, because the step makes its children in a commit of its own."
            )

    def values(self) -> list[Any]:
        """Return the values of all children; rests while some have not completed."""
        record = self.place.record
        if record is not None and record.done:
            kept = _kept(self.unit, self.place)
            return kept if self.place.kind == "calls" else [kept]
        ids, total, asked_later = ([], len(self.items), []) if record is None else json.loads(record.value)
        ends = rows.ends(self.unit.runtime.connections, ids) if ids else {}
        own = {job_id for job_id, end in ends.items() if end.parent_id == self.unit.hold.job_id}
        failed = [job_id for job_id in ids if _has_failed(ends.get(job_id), is_own=job_id in own)]
        # The record has an error if these failures have failed a run: somebody has asked for another one since.
        asks_all = record is not None and record.error is not None
        again = [job_id for job_id in failed if job_id in own and (asks_all or job_id in asked_later)]
        has_value = [job_id for job_id in ids if job_id not in failed and ends[job_id].outcome == Status.COMPLETED]
        busy = len(ids) - len(failed) - len(has_value)
        waiting = total - len(ids) + len(again)
        room = waiting if self.limit is None else min(self.limit - busy, waiting)
        if room > 0:
            self._make(ids, total, room, again)
        if busy:
            self.steps.rest()
        if failed:
            self._fail(failed, ends)
        texts = [ends[job_id].result for job_id in ids]
        value = f"[{','.join(texts)}]" if self.place.kind == "calls" else texts[0]
        with self.steps.begun():
            self.steps.keep(self.place, value=value, took_s=self.steps.waited_s(self.place))
        return [values.decode(text) for text in texts]

    def _make(self, ids: list[int], total: int, room: int, again: Sequence[int]) -> NoReturn:
        """Ask failed children again, or make the next ones; rest until one of them ends.

        The same commit keeps the ids of all children, and of those that are to be asked again later.
        """
        unit, runtime = self.unit, self.unit.runtime
        count = max(room - len(again), 0)
        if len(self.items) < len(ids) + count:
            raise IllegalMoveError(
                f"call_all({self.place.label!r}, …) of job {unit.hold.job_id} has called {len(ids)} of {total} "
                f"children and is given {len(self.items)} now: give the same ones in each run, or leave out limit=."
            )
        with self.steps.begun():
            # At first all are drafted: a bad one is refused before a child is made, also with `limit`.
            drafts, numbers = Drafts(runtime, None), range(len(ids), len(ids) + count if ids else total)
            new = [
                _as_called(drafts.draft(self.items[number]), unit.hold.job_id, name)
                for number, name in zip(numbers, self._names(numbers), strict=True)
            ]
            made = [one.id for one in create(runtime, new[:count]) if isinstance(one, NewJob)]  # all: no unique key
            asks = [Ask(job_id, force=True) for job_id in again[:room]]
            kept = json.dumps([[*ids, *made], total, again[room:]])
            self.steps.rest(*asks, self.steps.record(self.place, done=False, value=kept))

    def _names(self, numbers: range) -> list[str]:
        """Return the names of new children: the step's name, with the run's number at the end where a child has it."""
        unit, own = self.unit, self.place.label
        names = [own if self.place.kind == "call" else f"{own}/{number}" for number in numbers]
        taken = rows.taken(unit.runtime.connections, unit.hold.job_id, names) if names else set()
        return [f"{name}~{unit.hold.run_no}" if name in taken else name for name in names]

    def _fail(self, failed: Sequence[int], ends: Mapping[int, Any]) -> NoReturn:
        job_id, step = self.unit.hold.job_id, self.place.label
        told = "; ".join(f"job {child}: {_error(ends.get(child))}" for child in failed[:10])
        more = f"; and {len(failed) - 10} more" if len(failed) > 10 else ""
        error = (
            ChildFailedError(
                f"{len(failed)} of the children that step {step!r} of job {job_id} has called failed: {told}{more}",
                failed,
            )
            if self.place.kind == "calls"
            else ChildFailedError(f"The child that step {step!r} of job {job_id} has called failed: {told}", failed)
        )
        with self.steps.begun():
            self.steps.fail(self.place, error=failure_of(error), took_s=self.steps.waited_s(self.place))
        raise error


def _as_called(new: NewJob, parent_id: int, name: str) -> NewJob:
    """Make a new job a child whose value is kept for its parent. It waits for a slot if its pool is full."""
    if new.unique is not None or new.name is not None:
        raise InvalidValueError(
            f"Step {name!r} of job {parent_id} calls a job with unique=, parent= or child_name=: leave them out, "
            "because the step waits for a child of its own, whose name it chooses."
        )
    options = json.dumps({**(json.loads(new.options) if new.options else {}), "called": True})
    admission = None if new.admission is None else replace(new.admission, mode="wait")
    return replace(new, parent_id=parent_id, name=check_child_name(name), options=options, admission=admission)


def _has_failed(end: Any | None, *, is_own: bool) -> bool:
    """Tell whether a child has no value to wait for: it has failed, was terminated, deleted, or disowned before."""
    if end is None or end.outcome == Status.COMPLETED:
        return end is None
    waits = end.is_open or end.outcome is None
    return not (is_own and waits)  # the end of a job that is no child asks no parent to run


def _error(end: Any | None) -> str:
    if end is None:
        return "it is gone"
    if end.is_open or end.outcome is None:
        return "it was disowned"
    if end.outcome != Status.FAILED:
        return f"it was {end.outcome}"
    error = json.loads(end.result)
    return f"{error['type']}: {error['message'][:200]}"


# --------------------------------------------------------------------------------------------------------------


def of_function(function: Callable[..., Any], name: str | None, tries: Tries) -> Callable[..., Any]:
    """Return a function that is a step if it is called in a body, and a plain function elsewhere.

    Raises InvalidValueError for what is no function, SettingsError for a generator, and StepNameError for a name that
    no step can have.
    """
    if not callable(function):
        raise InvalidValueError(f"@sidejob.step stands over a function, not {shown(function)}.")
    known = check_name(name if name is not None else getattr(function, "__name__", None))
    check_function(function, f"Step {known!r}")

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        unit = active()
        if unit is None or unit.job is None:
            return function(*args, **kwargs)
        return by(step(unit, known, partial(function, *args, **kwargs), tries=tries))

    by: Callable[[Parts[Any]], Any] = whole if inspect.iscoroutinefunction(function) else here
    return called


def step_list(connections: Any, job_id: int, hide: Callable[[Any], Any]) -> list[Step]:
    """Return the stored steps of a job, in the order in which they began."""
    return [
        Step(
            **picked(row, "name", "number", "kind", "done", "tries", "began_at", "took_s", "worker", "due_at"),
            value=hide(values.decode(row.value)) if row.value and row.done and row.kind != "since" else None,
            error=None if row.error is None else _shown_error(row.error, hide),
        )
        for row in rows.read(connections, job_id)
    ]


def _shown_error(text: str, hide: Callable[[Any], Any]) -> dict[str, Any]:
    kept = json.loads(text)
    return {"type": kept["type"], "message": hide(kept["message"])}


def _kept(unit: OpenUnit, place: Place) -> Any:
    """Return the value of a finished step, or raise its error again."""
    record = place.record
    assert record is not None
    if record.error is not None:
        raise error_of(place.label, unit.hold.job_id, record.error)
    return values.decode(record.value)


def _encoded(unit: OpenUnit, place: Place, value: Any) -> str:
    limit = unit.runtime.settings.max_value_bytes
    done = unit.runtime.tasks.finished(value, f"The function of step {place.label!r}")
    return values.encode(done, limit=limit, what=f"the value of step {place.label!r}")


def _former_names(was: Any) -> Sequence[str]:
    """Return the former names of a step; StepNameError for names that no step can have."""
    if isinstance(was, str) or not hasattr(was, "__iter__"):
        was = () if was is None else (was,)
    return tuple(map(check_name, was))
