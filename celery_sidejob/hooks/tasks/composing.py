"""Makes messages of durable tasks after one that Celery has made: calls of one task differ in little.

Celery makes the first message of a task and its options. Each further one has another task id and other arguments, and
is to the byte what Celery would have made. This is done only where nothing looks at single messages: no signal of a
publication has a receiver, no route is a function, and nobody has replaced a method by which Celery makes a message.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

from celery import Celery, signals
from celery.app.amqp import AMQP
from celery.app.routes import MapRoute, Router
from celery.canvas import Signature
from celery.utils.saferepr import saferepr
from kombu.compression import compress
from kombu.utils.uuid import uuid

from ...model.alike import alike
from ...model.durable import Message
from ..durability import known_tasks
from ..messages.encoding import JSON, encoded
from ..messages.kept_message import as_bytes, check_id, publication_of
from .keeping import KeepingAMQP, send_task
from .present_call import Made, Together


class Composer:
    """Sends the signatures of one call, whose messages are collected."""

    def __init__(self, app: Celery, together: Together, producer: Any) -> None:
        self._app = app
        self._together = together
        self._producer = producer
        self._composed: dict[str, Composed] = {}
        self._may_compose = _nothing_looks_at_messages(app)

    def send(self, signature: Signature) -> Any:
        """Have the message of a signature collected, and return the task's result."""
        composed = self._composed.get(signature.task)
        if composed is not None and composed.fits(signature):
            return self._send_again(signature, composed)
        result = signature.apply_async(producer=self._producer)
        made = self._together.made
        is_known = signature.task in known_tasks(self._app)
        if self._may_compose and is_known and made is not None and _is_common(signature, made):
            composed = Composed(self._app, signature, made)
            if composed.message(made.message.task_id, signature) == made.message:
                self._composed[signature.task] = composed
        return result

    def _send_again(self, signature: Signature, composed: Composed) -> Any:
        """Do what Celery does for a call, with a message that is not made anew."""
        task, task_id = composed.task, signature.options.get("task_id")
        if task.typing:
            task.__header__(*signature.args, **signature.kwargs)
        if task_id:
            check_id(task.name, task_id)
        message = composed.message(task_id or uuid(), signature)
        self._together.messages.append(message)
        if not composed.ignores_result:
            self._app.backend.on_task_call(self._producer, message.task_id)
        result = task.AsyncResult(message.task_id)
        result.ignored = composed.ignores_result
        return result


class Composed:
    """A message that Celery has made for a signature, and those of signatures that differ in id and arguments."""

    def __init__(self, app: Celery, signature: Signature, made: Made) -> None:
        self.task = signature.type
        self._options = _without_id(signature)
        self._made = made
        self._about: dict[str, Any] = dict(made.message.about or {})
        self.ignores_result = self._about["headers"]["ignore_result"]
        levels = app.conf.get("task_repr_maxlevels")  # which Celery 5.5 does not have
        self._levels = {} if levels is None else {"maxlevels": levels}
        self._amqp = app.amqp
        self._publication = self._with_gaps()
        is_constant = not any(made.body[:2]) and self._about["content_type"] == JSON
        self._body_of_nothing = made.message.body if is_constant else None

    def fits(self, signature: Signature) -> bool:
        """Tell whether the message of a signature differs in nothing but its id and arguments."""
        return (
            type(signature) is Signature
            and signature.type is self.task
            and alike(_without_id(signature), self._options)
        )

    def message(self, task_id: str, signature: Signature) -> Message:
        """Return the message of a signature that fits."""
        args, kwargs = signature.args or (), signature.kwargs or {}
        texts = {
            "id": task_id,
            "argsrepr": self._shown(args, "argsrepr"),
            "kwargsrepr": self._shown(kwargs, "kwargsrepr"),
        }
        model = self._made.message
        headers = {**self._about["headers"], **texts, "root_id": task_id}
        return Message(
            task_id, model.task, model.queue, self._publication % {name: _inner(text) for name, text in texts.items()},
            self._body(args, kwargs), eta=model.eta, expires_at=model.expires_at, priority=model.priority,
            about={
                **self._about, "headers": headers,
                "properties": {**self._about["properties"], "correlation_id": task_id},
            },
            admission=model.admission,
        )  # fmt: skip

    def _body(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
        if self._body_of_nothing is not None and not args and not kwargs:
            return self._body_of_nothing
        made = self._made
        _, content_encoding, data = encoded(self.task.name, (args, kwargs, made.body[2]), made.serializer)
        data = as_bytes(data, content_encoding)
        return compress(data, made.compression)[0] if made.compression else data

    def _shown(self, given: Any, name: str) -> str:
        """Return how Celery shows arguments."""
        if not given:
            return str(self._amqp.how_nothing_looks[name])
        return str(saferepr(given, getattr(self._amqp, f"{name}_maxsize"), **self._levels))

    def _with_gaps(self) -> str:
        """Return what goes around the body as the text that is kept, with a gap for each of the texts that differ."""
        gaps = {name: secrets.token_hex(16) for name in ("id", "argsrepr", "kwargsrepr")}
        about = {key: value for key, value in self._about.items() if key != "deaths"}
        about["headers"] = {**about["headers"], **gaps, "root_id": gaps["id"]}
        about["properties"] = {**about["properties"], "correlation_id": gaps["id"]}
        text = publication_of(about).replace("%", "%%")
        for name, gap in gaps.items():
            text = text.replace(gap, f"%({name})s")
        return text


def _inner(text: str) -> str:
    """Return a text as it is inside of a JSON text that is inside of another."""
    return text if text.isalnum() and text.isascii() else json.dumps(json.dumps(text)[1:-1])[1:-1]


def _without_id(signature: Signature) -> dict[str, Any]:
    options: dict[str, Any] = signature.options
    return {name: value for name, value in options.items() if name != "task_id"} if "task_id" in options else options


def is_listened_to() -> bool:
    """Tell whether somebody is told of each publication of a task."""
    told = (signals.before_task_publish, signals.after_task_publish, signals.task_sent)
    return any(signal.receivers for signal in told)


def routes_by_name(app: Celery) -> bool:
    """Tell whether the name of a task alone says where its calls go: no route is a function."""
    router = app.amqp.router
    return type(router) is Router and all(type(route) is MapRoute for route in router.routes)


def _nothing_looks_at_messages(app: Celery) -> bool:
    """Tell whether messages of this app are made alike, and nothing else than their rows follows from them.

    A task that calls others hands much on to them, and notes their results.
    """
    sending, amqp = app.send_task, app.amqp
    return (
        not (is_listened_to() or app.conf.task_send_sent_event or app.current_worker_task)
        and app.sidejob.settings.on_store_down != "publish"
        and getattr(sending, "func", None) is send_task and sending.args[1:] == (Celery.send_task.__get__(app),)
        and type(amqp) is KeepingAMQP and routes_by_name(app)
        and _is_celerys(AMQP, "as_task_v2") and _is_celerys(type(app), "send_task")
    )  # fmt: skip


def _is_common(signature: Signature, made: Made) -> bool:
    """Tell whether others may be made after this message: its task calls it as Celery does, and it follows no other."""
    task, about = signature.type, made.message.about or {}
    return (
        type(signature) is Signature
        and made.message.call is None and not about["deaths"]
        and about["headers"]["root_id"] == about["headers"]["id"]
        and signature.options.keys().isdisjoint(("argsrepr", "kwargsrepr"))
        and getattr(task, "_dump_pydantic_arguments", None) is None
        and all(_is_celerys(type(task), name) for name in ("apply_async", "shadow_name", "_get_exec_options"))
        and _is_celerys(Signature, "apply_async")
    )  # fmt: skip


def _is_celerys(owner: type, name: str) -> bool:
    """Tell whether a method is Celery's own: a wrapper, as of a library that traces calls, may look at each message."""
    method = getattr(owner, name)
    return type(method) is FunctionType and method.__globals__["__name__"].startswith("celery.")
