"""A managed queue against a sorted list: whatever clients, runs and deaths do, in any order."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from celery_sidejob import Job
from celery_sidejob.model.status import Gate
from celery_sidejob.operations.gates import queues
from celery_sidejob.operations.runs import recovery, runs
from tests.tools.in_process import EMPTY, Stage

QUEUE = "mail"
STEPS = 50
EXAMPLES = int(os.environ.get("SIDEJOB_QUEUE_EXAMPLES", "8"))
"""How often the machine is run: 4,000 make 200,000 operations."""


class Counted:
    """How many operations machines have done."""

    operations = 0


class Queue(RuleBasedStateMachine):
    """The model: jobs that wait as (-priority, place in the order of due times), those that run, and the gate."""

    stage: Any

    def __init__(self) -> None:
        super().__init__()
        self.stage.sql(EMPTY)
        self.stage.worker_id = self.stage.new_worker()
        self.queue = self.stage.sidejob.queue(QUEUE)
        self.queue.configure(ordered=True)
        self.waiting: dict[int, tuple[int, int]] = {}
        self.running: dict[int, Any] = {}
        self.place = 0
        self.limit: int | None = None
        self.is_paused = False

    def arrives(self, job_id: int, priority: int) -> None:
        self.place += 1
        self.waiting[job_id] = (-priority, self.place)

    @rule(priorities=st.lists(st.integers(0, 3), min_size=1, max_size=4))
    def enqueue(self, priorities: list[int]) -> None:
        for priority in priorities:
            self.arrives(self.stage.job(queue=QUEUE, priority=priority).id, priority)
        Counted.operations += 1

    @precondition(lambda self: self.waiting or self.running)
    @rule(data=st.data())
    def permit(self, data: st.DataObject) -> None:
        """Whatever job a message names, one that waits or one that runs already."""
        named = data.draw(st.sampled_from(sorted({*self.waiting, *self.running})))
        job = Job(named, runtime=self.stage.runtime)
        hold = runs.claim(
            self.stage.runtime, named, task=job.task, for_run=1, worker_id=self.stage.worker_id, queue=QUEUE,
            tasks=lambda: (self.stage.idle.name,),
        )  # fmt: skip
        is_open = not self.is_paused and (self.limit is None or len(self.running) < self.limit)
        best = min(self.waiting, key=lambda each: self.waiting[each]) if self.waiting and is_open else None
        assert (hold and hold.job_id) == best
        if hold is not None:
            del self.waiting[hold.job_id]
            self.running[hold.job_id] = hold
        Counted.operations += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.running)))
        self.stage.perform(self.running.pop(job_id))
        Counted.operations += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """The run is rescued, and waits behind those of its priority that wait by now."""
        job_id = data.draw(st.sampled_from(sorted(self.running)))
        hold = self.running.pop(job_id)
        assert recovery.rescue(
            self.stage.runtime, job_id, run_no=hold.run_no, worker_id=self.stage.worker_id, own=True, loss=None
        )
        self.arrives(job_id, self.stage.sql("SELECT priority FROM jobs WHERE id = %s", job_id)[0][0])
        Counted.operations += 1

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), priority=st.integers(0, 3))
    def set_priority(self, data: st.DataObject, priority: int) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.waiting)))
        Job(job_id, runtime=self.stage.runtime).set_priority(priority)
        self.waiting[job_id] = (-priority, self.waiting[job_id][1])
        Counted.operations += 1

    @rule(limit=st.sampled_from([None, 1, 2, 4]))
    def configure(self, limit: int | None) -> None:
        self.queue.configure(limit=limit)
        self.limit = limit
        Counted.operations += 1

    @rule(pause=st.booleans())
    def pause(self, pause: bool) -> None:
        self.queue.pause() if pause else self.queue.resume()
        self.is_paused = pause
        Counted.operations += 1

    @invariant()
    def what_is_shown_is_what_is_there(self) -> None:
        counts = self.queue.counts
        assert (counts.waiting, counts.running) == (len(self.waiting), len(self.running))
        assert [job.id for job in self.queue.peek()] == sorted(self.waiting, key=lambda each: self.waiting[each])[:25]

    @invariant()
    def nothing_waits_unheard_at_an_open_gate(self) -> None:
        """As many messages are under way, or let in by the sweeper's next turn, as may begin."""
        queues.let_in(self.stage.runtime)
        kept = self.stage.sql(f"SELECT count(*) FROM messages WHERE gate = {Gate.QUEUE}")[0][0]
        room = 0 if self.is_paused else len(self.waiting) if self.limit is None else self.limit - len(self.running)
        assert len(self.waiting) - kept >= min(room, len(self.waiting))

    def teardown(self) -> None:
        assert self.stage.broken_rules() == []


def test_a_managed_queue_is_as_a_sorted_list(stage: Stage) -> None:
    machine = type("OfStage", (Queue,), {"stage": stage})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None, database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
    assert Counted.operations > EXAMPLES * 10
