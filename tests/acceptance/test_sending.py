"""`send_many` by clients that are killed in the middle of it, on each broker: all or nothing, and each once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.acceptance.durable_site import APP, TIMEOUT_S, Site, site_fixture  # noqa: F401 - the fixture `site`

COUNT = 30
SOURCE = f"""
from celery_sidejob.hooks.broker import publishing
from {APP} import app, noted
publishing.TOGETHER = 10
results = app.sidejob.send_many([noted.s(n).set(task_id=f'many{{n:02}}') for n in range({COUNT})])
print([result.id for result in results])
"""

# What the broker has when the process dies there.
PUBLISHED = {
    "durable-keep:before-commit": None,
    "durable-keep:after-commit": 0,
    "publish-together:before=kill@2": 10,
    "publish-together:after=kill@2": 20,
    "mark:before-commit": COUNT,
    "mark:after-commit": COUNT,
}


@pytest.mark.few(4)
@pytest.mark.brokers("redis", "amqp")
@pytest.mark.parametrize("point", PUBLISHED)
def test_a_client_dies_in_the_middle_of_many(site: Site, point: str, tmp_path: Path) -> None:
    if site.broker.is_store and point.startswith(("publish", "mark")):
        pytest.skip("has a message with the commit that keeps it: nothing is published after it")
    plan = point if "=" in point else f"{point}=kill"
    client = site.processes.start_python(SOURCE, env={**site.env, "SIDEJOB_CRASH_POINTS": plan})
    assert client.wait(TIMEOUT_S) == -signal.SIGKILL
    published = PUBLISHED[point]
    if site.broker.is_store and published is not None:
        published = COUNT  # with the commit that keeps them
    assert (len(site.rows()), site.queued()) == ((0, 0) if published is None else (COUNT, published))

    site.worker()
    site.call("noted", "after")

    site.wait_quiet()
    ran = [line["id"] for line in site.record.of("ran") if line["value"] != "after"]
    assert sorted(ran) == ([] if published is None else [f"many{number:02}" for number in range(COUNT)])
    assert site.dead() == []


@pytest.mark.brokers("redis", "sidejob", "amqp")
def test_many_are_called_and_end(site: Site) -> None:
    site.worker(concurrency=2)

    results = site.app.sidejob.send_many(site.s("plus", number, link=site.s("noted")) for number in range(COUNT))

    assert [result.get(timeout=TIMEOUT_S) for result in results] == list(range(1, COUNT + 1))
    site.wait_quiet()
    assert len(site.record.of("ran")) == 2 * COUNT
