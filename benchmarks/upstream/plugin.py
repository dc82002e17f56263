"""A plugin for pytest that gives the app of Celery's own tests our broker URLs, or a store and only durable tasks."""

from __future__ import annotations

import os
from typing import Any

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


if STORE:
    testing.TestApp = _with_store
