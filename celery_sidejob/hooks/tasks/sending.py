"""Many durable tasks in one call: one commit for all their rows, one pipeline of the broker for a page of messages.

Celery makes each message as usual, with its signals (or `composing.py` copies one), and the messages for its producer
are collected. Then all are kept, or none, and given to the broker together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from celery import Celery
from celery.canvas import Signature, chord, group
from celery.canvas import _chain as chain

from ...model.checks import shown
from ...model.durable import Message
from ...model.errors import InvalidValueError, StoreUnavailableError
from ...model.logger import logger
from ...operations.ledger import keeping
from ..durability import is_durable, known_tasks
from .composing import Composer
from .present import Together, calling, present_run


def send_many(app: Celery, signatures: Iterable[Signature], transaction: Any) -> list[Any]:
    """Keep the messages of the signatures, all or none; returns their results in order.

    As inside kombu's `Producer.batch`, `after_task_publish` is sent when a message is complete, before it is out.
    """
    if isinstance(signatures, Signature):
        raise InvalidValueError(
            "send_many() takes several signatures, not one: put it into a list, or call its apply_async()."
        )
    wanted = [_checked(app, index, item) for index, item in enumerate(signatures)]
    if not wanted:
        return []
    if app.conf.task_always_eager:
        return [signature.apply_async() for signature in wanted]
    together = Together()
    with ExitStack() as stack:
        with calling(together=together, subscriptions=together.subscriptions):
            # One of Celery's producers for all; it connects only if a task that is not durable is published.
            composer = Composer(app, together, stack.enter_context(app.producer_pool.acquire(block=True)))
            results = [_collected(index, signature, composer) for index, signature in enumerate(wanted)]
        _keep(app, together, transaction)
        if transaction is None:
            _tell(app, together.events)
    _tell(app, together.subscriptions)
    return results


def made(app: Celery, signatures: Sequence[Signature]) -> tuple[Sequence[Message], Callable[[], None]]:
    """Let Celery make messages of one durable task for a caller that keeps them, and a function that reports them.

    If Celery runs tasks at once (`task_always_eager`) there are no messages, and the tasks run afterwards.
    """
    if app.conf.task_always_eager:

        def run() -> None:
            for signature in signatures:
                signature.apply_async()

        return (), run
    together = Together()
    with (
        calling(together=together, subscriptions=together.subscriptions),
        app.producer_pool.acquire(block=True) as producer,
    ):
        composer = Composer(app, together, producer)
        for signature in signatures:
            composer.send(signature)
    return together.messages, lambda: _tell(app, together.events)


def _collected(index: int, signature: Signature, composer: Composer) -> Any:
    """Collect one message; an error for it names the index of the signature."""
    try:
        return composer.send(signature)
    except TypeError as error:
        raise TypeError(f"signatures[{index}] of send_many(), of {signature.task}: {error}") from error
    except InvalidValueError as error:
        raise type(error)(f"signatures[{index}] of send_many(): {error}") from error


def _keep(app: Celery, together: Together, transaction: Any) -> None:
    runtime = app.sidejob.runtime
    if transaction is not None:
        keeping.lend_many(runtime, together.messages, transaction)
        return
    run = present_run(app)
    try:
        if run is not None and run.body_is_over:
            keeping.keep_many(run.runtime, together.messages, of_run=True)
        else:
            keeping.keep_many(runtime, together.messages)
    except StoreUnavailableError as error:
        if not keeping.may_lack_row(runtime, error):
            raise
        count = len(together.messages)
        logger.warning("%d tasks are published without rows, as sidejob_on_store_down says: %s", count, error)
        for publish in together.without_rows:
            publish()


def _tell(app: Celery, calls: Sequence[Callable[[], Any]]) -> None:
    """Send events and ask the result backend, which must not fail the call. The first failure ends this."""
    if not app.sidejob.runtime.broker.ready:
        return
    try:
        for call in calls:
            call()
    except Exception as error:
        logger.warning("The tasks are kept; what else was to be told of them failed: %s", error)


def _checked(app: Celery, index: int, item: Any) -> Signature:
    """Return one signature in the form that is sent; InvalidValueError, before anything is sent, if it is wrong."""
    what = f"signatures[{index}] of send_many()"
    if not isinstance(item, Signature):
        raise InvalidValueError(f"{what} is no signature: {shown(item)}. Give task.s(...) or app.signature(...).")
    first = item
    while isinstance(first, chain) and first.tasks:
        first = first.tasks[0]
    if isinstance(first, group | chord | chain) or "chord" in item.options:
        raise InvalidValueError(
            f"{what} is or begins with a group or a chord, which is not one message: call its apply_async(), or give "
            "the signatures of a group's tasks."
        )
    if item._app is not None and item._app is not app:
        raise InvalidValueError(f"{what} belongs to another app: {item!r}.")
    _check_durable(app, what, first.task)
    if "transaction" in item.options:
        raise InvalidValueError(f"{what} has a transaction of its own: give transaction= to send_many().")
    if item._app is None:
        item = item.clone()
        item._app = app
    return item


def _check_durable(app: Celery, what: str, task: str) -> None:
    if getattr(known_tasks(app).get(task), "sidejob", False):
        raise InvalidValueError(f"{what} is of {task}, whose calls are jobs: use enqueue_many().")
    if not is_durable(app, task):
        raise InvalidValueError(
            f"{what} is of {task}, which is not durable: make it so with durable=True or sidejob_durable_tasks."
        )
