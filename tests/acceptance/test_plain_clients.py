"""What a client without this package publishes for our tasks: no message of its is lost before it is a job."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from celery import Celery

from tests.acceptance.scene import QUICK, Scene
from tests.tools.databases import only_reading
from tests.tools.pgbouncer import direct
from tests.tools.proxy import TcpProxy
from tests.tools.waiting import wait_until

TIMEOUT_S = 30.0


@pytest.fixture
def stranger(scene: Scene) -> Iterator[Celery]:
    """A client that knows the tasks by name, and nothing of us."""
    app = Celery("stranger", set_as_current=False)
    app.conf.update(scene.broker.configuration, task_default_queue="acceptance")
    yield app
    app.close()


def the_job(scene: Scene, task_id: str) -> Any:
    """The job that was made of a message, once it is through."""
    job = wait_until(lambda: scene.sidejob.for_task_id(task_id), timeout=TIMEOUT_S, message="the message to be a job")
    return job.wait(timeout=TIMEOUT_S)


@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_the_store_is_away_when_the_message_comes(scene: Scene, stranger: Celery, pool: str) -> None:
    with TcpProxy.to(scene.database_url) as proxy:
        worker = scene.worker(pool=pool, SIDEJOB_DATABASE_URL=proxy.url_for(scene.database_url), **QUICK)
        task_id = str(uuid.uuid4())
        proxy.refuse()
        stranger.send_task("acceptance.stepper", (1,), task_id=task_id)
        worker.wait_for_log("goes back to the broker", timeout=TIMEOUT_S)
        proxy.pass_through()

        assert str(the_job(scene, task_id).status) == "completed"
        assert scene.sql("SELECT count(*) AS n FROM jobs")[0].n == 1
        scene.settle(TIMEOUT_S)


def failed_over(url: str) -> AbstractContextManager[None]:
    """Within the block the store takes no writes."""
    return only_reading(url, ends_sessions=True)


@contextmanager
def incomplete(url: str) -> Iterator[None]:
    """Within the block a table of the store is missing."""
    with psycopg.connect(direct(url), autocommit=True, options="-c search_path=sidejob") as connection:
        connection.execute("ALTER TABLE askings RENAME TO hidden")
        try:
            yield
        finally:
            connection.execute("ALTER TABLE hidden RENAME TO askings")


@pytest.mark.brokers("redis", only=["redis", "sidejob", "amqp", "quorum"], reason="its broker is its store")
@pytest.mark.parametrize("of_no_use", [failed_over, incomplete], ids=["reads only", "incomplete"])
def test_the_store_is_there_but_of_no_use_when_the_message_comes(
    scene: Scene, stranger: Celery, of_no_use: Callable[[str], AbstractContextManager[None]]
) -> None:
    worker = scene.worker(**QUICK)
    task_id = str(uuid.uuid4())
    with of_no_use(scene.database_url):
        stranger.send_task("acceptance.stepper", (1,), task_id=task_id)
        worker.wait_for_log("goes back to the broker", timeout=TIMEOUT_S)

    assert str(the_job(scene, task_id).status) == "completed"
    scene.settle(TIMEOUT_S)


@pytest.mark.pools("prefork", reason="has no time limits, or none that strikes a wait in C")
@pytest.mark.parametrize("limits", [{"time_limit": 1}, {"soft_time_limit": 1}], ids=["hard", "soft"])
def test_a_time_limit_strikes_before_the_message_is_a_job(
    scene: Scene, stranger: Celery, limits: dict[str, int]
) -> None:
    with TcpProxy.to(scene.database_url) as proxy:
        worker = scene.worker(SIDEJOB_DATABASE_URL=proxy.url_for(scene.database_url), **QUICK)
        task_id = str(uuid.uuid4())
        proxy.black_hole()
        stranger.send_task("acceptance.stepper", (1,), task_id=task_id, **limits)
        worker.wait_for_log("TimeLimitExceeded", timeout=TIMEOUT_S)
        proxy.pass_through()

        assert str(the_job(scene, task_id).status) == "completed"
        scene.settle(TIMEOUT_S)


@pytest.mark.pools("prefork", reason="a process of the pool is killed")
@pytest.mark.parametrize("point", ["enqueue:before-commit", "enqueue:after-commit"])
def test_the_process_dies_that_makes_a_job_of_it(scene: Scene, stranger: Celery, tmp_path: Path, point: str) -> None:
    acted = tmp_path / "acted"
    scene.worker(SIDEJOB_CRASH_POINTS=f"{point}=kill-child", SIDEJOB_CRASH_ONCE=str(acted), **QUICK)
    task_id = str(uuid.uuid4())
    stranger.send_task("acceptance.stepper", (1,), task_id=task_id)

    assert str(the_job(scene, task_id).status) == "completed"
    assert acted.exists()
    assert scene.sql("SELECT count(*) AS n FROM jobs")[0].n == 1
    scene.settle(TIMEOUT_S)


def test_what_its_message_says_of_the_run_holds_for_the_job(scene: Scene, stranger: Celery) -> None:
    scene.worker(pool="prefork", **QUICK)
    task_id = str(uuid.uuid4())
    stranger.send_task("acceptance.stubborn", (600,), task_id=task_id, time_limit=1, ignore_result=True)

    job = the_job(scene, task_id)
    assert (str(job.status), job.info["error"]["type"]) == ("failed", "TimeLimitExceeded")


def test_arguments_that_no_job_can_hold_are_refused_once(scene: Scene, stranger: Celery) -> None:
    first = scene.worker(**QUICK)
    stranger.send_task("acceptance.stepper", (1, 2, 3))  # it takes one
    first.wait_for_log("too many positional arguments", timeout=TIMEOUT_S)
    first.terminate()  # what is not acknowledged would go back to the broker now
    first.wait(TIMEOUT_S)
    second = scene.worker(**QUICK)
    task_id = str(uuid.uuid4())
    stranger.send_task("acceptance.stepper", (1,), task_id=task_id)

    assert str(the_job(scene, task_id).status) == "completed"
    assert "too many positional arguments" not in second.log()
    scene.settle(TIMEOUT_S)
