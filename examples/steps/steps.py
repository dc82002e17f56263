"""The app of the three programs of docs/steps.md, whose bodies go on behind their last finished step.

createdb steps                                   # or name yours in DATABASE_URL
celery -A steps sidejob db upgrade
python fulfil.py create-tables
celery -A steps worker --loglevel info
"""

from __future__ import annotations

import os

from celery import Celery
from sqlalchemy import create_engine

from celery_sidejob import SideJob

SERVER = os.environ.get("DATABASE_URL", "postgresql:///steps").partition("://")[2]

app = Celery("steps", broker="sidejobpg://", include=["fulfil", "imports", "agent"])
app.conf.sidejob_database_url = f"postgresql://{SERVER}"
sidejob = SideJob(app)
engine = create_engine(f"postgresql+psycopg://{SERVER}")
