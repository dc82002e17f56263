"""The variables that a test sets for a worker's process."""

from __future__ import annotations

APP = "SIDEJOB_TEST_APP"
"""The user's app, as in `celery -A`."""
CONFIGURATION = "SIDEJOB_TEST_CONFIGURATION"
"""The changes to its configuration, as JSON."""
READY = "SIDEJOB_TEST_READY"
"""The path of a file that the worker makes when it consumes."""
DJANGO = "SIDEJOB_TEST_DJANGO"
"""The names of Django's test databases by their aliases, as JSON."""
