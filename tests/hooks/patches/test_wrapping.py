"""A method of one object is replaced, and others of its kind have what they had."""

from __future__ import annotations

from celery import Celery

from celery_sidejob.hooks.patches import wrap


def test_one_object_is_changed_and_no_other(app: Celery) -> None:
    wrap(app, "now", lambda before, shift: (before(), shift))

    assert app.now(shift="later")[1] == "later"
    assert Celery("other", set_as_current=False).now().tzinfo is not None
