"""Managed queues on real workers, some of which are killed: what an external record says of them."""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import time
from typing import Any

import pytest

from celery_sidejob import Job
from celery_sidejob.jobs.queue import Queue
from celery_sidejob.model.status import Gate
from tests.acceptance.scene import QUICK, Scene
from tests.tools.waiting import wait_until

QUEUE = "acceptance"


def most_at_once(scene: Scene, killed_at: dict[int, float]) -> int:
    """How many runs the record shows in progress at a moment; one of a killed process ends with it, others go on."""
    changes: list[tuple[float, int]] = []
    begun: dict[tuple[int, Any], float] = {}
    for line in scene.record.read():
        key = (line["pid"], line.get("number"))
        if line["event"] == "began":
            begun[key] = line["at"]
            changes.append((line["at"], 1))
        elif line["event"] == "ended":
            del begun[key]
            changes.append((line["at"], -1))
    changes += [(killed_at.get(pid, math.inf), -1) for pid, _ in begun]
    return max(itertools.accumulate(change for _, change in sorted(changes)))


def ended(scene: Scene) -> set[int]:
    return {line["number"] for line in scene.record.of("ended")}


def at_gate(scene: Scene) -> int:
    return int(scene.sql(f"SELECT count(*) AS n FROM messages WHERE gate = {Gate.QUEUE}")[0].n)


def queue_of(scene: Scene) -> Queue:
    found: Queue = scene.sidejob.queue(QUEUE)
    return found


# -- order -------------------------------------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("pool", ["prefork", "solo", "threads", "gevent"])
def test_jobs_of_a_managed_queue_are_served_by_priority_on_each_pool(scene: Scene, pool: str) -> None:
    """Whatever the broker gives out first."""
    scene.worker(pool=pool, concurrency=3)
    queue_of(scene).configure(limit=1)
    queue_of(scene).pause()
    jobs = scene.sidejob.enqueue_many(
        [{"task": "acceptance.timed", "args": (number,), "priority": number % 10} for number in range(30)]
    )
    queue_of(scene).resume()
    wait_until(lambda: len(ended(scene)) == len(jobs), timeout=60, message="all runs")
    served = [line["number"] % 10 for line in scene.record.of("began")]
    assert served == sorted(served, reverse=True)
    scene.settle(30)


CLAIMS = """
import os, time, uuid
from celery_sidejob.operations.runs import runs
from celery_sidejob.store import workers
from tests.tools.apps import make_app
from tests.tools.recorder import Record

sidejob = make_app("claims", sidejob_database_url=os.environ["SIDEJOB_DATABASE_URL"]).sidejob
runtime, record = sidejob.runtime, Record.from_env()
worker_id = workers.register(runtime.connections, str(uuid.uuid4()))
record.note("ready")
while not record.of("go"):
    time.sleep(0.001)
named = int(os.environ["NAMED"])
while True:
    begun = time.time()
    hold = runs.claim(runtime, named, task="acceptance.timed", for_run=1, worker_id=worker_id,
                      queue="acceptance", tasks=lambda: ["acceptance.timed"])
    if hold is None:
        break
    record.note("claimed", job=hold.job_id, begun=begun, done=time.time())
"""


@pytest.mark.few(0)
def test_eight_processes_claim_a_thousand_jobs_in_exact_order(scene: Scene) -> None:
    """No claim begins a job while a better one waits: the claim of each better one has begun before it was done."""
    scene.worker().kill()  # its tasks are known now
    queue_of(scene).configure(ordered=True)
    chosen = random.Random(20)
    items = [
        {"task": "acceptance.timed", "args": (number,), "priority": chosen.randrange(10)} for number in range(1000)
    ]
    jobs = scene.sidejob.enqueue_many(items)
    best_first = sorted(zip(jobs, items, strict=True), key=lambda each: (-each[1]["priority"], each[0].id))
    place = {job.id: number for number, (job, _) in enumerate(best_first)}
    env = {**scene.env, "NAMED": str(jobs[-1].id)}
    clients = [scene.processes.start_python(CLAIMS, env=env) for _ in range(8)]
    scene.record.wait_for("ready", count=8, timeout=60)
    scene.record.note("go")
    assert [client.wait(60) for client in clients] == [0] * 8
    claims = sorted((place[line["job"]], line["begun"], line["done"]) for line in scene.record.of("claimed"))
    assert [number for number, _, _ in claims] == list(range(1000)), "each job once"
    earliest_done = float("inf")  # of all worse ones
    for _, begun, done in reversed(claims):
        assert begun < earliest_done
        earliest_done = min(earliest_done, done)


# -- pause -------------------------------------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("pool", ["prefork", "solo", "threads", "gevent"])
def test_a_pause_stops_what_is_prefetched_and_workers_that_start_later(scene: Scene, pool: str) -> None:
    scene.worker(pool=pool, concurrency=2)
    for number in range(24):
        if number % 3:
            scene.enqueue("timed", (number, 0.1))
        else:
            scene.app.send_task("acceptance.timed_task", (number, 0.1))
    scene.record.wait_for("ended", count=2)
    queue_of(scene).pause("the mail server is down")
    paused_at = time.time()
    wait_until(lambda: queue_of(scene).counts.running == 0, timeout=20, message="runs in progress to end")
    done = ended(scene)
    assert 2 <= len(done) < 24
    scene.worker(pool=pool, concurrency=2)
    late = scene.enqueue("timed", (24, 0.0))
    wait_until(lambda: at_gate(scene) == 25 - len(done), timeout=30, message="all that waits to be at the gate")
    assert ended(scene) == done
    assert max(line["at"] for line in scene.record.of("began")) < paused_at + 1
    assert late.waiting_for == ["pause"]
    queue_of(scene).resume()
    wait_until(lambda: len(ended(scene)) == 25, timeout=30, message="all runs")
    assert len(scene.record.of("began")) == 25
    scene.settle(30)


def test_a_pause_outlives_the_workers(scene: Scene) -> None:
    queue_of(scene).pause()
    worker = scene.worker()
    job = scene.enqueue("timed", (1,))
    wait_until(lambda: at_gate(scene) == 1, timeout=20, message="the message at the gate")
    worker.kill()
    scene.worker(**QUICK)
    assert (job.refresh().status, scene.record.of("began")) == ("queued", [])
    queue_of(scene).resume()
    wait_until(lambda: job.refresh().status == "completed", timeout=20, message="the run")


def test_what_waits_at_the_gate_begins_when_nobody_manages_the_queue_any_more(scene: Scene) -> None:
    queue_of(scene).configure(limit=1)
    queue_of(scene).pause()
    scene.worker(concurrency=2)
    for number in range(4):
        scene.enqueue("timed", (number, 0.0))
        scene.app.send_task("acceptance.timed_task", (number + 4, 0.0))
    wait_until(lambda: at_gate(scene) == 8, timeout=20, message="the messages at the gate")
    assert queue_of(scene).unmanage()
    wait_until(lambda: len(ended(scene)) == 8, timeout=30, message="all runs")
    assert len(scene.record.of("began")) == 8
    scene.settle(30)


# -- limits ------------------------------------------------------------------------------------------------------------


def storm(scene: Scene, kills: int, number_of_runs: int) -> None:
    """Kill processes of the pool and whole workers while a queue with the limit 3 is served."""
    workers = [scene.worker(concurrency=4, **QUICK) for _ in range(2)]
    queue_of(scene).configure(limit=3)
    for number in range(number_of_runs):
        seconds = 0.5 if number < 6 else 0.05
        if number % 4:
            scene.enqueue("timed", (number, seconds))
        else:
            scene.app.send_task("acceptance.timed_task", (number, seconds))
    wait_until(lambda: most_at_once(scene, {}) == 3, timeout=30, message="as many runs as the limit allows")
    killed_at: dict[int, float] = {}
    for kill in range(kills):
        seen = len(scene.record.of("began"))
        wait_until(lambda seen=seen: len(scene.record.of("began")) > seen or len(ended(scene)) == number_of_runs,
                   timeout=60, message="a further run")  # fmt: skip
        if len(ended(scene)) == number_of_runs:
            break
        last = scene.record.of("began")[-1]["pid"]
        if kill % 5 == 4:
            victim = workers.pop(0)
            at = time.time()  # under load its runs may have begun elsewhere before the next line here is reached
            victim.kill()
            pids = {line["pid"] for line in scene.record.of("began")}  # also of one that had just begun
            killed_at.update({pid: at for pid in pids if pid not in killed_at and not _lives(pid)})
            workers.append(scene.worker(concurrency=4, **QUICK))
        elif _lives(last):
            # Its run is over now. Its death may be seen only after the next run has begun in its place: the worker
            # rescues the run first, and then has its pool read the exit code.
            killed_at[last] = time.time()
            os.kill(last, signal.SIGKILL)
            wait_until(lambda last=last: not _lives(last), timeout=10, message="the process to die")
    wait_until(lambda: len(ended(scene)) == number_of_runs, timeout=120, message="all runs")
    assert most_at_once(scene, killed_at) == 3
    scene.settle(60)


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.pools("prefork", reason="processes of the pool are killed")
def test_never_more_than_the_limit_run_at_once_whatever_is_killed(scene: Scene) -> None:
    storm(scene, kills=10, number_of_runs=60)


@pytest.mark.slow
@pytest.mark.pools("prefork", reason="processes of the pool are killed")
def test_never_more_than_the_limit_run_at_once_with_fifty_kills(scene: Scene) -> None:
    storm(scene, kills=50, number_of_runs=300)


# -- what a delivery runs is not what it names -------------------------------------------------------------------------


def a_turned_run(scene: Scene, task: str, seconds: float) -> tuple[Job, Job]:
    """Have the message of a job run a better one: (the job that is named, the job that runs)."""
    scene.worker(**QUICK)
    queue_of(scene).pause()
    named = scene.enqueue(task, (1, 0.0), priority=1)
    running = scene.enqueue(task, (2, seconds), priority=9)
    wait_until(lambda: at_gate(scene) == 2, timeout=20, message="both messages at the gate")
    queue_of(scene).resume()
    scene.record.wait_for("began", number=2)
    return named, running


@pytest.mark.pools("prefork", reason="a process of the pool is killed")
def test_a_process_that_dies_with_another_run_than_its_message_names_loses_only_that(scene: Scene) -> None:
    named, running = a_turned_run(scene, "timed", 60.0)
    os.kill(scene.record.of("began")[0]["pid"], signal.SIGKILL)
    scene.record.wait_for("began", number=2, count=2, timeout=20)
    assert (running.refresh().info["losses"], named.refresh().info["losses"]) == (1, 0)


@pytest.mark.pools("prefork", reason="only there are hard time limits without greenlets")
def test_a_time_limit_ends_the_run_that_is_in_progress_and_not_the_one_that_was_named(scene: Scene) -> None:
    named, running = a_turned_run(scene, "short_lived", 60.0)
    wait_until(lambda: running.refresh().status == "failed", timeout=20, message="the time limit")
    wait_until(lambda: named.refresh().status == "completed", timeout=20, message="the other job")


@pytest.mark.few(0)
@pytest.mark.pools(
    "prefork", "threads", "asyncio", "awaited", reason="a run lasts longer than the worker's look at what it holds"
)
def test_a_long_run_of_another_job_is_not_taken_for_a_stray(scene: Scene) -> None:
    named, running = a_turned_run(scene, "timed", 15.0)
    wait_until(lambda: running.refresh().status == "completed", timeout=40, message="the run")
    wait_until(lambda: named.refresh().status == "completed", timeout=20, message="the other job")
    assert len(scene.record.of("began", number=2)) == 1


# -- retries -----------------------------------------------------------------------------------------------------------


@pytest.mark.few(3)
@pytest.mark.parametrize("countdown", [0.0, 0.3])
@pytest.mark.parametrize(
    "settings", [{"limit": 1}, {"rate": "20/s"}, {"ordered": True}, {"limit": 3, "limit_per_key": 1}], ids=str
)
def test_retries_leave_no_slot_idle(scene: Scene, settings: dict[str, Any], countdown: float) -> None:
    """A permit that is lost would cost the time after which a message counts as missing: 30 s."""
    scene.worker(concurrency=4)
    queue_of(scene).configure(**settings)
    for number in range(24):
        if number % 3 == 0:
            scene.enqueue("timed", (number, 0.01))
        elif number % 12 == 1:
            scene.app.send_task("acceptance.retried_task", (number, countdown))
        else:
            scene.enqueue("retried", (number, countdown), priority=number % 5, limit_key=f"customer {number % 4}")
    wait_until(lambda: len(ended(scene)) == 24, timeout=20, message="all runs")
