"""pytest-celery's own words work on local processes."""

from __future__ import annotations

from pytest_celery import CeleryTestSetup
from pytest_celery.vendors.worker.tasks import sleep

from tests.tools.clusters import (  # noqa: F401  fixtures, found by their names
    celery_backend,
    celery_broker,
    celery_setup_app,
    default_redis_backend,
    default_redis_broker,
    default_worker_container,
    default_worker_container_cls,
)


def test_the_ping_of_pytest_celery(celery_setup: CeleryTestSetup) -> None:
    assert celery_setup.ready(ping=True, control=True, docker=True)
    assert len(celery_setup) == 3
    celery_setup.worker.assert_log_exists("pytest_celery.vendors.worker.tasks.ping")
    (reply,) = celery_setup.app.control.ping()
    assert list(reply) == [celery_setup.worker.hostname()]


def test_a_killed_worker_can_be_restarted(celery_setup: CeleryTestSetup) -> None:
    worker = celery_setup.worker
    first = worker.container.process
    sleep.s(600).apply_async(queue=worker.worker_queue)
    worker.wait_for_log("tasks.sleep")
    worker.kill()
    assert worker.container.status == "exited"
    assert first.group() == []

    worker.restart()
    assert worker.container.status == "running"
    assert worker.container.process.pid != first.pid
    assert celery_setup.ready(ping=True)


def test_a_broker_can_be_restarted(celery_setup: CeleryTestSetup) -> None:
    celery_setup.broker.restart()
    celery_setup.worker.container.process.wait_for_log("Connected to redis", count=2)

    assert celery_setup.ready(ping=True)


def test_a_command_runs_where_the_worker_runs(celery_setup: CeleryTestSetup) -> None:
    pids = {process["pid"] for process in celery_setup.worker.get_running_processes_info(["pid"])}

    assert set(celery_setup.worker.container.process.group()) <= pids
