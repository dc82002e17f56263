"""Waiting for a fact, never for time."""

from celery_sidejob.testing.waiting import patient, wait_until

__all__ = ["patient", "wait_until"]
