"""The same on a real Postgres: jobs whose runs follow a script, in a process that a test may let die anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from celery_sidejob import Job, RunningJob
from celery_sidejob.model.crash_points import Died
from celery_sidejob.operations.changes.follow_up import apply_due_timers, terminate_page
from celery_sidejob.operations.hold import Hold
from celery_sidejob.operations.runs import recovery
from tests.graph.model import MAX_LOSSES, MAX_RETRIES, STEP_S, Change, Label
from tests.graph.script import Played, Script
from tests.tools.crash_points import lost
from tests.tools.in_process import Stage
from tests.twins.machine import outcome
from tests.twins.real import RealTwin, crash

LOOK = f"""
SELECT j.id, j.status, p.created_by::int, j.name, j.run_kind, j.run_no,
  j.unit_no IS NOT NULL AND j.wakes > j.wakes_taken, j.terminate_tree AND j.status IN ('terminating', 'terminated'),
  j.losses, j.retries,
  ARRAY(SELECT a.name FROM aliases a WHERE a.job_id = j.id ORDER BY a.name),
  ARRAY(SELECT d.reason FROM dead d WHERE d.job_id = j.id),
  (SELECT coalesce(json_agg(json_build_array(t.ask, t.accepted,
      greatest(0, round(extract(epoch FROM t.due_at - now()) / {STEP_S}))) ORDER BY t.id), '[]')
    FROM timers t WHERE t.job_id = j.id),
  (SELECT CASE WHEN m.locked_by IS NULL THEN greatest(0, round(extract(epoch FROM m.due_at - now()) / {STEP_S})) END
    FROM messages m WHERE m.job_id = j.id),
  j.created_by::int
FROM jobs j LEFT JOIN jobs p ON p.id = j.parent_id ORDER BY j.id"""

DUE = "SELECT job_id FROM timers WHERE due_at <= now() OR NOT accepted GROUP BY job_id ORDER BY min(id)"
"""As the sweeper reads them, but for the order of those that are due at the same instant, which is nobody's promise."""

NEVER = 10**12
"""No job has an id like this."""
CALLS = {"add_alias": "alias", "remove_alias": "alias"}
"""The names of transactions that are not those of their calls."""


class Real(RealTwin):
    """Does with jobs what `World` does with its own."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self.task = stage.task(
            self._body, name="graph.node", max_losses=MAX_LOSSES, max_retries=MAX_RETRIES, shared=False
        )
        self.task.on_shutdown(self._body)
        self._ids: dict[Label, int] = {}
        self._script = Script()
        self._played = Played()

    def begin(self) -> None:
        """Make a new world."""
        self.empty()
        self._ids = {}

    def look(self) -> dict[Label, tuple[Any, ...]]:
        """Return the jobs, by label."""
        self._turn_pages()
        found = {}
        for job_id, *columns, label in self.stage.sql(LOOK):
            self._ids[label] = job_id
            found[label] = tuple(columns)
        return found

    # -- what clients do -----------------------------------------------------------------------------------------

    def job(self, label: Label) -> Job:
        return Job(self._ids.get(label, NEVER + label), runtime=self.stage.runtime)

    def enqueue(
        self, label: Label, parent: Label | None, name: str | None, aliases: Sequence[str], countdown: int,
        **options: Any,
    ) -> Label:  # fmt: skip
        above = {} if parent is None else {"parent": self.job(parent), "child_name": name}
        made = self.task.enqueue(
            **above, aliases=aliases, countdown=countdown or None, created_by=str(label), **options
        )
        self._ids[label] = made.id
        return label

    def run(self, label: Label, parent: bool, force: bool, countdown: int, **options: Any) -> Label | None:
        return self._label(self.job(label).run(parent=parent, force=force, countdown=countdown or None, **options))

    def terminate(self, label: Label, recursive: bool, **options: Any) -> None:
        self.job(label).terminate(recursive=recursive, **options)

    def adopt(self, parent: Label, child: Label, name: str) -> None:
        self.job(parent).adopt(self.job(child), name)

    def disown(self, parent: Label, child: Label | str) -> None:
        self.job(parent).disown(child if isinstance(child, str) else self.job(child))

    def add_alias(self, label: Label, alias: str) -> None:
        self.job(label).add_alias(alias)

    def remove_alias(self, label: Label, alias: str) -> None:
        self.job(label).remove_alias(alias)

    def delete(self, label: Label) -> bool:
        return self.job(label).delete()

    def show(self, label: Label) -> Any:
        job = self.job(label)
        named = [self._label(self.stage.sidejob.find(alias)) for alias in job.aliases]
        return self._look(label), job.terminated, named

    def retry_dead(self, label: Label) -> Label | None:
        for entry in self.stage.sidejob.dead.list():
            if entry.job_id == self._ids.get(label):
                return self._label(self.stage.sidejob.dead.retry(entry.id))
        return None

    def lend(self, calls: Sequence[Change], meanwhile: Change | None, commits: bool) -> list[Any]:
        with self.transaction(commits) as connection:
            found = [outcome(self._lend, connection, *call) for call in calls]
            if meanwhile is not None:
                self.stage.outside(lambda: found.append(outcome(self.do, *meanwhile)))
        return found

    def _lend(self, connection: Any, name: str, *given: Any) -> Any:
        return self.do(name, *given, transaction=connection)

    def dying(self, when: str, call: Change) -> Any:
        """Have the process of a call die, or its answer be lost, at its commit."""
        with self._at(CALLS.get(call[0], call[0]), when):
            try:
                return getattr(self, call[0])(*call[1:])
            except Died:
                return "died"

    def sweep(self) -> None:
        for (job_id,) in self.stage.sql(DUE):
            apply_due_timers(self.stage.runtime, job_id)
            self._turn_pages()

    def _turn_pages(self) -> None:
        """Go on with recursive terminations where a process has died, or never got an answer."""
        while terminate_page(self.stage.runtime):
            pass

    def pass_time(self, seconds: int) -> None:
        self.stage.sql("UPDATE timers SET due_at = due_at - make_interval(secs => %s)", seconds)
        self.stage.sql("UPDATE messages SET due_at = due_at - make_interval(secs => %s)", seconds)

    # -- what workers do -----------------------------------------------------------------------------------------

    def claim(self, label: Label, for_run: int, when: str) -> Hold | None:
        """Begin the run that a delivery announces, by a worker of its own."""
        with self._at("claim", when):
            return self.stage.claim(
                self.job(label), worker_id=self.stage.new_worker(), for_run=for_run, in_page=not when
            )

    def perform(self, hold: Hold, script: Script) -> Played:
        """Do a run by a script."""
        self._script, self._played = script, Played()
        try:
            self.stage.perform(hold)
        except Died:
            self._played.how = "died"
        finally:
            self.at("end:before-commit", _nothing)
            self.at("end:after-commit", _nothing)
            self.between(_nothing)
        error = self.stage.raised.pop(hold.job_id, None)
        if error is not None:
            self._played.how = type(error).__name__
        return self._played

    def is_refused(self, hold: Hold) -> bool:
        """Whether the run that was performed last was told that it is not its job's current one."""
        return "no longer its current run" in self.stage.ignored.get(hold.job_id, "")

    def rescue(self, hold: Hold, when: str) -> Any:
        """Rescue a run; the process that does it may die as well."""
        with self._at("rescue", when):
            try:
                return self.lose(hold)
            except Died:
                return "died"

    def give_back(self, hold: Hold) -> None:
        """Have the worker stop as planned."""
        recovery.release(self.stage.runtime, hold.job_id, run_no=hold.run_no, worker_id=hold.worker_id, wait=True)

    def _body(self, job: RunningJob) -> None:
        seen = self._played.seen
        for step in self._script.steps:
            seen.append(outcome(self._step, job, *step))
        self._arm("end", self._script.at_end)
        match self._script.end:
            case "suspend":
                job.suspend()
            case "fail":
                raise ZeroDivisionError
            case "retry":
                raise job.retry(countdown=self._script.wait)

    def _step(self, job: RunningJob, name: str, *given: Any) -> Any:
        match name:
            case "meanwhile":
                found: list[Any] = []
                self.stage.outside(lambda: found.append(outcome(self.do, *given[0])))
                return found[0]
            case "checkpoint":
                return self.do("_checkpoint", job, given[0])
            case "look":
                return self.do("_look", given[0])
            case "block":
                return self.do("_block", job, *given)
        return self.do(name, *given)

    def _checkpoint(self, job: RunningJob, at: Change) -> None:
        self._arm("checkpoint", at)
        try:
            job.checkpoint()
        finally:
            self._turn_pages()
            self.at("checkpoint:before-commit", _nothing)
            self.at("checkpoint:after-commit", _nothing)
            self.between(_nothing)

    def _block(self, job: RunningJob, calls: Sequence[Change], how: str) -> list[Any]:
        """Have calls be done in a block, whose transaction is committed, rolled back, or dies."""
        with self.stage.connect(autocommit=False) as connection:
            with job.unit(transaction=connection):
                seen = [outcome(self.do, *call) for call in calls]
                if how == "crash in it":
                    crash()
            if how == "crash before":
                crash()
            if how == "roll back":
                connection.rollback()
                return seen
            connection.commit()
            if how == "crash after":
                crash()
        self.sweep()
        return seen

    def _look(self, label: Label) -> Any:
        job = self.job(label)
        status, parent = str(job.refresh().status), self._label(job.parent)
        children = {name: (self._label(child), str(child.status)) for name, child in job.children.items()}
        return status, parent, children, job.aliases

    # ------------------------------------------------------------------------------------------------------------

    def _label(self, job: Job | None) -> Label | None:
        if job is None:
            return None
        return next((label for label, job_id in self._ids.items() if job_id == job.id), job.id - NEVER)

    def _arm(self, name: str, at: Change) -> None:
        """Have something happen at the next commit."""
        if at[0] == "beside":
            self.between(lambda: self._played.seen.append(outcome(self.do, *at[1])))
        elif at[0]:
            self.at(*_point(name, at[0]))

    @contextmanager
    def _at(self, name: str, when: str) -> Iterator[None]:
        point, happens = _point(name, when) if when else ("", _nothing)
        self.at(point, happens)
        try:
            yield
        finally:
            self.at(point, _nothing)


def _point(name: str, when: str) -> tuple[str, Callable[[], None]]:
    """Return the crash point, and what happens there."""
    side = "before" if when.endswith("before") else "after"
    return f"{name}:{side}-commit", lost if when.startswith("lost") else crash


def _nothing() -> None:
    pass
