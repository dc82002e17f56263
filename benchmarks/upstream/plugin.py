"""A plugin for pytest that gives the app of Celery's own tests our broker URLs, or a store and only durable tasks."""

from __future__ import annotations

import os
from typing import Any

import pytest
from celery import Celery
from celery.contrib.testing import app as testing

import benchmarks.upstream.urls  # noqa: F401  (makes the broker URLs known)
from celery_sidejob import SideJob

STORE = os.environ.get("UPSTREAM_STORE")
_make = testing.TestApp


def _with_store(*args: Any, **kwargs: Any) -> Celery:
    app = _make(*args, **kwargs)
    app.conf.update(sidejob_database_url=STORE, sidejob_durable_tasks=["*"])
    SideJob(app)
    return app


@pytest.fixture(autouse=True, scope="session")
def worker(celery_session_worker: Any) -> Any:
    """Start the tests' worker: some tests call a task and leave it to an earlier test to have started one."""
    return celery_session_worker


if STORE:
    testing.TestApp = _with_store
