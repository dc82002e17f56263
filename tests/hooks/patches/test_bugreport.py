"""`Celery.bugreport` is what `celery report` prints."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

from celery import Celery
from celery.bin.celery import report
from click.testing import CliRunner

from celery_sidejob.hooks.patches import app_methods


def test_what_is_reported_shows_no_password(app: Celery) -> None:
    assert list(inspect.signature(Celery.bugreport).parameters) == ["self"]
    app.conf.cache_of_the_project = "redis://user:secret@cache"
    assert "secret" in app.bugreport(), "Celery masks it by itself now"

    app_methods.mask_report(app)

    printed = CliRunner().invoke(report, obj=SimpleNamespace(app=app, echo=print)).output
    assert "@cache" in printed
    assert "secret" not in printed
