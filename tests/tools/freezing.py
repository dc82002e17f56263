"""Processes that neither run nor die: SIGSTOP for all that belong together."""

from celery_sidejob.testing.freezing import family, freeze, frozen, is_alive, send_all, thaw

__all__ = ["family", "freeze", "frozen", "is_alive", "send_all", "thaw"]
