"""What `doctor` looks at in the broker: whether it answers, and whether a Redis would throw messages away."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from celery import Celery

from ..model.finding import Finding, error, warning, well

ATTEMPT_S = 3.0
FULL = 0.9
"""From this share of its memory on a Redis is nearly full."""


def findings(app: Celery) -> Iterator[Finding]:
    """Yield what is found; one bounded attempt, on a connection of its own."""
    options = dict(app.conf.broker_transport_options)
    redis = app.connection_for_write().transport.driver_type == "redis"
    if redis:
        options.update(socket_timeout=ATTEMPT_S, socket_connect_timeout=ATTEMPT_S, retry_on_timeout=False)
    began = time.monotonic()
    with app.connection_for_write(transport_options=options, connect_timeout=ATTEMPT_S) as connection:
        shown = connection.as_uri()
        try:
            transport = connection.transport
            established = transport.establish_connection()
            try:
                took_s = time.monotonic() - began
                yield well("broker", f"{shown} answers after {took_s * 1000:.0f} ms")
                if redis:
                    yield from _memory(transport.create_channel(established).client.info("memory"))
            finally:
                transport.close_connection(established)
        except Exception as failure:  # whatever a transport raises
            yield error(
                "broker", f"{shown}: {type(failure).__name__}: {failure}", meaning="No run begins but those that are "
                "under way go on. Nothing is lost: what is asked is kept in the store and goes out later.",
                remedy="Start the broker, or correct broker_url.",
            )  # fmt: skip


def _memory(info: dict[str, Any]) -> Iterator[Finding]:
    policy, limit, used = info.get("maxmemory_policy"), info.get("maxmemory") or 0, info.get("used_memory") or 0
    if policy is not None and policy != "noeviction":
        grave = error if policy.startswith("allkeys") and limit else warning
        yield grave(
            "eviction", f"maxmemory-policy is {policy}", meaning="A full Redis throws keys away, queues with all their "
            "messages too. Messages of jobs are sent again after sidejob_lost_after; those of other tasks are gone.",
            remedy="CONFIG SET maxmemory-policy noeviction, and in its configuration file; use another Redis as cache.",
        )  # fmt: skip
    elif limit and used > FULL * limit:
        yield warning(
            "eviction", f"{used / limit:.0%} of maxmemory is used", meaning="When it is full, Redis refuses messages: "
            "they wait in the store.", remedy="Give it more memory; look which queue nobody serves.",
        )  # fmt: skip
    else:
        yield well("eviction", f"maxmemory-policy is {policy or 'not known'}")
