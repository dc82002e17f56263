"""The app of a worker that a test has started: the user's app, on the servers of the test.

`worker.py` runs ``celery -A celery_sidejob.testing.worker_app worker``, so that Celery imports everything in its usual
order: first it patches for the pool, then it imports the app.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from celery.app.utils import find_app
from celery.signals import worker_ready

from .variables import APP, CONFIGURATION, DJANGO, READY


def _told() -> Any:
    found = find_app(os.environ[APP])
    for key, value in json.loads(os.environ[CONFIGURATION]).items():
        found.conf[key] = value
    names = json.loads(os.environ.get(DJANGO, "{}"))
    if names:
        from django.conf import settings  # the test has it; the app may not have imported it yet
        from django.db import connections

        if settings.configured or "DJANGO_SETTINGS_MODULE" in os.environ:  # otherwise the app works without Django
            for alias, name in names.items():
                connections[alias].settings_dict["NAME"] = name
    return found


@worker_ready.connect(weak=False)
def _ready(**_: Any) -> None:
    """Tell the test: this worker consumes now."""
    Path(os.environ[READY]).touch()


signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the test had them blocked while it started us (janitor.py)
app = _told()
