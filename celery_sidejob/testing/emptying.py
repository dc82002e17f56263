"""An empty store for tests that do not use our fixtures, such as those of Django's own runner."""

from __future__ import annotations

from typing import Any

from .databases import check_is_for_tests, empty
from .subject import sidejob_of


def empty_store(sidejob: Any = None) -> None:
    """Delete all jobs, messages, dead entries and workers; the broker keeps its messages, which then mean nothing.

    SettingsError, and nothing is deleted, if the database's name does not say that it is one for tests.
    """
    settings = sidejob_of(sidejob).settings
    url = settings.require_database_url()
    check_is_for_tests(url)
    empty(url, settings.schema)
