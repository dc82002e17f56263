"""The Celery app: `celery -A orders.worker worker` works for it, and the web server asks it for work."""

from __future__ import annotations

import os

from celery import Celery

from celery_sidejob import SideJob

DATABASE_URL = os.environ.get("DATABASE_URL", "postgresql:///fastapi_shop")

app = Celery("fastapi_shop", include=["orders.tasks"])
app.conf.update(
    broker_url=os.environ.get("CELERY_BROKER_URL", "redis://localhost:6379/4"),
    sidejob_database_url=DATABASE_URL,
    broker_connection_retry_on_startup=True,
    task_ignore_result=True,
)
sidejob = SideJob(app)
