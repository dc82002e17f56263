"""Many jobs write to one port with a limit: each packet read wakes one of them, and none is forgotten."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_sidejob import Job
from tests.acceptance.scene import QUICK, Scene
from tests.tools.waiting import wait_until

MANY = 28


def read_all(scene: Scene, reader: Job, writers: list[Job], *, after_each: Callable[[int], None]) -> None:
    """Read a packet of each writer, one at a time."""
    port, read = reader.input("in"), list[int]()
    for number in range(1, MANY + 1):
        wait_until(lambda: port.has_data, timeout=60, message=f"packet {number}")
        read.append(port.read())
        after_each(number)
    scene.settle(60)
    assert sorted(read) == [job.id for job in writers]
    assert {str(job.refresh().status) for job in writers} == {"completed"}
    assert scene.sql("SELECT * FROM port_waiters") == []


def test_each_packet_read_wakes_one_of_many_writers(scene: Scene) -> None:
    scene.worker(concurrency=4)
    reader = scene.enqueue("narrow")
    writers = [scene.enqueue("posts", (reader.id,)) for _ in range(MANY)]
    wait_until(
        lambda: scene.sql("SELECT count(*) AS rows FROM port_waiters")[0].rows == MANY - 1,
        timeout=60, message="all but one wait",
    )  # fmt: skip
    before = len(scene.record.of("posts"))
    read_all(scene, reader, writers, after_each=lambda number: None)
    assert len(scene.record.of("posts")) - before <= MANY + 2


@pytest.mark.few(0)
@pytest.mark.pools("prefork", "threads", "asyncio", "awaited", reason="four run at once")
def test_no_writer_is_forgotten_whatever_dies(scene: Scene) -> None:
    workers = [scene.worker(concurrency=4, **QUICK)]
    reader = scene.enqueue("narrow")
    writers = [scene.enqueue("posts", (reader.id,)) for _ in range(MANY)]

    def kill(number: int) -> None:
        if number % 5 == 0:
            workers.pop().kill()
            workers.append(scene.worker(concurrency=4, **QUICK))

    read_all(scene, reader, writers, after_each=kill)
