"""Two processes of pytest-xdist, each with a worker: neither sees the other's jobs, whoever gives them a database."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from celery_sidejob import SettingsError
from celery_sidejob.testing.databases import own_schema
from celery_sidejob.testing.servers import _vhost
from tests.testing.test_testing_page import run_pytest
from tests.tools.databases import Databases
from tests.tools.versions import KOMBU_5_7

SHOP = """
import os
from celery import Celery
from celery_sidejob import SideJob

app = Celery("shop", broker=os.environ["SHOP_BROKER"])
app.conf.sidejob_database_url = "postgresql://127.0.0.1:1/shop"
sidejob = SideJob(app)

@sidejob.task
def tell(job):
    job.set(by=os.environ["PYTEST_XDIST_WORKER"])
"""
TESTS = """
import os
from pathlib import Path
from celery_sidejob.testing import wait_until
from shop import tell

OWN, OTHER = ("gw0", "gw1") if os.environ["PYTEST_XDIST_WORKER"] == "gw0" else ("gw1", "gw0")

def meet(point):
    Path(f"{point}-{OWN}").touch()
    wait_until(Path(f"{point}-{OTHER}").exists, timeout=60)

def test_each_process_is_alone(sidejob_store, sidejob_workers):
    jobs = [tell.enqueue() for _ in range(3)]
    meet("asked")
    assert sidejob_store.count_jobs() == {"queued": 3}
    sidejob_workers.start()
    assert [job.wait(timeout=60).get("by") for job in jobs] == [OWN] * 3
    meet("done")
    assert sidejob_store.count_jobs() == {"completed": 3}
"""
OWN_DATABASE = """
import os
import pytest

@pytest.fixture(scope="session")
def sidejob_database_url():
    return os.environ["OWN_DATABASE"]
"""


@contextmanager
def users_database(databases: Databases) -> Iterator[str]:
    """The URL of a database that does not look as if we had made it."""
    name = f"shop_test_{secrets.token_hex(6)}"
    with psycopg.connect(databases.admin_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        try:
            yield databases.url_of(name)
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.mark.few(0)
@KOMBU_5_7
@pytest.mark.parametrize("given", ["server", "database"])
@pytest.mark.parametrize("broker", ["redis://127.0.0.1:1/0", "sidejobpg://"], ids=["redis", "postgres"])
def test_two_processes_at_once(tmp_path: Path, databases: Databases, redis_url: str, given: str, broker: str) -> None:
    files = {"shop.py": SHOP, "test_shop.py": TESTS, "pytest.ini": "[pytest]\nsidejob_app = shop\n"}
    if given == "database":
        files["conftest.py"] = OWN_DATABASE
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with users_database(databases) as url:
        said = run_pytest(
            tmp_path, "-n2", "--dist=each", SIDEJOB_TEST_DATABASE_URL=databases.admin_url,
            SIDEJOB_TEST_REDIS_URL=redis_url, OWN_DATABASE=url, SHOP_BROKER=broker,
        )  # fmt: skip
    assert "2 passed" in said, said


@pytest.mark.parametrize(
    ("process", "database", "schema"),
    [
        ("", "shop_test", "sidejob"),
        ("gw1", "shop_test", "sidejob_gw1"),
        ("gw1", "sidejob_test_abc", "sidejob"),
        ("gw1", "test_shop_gw1", "sidejob"),
    ],
)
def test_a_database_that_processes_share_has_a_schema_for_each(
    monkeypatch: pytest.MonkeyPatch, process: str, database: str, schema: str
) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", process)
    assert own_schema("sidejob", f"postgresql://h/{database}") == schema


def test_processes_that_would_share_a_vhost_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def vhost(process: str, url: str) -> str:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", process)
        return _vhost(url)

    assert vhost("", "amqp://h/test") == "amqp://h/test"
    assert vhost("", "amqp://h/test_{worker}") == "amqp://h/test_main"
    assert vhost("gw1", "amqp://h/test_{worker}") == "amqp://h/test_gw1"
    with pytest.raises(SettingsError, match=r"one vhost for all of them.*amqp://…/test_\{worker\} for test_gw0"):
        vhost("gw1", "amqp://h/test")
