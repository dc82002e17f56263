"""Steps of a worker and of its consumer: they start our services, and stop them.

The worker's step: identity and heartbeat before the first task, sweeping, and giving everything back at the end. The
consumer's step: the setup of a new connection to the broker, and the messages to give back at its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from celery import bootsteps, signals
from celery.concurrency.solo import TaskPool as Solo
from celery.platforms import EX_FAILURE
from celery.worker.state import active_requests

from ..jobs.schedule import apply_declared
from ..model.errors import SideJobError, StoreUnavailableError
from ..model.logger import logger
from ..model.settings import Settings
from ..operations.gates import queues
from ..operations.runtime import Runtime
from ..services.heartbeat.heartbeat import Heartbeat
from ..services.heartbeat.liveness import HeartbeatFile
from ..services.heartbeat.pool_processes import PoolProcesses
from ..services.loop import Loop
from ..services.sweep.sweeper import Sweeper
from . import configuration, events, task_options
from .broker.rabbitmq import RabbitMQWatchdog
from .configuration import masked
from .patches import celery_worker, connections, pools
from .patches.connections import keep_client
from .tasks import durable_task
from .worker import delivered, pool_process, received
from .worker.fetching import Appetite, fetcher_of
from .worker.holding import Bell, WorkerOutbox

START_S = 10.0
"""How long a worker that starts waits for a store."""
AGAIN_S = 0.5


class SideJobStep(bootsteps.StartStopStep):
    """Starts with the worker's blueprint, once; its threads outlive every reconnection to the broker."""

    # It starts after the pool has made its processes, which would inherit any lock that a thread of ours has at that
    # moment (of an import, for example) and wait for it for ever; and before the consumer, which is always the last.
    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        self._sidejob = worker.app.sidejob
        self._loops: list[Loop] = []
        self._heartbeats: list[Heartbeat] = []
        self._processes: list[PoolProcesses] = []
        self._bell = Bell()
        pool_process.share_memory()  # before the pool forks
        durable_task.mark(worker.app)  # tasks of modules that were imported after the app was finalized

    def include_if(self, worker: Any) -> bool:
        """Only if there is a store; an app that merely imports us may run workers for its other tasks."""
        if worker.app.sidejob.settings.database_url is None:
            return False
        pool_process.check(worker.pool_cls)
        return True

    def start(self, worker: Any) -> None:
        """Check the schemas, register this worker, begin to beat and to sweep; end it with one line if it may not."""
        try:
            self._start(worker)
        except SideJobError as error:  # Celery would log a traceback, and only then the remedy
            logger.critical("This worker cannot start: %s", error)
            raise SystemExit(EX_FAILURE) from error

    def _start(self, worker: Any) -> None:
        sidejob = self._sidejob
        task_options.warn(worker.app)
        file = _heartbeat_file(sidejob.settings)
        self._heartbeats = [
            self._heartbeat_of(worker, there, file if there.store.place == 0 else None)
            for there in sidejob.runtime.in_each_store()
        ]
        self._register()
        sidejob.heartbeats = self._heartbeats
        self._loops = [Loop(heartbeat, unpatched=True) for heartbeat in self._heartbeats]
        self._loops.append(Loop(self._heartbeats[0].jobs.ends, unpatched=True))
        for heartbeat in self._heartbeats:
            self._loops += [Loop(heartbeat.errands), Loop(heartbeat.tasks.ends, unpatched=True)]
            if sidejob.settings.worker_services:
                self._loops.append(Loop(Sweeper(heartbeat.runtime, heartbeat)))
        if configuration.broker_family(worker.app) == "amqp":
            self._loops.append(
                Loop(RabbitMQWatchdog(worker, sidejob.runtime.broker.waiting, sidejob.runtime.connections))
            )
        for loop in self._loops:
            loop.start()
        signals.worker_shutting_down.connect(lambda **_: pool_process.announce_stop(), weak=False)
        celery_worker.announce_soft_shutdown(worker, pool_process.announce_stop)
        celery_worker.tell_of_cut_off(worker, self.terminate)
        pools.report_failures(worker.pool)
        pool_process.wait_in_greenlets(worker.pool)
        pools.end_quietly(worker.pool)
        pools.remember_runs(worker.pool)
        signals.worker_shutdown.connect(self._leave, weak=False)

    def register_with_event_loop(self, worker: Any, hub: Any) -> None:
        """Let the event loop listen to the bell; called again after every reconnection."""
        maintain_after_rings(self._bell, worker.pool, hub, self._pool_has_looked)

    def _pool_has_looked(self) -> None:
        for processes in self._processes:
            processes.pool_has_looked()

    def terminate(self, worker: Any) -> None:
        """Leave after a cold stop, which `worker_shutdown` does not report; the pool has been terminated before."""
        self._leave()
        pool_process.leave_threads_behind(worker)

    def _heartbeat_of(self, worker: Any, runtime: Runtime, file: HeartbeatFile | None) -> Heartbeat:
        processes = PoolProcesses(lambda: pool_process.processes(worker.pool), self._bell.ring)
        self._processes.append(processes)

        def check() -> None:
            self._sidejob.check_store(runtime.store)
            queues.apply_declared(runtime, self._sidejob.settings.queues or {})
            if runtime.store.place == 0:
                self._sidejob.register_tasks()
                apply_declared(runtime, self._sidejob.settings.schedules or {})

        return Heartbeat(
            runtime,
            processes if pool_process.has_processes(worker.pool) else None,
            file,
            check=check,
            is_busy=lambda: bool(active_requests),
            board=pool_process.runs_on_board,
        )

    def _register(self) -> None:
        """Register this worker in all stores; in a silent store its heartbeat does so later, if another store answers.

        While no store answers, it tries again for a while: a Postgres that restarts ends connections, and is back soon.
        """
        until = time.monotonic() + START_S
        while len(away := self._try_to_register()) == len(self._heartbeats):
            error = next(iter(away.values()))
            if time.monotonic() >= until:
                raise error
            logger.warning("This worker cannot start yet, and tries again: %s", error)
            time.sleep(AGAIN_S)
        for heartbeat, error in away.items():
            logger.warning("%s is away; what is in it waits: %s", heartbeat.runtime.store.where, error)

    def _try_to_register(self) -> dict[Heartbeat, StoreUnavailableError]:
        away: dict[Heartbeat, StoreUnavailableError] = {}
        for heartbeat in self._heartbeats:
            try:
                heartbeat.register()
            except StoreUnavailableError as error:
                away[heartbeat] = error
        return away

    def _leave(self, **_: Any) -> None:
        """Leave once the pool has stopped: runs that are still held were cut off by this stop, and are no losses."""
        heartbeats, self._heartbeats = self._heartbeats, []
        if not heartbeats:
            return
        for loop in self._loops[len(heartbeats) :]:
            loop.stop()
        released = sum(heartbeat.leave() for heartbeat in heartbeats)
        for loop in self._loops[: len(heartbeats)]:
            loop.stop()
        if released:
            logger.info("Gave back %d runs that this stop had cut off", released)


def maintain_after_rings(bell: Bell, pool: Any, hub: Any, then: Callable[[], None]) -> None:
    """Let the worker's event loop maintain its pool when the bell rings, and call `then` afterwards.

    Celery replaces a process that was killed at its next maintenance, up to five seconds later; until then a message
    that this worker has already fetched waits for no process. The pool may only be touched by the loop's own thread.
    """

    def maintain() -> None:
        if pool._pool is not None:  # a cold stop ends it in the middle of the loop, and so rings the bell
            pool._pool.maintain_pool()
        then()

    if hasattr(getattr(pool, "_pool", None), "maintain_pool"):
        bell.register(hub, maintain)


def _heartbeat_file(settings: Settings) -> HeartbeatFile | None:
    if settings.heartbeat_file is None:
        return None
    file = HeartbeatFile(settings.heartbeat_file, every_s=settings.heartbeat_interval)
    file.clear()
    return file


STOPS = {bootsteps.CLOSE, bootsteps.TERMINATE}


class DisconnectionStep(bootsteps.StartStopStep):
    """Part of Celery's consumer, which is stopped and started again with every connection."""

    # This runs after Celery has dropped its own things: it clears its queues before any step is stopped.
    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, c: Any, task_events: bool = True, **kwargs: Any) -> None:
        super().__init__(c, **kwargs)
        events.remember(c, task_events)
        celery_worker.survive_deleted_queues(c.blueprint)
        celery_worker.note_lost_connections(c, delivered.note_lost_connection)
        celery_worker.refuse_by(c, partial(received.decline, c))
        celery_worker.give_up_malformed(c)
        self._looks: Loop | None = None
        self._appetite: Appetite | None = None
        if c.app.sidejob.settings.database_url is not None:
            self._appetite = Appetite(c)

    def start(self, c: Any) -> None:
        """Listen to the broker's messages about a new connection's consumers; on Redis one client hears all of them."""
        refers = c.app.sidejob.runtime.connections.is_broker
        if refers:
            c.connection.transport.outbox = WorkerOutbox(c.app)
        broker, is_green = c.connection.transport.driver_type, getattr(c.pool, "is_green", False)
        if broker == "amqp":
            _hear_rabbitmq(c, is_green=is_green)
        if broker == "redis":
            celery_worker.drop_unreadable(c.connection.transport.cycle)
        if broker == "redis" and is_green:
            tell = connections.fetch_when_there_is_room(c.connection, c.task_consumer.channel.qos)
            if self._appetite is not None:
                self._appetite.tell = tell
        # With solo an acknowledgement brings the next message, which could not be given back while a body runs. And if
        # a reference were gone before its row is locked, a kill in between would leave a message that no worker
        # fetches.
        delivered.Delivered.acks_at_end = refers or (broker == "amqp" and isinstance(c.pool, Solo))
        if self._appetite is not None:
            self._appetite.start(fetcher_of(c, self._appetite))
            if is_green:
                self._looks = Loop(self._appetite)  # a greenlet
                self._looks.start()
        keep_client(c.task_consumer.channel)

    def info(self, c: Any) -> dict[str, Any]:
        """Return the broker's part of `inspect stats`, instead of the result of Celery's own step."""
        broker = c.connection.info() if c.connection else {}
        broker.pop("password", None)
        return {"broker": masked(broker)} if broker else {}

    def register_with_event_loop(self, c: Any, hub: Any) -> None:
        """Let the event loop decide again and again how many messages are fetched."""
        if self._appetite is not None:
            self._appetite.register(hub)

    def stop(self, c: Any) -> None:
        """Give back messages that have not begun, if the worker stops; vouch for none, if the connection broke."""
        if self._looks is not None:
            self._looks.stop()
            self._looks = None
        if self._appetite is not None:
            self._appetite.holding.disconnected()
        # Celery before 5.7 does not close a broken connection.
        if self._appetite is not None and c.connection is not None and c.blueprint.state in STOPS:
            self._appetite.stop()
        for heartbeat in c.app.sidejob.heartbeats:  # none without a store
            begins = partial(delivered.begins_held, c.pool)
            heartbeat.jobs.disconnected(begins)
            heartbeat.tasks.disconnected(begins)


def _hear_rabbitmq(c: Any, *, is_green: bool) -> None:
    """Let the worker learn what RabbitMQ says about the consumers of a new connection."""
    connections.hear_cancellations(c.connection)
    connections.notice_breaks(c.connection)
    if is_green and c.event_dispatcher:
        connections.look_without_waiting(c.event_dispatcher.connection)
