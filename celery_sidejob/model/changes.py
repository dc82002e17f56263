"""The changes that a caller can ask of the store, as values: clients and units pass them to `operations`.

Outside a run a verb applies its change in one transaction. Inside a run the unit collects changes, and its commit
applies them in the order in which they were made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from .capacity import Admission
from .columns import JobColumns
from .steps import StepKey, StepKind
from .unique import Unique

Direction = Literal["in", "out"]

OnFailure = Literal["wait", "fail", "run"]
"""What a job does when a job that it depends on has failed or was terminated."""

PortKey = tuple[int, Direction, str]
"""Names a port: (job id, direction, name)."""


@dataclass(frozen=True, slots=True)
class PortRow:
    """A port to be made: its default as JSON text, None for no default."""

    direction: Direction
    name: str
    default: str | None = None
    channels: tuple[str, ...] = ()
    limit: int | None = None


@dataclass(frozen=True, kw_only=True)
class NewJob(JobColumns):
    """A job to be created: its columns, and the values for other tables. Its id is 0 until the store gives it one.

    Arguments, options and state are JSON text.
    """

    id: int = 0
    task_id: str
    options: str | None = None
    due_at: datetime | None = None
    wait_s: float | None = None
    ports: tuple[PortRow, ...] = ()
    aliases: tuple[str, ...] = ()
    state: dict[str, str] = field(default_factory=dict)
    depends_on: tuple[tuple[int, OnFailure], ...] = ()
    """The jobs that it waits for, each with the effect of that job's failure."""
    tags: tuple[str, ...] = ()
    batch: int | None = None
    """The batch that it belongs to."""
    unique: Unique | None = None
    replaces: int | None = None
    """The job whose unique key this job takes over, if no run of that job has begun."""
    admission: Admission | None = None
    slot: int | None = None
    """The shard of its capacity pool in which it has its slots, once it was admitted."""

    def but(self, **values: Any) -> NewJob:
        """Return it with other values; `dataclasses.replace` takes a third of the time of a call that makes many."""
        other = object.__new__(NewJob)
        vars(other).update(vars(self), **values)
        return other


@dataclass(frozen=True, slots=True)
class OfJob:
    """A change of one job."""

    job_id: int


@dataclass(frozen=True, slots=True)
class OfPort(OfJob):
    """A change of one port of a job."""

    direction: Direction
    port: str


@dataclass(frozen=True, slots=True)
class Ask(OfJob):
    """A request that the job (`of_parent`: its parent) run at least once after this, or after a given time."""

    force: bool = False
    of_parent: bool = False
    due_at: datetime | None = None
    wait_s: float | None = None
    of_wait: bool = False
    """Whether it ends the wait that its run begins, if no other run begins before."""

    @property
    def kind(self) -> str:
        """What its timer asks for: a run, a forced run, or the end of a wait."""
        return "timeout" if self.of_wait else "force" if self.force else "run"


@dataclass(frozen=True, slots=True)
class CancelTimer(OfJob):
    """A timer of the job that shall not fire."""

    timer_id: int


@dataclass(frozen=True, slots=True)
class Terminate(OfJob):
    """A request that the job be shut down (`tree`: with everything below it)."""

    tree: bool = False


@dataclass(frozen=True, slots=True)
class Write(OfPort):
    """Packets for a port, each as JSON texts (value, context, options).

    `notify` asks the port's reader to run; `as_default` sets the port's default to the last value instead.
    """

    packets: tuple[tuple[str, str | None, str | None], ...]
    notify: bool = True
    as_default: bool = False


@dataclass(frozen=True, slots=True)
class Connect:
    """Moves all packets of the port `source` to each of the ports `targets`, and copies its default.

    `notify` asks the readers of ports that get packets, or another default, to run.
    """

    source: PortKey
    targets: tuple[PortKey, ...]
    notify: bool = True


@dataclass(frozen=True, slots=True)
class Publish:
    """A message for a channel: for every input port that subscribes to it or to an ancestor.

    `options` are those of its packets, as JSON text.
    """

    channel: str
    value: str
    context: str | None = None
    options: str | None = None


@dataclass(frozen=True, slots=True)
class Announce:
    """A message that is only announced, after the commit: no port receives it."""

    channel: str
    value: str


@dataclass(frozen=True, slots=True)
class SetState(OfJob):
    """Keys of the job's state, as JSON texts."""

    values: dict[str, str]


@dataclass(frozen=True, slots=True)
class UnsetState(OfJob):
    """Keys to be removed from the job's state."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SetDefault(OfPort):
    """A port's default as JSON text; None clears it. `notify` asks the port's reader to run if that changes it."""

    value: str | None
    notify: bool = False


@dataclass(frozen=True, slots=True)
class SetChannels(OfPort):
    """A port's channels."""

    channels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MarkReceived(OfPort):
    """A port of a job whose packets a step receives: late packets do not ask the job once it has completed."""


@dataclass(frozen=True, slots=True)
class ConfigurePorts(OfJob):
    """All ports of these directions that the job shall have; other ports are removed, with their packets."""

    ports: tuple[PortRow, ...]
    directions: tuple[Direction, ...]


@dataclass(frozen=True, slots=True)
class AddAlias(OfJob):
    """A further name of the job."""

    name: str


@dataclass(frozen=True, slots=True)
class RemoveAlias(OfJob):
    """A name that the job loses."""

    name: str


@dataclass(frozen=True, slots=True)
class Adopt:
    """A job without a parent becomes a named child."""

    parent_id: int
    child_id: int
    name: str


@dataclass(frozen=True, slots=True)
class Disown:
    """A child becomes a job without a parent; by its name, or by its id."""

    parent_id: int
    child: int | str


@dataclass(frozen=True, slots=True)
class DependOn(OfJob):
    """Further jobs that the job waits for."""

    on: tuple[int, ...]
    on_failure: OnFailure


@dataclass(frozen=True, slots=True)
class Undepend(OfJob):
    """Jobs that the job waits for no longer; all of them with None."""

    on: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Stage:
    """What a job does from its next run on; a value of None keeps the present one. Arguments are JSON text.

    With another task, `columns` are the columns that follow from its options, and `ports` are its ports. `pool` has the
    columns of the capacity pool into which the stage moves the job; None keeps the job's pool.
    """

    task: str | None = None
    queue: str | None = None
    priority: int | None = None
    args: str | None = None
    kwargs: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    ports: tuple[PortRow, ...] = ()
    pool: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Move(OfJob):
    """Another stage for a job that is in no run. With `has_time` the job runs at that time, otherwise now."""

    stage: Stage
    has_time: bool = False
    due_at: datetime | None = None
    wait_s: float | None = None

    @property
    def is_later(self) -> bool:
        """Whether the time is still to come."""
        return self.due_at is not None or self.wait_s is not None


@dataclass(frozen=True, slots=True)
class JoinBatch:
    """Jobs and durable tasks that are added to a batch."""

    batch_id: int
    job_ids: tuple[int, ...] = ()
    task_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CloseBatch:
    """A batch that is closed: it takes no more members."""

    batch_id: int


@dataclass(frozen=True, slots=True)
class RememberInputs(OfJob):
    """The defaults with which `for_inputs` was called; a further call with the same defaults changes nothing."""

    memo: str


@dataclass(frozen=True, slots=True)
class Tag(OfJob):
    """Tags that are added to the job, after its present tags."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Untag(OfJob):
    """Tags that are removed from the job."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Log(OfJob):
    """An entry of the job itself in its history; `made_at` is a moment of the monotonic clock, `detail` JSON text."""

    message: str
    detail: str | None
    made_at: float
    run_no: int | None = None
    worker_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepStep(OfJob):
    """The new record of a step; value and error are JSON texts.

    While it is not `done`, the value of a call is a list: the ids of its children, how many there will be, and the ids
    of failed ones that are still to be asked again; `due_at` or `wait_s` tell how long a receive waits, or when a
    failed step is tried again. A sleep is done once that time has come.
    """

    turn: str
    name: str
    number: int
    kind: StepKind
    run_no: int
    worker_id: int
    done: bool = True
    value: str | None = None
    error: str | None = None
    tries: int = 1
    due_at: datetime | None = None
    wait_s: float | None = None
    took_s: float = 0.0

    @property
    def key(self) -> StepKey:
        """The key under which it is found."""
        return self.turn, self.name, self.number


@dataclass(frozen=True, slots=True)
class ForgetSteps(OfJob):
    """Records that are removed from the job: of these names, (name, number), with None for all numbers of a name."""

    names: tuple[tuple[str, int | None], ...]
    turn: str | None = None
    """The turn whose records they are; None for those of all turns, and of none."""


@dataclass(frozen=True, slots=True)
class LeaveTurns(OfJob):
    """The records of the job's turns, which are committed, so that their packets will not come again."""


@dataclass(frozen=True, slots=True)
class FinishSteps(OfJob):
    """All records of a job whose run completes; its history lists them."""

    run_no: int
    worker_id: int
    of_body: bool
    """Whether some records belong to no turn: then late events do not ask the job for a further run."""
    reads: tuple[str, ...]
    """Input ports that the body has read outside of steps: late packets on these ask for a further run."""


@dataclass(frozen=True, slots=True)
class BeginAnew(OfJob):
    """Removes all records of a job, and those that the run in progress will still make.

    Without `force` this is done only if the job may be asked.
    """

    force: bool


@dataclass(frozen=True, slots=True)
class CopySteps(OfJob):
    """The finished records of another job, from before the step `before`; None for all of them."""

    source: int
    before: tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class Track(OfJob):
    """Whether the job is tracked."""

    on: bool


StepChange = KeepStep | ForgetSteps | LeaveTurns | FinishSteps | BeginAnew | CopySteps

FamilyChange = AddAlias | RemoveAlias | Adopt | Disown

BatchChange = JoinBatch | CloseBatch

DependencyChange = DependOn | Undepend

FindingChange = Tag | Untag | Track

PortChange = Write | SetDefault | SetChannels | MarkReceived | ConfigurePorts

Change = NewJob | OfJob | FamilyChange | BatchChange | Publish | Announce | Connect
"""Whatever can be asked of the store: something of a job, or of its family, a batch or a channel."""
