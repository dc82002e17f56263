"""Replaces `Celery.bugreport` of one app; read in Celery 5.5.0 and 5.7.0.

`celery report` prints what ``app.bugreport()`` returns: a text with all settings, and passwords in those whose names
Celery does not know. Ours masks the text. If a later Celery reports in another way, these passwords are shown again.
"""

from __future__ import annotations

from celery import Celery

from ..masking import masked_text
from .wrapping import wrap


def install(app: Celery) -> None:
    """Have the app's report show no password."""
    wrap(app, "bugreport", lambda report: masked_text(report()))
