"""What workers and their callers do, once each, in this process."""

from __future__ import annotations

import uuid
from typing import Any

from celery_sidejob.jobs.job import Job
from celery_sidejob.model.durable import Content, Death, Key, Message, Terms, digest_of
from celery_sidejob.model.settings import Settings
from celery_sidejob.services.sweep.prune import Prune
from celery_sidejob.services.sweep.sweep import Sweep
from celery_sidejob.services.sweep.sweeper import Sweeper
from celery_sidejob.store import workers
from celery_sidejob.store.outbox import burials, holds, publishing, tasks
from celery_sidejob.store.outbox.arming import end_task_runs
from celery_sidejob.store.outbox.kinds import JOBS, TASKS
from celery_sidejob.store.outbox.publishing import mark_published
from tests.tools.in_process import Stage

SETTINGS = Settings(lost_after=30.0, timer_horizon=60.0)
CONTENT = Content("bench.one", digest_of(b"[]"))


class Workers:
    """What workers and callers do, once each."""

    def __init__(self, stage: Stage, rows: int) -> None:
        self._stage = stage
        self._runtime = stage.runtime
        self._rows = rows
        self._sweeper = Sweeper(stage.runtime)

    def everything(self) -> None:
        """Do all of it."""
        self._jobs()
        self._parent()
        self._packets()
        self._rescue()
        self._durable()
        self._worker()
        self._sweep()

    def _jobs(self) -> None:
        """Make, run, ask again, retry, fail and terminate jobs."""
        stage = self._stage
        job = stage.job(lambda job: job.set(page=1), aliases=[f"of-{uuid.uuid4()}"])
        stage.run(job)
        job.run(countdown=3600)
        job.run()
        stage.run(job)
        failing = stage.job(lambda job: 1 / 0)
        stage.perform(stage.claim(failing))  # type: ignore[arg-type]
        failing.run(force=True)
        stage.perform(stage.claim(failing))  # type: ignore[arg-type]
        stage.sidejob.publish("/c/7", "to a thousand")

        def divide(job: Any) -> None:
            if not job.children:
                job.enqueue(stage.idle, child_name="a")
                job.enqueue(stage.idle, child_name="b")

        family = stage.job(divide)
        stage.run(family)
        child = family.child("a")
        assert child is not None
        stage.run(child)
        stage.run(family)
        family.terminate(recursive=True)
        for one in (family, *family.children.values()):
            hold = stage.claim(one)
            if hold is not None:
                stage.perform(hold)
        family.delete()

    def _parent(self) -> None:
        """Begin a run of a job that has very many children, one of which ends, and make one more."""
        parent = Job(self._rows + 1, runtime=self._runtime)
        parent.run()
        self._stage.run(parent)
        child = parent.enqueue(self._stage.idle, child_name=f"new-{uuid.uuid4()}")
        self._stage.run(child)
        self._stage.run(parent)

    def _packets(self) -> None:
        """Read some of very many packets, as a run and as a client, and write more."""
        owner = Job(self._rows, runtime=self._runtime)

        def body(job: Any) -> None:
            for number, _ in enumerate(owner.input("a")):
                if number == 10:
                    return

        self._stage.run(self._stage.job(body))
        owner.input("a").read()
        owner.input("a").write(1)
        assert owner.input("a").has_data

    def _rescue(self) -> None:
        """Have a worker die with a run of each kind, and take them back."""
        connections = self._runtime.connections
        worker_id = self._stage.new_worker()
        job = self._stage.job()
        self._stage.claim(job, worker_id=worker_id)
        key = self._kept()
        self._begin(key, worker_id)
        workers.beat(connections, worker_id, schema="sidejob")
        self._stage.declare_dead(worker_id)
        self._sweeper.run_once()

    def _durable(self) -> None:
        """Keep, mark, lock, end, retry, bury, revive and take back messages of durable tasks."""
        worker_id, connections = self._stage.worker_id, self._runtime.connections
        done, retried, lost = self._kept(), self._kept(), self._kept()
        connections.transact("mark", lambda e: mark_published(e, TASKS, [done, retried, lost], again=False))
        for key in (done, retried, lost):
            self._begin(key, worker_id)
        tasks.read(connections, done[0])
        connections.transact("end", lambda e: end_task_runs(e, holds.remove(done, worker_id=worker_id)))
        moved = Message(retried[0], "bench.one", "bench", "{}", b"[]")
        retry = tasks.move(moved, retried, SETTINGS, worker_id=worker_id, enters_pool=False)
        connections.transact("move", lambda e: end_task_runs(e, retry))
        holds.held_by(connections, TASKS, worker_id)
        burial = burials.bury(lost, Death("lost", "Lost: x"), by="run", worker_id=worker_id)
        entries = connections.transact("bury", lambda e: end_task_runs(e, burial))
        burials.buried(connections, lost)
        connections.transact("back", lambda e: burials.take_back(e, lost, CONTENT))
        connections.transact("back", lambda e: burials.take_back(e, ("never-was", 1), CONTENT))
        assert entries
        connections.transact("poison", lambda e: burials.poison(e, retried))

    def _worker(self) -> None:
        """What each worker does every few seconds."""
        connections, worker_id = self._runtime.connections, self._stage.worker_id
        workers.beat(connections, worker_id, schema="sidejob")
        holds.held_by(connections, JOBS, worker_id)
        holds.overdue(connections, {1: 5.0, 2: 5.0}, worker_id=worker_id)
        publishing.vouch(connections, JOBS, [(2 * self._rows + 1 + n, 1) for n in range(1, 5)], wait_s=30.0)
        publishing.vouch(connections, TASKS, [(f"task-{n}", 1) for n in range(1, 5)], wait_s=30.0)
        publishing.queues_in_broker(connections)
        publishing.overdue(connections, "waits", limit=1000)

    def _sweep(self) -> None:
        """Sweep: with nothing due, with something of each kind due, after an emptied broker, and prune."""
        self._sweeper.run_once()
        for table in ("timers", "messages"):
            column = "due_at" if table == "timers" else "next_check_at"
            self._stage.sql(
                f"UPDATE {table} SET {column} = now() WHERE ctid = ANY (ARRAY(SELECT ctid FROM {table} LIMIT 50))"
            )
        self._sweeper.run_once()
        connections = self._runtime.connections
        connections.transact("look", lambda e: publishing.in_broker(e, JOBS, after=2 * self._rows))
        connections.transact("look", lambda e: publishing.republish_in(e, "waits"))
        connections.transact("look", lambda e: publishing.in_broker(e, TASKS, after="task-5"))
        Prune(Sweep(self._runtime)).run_once()

    def _kept(self) -> Key:
        message = Message(str(uuid.uuid4()), "bench.one", "bench", "{}", b"[]")
        self._runtime.connections.transact("keep", lambda e: tasks.keep(e, message, SETTINGS))
        return message.task_id, 1

    def _begin(self, key: Key, worker_id: int) -> None:
        self._runtime.connections.transact(
            "begin",
            lambda e: holds.begin(e, key, CONTENT, worker_id=worker_id, terms=Terms(1, "dead", 3)),
        )
