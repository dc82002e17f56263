"""The pools without processes of their own: threads, gevent and solo. `--pools` runs all the other tests on them."""

from __future__ import annotations

import signal

import pytest

from celery_sidejob.store.connection.own_executor import IDLE_S
from celery_sidejob.store.connection.turns import GREENLETS_SHARE
from tests.acceptance.scene import QUICK, Scene, Workload
from tests.tools.pgbouncer import client_ports
from tests.tools.waiting import wait_until

LEASE_S = 3
FAST = {"SIDEJOB_LEASE": f"{LEASE_S}", "SIDEJOB_HEARTBEAT_INTERVAL": "0.5"}
NEVER = {"SIDEJOB_LEASE": "600"}
"""A lease in which silence says nothing within a test: only a free lock does."""
PARENT = 3
POOLS = pytest.mark.parametrize("pool", ["threads", "gevent", "solo", "asyncio", "awaited"])
THREADS = pytest.mark.parametrize("pool", ["threads", "gevent", "asyncio", "awaited"])
"""What other tests show of prefork and solo."""


@POOLS
def test_a_killed_worker_is_recovered_by_its_free_lock(scene: Scene, pool: str) -> None:
    first = scene.worker(pool=pool, concurrency=4, **QUICK | NEVER)
    job = scene.hold()
    scene.record.wait_for("holding", job=job.id, timeout=15)
    workload = Workload.start(scene)
    if pool != "solo":
        scene.record.wait_for("adder")
    [lost] = scene.losses_at_death(job)
    assert lost or pool != "gevent", "a greenlet claims its run itself"

    first.kill()
    # It may have vouched for what it had fetched, for a lease: here that would be longer than the test.
    scene.sql("UPDATE messages SET next_check_at = now() WHERE locked_by IS NULL AND next_check_at < now() + '1 h'")
    scene.worker(pool=pool, concurrency=4, **QUICK | NEVER)
    scene.record.wait_for("holding", count=2, job=job.id, timeout=20)
    assert (scene.row(job).run_no, scene.row(job).losses) == (2, lost)
    scene.go(job)

    scene.settle(40)
    assert [(what, value) for of, _, what, value in scene.ledger() if of == job.id] == [("held", 1)]
    workload.judge(beside=job)


@THREADS
def test_a_warm_stop_lets_bodies_finish(scene: Scene, pool: str) -> None:
    worker = scene.worker(pool=pool, concurrency=2)
    job = scene.hold()
    scene.record.wait_for("holding", job=job.id, timeout=15)

    worker.terminate()
    worker.wait_for_log("Warm shutdown")
    scene.go(job)

    assert worker.wait(30) == 0
    assert (str(job.refresh().status), scene.row(job).run_no) == ("completed", 1)


COLD = ["cold", "warm, cold", "warm, cold while it waits for bodies"]
SLOW = [pytest.param("gevent", stop, marks=pytest.mark.slow) for stop in COLD[:2]]


@pytest.mark.parametrize(("pool", "stop"), [*(("threads", stop) for stop in COLD), *SLOW, ("gevent", COLD[2])])
def test_a_cold_stop_gives_back_what_no_process_can_be_killed_for(scene: Scene, pool: str, stop: str) -> None:
    worker = scene.worker(pool=pool, concurrency=2, **NEVER)
    job = scene.hold()
    scene.record.wait_for("holding", job=job.id, timeout=15)

    if stop != "cold":
        worker.send_signal(signal.SIGTERM)
        worker.wait_for_log("Warm shutdown")
    if "waits" in stop:
        wait_until(lambda: not scene.app.control.ping(timeout=0.5), timeout=15, message="it to have left its loop")
    worker.send_signal(signal.SIGQUIT)

    worker.wait(20)  # though the body would hold on for longer
    row = scene.row(job)
    assert (row.status, row.unit_no, row.run_no, row.losses) == ("queued", None, 1, 0)
    scene.go(job)
    scene.worker(pool=pool)
    scene.settle(20)
    assert [(run, what) for _, run, what, _ in scene.ledger()] == [(2, "held")]


@pytest.mark.slow
def test_a_greenlet_that_computes_for_long_keeps_its_run(scene: Scene) -> None:
    """The heartbeat is no greenlet: it goes on beyond the lease while no greenlet does."""
    burning = scene.worker(pool="gevent", concurrency=10, name="burning", **FAST)
    scene.worker(pool="solo", queues="elsewhere", name="watching", **FAST)
    beside = scene.hold()
    scene.record.wait_for("holding", job=beside.id, timeout=15)
    job = scene.enqueue("burner", (3.0 * LEASE_S,))

    scene.record.wait_for("burning", timeout=15)
    scene.go(beside)
    scene.settle(30)

    assert (scene.row(job).run_no, scene.row(beside).run_no) == (1, 1)
    assert sorted(what for _, _, what, _ in scene.ledger()) == ["burnt", "held"]
    assert "declared dead" not in burning.log()


@pytest.mark.parametrize("pool", [pytest.param("threads", marks=pytest.mark.slow), "gevent"])
def test_a_soft_stop_gives_bodies_their_time(scene: Scene, pool: str) -> None:
    """As orchestrators stop a worker, with `worker_soft_shutdown_timeout`: the body that is quick finishes."""
    worker = scene.worker(pool=pool, concurrency=2, SOFT_SHUTDOWN="4", REMAP_SIGTERM="SIGQUIT", **NEVER)
    quick, deaf = scene.hold(), scene.hold()
    for job in (quick, deaf):
        scene.record.wait_for("holding", job=job.id, timeout=15)

    worker.terminate()
    worker.wait_for_log("Initiating Soft Shutdown")
    scene.go(quick)

    worker.wait(30)
    assert (str(quick.refresh().status), scene.row(quick).run_no) == ("completed", 1)
    row = scene.row(deaf)
    assert (row.status, row.unit_no, row.run_no, row.losses) == ("queued", None, 1, 0)


@pytest.mark.few(0)
def test_greenlets_share_connections(scene: Scene) -> None:
    scene.worker(pool="gevent", concurrency=30)
    jobs = [scene.enqueue("stepper", (20,)) for _ in range(40)]
    scene.sidejob.close()  # the client's own
    seen = 0

    def all_completed() -> bool:
        nonlocal seen
        seen = max(seen, len(client_ports(scene.database_url)))
        return scene.sql("SELECT count(*) n FROM jobs WHERE status = 'completed'")[0].n == len(jobs)

    wait_until(all_completed, timeout=40)
    assert GREENLETS_SHARE // 2 < seen <= PARENT + GREENLETS_SHARE
    wait_until(
        lambda: len(client_ports(scene.database_url)) <= PARENT,
        timeout=2 * IDLE_S, message="idle connections to be closed",
    )  # fmt: skip


# -- limits, revocations, exits ----------------------------------------------------------------------------------------


def test_gevent_keeps_hard_time_limits(scene: Scene) -> None:
    worker = scene.worker(pool="gevent", concurrency=2)
    job = scene.enqueue("slow")

    wait_until(lambda: str(job.refresh().status) == "failed", timeout=20)

    (entry,) = scene.sidejob.dead
    assert (entry.reason, scene.row(job).losses) == ("failed", 0)
    assert "TimeLimitExceeded" in entry.error
    assert len(scene.record.of("slow")) == 1
    assert worker.alive


@THREADS
def test_a_revoked_run_ends_at_once(scene: Scene, pool: str) -> None:
    """gevent kills the body; in a thread it goes on, is told by `job.stopping`, and its commit is refused."""
    worker = scene.worker(pool=pool, concurrency=2, **NEVER)
    job = scene.hold(task="revocable")
    scene.record.wait_for("holding", job=job.id, timeout=15)

    wait_until(lambda: scene.app.control.ping(timeout=1.0, limit=1), timeout=20, message="the worker to listen")
    scene.app.control.revoke(job.refresh().task_id, terminate=True)

    wait_until(lambda: str(job.refresh().status) == "failed", timeout=20)
    (entry,) = scene.sidejob.dead
    assert (entry.reason, scene.row(job).losses, len(job.input("in"))) == ("revoked", 0, 1)
    if pool == "threads":
        scene.record.wait_for("stopping", job=job.id)
        worker.wait_for_log("is no longer its current run")
    after = scene.enqueue("adder", inports={"a": {"default": 1}})
    after.input("b").write(2)
    wait_until(lambda: str(after.refresh().status) == "completed", timeout=20)
    assert [what for of, _, what, _ in scene.ledger() if of == job.id] == []


@THREADS
def test_a_run_that_does_not_renew_its_own_lease_is_lost_and_told(scene: Scene, pool: str) -> None:
    worker = scene.worker(pool=pool, concurrency=2, **NEVER)
    job = scene.enqueue("overdue")

    scene.settle(30)

    worker.wait_for_log(f"Run 1 of job {job.id} did not renew its lease in time")
    last = scene.row(job).run_no
    assert last >= 2, "on a slow machine the second run may be too late as well"
    assert [(run, what) for _, run, what, _ in scene.ledger()] == [(last, "in time")]
