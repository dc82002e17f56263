"""Messages whose rows a worker holds before their runs begin: nothing of them is lost, doubled or wrongly counted."""

from __future__ import annotations

import os
import signal

import pytest
import redis

from tests.acceptance.durable_site import TIMEOUT_S, Site, site_fixture  # noqa: F401 - the fixture `site`
from tests.tools.proxy import TcpProxy
from tests.tools.waiting import wait_until

HELD = "SELECT task_id FROM messages WHERE locked_by IS NOT NULL AND locked_pid IS NULL"
LOSSES = "SELECT DISTINCT losses FROM messages"

pytestmark = pytest.mark.pools("prefork", reason="a process of the pool is killed, or gets no run")


def test_what_a_killed_worker_held_runs_elsewhere_and_counts_from_the_second_death_on(site: Site) -> None:
    """Nobody knows of the first whether the run had begun; then its process locks the row."""
    worker = site.worker(concurrency=2)
    results = [site.call("repeatable", number) for number in range(2)]
    for deaths in range(3):
        for result in results:
            site.holding(result, deaths + 1)
        assert len(site.sql(HELD)) == (2 if deaths == 0 else 0)
        assert site.sql(LOSSES) == [(max(0, deaths - 1),)]
        if deaths < 2:
            worker.kill_group()
            worker = site.worker(concurrency=2)
    site.go(*results)
    site.wait_quiet()
    assert [len(site.ran(result)) for result in results] == [1, 1]


def test_a_killed_process_of_a_held_run_counts_at_once(site: Site) -> None:
    site.worker(concurrency=2)
    killed, other = site.call("repeatable"), site.call("repeatable")
    process = site.holding(killed)["pid"]
    site.holding(other)
    assert len(site.sql(HELD)) == 2
    os.kill(process, signal.SIGKILL)
    site.holding(killed, 2)
    assert site.sql("SELECT losses FROM messages WHERE task_id = %s", killed.id) == [(1,)]
    assert site.sql("SELECT losses FROM messages WHERE task_id = %s", other.id) == [(0,)]
    site.go(killed, other)
    site.wait_quiet()
    assert [len(site.ran(result)) for result in (killed, other)] == [1, 1]


def test_a_transaction_that_has_locked_the_row_of_a_run_holds_up_no_other(site: Site) -> None:
    site.worker(concurrency=1)
    locked = site.call("repeatable")
    site.holding(locked)
    with site.locked(locked):
        site.go(locked)
        others = [site.call("step", number) for number in range(5)]
        for other in others:
            site.record.wait_for("ran", id=other.id, timeout=TIMEOUT_S)
        assert locked.id in {row.task_id for row in site.rows()}
    site.wait_quiet()
    assert [len(site.ran(result)) for result in (locked, *others)] == [1] * 6


@pytest.mark.brokers("redis", "sidejob", "amqp", "sidejobpg")
@pytest.mark.parametrize("action", ["kill-group", "lost"])
def test_rows_that_are_held_and_whose_worker_has_no_answer_run_once(site: Site, action: str) -> None:
    """Where the store is the broker, nothing is left in the queue then."""
    site.worker_with_a_crash("durable-hold:after-commit", action)
    results = [site.call("step", number) for number in range(3)]
    site.wait_for_crash()
    if action == "kill-group":
        site.worker()
    site.wait_quiet()
    assert [len(site.ran(result)) for result in results] == [1] * 3
    assert (site.record.of("lost"), site.dead()) == ([], [])


@pytest.mark.brokers("redis", "sidejob", "amqp", "sidejobpg")
def test_what_a_killed_worker_had_fetched_and_not_begun_runs_though_nobody_looks_into_the_broker(site: Site) -> None:
    worker = site.worker(concurrency=2)
    first = [site.call("repeatable", number) for number in range(2)]
    processes = [site.holding(result)["pid"] for result in first]
    site.go(*first)
    site.wait_quiet()
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    results = [site.call("step", number) for number in range(2)]
    wait_until(lambda: len(site.sql(HELD)) == 2, timeout=TIMEOUT_S, message="the rows to be held")
    site.sql("UPDATE messages SET check_interval = interval '1 hour'")
    worker.kill_group()
    site.worker(concurrency=2)
    site.wait_quiet()
    assert [len(site.ran(result)) for result in results] == [1, 1]
    assert (site.record.of("lost"), site.dead()) == ([], [])


@pytest.mark.brokers("redis", only=["redis"], reason="shows what is not acknowledged")
def test_a_held_message_is_acknowledged_when_its_run_begins_though_its_task_asks_for_that_at_the_end(
    site: Site,
) -> None:
    site.worker()
    result = site.call("repeatable")
    site.holding(result)
    with redis.Redis.from_url(site.broker.redis_url) as client:
        wait_until(lambda: not client.hlen("unacked"), timeout=TIMEOUT_S, message="the message to be acknowledged")
    site.go(result)
    site.wait_quiet()
    assert len(site.ran(result)) == 1


def test_many_ends_and_kills_lose_and_double_nothing(site: Site) -> None:
    """A task that has ended runs again at most once for each kill of a worker that still held its row."""
    results = [site.call("step", number) for number in range(120)]
    kills = 3
    for killed in range(kills):
        worker = site.worker(concurrency=2)
        wait_until(lambda: len(site.record.of("ran")) >= 30 * (killed + 1), timeout=TIMEOUT_S)  # noqa: B023
        worker.kill_group()
    site.worker(concurrency=2)
    site.wait_quiet()
    runs = [len(site.ran(result)) for result in results]
    assert min(runs) == 1
    assert sum(runs) - len(runs) < 40 * kills, "what was held by a killed worker is repeated, and nothing else"
    assert site.dead() == []


@pytest.mark.brokers("redis", "amqp")
def test_what_a_process_has_when_the_connection_to_the_broker_breaks_runs_once(site: Site) -> None:
    """The process has not said yet that it begins, and nobody can keep it from that."""
    with TcpProxy.to(site.broker_url) as proxy:
        worker = site.worker(env={"BROKER_URL": proxy.url_for(site.broker_url)})
        first = site.call("repeatable")
        process = site.holding(first)["pid"]
        site.go(first)
        site.wait_quiet()
        os.kill(process, signal.SIGSTOP)
        result = site.call("step", 1)
        wait_until(lambda: site.sql(HELD) == [(result.id,)], timeout=TIMEOUT_S, message="the row to be held")
        worker.wait_for_log(f"step[{result.id}] received", TIMEOUT_S)
        worker.wait_for_answer(site.app, TIMEOUT_S)  # a round of its loop: it was sent
        proxy.cut()
        worker.wait_for_log("Connection to broker lost", TIMEOUT_S)
        worker.wait_for_answer(site.app, TIMEOUT_S)
        os.kill(process, signal.SIGCONT)
        site.wait_quiet()
    assert (len(site.ran(result)), site.record.of("lost")) == (1, [])
