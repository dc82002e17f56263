"""Keeps messages of durable tasks in the store before they are published, whatever code calls the tasks.

`delay`, `send_task`, canvas, retries and beat all end in ``app.amqp.send_task_message``, after the receivers of
`before_task_publish`. There (`hooks/patches/app_methods.py`) a message of a durable task gets a producer that keeps it
instead of sending it: the message becomes a row, to the byte as it would have been sent. Then our own publisher gives
it to the broker.

Calls of one task differ only slightly. So Celery makes the first message of a task and its options, and further ones
copy it: each has another task id and other arguments, and is to the byte what Celery would have made. This is done only
if nothing depends on single messages: no signal of a publication has a receiver, no route is a function, and no method
by which Celery makes a message is replaced.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from types import FunctionType
from typing import Any

from celery import Celery, signals
from celery.app import amqp as celery_amqp
from celery.app.amqp import AMQP
from celery.app.routes import MapRoute, Router
from celery.backends.base import Backend
from celery.backends.rpc import RPCBackend
from celery.canvas import Signature
from celery.utils.saferepr import saferepr
from kombu import Queue
from kombu.compression import compress
from kombu.utils.functional import maybe_list
from kombu.utils.uuid import uuid

from ...model.capacity import Admission
from ...model.durable import ADOPTED, CALL, DEATHS, DIGEST, HEADER, REPUBLISHED, WORKER, Message
from ...model.errors import InvalidValueError, SettingsError, StoreUnavailableError
from ...model.logger import logger
from ...model.values import alike
from ...operations.gates import capacity
from ...operations.ledger import durable_ends, keeping
from ...operations.ledger.durable_runs import Run
from ...store.errors import RowsLocked
from ..apps import runtime_for
from ..call_options import admission_to, waiting_in
from ..messages.carried import JSON, check_names, encoded
from ..messages.kept_message import check_id, own_priority, publication_of, time_of
from ..patches.app_methods import DurableAMQP
from ..task_options import known_tasks
from . import durable_run
from .present import PLAIN, Made, Together, calling, present_call, present_run

_in_callbacks = getattr(celery_amqp, "_callback_publish_retry", None)
"""Celery's own note that it is publishing the callbacks and the rest of the chain of a task that has ended well."""


class KeepingProducer:
    """Replaces a producer while one message of a durable task is published: keeps the message."""

    def __init__(self, producer: Any, app: Celery, task: str, queue: Any) -> None:
        self._producer = producer
        self._app = app
        self._task = task
        self._queue = queue
        self._runtime = runtime_for(app, f"{task} is durable")
        self._kept = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def publish(self, body: Any, **options: Any) -> Any:
        """Keep the message and publish it; later work is only an event, which must not fail the call."""
        together = present_call().together
        if self._kept:
            if together is not None:
                together.events.append(partial(self._producer.publish, body, **options))
            elif self._runtime.broker.ready:
                with suppress(Exception):
                    return self._producer.publish(body, **options)
            return None
        self._kept = True
        headers = options["headers"]
        for ours in (HEADER, REPUBLISHED, WORKER, ADOPTED, CALL, DIGEST):
            headers.pop(ours, None)  # a retry brings the headers of the retried request beside its own
        deaths = headers.pop(DEATHS, None)
        transaction = options.pop("transaction", None)
        run = present_run(self._app)
        if together is not None:
            self._collect(together, body, deaths, options)
        elif transaction is not None:
            keeping.lend(self._runtime, _keyed(self._message(body, deaths, **options)), transaction)
        elif run is not None and (not run.moved if run.key[0] == headers.get("id") else run.body_is_over):
            self._keep_of(run, self._message(body, deaths, **options))
        else:
            return self._keep_anywhere(body, deaths, options)
        return None

    def _collect(self, together: Together, body: Any, deaths: Any, options: dict[str, Any]) -> None:
        if present_call().unique is not None:
            raise InvalidValueError(f"unique= of {self._task} is for single calls: call its apply_async().")
        call = keeping.name_call(self._runtime, partial(time_of, options["headers"].get("eta")))
        message = self._message(body, deaths, call, **options)
        together.messages.append(message)
        if self._runtime.settings.on_store_down == "publish":
            together.without_rows.append(partial(self._producer.publish, body, **_without_row(message, options)))

    def _keep_of(self, run: Run, message: Message) -> None:
        """Keep a run's next message, or its follow-up, in the store that has the run's own row."""
        if present_call().unique is not None:
            logger.warning("unique= of %s has no effect: it follows another task", self._task)
        if run.key[0] == message.task_id:
            given = waiting_in(self._app, run.task, run.queue or message.queue)
            stays = Admission.stays(run.pool, given, message.admission)
            try:
                durable_ends.go_on(run.runtime, run, message, enters_pool=not stays)
            except RowsLocked as error:
                durable_run.give_up(run, error, repeats=self._app.tasks[run.task].lost_policy == "requeue")
        elif _in_callbacks is not None and _in_callbacks.get():
            run.follows.append(message)  # the end of the run keeps it
        else:
            keeping.keep_again(run.runtime, message)

    def _keep_anywhere(self, body: Any, deaths: Any, options: dict[str, Any]) -> Any:
        call = keeping.name_call(self._runtime, partial(time_of, options["headers"].get("eta")))
        message = _keyed(self._message(body, deaths, call, **options))
        try:
            keeping.keep(self._runtime, message)
        except StoreUnavailableError as error:
            needs_row = message.unique_key is not None or message.admission is not None
            if needs_row or not keeping.may_lack_row(self._runtime, error):
                raise
            logger.warning("%s is published without a row, as sidejob_on_store_down says: %s", message.task_id, error)
            return self._producer.publish(body, **_without_row(message, options))
        return None

    def _message(  # noqa: PLR0913 - what kombu's `publish` takes
        self, body: Any, deaths: Any, call: str | None = None, /, *, headers: dict[str, Any], exchange: Any = "",
        routing_key: Any = None, serializer: Any = None, compression: Any = None, delivery_mode: Any = None,
        declare: Any = None, retry: Any = None, retry_policy: Any = None, timeout: Any = None,
        confirm_timeout: Any = None, **properties: Any,
    ) -> Message:  # fmt: skip
        """Return the message as the broker would get it, without the options that only say how to send it."""
        task_id = headers.get("id")
        if task_id is None:
            raise SettingsError(f"{self._task} is durable, and that needs messages of task_protocol 2.")
        check_id(self._task, task_id)
        present = present_call()
        content_type, content_encoding, data = encoded(self._task, body, serializer, is_bounded=not present.follows)
        if compression:
            data, headers["compression"] = compress(data, compression)
        exchange = getattr(exchange, "name", exchange)
        queue = getattr(self._queue, "name", self._queue) or routing_key or self._app.conf.task_default_queue
        declare = [one.name for one in maybe_list(declare) or () if isinstance(one, Queue)]
        bound = self._bound_queue(str(queue), exchange, routing_key)
        if bound is not None:
            queue, declare = bound, [bound]
        about = {
            "content_type": content_type,
            "content_encoding": content_encoding,
            "headers": headers,
            "properties": properties,
            "exchange": exchange,
            "routing_key": routing_key,
            "delivery_mode": delivery_mode,
            "declare": declare,
        }
        check_names(self._task, queue=str(queue), routing_key=routing_key or None, exchange=exchange or None)
        self._runtime.publisher.check_sendable(f"The call of {self._task}", headers, properties)
        admission = present.admission or admission_to(self._app, str(queue), follows=present.follows)
        if admission is not None:
            capacity.prepare(self._runtime, [admission])
        message = Message(
            task_id,
            self._task,
            str(queue),
            publication_of(about, deaths, call),
            data,
            eta=time_of(headers.get("eta")),
            expires_at=time_of(headers.get("expires")),
            priority=own_priority(about),
            about={**about, "deaths": deaths},
            call=call,
            admission=admission,
        )
        if present.noted is not None:
            present.noted.append(Made(message, body, serializer, compression))
        return message

    def _bound_queue(self, named: str, exchange: str | None, routing_key: Any) -> str | None:
        """Return the app's queue for a message that names only an exchange; None if it is unknown.

        Celery names the default queue in this case: the message would be counted there, and searched in the wrong
        queue.
        """
        if not exchange or named != self._app.conf.task_default_queue:
            return None
        queues = self._app.amqp.queues
        ours = queues.get(named)
        if ours is not None and ours.exchange.name == exchange and ours.routing_key == routing_key:
            return None
        for queue in queues.values():
            if queue.exchange.name == exchange and (
                queue.exchange.type == "fanout" or queue.routing_key == routing_key
            ):
                return str(queue.name)
        return None


class KeepingAMQP(DurableAMQP):
    """Celery's AMQP, which keeps messages of durable tasks."""

    producer_of_durable = KeepingProducer

    @cached_property
    def models(self) -> dict[str, list[Any]]:
        """Messages by the name of their task, which further single calls copy (`Composed`)."""
        return {}


def _keyed(message: Message) -> Message:
    """Give a message the unique key of its call."""
    call = present_call()
    return message if call.unique is None else replace(message, unique_key=call.unique.key, replaces=call.replaces)


def _without_row(message: Message, options: dict[str, Any]) -> dict[str, Any]:
    """Return how a message is published without a row: with its call, because a store may have taken it after all."""
    if message.call is None:
        return options
    return {**options, "headers": {**options["headers"], CALL: message.call}}


OPTIONS = frozenset({
    "task_type", "ignore_result", "serializer", "compression", "queue", "exchange", "routing_key", "priority",
    "delivery_mode", "time_limit", "soft_time_limit", "shadow",
})  # fmt: skip
"""Options of a single call whose message others may copy: it has no time, and nothing follows it."""
OF_ONE_CALL = frozenset({"task_id", "result_cls"})
"""Options that differ from call to call."""
_UNESCAPED = re.compile(r"[ !#-\[\]-~]*").fullmatch
"""Tells whether a text is the same in JSON, without escapes."""
NOTHING = {"argsrepr": "()", "kwargsrepr": "{}"}
"""The texts by which Celery shows empty arguments."""
MOST_MODELS = 4
"""The most combinations of options of a task's single calls whose messages are kept as models."""


def model_of(app: Celery, name: str, options: Mapping[str, Any], args: Any, kwargs: Any) -> Composed | None:
    """Return the message that a call of a task can copy; None if Celery must make the message."""
    models: Sequence[Composed] = app.amqp.models.get(name, ())
    are_arguments = isinstance(args, list | tuple | None) and isinstance(kwargs, Mapping | None)
    if not models or not are_arguments or present_call() is not PLAIN or not _are_alone(app):
        return None
    asked = _asked(options)
    for model in models:
        if model.is_valid and model.fits(asked):
            return model
    return None


def may_compose(app: Celery, send: Any, options: Mapping[str, Any]) -> bool:
    """Tell whether other messages may copy the message of a task's call: it has no time and no follow-up."""
    asked = _asked(options)
    return (
        present_call() is PLAIN
        and "task_type" in asked
        and asked.keys() <= OPTIONS
        and send == Celery.send_task.__get__(app)
        and _are_alone(app)
        and _are_celerys(app)
        and not isinstance(app.backend, RPCBackend)
    )


def remember(app: Celery, name: str, options: Mapping[str, Any], made: Made, args: Any, kwargs: Any) -> None:
    """Keep this message as the model for further calls of its task with these options."""
    models = app.amqp.models.setdefault(name, [])
    models[:] = [model for model in models if model.is_valid]
    if len(models) < MOST_MODELS:
        model = Composed.after(app, options["task_type"], _asked(options), made, args, kwargs)
        models += [] if model is None else [model]


def _asked(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None and name not in OF_ONE_CALL}


class Composer:
    """Sends the signatures of one call, and collects their messages."""

    def __init__(self, app: Celery, together: Together, producer: Any) -> None:
        self._app = app
        self._together = together
        self._producer = producer
        self._models: dict[str, Composed] = {}
        sending = app.send_task
        is_ours = isinstance(sending, partial) and sending.args[1:] == (Celery.send_task.__get__(app),)
        self._may_compose = is_ours and _are_alone(app) and _are_celerys(app) and _is_celerys(Signature, "apply_async")

    def send(self, signature: Signature) -> Any:
        """Collect the message of a signature, and return the task's result."""
        model = self._models.get(signature.task)
        is_alike = model is not None and type(signature) is Signature and signature.type is model.task
        if model is not None and is_alike and model.fits(_without_id(signature)):
            return self._send_again(signature, model)
        noted: list[Made] = []
        with calling(noted=noted):
            result = signature.apply_async(producer=self._producer)
        task = known_tasks(self._app).get(signature.task)
        if self._may_compose and task is not None and type(signature) is Signature and noted:
            options = _without_id(signature)
            model = Composed.after(self._app, task, options, noted[-1], signature.args, signature.kwargs)
            self._models |= {} if model is None else {signature.task: model}
        return result

    def _send_again(self, signature: Signature, model: Composed) -> Any:
        """Do Celery's work for a call, with a copied message."""
        task = model.task
        if task.typing:
            task.__header__(*signature.args, **signature.kwargs)
        message = model.message(signature.options.get("task_id"), signature.args, signature.kwargs)
        self._together.messages.append(message)
        if model.subscribes:
            self._app.backend.on_task_call(self._producer, message.task_id)
        return model.result(task.AsyncResult, message.task_id)


class Composed:
    """A message that Celery has made for a task and some options; makes copies with another id and other arguments."""

    def __init__(self, app: Celery, task: Any, options: Mapping[str, Any], made: Made) -> None:
        self.task = task
        self._options = options
        self._made = made
        self._about: dict[str, Any] = dict(made.message.about or {})
        self.ignores_result = self._about["headers"]["ignore_result"]
        self.subscribes = not self.ignores_result and type(app.backend).on_task_call is not Backend.on_task_call
        """Whether the result backend is asked for each call."""
        levels = app.conf.get("task_repr_maxlevels")  # Celery 5.5 does not have this setting
        self._levels = {} if levels is None else {"maxlevels": levels}
        self._app = app
        self._amqp = app.amqp
        self._made_for = os.getpid(), getattr(task, "capacity", None), app.conf.task_default_queue
        self._publication = self._with_gaps()
        is_constant = not any(made.body[:2]) and self._about["content_type"] == JSON
        self._body_of_nothing = made.message.body if is_constant else None

    @classmethod
    def after(
        cls, app: Celery, task: Any, options: Mapping[str, Any], made: Made, args: Any, kwargs: Any
    ) -> Composed | None:
        """Return a message as a model for others; None if others with its task and options may differ in more."""
        if not _is_common(task, options, made):
            return None
        model = cls(app, task, options, made)
        return model if model.message(made.message.task_id, args, kwargs) == made.message else None

    @property
    def is_valid(self) -> bool:
        """Whether this process made it (not one that forked it), and the facts beside the calls are unchanged."""
        return self._made_for == (os.getpid(), getattr(self.task, "capacity", None), self._app.conf.task_default_queue)

    def fits(self, options: Mapping[str, Any]) -> bool:
        """Tell whether the message of a call differs only in its id and arguments."""
        return alike(options, self._options)

    def message(self, task_id: str | None, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> Message:
        """Return the message of a call that fits; without a task id it gets one."""
        if task_id:
            check_id(self.task.name, task_id)
        task_id, args, kwargs = task_id or uuid(), args or (), kwargs or {}
        texts = {
            "id": task_id,
            "argsrepr": self._shown(args, "argsrepr"),
            "kwargsrepr": self._shown(kwargs, "kwargsrepr"),
        }
        own = {"correlation_id": task_id, "reply_to": self._app.thread_oid}
        inner = {name: _inner(text) for name, text in {**texts, **own}.items()}
        model = self._made.message
        return Message(
            task_id,
            model.task,
            model.queue,
            self._publication % inner,
            self._body(args, kwargs),
            eta=model.eta,
            expires_at=model.expires_at,
            priority=model.priority,
            admission=model.admission,
            about={
                **self._about,
                "headers": {**self._about["headers"], **texts, "root_id": task_id},
                "properties": {**self._about["properties"], **own},
            },
        )

    def result(self, make: Callable[[str], Any], task_id: str) -> Any:
        """Return the result of a call, as Celery makes it."""
        result = make(task_id)
        result.ignored = self.ignores_result
        return result

    def _body(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
        # To encode nothing takes a sixth of what a message costs that is made with others.
        if self._body_of_nothing is not None and not args and not kwargs:
            return self._body_of_nothing
        made = self._made
        *_, data = encoded(self.task.name, (args, kwargs, made.body[2]), made.serializer)
        return compress(data, made.compression)[0] if made.compression else data

    def _shown(self, given: Any, name: str) -> str:
        """Return the text by which Celery shows arguments."""
        if not given:
            return NOTHING[name]
        return str(saferepr(given, getattr(self._amqp, f"{name}_maxsize"), **self._levels))

    def _with_gaps(self) -> str:
        """Return the stored text around the body, with a gap for each text that differs."""
        gaps = {name: secrets.token_hex(16) for name in ("id", "argsrepr", "kwargsrepr")}
        own = {"correlation_id": secrets.token_hex(16), "reply_to": secrets.token_hex(16)}
        about = {key: value for key, value in self._about.items() if key != "deaths"}
        about["headers"] = {**about["headers"], **gaps, "root_id": gaps["id"]}
        about["properties"] = {**about["properties"], **own}
        text = publication_of(about).replace("%", "%%")
        for name, gap in {**gaps, **own}.items():
            text = text.replace(gap, f"%({name})s")
        return text


def _inner(text: str) -> str:
    """Return the JSON form of a text within a JSON text within another."""
    return text if _UNESCAPED(text) else json.dumps(json.dumps(text)[1:-1])[1:-1]


def _without_id(signature: Signature) -> dict[str, Any]:
    options: dict[str, Any] = signature.options
    return {name: value for name, value in options.items() if name != "task_id"} if "task_id" in options else options


def is_listened_to() -> bool:
    """Tell whether each publication of a task has a receiver."""
    before, after, old = signals.before_task_publish, signals.after_task_publish, signals.task_sent
    return bool(before.receivers or after.receivers or old.receivers)


def routes_by_name(app: Celery) -> bool:
    """Tell whether a task's name alone determines the route of its calls: no route is a function."""
    router = app.amqp.router
    return type(router) is Router and all(type(route) is MapRoute for route in router.routes)


def _are_alone(app: Celery) -> bool:
    """Tell whether calls have no other effects here than messages, and nothing reads these.

    A task that calls others passes much on to them, and notes their results.
    """
    return not (is_listened_to() or app.current_worker_task or app.conf.task_send_sent_event)


def _are_celerys(app: Celery) -> bool:
    """Tell whether an app's messages are made by Celery's own methods, for all calls alike."""
    return (
        type(app.amqp) is KeepingAMQP
        and routes_by_name(app)
        and app.sidejob.settings.on_store_down != "publish"
        and _is_celerys(AMQP, "as_task_v2")
        and _is_celerys(type(app), "send_task")
    )


def _is_common(task: Any, options: Mapping[str, Any], made: Made) -> bool:
    """Tell whether others may copy this message: its task is called in Celery's own way, and follows no other."""
    about = made.message.about or {}
    return (
        made.message.call is None
        and made.message.unique_key is None
        and not about["deaths"]
        and about["headers"]["root_id"] == about["headers"]["id"]
        and options.keys().isdisjoint(("argsrepr", "kwargsrepr", "reply_to"))
        and getattr(task, "_dump_pydantic_arguments", None) is None
        and all(_is_celerys(type(task), name) for name in ("apply_async", "shadow_name", "_get_exec_options"))
    )


def _is_celerys(owner: type, name: str) -> bool:
    """Tell whether a method is Celery's own: a wrapper, such as a tracing library's, may read each message."""
    method = getattr(owner, name)
    return type(method) is FunctionType and method.__globals__["__name__"].startswith("celery.")
