"""Jobs as Celery sees them: their task, their calls, their deliveries and runs."""
