"""What befalls durable tasks under way: a store that is away, a worker that stands still, deaths around a burial."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from celery import Celery

from celery_sidejob import embedded
from celery_sidejob.model.durable import HEADER
from celery_sidejob.store.schema.migrate import upgrade
from tests.acceptance.durable_site import (  # noqa: F401 - the fixture `site`
    APP,
    PROCESSES,
    SEVERAL,
    TIMEOUT_S,
    Site,
    site_fixture,
)
from tests.tools.brokers import APART, Broker
from tests.tools.databases import prepare_template
from tests.tools.proxy import TcpProxy
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes


@pytest.mark.brokers("redis", only=APART, reason="is the store, which is not away alone")
def test_a_store_that_is_away_when_a_run_begins_and_when_it_ends(site: Site) -> None:
    with TcpProxy.to(site.database_url) as proxy:
        worker = site.worker(env={"SIDEJOB_DATABASE_URL": proxy.url_for(site.database_url), "SIDEJOB_LEASE": "20"})
        proxy.refuse()
        result, late = site.call("holder", 1), site.call("noted_late", 2)
        worker.wait_for_log("does not begin now", TIMEOUT_S)
        proxy.pass_through()

        site.holding(result)
        proxy.refuse()
        site.go(result)
        site.record.wait_for("ran", id=result.id, timeout=TIMEOUT_S)
        proxy.pass_through()

        assert result.get(timeout=TIMEOUT_S) == 1
        assert late.get(timeout=TIMEOUT_S) == 2
        site.wait_quiet()
    assert (len(site.ran(result)), len(site.ran(late)), site.dead()) == (1, 1, [])
    assert len(site.record.of("holding", id=result.id)) == 1


@pytest.mark.brokers("redis", "amqp")
def test_a_broken_connection_may_cut_off_what_runs_and_it_begins_again(site: Site) -> None:
    """`worker_cancel_long_running_tasks_on_connection_loss`: for tasks whose message comes again."""
    with TcpProxy.to(site.broker_url) as proxy:
        worker = site.worker(env={"BROKER_URL": proxy.url_for(site.broker_url), "CANCEL": "1"})
        result = site.call("repeatable", 1)
        site.holding(result)

        proxy.cut()

        # Threads and solo cannot stop a body; gevent on Redis, which has no room for more, does not ask for any.
        pool = site.processes.pool
        stops = pool == "prefork" or (pool == "gevent" and not site.broker.is_redis)
        site.holding(result, count=2 if stops else 1)
        site.go(result)
        assert result.get(timeout=TIMEOUT_S) == 1
        site.wait_quiet()
        assert worker.alive
    assert (len(site.ran(result)), site.dead()) == (1, [])


@PROCESSES
@pytest.mark.parametrize("task", ["repeatable", "holder"])
def test_a_cold_stop_while_a_result_is_stored_is_no_failure(site: Site, task: str) -> None:
    with TcpProxy.to(site.broker.backend_url) as proxy:
        first = site.worker(env={"RESULT_BACKEND": proxy.url_for(site.broker.backend_url), "SIDEJOB_LEASE": "20"})
        result = site.call(task, 1)
        site.holding(result)
        proxy.black_hole()
        site.go(result)
        site.record.wait_for("ran", id=result.id, timeout=TIMEOUT_S)
        wait_until(lambda: proxy.open_connections, timeout=TIMEOUT_S, message="the result to be on its way")

        first.send_signal(signal.SIGQUIT)

        wait_until(lambda: not first.children(), timeout=TIMEOUT_S, message="its process to have stopped")
        proxy.pass_through()
        first.wait(TIMEOUT_S)
    site.worker()
    site.wait_quiet()
    ends = [(entry.reason, entry.error.partition(":")[0]) for entry in site.dead()]
    if task == "repeatable":
        assert (result.get(timeout=TIMEOUT_S), ends, len(site.ran(result))) == (1, [], 2)
    else:
        assert (ends, len(site.ran(result))) == ([("lost", "WorkerLostError")], 1)


@pytest.fixture
def perishable(own_postgres: embedded.Postgres, broker: Broker, record: Record, processes: Processes) -> Iterator[Site]:
    """A site with a store that the test may kill."""
    prepare_template(own_postgres.url)
    made = Site(own_postgres.url, broker, record, processes)
    yield made
    made.close()


@SEVERAL
def test_a_killed_postgres_loses_nothing_that_runs(perishable: Site, own_postgres: embedded.Postgres) -> None:
    worker = perishable.worker(concurrency=2, env={"SIDEJOB_LEASE": "20"})
    held = [perishable.call("holder", 1), perishable.call("repeatable", 2)]
    for result in held:
        perishable.holding(result)
    waiting = perishable.call("plus", 1, link=perishable.s("plus"))

    own_postgres.kill()
    own_postgres.start()
    perishable.go(*held)

    assert [result.get(timeout=TIMEOUT_S) for result in (*held, waiting)] == [1, 2, 2]
    perishable.wait_quiet()
    assert perishable.dead() == []
    assert [len(perishable.record.of("holding", id=result.id)) for result in held] == [1, 1]
    assert worker.alive


def test_a_worker_that_stood_still_ends_nothing_that_was_taken_from_it(site: Site) -> None:
    first = site.worker()
    result = site.call("repeatable", 1, link=site.s("plus"))
    site.holding(result)
    first.stop_signal()
    site.worker()
    site.holding(result, count=2)
    (before,) = site.sql("SELECT locked_by, generation, losses FROM messages WHERE body IS NOT NULL")
    assert before.losses == 0, "nobody knows whether a run had begun that was held since its fetch"

    site.go(result)
    first.cont()

    first.wait_for_log("was taken from this run", TIMEOUT_S)
    site.wait_quiet()
    assert (result.get(timeout=TIMEOUT_S), site.dead()) == (1, [])
    assert len(site.record.of("ran", task=f"{APP}.plus")) == 1, "what follows goes out once"


@PROCESSES
@pytest.mark.parametrize("point", ["durable-bury:before-commit", "durable-bury:after-commit", "doom:told"])
def test_a_death_around_a_burial_makes_one_entry(site: Site, point: str) -> None:
    workers = [
        site.worker_with_a_crash(point) for _ in range(2 if point == "doom:told" else 1)
    ]  # then the sweeper dies
    result = site.call("holder" if point == "doom:told" else "failing", link_error=site.s("errback"))
    if point == "doom:told":
        os.kill(site.holding(result)["pid"], signal.SIGKILL)

    site.wait_for_crash()
    site.wait_quiet()

    # The worker that dies may have begun the errback, which is then in the dead set too: it may not be repeated.
    (entry,) = [one for one in site.dead() if one.task_id == result.id]
    assert (entry.task_id, entry.reason) == (result.id, "failed" if point == "durable-bury:after-commit" else "lost")
    assert len(site.record.of("buried")) == (0 if point == "durable-bury:after-commit" else 1)
    assert 1 <= len(site.record.of("errback")) <= 2
    assert result.state == "FAILURE"
    assert [worker.alive for worker in workers].count(False) == len(workers) - 1


def test_a_body_that_sees_its_worker_stop_goes_on_elsewhere(site: Site) -> None:
    first = site.worker()
    result = site.call("beating")
    site.record.wait_for("beat", id=result.id, timeout=TIMEOUT_S)

    first.terminate()

    first.wait(TIMEOUT_S)
    left = site.ran(result)  # a worker of threads may be given it once more
    assert {(line["stopping"], line["held"]) for line in left} == {(True, True)}
    site.worker()
    site.go(result)
    assert result.get(timeout=TIMEOUT_S) is True
    site.wait_quiet()
    assert [line["stopping"] for line in site.ran(result)] == [True] * len(left) + [False]
    assert (site.dead(), site.record.of("lost")) == ([], [])


def test_a_client_with_another_store_than_the_workers_is_told_of(site: Site, empty_database_url: str) -> None:
    upgrade(empty_database_url)
    worker = site.worker(concurrency=2)
    held = site.call("holder", 1)
    site.holding(held)
    elsewhere = site.client(sidejob_database_url=empty_database_url)

    with Celery("plain", set_as_current=False) as plain:  # a copy of what runs: its row is there
        plain.conf.update(**site.broker.configuration, task_default_queue="durable")
        plain.send_task(f"{APP}.holder", (1,), task_id=held.id, headers={HEADER: {"v": 1, "n": 1}})
    worker.wait_for_log("] ignored", TIMEOUT_S)
    assert "has no row" not in worker.log()
    for _ in range(2):
        elsewhere.send_task(f"{APP}.noted", (1,))

    worker.wait_for_log("] ignored", TIMEOUT_S, count=3)
    assert worker.log().count("has no row in schema 'sidejob', so it is not run") == 1
    site.go(held)
    assert held.get(timeout=TIMEOUT_S) == 1
