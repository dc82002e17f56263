"""The steps of a run: which record each call in the body means, and the commits that keep them.

A step's commit has what the step itself has done, and its record. What the body does outside of steps stays in the
body's own unit: it is committed when the run completes, and thrown away when the run ends in the wait of a step,
because the next run does it again.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NoReturn

from ..model import crash_points, values
from ..model.changes import Ask, Change, FinishSteps, ForgetSteps, KeepStep, LeaveTurns
from ..model.errors import IllegalMoveError, StepNameError
from ..model.status import RunEnd
from ..model.steps import MOST_STEPS, StepKey, StepKind, check_name, failure_of, label, parse_label
from ..operations.hold import lease_lost, repeat_until_known
from ..operations.runs.runs import NO_END, Unit
from ..store import steps
from ..store.statement import Transaction

if TYPE_CHECKING:
    from .open_unit import OpenUnit

LONGEST_TURN = 500
"""The most characters that tell a turn by the ids of its packets: an index has them."""


def turn_key(read: Sequence[tuple[int, int]], given: Sequence[Any]) -> str:
    """Return what a turn is found by: the packets that it has read, or its values if it has read none.

    A turn has no packets where defaults stand in, and where it reads what the body wrote.
    """
    packets = ",".join(str(packet) for _, packet in read)
    if packets and len(packets) <= LONGEST_TURN:
        return packets
    return f"sha256 {sha256((packets or values.encode(given)).encode()).hexdigest()}"


@dataclass(frozen=True, slots=True)
class Place:
    """A call of a step in the body: the record that it means, if there is one."""

    key: StepKey
    kind: StepKind
    record: Any | None

    @property
    def label(self) -> str:
        """The step as people read it."""
        return label(*self.key[1:])


class Steps:
    """The records of a run's job, read when the body comes to its first step, and those that this run adds."""

    def __init__(self, unit: OpenUnit) -> None:
        self._unit = unit
        self._hold = hold = unit.hold
        rows = steps.read(unit.runtime.connections, hold.job_id) if hold.row.has_steps else ()
        self._records: dict[StepKey, Any] = {(row.turn, row.name, row.number): row for row in rows}
        """Rows of earlier runs, and each KeepStep that this run has committed, which has no `id` and no `waited_s`."""
        self._forgotten: set[StepKey] = set()
        """Records that are stored, and that the body no longer wants."""
        self._called: Counter[tuple[str, str]] = Counter()
        self._kinds: dict[str, StepKind] = {}
        self._was: dict[tuple[str, str], Sequence[str]] = {}
        """Under which earlier names the records of a step are found too."""
        self._passed = 0
        self._failed: KeepStep | None = None
        """The failure of the last step: it is kept if the body catches it, and comes to another step."""
        self._since_records: list[KeepStep] = []
        """Records of `since`, which go with the next record of a step."""
        self._read_at = time.monotonic()
        self._done: list[KeepStep] = []
        """Steps that are done and committed, and not reported yet."""

    # -- finding -------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Commit the turns that are over as the body comes to a step; IllegalMoveError where it may not come to one."""
        unit, job_id = self._unit, self._hold.job_id
        if unit.startup is None:
            raise IllegalMoveError(
                f"A step in on_startup or on_shutdown of job {job_id}, which run once: do its work in the body."
            )
        unit.check_alone()
        if unit.turn is None and unit.turns_over:
            unit.commit()
        if unit.turn is None and len(unit.unit.read) > unit.startup[1]:
            raise IllegalMoveError(
                f"Job {job_id} has read a packet outside of steps and of turns of for_inputs, and comes to a step now: "
                "if that waits, the packet would be on its port again. Read it with job.receive(port), or in a step."
            )

    def place(self, name: Any, kind: StepKind, was: Sequence[str] = ()) -> Place:
        """Return what the next call of this name means, and count it: the same name again is the next number of it.

        Raises StepNameError for a bad name, or one that has another kind, and IllegalMoveError where no step may be.
        """
        self.arrive()
        turn, name = self._turn, check_name(name)
        self._check_kind(name, kind, self._kinds.setdefault(name, kind))
        self._check_was(turn, name, was)
        number = self._called[turn, name]
        if not self._unit.repeats(label(name, number)):
            number += 1
        if was:
            self._was[turn, name] = was
        place = self._found(turn, number, kind, (name, *was))
        if place.record is None and len(self._records) >= MOST_STEPS:
            raise IllegalMoveError(
                f"Job {self._hold.job_id} has {MOST_STEPS} steps, and {name!r} would be one more: each run would have "
                "to read them all. Give the items to a port and read it with for_inputs, whose turns keep no steps, or "
                "to children (job.call_all); or keep in the job's state how far it is."
            )
        self._called[turn, name] = number
        return place

    def _found(self, turn: str, number: int, kind: StepKind, names: Sequence[str]) -> Place:
        for known in names:
            record = self._records.get((turn, known, number))
            if record is not None:
                self._check_kind(known, kind, record.kind)
                self._passed = max(self._passed, getattr(record, "id", 0))
                return Place((turn, known, number), kind, record)
        return Place((turn, names[0], number), kind, None)

    @property
    def _turn(self) -> str:
        """What the present turn is found by; empty outside of turns."""
        return "" if self._unit.turn is None else turn_key(*self._unit.turn)

    @property
    def begun_turns(self) -> set[str]:
        """What turns with records, which are not committed yet, are found by."""
        return {turn for turn, _, _ in self._records if turn}

    def _check_kind(self, name: str, kind: StepKind, known: StepKind) -> None:
        if kind != known:
            raise StepNameError(
                f"Step {name!r} of job {self._hold.job_id} is a {kind!r} here, and a {known!r} elsewhere or in an "
                f"earlier run: give one of them another name, or forget the record with job.forget({name!r})."
            )

    def _check_was(self, turn: str, name: str, was: Sequence[str]) -> None:
        """Check that no other step of this run is found by the same record."""
        other = next((old for old in was if old != name and (turn, old) in self._called), None) or next(
            (new for (of, new), names in self._was.items() if of == turn and new != name and name in names), None
        )
        if other is not None:
            raise StepNameError(
                f"Steps {name!r} and {other!r} of job {self._hold.job_id} are in one run, and was= says that one is "
                "the earlier name of the other: they would have the same record. Give the step that is not renamed a "
                "name that no step has had."
            )

    # -- keeping -------------------------------------------------------------------------------------------------

    def begun(self) -> AbstractContextManager[None]:
        """Begin a step that has no record yet: in the block the unit is its own.

        What must be there before it is committed first: the startup, and a failure that the body has caught. If the
        process dies after that, the next run goes the same way.
        """
        return self._unit.apart(self._commit_before)

    def _commit_before(self) -> None:
        unit = self._unit
        changes, reads = unit.startup or (0, 0)
        if changes or reads:
            own = unit.unit
            unit.commit_before(
                Unit(own.changes[:changes], own.read[:reads], own.took),
                Unit(own.changes[changes:], own.read[reads:], own.took, serial=own.serial),
            )
        if self._failed is not None:
            unit.commit_before(Unit([*self._since_records, self._failed]), unit.unit)

    def span(self, place: Place, number: int) -> AbstractContextManager[Any]:
        """Return the span of a try in the trace of the run, if this process uses OpenTelemetry."""
        otel = sys.modules.get("opentelemetry.trace")
        if otel is None:
            return nullcontext()
        about = {"sidejob.job_id": self._hold.job_id, "sidejob.step": place.label, "sidejob.try": number}
        span: AbstractContextManager[Any] = otel.get_tracer("celery_sidejob").start_as_current_span(
            f"step/{place.key[1]}", attributes=about
        )
        return span

    def record(self, place: Place, **kept: Any) -> KeepStep:
        """Return the record of a step of this run."""
        turn, name, number = place.key
        hold = self._hold
        return KeepStep(
            job_id=hold.job_id,
            turn=turn,
            name=name,
            number=number,
            kind=place.kind,
            run_no=hold.run_no,
            worker_id=hold.worker_id,
            **kept,
        )

    def keep(self, place: Place, **kept: Any) -> None:
        """Commit the unit of the step with its record.

        If the process dies before that, the next run does the step again. If a time limit strikes meanwhile, or while
        the step is reported, and the body catches it, the step has failed with it, in later runs too, whatever became
        of the commit.
        """
        unit, record = self._unit, self.record(place, **kept)
        unit.settle()
        alone = unit.unit.empty and not self._since_records
        unit.unit.changes += [*self._since_records, record]
        crash_points.reach(f"step[{place.label}]:before-commit")
        try:
            unit.commit_apart(partial(self._keep_alone, record) if alone else None)
        except Exception as error:
            is_kept = self._records.get(record.key) is record
            if (unit.in_doubt or is_kept) and not isinstance(error, NO_END):
                self.fail(place, error=failure_of(error), tries=record.tries)
            raise
        crash_points.reach(f"step[{place.label}]:after-commit")

    def keep_with(self, place: Place, transaction: Any, **kept: Any) -> None:
        """Write the unit of the step with its record into the caller's transaction."""
        self._unit.settle()
        self._unit.unit.changes += [*self._since_records, self.record(place, **kept)]
        self._unit.lend_apart(transaction, place.label)
        crash_points.reach(f"step[{place.label}]:before-commit")

    def rest(self, *changes: Change, wait_s: float | None = None, due_at: datetime | None = None) -> NoReturn:
        """End the run in a wait, with these changes.

        With `wait_s` or `due_at` a timer ends the wait; any other run that begins before removes it.
        """
        failed = [] if self._failed is None else [self._failed]
        timed = wait_s is not None or due_at is not None
        timer = [Ask(self._hold.job_id, wait_s=wait_s, due_at=due_at, of_wait=True)] if timed else []
        self._unit.rest(*self._since_records, *failed, *changes, *timer)

    def fail(self, place: Place, **kept: Any) -> None:
        """Take note that a step has failed for good, if the body goes on behind it."""
        self._failed = self.record(place, **kept)
        self._unit.report(self._failed, RunEnd.FAILED)

    def has_failed(self, place: Place) -> bool:
        """Tell whether the failure of a step is noted."""
        return self._failed is not None and self._failed.key == place.key

    def is_kept(self, place: Place) -> bool:
        """Tell whether this run has committed the record of a step."""
        return isinstance(self._records.get(place.key), KeepStep)

    def waited_s(self, place: Place) -> float:
        """Return the seconds since the wait of a step began; 0 without a wait that is kept."""
        waited_s: float | None = getattr(place.record, "waited_s", None)
        return 0.0 if waited_s is None else max(0.0, waited_s + time.monotonic() - self._read_at)

    def _keep_alone(self, record: KeepStep) -> None:
        """Keep a record in one statement, which passes the fence too."""
        hold = self._hold

        def work(executor: Transaction) -> None:
            if not steps.keep_alone(executor, record, unit_no=hold.unit_no):
                raise lease_lost(hold)

        repeat_until_known(self._unit.runtime, hold, "step", work, single=True)
        hold.unit_no += 1
        hold.started = True

    def applied(self, changes: Iterable[Change]) -> None:
        """Take note of records that are committed now, and of turns: the next one begins with nothing of them."""
        for change in changes:
            if isinstance(change, LeaveTurns):
                self._records = {key: record for key, record in self._records.items() if not key[0]}
                self._forgotten = {key for key in self._forgotten if not key[0]}
                self._called = Counter({key: count for key, count in self._called.items() if not key[0]})
                self._was = {key: names for key, names in self._was.items() if not key[0]}
            if isinstance(change, KeepStep):
                self._records[change.key] = change
                if change.done and change.error is None and change.kind != "since":
                    self._done.append(change)
                self._failed = None if change is self._failed else self._failed
                self._since_records = [one for one in self._since_records if one is not change]

    def report(self) -> None:
        """Report the steps that are done and committed."""
        while self._done:
            self._unit.report(self._done.pop(0), RunEnd.COMPLETED)

    # -- leaving -------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Add to the body's own unit what its commit does to the records.

        It commits turns, whose records go. A failure that the body has caught is kept: the body goes on behind it.
        """
        if any(key[0] for key in (*self._records, *self._forgotten, *self._called)):
            self._unit.unit.changes.append(LeaveTurns(self._hold.job_id))
        if self._failed is not None and self._failed.turn:
            self._failed = None
        self._since_records = [one for one in self._since_records if not one.turn]
        self._unit.unit.changes += [*self._since_records, *([] if self._failed is None else [self._failed])]

    def end(self, *, completes: bool) -> None:
        """Add to the last unit of the run what its end does to the records."""
        unit, hold = self._unit, self._hold
        if not completes:
            self.join()
        else:
            of_body = any(not turn for turn, _, _ in (*self._records, *self._forgotten))
            reads = tuple(sorted(unit.reads))
            unit.unit.changes.append(FinishSteps(hold.job_id, hold.run_no, hold.worker_id, of_body, reads))
            unit.unit.replays = of_body

    def unfinished(self) -> list[Change]:
        """Return what a run that fails leaves of the step that has failed it: the next run does that step anew."""
        failed, self._failed, self._since_records = self._failed, None, []
        known = None if failed is None else self._records.get(failed.key)
        if failed is None or known is None or (known.done and known.error is None):
            return []
        if failed.kind in ("call", "calls"):  # children that are still failed are asked again
            return [replace(failed, done=False, value=known.value)]
        return [ForgetSteps(failed.job_id, ((failed.name, failed.number),), failed.turn)]

    # -- code that changes ---------------------------------------------------------------------------------------

    def since(self, name: Any) -> bool:
        """Tell whether the job had not gone on behind this place before, and have a True kept."""
        self.arrive()
        self._check_kind(check_name(name), "since", self._kinds.setdefault(name, "since"))
        place = self._found(self._turn, 1, "since", (name,))
        if place.record is not None or any(one.key == place.key for one in self._since_records):
            return True
        if any(getattr(record, "id", 0) > self._passed for record in self._records.values()):
            return False  # an earlier run has gone on behind the last step that this one has come to
        self._since_records.append(self.record(place))
        return True

    def forget(self, text: Any) -> None:
        """Forget the record of a step, by default of the last call of the name; its number is free again."""
        self.arrive()
        name, number = parse_label(text)
        turn = self._turn
        if number is None:
            number = self._called[turn, name] or None
        names = (name, *self._was.get((turn, name), ()))
        for key in [key for key in self._records if key[0] == turn and key[1] in names and number in (None, key[2])]:
            del self._records[key]
            self._forgotten.add(key)
        if number is not None and self._called[turn, name] == number:
            self._called[turn, name] -= 1
