"""The Celery app: `celery -A orders.worker worker` works for it, and the web server asks it for work."""

from __future__ import annotations

import os

from celery import Celery

from celery_sidejob import SideJob

DATABASE_URL = os.environ.get("DATABASE_URL", "postgresql:///fastapi_shop")

app = Celery("fastapi_shop", include=["orders.tasks"])
app.conf.update(
    sidejob_database_url=DATABASE_URL,
    broker_url=os.environ.get("CELERY_BROKER_URL", "sidejobpg://"),  # alone: the database above
    result_backend="sidejobpg://",
    broker_connection_retry_on_startup=True,
)
sidejob = SideJob(app)
