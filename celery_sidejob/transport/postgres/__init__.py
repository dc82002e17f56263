"""The URL `sidejobpg://`: Postgres as Celery's broker."""

from ...model import libpq

libpq.require()  # as in the store
