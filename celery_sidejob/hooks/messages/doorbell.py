"""The message that rings for a job: its headers name the job and its owed run."""

from __future__ import annotations

from typing import Any

from celery import Celery
from kombu.serialization import dumps

from ...model.logger import logger
from ...model.messages import FORMAT, Doorbell
from .carried import CELERYS

HEADER = "sidejob"


def publish(app: Celery, producer: Any, bell: Doorbell, *, family: str, timeout: float) -> None:
    """Give a doorbell to a broker of that family."""
    headers, properties, body, _ = _made(app, bell)
    queue = app.amqp.queues[bell.queue]
    exchange, routing_key = queue.exchange.name, queue.routing_key
    if (queue.exchange.type or "direct") == "direct":
        exchange, routing_key = "", queue.name  # the default exchange, and so a single queue
    producer.publish(
        body,
        exchange=exchange,
        routing_key=routing_key,
        declare=[queue],
        headers=headers,
        serializer="json",
        delivery_mode=queue.exchange.delivery_mode or app.conf.task_default_delivery_mode,
        retry=False,
        priority=_priority(bell.priority, family),
        timeout=timeout,
        **properties,
    )


def delivered(app: Celery, bell: Doorbell) -> dict[str, Any]:
    """Return a doorbell in the form in which kombu's virtual transports deliver it."""
    headers, properties, body, _ = _made(app, bell)
    content_type, content_encoding, data = dumps(body, serializer="json")
    return {
        "body": data,
        "content-type": content_type,
        "content-encoding": content_encoding,
        "headers": headers,
        "properties": {
            **properties,
            "delivery_mode": app.conf.task_default_delivery_mode,
            "delivery_info": {"exchange": "", "routing_key": bell.queue, "priority": bell.priority or 0},
        },
    }


def announce_sent(app: Celery, bell: Doorbell, producer: Any) -> None:
    """Send Celery's event `task-sent` for a doorbell that the broker has, if `task_send_sent_event` asks for it."""
    if not app.conf.task_send_sent_event:
        return
    try:
        event = {**_made(app, bell, with_event=True)[3], "queue": bell.queue, "exchange": "", "routing_key": bell.queue}
        app.amqp._event_dispatcher.publish("task-sent", event, producer, retry=False)
    except Exception as error:  # it is only an event, and the broker has the message
        logger.debug("task-sent of %s was not sent: %s", bell.task_id, error)


def _made(app: Celery, bell: Doorbell, *, with_event: bool = False) -> tuple[dict[str, Any], dict[str, Any], Any, Any]:
    """Return headers, properties and body of a doorbell, and its event; its arguments stay in the store."""
    options = dict(bell.options or {})
    header = {"v": FORMAT, "job": bell.job_id, "for_run": bell.for_run}
    headers, properties, body, event = app.amqp.as_task_v2(
        bell.task_id,
        bell.task,
        args=(),
        kwargs={},
        argsrepr=f"(job {bell.job_id})",
        kwargsrepr="{}",
        ignore_result=True,  # the asking's result is stored by its end, not by Celery's tracer
        shadow=options.get("shadow"),
        time_limit=options.get("time_limit"),
        soft_time_limit=options.get("soft_time_limit"),
        root_id=options.get("root_id"),
        parent_id=options.get("parent_id"),
        origin="celery_sidejob",
        create_sent_event=with_event,
    )
    users = options.get("headers") or {}
    headers.update((name, value) for name, value in users.items() if name not in CELERYS)
    headers[HEADER] = header
    return headers, properties, body, event


def _priority(priority: int | None, family: str) -> int | None:
    """Translate a priority in which higher is sooner: Redis serves 0 first."""
    if priority is None:
        return None
    if family == "redis":
        return 9 - max(0, min(9, priority))
    return priority
