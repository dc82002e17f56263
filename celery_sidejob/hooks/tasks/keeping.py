"""Keeps messages of durable tasks in the store before they are published, whatever code calls the tasks.

`delay`, `send_task`, canvas, retries and beat all end in ``app.amqp.send_task_message``, after the receivers of
`before_task_publish`. There (`hooks/patches/app_methods.py`) a message of a durable task gets a producer that keeps it
instead of sending it: the message becomes a row, to the byte as it would have been sent. Then our own publisher gives
it to the broker.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from celery import Celery
from celery.app import amqp as celery_amqp
from kombu import Queue
from kombu.compression import compress
from kombu.utils.functional import maybe_list

from ...model.capacity import Admission
from ...model.durable import ADOPTED, CALL, DEATHS, DIGEST, HEADER, REPUBLISHED, WORKER, Message
from ...model.errors import InvalidValueError, SettingsError, StoreUnavailableError
from ...model.logger import logger
from ...operations.gates import capacity
from ...operations.ledger import durable_ends, keeping
from ...operations.ledger.durable_runs import Run
from ...store.errors import RowsLocked
from ..admission import admission_to, waiting_in
from ..apps import runtime_for
from ..messages.carried import check_names
from ..messages.encoding import encoded
from ..messages.kept_message import check_id, own_priority, publication_of, time_of
from ..patches.app_methods import DurableAMQP
from . import ending
from .present import Made, Together, present_call, present_run

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
                ending.give_up(run, error, repeats=self._app.tasks[run.task].lost_policy == "requeue")
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
            present.noted.made = Made(message, body, serializer, compression)
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
        """Messages by the name of their task, which further single calls copy (`composing.py`)."""
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
