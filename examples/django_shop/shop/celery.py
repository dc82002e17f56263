"""The Celery app, and its durable jobs."""

import os

from celery import Celery

from celery_sidejob import SideJob

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")

app = Celery("django_shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
sidejob = SideJob(app)
