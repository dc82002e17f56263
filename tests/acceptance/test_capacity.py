"""Capacity pools on real workers and with clients, some of which are killed around their commits."""

from __future__ import annotations

import itertools
import os
import signal
from contextlib import nullcontext
from typing import Any

import psycopg
import pytest

from celery_sidejob import CapacityPool, Overloaded, RunningJob
from tests.acceptance.scene import QUICK, Scene
from tests.tools.waiting import wait_until

LIMIT = 3
POOL = CapacityPool("acceptance", LIMIT)


def stand_in(number: int, seconds: float = 0.0) -> None:
    """Stands, in this process, for the durable task of the workers."""


def timed(job: RunningJob, number: int, seconds: float = 0.0) -> None:
    """Stands for the job."""


@pytest.fixture
def mixed(scene: Scene) -> Any:
    """Calls of a job and of a durable task in turn."""
    task = scene.app.task(stand_in, name="acceptance.timed_task", durable=True, shared=False)
    kinds = itertools.cycle(["acceptance.timed", task])

    def call(number: int, seconds: float = 0.05, **options: Any) -> Any:
        return POOL.apply_async(next(kinds), (number, seconds), **options)

    return call


def ended(scene: Scene) -> set[int]:
    return {line["number"] for line in scene.record.of("ended")}


def overdrawn(scene: Scene) -> tuple[bool, bool]:
    """Whether the counter is not what the rows say, and whether it is beyond the limit."""
    row = scene.sql(
        "SELECT (SELECT sum(used) FROM capacity_shards)"
        " <> (SELECT coalesce(sum(pool_weight), 0) FROM messages WHERE pool_shard IS NOT NULL) AS wrong,"
        " (SELECT sum(used) FROM capacity_shards) > %s AS beyond", LIMIT,
    )[0]  # fmt: skip
    return row.wrong, row.beyond


def lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.pools("prefork", reason="processes of the pool are killed")
def test_works_that_wait_all_run_and_the_count_is_true_whatever_is_killed(scene: Scene, mixed: Any) -> None:
    workers = [scene.worker(concurrency=4, **QUICK) for _ in range(2)]
    number_of_runs = 40
    for number in range(number_of_runs):
        mixed(number, on_full="wait")
    for kill in range(8):
        seen = len(scene.record.of("began"))
        wait_until(lambda seen=seen: len(scene.record.of("began")) > seen or len(ended(scene)) == number_of_runs,
                   timeout=60, message="a further run")  # fmt: skip
        assert overdrawn(scene) == (False, False)
        if kill % 4 == 3:
            workers.pop(0).kill()
            workers.append(scene.worker(concurrency=4, **QUICK))
        elif lives(last := scene.record.of("began")[-1]["pid"]):
            os.kill(last, signal.SIGKILL)
    wait_until(lambda: len(ended(scene)) == number_of_runs, timeout=120, message="all runs")
    scene.settle(60)
    wait_until(lambda: POOL.used == 0, timeout=30, message="the last slots to be freed")
    assert overdrawn(scene) == (False, False)


@pytest.mark.few(3)
@pytest.mark.brokers("redis", "sidejobpg")
@pytest.mark.pools("prefork", reason="the worker is killed at points of its process")
@pytest.mark.parametrize("killed_at", ["end:before-commit", "end:after-commit", "claim:after-commit"])
def test_a_slot_is_freed_once_whichever_side_of_the_commit_the_owner_dies_on(
    scene: Scene, tmp_path: Any, killed_at: str
) -> None:
    once = tmp_path / "killed"
    scene.sidejob.task(timed, name="acceptance.timed")
    jobs = [POOL.apply_async("acceptance.timed", (number,)).job for number in range(LIMIT)]
    with pytest.raises(Overloaded):
        POOL.cast("acceptance.timed", (LIMIT,))
    waiting = POOL.apply_async("acceptance.timed", (LIMIT,), on_full="wait").job
    scene.worker(  # only now, or it could free a slot before the pool is full
        concurrency=1, SIDEJOB_CRASH_POINTS=f"{killed_at}=kill-child", SIDEJOB_CRASH_ONCE=str(once), **QUICK
    )  # fmt: skip
    wait_until(lambda: all(job.refresh().status == "completed" for job in [*jobs, waiting]), timeout=60,
               message="the jobs to complete")  # fmt: skip
    assert once.exists()
    assert (POOL.used, *overdrawn(scene)) == (0, False, False)
    stats = POOL.stats()
    assert (stats["in"]["total"], stats["out"]["total"]) == (LIMIT + 1, LIMIT + 1)


@pytest.mark.brokers("redis", "sidejobpg")
def test_who_frees_a_slot_publishes_the_work_that_has_got_it(scene: Scene, mixed: Any) -> None:
    """Nobody sweeps here, who would do it too."""
    scene.worker(concurrency=2, SIDEJOB_WORKER_SERVICES="false")
    POOL.resize(1)
    for number in range(30):
        mixed(number, 0.0, on_full="wait")
    wait_until(lambda: len(ended(scene)) == 30, timeout=60, message="all runs")


@pytest.mark.brokers("redis", "sidejobpg")
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_an_open_transaction_with_a_call_holds_up_neither_calls_nor_ends(scene: Scene, mixed: Any, pool: str) -> None:
    """Its client may be stopped in it. The commit takes the slots, and what finds none then waits for one."""
    scene.sidejob.task(timed, name="acceptance.timed")
    running = [mixed(number) for number in range(2)]
    with psycopg.connect(scene.database_url) as connection:
        for number in (2, 3):
            with pytest.raises(Overloaded) if number == LIMIT else nullcontext():
                mixed(number, transaction=connection)
        others = [mixed(4)]  # has the last slot: the transaction takes its own when it is committed
        scene.worker(concurrency=2, pool=pool, **QUICK)
        others += [mixed(number, on_full="wait") for number in (5, 6, 7)]
        wait_until(lambda: ended(scene) == {0, 1, 4, 5, 6, 7}, timeout=30, message="the runs beside the transaction")
        wait_until(lambda: POOL.used == 0, timeout=10, message="their slots to be freed")
        assert len(running + others) == 6
        connection.commit()
    wait_until(lambda: 2 in ended(scene), timeout=30, message="the run of what was committed")
    scene.settle(30)
    assert (POOL.used, *overdrawn(scene)) == (0, False, False)
