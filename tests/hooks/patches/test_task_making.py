"""Tasks are made by `_task_from_fun` and `register_task`, and are complete after `finalize`."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from celery import Celery, Task

from celery_sidejob.hooks.patches import app_methods
from celery_sidejob.model.errors import SettingsError
from tests.hooks.patches.conftest import task_of


def test_each_task_passes_however_it_is_made(app: Celery) -> None:
    assert list(inspect.signature(Celery.finalize).parameters) == ["self", "auto"]
    made: list[str] = []

    def note(task: Any) -> Any:
        made.append(task.name)
        return task

    app_methods.tell_of_tasks(app, made=note, completed=lambda: made.append("complete"))

    class Own(Task):
        name = "contract.own"

    app.register_task(Own())
    task_of(app, "early")
    app.finalize()
    task_of(app, "late")

    ours = [name for name in made if name.startswith(("contract.", "complete"))]
    assert [name for name in ours if name != "complete"] == ["contract.own", "contract.early", "contract.late"]
    assert ours[-2:] == ["complete", "contract.late"]
    assert {"contract.own", "contract.early", "contract.late"} <= app.tasks.keys()


def test_what_is_wrong_is_said_again_at_each_use(app: Celery) -> None:
    def refuse() -> None:
        raise SettingsError("a task has a wrong option")

    app_methods.tell_of_tasks(app, made=lambda task: task, completed=refuse)

    for _ in range(2):
        with pytest.raises(SettingsError, match="wrong option"):
            _ = app.tasks
