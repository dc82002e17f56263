"""Apps of tests: a Celery app with its SideJob, which is no other test's default."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, _state
from celery.backends.cache import DummyClient

from celery_sidejob import SideJob


def make_app(name: str = "shop", *, broker: str | None = "memory://", **settings: Any) -> Any:
    """Make an app that has these settings and a SideJob, `app.sidejob`; nothing is connected yet."""
    app = Celery(name, broker=broker, set_as_current=False)
    app.conf.update(settings)
    SideJob(app)
    return app


@pytest.fixture(autouse=True)
def no_other_tests_apps() -> Iterator[None]:
    """Have Celery forget the apps that a test makes, also while they wait for the garbage collector.

    A handle that is unpickled would look for its own among them.
    """
    before = set(_state._get_active_apps())
    yield
    for app in set(_state._get_active_apps()) - before:
        app.close()


@pytest.fixture(autouse=True)
def no_results_in_memory() -> None:
    """Empty `cache+memory://`, which all apps of a process share: the same task id may have another test's result."""
    DummyClient().cache.clear()
