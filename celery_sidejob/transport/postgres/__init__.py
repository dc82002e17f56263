"""The URL `sidejobpg://`: Postgres as Celery's broker."""

from ...model import native

native.require_psycopg()  # as in the store
