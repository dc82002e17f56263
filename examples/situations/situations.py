"""The app of five situations, each in a file of its own. docs/situations.md explains which of them needs what.

createdb situations                                 # or name yours in DATABASE_URL
celery -A situations sidejob db upgrade
celery -A situations worker --loglevel info

python rows.py                                   # in another shell; each file is a program, too
"""

from __future__ import annotations

import os

from celery import Celery

from celery_sidejob import SideJob

SERVER = os.environ.get("DATABASE_URL", "postgresql:///situations").partition("://")[2]

app = Celery("situations", broker="sidejobpg://", include=["webhook", "rows", "order", "pipeline", "nightly"])
app.conf.sidejob_database_url = f"postgresql://{SERVER}"
sidejob = SideJob(app)
