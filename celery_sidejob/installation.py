"""What `SideJob` installs into an app, and the runtime that it makes for the app: both are put together here alone."""

from __future__ import annotations

from functools import partial
from typing import Any

from celery import Celery

from .announcements.announcer import Announcer
from .hooks import announcing, apps, beat, configuration, control, logs
from .hooks.announcing import check_redis_url
from .hooks.broker.connection import BrokerConnection
from .hooks.broker.publishing import CeleryPublisher
from .hooks.broker.view import CeleryBroker
from .hooks.jobs.calls import CeleryTasks
from .hooks.jobs.eager import run_here
from .hooks.jobs.results import CeleryResults
from .hooks.patches import app_methods
from .hooks.signals import SignalObserver
from .hooks.steps import DisconnectionStep, SideJobStep
from .hooks.tasks import calls, durable_request, durable_task, ending, keeping
from .hooks.tasks.present import calling
from .hooks.worker import pool_process, recording
from .jobs import job as jobs_of
from .operations.audience import Audience, Tracking
from .operations.runtime import Runtime
from .operations.stores import stores_of
from .pools import coroutines
from .results.waiting import add_awaited_calls
from .store.connection import turns
from .store.measured import MeasuredConnections

SHORTEST_PAUSE_S = 5.0
"""The shortest limit for a pause in a transaction, however short the lease: encoding a large unit takes time."""


def install(sidejob: Any, app: Celery) -> None:
    """Install our hooks into the app; reads no configuration, and connects to nothing."""
    app.steps["worker"].add(SideJobStep)
    app.steps["consumer"].add(DisconnectionStep)
    pool_process.install()
    app.on_after_finalize.connect(partial(_add_beat_entry, app), weak=False)
    app_methods.resolve_urls(app, configuration.broker_in_store)
    app_methods.mask_report(app)
    app_methods.mask_settings(app)
    app_methods.send_messages_by(app, keeping.KeepingAMQP)
    app_methods.send_by(app, calls.send_task)
    control.install(app)
    ending.install()
    durable_task.end_rows_of_others()
    durable_task.watch_tasks(app)
    durable_request.install()
    add_awaited_calls()
    turns.wait_elsewhere_by(coroutines.elsewhere)
    app_methods.lend_transactions(calling)
    app.on_after_finalize.connect(lambda **_: durable_task.mark(app), weak=False)
    recording.install()
    announcing.install()
    logs.install(sidejob)
    jobs_of.use_apps(apps.runtime_of, apps.origin_of)


def runtime_of(sidejob: Any) -> Runtime:
    """Make the stores, the broker and the result backend of an app, from its settings."""
    app = sidejob.app
    settings = configuration.settings_of(app)
    check_redis_url(settings.redis_url)
    pause_s = max(settings.lease / 2, SHORTEST_PAUSE_S)
    connections = MeasuredConnections(
        settings.database_url,
        settings.schema,
        prepare=settings.direct_url is None,
        longest_pause_s=pause_s,
        is_broker=configuration.broker_is_store(app),
        task_history=settings.task_history,
    )
    to_broker = BrokerConnection(app)
    audience = Audience(connections)
    signals = SignalObserver(connections.measures, keeps_statistics=settings.stats_history > 0)
    stores = stores_of(settings, connections, longest_pause_s=pause_s)
    return Runtime(
        store=stores[0],
        stores=stores,
        publisher=CeleryPublisher(app, to_broker, partial(run_here, sidejob)),
        broker=CeleryBroker(app, to_broker, connections),
        results=CeleryResults(app),
        observer=announcing.AnnouncingObserver(signals, partial(getattr, sidejob, "runtime")),
        tasks=CeleryTasks(app, connections),
        announcer=Announcer(partial(announcing.way_of, app, connections, audience)),
        audience=audience,
        tracking=Tracking(connections),
    )


def _add_beat_entry(app: Celery, **_: Any) -> None:
    """Put the poll into the beat schedule, unless the user has an entry of that name."""
    settings = configuration.settings_of(app)
    schedule = app.conf.beat_schedule
    if settings.database_url is not None and beat.ENTRY not in schedule:
        schedule[beat.ENTRY] = beat.entry(app, settings.poll_interval, settings.poll_queue)
