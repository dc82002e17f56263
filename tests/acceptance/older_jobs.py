"""The app of `jobs` with code that knows the schema's revisions up to the one before the newest.

There is no older release yet to be run beside this one. So this is the present code, told that the revision before is
the newest: it judges schemas as such a version would.
"""

from __future__ import annotations

from celery_sidejob.store import revisions

revisions.KNOWN = f"{int(revisions.KNOWN) - 1:04}"

from tests.acceptance.jobs import app, sidejob  # noqa: E402, F401 - what a worker finds here
