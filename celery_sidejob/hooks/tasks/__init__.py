"""Durable tasks in Celery: their calls, their deliveries and their runs."""
