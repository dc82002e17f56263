"""Knows the app's tasks: the arguments and the queue of a call, declared ports, time zones, results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import repeat
from typing import Any, Literal

from celery import Celery
from celery.app.task import Task
from celery.canvas import Signature, chord, group
from celery.canvas import _chain as chain
from celery.utils.time import make_aware
from kombu.utils.uuid import uuid

from ...jobs.job import enqueue
from ...model import values
from ...model.capacity import Admission, PoolSpec
from ...model.checks import did_you_mean, is_in_calendar, is_number, is_text, shown, text_of
from ...model.columns import COLUMNS
from ...model.durable import Message
from ...model.errors import InvalidValueError, UnknownTaskError
from ...model.logger import logger
from ...model.port import PortOptions, parse_ports, ports_as_json
from ...model.protocols import Call
from ...model.unique import COMPOSED, Unique
from ...store import registry
from ...store.connection.connections import Connections
from ...unit.open_unit import active
from .. import bodies, call_options
from ..errors import Overloaded
from ..messages.carried import check_headers, check_names
from ..task_options import is_durable
from ..tasks import calls, composing

READ_BY_CALLS = (
    "queue", "exchange", "routing_key", "priority", "expires", "inports", "outports", "max_losses", "on_lost",
    "retention", "capacity", "run_rate", "on_run_rate",
)  # fmt: skip
"""The attributes of a sidejob task on which its calls depend: drafts of jobs are copied while these are the same."""


REGISTERED_S = 60.0
"""Seconds for which a task's registration is remembered if its code is not here."""

Ports = tuple[Mapping[str, PortOptions], Mapping[str, PortOptions]]


class CeleryTasks:
    """Knows the tasks of one app, and the tasks that workers have registered in the store."""

    def __init__(self, app: Celery, connections: Connections) -> None:
        self._app = app
        self._connections = connections
        self._publishing: dict[str, tuple[float, bool]] = {}
        self.models: dict[str, Any] = {}

    def call(
        self,
        task: Any,
        args: Any,
        kwargs: Mapping[str, Any] | None,
        *,
        queue: str | None,
        priority: int | None,
        options: Mapping[str, Any],
    ) -> Call:
        """Resolve a task, its name or a signature, and check the arguments as Celery does."""
        args, kwargs, merged = _sequence(args), _mapping(kwargs), dict(options)
        if isinstance(task, Signature):
            args, kwargs, merged = task._merge(args, kwargs, merged)
            queue = merged.pop("queue", None) if queue is None else queue
            priority = merged.pop("priority", None) if priority is None else priority
            task = task["task"]
        name, args, kwargs = _name_of(task), _sequence(args), dict(kwargs or {})
        known = self._app.tasks.get(name)
        unique, admission = (
            Unique.take(merged),
            call_options.admission_of(known, merged),
        )  # the remaining options are Celery's
        if known is None:
            default_queue, registered = self._registered(name)
            queue, (inports, outports) = default_queue if queue is None else queue, _parsed_ports(registered)
            columns = {column.name: registered[column.name] for column in COLUMNS if column.name in registered}
            admission = admission or _registered_admission(columns, merged)
        elif not getattr(known, "sidejob", False):
            raise UnknownTaskError(self._why_no_job(name))
        else:
            if known.typing:
                call_options.check_arguments(known.run, name, args, kwargs)
            queue = self._queue(known, queue, args, kwargs, merged)
            inports, outports, columns = known.parsed_inports, known.parsed_outports, known.job_columns
            priority = known.priority if priority is None else priority
        return Call(
            task=name,
            queue=queue,
            args=args,
            kwargs=kwargs,
            inports=inports,
            outports=outports,
            priority=_priority(priority),
            columns=columns,
            unique=unique,
            admission=admission
            or call_options.admission_to(self._app, queue, follows=call_options.is_follower(merged)),
            **self._traced(name, queue, args, kwargs, call_options.kept_of(known, merged, localize=self.localize)),
        )

    def naming(self, task: str) -> Callable[[Any, Any], str | None] | None:
        """Return the function that checks the arguments of further calls and gives each a task id; see the protocol."""
        app, known, router = self._app, self._app.tasks.get(task), self._app.amqp.router
        if known is None or composing.is_listened_to() or not composing.routes_by_name(app):
            return None
        said = _said(app, known)

        def name(args: Any, kwargs: Any) -> str | None:
            if composing.is_listened_to() or app.tasks.get(task) is not known or app.amqp.router is not router:
                return None
            if _said(app, known) != said:
                return None
            if known.typing:
                call_options.check_arguments(known.run, task, args, kwargs)
            return str(uuid())

        return name

    def _registered(self, name: str) -> tuple[str, Mapping[str, Any]]:
        """Return the queue and the options with which a worker has registered a task whose code is not here."""
        row = registry.last_served(self._connections, name)
        if row is None:
            names = [task.name for task in self._app.tasks.values() if getattr(task, "sidejob", False)]
            raise UnknownTaskError(
                f"No sidejob task {name!r} is registered. Import its module here, or start a worker that serves it."
                f"{did_you_mean(name, names)}"
            )
        return row.queue, values.decode(row.options)

    def _traced(
        self, task: str, queue: str, args: Sequence[Any], kwargs: Mapping[str, Any], asking: dict[str, Any]
    ) -> dict[str, Any]:
        """Give the asking its task id, and keep the headers that tracing libraries add to its message."""
        asking["task_id"] = text_of(asking["task_id"] or uuid())
        options = asking["options"]
        check_names(task, task_id=asking["task_id"], queue=queue)
        check_headers(task, options.get("headers"))
        headers = call_options.propagated(task, asking["task_id"], args, kwargs, queue=queue, options=options)
        sent = {**(headers or {}), **{name: options.get(name) for name in call_options.IN_HEADERS}}
        self._app.sidejob.runtime.publisher.check_sendable(f"The call of {task}", sent, {})
        return {**asking, "options": {**options, "headers": headers} if headers else options}

    def _queue(
        self, task: Any, queue: Any, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]
    ) -> str:
        """Return the name of the queue by Celery's order: the call's, the task's, the routes', the default."""
        route: Mapping[str, Any] = options
        if queue is None and not _is_address(options):
            queue, route = getattr(task, "queue", None), {key: getattr(task, key, None) for key in call_options.ADDRESS}
        if queue is None and not _is_address(route):
            route = self._app.amqp.router.route({}, task.name, args, kwargs, task_type=task)
            queue = route.get("queue")
        if queue is None and _is_address(route):
            queue = self._bound(task.name, route.get("exchange"), route.get("routing_key"))
        if queue is None:
            queue = self._app.conf.task_default_queue
        return text_of(getattr(queue, "name", queue))

    def _bound(self, task: str, exchange: Any, routing_key: Any) -> str:
        """Return the queue to which `exchange` and `routing_key` lead: a job waits in one queue that must be known."""
        exchange = getattr(exchange, "name", exchange)
        queue = self._queue_at(exchange, routing_key)
        if queue is None:
            raise InvalidValueError(
                f"No queue of this app is bound to exchange {shown(exchange)} with routing_key {shown(routing_key)}, "
                f"so a job of {task!r} would wait nowhere. Name it with queue=, or add it to task_queues."
            )
        return queue

    def _queue_at(self, exchange: Any, routing_key: Any) -> str | None:
        for queue in self._app.amqp.queues.values():
            if (exchange in (None, queue.exchange.name)) and (routing_key in (None, queue.routing_key)):
                return str(queue.name)
        return None

    def delivered_from(self, delivery_info: Mapping[str, Any]) -> str | None:
        """Return the queue that a message came from, by its routing; None if the routing leads to no known queue.

        A pattern of a topic exchange does not, for example: then the task's own queue is better than an unserved queue.
        """
        exchange, routing_key = delivery_info.get("exchange"), delivery_info.get("routing_key")
        if not exchange:  # the default exchange leads to the queue of that name
            return str(routing_key) if routing_key in self._app.amqp.queues else None
        return self._queue_at(exchange, routing_key)

    def admission(self, task: str, queue: str) -> Admission | None:
        """Return how a job of a task waits for slots in a queue, if its call names no pool; None without a pool."""
        row = None if task in self._app.tasks else registry.last_served(self._connections, task)
        own = None if row is None else _registered_admission(values.decode(row.options), {})
        return call_options.waiting_in(self._app, task, queue) if own is None else replace(own, mode="wait")

    def ports(self, task: str) -> Ports:
        """Return the input and output ports that a task declares, here or where a worker served it last."""
        known = self._app.tasks.get(task)
        if known is not None and getattr(known, "sidejob", False):
            return known.parsed_inports, known.parsed_outports
        return _parsed_ports(self._registered(task)[1])

    def publishes_status(self, task: str) -> bool:
        """Tell whether a task's `publish_status` is on, here or where a worker served it last."""
        known = self._app.tasks.get(task)
        if known is not None:
            return bool(getattr(known, "publish_status", True))
        now = time.monotonic()
        until, found = self._publishing.get(task, (now, True))
        if now >= until:
            row = registry.last_served(self._connections, task)
            found = row is None or bool(values.decode(row.options).get("publish_status", True))
            self._publishing[task] = now + REGISTERED_S, found
        return found

    def served(self) -> list[dict[str, str]]:
        """Return the sidejob tasks of this app, with the facts that a client without their code needs to make jobs.

        A task whose address leads to no queue is skipped with a warning: making a job of it needs `queue=`. The other
        tasks are served all the same.
        """
        served = []
        for task in self._app.tasks.values():
            if getattr(task, "sidejob", False):
                try:
                    queue = self._queue(task, None, (), {}, {})
                except InvalidValueError as error:
                    logger.warning("Task %s is not announced to clients without its code: %s", task.name, error)
                else:
                    served.append({"task": task.name, "queue": queue, "options": _shown(task)})
        return served

    def finished(self, value: Any, what: str) -> Any:
        """Return what a function has returned, or what its coroutine returns in the end."""
        return bodies.result_of(value, what)

    def localize(self, eta: datetime) -> datetime:
        """Give a naive `eta` the app's time zone."""
        if not is_in_calendar(eta):
            raise InvalidValueError(f"{eta} is no time that every time zone has.")
        aware: datetime = make_aware(eta, self._app.timezone) if eta.tzinfo is None else eta
        return aware

    def result(self, task_id: str) -> Any:
        """Return the AsyncResult of an asking."""
        return self._app.AsyncResult(task_id)

    def overloaded(self, pool: str, *, limit: int, used: int, retry_after: float) -> Exception:
        """Return the error of a call that a full capacity pool refuses."""
        return Overloaded(
            f"Capacity pool {pool!r} is full ({used} of {limit} slots are taken): try again in {retry_after:g} s.",
            pool=pool,
            limit=limit,
            used=used,
            retry_after=retry_after,
        )

    def _why_no_job(self, name: str) -> str:
        composed = name.removeprefix("celery.")
        if composed in COMPOSED:
            return f"A {composed} makes no job: make one of each task in it, or call its delay()."
        kind = "a durable" if is_durable(self._app, name) else "an ordinary"
        return f"{name!r} is {kind} task: decorate it with @sidejob_task to make jobs of it, or call its delay()."

    def apply_async(self, task: Any, args: Any, kwargs: Any, options: Mapping[str, Any]) -> Any:
        """Call a task, its name or a signature of one task as Celery does; returns its result."""
        if isinstance(task, str):
            known = self._app.tasks.get(task)
            if known is None and is_durable(self._app, task):
                return self._app.send_task(task, args, kwargs, **options)
            if known is None:
                job = enqueue(self._app.sidejob.runtime, task, args or (), kwargs, **options)
                result = self.result(str(job.task_id))
                result.job = job
                return result
            task = known
        if isinstance(task, group | chord | chain) or not isinstance(task, Signature | Task):
            raise InvalidValueError(
                f"A capacity pool takes a task, its name, or a signature of one task, not {shown(task)}."
            )
        return task.apply_async(args, kwargs, **options)

    def kind(self, task: str) -> Literal["job", "message"]:
        """Tell what a call of a task makes: a job, or a message that is kept. Raises for any other task."""
        known = self._app.tasks.get(task)
        if getattr(known, "sidejob", False):
            return "job"
        if is_durable(self._app, task):
            return "message"
        if known is not None:
            raise InvalidValueError(
                f"{task!r} is an ordinary task, whose calls are not kept: decorate it with @sidejob_task, or make it "
                "durable with durable=True or sidejob_durable_tasks."
            )
        self._registered(task)
        return "job"

    def check_message(self, task: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: Any) -> None:
        """Refuse a call of a durable task that Celery, or this package, would refuse."""
        call_options.check_call(task, options)
        known = self._app.tasks.get(task)
        if known is not None and known.typing:
            known.__header__(*args, **kwargs)

    def messages(
        self, task: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Message], Callable[[], None]]:
        """Make messages of a durable task, one for each of these options, and a function that reports them."""
        signatures = [self._app.signature(task, tuple(args), dict(kwargs), options=dict(own)) for own in options]
        return calls.made(self._app, signatures)

    @property
    def timezone(self) -> str | None:
        """The name of the app's time zone; None for the host's own, which has no name."""
        zone = self._app.timezone
        return "UTC" if zone is UTC else getattr(zone, "key", None)

    @property
    def in_task(self) -> bool:
        """Whether this thread is in a task of a worker."""
        return self._app.current_worker_task is not None or active() is not None


def _name_of(task: Any) -> str:
    name = task if isinstance(task, str) else getattr(task, "name", None)
    if not is_text(name):
        raise UnknownTaskError(f"{shown(task)} is not a task: give a sidejob task, its name, or a signature of it.")
    return str(name)


def _parsed_ports(registered: Mapping[str, Any]) -> Ports:
    inports, outports = (parse_ports(registered[where], where=where) for where in ("inports", "outports"))
    return inports, outports


def _registered_admission(columns: Mapping[str, Any], options: Mapping[str, Any]) -> Admission | None:
    """Return how a job gets slots of its task's pool, if the task's code is not here."""
    if columns.get("pool") is None:
        return None
    pool = PoolSpec(columns["pool"], None, covers="running" if columns.get("pool_runs") else "queued")
    return call_options.following(Admission.of(pool, columns["pool_weight"]), options)


def _is_address(options: Mapping[str, Any]) -> bool:
    return any(options.get(key) is not None for key in call_options.ADDRESS)


def _shown(task: Any) -> str:
    return values.encode(
        {
            "inports": ports_as_json(task.parsed_inports),
            "outports": ports_as_json(task.parsed_outports),
            **task.job_columns,
            **({} if task.publish_status else {"publish_status": False}),
        }
    )


def _sequence(args: Any) -> tuple[Any, ...]:
    if args is None:
        return ()
    if not isinstance(args, list | tuple):
        raise TypeError(f"args takes a list or tuple of arguments, not {shown(args)}: write ({shown(args)},).")
    return tuple(args)


def _mapping(kwargs: Any) -> dict[str, Any]:
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs takes a mapping, not {type(kwargs).__name__}.")
    return dict(kwargs or {})


def _priority(priority: Any) -> int | None:
    if priority is None or is_number(priority, most=9):
        return priority
    raise InvalidValueError(f"priority is a number from 0 to 9, higher is sooner; not {shown(priority)}.")


def _said(app: Celery, task: Any) -> list[Any]:
    """Return the facts beside the call itself on which a call of a task depends."""
    return [app.conf.task_default_queue, *map(getattr, repeat(task), READ_BY_CALLS, repeat(None))]
