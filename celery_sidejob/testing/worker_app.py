"""The app of a worker that a test has started: the user's app, on the servers of the test.

`worker.py` runs ``celery -A celery_sidejob.testing.worker_app worker``, so that Celery imports everything in its usual
order: first it patches for the pool, then it imports the app. It has set SIDEJOB_TEST_WORKER (the name of the app, the
changes to its configuration, and the names of Django's test databases by their aliases) and SIDEJOB_TEST_READY (the
path of a file that is made here when the worker consumes).
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from celery.app.utils import find_app
from celery.signals import worker_ready


def _told() -> Any:
    name, changes, names = json.loads(os.environ["SIDEJOB_TEST_WORKER"])
    found = find_app(name)
    for key, value in changes.items():
        found.conf[key] = value
    if names:
        from django.conf import settings  # the test has it; the app may not have imported it yet
        from django.db import connections

        if settings.configured or "DJANGO_SETTINGS_MODULE" in os.environ:  # otherwise the app works without Django
            for alias, database in names.items():
                connections[alias].settings_dict["NAME"] = database
    return found


@worker_ready.connect(weak=False)
def _ready(**_: Any) -> None:
    """Tell the test: this worker consumes now."""
    Path(os.environ["SIDEJOB_TEST_READY"]).touch()


signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the test had them blocked while it started us (janitor.py)
app = _told()
