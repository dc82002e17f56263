"""`celery -A app sidejob …`: the commands."""

from .group import sidejob

__all__ = ["sidejob"]
