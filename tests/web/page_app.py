"""The app whose page a test serves; its store is that of the environment."""

from celery import Celery

from celery_sidejob import SideJob

app = Celery("stage", broker="memory://")
sidejob = SideJob(app)
