"""A task that is a class has its options checked however it is registered."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_sidejob import InvalidPortError, SettingsError, SideJob, SideJobTask

WRONG: list[tuple[str, Any, type[Exception]]] = [
    ("max_losses", 0, SettingsError),
    ("on_lost", "ded", SettingsError),
    ("run_rate", "600/min", SettingsError),
    ("on_run_rate", "terminate", SettingsError),
    ("capacity", 5, SettingsError),
    ("lease", 5, SettingsError),
    ("retention", -1, SettingsError),
    ("inports", ["not a name"], InvalidPortError),
    ("inport", ["a"], SettingsError),
]


def by_the_app(app: Celery, task_class: type[SideJobTask]) -> None:
    SideJob(app)
    app.register_task(task_class())


def by_the_decorator(app: Celery, task_class: type[SideJobTask]) -> None:
    SideJob(app).task(task_class)
    app.finalize()


@pytest.mark.parametrize(("option", "value", "error"), WRONG)
@pytest.mark.parametrize("register", [by_the_app, by_the_decorator])
def test_a_wrong_option_is_refused(option: str, value: Any, error: type[Exception], register: Any) -> None:
    app = Celery("options", broker="memory://", set_as_current=False)
    task_class = type("Wrong", (SideJobTask,), {"name": "options.wrong", option: value, "run": lambda self, job: None})
    with pytest.raises(error):
        register(app, task_class)
