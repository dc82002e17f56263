"""The URL `sidejobpg://`: Postgres as Celery's broker."""
