"""Durable tasks that lock late: ended in every way, killed around a flush, and without a store just then."""

from __future__ import annotations

import os
import signal

import pytest

from tests.acceptance.durable_site import (  # noqa: F401 - the fixture `site`
    APP,
    PROCESSES,
    TIMEOUT_S,
    Site,
    site_fixture,
)
from tests.tools.brokers import APART
from tests.tools.proxy import TcpProxy
from tests.tools.waiting import wait_until

NEVER = {"LATE_EVERY_S": "3600"}
"""A process that writes only when it stops."""
ENDS = {"ignore": 1, "reject": 2, "retry": 2, "fail": 1, "heartbeat": 1}
"""How often a task runs that ends so."""


def holders(site: Site) -> list[int | None]:
    """By which workers the rows are locked."""
    return [row.locked_by for row in site.sql("SELECT locked_by FROM messages")]


@pytest.mark.parametrize("pool", ["solo", "gevent"])
def test_each_way_to_end(site: Site, pool: str) -> None:
    worker = site.worker(pool=pool)
    many = [site.call("late", number) for number in range(50)]
    ends = {how: site.call("late_ending", how) for how in ENDS}
    linked = site.call("late", 7, link=site.s("plus"))

    assert [result.get(timeout=TIMEOUT_S) for result in (*many, linked)] == [*range(50), 7]
    assert [ends[how].get(timeout=TIMEOUT_S) for how in ("retry", "heartbeat")] == ["retry", [True, True]]
    site.wait_quiet()
    assert [(entry.task_id, entry.reason) for entry in site.dead()] == [(ends["fail"].id, "failed")]
    assert {how: len(site.ran(result)) for how, result in ends.items()} == ENDS
    assert [len(site.ran(result)) for result in many] == [1] * 50
    assert len(site.record.of("ran", task=f"{APP}.plus")) == 1

    held = site.call("late_holder", 3)
    site.holding(held)
    wait_until(lambda: holders(site) not in ([], [None]), message="what still runs to be locked")
    site.go(held)
    site.wait_quiet()
    assert worker.alive
    assert "does not count" not in worker.log()


@PROCESSES
def test_a_task_that_kills_its_process_before_its_lock_is_counted_from_its_second_death_on(site: Site) -> None:
    site.worker(env={**NEVER, "SIDEJOB_MAX_LOSSES": "2", "SIDEJOB_LOST_AFTER": "600"})
    once, often = site.call("late_suicide", 1), site.call("late_suicide", 99)

    assert once.get(timeout=TIMEOUT_S) == "alive", "what nobody holds is published again at once"
    site.wait_quiet()
    (entry,) = site.dead()
    assert (entry.task_id, entry.reason, len(site.ran(often)), len(site.ran(once))) == (often.id, "lost", 3, 2)


DEATHS = [
    ("prefork", "durable-late-lock:before-commit", "late_holder", 2, 0),
    ("solo", "durable-late-lock:before-commit", "late_holder", 2, 0),
    ("prefork", "durable-late-lock:after-commit", "late_holder", 2, 1),
    ("prefork", "durable-late-end:before-commit", "late", 2, None),  # a slow machine has locked it before
    ("solo", "durable-late-end:after-commit", "late", 1, 0),
]


@pytest.mark.few(3)
@pytest.mark.parametrize(("pool", "point", "task", "runs", "losses"), DEATHS)
def test_a_process_is_killed_around_a_flush(
    site: Site, pool: str, point: str, task: str, runs: int, losses: int | None
) -> None:
    """Then its task runs so often, and is called lost so often."""
    crash = {"SIDEJOB_CRASH_POINTS": f"{point}=kill", "SIDEJOB_CRASH_ONCE": str(site.record.path) + ".crashed"}
    worker = site.worker(env=crash, pool=pool)
    result = site.call(task, 1)
    if pool == "solo":
        assert worker.wait(TIMEOUT_S) == -signal.SIGKILL
        site.worker()
    if task == "late_holder":
        site.holding(result, count=runs)
        site.go(result)

    site.wait_quiet()
    assert (result.get(timeout=TIMEOUT_S), site.dead()) == (1, [])
    assert len(site.record.of("holding" if task == "late_holder" else "ran", id=result.id)) == runs
    assert losses is None or len(site.record.of("lost", id=result.id)) == losses


@pytest.mark.parametrize("point", ["durable-late-lock:after-commit", "durable-late-end:after-commit"])
def test_the_answer_to_a_flush_is_lost(site: Site, point: str) -> None:
    worker = site.worker_with_a_crash(point, "lost")
    held, well = site.call("late_holder", 1), site.call("late", 2)
    site.holding(held)
    if "lock" in point:
        site.wait_for_crash()
    site.go(held)

    site.wait_for_crash()
    site.wait_quiet()
    assert (held.get(timeout=TIMEOUT_S), well.get(timeout=TIMEOUT_S), site.dead()) == (1, 2, [])
    assert len(site.ran(held)) == len(site.ran(well)) == 1
    assert "does not count" not in worker.log()


@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_a_stop_writes_what_is_not_written_yet(site: Site, pool: str) -> None:
    """Also one of a pool's process that has run as many tasks as it may. What nobody had written would run again."""
    worker = site.worker(
        env={**NEVER, "SIDEJOB_LOST_AFTER": "600"}, pool=pool, concurrency=1, extra=["--max-tasks-per-child=3"]
    )
    results = [site.call("late", number) for number in range(4)]
    assert [result.get(timeout=TIMEOUT_S) for result in results] == [0, 1, 2, 3]
    if pool == "prefork":
        wait_until(lambda: len(site.rows()) == 1, timeout=TIMEOUT_S, message="the first process to write")

    worker.terminate()

    assert worker.wait(TIMEOUT_S) == 0
    assert (site.rows(), site.dead()) == ([], [])
    assert [len(site.ran(result)) for result in results] == [1] * 4


@PROCESSES
def test_what_runs_without_a_lock_for_long_is_vouched_for_by_its_worker(site: Site) -> None:
    """Whose process cannot write, for one whose body lets no other thread run; and is published again if it dies."""
    site.worker(env={**NEVER, "SIDEJOB_LEASE": "3"}, concurrency=1)
    result = site.call("late_holder", 1)
    pid = site.holding(result)["pid"]
    site.worker(concurrency=1)
    wait_until(lambda: site.sql("SELECT published_at FROM messages")[0].published_at, timeout=TIMEOUT_S)
    (row,) = site.sql("SELECT next_check_at FROM messages")
    for _ in range(2):  # each look is put off before it comes
        wait_until(
            lambda: site.sql("SELECT next_check_at > %s AS later FROM messages", row.next_check_at)[0].later,  # noqa: B023
            timeout=TIMEOUT_S,
        )
        (row,) = site.sql("SELECT next_check_at, suspected_at FROM messages")
        assert row.suspected_at is None
    assert len(site.record.of("holding", id=result.id)) == 1
    assert holders(site) == [None]

    os.kill(pid, signal.SIGKILL)

    site.holding(result, count=2)
    site.go(result)
    site.wait_quiet()
    assert (len(site.ran(result)), site.dead()) == (1, [])


def test_a_copy_that_overtakes_a_run_without_a_lock_counts(site: Site) -> None:
    first = site.worker(
        env={"SIDEJOB_CRASH_POINTS": "durable-late-lock:before-commit=stop", "SIDEJOB_LEASE": "60"}, pool="solo"
    )
    result = site.call("late_holder", 1, link=site.s("plus"))
    site.holding(result)
    site.worker()
    site.sql("UPDATE messages SET published_at = NULL, next_check_at = now()")
    site.holding(result, count=2)
    (holder,) = holders(site)

    first.cont()
    site.go(result)

    first.wait_for_log("was taken from this run", TIMEOUT_S)
    site.wait_quiet()
    assert (holder is not None, result.get(timeout=TIMEOUT_S), site.dead()) == (True, 1, [])
    assert len(site.record.of("ran", task=f"{APP}.plus")) == 1, "what follows goes out once"


@pytest.mark.brokers("redis", only=APART, reason="has a message with the commit that keeps it")
def test_what_its_publisher_sends_after_a_copy_of_it_may_have_run_begins_with_a_lock(site: Site) -> None:
    """The publisher stands still between its commit and the broker, for longer than the sweeper leaves it alone."""
    worker = site.worker()
    client = site.processes.start_python(
        f"from {APP} import late; late.apply_async((1,), task_id='one')",
        env={**site.env, "SIDEJOB_CRASH_POINTS": "durable-keep:after-commit=stop"},
    )
    (line,) = site.record.wait_for("ran", timeout=TIMEOUT_S, id="one")
    assert line["again"], "that of the sweeper"
    site.wait_quiet()

    client.cont()

    assert client.wait(TIMEOUT_S) == 0
    assert site.call("late", 2).get(timeout=TIMEOUT_S) == 2, "which comes after it"
    assert worker.log().count("[one] received") == 2
    assert len(site.record.of("ran", id="one")) == 1


@pytest.mark.brokers("redis", only=APART, reason="is the store, which is not away alone")
@pytest.mark.parametrize("how", ["refuse", "black_hole"])
def test_a_store_that_is_away_at_the_flush(site: Site, how: str) -> None:
    """What has begun ends; then no more begins without a lock. Nothing is repeated once the store is back."""
    with TcpProxy.to(site.database_url) as proxy:
        worker = site.worker(
            env={"SIDEJOB_DATABASE_URL": proxy.url_for(site.database_url), "SIDEJOB_LEASE": "30"}, concurrency=1
        )
        assert site.call("late", 0).get(timeout=TIMEOUT_S) == 0
        site.wait_quiet()
        getattr(proxy, how)()
        held = site.call("late_holder", 1)
        site.holding(held)
        if how == "refuse":
            worker.wait_for_log("Late locks are not written", TIMEOUT_S)
        well = site.call("late", 2)
        site.go(held)
        assert held.get(timeout=TIMEOUT_S) == 1
        if how == "refuse":
            worker.wait_for_log("goes back to the broker", TIMEOUT_S)
            assert site.ran(well) == []
        assert len(site.rows()) == 2

        proxy.pass_through()

        assert well.get(timeout=TIMEOUT_S) == 2
        site.wait_quiet()
    assert (len(site.ran(held)), len(site.ran(well)), site.dead()) == (1, 1, [])
