"""What a worker has fetched and cannot begin goes to one that can, however long the run is behind which it waited."""

from __future__ import annotations

from typing import Any

import pytest

from tests.acceptance.outage_site import Site, site_fixture  # noqa: F401 - the fixture `site`
from tests.tools.waiting import wait_until

QUICK = 60
"""Runs before the long one: so many, and so short, that the worker fetches ahead of them."""
BEHIND = 6
SOON_S = 10.0


def ask(site: Site, names: list[str]) -> None:
    """Ask for jobs and durable tasks by turns."""
    for number, name in enumerate(names):
        if number % 2:
            site.sidejob.enqueue("outage.note", (name,))
        else:
            site.app.send_task("outage.noted", (name,))


def ran(site: Site) -> list[Any]:
    """Return which of those behind the long run ran, in order."""
    return [line["name"] for line in site.record.of("ran") if line["name"]]


def test_what_was_fetched_behind_a_long_run_goes_to_an_idle_worker(
    site: Site, worker_pool: str, broker_kind: str
) -> None:
    for _ in range(QUICK):
        site.sidejob.enqueue("outage.note")
    long = site.hold("gate")
    behind = [f"behind {number}" for number in range(BEHIND)]
    ask(site, behind)
    busy = site.start_worker()
    site.record.wait_for("holding", job=long.id)
    if worker_pool != "solo":  # which reads nothing while it is in a body
        busy.wait_for_log("Gave back")

    site.start_worker()

    wait_until(lambda: len(ran(site)) == BEHIND, timeout=SOON_S, message="an idle worker to run what waited")
    assert sorted(ran(site)) == behind
    if broker_kind != "quorum":  # RabbitMQ puts what was given back at its end, unless it has a delivery limit
        assert ran(site) == behind
    site.open("gate")
    assert site.wait_for(long, "completed")["run_no"] == 1
    site.nothing_lost()


@pytest.mark.pools("prefork", "threads", "gevent", reason="reads nothing while it is in a body")
def test_a_warm_stop_gives_back_at_once_what_has_not_begun(site: Site) -> None:
    """It waits for what runs, which may take hours."""
    for _ in range(QUICK):
        site.sidejob.enqueue("outage.note")
    long = site.hold("gate")
    behind = [f"behind {number}" for number in range(BEHIND)]
    ask(site, behind)
    busy = site.start_worker()
    site.record.wait_for("holding", job=long.id)

    busy.terminate()
    busy.wait_for_log("Gave back", timeout=5.0)  # with gevent Celery hears of a stop after two seconds, at most
    site.start_worker()

    wait_until(lambda: len(ran(site)) == BEHIND, timeout=SOON_S, message="another worker to run what waited")
    assert busy.alive
    site.open("gate")
    assert site.wait_for(long, "completed")["run_no"] == 1
    site.nothing_lost()
