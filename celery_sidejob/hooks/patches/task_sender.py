"""Replaces `AMQP._create_task_sender` and `AMQP.as_task_v2` of one app; read in Celery 5.5.0 and 5.7.0.

The class itself is an official extension point (`app.amqp_cls`), but its private method is not. It returns the function
``send_task_message(producer, name, message, queue=..., **options)``, in which all ways to call a task end, after the
receivers of `before_task_publish`. Ours gives that function a producer which keeps the message of a durable task
instead of sending it. `as_task_v2` makes the message of a call; ours adds the text for empty arguments. If a later
Celery sends by another function, messages of durable tasks are sent without being kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from celery import Celery
from celery.app.amqp import AMQP
from kombu.utils.imports import symbol_by_name

from ..durability import is_durable
from .wrapping import above

REPR_POSITION = 21
"""The number of arguments of `as_task_v2` between a call's own and those with the text of these."""


def install(app: Celery, amqp: type[DurableAMQP]) -> None:
    """Publish messages of durable tasks by `amqp`, whatever code calls them; reads no configuration."""
    found = app.__dict__.get("amqp")
    if found is not None:  # it was used before
        found.__class__ = above(amqp, type(found))
        found.__dict__.pop("send_task_message", None)
    else:
        made = above(amqp, symbol_by_name(app.amqp_cls))
        # By its name if it has one: spawned processes get the app by pickle.
        app.amqp_cls = f"{amqp.__module__}:{amqp.__name__}" if made is amqp else made


class DurableAMQP(AMQP):
    """Celery's AMQP, with a sender that gives messages of durable tasks to a special producer."""

    producer_of_durable: Callable[..., Any]
    """Makes that producer from Celery's producer, the app, the task's name and its queue."""

    def as_task_v2(
        self, task_id: Any, name: str, args: Any = None, kwargs: Any = None, *more: Any, **options: Any
    ) -> Any:
        """Make a message; the text of empty arguments is made only once: it costs Celery a tenth of the whole call."""
        if len(more) <= REPR_POSITION:
            for key, given in (("argsrepr", args), ("kwargsrepr", kwargs)):
                if not given and options.get(key) is None:
                    options[key] = self.how_nothing_looks[key]
        made = super().as_task_v2(task_id, name, args, kwargs, *more, **options)
        if made.sent_event and is_durable(self.app, name):  # a job's event says nothing of its arguments
            hide = self.app.sidejob.settings.redacted
            made.sent_event.update({key: hide(made.sent_event[key]) for key in ("args", "kwargs")})
        return made

    @cached_property
    def how_nothing_looks(self) -> dict[str, str]:
        """The texts by which Celery shows empty arguments."""
        headers = super().as_task_v2("", "", (), {}).headers
        return {key: headers[key] for key in ("argsrepr", "kwargsrepr")}

    def _create_task_sender(self) -> Any:
        send = super()._create_task_sender()
        app = self.app

        def send_task_message(producer: Any, name: str, message: Any, **options: Any) -> Any:
            if not is_durable(app, name):
                return send(producer, name, message, **options)
            own = self.producer_of_durable(producer, app, name, options.get("queue"))
            return send(own, name, message, **options)

        return send_task_message
