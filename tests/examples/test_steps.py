"""The three programs of docs/steps.md, whose workers are killed: what is done once is not done again."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from celery_sidejob import Job
from tests.examples.shops import Shop
from tests.tools.versions import KOMBU_5_7
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes, WorkerProcess

pytestmark = KOMBU_5_7
ROWS = 12_345


class Steps(Shop):
    """`examples/steps`."""

    celery_app = "steps"

    def killed_worker(self, kills: str) -> WorkerProcess:
        """Start a worker, one process of whose pool is killed at this point."""
        return self.worker("worker", SIDEJOB_CRASH_POINTS=kills, SIDEJOB_CRASH_ONCE=str(self.directory / "killed"))

    def killed(self) -> bool:
        """Whether the kill has happened."""
        return (self.directory / "killed").exists()


@pytest.fixture
def shop(tmp_path: Path, processes: Processes, empty_database_url: str) -> Steps:
    """The app of the three programs, on a database of its own."""
    shop = Steps("steps", tmp_path, processes, empty_database_url)
    shop.celery("sidejob", "db", "upgrade")
    return shop


def reached(job: Job, *statuses: str) -> str:
    """Wait until the job is in one of these statuses."""
    return wait_until(
        lambda: job.refresh().status in statuses and str(job.status), timeout=90, message=f"{job} to be {statuses}"
    )


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kills", "asked"),
    [
        ("step:before-commit=kill", 2),
        ("step:after-commit=kill", 1),
        ("end:before-commit=kill", 1),
        ("end:after-commit=kill", 1),
        ("unit:after-commit=kill", 1),
    ],
)
def test_an_order_is_paid_and_invoiced_once(shop: Steps, kills: str, asked: int) -> None:
    """The bank may be asked again for a payment whose record was not committed: the bank knows its key."""
    shop.run("python", "fulfil.py", "create-tables")
    shop.killed_worker(kills)
    assert shop.run("python", "fulfil.py", "order", "1", "30") == "job 1\n"
    shop.run("python", "fulfil.py", "sign", "1")
    with shop.client() as sidejob:
        assert reached(sidejob.get(1), "completed", "failed") == "completed"
    assert shop.killed()
    assert shop.sql("SELECT key, amount, asked FROM bank") == [("order 1", 30, asked)]
    assert shop.sql("SELECT order_id, amount FROM invoices") == [(1, 30)]
    assert shop.sql("SELECT count(*) FROM sidejob.packets") == [(0,)]
    assert shop.sql("SELECT count(*) FROM sidejob.jobs") == [(2,)], "it was packed once"


def test_an_order_that_nobody_packs_is_paid_back_once(shop: Steps) -> None:
    """The way of `except` is taken again when the failed job is retried: the card is not charged again."""
    shop.run("python", "fulfil.py", "create-tables")
    shop.killed_worker("step:after-commit=kill")
    shop.run("python", "fulfil.py", "order", "2", "13")
    with shop.client() as sidejob:
        job = sidejob.get(1)
        for is_retry in (False, True):
            if is_retry:
                (entry,) = sidejob.dead.list(group="not packed")
                sidejob.dead.retry(entry.id)
            assert reached(job, "completed", "failed") == "failed"
            assert shop.sql("SELECT key, amount, asked FROM bank ORDER BY amount DESC") == [
                ("order 2", 13, 1),
                ("order 2 is given back", -13, 1),
            ]
            assert sidejob.dead.groups()["not packed"] == 1
    assert shop.sql("SELECT count(*) FROM invoices") == [(0,)]


@pytest.mark.few(0)
def test_an_import_goes_on_behind_its_finished_pages(shop: Steps) -> None:
    with (shop.directory / "products.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("id", "name"), *((n, f"prodüct {n}") for n in range(ROWS))])
    shop.run("python", "imports.py", "products.csv")
    assert shop.run("python", "imports.py", "products.csv") == "job 1\n", "there is only one such import"

    killed = shop.worker("first")
    wait_until(lambda: shop.sql("SELECT count(*) > 0 FROM products")[0][0], timeout=60, message="the first rows")
    killed.kill_group()
    assert shop.sql("SELECT count(*) < %s FROM products", ROWS) == [(True,)], "it was killed while it worked"
    shop.worker("second")
    with shop.client() as sidejob:
        job = sidejob.get(1)
        assert reached(job, "completed", "failed") == "completed"
        assert len(job.children) == 13
    assert shop.sql("SELECT count(*), count(DISTINCT id), max(name) FROM products") == [(ROWS, ROWS, "prodüct 9999")]


@pytest.mark.few(1)
@pytest.mark.parametrize("answer", ["allow", "refuse"])
def test_an_agent_uses_each_tool_once_and_asks_a_person(shop: Steps, answer: str) -> None:
    """A killed worker costs one reply of the model, whose words are told again."""
    assert shop.run("python", "agent.py", "ask", "How warm is it? Then delete old.txt") == "job 1\n"
    heard = []
    with shop.client() as sidejob:
        job = sidejob.get(1)
        with sidejob.subscribe("/agent/1", timeout=60) as announcements:
            shop.killed_worker("step:before-commit=kill")
            while "delete" not in heard:
                heard.append(next(announcements).message)
        reached(job, "suspended")
        assert [f"{step}" for step in job.steps if step.done] == ["model", "thermometer", "model#2"]
        shop.run("python", "agent.py", answer, "1")
        assert reached(job, "completed", "failed") == "completed"
    assert shop.killed()
    # What the killed run told comes before that, as much of it as had left its process.
    assert heard[-5:] == ["use", "thermometer", "here", "use", "delete"]
    used = [("thermometer", "here"), ("delete", "old.txt")]
    assert shop.sql("SELECT tool, what FROM used ORDER BY id") == used[: 2 if answer == "allow" else 1]
