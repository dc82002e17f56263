"""The URL `sidejobpg://`: Postgres as Celery's broker."""

from ... import store  # noqa: F401 - before psycopg: it says what to do without libpq
