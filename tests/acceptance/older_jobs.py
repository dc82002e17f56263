"""The app of `jobs` with code that knows the first revision of the schema alone.

There is no older release yet to be run beside this one. So this is the present code, told that revision 0001 is the
newest: it uses nothing that came later, and judges schemas as such a version would.
"""

from __future__ import annotations

from celery_sidejob.store import migrate, revisions

revisions.KNOWN = "0001"
migrate.head = lambda: "0001"  # type: ignore[assignment]

from tests.acceptance.jobs import app, sidejob  # noqa: E402, F401 - what a worker finds here
