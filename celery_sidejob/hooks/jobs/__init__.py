"""Jobs in Celery: their task class, their calls, their deliveries and their runs."""
