"""A handle of a job: each verb is one transaction, or inside a run a part of its unit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from ..awaiting import AioOf, Parts, here, wait_until
from ..model import changes, values
from ..model.checks import check_texts, is_keepable, is_number, shown, text_of
from ..model.columns import SHOWN
from ..model.errors import (
    DuplicateError,
    HasParentError,
    IllegalMoveError,
    InvalidAliasError,
    InvalidValueError,
    JobNotFoundError,
    NotAChildError,
    SettingsError,
    StepNameError,
    job_not_found,
)
from ..model.names import (
    alias_taken,
    at_most,
    channel_of_job,
    check_alias,
    check_child_name,
    check_key,
    check_tags,
    circle,
)
from ..model.port import WILDCARD
from ..model.status import FINISHED, Progress, Status, statuses_of
from ..model.steps import label, parse_label
from ..operations.changes.deletion import delete
from ..operations.changes.dependencies import check_waits
from ..operations.changes.family import check_may_move
from ..operations.changes.unit_of_work import carry_out
from ..operations.gates.queues import set_priority
from ..operations.runs.recovery import move_by_force
from ..operations.runs.terminations import cancel as cancel_together
from ..operations.runs.terminations import terminate_without_shutdown, to_cancel
from ..operations.runtime import Runtime
from ..operations.waiting import waiting_for
from ..store import asks, history, jobs, ports, trees
from ..store import dependencies as dependency_rows
from ..store.statement import picked
from ..unit import view as unit_view
from ..unit.open_unit import active, submit
from ..unit.view import HistoryEntry, Timer, timer_id
from .creation import create
from .drafts import (
    Drafts,
    check_child_name_is_free,
    draft_single,
    encode_state,
    move_of,
    moved_to,
    port_rows,
    stage_of,
    when,
)
from .log_entries import current_context
from .lookup import check_in_run, check_on_failure, ids_of, locate
from .port import Port
from .steps import Step, step_list

if TYPE_CHECKING:
    from ..aio import AioJob

T = TypeVar("T")


class Job:
    """A durable job: equal, hashable, picklable and JSON-able by its id. Attributes are the row's when it was read."""

    __slots__ = ("_first_task_id", "_origin", "_row", "_runtime_", "id")

    aio: AioOf[AioJob] = AioOf("AioJob")
    """The verbs as coroutines."""

    def __init__(self, job_id: int, *, runtime: Runtime | None = None, row: Any = None) -> None:
        self.id = int(job_id)
        self._runtime_ = runtime
        self._origin: Sequence[str] | None = None
        self._row = row
        self._first_task_id: str | None = None
        """The id of its first asking, if this handle comes from the call that made the job."""

    def __eq__(self, other: object) -> bool:
        return self.id == other.id if isinstance(other, Job) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.id)

    def __str__(self) -> str:
        return f"job:{self.id}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    def __reduce__(self) -> tuple[Any, ...]:
        origin = self._origin if self._runtime_ is None else _origin_of(self._runtime_)
        return (Job, (self.id,)) if origin is None else (_unpickled, (self.id, origin))

    def __json__(self) -> int:
        """Return what stands for the job in a JSON value: its id."""
        return self.id

    # -- what it is ----------------------------------------------------------------------------------------------

    @property
    def status(self) -> Status:
        """Where the job is in its life. ``queued`` during a run: it was asked for again meanwhile."""
        return Status(self._read().status)

    @property
    def task(self) -> str:
        """The name of its task."""
        return str(self._read().task)

    @property
    def queue(self) -> str:
        """The name of the queue its runs are sent to."""
        return str(self._read().queue)

    @property
    def args(self) -> list[Any]:
        """The positional arguments of each run."""
        decoded: list[Any] = values.decode(self._read().args)
        return decoded

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments of each run."""
        decoded: dict[str, Any] = values.decode(self._read().kwargs)
        return decoded

    @property
    def created_at(self) -> datetime | None:
        """When it was committed; None while the unit that makes it is not."""
        found: datetime | None = self._read().created_at
        return found

    @property
    def created_by(self) -> str | None:
        """Who made it, as given; ``job:<id>`` when a job did."""
        found: str | None = self._read().created_by
        return found

    @property
    def schedule(self) -> str | None:
        """The name of the schedule that made it; None if none did."""
        found: str | None = self._read().schedule
        return found

    @property
    def schedule_number(self) -> int | None:
        """Its number among what its schedule has made, from 1."""
        found: int | None = self._read().schedule_no
        return found

    @property
    def nominal_time(self) -> datetime | None:
        """The time for which its schedule made it, in UTC, however late that was."""
        found: datetime | None = self._read().nominal_at
        return None if found is None else found.astimezone(UTC)

    @property
    def ran_at(self) -> datetime | None:
        """When its last run began."""
        found: datetime | None = self._read().ran_at
        return found

    @property
    def task_id(self) -> str | None:
        """The Celery id of its open asking, or of the last one."""
        found: str | None = self._read().task_id
        return found

    @property
    def result(self) -> Any:
        """Celery's AsyncResult of its open asking, or of the last one."""
        return self._runtime.tasks.result(self.task_id) if self.task_id else None

    @property
    def info(self) -> dict[str, Any]:
        """Everything about the job that a person may want to see, as JSON values but for the times.

        Arguments, errors and tracebacks are shown as `sidejob_redact` leaves them.
        """
        row = self._read()
        redacted = self._runtime.settings.redacted
        error = values.decode(row.error) if row.error else None
        if error is not None:
            error = {**error, **{key: redacted(error[key]) for key in ("message", "traceback") if error.get(key)}}
        given = {}
        for key, column in SHOWN.items():
            value = getattr(row, column.name)
            given[key] = redacted(values.decode(value)) if column.is_json else value
        return {
            "id": self.id,
            **given,
            "status": row.status,
            "change": row.changes,
            **picked(row, "created_at", "ran_at", "ended_at", "task_id"),
            "unique": redacted(row.unique_key),
            "tags": [redacted(tag) for tag in self.tags],
            "tracked": self.tracked,
            "in_run": row.unit_no is not None,
            **picked(row, "asked_again", "run_no", "losses", "retries"),
            "error": error,
        }

    @property
    def exists(self) -> bool:
        """Whether the job is still there; asks the store."""
        _, is_new = self._pending()
        return is_new or bool(jobs.find(self._runtime.connections, [self.id]))

    def refresh(self) -> Job:
        """Read the row again, and return this handle; raises JobNotFoundError if the job is gone."""
        self._row = None
        self._read()
        return self

    # -- asking --------------------------------------------------------------------------------------------------

    def run(
        self,
        *,
        parent: bool = False,
        force: bool = False,
        fresh: bool = False,
        eta: datetime | None = None,
        countdown: float | timedelta | None = None,
        transaction: Any = None,
    ) -> Job | None:
        """Ask that the job (with `parent=True` its parent) run at least once from its beginning after this call.

        Without `force` only from queued, running, suspended or completed. Returns the job that was asked, or None if
        nothing was: its status forbids it, or there is no parent. With `transaction=`, and inside a run, the asking is
        judged when it is applied, so the job is returned.

        With `fresh` its steps are forgotten, those of a run in progress too: the next run does all of them again.
        """
        wait_s, due_at = when(self._runtime, eta=eta, countdown=countdown)
        ask = changes.Ask(self.id, force=force, of_parent=parent, due_at=due_at, wait_s=wait_s)
        asked = self if not parent else Job(self.id, runtime=self._runtime).parent
        if asked is None:
            return None
        if fresh and transaction is not None:
            raise IllegalMoveError(f"run(fresh=True) of job {asked.id} with transaction=: ask for it after the commit.")
        asked_for: list[changes.Change] = [changes.BeginAnew(asked.id, force=force), ask] if fresh else [ask]
        done = submit(self._runtime, "run", *asked_for, transaction=transaction)
        if done is None:
            return asked
        if done.wakes.refused & {asked.id, self.id}:
            return None
        return asked if transaction is not None else asked._forget()

    @property
    def timers(self) -> list[Timer]:
        """The job's timers that have not fired, soonest first; asks the store.

        In a run they are as its unit leaves them; those that it sets itself have no id before the commit.
        """
        pending, is_new = self._pending()
        stored = () if is_new else asks.pending_timers(self._runtime.connections, self.id)
        return self._found(unit_view.timers(pending, self.id, stored))

    def cancel_timer(self, timer: Timer | int) -> bool:
        """Cancel one of the job's timers, by its id or as `timers` shows it; return whether it was there.

        A cancelled timer never fires. One that has fired is not there any more: what it asked for stays asked for. A
        job that was queued for its last timer alone is then as it was before that was set; one that never ran is
        suspended. In a run it is cancelled by the commit, unless it fires before.
        """
        wanted = timer_id(timer)
        if active() is not None:
            is_there = any(each.id == wanted for each in self.timers)
            if is_there:
                self._do("cancel", changes.CancelTimer(self.id, wanted))
            return is_there
        return wanted in carry_out(self._runtime, "cancel", [changes.CancelTimer(self.id, wanted)]).wakes.found

    def depend_on(self, *jobs: Job | int | str, on_failure: str = "wait") -> Job:
        """Have the job, which has not begun, wait until these jobs have completed: jobs, ids or aliases.

        One that has completed already, or is gone, counts as completed. If one fails or is terminated, the job waits
        on (``wait``: it may be retried), fails without a call of its body (``fail``), or waits for it no longer
        (``run``). Raises CycleError if one of them waits for this job, IllegalMoveError if its first run has begun.
        """
        change = changes.DependOn(self.id, ids_of(self._runtime, jobs), check_on_failure(on_failure))
        unit = active()
        if unit is not None:
            check_in_run(self._runtime, unit, change, self._read())
        if change.on:
            self._do("depend", change)
        return self._forget()

    def undepend(self, *jobs: Job | int | str) -> Job:
        """Have the job wait for these jobs no longer; for none at all if none is given.

        A job whose run is to fail for another one still fails, unless none is given. Raises IllegalMoveError if its
        first run has begun.
        """
        on = ids_of(self._runtime, jobs) if jobs else None
        if active() is not None:
            check_waits(self._read())
        self._do("depend", changes.Undepend(self.id, on))
        return self._forget()

    @property
    def dependencies(self) -> list[Job]:
        """The jobs for which this one waits, oldest first; asks the store. In a run they are as its unit leaves them.

        One that has completed is not among them, even while others are waited for.
        """
        rows = {row.id: row for row in dependency_rows.dependencies_of(self._runtime.connections, self.id)}
        unit = active()
        ids = list(rows) if unit is None else unit_view.dependencies(unit.changes, self.id, rows)
        return self._found([Job(job_id, runtime=self._runtime, row=rows.get(job_id)) for job_id in ids])

    @property
    def dependents(self) -> list[Job]:
        """The jobs that wait for this one, oldest first; asks the store. In a run they are as the store has them."""
        rows = dependency_rows.dependents_of(self._runtime.connections, self.id)
        return self._found([Job(row.id, runtime=self._runtime, row=row) for row in rows])

    @property
    def waiting_for(self) -> list[str]:
        """Why the job's next run does not begin now; asks the store.

        Each is `dependencies`, `timer`, `retry`, `pause`, `limit`, `rate`, `pool`, `room` or `no worker`. Empty if it
        may begin, if it is in progress, and if no run is owed. `dependencies`: other jobs (`dependencies`) have not
        completed. `pause`, `limit`: those of its queue; `rate`: its own or its queue's. `room`:
        its last run wrote to a full port, and the job runs again when there is room. `no worker`: no live worker of the
        job's queue knows its task; the job goes on by itself once one does. In a run it is as the store has it.
        """
        _, is_new = self._pending()
        if is_new:
            return []
        found = waiting_for(self._runtime, self.id)
        if found is None:
            raise job_not_found(self.id)
        return found

    def set_priority(self, priority: int) -> Job:
        """Change the job's priority, from 0 to 9, higher is sooner; at once, also in a run, and for what waits already.

        In a managed queue the order is exact, and equal priorities keep theirs. In another queue a message that waits
        in the broker is sent again with the new priority: that makes it sooner, and not later.
        """
        if not is_number(priority, most=9):
            raise InvalidValueError(f"priority is a number from 0 to 9, higher is sooner; not {shown(priority)}.")
        set_priority(self._runtime, self.id, priority)
        return self._forget()

    def move(  # noqa: PLR0913 - what may be changed
        self,
        *,
        queue: str | None = None,
        task: Any = None,
        args: Any = None,
        kwargs: Mapping[str, Any] | None = None,
        priority: int | None = None,
        eta: datetime | None = None,
        countdown: float | timedelta | None = None,
        force: bool = False,
    ) -> Job:
        """Give the job, which is in no run, another queue, task, arguments, priority or time; None leaves it as it is.

        What workers have fetched of it already begins nothing any more. A job at rest stays at rest, unless a time is
        given. The queue of another `task` is that task's own, unless one is given. With `force` a run in progress loses
        its lease: nothing more of it is committed. Raises IllegalMoveError for a job that is terminating or terminated.
        """
        unit = active()
        if force and unit is not None:
            raise IllegalMoveError(f"move(force=True) of job {self.id} inside a run: it cannot be part of a unit.")
        row = self._read() if unit is not None else self._forget()._read()
        stage = stage_of(self._runtime, row, task, args, kwargs, queue=queue, priority=priority)
        change = move_of(self._runtime, row, stage, eta=eta, countdown=countdown)
        if unit is not None:
            check_may_move(self.id, row.status, in_run=row.unit_no is not None, has_time=change.has_time)
        told = changes.Log(self.id, "moved", moved_to(stage), time.monotonic())
        if force:
            move_by_force(self._runtime, change, told)
        else:
            submit(self._runtime, "move", change, told)
        return self._forget()

    def terminate(self, *, recursive: bool = False, without_shutdown: bool = False, transaction: Any = None) -> Job:
        """Ask for the job's shutdown, with `recursive` for everything below it too. It supersedes earlier asks.

        A run in progress finishes first. The ask survives whatever happens; only `run(force=True)` revives the job. If
        no worker of its queue knows its task, the job is terminated without its shutdown after a minute.

        With `without_shutdown` the job is terminated at once, and its shutdown is not called. If a run is in progress,
        in the job or with `recursive` below it, that job is terminating, with its shutdown, as without this option: its
        status tells. Not in a run, and not with `transaction=`: IllegalMoveError.
        """
        if without_shutdown and (transaction is not None or active() is not None):
            raise IllegalMoveError(
                f"terminate(without_shutdown=True) of job {self.id} inside a run, or with transaction=: it cannot be "
                "part of a unit, nor of your transaction."
            )
        if without_shutdown:
            terminate_without_shutdown(self._runtime, self.id, recursive=recursive)
        else:
            self._do("terminate", changes.Terminate(self.id, tree=recursive), transaction)
        return self if transaction is not None else self._forget()

    @property
    def terminated(self) -> bool:
        """Whether the job and everything below it are terminated; asks the store, which looks for one that is not.

        Where a million are terminated, that takes a second.
        """
        return self._found(trees.rest(self._runtime.connections, self.id, Status.TERMINATED))

    def delete(self) -> bool:
        """Delete the job and everything below it, if all are terminated; otherwise change nothing and return False."""
        if active() is not None:
            raise IllegalMoveError(f"delete() of job {self.id} inside a run: it cannot be part of a unit.")
        return delete(self._runtime, self.id)

    def wait(self, statuses: Iterable[str] = FINISHED, timeout: float | None = None) -> Job:
        """Block until the job is in one of `statuses`, and return its fresh handle; for clients, not for runs.

        Raises TimeoutError after `timeout` seconds, JobNotFoundError if the job is deleted meanwhile.
        """
        return here(self._waited(statuses, timeout))

    def _waited(self, statuses: Iterable[str] = FINISHED, timeout: float | None = None) -> Parts[Job]:
        if active() is not None:
            raise IllegalMoveError(
                "wait() inside a run would block its worker; suspend instead: a child's end wakes it."
            )
        if not isinstance(statuses, Iterable):
            raise InvalidValueError(
                f"wait() takes statuses; seconds go into timeout=, as in wait(timeout={statuses!r})."
            )
        wanted = statuses_of(statuses)
        if not (yield from wait_until(lambda: self.refresh().status in wanted, timeout)):
            why = " and ".join((yield lambda: self.waiting_for))
            raise TimeoutError(
                f"Job {self.id} is still {self.status} after {timeout} s; waited for {', '.join(sorted(wanted))}."
                + (f" It waits for: {why}." if why else "")
            )
        return self

    # -- family --------------------------------------------------------------------------------------------------

    @property
    def parent(self) -> Job | None:
        """The job this one is a child of."""
        unit = active()
        moved = {} if unit is None else unit_view.parents(unit.unit.changes)
        parent_id = moved[self.id] if self.id in moved else self._read().parent_id
        return None if parent_id is None else Job(parent_id, runtime=self._runtime)

    @property
    def children(self) -> dict[str, Job]:
        """The job's children by their names, oldest first; asks the store, which reads them all.

        A hundred thousand take some seconds, and a million half a minute and gigabytes of memory: `child` reads one,
        and `sidejob.iter_jobs(parent=)` reads a page at a time.

        In a run they are until its first commit as they were when the run began, or, where there are more than
        500, when it first asked for them.
        """
        found = {row.name: Job(row.id, runtime=self._runtime, row=row) for row in self._child_rows()}
        unit = active()
        if unit is not None:
            gained, gone = unit.seen.family(self.id)
            found = {name: child for name, child in found.items() if name not in gone and child.id not in gone}
            found.update({name: Job(child, runtime=self._runtime) for name, child in gained.items()})
        return self._found(found)

    def child(self, name: str) -> Job | None:
        """Return the child of this name, None if there is none."""
        check_texts(name=name)
        unit = active()
        if unit is None:
            child_id = self._found(jobs.child(self._runtime.connections, self.id, name))
            return None if child_id is None else Job(child_id, runtime=self._runtime)
        gained, gone = unit.seen.family(self.id)
        if name in gained:
            return Job(gained[name], runtime=self._runtime)
        found = unit.children.find(self.id, name)
        if found is None:
            return self._found(None)
        if gone & {name, found[0]}:
            return None
        return Job(found[0], runtime=self._runtime, row=found[1])

    def enqueue(
        self, /, task: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None, *, child_name: str, **options: Any
    ) -> Job:
        """Make a named child of this job; the parameters are those of `sidejob.enqueue`."""
        return enqueue(self._runtime, task, args, kwargs, parent=self, child_name=child_name, **options)

    def adopt(self, job: Job, name: str) -> None:
        """Make a job that has no parent a named child of this one."""
        check_child_name(name)
        if not isinstance(job, Job):
            raise InvalidValueError(f"adopt() takes a job, not {type(job).__name__}.")
        unit = active()
        if unit is not None:
            check_child_name_is_free(self._runtime, self.id, name)
            if job.parent is not None:
                raise HasParentError(f"Job {job.id} is a child of job {job.parent.id}; disown it there first.")
            above = unit.seen.ancestors(self.id)
            if job.id in above:
                raise circle(job.id, above)
        self._do("adopt", changes.Adopt(self.id, job.id, name))

    def disown(self, name_or_job: str | Job) -> None:
        """Make a child a job without a parent."""
        child = name_or_job.id if isinstance(name_or_job, Job) else name_or_job
        if not isinstance(name_or_job, Job):
            check_texts(name_or_job=child)
        if active() is not None:
            found = self.child(child) if isinstance(child, str) else name_or_job
            if not isinstance(found, Job) or found.parent != self:
                raise NotAChildError(f"Job {self.id} has no child {child!r}; see job.children.")
            child = found.id
        self._do("disown", changes.Disown(self.id, child))

    # -- names ---------------------------------------------------------------------------------------------------

    @property
    def aliases(self) -> list[str]:
        """The job's further names; asks the store."""
        unit = active()
        found = set(jobs.aliases_of(self._runtime.connections, self.id))
        if unit is not None:
            given, taken = unit.seen.aliases(self.id)
            found = (found | given.keys()) - taken
        return self._found(sorted(found))

    def add_alias(self, name: str) -> None:
        """Give the job a further name; a name it has already does no harm."""
        check_alias(name)
        unit = active()
        if unit is not None:
            owner = find(self._runtime, name)
            if owner is not None and owner != self:
                raise alias_taken(name, owner.id)
        self._do("alias", changes.AddAlias(self.id, name))

    def remove_alias(self, name: str) -> None:
        """Take a name from the job; InvalidAliasError if it is not one of its names."""
        check_alias(name)
        if active() is not None and name not in self.aliases:
            raise InvalidAliasError(f"Job {self.id} has no alias {name!r}; see job.aliases.")
        self._do("alias", changes.RemoveAlias(self.id, name))

    # -- finding and following it --------------------------------------------------------------------------------

    @property
    def tags(self) -> list[str]:
        """The job's tags, in the order in which it got them; asks the store."""
        pending, is_new = self._pending()
        found = [] if is_new else jobs.tags_of(self._runtime.connections, self.id)
        return self._found(unit_view.tags(pending, self.id, found))

    def tag(self, *names: str) -> Job:
        """Give the job tags, after those that it has; a tag that it has keeps its place."""
        if tags := check_tags(names, where="tag()"):
            self._do("tag", changes.Tag(self.id, tags))
        return self

    def untag(self, *names: str) -> Job:
        """Take tags from the job; those that it does not have do no harm."""
        if tags := check_tags(names, where="untag()"):
            self._do("untag", changes.Untag(self.id, tags))
        return self

    @property
    def progress_of(self) -> Progress | None:
        """How far its present or last run is, as that has said last with `progress`; None without. Asks the store."""
        row = jobs.progress(self._runtime.connections, self.id)
        if row is None:
            return self._found(None)
        return Progress(row.done, row.total, row.note, row.run_no, row.told_at)

    @property
    def history(self) -> list[HistoryEntry]:
        """What has happened to the job, oldest first: its runs and its own entries; asks the store.

        The first run and the last ones are kept, as many as `sidejob_history` says, and as many entries.
        """
        pending, is_new = self._pending()
        rows = () if is_new else history.read(self._runtime.connections, self.id)
        return self._found(unit_view.history(pending, self.id, rows, self._runtime.settings.redacted))

    def log(self, /, message: str, **data: Any) -> Job:
        """Make an entry in the job's history; in a run it is part of the unit, and stays if the run raises."""
        if not isinstance(message, str) or not message:
            raise InvalidValueError(f"log() takes a message, a text, and data by keywords; not {shown(message)}.")
        check_texts(message=message)
        limit = self._runtime.settings.max_value_bytes
        detail = values.encode(data, limit=limit, what="data of a history's entry") if data else None
        unit = active()
        of_own = unit is not None and unit.hold.job_id == self.id
        run = (unit.hold.run_no, unit.hold.worker_id) if unit is not None and of_own else (None, None)
        self._do("log", changes.Log(self.id, message, detail, time.monotonic(), *run))
        return self

    @property
    def tracked(self) -> bool:
        """Whether the job is tracked; asks the store."""
        pending, is_new = self._pending()
        found = not is_new and jobs.is_tracked(self._runtime.connections, self.id)
        return self._found(unit_view.tracked(pending, self.id, found))

    def track(self) -> Job:
        """List the job in `sidejob.tracked()`, and have its changes announced on ``/sidejob/tracked``."""
        self._do("track", changes.Track(self.id, on=True))
        return self

    def untrack(self) -> Job:
        """Track the job no more."""
        self._do("untrack", changes.Track(self.id, on=False))
        return self

    @property
    def steps(self) -> list[Step]:
        """The steps that the job has kept since it completed last, in the order in which they began; asks the store.

        Values and errors are shown as `sidejob_redact` leaves them.
        """
        return self._found(step_list(self._runtime.connections, self.id, self._runtime.settings.redacted))

    def forget(self, *names: str) -> None:
        """Remove the records of steps, so that the next run does them again: of a name, or of one as ``"charge#2"``.

        It asks for no run. Raises StepNameError for a name that no step can have.
        """
        if found := tuple(map(parse_label, names)):
            self._do("forget", changes.ForgetSteps(self.id, found))

    # -- ports ---------------------------------------------------------------------------------------------------

    def input(self, name: str) -> Port:
        """Return the input port of this name."""
        return Port(self, "in", name)

    def output(self, name: str) -> Port:
        """Return the output port of this name."""
        return Port(self, "out", name)

    @property
    def inports(self) -> list[Port]:
        """All input ports, by name."""
        return self._ports("in")

    @property
    def outports(self) -> list[Port]:
        """All output ports, by name."""
        return self._ports("out")

    def configure_ports(self, inports: Any = None, outports: Any = None) -> None:
        """Replace the job's ports by its task's own and the given ones; others go, with their packets.

        If only one of the two is given, the ports of the other direction stay as they are. Without either, the job has
        its task's own ports alone.
        """
        given: dict[changes.Direction, Any] = {"in": inports, "out": outports}
        directions = tuple(name for name, ports in given.items() if ports is not None) or tuple(given)
        rows = port_rows(self._runtime.tasks.ports(self.task), inports, outports)
        chosen = tuple(row for row in rows if row.direction in directions)
        self._do("ports", changes.ConfigurePorts(self.id, chosen, directions))

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def state(self) -> dict[str, Any]:
        """The user's JSON on the job; asks the store each time."""
        return {key: values.decode(text) for key, text in self._state().items()}

    def get(self, key: str, default: Any = None) -> Any:
        """Return one key of the state."""
        found = self._state(check_key(key))
        return values.decode(found[key]) if key in found else default

    def set(self, /, mapping: Mapping[str, Any] | None = None, *, transaction: Any = None, **more: Any) -> Job:
        """Set keys of the state, all at once."""
        if not isinstance(mapping, Mapping | None):
            raise InvalidValueError(
                'set() takes keys with their values, as set(page=7) or set({"page": 7}), not '
                f"a {type(mapping).__name__}."
            )
        texts = encode_state({**(mapping or {}), **more}, limit=self._runtime.settings.max_value_bytes)
        if texts:
            self._do("set", changes.SetState(self.id, texts), transaction)
        return self

    def unset(self, *keys: str, transaction: Any = None) -> Job:
        """Remove keys of the state; those it does not have do no harm."""
        if keys:
            given = tuple(map(check_key, at_most(keys, "keys of the state")))
            self._do("unset", changes.UnsetState(self.id, given), transaction)
        return self

    def publish(self, message: Any) -> None:
        """Publish on the job's own channel, ``/sidejob/job/<id>``."""
        limit = self._runtime.settings.max_value_bytes
        text, context = values.encode(message, limit=limit, what="message"), current_context(limit=limit)
        self._do("publish", changes.Publish(channel_of_job(self.id), text, context))

    # ------------------------------------------------------------------------------------------------------------

    @property
    def _runtime(self) -> Runtime:
        if self._runtime_ is None:
            self._runtime_ = _runtime_of(self._origin)
        return self._runtime_

    def _read(self) -> Any:
        if self._row is None:
            unit = active()
            new = unit.seen.new_jobs().get(self.id) if unit is not None else None
            if new is not None:
                return unit_view.row_of(new)
            found = jobs.find(self._runtime.connections, [self.id])
            if not found:
                raise job_not_found(self.id)
            self._row = found[0]
        return self._row

    def _pending(self) -> tuple[Sequence[changes.Change], bool]:
        """Return the changes of the unit in progress, none outside of a run, and whether they make this job."""
        unit = active()
        pending = () if unit is None else unit.changes
        return pending, self.id in unit_view.new_jobs(pending)

    def _found(self, found: T) -> T:
        """Return what was found of the job; if that is nothing, raise JobNotFoundError unless the job is there."""
        if found:
            return found
        unit = active()
        is_own = unit is not None and unit.hold.job_id == self.id
        made_elsewhere = self._row is not None and self._row.created_at is None  # not committed, for all we know
        if not is_own and not made_elsewhere and not self.exists:
            raise job_not_found(self.id)
        return found

    def _ports_made(self) -> dict[tuple[str, str], Any]:
        """Return the ports of a job that only the caller's transaction can see yet; they are not stored for us."""
        return unit_view.ports_made(getattr(self._row, "ports", ()))

    def _forget(self) -> Job:
        """Return another handle, whose row is unread: what was asked has changed it."""
        return Job(self.id, runtime=self._runtime)

    def _state(self, key: str | None = None) -> dict[str, str]:
        unit = active()
        if unit is not None:
            return self._found(unit.seen.state(self.id, key))
        return self._found(jobs.read_state(self._runtime.connections, self.id, key))

    def _child_rows(self) -> Iterable[Any]:
        unit = active()
        if unit is not None and unit.hold.job_id == self.id:
            return unit.children.all()
        return jobs.children(self._runtime.connections, self.id)

    def _ports(self, direction: changes.Direction) -> list[Port]:
        unit = active()
        found = unit.seen.ports(self.id) if unit is not None else ports.of_job(self._runtime.connections, self.id)
        names = self._found([name for side, name in found if side == direction])
        return [Port(self, direction, name) for name in sorted(names) if name != WILDCARD]

    def _do(self, name: str, change: changes.Change, transaction: Any = None) -> None:
        submit(self._runtime, name, change, transaction=transaction)


def find(runtime: Runtime, id_or_alias: int | str | Job) -> Job | None:
    """Return the job of this id or alias; None only if there is none."""
    found = locate(runtime, _id_of(id_or_alias))
    return None if found is None else Job(found[0], runtime=runtime, row=found[1])


def get(runtime: Runtime, id_or_alias: int | str | Job) -> Job:
    """Return the job of this id or alias; raises JobNotFoundError."""
    found = find(runtime, id_or_alias)
    if found is None:
        raise job_not_found(id_or_alias)
    return found


def find_by_task_id(runtime: Runtime, task_id: str) -> Job | None:
    """Return the job one of whose askings has this Celery task id."""
    task_id = text_of(task_id)
    row = jobs.find_by_task_id(runtime.connections, task_id) if is_keepable(task_id) else None
    return None if row is None else Job(row.id, runtime=runtime, row=row)


def enqueue(runtime: Runtime, task: Any, args: Any = (), kwargs: Any = None, **options: Any) -> Job:
    """Make one job, in one transaction or as part of the run's unit; nothing of it is left behind after an error."""
    transaction = _borrowed(runtime, options.pop("transaction", None))
    item = _with_parent({"task": task, "args": args, "kwargs": kwargs, **options})
    new = draft_single(runtime, item, transaction)
    return _create(runtime, [new], transaction)[0]


def enqueue_many(runtime: Runtime, items: Iterable[Mapping[str, Any]], transaction: Any = None) -> list[Job]:
    """Make jobs, all or none: in the run's unit, the caller's transaction or one of ours.

    An item is the arguments of `draft`. An item that is refused is named by its place.
    """
    transaction, new = _borrowed(runtime, transaction), []
    drafts = Drafts(runtime, transaction)
    for n, item in enumerate(items):
        try:
            new.append(drafts.draft(_with_parent(item)))
        except (ValueError, TypeError, LookupError) as error:
            error.args = (f"items[{n}] of enqueue_many(): {error}",)
            raise
    return _create(runtime, new, transaction)


def fork(runtime: Runtime, source: Job, before: str | None, changed: Mapping[str, Any]) -> Job:
    """Make a job like another one, with its state and with its finished steps, those before the step `before`.

    Raises StepNameError if that step is not finished.
    """
    there = {(step.name, step.number) for step in source.steps if step.done}
    place = None
    if before is not None:
        name, number = parse_label(before)
        place = (name, number or 1)
        if place not in there:
            known = ", ".join(sorted(label(*each) for each in there)) or "none"
            raise StepNameError(f"Job {source.id} has not finished a step {before!r}; it has finished: {known}.")
    row = source._forget()._read()
    like = {
        "task": row.task,
        "args": values.decode(row.args),
        "kwargs": values.decode(row.kwargs),
        "queue": row.queue,
        "priority": row.priority,
        "state": source.state,
        "created_by": f"fork:{source.id}",
    }
    new = draft_single(runtime, _with_parent({**like, **changed}), None)
    new = new.but(id=jobs.next_ids(runtime.connections, 1)[0])
    submit(runtime, "fork", new, changes.CopySteps(new.id, source.id, place))
    return _handle(runtime, new, None)


def _borrowed(runtime: Runtime, transaction: Any) -> Any:
    return None if transaction is None else runtime.connections.borrow(transaction)


def _with_parent(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a draft with the id of the parent in place of its handle."""
    return {**item, "parent": _id_of(item["parent"])} if "parent" in item else item


def _create(runtime: Runtime, drafts: Sequence[changes.NewJob], transaction: Any) -> list[Job]:
    try:
        made = create(runtime, drafts, transaction)
    except DuplicateError as error:
        error.job = Job(error.job_id, runtime=runtime) if error.job_id is not None else None
        raise
    return [_handle(runtime, new, transaction) for new in made]


def cancel(runtime: Runtime, jobs_: Iterable[Job | int | str], *, with_dependents: bool) -> list[Job]:
    """Terminate jobs, all or none; inside a run by its commit."""
    named = []
    for job in jobs_:
        found = locate(runtime, _id_of(job))
        if found is None:
            raise JobNotFoundError(f"There is no job {job!r} to be cancelled: it was deleted, or never committed.")
        named.append(found[0])
    unit = active()
    if unit is None:
        ids = cancel_together(runtime, named, dependents=with_dependents) if named else []
    else:
        ids = to_cancel(runtime.connections, named, dependents=with_dependents)
        for job_id in ids:
            unit.add(changes.Terminate(job_id))
    return [Job(job_id, runtime=runtime) for job_id in ids]


def _handle(runtime: Runtime, new: changes.NewJob | int, transaction: Any) -> Job:
    """Return the handle of a job that was made, or of an open one: then `new` is its id.

    Only the caller's transaction can see what is made in it: until its commit the handle shows what was written there.
    """
    if isinstance(new, int):
        return Job(new, runtime=runtime)
    job = Job(new.id, runtime=runtime, row=None if transaction is None else unit_view.row_of(new))
    job._first_task_id = new.task_id
    return job


def _id_of(job: Any) -> Any:
    return job.id if isinstance(job, Job) else job


def _no_runtime(origin: Sequence[str] | None) -> Runtime:
    raise SettingsError("This job handle belongs to no store: make `SideJob(app)` before a handle is used.")


def _no_origin(runtime: Runtime) -> tuple[str, ...] | None:
    return None


_runtime_of: Callable[[Sequence[str] | None], Runtime] = _no_runtime
_origin_of: Callable[[Runtime], tuple[str, ...] | None] = _no_origin


def runtime_here() -> Runtime:
    """Return the runtime of the present app, or of the only one here; SettingsError without one."""
    return _runtime_of(None)


def use_apps(
    runtime_of: Callable[[Sequence[str] | None], Runtime], origin_of: Callable[[Runtime], tuple[str, ...] | None]
) -> None:
    """Set how an unpickled handle finds its runtime, and how a pickled one says from which app it comes."""
    global _runtime_of, _origin_of
    _runtime_of, _origin_of = runtime_of, origin_of


def _unpickled(job_id: int, origin: Sequence[str]) -> Job:
    job = Job(job_id)
    job._origin = origin
    return job
