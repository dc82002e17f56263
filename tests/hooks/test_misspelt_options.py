"""An option of ours that is misspelt, or stands on a task of the wrong kind, is not taken for an attribute."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, Task

from celery_sidejob import SettingsError, SideJob, sidejob_task
from celery_sidejob.hooks import task_options
from tests.tools.apps import make_app


def ordinary() -> None:
    """A task of Celery's own kind."""


def app_with(**options: Any) -> Celery:
    app = make_app("shop")
    app.task(ordinary, name="shop.mail", shared=False, **options)
    return app


@pytest.mark.parametrize(
    ("option", "meant"),
    [("inport", "inports"), ("Outports", "outports"), ("max_loses", "max_losses"), ("on_loss", "on_lost"),
     ("lease_renewl", "lease_renewal"), ("durabel", "durable")],
)  # fmt: skip
def test_of_a_sidejob_task(option: str, meant: str) -> None:
    with pytest.raises(SettingsError, match=f"'{option}' is no option of a sidejob task. Did you mean '{meant}'"):
        sidejob_task(**{option: 1})(lambda job: None)


@pytest.mark.parametrize(
    ("option", "meant"),
    [("durabel", "durable"), ("on_lots", "on_lost"), ("max_loses", "max_losses")],
)
def test_of_an_ordinary_task_at_each_use_of_the_app(option: str, meant: str) -> None:
    app = app_with(**{option: True})
    for _ in range(2):
        with pytest.raises(
            SettingsError, match=f"'{option}' is no option of a task .shop.mail.. Did you mean '{meant}"
        ):
            app.tasks["shop.mail"]


def test_of_a_task_that_is_made_before_the_app_is_known() -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.task(ordinary, name="shop.mail", shared=False, durabel=True)
    SideJob().init_app(app)
    with pytest.raises(SettingsError, match="Did you mean 'durable'"):
        app.finalize()


@pytest.mark.parametrize("others", [{}, {"durable": True}])
def test_options_of_jobs_on_an_ordinary_task(others: dict[str, bool]) -> None:
    with pytest.raises(SettingsError, match=r"decorate it with @sidejob_task.inports="):
        app_with(inports=["a"], **others).finalize()


def test_a_wrong_value_on_a_durable_task() -> None:
    with pytest.raises(SettingsError, match="on_lost is 'requeue' or 'dead', not 'ded'"):
        app_with(durable=True, on_lost="ded").finalize()


def test_attributes_of_a_users_own_are_left_alone() -> None:
    own = {"retention": 7, "lease": None, "release": True, "tenant": "large", "duration": 3}
    assert app_with(**own).tasks["shop.mail"].tenant == "large"
    assert task_options.check_options(own) == own


def test_no_attribute_of_celery_s_own_tasks_is_close_to_an_option_of_ours() -> None:
    assert {name: found for name in dir(Task) if (found := task_options._meant(name, task_options.OWN_OPTIONS))} == {}


def test_which_tasks_are_durable_and_which_only_look_so(caplog: pytest.LogCaptureFixture) -> None:
    app = app_with(durable=True, on_lost="dead")
    for name in "abcdef":
        app.task(ordinary, name=f"kept.{name}", shared=False)
    app.task(ordinary, name="loose", shared=False, on_lost="requeue")
    app.task(ordinary, name="meant", shared=False, on_lost="requeue", durable=False)
    app.conf.sidejob_durable_tasks = ["kept.*"]

    counted, idle = task_options.findings(app)

    assert counted.found == "7: kept.a, kept.b, kept.c, kept.d, kept.e and 2 more"
    assert (str(idle.level), idle.found) == (
        "warning",
        "not durable, though on_lost or max_losses is given: loose",
    )

    task_options.warn(app)

    assert [record.getMessage() for record in caplog.records] == [
        f"durable tasks: {idle.found}. {idle.meaning} {idle.remedy}"
    ]


def test_a_pattern_that_matches_no_task_is_named() -> None:
    app = app_with()
    app.conf.sidejob_durable_tasks = ["shop.*", "shpo.*"]

    (counted,) = task_options.findings(app)

    assert (str(counted.level), counted.found) == ("ok", "1: shop.mail; no task known here matches shpo.*")


def test_an_option_that_is_not_needed_any_more_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Where the task is made, or by an annotation; whatever its value, and whether the task may be repeated."""
    app = app_with(durable=True, locks_late=True)
    app.task(ordinary, name="shop.once", shared=False, durable=True, on_lost="dead")
    app.task(ordinary, name="shop.other", shared=False, durable=True)
    app.conf.task_annotations = {"shop.once": {"locks_late": "sometimes"}}

    task_options.warn(app)

    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(
        "durable tasks: locks_late is given, and has no effect any more: shop.mail, shop.once. It is not needed"
    )
