"""An app of another name that was given somebody else's schema."""

from __future__ import annotations

import os

from celery import Celery

from celery_sidejob import SideJob

app = Celery("other", broker=os.environ["BROKER_URL"])
sidejob = SideJob(app)
