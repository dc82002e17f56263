"""A call of a plain task in the caller's transaction, if the broker is the store: its message is a row there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from celery import Celery

from ...model.errors import InvalidValueError
from ...operations.changes.follow_up import do_after_commit


def send_in(app: Celery, send: Callable[..., Any], name: str, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Send a task by Celery's `send`, with its message in the transaction that is among its options; return its result.

    A worker finds it within a second of the commit, even if we do not learn of the commit. Raises InvalidValueError
    with another broker, and for a call with its own connection. A given producer may be Celery's, which makes one for
    all calls of a group; it is not used.
    """
    runtime = app.sidejob.runtime
    if not runtime.connections.is_broker:
        raise InvalidValueError(
            f"{name} is not durable, so its message cannot be part of a transaction: make it so with durable=True or "
            'sidejob_durable_tasks, use broker_url="sidejobpg://" without sidejob_failover_urls, or leave transaction= '
            "out."
        )
    if options.get("connection"):
        raise InvalidValueError(f"A call of {name} has a transaction and a connection to the broker: give either.")
    from ...transport.postgres.sending import LENT, Lent  # this needs kombu 5.7, as this broker does

    borrowed = runtime.connections.borrow(options["transaction"])
    own = {option: value for option, value in options.items() if option not in ("transaction", "publisher")}
    lent = Lent(borrowed)
    token = LENT.set(lent)
    try:
        with borrowed.atomic(), app.producer_pool.acquire(block=True) as producer, producer.batch():
            result = send(name, *args, **{**own, "producer": producer, "retry": False})
    finally:
        LENT.reset(token)
    borrowed.after_commit(partial(do_after_commit, partial(runtime.publisher.ring_queues, list(lent.queues))))
    return result
