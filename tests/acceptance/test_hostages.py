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


class Hostages:
    """A worker in a long run, with messages that it has fetched behind that."""

    def __init__(self, site: Site) -> None:
        self._site = site
        for _ in range(QUICK):
            site.sidejob.enqueue("outage.note")
        self._long = site.hold("gate")
        self.names = [f"behind {number}" for number in range(BEHIND)]
        ask(site, self.names)
        self.busy = site.start_worker()
        site.record.wait_for("holding", job=self._long.id)

    def wait_for_all_given_back(self) -> None:
        """Wait until the worker holds no message any more: they may come back in several parts."""

        def none_held() -> bool:
            held = self._site.sidejob.app.control.inspect(timeout=1.0).reserved()
            return bool(held) and not any(held.values())

        wait_until(none_held, timeout=SOON_S, message="all that was fetched to be given back")

    def run_elsewhere(self) -> None:
        """Start another worker, which runs them beside the long run."""
        self._site.start_worker()
        wait_until(lambda: len(ran(self._site)) == BEHIND, timeout=SOON_S, message="an idle worker to run what waited")

    def end(self) -> None:
        """Let the long run end; it was the job's first, and nothing was lost."""
        self._site.open("gate")
        assert self._site.wait_for(self._long, "completed")["run_no"] == 1
        self._site.nothing_lost()


def test_what_was_fetched_behind_a_long_run_goes_to_an_idle_worker(
    site: Site, worker_pool: str, broker_kind: str
) -> None:
    hostages = Hostages(site)
    if worker_pool != "solo":  # which reads nothing while it is in a body
        hostages.busy.wait_for_log("Gave back")
        hostages.wait_for_all_given_back()

    hostages.run_elsewhere()

    assert sorted(ran(site)) == hostages.names
    if broker_kind != "quorum":  # RabbitMQ puts what was given back at its end, unless it has a delivery limit
        assert ran(site) == hostages.names
    hostages.end()


@pytest.mark.pools("prefork", "threads", "asyncio", "awaited", "gevent", reason="reads nothing while it is in a body")
def test_a_warm_stop_gives_back_at_once_what_has_not_begun(site: Site) -> None:
    """It waits for what runs, which may take hours."""
    hostages = Hostages(site)
    busy = hostages.busy

    busy.terminate()
    busy.wait_for_log("Gave back", timeout=5.0)  # with gevent Celery hears of a stop after two seconds, at most
    hostages.run_elsewhere()

    assert busy.alive
    hostages.end()
