"""The app that a test asks about, and the text of its jobs in messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from ..hooks import apps
from ..jobs.job import Job
from ..model.errors import SettingsError


def sidejob_of(subject: Any = None) -> Any:
    """Return the `SideJob` of a task, a job or an app; without any of these, of the present app."""
    if isinstance(subject, Job):
        runtime = subject._runtime
        for app in apps.every_app():
            found = getattr(app, "sidejob", None)
            with suppress(SettingsError):  # raised by another app, which is not configured
                if found is not None and found.runtime.connections is runtime.connections:
                    return found
    # A SideJob has an app, like a task.
    app = getattr(subject, "app", None) or apps.present()
    found = getattr(app, "sidejob", None)
    if found is None:
        raise SettingsError("There is no app with a SideJob here: import yours, or give sidejob=.")
    return found


def shown(job: Job) -> str:
    """Return a job's text for messages."""
    return f"job {job.id} {call_of(job.task, job.args, job.kwargs)} [{job.status}, queue {job.queue}]"


def call_of(task: str, args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
    """Return a call as Python writes it."""
    return f"{task}({', '.join([*map(repr, args), *(f'{name}={value!r}' for name, value in kwargs.items())])})"
