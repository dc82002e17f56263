"""Ordinary durable tasks as Celery sees them: their calls, their deliveries and runs."""
