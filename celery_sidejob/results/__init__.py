"""`result_backend = "sidejobpg://"`: Celery's results in Postgres. Celery finds the backend by an entry point."""
