"""Pools of our own, for `celery worker --pool`."""
