"""A small shop: an order and the job that fulfils it are one transaction."""

from .celery import app as celery_app  # so that the app is there wherever Django is

__all__ = ["celery_app"]
