"""The variables by which a test tells a worker's process what it is."""

from __future__ import annotations

APP = "SIDEJOB_TEST_APP"
"""The user's app, as `celery -A` is given it."""
CONFIGURATION = "SIDEJOB_TEST_CONFIGURATION"
"""The changes of its configuration, as JSON."""
READY = "SIDEJOB_TEST_READY"
"""A file that the worker makes when it consumes."""
DJANGO = "SIDEJOB_TEST_DJANGO"
"""The names of Django's test databases by their aliases, as JSON."""
