"""Waiting for a fact, never for time."""

from celery_sidejob.testing.waiting import wait_until

__all__ = ["wait_until"]
