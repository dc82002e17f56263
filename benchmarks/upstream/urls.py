"""Makes our URLs known, and that of kombu's Redis by another name, in every process that the tests start."""

from __future__ import annotations

from celery.app.backends import BACKEND_ALIASES
from kombu.transport import TRANSPORT_ALIASES

import celery_sidejob.transport  # noqa: F401  (makes sidejob:// and sidejobpg:// known)

TRANSPORT_ALIASES["stock"] = TRANSPORT_ALIASES["redis"]
BACKEND_ALIASES["redis_like"] = "celery_sidejob.results.backend:PostgresBackend"
