"""Replaces `AMQP._create_task_sender` and `AMQP.as_task_v2` of one app; read in Celery 5.5.0 and 5.7.0.

The class itself is an official extension point (`app.amqp_cls`), its private method is not: it returns the function
``send_task_message(producer, name, message, queue=..., **options)``, in which all ways to call a task end, after the
receivers of `before_task_publish` have had their say. Ours gives that function a producer which keeps the message of a
durable task instead of sending it. `as_task_v2` makes a message of a call; ours adds how no arguments look. If a later
Celery sends by another function, messages of durable tasks are sent without being kept.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from celery import Celery
from celery.app.amqp import AMQP
from kombu.utils.imports import symbol_by_name

from ..tasks.durability import is_durable
from ..tasks.keeping import KeepingProducer
from .existing_class import above

REPR_PLACE = 21
"""How many arguments `as_task_v2` takes between a call's own and those that say how these are shown."""


def install(app: Celery) -> None:
    """Have messages of durable tasks kept, whoever publishes them; reads no configuration."""
    found = app.__dict__.get("amqp")
    if found is not None:  # it was used before
        found.__class__ = above(KeepingAMQP, type(found))
        found.__dict__.pop("send_task_message", None)
    else:
        kept = above(KeepingAMQP, symbol_by_name(app.amqp_cls))
        # By its name where it has one: processes that are spawned are sent the app.
        app.amqp_cls = f"{__name__}:KeepingAMQP" if kept is KeepingAMQP else kept


class KeepingAMQP(AMQP):
    """Celery's AMQP, with a sender that has messages of durable tasks kept."""

    def as_task_v2(
        self, task_id: Any, name: str, args: Any = None, kwargs: Any = None, *more: Any, **options: Any
    ) -> Any:
        """Make a message; how it shows no arguments is found out once: for Celery that is a tenth of the whole call."""
        if len(more) <= REPR_PLACE:
            for key, given in (("argsrepr", args), ("kwargsrepr", kwargs)):
                if not given and options.get(key) is None:
                    options[key] = self._how_nothing_looks[key]
        made = super().as_task_v2(task_id, name, args, kwargs, *more, **options)
        if made.sent_event and is_durable(self.app, name):  # that of a job says nothing of its arguments
            hide = self.app.sidejob.settings.redacted
            made.sent_event.update({key: hide(made.sent_event[key]) for key in ("args", "kwargs")})
        return made

    @cached_property
    def _how_nothing_looks(self) -> dict[str, str]:
        headers = super().as_task_v2("", "", (), {}).headers
        return {key: headers[key] for key in ("argsrepr", "kwargsrepr")}

    def _create_task_sender(self) -> Any:
        send = super()._create_task_sender()
        app = self.app

        def send_task_message(producer: Any, name: str, message: Any, **options: Any) -> Any:
            if not is_durable(app, name):
                return send(producer, name, message, **options)
            return send(KeepingProducer(producer, app, name, options.get("queue")), name, message, **options)

        return send_task_message
