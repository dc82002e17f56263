"""Announces the events that observers get: status changes, deletions and steps of jobs; and logs runs that failed.

Announcements travel over Redis, by a client with the connections that kombu would make: sentinels, TLS and passwords
too; or over the store.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from typing import Any

from celery import Celery, signals
from kombu import Connection

from ..announcements.announcer import always, flush_all
from ..announcements.ways import ANSWER_S, Client, PostgresWay, RedisWay, Way
from ..jobs import log_entries
from ..model.errors import SettingsError, StoreUnavailableError
from ..model.events import Event, JobBuried, JobDeleted, JobMoved, Measured, RunFailed, RunLost, StepEnded
from ..model.finding import Finding, check, warning, well
from ..model.logger import logger
from ..model.names import TRACKED_CHANNEL, channel_of_job
from ..model.statistics import Measures
from ..operations.runtime import Runtime
from ..store.connection.opening import Opener
from ..unit.open_unit import within
from . import configuration
from .broker.connection import connection_to, establish
from .events import SignalObserver


class AnnouncingObserver(SignalObserver):
    """Announces each event too, after its signal; announcements can be missed, and must not delay anything."""

    def __init__(self, measures: Measures, runtime: Callable[[], Runtime], *, keeps_statistics: bool) -> None:
        super().__init__(measures, keeps_statistics=keeps_statistics)
        self._runtime = runtime

    def tell(self, event: Event) -> None:
        """Report an event."""
        super().tell(event)
        if isinstance(event, Measured):  # the most frequent, and nobody hears of it
            return
        try:
            self._announce(event)
        except StoreUnavailableError as error:
            logger.warning("%s is not announced: %s", event, error)

    def _announce(self, event: Event) -> None:
        runtime = self._runtime()
        announcer = runtime.announcer
        if (told := _of_tracked(event)) is not None and announcer.may_be_heard(TRACKED_CHANNEL):
            job_id, fields, is_tracked = told
            wanted = always if is_tracked else partial(runtime.tracking.follows, job_id)
            announcer.announce(TRACKED_CHANNEL, json.dumps({"job": job_id, **fields}), wanted)
        match event:
            case JobMoved():
                name = channel_of_job(event.job_id)
                if announcer.may_be_heard(name) and runtime.tasks.publishes_status(event.task):
                    announcer.announce(name, json.dumps({"status": str(event.after), "change": event.change}))
            case StepEnded():
                name = channel_of_job(event.job_id)
                if runtime.tasks.publishes_status(event.task) and announcer.may_be_heard(name):
                    step = {"step": event.name, "number": event.number, "kind": event.kind, "outcome": event.outcome}
                    ended = {**step, "tries": event.tries, "seconds": round(event.seconds, 6)}
                    announcer.announce(name, json.dumps(ended))
            case JobDeleted():
                announcer.announce(channel_of_job(event.job_id), json.dumps({"deleted": True}))
            case RunFailed():
                with within(None):
                    context = {"job": event.job_id, "run": event.run_no}
                    log_entries.log_error(runtime, context, event.error, event.traceback)


def _of_tracked(event: Event) -> tuple[int, dict[str, Any], bool] | None:
    """Return the announcement of an event for tracked jobs: (job id, fields, whether the job is tracked for sure).

    None if there is none.
    """
    match event:
        case JobMoved():
            return event.job_id, {"status": str(event.after), "change": event.change, "run": event.run_no}, False
        case RunLost():
            return event.job_id, {"lost": True, "run": event.run_no}, False
        case JobBuried():
            return event.job_id, {"dead": event.entry_id, "reason": event.reason}, False
        case JobDeleted() if event.tracked:
            return event.job_id, {"deleted": True}, True
    return None


def way_of(app: Celery, runtime: Runtime) -> Way:
    """Return the way of an app's announcements: the Redis of its setting, the broker if it is Redis, else the store."""
    redis_url = runtime.settings.redis_url
    if redis_url is not None or configuration.broker_family(app) == "redis":
        return RedisWay(partial(client_of, app, redis_url))
    url, setting = runtime.store.direct_url()
    opener = Opener(url, runtime.settings.schema, setting=setting, application="celery_sidejob_listener")
    return PostgresWay(runtime.connections, runtime.audience, opener.connect)


def install() -> None:
    """Send the last announcements of a worker's process before it ends."""
    for name in ("worker_process_shutdown", "worker_shutdown"):
        getattr(signals, name).connect(_flush, weak=False, dispatch_uid=f"celery_sidejob.announcing.{name}")


def _flush(**_: Any) -> None:
    flush_all()


@check("announcements")
def findings(app: Celery) -> Iterator[Finding]:
    """Yield what `doctor` finds of the Redis of `sidejob_redis_url`, with one bounded attempt; nothing without one."""
    url = configuration.settings_of(app).redis_url
    if url is None:
        return
    shown = Connection(url).as_uri()
    try:
        with closing(client_of(app, url)) as client:
            client.redis.ping()
    except Exception as failure:  # whatever a transport or redis-py raises
        yield warning(
            f"{shown}: {type(failure).__name__}: {failure}",
            meaning="Nobody hears announcements, and "
            "subscribe() fails. Jobs, packets and publications are not concerned.",
            remedy="Start that Redis, or correct sidejob_redis_url.",
        )
    else:
        yield well(f"{shown} answers")


def check_redis_url(url: str | None) -> None:
    """Raise SettingsError if this is not the URL of a Redis; connects to nothing."""
    if url is None:
        return
    try:
        is_redis = Connection(url).get_transport_cls().driver_type == "redis"
    except (KeyError, ImportError, ValueError):  # kombu knows no such transport, or cannot read the rest
        is_redis = False
    if not is_redis:
        raise SettingsError("sidejob_redis_url is not the URL of a Redis: it begins with redis:// or rediss://.")


def client_of(app: Celery, url: str | None) -> Client:
    """Return a client of the app's broker, or of the Redis with this URL; it waits at most `ANSWER_S` for an answer."""
    from redis import Redis  # here: on other brokers nothing imports it

    connection = connection_to(app, ANSWER_S) if url is None else _connection(url)
    established = establish(connection, ANSWER_S)
    pool = connection.transport.create_channel(established).client.connection_pool

    def close() -> None:
        with suppress(Exception):
            pool.disconnect()
        connection.transport.close_connection(established)

    return Client(Redis(connection_pool=pool), close)


def _connection(url: str) -> Connection:
    check_redis_url(url)
    options = {"socket_timeout": ANSWER_S, "socket_connect_timeout": ANSWER_S, "retry_on_timeout": False}
    return Connection(url, transport_options=options, connect_timeout=ANSWER_S)
