"""A plugin for pytest that gives kombu's own tests of `redis://` our transport; those of Sentinel patch kombu's."""

from __future__ import annotations

import os

from kombu.transport import TRANSPORT_ALIASES

import celery_sidejob.transport  # noqa: F401  (makes the broker URL sidejob:// known)

if os.environ["UPSTREAM_SIDE"] == "sidejob":
    TRANSPORT_ALIASES["redis"] = TRANSPORT_ALIASES["sidejob"]
