"""The app of `jobs` with code that knows one revision of the schema more than we do.

There is no other release yet to be run beside this one. So this is the present code, told that a further revision is
the newest: it judges schemas as such a version would.
"""

from __future__ import annotations

from celery_sidejob.store import meta

meta.REVISION = f"{int(meta.REVISION) + 1:04}"

from tests.acceptance.jobs import app, sidejob  # noqa: E402, F401 - what a worker finds here
