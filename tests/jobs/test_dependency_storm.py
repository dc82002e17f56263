"""Clients, runs and deaths at once around jobs that wait for each other: none begins early, and none is forgotten."""

from __future__ import annotations

import os
import random
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from celery_sidejob import Job, RunningJob, SideJobError
from celery_sidejob.model.crash_points import Died, acting
from celery_sidejob.operations.changes.follow_up import apply_due
from celery_sidejob.operations.runs.recovery import rescue
from tests.tools.crash_points import lost
from tests.tools.in_process import Stage

STORMS = int(os.environ.get("SIDEJOB_DEPENDENCY_STORMS", "12"))
"""How many storms there are."""
CLIENTS, STEPS = 4, 12
CLIENT = "client"
"""How the names of their threads begin."""
NOT_COMPLETED = """
    SELECT status FROM jobs j WHERE id = %s AND NOT EXISTS (
      SELECT FROM askings a WHERE a.job_id = j.id AND a.outcome = 'completed')"""
"""Nobody asks a job again here; but one that has completed may be terminated."""


class Storm:
    """What a few clients do at once, each after the numbers that it draws."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self.stage = stage
        self.seed = seed
        self.ids: list[int] = []
        self.on: defaultdict[int, set[int]] = defaultdict(set)
        """For whom each job waits at least, by the calls that have returned."""
        self.taken_away: set[tuple[int, int]] = set()
        """Edges that somebody has taken away once, be it before they were made."""
        self.early: list[tuple[int, int, str]] = []
        self.lock = threading.Lock()
        self.chance = random.Random(seed)

    def body(self, job: RunningJob) -> None:
        """Look whether all that this job waits for has completed, or is gone."""
        for on in sorted(self.on[job.id]):
            if (job.id, on) in self.taken_away:
                continue
            for (status,) in self.stage_sql(NOT_COMPLETED, on):
                self.early.append((job.id, on, status))

    def stage_sql(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with self.stage.connect() as connection:
            return connection.execute(statement, parameters).fetchall()

    def at_point(self, name: str) -> None:
        """Now and then a client dies, or hears no answer, at a point of one of its commits."""
        if not threading.current_thread().name.startswith(CLIENT):
            return  # what is written behind: on a slow machine its thread comes here, and reports a death as an error
        if name.endswith(("-commit", ":settled")) and not name.startswith(("read", "rescue")):
            with self.lock:
                draw = self.chance.random()
            if draw < 0.02:
                raise Died
            if draw < 0.04 and name.endswith("-commit"):
                lost()

    def go(self, number: int) -> None:
        """Be one of the clients."""
        draws = random.Random(self.seed * 100 + number)
        acts = [self.enqueue, self.depend_on, self.undepend, self.run, self.run, self.run, self.cancel, self.delete]
        for _ in range(STEPS):
            with suppress(SideJobError, Died):
                draws.choice(acts)(draws)

    def some(self, draws: random.Random, most: int) -> list[Job]:
        with self.lock:
            ids = draws.sample(self.ids, min(len(self.ids), draws.randint(1, most)))
        return [Job(job_id, runtime=self.stage.runtime) for job_id in ids]

    def enqueue(self, draws: random.Random) -> None:
        ons = self.some(draws, 3)
        job = self.stage.job(self.body, depends_on=ons)
        with self.lock:
            self.on[job.id] |= {on.id for on in ons}
            self.ids.append(job.id)

    def depend_on(self, draws: random.Random) -> None:
        job, *ons = self.some(draws, 4)
        job.depend_on(*ons)
        with self.lock:
            self.on[job.id] |= {on.id for on in ons}

    def undepend(self, draws: random.Random) -> None:
        job, *ons = [*self.some(draws, 1), *self.some(draws, 1)]  # never none: that would be all
        with self.lock:
            self.taken_away |= {(job.id, on.id) for on in ons}
        job.undepend(*ons)

    def run(self, draws: random.Random) -> None:
        job = self.some(draws, 1)[0]
        worker = self.stage.new_worker()
        try:
            hold = self.stage.claim(job, worker_id=worker)
            if hold is not None:
                self.stage.perform(hold)
        finally:
            self.stage.declare_dead(worker)

    def cancel(self, draws: random.Random) -> None:
        ids = self.stage.sidejob.cancel(*self.some(draws, 2), with_dependents=draws.random() < 0.5)
        with self.lock:
            for job in ids:
                self.on[job.id].clear()

    def delete(self, draws: random.Random) -> None:
        job = self.some(draws, 1)[0]
        if job.terminate(without_shutdown=True):
            job.delete()

    def settle(self) -> None:
        """Do what rescuers and sweepers do, until nothing changes any more."""
        held = "SELECT id, run_no, worker_id FROM jobs WHERE unit_no IS NOT NULL"
        while rows := self.stage.sql(held):
            for job_id, run_no, worker_id in rows:
                rescue(self.stage.runtime, job_id, run_no=run_no, worker_id=worker_id, wait=True)
        while self.stage.sql("SELECT FROM dependencies WHERE state <> 'kept' UNION ALL SELECT FROM timers"):
            apply_due(self.stage.runtime, 1000)


@pytest.mark.few(3)
@pytest.mark.parametrize("seed", range(STORMS))
def test_each_dependant_is_gone_or_free_or_waits_for_one_that_knows_it(stage: Stage, seed: int) -> None:
    storm = Storm(stage, seed)
    for _ in range(6):
        storm.ids.append(stage.job(storm.body).id)
    with acting(storm.at_point), ThreadPoolExecutor(CLIENTS, CLIENT) as clients:
        for done in [clients.submit(storm.go, number) for number in range(CLIENTS)]:
            done.result(60)
    storm.settle()

    assert storm.early == []
    assert stage.broken_rules() == [], "who waits, waits for one that is open and knows it; others wait for nobody"
    stage.drain()
    assert stage.broken_rules() == []
    waiting = "SELECT count(*) FROM jobs WHERE status = 'queued' AND blocked IS NOT TRUE"
    assert stage.sql(waiting) == [(0,)]
