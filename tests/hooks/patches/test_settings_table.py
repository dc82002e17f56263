"""`Settings.table` is what `inspect conf` answers with."""

from __future__ import annotations

import inspect
from typing import Any

from celery import Celery
from celery.app.utils import Settings
from celery.worker.control import conf

from celery_sidejob.hooks.patches import app_methods


def test_the_answer_of_a_worker_shows_no_password(app: Celery, make_worker: Any) -> None:
    assert list(inspect.signature(Settings.table).parameters) == ["self", "with_defaults", "censored"]
    app_methods.mask_settings(app)
    app.conf.cache_of_the_project = "redis://user:secret@cache"
    assert "secret" in str(Settings.table(app.conf)), "Celery masks it by itself now"

    answer = str(conf(make_worker()))

    assert "@cache" in answer
    assert "secret" not in answer


def test_a_configuration_that_is_loaded_anew_shows_none_either(app: Celery) -> None:
    app_methods.mask_settings(app)
    app.conf.table()

    app.config_from_object({"cache_of_the_project": "redis://user:secret@cache"}, force=True)

    assert "secret" not in str(app.conf.table())
