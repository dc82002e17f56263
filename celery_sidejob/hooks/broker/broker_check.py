"""The checks of `doctor` in the broker: whether it answers, would throw messages away, or refuses our queues."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

from celery import Celery

from ...model.errors import SchemaError, SettingsError, StoreUnavailableError
from ...model.finding import Finding, check, error, warning, well
from ...model.printable import counted, first_of
from ...store import health
from ...store.errors import UPGRADE, LacksRights
from ...transport.postgres.link import Link
from ...transport.postgres.topology import overview_of
from ..configuration import broker_is_store
from .connection import connection_to, established
from .view import has_dead_list

ATTEMPT_S = 3.0
OLDEST_RABBITMQ = (3, 10)
FULL = 0.9
"""From this share of its memory on a Redis is nearly full."""


@check("broker")
def findings(app: Celery) -> Iterator[Finding]:
    """Yield what is found; one bounded attempt, on a connection of its own."""
    began = time.monotonic()
    with connection_to(app, ATTEMPT_S) as connection:
        shown, transport = connection.as_uri(), connection.transport
        try:
            with established(connection, ATTEMPT_S) as made:
                took_s = time.monotonic() - began
                itself = ", the store itself," if broker_is_store(app) else ""
                yield well(f"{shown}{itself} answers after {took_s * 1000:.0f} ms")
                if transport.driver_type == "redis":
                    yield from _redis(transport.create_channel(made))
                elif transport.driver_type == "amqp":
                    yield from _queues(app, made)
                elif transport.driver_type == "postgres":
                    yield from _transport("sidejobpg://", overview_of(transport.link))
                    yield from _by_another_way(app, transport.link)
        except SchemaError as failure:
            yield error(
                f"{shown}: {failure}",
                meaning="It answers, and messages can neither be sent nor fetched "
                "there. What is asked is kept in the store, if that has its schema.",
                remedy="See what the message says." if isinstance(failure, LacksRights) else UPGRADE,
            )
        except Exception as failure:  # whatever a transport raises
            yield error(
                f"{shown}: {type(failure).__name__}: {failure}",
                meaning="No run begins but those that are "
                "under way go on. Nothing is lost: what is asked is kept in the store and goes out later.",
                remedy="Start the broker, or correct broker_url.",
            )


def _by_another_way(app: Celery, link: Link) -> Iterator[Finding]:
    """Tell if the broker is the store, and its URL is another one: `broker_is_store` asks no server."""
    sidejob = getattr(app, "sidejob", None)
    if sidejob is None or broker_is_store(app):
        return
    settings, connections = sidejob.settings, sidejob.runtime.connections
    if not settings.store_may_be_broker or settings.schema != link.schema:
        return
    try:
        with health.looking(connections):
            store = connections.read(health.database, within_s=ATTEMPT_S)
    except (StoreUnavailableError, SettingsError):  # of which the checks of the store tell
        return
    if link.run("read", health.database) == store:
        yield warning(
            "broker_url leads to the store's own database and schema, by another host or port than "
            "sidejob_database_url and sidejob_direct_url",
            meaning="This app takes its broker for a database of its own. Workers with these URLs leave the jobs and "
            "durable tasks to others that clients with equal URLs send: where all workers are so, they never run.",
            remedy="Set broker_url to sidejobpg:// alone, which means the store, in all clients and workers. If the "
            "store's URL leads through a proxy, set sidejob_direct_url as well.",
        )


def _redis(channel: Any) -> Iterator[Finding]:
    yield from _memory(channel.client.info("memory"))
    if has_dead_list(channel):
        from ...transport.redis.records import overview  # here: on other brokers nothing imports redis-py

        yield from _transport("sidejob://", overview(channel))


@check("rabbitmq")
def _queues(app: Celery, connection: Any) -> Iterator[Finding]:
    """Tell which of the app's queues RabbitMQ would not declare. Its consumer_timeout is harmless."""
    version = connection.server_properties.get("version", "")
    number = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if number < OLDEST_RABBITMQ:
        yield warning(
            f"its version is {version or 'not known'}",
            meaning="Nobody has tried this version.",
            remedy=f"Use RabbitMQ {'.'.join(map(str, OLDEST_RABBITMQ))} or newer.",
        )
    refused = [
        name
        for name, queue in app.amqp.queues.items()
        if (queue.queue_arguments or {}).get("x-queue-type") == "quorum"
        and (queue.max_priority or "x-max-priority" in queue.queue_arguments)
    ]
    if refused:
        yield error(
            f"queues with a priority and of the type quorum: {first_of(sorted(refused))}",
            meaning="RabbitMQ refuses x-max-priority on quorum queues: these are not declared, and their jobs wait.",
            remedy="Leave x-max-priority (task_queue_max_priority) out, or make the queue a classic one.",
        )
    else:
        yield well(f"its version is {version}")


@check("transport")
def _transport(scheme: str, found: Any) -> Iterator[Finding]:
    consumers, hold = counted(found.consumers, "consumer", "consumers"), "holds" if found.consumers == 1 else "hold"
    messages, dead = counted(found.held, "message", "messages"), counted(found.dead, "is", "are")
    what = f"{consumers} of {scheme} {hold} {messages}; {dead} in the dead list"
    if not found.dead:
        yield well(what)
        return
    yield warning(
        what,
        meaning="Those in the dead list came back after they had begun, as often as delivery_limit "
        "says, or they are no messages. Nobody runs them. Those of durable tasks are in the dead set instead.",
        remedy="See celery -A <app> sidejob transport dead list; then retry or delete them.",
    )


@check("eviction")
def _memory(info: dict[str, Any]) -> Iterator[Finding]:
    policy, limit, used = info.get("maxmemory_policy"), info.get("maxmemory") or 0, info.get("used_memory") or 0
    if policy is not None and policy != "noeviction":
        grave = error if policy.startswith("allkeys") and limit else warning
        yield grave(
            f"maxmemory-policy is {policy}",
            meaning="A full Redis throws keys away, queues with all their "
            "messages too. Messages of jobs are sent again after sidejob_lost_after; those of other tasks are gone.",
            remedy="CONFIG SET maxmemory-policy noeviction, and in its configuration file; use another Redis as cache.",
        )
    elif limit and used > FULL * limit:
        yield warning(
            f"{used / limit:.0%} of maxmemory is used",
            meaning="When it is full, Redis refuses messages: they wait in the store.",
            remedy="Give it more memory; look which queue nobody serves.",
        )
    else:
        yield well(f"maxmemory-policy is {policy or 'not known'}")
