"""Workers that stop as planned, limits and revocations: what was running is finished, given back, or ended for good."""

from __future__ import annotations

import signal

import pytest

from tests.acceptance.outage_site import Site, site  # noqa: F401 - the fixture

POOLS = pytest.mark.parametrize("pool", ["prefork", "solo"])
WARM_S = 45.0
"""Celery's own warm shutdown of a prefork pool takes half a minute now and then."""


@POOLS
def test_a_warm_stop_lets_the_job_finish(site: Site, pool: str) -> None:
    job = site.hold("gate", [1, 2])
    worker = site.start_worker(pool=pool)
    site.record.wait_for("holding", job=job.id)

    worker.terminate()
    worker.wait_for_log("Warm shutdown")
    site.open("gate")

    assert worker.wait(WARM_S) == 0
    assert site.wait_for(job, "completed")["run_no"] == 1
    site.nothing_lost()
