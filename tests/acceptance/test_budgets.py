"""What a worker costs the store: how many connections, and no transaction while user code runs."""

from __future__ import annotations

from typing import Any

import pytest

from celery_sidejob.store.connection import IDLE_S
from tests.acceptance.outage_site import Site, site_fixture  # noqa: F401 - the fixture `site`
from tests.tools.waiting import wait_until

PARENT = 3
"""Liveness lock, heartbeat, services."""

OURS = """
SELECT pid, state, xact_start, state_change, query FROM pg_stat_activity
WHERE application_name = 'celery_sidejob' AND datname = current_database()"""


@pytest.mark.parametrize(("pool", "concurrency"), [("prefork", 2), ("solo", 1), ("threads", 2)])
def test_connections_of_a_busy_and_of_an_idle_worker(site: Site, pool: str, concurrency: int) -> None:
    site.start_worker(pool=pool, concurrency=concurrency)
    jobs = [site.sidejob.enqueue("outage.note") for _ in range(40)]
    site.sidejob.runtime.connections.close()  # the client's own

    most = 0

    def all_completed() -> bool:
        nonlocal most
        most = max(most, len(ours(site)))
        return site.rows("SELECT count(*) n FROM jobs WHERE status = 'completed'")[0]["n"] == len(jobs)

    wait_until(all_completed, timeout=30)
    assert most <= PARENT + concurrency

    wait_until(lambda: len(ours(site)) <= PARENT, timeout=2 * IDLE_S, message="idle connections to be closed")


def test_nothing_is_open_while_user_code_runs(site: Site) -> None:
    holding = [site.hold("gate", [1, 2]) for _ in range(2)]
    site.start_worker(concurrency=2)
    for job in holding:
        site.record.wait_for("holding", job=job.id)
    site.sidejob.runtime.connections.close()

    # The connection of each process has been idle for its time, and not in a transaction, while the body goes on.
    samples: list[list[dict[str, Any]]] = []

    def only_the_parents() -> bool:
        samples.append(site.rows(OURS + " AND clock_timestamp() - xact_start > interval '0.5 s'"))
        return len(ours(site)) <= PARENT

    wait_until(only_the_parents, timeout=2 * IDLE_S, message="the connections of both processes to be closed")
    assert [rows for rows in samples if rows] == []
    assert {site.job_row(job)["status"] for job in holding} == {"running"}

    site.open("gate")
    for job in holding:
        assert site.wait_for(job, "completed")["run_no"] == 1


def ours(site: Site) -> list[dict[str, Any]]:
    """Return what the store knows of our connections."""
    return site.rows(OURS)
