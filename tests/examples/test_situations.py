"""The five situations of docs/situations.md, each as it is shown, with a worker that is killed in the middle."""

from __future__ import annotations

import csv
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from celery_sidejob import Job
from celery_sidejob.testing import move_clock
from tests.examples.shops import Shop
from tests.tools.versions import KOMBU_5_7
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes

pytestmark = KOMBU_5_7
ROWS = 30_000


class Situations(Shop):
    celery_app = "situations"

    def __init__(self, directory: Path, processes: Processes, database_url: str) -> None:
        super().__init__("situations", directory, processes, database_url)
        self.celery("sidejob", "db", "upgrade")


@pytest.fixture
def shop(tmp_path: Path, processes: Processes, empty_database_url: str) -> Situations:
    """The app of the five situations, on a database of its own."""
    return Situations(tmp_path, processes, empty_database_url)


def ended(job: Job) -> str:
    return wait_until(
        lambda: job.refresh().status in ("completed", "failed") and job.status, timeout=60, message="the job's end"
    )


@contextmanager
def partner() -> Iterator[tuple[str, list[Any]]]:
    """A web server that fails at first; lends its address and the documents that it has accepted."""
    accepted: list[Any] = []
    refused: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not refused:
                refused.append(503)
                self.send_error(503)
                return
            accepted.append(document)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/orders", accepted
        assert refused == [503]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_task_that_must_not_be_lost(shop: Situations) -> None:
    with partner() as (url, accepted):
        shop.run("python", "webhook.py", url, "7")
        once = shop.directory / "killed"
        crash = {"SIDEJOB_CRASH_POINTS": "durable-end:before=kill-group", "SIDEJOB_CRASH_ONCE": str(once)}
        shop.worker("first", **crash).wait(60)
        shop.worker("second")
        wait_until(lambda: shop.sql("SELECT count(*) FROM sidejob.messages") == [(0,)], timeout=30, message="the end")
    assert accepted == [{"order": 7}] * 2, "the worker was killed after the partner was told"


@pytest.mark.few(0)
def test_an_import_of_many_rows(shop: Situations) -> None:
    with (shop.directory / "products.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("id", "name"), *((n, f"product {n}") for n in range(ROWS))])
    shop.run("python", "rows.py", "products.csv")
    assert shop.run("python", "rows.py", "products.csv") == "job 1\n", "there is only one such import"

    killed = shop.worker("first")
    wait_until(lambda: shop.sql("SELECT count(*) > 0 FROM products")[0][0], timeout=60, message="the first rows")
    killed.kill_group()
    assert shop.sql("SELECT count(*) < %s FROM products", ROWS) == [(True,)], "it was killed while it worked"
    shop.worker("second")
    with shop.client() as sidejob:
        job = sidejob.get(1)
        assert ended(job) == "completed"
        assert job.refresh().info["run_no"] > 1
    assert shop.sql("SELECT count(*), count(DISTINCT id) FROM products") == [(ROWS, ROWS)]


def test_an_order_that_waits_for_weeks(shop: Situations) -> None:
    for order in ("1", "2"):
        shop.run("python", "order.py", "new", order)
    shop.worker("first").kill_group()
    shop.worker("second")
    with shop.client() as sidejob:
        paid, unpaid = sidejob.get("order-1"), sidejob.get("order-2")

        def reminders(job: Job) -> int:
            return [step.name for step in job.steps].count("remind")

        def reminded(job: Job, times: int) -> None:
            wait_until(
                lambda: job.refresh().status == "suspended" and reminders(job) == times and job.timers,
                timeout=60, message=f"{times} reminders",
            )  # fmt: skip

        reminded(paid, 0)
        first_run: int = paid.info["run_no"]  # 2 if the killed worker had begun it
        for times in range(3):
            for job in (paid, unpaid):
                reminded(job, times)
            move_clock(timedelta(weeks=1), sidejob=sidejob)
        for job in (paid, unpaid):
            reminded(job, 3)
        shop.run("python", "order.py", "pay", "1", "9.90")
        assert ended(paid) == "completed"
        move_clock(timedelta(weeks=1), sidejob=sidejob)
        assert ended(unpaid) == "failed"
        assert (paid.timers, paid.refresh().info["run_no"]) == ([], first_run + 4), "the timeout was of the wait"
        assert sidejob.dead.groups() == {"not paid": 1}
        wait_until(lambda: not sidejob.stats()["queues"]["celery"]["depth"], timeout=60, message="the reminders")


@pytest.mark.slow
def test_a_pipeline_of_stages(shop: Situations) -> None:
    texts = [f"{'word ' * n}\n" for n in range(1, 41)]
    for number, text in enumerate(texts):
        (shop.directory / f"{number}.txt").write_text(text)
    paths = [f"{number}.txt" for number in range(len(texts))]
    shop.run("python", "pipeline.py", *paths[:20])
    killed = shop.worker("first")
    with shop.client() as sidejob:
        add = sidejob.get("add")
        wait_until(lambda: add.get("files", 0) > 0, timeout=60, message="the first text")
        killed.kill_group()
        shop.worker("second")
        shop.run("python", "pipeline.py", *paths[20:])
        wait_until(lambda: add.get("files", 0) == len(texts), timeout=90, message="all texts")
        assert add.get("words") == sum(range(1, 41))


@pytest.mark.slow
def test_a_nightly_schedule(shop: Situations) -> None:
    shop.worker("first").kill_group()
    shop.worker("second")
    assert shop.run("python", "nightly.py") == "job 1\n"
    with shop.client() as sidejob:
        before = sidejob.get_schedule("close the day").next_times(2)
        move_clock(timedelta(days=2), sidejob=sidejob)
        made = wait_until(
            lambda: (jobs := sidejob.jobs(schedule="close the day")) and len(jobs) == 3 and jobs, timeout=60,
            message="the jobs of two nights",
        )  # fmt: skip
        assert [ended(job) for job in made] == ["completed"] * 3
        nights = sorted(job.nominal_time for job in made)[1:]
        assert all(night < datetime.now(UTC) for night in nights)
        assert {night.astimezone(before[0].tzinfo).time() for night in nights} == {one.time() for one in before}
