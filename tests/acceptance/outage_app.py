"""The app of the jobs in `outage_jobs`: the same one in a test's own process and in the workers it starts."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
from collections.abc import Mapping
from typing import Any

from celery import Celery

from celery_sidejob import SideJob
from tests.acceptance import outage_jobs  # noqa: F401 - it registers its tasks
from tests.tools.recorder import Record

CONFIGURATION = "SIDEJOB_TEST_CONFIGURATION"


def make_app(configuration: Mapping[str, Any]) -> Celery:
    """Return an app of this configuration with its SideJob."""
    made = Celery("outage", set_as_current=False)
    made.conf.update(configuration)
    SideJob(made)
    made.task(name="outage.noted", durable=True, shared=False)(noted)
    return made


def noted(name: str) -> None:
    """Note that an ordinary durable task ran."""
    Record.from_env().note("ran", name=name)


if CONFIGURATION in os.environ:  # in a process that a test has started
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    app = make_app(json.loads(os.environ[CONFIGURATION]))
