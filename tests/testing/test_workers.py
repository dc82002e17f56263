"""Workers of users' tests: on a given Redis, shown where a test fails, and gone with the run that has started them."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis
from celery import Celery

from celery_sidejob import SettingsError
from celery_sidejob.testing import Worker, databases
from celery_sidejob.testing.databases import check_is_for_tests
from celery_sidejob.testing.servers import app_of
from tests.testing.test_testing_page import run_pytest
from tests.tools.freezing import is_alive
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes

SHOP = """
from celery import Celery
from celery_sidejob import SideJob

app = Celery("shop", broker="redis://127.0.0.1:1/0", backend="redis://127.0.0.1:1/0")
app.conf.sidejob_database_url = "postgresql://127.0.0.1:1/shop"
SideJob(app)

@app.task(durable=True)
def shout(what):
    print("the task says " + what)
    return what.upper()
"""
TESTS = """
import pytest
from shop import app, shout

def test_a_worker_runs_what_is_called_and_is_started_again(sidejob_worker, sidejob_store):
    assert shout.delay("one").get(timeout=20) == "ONE"
    sidejob_worker.freeze()
    result = shout.delay("two")
    sidejob_worker.thaw()
    assert result.get(timeout=20) == "TWO"
    assert len(sidejob_worker.pool_pids) == 1
    assert sidejob_worker.stop() == 0
    assert not sidejob_worker.alive
    sidejob_worker.restart()
    assert shout.delay("three").get(timeout=20) == "THREE"
    assert False, "the output is shown"

def test_the_store_and_the_broker_are_empty_again(sidejob_store, sidejob_redis):
    import redis
    assert sidejob_store.count_jobs() == {}
    with redis.Redis.from_url(sidejob_redis.url) as client:
        assert [key for key in client.keys(sidejob_redis.prefix + "*") if b"binding" not in key] == []
        assert client.get("somebody's") == b"own"
"""


@pytest.mark.few(0)
def test_a_user_s_tests_on_redis(tmp_path: Path, postgres_url: str, redis_url: str) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "test_shop.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nsidejob_app = shop:app\n")
    with redis.Redis.from_url(redis_url) as client:
        client.set("somebody's", "own")
        said = run_pytest(
            tmp_path, "-p", "no:randomly", SIDEJOB_TEST_DATABASE_URL=postgres_url, SIDEJOB_TEST_REDIS_URL=redis_url
        )
        assert client.keys() == [b"somebody's"]

    assert "1 failed, 1 passed" in said, said
    assert "the output is shown" in said
    assert "the task says three" in said


def test_an_app_that_is_not_named_or_has_no_sidejob_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = SimpleNamespace(app=Celery("plain", set_as_current=False))
    monkeypatch.setitem(sys.modules, "plain_shop", plain)
    with pytest.raises(SettingsError, match=r"Which app is tested\?.*sidejob_app = shop"):
        app_of("")
    with pytest.raises(SettingsError, match="without a SideJob"):
        app_of("plain_shop:app")


def test_a_database_that_is_not_for_tests_is_never_emptied() -> None:
    check_is_for_tests("postgresql://h/shop_test")
    with pytest.raises(SettingsError, match="would delete all jobs in the database 'production'"):
        check_is_for_tests("postgresql://test:test@h/production")


KILLED_RUN = """
import os, signal, sys
from celery_sidejob.testing import Worker

worker = Worker("tests.tools.plain_app", env={"BROKER_URL": sys.argv[1]}).start()
print(worker.pid, *worker.pool_pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A directory for temporary files. If its path were too long for sockets, Python 3.14 would take /tmp instead."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def test_nothing_outlives_a_run_that_is_killed(processes: Processes, redis_url: str, temporary: Path) -> None:
    run = processes.start_python(KILLED_RUN, redis_url, env={"TMPDIR": str(temporary)})
    assert run.wait(60) == -signal.SIGKILL, run.log()

    pids = list(map(int, run.log().split()))
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_alive, pids)))
    wait_until(lambda: not any(temporary.iterdir()), message="the directory of the worker's files to be gone")


def test_a_killed_worker_leaves_no_temporary_files(
    redis_url: str, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(temporary))
    # As where another test has configured Django in this process: the app does without it.
    monkeypatch.setattr(databases, "names", lambda: {"default": "elsewhere"})
    with Worker("tests.tools.plain_app", env={"BROKER_URL": redis_url}) as worker:
        worker.kill()
        assert any(temporary.rglob("pymp-*")), "billiard's, which the worker would have removed"
    assert not any(temporary.iterdir())
