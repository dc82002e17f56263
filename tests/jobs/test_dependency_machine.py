"""Dependencies and moves against a model: whatever clients and runs do, and whoever dies before it has looked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from celery_sidejob import CycleError, DependencyFailedError, HasDependentsError, Job, RunningJob
from celery_sidejob.operations.changes.follow_up import apply_due
from tests.tools.in_process import EMPTY, Stage

STEPS = 50
EXAMPLES = int(os.environ.get("SIDEJOB_DEPENDENCY_EXAMPLES", "8"))
"""How often the machine is run: 4,000 make 200,000 operations."""


class Counted:
    """How many operations machines have done."""

    operations = 0


@dataclass
class Known:
    """What the model knows of a job."""

    status: str = "queued"
    on: dict[int, str] = field(default_factory=dict)
    """Those that it waits for, each with what a failure of that one does."""
    is_doomed: bool = False
    """Its run will fail because another one has."""
    begun: bool = False
    queue: str = "a"


class Dependencies(RuleBasedStateMachine):
    """The model: for each job its status, and the jobs that it waits for."""

    stage: Any

    def __init__(self) -> None:
        super().__init__()
        self.stage.sql(EMPTY)
        self.stage.worker_id = self.stage.new_worker()
        self.known: dict[int, Known] = {}
        self.fails: set[int] = set()

    # -- the model -----------------------------------------------------------------------------------------------

    def body(self, job: RunningJob) -> None:
        if job.id in self.fails:
            raise ValueError("as the test says")

    def ended(self, job_id: int, status: str) -> None:
        """Take note that a job rests: those that wait for it need not, or fail."""
        self.known[job_id].status = status
        for each in self.known.values():
            how = each.on.get(job_id)
            if how is not None:
                self.judge(each, job_id, how)

    def judge(self, waits: Known, on: int, how: str) -> None:
        status = self.known[on].status if on in self.known else "completed"
        if status == "completed" or (how == "run" and status in ("failed", "terminated")):
            waits.on.pop(on, None)
        elif how == "fail" and status in ("failed", "terminated"):
            waits.on, waits.is_doomed = {}, True
        else:
            waits.on[on] = how

    def add(self, waits: Known, ons: list[int], how: str) -> None:
        """Have a job wait for others, too; one that is doomed already fails after those."""
        was_doomed, waits.is_doomed = waits.is_doomed, False
        for on in ons:
            if not waits.is_doomed:
                self.judge(waits, on, how)
        waits.is_doomed |= was_doomed

    def reaches(self, start: int, goal: int) -> bool:
        return start == goal or any(self.reaches(on, goal) for on in self.known[start].on)

    def some(self, data: st.DataObject, *statuses: str, most: int = 3, least: int = 0) -> list[int]:
        found = sorted(job_id for job_id, each in self.known.items() if not statuses or each.status in statuses)
        return (
            list(data.draw(st.lists(st.sampled_from(found), unique=True, min_size=least, max_size=most)))
            if found
            else []
        )

    def one(self, data: st.DataObject, *statuses: str) -> int | None:
        """A job of these statuses; where there is none, another one is made instead."""
        Counted.operations += 1
        found = self.some(data, *statuses, most=1, least=1)
        if not found:
            self.make([], "wait")
        return found[0] if found else None

    def job(self, job_id: int) -> Job:
        return Job(job_id, runtime=self.stage.runtime)

    @contextmanager
    def maybe_dying(self, dies: bool) -> Iterator[None]:
        """The process dies before it looks; the sweeper looks instead."""
        if not dies:
            yield
            return
        with mock.patch("celery_sidejob.operations.changes.follow_up.look"):
            yield
        apply_due(self.stage.runtime, 1000)

    # -- what may happen -----------------------------------------------------------------------------------------

    def make(self, ons: list[int], how: str) -> None:
        job = self.stage.job(self.body, depends_on=ons, queue="a", **({"on_failure": how} if ons else {}))
        self.known[job.id] = Known()
        self.add(self.known[job.id], ons, how)

    @rule(data=st.data(), how=st.sampled_from(["wait", "fail", "run"]), dies=st.booleans(), more=st.integers(0, 2))
    def enqueue(self, data: st.DataObject, how: str, dies: bool, more: int) -> None:
        Counted.operations += 1
        for _ in range(more):
            self.make([], "wait")
        ons = self.some(data)
        with self.maybe_dying(dies):
            self.make(ons, how)

    @rule(data=st.data(), how=st.sampled_from(["wait", "fail", "run"]), dies=st.booleans())
    def depend_on(self, data: st.DataObject, how: str, dies: bool) -> None:
        job_id, ons = self.one(data, "queued"), self.some(data)
        if job_id is None or self.known[job_id].begun:
            return
        is_open = [on for on in ons if self.known[on].status != "completed"]
        closes = any(self.reaches(on, job_id) for on in is_open)
        with self.maybe_dying(dies):
            try:
                self.job(job_id).depend_on(*ons, on_failure=how)
                assert not closes
            except CycleError:
                assert closes
                return
        self.add(self.known[job_id], ons, how)

    @rule(data=st.data(), everything=st.booleans(), dies=st.booleans())
    def undepend(self, data: st.DataObject, everything: bool, dies: bool) -> None:
        job_id, ons = self.one(data, "queued"), self.some(data)
        if job_id is None or self.known[job_id].begun or not (ons or everything):
            return
        with self.maybe_dying(dies):
            self.job(job_id).undepend(*([] if everything else ons))
        self.known[job_id].is_doomed &= not everything
        self.known[job_id].on = {
            on: how for on, how in self.known[job_id].on.items() if not everything and on not in ons
        }

    @rule(data=st.data(), fails=st.booleans(), dies=st.booleans())
    def run(self, data: st.DataObject, fails: bool, dies: bool) -> None:
        job_id = self.one(data, "queued", "terminating")
        if job_id is None:
            return
        known = self.known[job_id]
        hold = self.stage.claim(self.job(job_id))
        assert (hold is None) == bool(known.on)
        if hold is None:
            return
        self.fails = {job_id} if fails else set()
        with self.maybe_dying(dies):
            self.stage.perform(hold)
        known.begun = True
        error = self.stage.raised.get(job_id)
        assert isinstance(error, DependencyFailedError) == (known.is_doomed and known.status == "queued")
        after = "terminated" if known.status == "terminating" else "failed" if fails or known.is_doomed else "completed"
        known.is_doomed = False
        self.ended(job_id, after)

    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        job_id = self.one(data, "failed")
        if job_id is None:
            return
        assert self.job(job_id).run(force=True) is not None
        self.known[job_id].status = "queued"

    @rule(data=st.data(), dies=st.booleans())
    def terminate(self, data: st.DataObject, dies: bool) -> None:
        job_id = self.one(data, "queued", "failed", "completed")
        if job_id is None:
            return
        with self.maybe_dying(dies):
            self.job(job_id).terminate(without_shutdown=True)
        self.known[job_id].on = {}
        self.ended(job_id, "terminated")

    @rule(data=st.data(), dies=st.booleans())
    def delete(self, data: st.DataObject, dies: bool) -> None:
        job_id = self.one(data, "terminated")
        if job_id is None:
            return
        assert self.job(job_id).delete()
        del self.known[job_id]
        for each in self.known.values():
            each.on.pop(job_id, None)
        apply_due(self.stage.runtime, 1000)

    @rule(data=st.data(), dependents=st.booleans())
    def cancel(self, data: st.DataObject, dependents: bool) -> None:
        Counted.operations += 1
        ids = set(self.some(data, "queued", "failed", "completed", most=2, least=1))
        if not ids:
            return
        grown = ids
        while grown:
            grown = {job_id for job_id, each in self.known.items() if grown & each.on.keys()} - ids
            if grown and not dependents:
                break
            ids |= grown
        try:
            done = self.stage.sidejob.cancel(*sorted(ids), with_dependents=dependents)
            assert not grown
            assert {job.id for job in done} == ids
        except HasDependentsError:
            assert grown
            return
        for job_id in ids:
            self.known[job_id].status, self.known[job_id].on = "terminating", {}

    @rule(data=st.data(), queue=st.sampled_from("abc"))
    def move(self, data: st.DataObject, queue: str) -> None:
        job_id = self.one(data, "queued", "failed", "completed")
        if job_id is None:
            return
        self.job(job_id).move(queue=queue)
        self.known[job_id].queue = queue

    # -- what is compared ----------------------------------------------------------------------------------------

    @invariant()
    def the_store_is_as_the_model_says(self) -> None:
        rows = self.stage.sql(
            "SELECT id, status, queue, coalesce(blocked, false), failed_by IS NOT NULL,"
            " ARRAY(SELECT depends_on FROM dependencies d WHERE d.job_id = j.id ORDER BY 1),"
            " (SELECT m.queue FROM messages m WHERE m.job_id = j.id) FROM jobs j ORDER BY id"
        )
        assert rows == [
            (
                job_id, each.status, each.queue, bool(each.on), each.is_doomed and each.status != "terminated",
                sorted(each.on), each.queue if each.status in ("queued", "terminating") else None,
            )
            for job_id, each in sorted(self.known.items())
        ]  # fmt: skip

    def teardown(self) -> None:
        assert self.stage.broken_rules() == []


def test_dependencies_and_moves_are_as_the_model_says(stage: Stage) -> None:
    machine = type("OfStage", (Dependencies,), {"stage": stage})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None, database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
    assert Counted.operations > EXAMPLES * 10
