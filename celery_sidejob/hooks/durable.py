"""Which ordinary tasks are durable, and how their messages are published: kept in the store first, by every path.

`delay`, `send_task`, canvas, retries and beat all end in ``app.amqp.send_task_message``, after the receivers of
`before_task_publish` have had their say. There a message of a durable task is given a producer that keeps instead of
sending: what it was about to send, to the byte, becomes a row; then our own publisher gives it to the broker.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from celery import Celery
from celery.app import amqp as celery_amqp
from celery.app.amqp import AMQP
from celery.app.task import Context
from celery.backends.rpc import RPCBackend
from celery.canvas import maybe_signature
from celery.utils.time import maybe_iso8601
from kombu import Queue
from kombu.compression import compress, decompress
from kombu.serialization import dumps, loads, prepare_accept_content
from kombu.utils.functional import maybe_list
from kombu.utils.imports import symbol_by_name
from kombu.utils.json import dumps as kombu_dumps
from kombu.utils.json import loads as kombu_loads

from ..model.durable import (
    ADOPTED,
    CALL,
    DEATHS,
    FORMAT,
    HEADER,
    ON_LOST,
    REPUBLISHED,
    WAITS,
    WORKER,
    Message,
    header_of,
)
from ..model.errors import InvalidValueError, SettingsError, StoreUnavailableError
from ..operations import durable
from ..operations.durable import Run
from ..operations.runtime import Runtime

logger = logging.getLogger("celery_sidejob")

RUNS: dict[str, Run] = {}
"""The durable tasks that run in this process, by task id."""

PROPERTIES = frozenset({"correlation_id", "reply_to", "priority", "expiration", "type", "app_id", "message_id"})
"""Properties of a delivery that its publisher has set."""

ABOUT = frozenset(
    {"content_type", "content_encoding", "headers", "properties", "exchange", "routing_key", "delivery_mode", "declare"}
)
"""What goes around a body."""

RESERVED = "continuation:"
"""How keys of rows begin that are no messages of tasks."""

_in_callbacks = getattr(celery_amqp, "_callback_publish_retry", None)
"""Celery's own note that it publishes the callbacks and the rest of the chain of a task that has ended well."""


def install(app: Celery) -> None:
    """Have messages of durable tasks kept, whoever publishes them; reads no configuration."""
    found = app.__dict__.get("amqp")
    if found is not None:  # it was used before
        found.__class__ = _keeping(type(found))
        found.__dict__.pop("send_task_message", None)
    else:
        kept = _keeping(symbol_by_name(app.amqp_cls))
        # By its name where it has one: processes that are spawned are sent the app.
        app.amqp_cls = f"{__name__}:KeepingAMQP" if kept is KeepingAMQP else kept
    app.send_task = partial(_send_task, app, app.send_task)


def is_durable(app: Celery, name: str) -> bool:
    """Tell whether the messages of a task are kept: its option `durable`, or `sidejob_durable_tasks`."""
    if not app.finalized and app.autofinalize:
        app.finalize(
            auto=True
        )  # or a task that is sent by its name may not be known yet, though its module is imported
    task = app._tasks.get(name)
    if task is not None and getattr(task, "sidejob", False):
        return False  # its jobs are
    own = getattr(task, "durable", None)
    if own is not None:
        return bool(own)
    sidejob = getattr(app, "sidejob", None)
    return sidejob is not None and any(_matches(name, glob) for glob in sidejob.durable_globs)


def check_options(task: Any) -> None:
    """Refuse wrong options of a durable task."""
    if task.durable not in (True, False, None):
        raise SettingsError(f"durable is True or False, not {task.durable!r} ({task.name}).")
    if task.on_lost not in (None, *ON_LOST):
        raise SettingsError(f"on_lost is 'requeue' or 'dead', not {task.on_lost!r} ({task.name}).")
    losses = task.max_losses
    if losses is not None and (isinstance(losses, bool) or not isinstance(losses, int) or losses < 1):
        raise SettingsError(f"max_losses is a number of runs, at least 1, not {losses!r} ({task.name}).")


def publish(app: Celery, producer: Any, message: Message, *, declared: set[str], timeout: float) -> None:
    """Give a message to the broker, the bytes and headers that it was kept with; no signal is sent.

    `declared` are queues that its connection has declared, and grows with those of this message. Raises ValueError for
    a row of a newer format: it is left to newer workers.
    """
    about = message.about or _about(message)
    headers = {**about["headers"], HEADER: header_of(message)}
    if about.get("deaths"):
        headers[DEATHS] = about["deaths"]
    properties = dict(about["properties"])
    if message.again:
        headers[REPUBLISHED] = True
        if message.expires_at is None:  # a person has taken it out of the dead set
            headers["expires"] = None
            properties.pop("expiration", None)
    producer.publish(
        message.body,
        exchange=about["exchange"],
        routing_key=about["routing_key"],
        content_type=about["content_type"],
        content_encoding=about["content_encoding"],
        delivery_mode=about["delivery_mode"],
        declare=[app.amqp.queues[name] for name in about["declare"] if name not in declared],
        headers=headers,
        retry=False,
        timeout=timeout,
        **properties,
    )
    declared.update(about["declare"])


@dataclass(frozen=True, slots=True)
class Route:
    """Where a kept message went: to `queues`, where they are known, else where its exchange has sent it."""

    queues: Sequence[str]
    exchange: str
    routing_key: str
    priority: Any


def route_of(publication: str) -> Route | None:
    """Return where a message went; None for a row of a newer format."""
    kept = json.loads(publication)
    if kept["v"] != FORMAT:
        return None
    about = kombu_loads(kept["about"])
    return Route(
        about["declare"], about["exchange"] or "", about["routing_key"] or "", about["properties"].get("priority")
    )


def request_of(app: Celery, message: Message) -> Context:
    """Return the request of a kept message, as far as it can be read here: backends look at it."""
    about = _about(message)
    headers = about["headers"]
    body = message.body
    embed: Mapping[str, Any] = {}
    try:
        if headers.get("compression"):
            body = decompress(body, headers["compression"])
        accept = prepare_accept_content(app.conf.accept_content)
        _, _, embed = loads(body, about["content_type"], about["content_encoding"], accept=accept)
    except Exception as error:
        logger.warning("The body of %s cannot be read here: %s", message.task_id, error)
    request = Context({**headers, **embed, "task": message.task, "delivery_info": {"routing_key": message.queue}})
    request.correlation_id = about["properties"].get("correlation_id")
    request.reply_to = about["properties"].get("reply_to")
    if request.chord:
        request.chord = maybe_signature(request.chord, app=app)
    return request


def received(app: Celery, task: str, message: Any) -> Message:
    """Return the message of a delivery whose publisher had no extension, as it would have been kept."""
    about = message.delivery_info
    headers = {key: value for key, value in message.headers.items() if key != "compression"}  # kombu has undone it
    properties = {key: value for key, value in message.properties.items() if key in PROPERTIES}
    kept = {
        "content_type": message.content_type, "content_encoding": message.content_encoding, "headers": headers,
        "properties": properties, "exchange": about.get("exchange") or "", "routing_key": about.get("routing_key"),
        "delivery_mode": None, "declare": [],
    }  # fmt: skip
    return Message(
        task_id=headers["id"],
        task=task,
        queue=str(about.get("routing_key") or app.conf.task_default_queue),
        publication=_publication(kept),
        body=_as_bytes(message.body),
        expires_at=_time(headers.get("expires")),
        call=headers.get(CALL),
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------------------


def _send_task(app: Celery, send: Callable[..., Any], name: str, *args: Any, **options: Any) -> Any:
    """Send a task; to be told of its result is asked for after the message of a durable one was kept, and may fail.

    Celery asks before, and then a Redis that is away fails the call after twenty seconds.
    """
    if not is_durable(app, name):
        if options.get("transaction") is not None and not getattr(app._tasks.get(name), "sidejob", False):
            raise InvalidValueError(
                f"{name} is not durable, so its message cannot be part of a transaction: make it so with durable=True "
                "or sidejob_durable_tasks, or leave transaction= out."
            )
        return send(name, *args, **options)
    backend = app.backend
    if "on_task_call" not in vars(backend):
        backend.on_task_call = partial(_on_task_call, backend.on_task_call)
    together = _together.get()
    wanted: list[Callable[[], Any]] = [] if together is None else together.wanted
    token = _wanted.set(wanted)
    try:
        result = send(name, *args, **options)
    finally:
        _wanted.reset(token)
    if together is None:
        for want in wanted:
            _quietly(app, want)
    return result


_wanted: ContextVar[list[Callable[[], Any]] | None] = ContextVar("celery_sidejob_wanted", default=None)
"""While a durable task is sent: what the result backend is to do for the caller."""


def _on_task_call(ask: Callable[..., Any], producer: Any, task_id: str) -> Any:
    wanted = _wanted.get()
    if wanted is None:
        return ask(producer, task_id)
    backend = ask.__self__  # type: ignore[attr-defined]
    if isinstance(backend, RPCBackend):  # its queue must be there before the answer
        _quietly(backend.app, partial(ask, producer, task_id))
    else:
        wanted.append(partial(ask, producer, task_id))
    return {}


def _quietly(app: Celery, want: Callable[[], Any]) -> None:
    """Ask the backend, where the broker does not seem to be away; whoever waits for the result asks again."""
    if not app.sidejob.runtime.publisher.ready:
        return
    try:
        want()
    except Exception as error:
        logger.warning("The result backend does not answer; the task is kept all the same: %s", error)


@dataclass
class Together:
    """Messages of one call that are kept together, and what is done once they are."""

    messages: list[Message] = field(default_factory=list)
    without_rows: list[Callable[[], Any]] = field(default_factory=list)
    """How each is sent where the store is away and `sidejob_on_store_down` says so."""
    events: list[Callable[[], Any]] = field(default_factory=list)
    wanted: list[Callable[[], Any]] = field(default_factory=list)


_together: ContextVar[Together | None] = ContextVar("celery_sidejob_together", default=None)


@contextmanager
def keeping_together() -> Iterator[Together]:
    """Have what is sent within the block only collected: whoever asks for it keeps it."""
    together = Together()
    token = _together.set(together)
    try:
        yield together
    finally:
        _together.reset(token)


class KeepingAMQP(AMQP):
    """Celery's AMQP, with a sender that has messages of durable tasks kept."""

    def _create_task_sender(self) -> Any:
        send = super()._create_task_sender()
        app = self.app

        def send_task_message(producer: Any, name: str, message: Any, **options: Any) -> Any:
            if not is_durable(app, name):
                return send(producer, name, message, **options)
            return send(KeepingProducer(producer, app, name, options.get("queue")), name, message, **options)

        return send_task_message


def _keeping(base: type[AMQP]) -> type[AMQP]:
    """Return the same for a project's own AMQP class."""
    if issubclass(base, KeepingAMQP):
        return base
    return KeepingAMQP if base is AMQP else type(base.__name__, (KeepingAMQP, base), {"__module__": base.__module__})


class KeepingProducer:
    """Stands for a producer while one message of a durable task is published: keeps what it is to send."""

    def __init__(self, producer: Any, app: Celery, task: str, queue: Any) -> None:
        self._producer = producer
        self._app = app
        self._task = task
        self._queue = queue
        self._kept = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def publish(self, body: Any, **options: Any) -> Any:
        """Keep the message and publish it; what comes after it is an event, which must not fail the call."""
        together = _together.get()
        if self._kept:
            if together is not None:
                together.events.append(partial(self._producer.publish, body, **options))
            elif self._runtime.publisher.ready:
                with suppress(Exception):
                    return self._producer.publish(body, **options)
            return None
        self._kept = True
        headers = options["headers"]
        for ours in (HEADER, REPUBLISHED, WORKER, ADOPTED, CALL):
            headers.pop(ours, None)  # a retry brings what the request that is retried had, beside its own headers
        deaths = headers.pop(DEATHS, None)
        transaction = options.pop("transaction", None)
        if together is not None:
            message = self._message(body, deaths, self._new_call(headers), **options)
            together.messages.append(message)
            together.without_rows.append(partial(self._producer.publish, body, **_without_row(message, options)))
            return None
        parent = self._app.current_worker_task
        run: Run | None = getattr(parent.request, "sidejob_run", None) if parent is not None else None
        if transaction is not None:
            durable.lend(self._runtime, self._message(body, deaths, **options), transaction)
        elif run is not None and (run.body_is_over or (run.key[0] == headers.get("id") and not run.moved)):
            self._keep_of(run, self._message(body, deaths, **options))
        else:
            return self._keep_anywhere(body, deaths, options)
        return None

    def _keep_of(self, run: Run, message: Message) -> None:
        """Keep what a run goes on as, or what follows it: in the store in which the run's own row is."""
        if run.key[0] == message.task_id and not run.moved:
            durable.go_on(run.runtime, run, message)
        elif _in_callbacks is not None and _in_callbacks.get():
            run.follows.append(message)  # the end of the run keeps it
        else:
            durable.keep_again(run.runtime, message)

    def _keep_anywhere(self, body: Any, deaths: Any, options: dict[str, Any]) -> Any:
        message = self._message(body, deaths, self._new_call(options["headers"]), **options)
        try:
            durable.keep(self._runtime, message)
        except StoreUnavailableError as error:
            if self._runtime.settings.on_store_down != "publish":
                raise
            logger.warning("%s is published without a row, as sidejob_on_store_down says: %s", message.task_id, error)
            return self._producer.publish(body, **_without_row(message, options))
        return None

    def _new_call(self, headers: Mapping[str, Any]) -> str | None:
        """Name this call, where two stores may come to have a copy of its message."""
        if not self._runtime.stores.several:
            return None
        eta = _time(headers.get("eta"))
        horizon = timedelta(seconds=self._runtime.settings.timer_horizon)
        waits = eta is not None and eta - datetime.now(UTC) > horizon
        return (WAITS if waits else "") + secrets.token_hex(8)

    def _message(
        self, body: Any, deaths: Any, call: str | None = None, /, *, headers: dict[str, Any], exchange: Any = "",
        routing_key: Any = None, serializer: Any = None, compression: Any = None, delivery_mode: Any = None,
        declare: Any = None, retry: Any = None, retry_policy: Any = None, timeout: Any = None,
        confirm_timeout: Any = None, **properties: Any,
    ) -> Message:  # fmt: skip
        """Return the message as the broker would get it; what only says how to send it is left out."""
        task_id = headers.get("id")
        if task_id is None:
            raise SettingsError(f"{self._task} is durable, and that needs messages of task_protocol 2.")
        if task_id.startswith(RESERVED):
            raise InvalidValueError(f"task_id={task_id!r} begins with {RESERVED!r}, which names rows of another kind.")
        content_type, content_encoding, data = dumps(body, serializer=serializer)
        data = _as_bytes(data, content_encoding)
        if compression:
            data, headers["compression"] = compress(data, compression)
        queue = getattr(self._queue, "name", self._queue) or routing_key or self._app.conf.task_default_queue
        about = {
            "content_type": content_type, "content_encoding": content_encoding, "headers": headers,
            "properties": properties, "exchange": getattr(exchange, "name", exchange), "routing_key": routing_key,
            "delivery_mode": delivery_mode,
            "declare": [one.name for one in maybe_list(declare) or () if isinstance(one, Queue)],
        }  # fmt: skip
        return Message(
            task_id, self._task, str(queue), _publication(about, deaths, call), data, eta=_time(headers.get("eta")),
            expires_at=_time(headers.get("expires")), about={**about, "deaths": deaths}, call=call,
        )  # fmt: skip

    @property
    def _runtime(self) -> Runtime:
        sidejob = getattr(self._app, "sidejob", None)
        if sidejob is None:
            raise SettingsError(f"{self._task} is durable, but its app has no SideJob: call SideJob(app).")
        runtime: Runtime = sidejob.runtime
        return runtime


def _without_row(message: Message, options: dict[str, Any]) -> dict[str, Any]:
    """Return how a message is published without a row: with its call, as a store may have taken it after all."""
    if message.call is None:
        return options
    return {**options, "headers": {**options["headers"], CALL: message.call}}


def _publication(about: Mapping[str, Any], deaths: Any = None, call: str | None = None) -> str:
    try:
        kept = {"v": FORMAT, "about": kombu_dumps(about)}
        if deaths:
            kept["deaths"] = deaths
        if call is not None:
            kept["call"] = call
        return json.dumps(kept)
    except TypeError as error:
        raise InvalidValueError(f"The headers and options of a durable task must be JSON values: {error}") from error


def _about(message: Message) -> dict[str, Any]:
    """Return what goes around the body: content type, headers, properties, routing."""
    kept = json.loads(message.publication)
    if kept.get("v") != FORMAT:
        raise ValueError(f"message {message.task_id} is of format {kept.get('v')}, which this version does not read")
    about: dict[str, Any] = {**kombu_loads(kept.get("about", "{}")), "deaths": kept.get("deaths")}
    missing = ABOUT - about.keys()
    if missing:
        raise ValueError(f"message {message.task_id} cannot be read: {', '.join(sorted(missing))} is missing")
    return about


def _as_bytes(data: Any, encoding: str | None = None) -> bytes:
    if isinstance(data, str):
        return data.encode(encoding if encoding and encoding != "binary" else "utf-8")
    return bytes(data)


def _time(text: Any) -> datetime | None:
    found: datetime | None = maybe_iso8601(text)
    return found if found is None or found.tzinfo is not None else found.replace(tzinfo=UTC)


def _matches(name: str, glob: str) -> bool:
    """Celery's own tasks and ours are meant only by a pattern that begins as they do."""
    for own in ("celery.", "celery_sidejob."):
        if name.startswith(own) and not glob.startswith(own):
            return False
    return fnmatch.fnmatchcase(name, glob)
