"""A plugin for pytest that gives the app of Celery's own tests `sidejob://`, or a store and only durable tasks."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from celery.contrib.testing import app as testing
from kombu.transport import TRANSPORT_ALIASES

import celery_sidejob.transport  # noqa: F401  (makes the broker URL sidejob:// known)
from celery_sidejob import SideJob

TRANSPORT_ALIASES["stock"] = TRANSPORT_ALIASES["redis"]

STORE = os.environ.get("UPSTREAM_STORE")
_make = testing.TestApp


def _with_store(*args: Any, **kwargs: Any) -> Celery:
    app = _make(*args, **kwargs)
    app.conf.update(sidejob_database_url=STORE, sidejob_durable_tasks=["*"])
    SideJob(app)
    return app


if STORE:
    testing.TestApp = _with_store
