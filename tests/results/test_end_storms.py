"""Whatever befalls a worker whose ends wait to be written: no result without its end, and no end without its result."""

from __future__ import annotations

import os
import signal
from itertools import chain
from typing import Any

import pytest

from celery_sidejob import embedded
from celery_sidejob.store.schema.migrate import upgrade
from tests.results.conftest import Rows, Site
from tests.tools.brokers import in_postgres
from tests.tools.recorder import Record
from tests.tools.versions import KOMBU_5_7
from tests.tools.waiting import patient, wait_until
from tests.tools.workers import Processes

TIMEOUT_S = patient(60)
COUNT = 150
"""The durable tasks of one test, and as many jobs."""

TORN = """
SELECT i FROM unnest(%s::text[]) AS i WHERE EXISTS (
    SELECT FROM results r WHERE r.key = 'task:' || i AND r.state <> 'RETRY') =
  (EXISTS (SELECT FROM messages m WHERE m.task_id = i AND m.body IS NOT NULL)
    OR EXISTS (SELECT FROM askings a WHERE a.task_id = i AND a.closed_at IS NULL))"""
"""The tasks that have a result and no end, or an end and no result, as one snapshot shows them.

A cold stop sends back a message that a process has just taken: its task has the state RETRY, and goes on.
"""


def _restart(server: embedded.Postgres, worker: Any) -> None:
    server.restart()


def _kill_main(server: embedded.Postgres, worker: Any) -> None:
    worker.kill_group()


def _kill_child(server: embedded.Postgres, worker: Any) -> None:
    os.kill(worker.children()[0], signal.SIGKILL)


def _stop_warm(server: embedded.Postgres, worker: Any) -> None:
    worker.terminate()
    worker.wait(TIMEOUT_S)


def _stop_cold(server: embedded.Postgres, worker: Any) -> None:
    worker.send_signal(signal.SIGQUIT)
    worker.wait(TIMEOUT_S)


@pytest.mark.few(2)
@pytest.mark.parametrize("trouble", [_restart, _kill_main, _kill_child, _stop_warm, _stop_cold])
@pytest.mark.parametrize("broker", [pytest.param("postgres", marks=KOMBU_5_7), "redis", "amqp"])
def test_results_and_ends_are_there_together(
    request: pytest.FixtureRequest, own_postgres: embedded.Postgres, record: Record, processes: Processes,
    broker: str, trouble: Any,
) -> None:  # fmt: skip
    upgrade(own_postgres.url, "sidejob")
    url = in_postgres(own_postgres.url) if broker == "postgres" else request.getfixturevalue(f"{broker}_url")
    site, rows = Site(own_postgres.url, url, record, processes), Rows(own_postgres.url)
    told = [*chain(*((site.sig("durable.part", n).delay(), site.sig("job.part", n).delay()) for n in range(COUNT)))]
    ids, numbers = [result.id for result in told], [n // 2 for n in range(2 * COUNT)]
    options = {"concurrency": 2}
    worker = site.start(**options)
    wait_until(lambda: len(rows.keys) > COUNT // 2, timeout=TIMEOUT_S, message="the worker to be busy")
    trouble(own_postgres, worker)
    rows.close()
    rows = Rows(own_postgres.url)
    assert rows.all(TORN, ids) == []
    if not worker.alive:
        site.start(**options)
    assert [result.get(timeout=TIMEOUT_S) for result in told] == numbers
    assert rows.all(TORN, ids) == []
    assert rows.all("SELECT FROM messages") == rows.all("SELECT FROM dead") == []
    rows.close()
    site.close()
