"""Calls of tasks: the additions to `Celery.send_task` for durable tasks, for transactions and for unique keys.

The subscription to the result of a durable task is made once its message is kept, and may fail.

Many durable tasks in one call have one commit for all their rows, and one pipeline of the broker for a page of
messages. Celery makes each message as usual, with its signals (or `composing.py` copies one), and the messages for its
producer are collected. Then all are kept, or none, and given to the broker together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

from celery import Celery
from celery.backends.rpc import RPCBackend
from celery.canvas import Signature, chord, group
from celery.canvas import _chain as chain

from ...model import native
from ...model.checks import shown
from ...model.durable import Message
from ...model.errors import IllegalMoveError, InvalidValueError, StoreUnavailableError
from ...model.logger import logger
from ...model.unique import Unique
from ...operations.changes.follow_up import do_after_commit
from ...operations.changes.unique_keys import KeyHeldError, is_replaced
from ...operations.ledger import keeping
from ..call_options import admission_of, check_call, is_follower
from ..patches import result_backend
from ..task_options import is_durable, known_tasks
from . import composing
from .composing import Composer
from .present import Call, Together, calling, handed_over, is_lending, making, present_call, present_run

CALLS_BY_TASKS = 2
"""The number of arguments after the name that a task passes to send_task by position: its own arguments."""
PRODUCER_INDEX = 5
"""The index of the producer among send_task's arguments after the name, if it is passed by position."""


def send_task(app: Celery, send: Callable[..., Any], name: str, *args: Any, **options: Any) -> Any:
    """Send a task; a durable task's subscription to its result is made after its message is kept, and may fail.

    Celery subscribes before, and then an unreachable Redis fails the call after twenty seconds.
    """
    if len(args) == CALLS_BY_TASKS and (model := composing.model_of(app, name, options, *args)) is not None:
        return _send_again(app, model, *args, **options)
    if is_lending():
        with handed_over(options):
            return send_task(app, send, name, *args, **options)
    unique = Unique.take(options)
    admission, follows = admission_of(known_tasks(app).get(name), options), is_follower(options)
    call = present_call()._replace(unique=unique, replaces=None, admission=admission, follows=follows)
    if unique is not None:
        return _send_unique(app, send, call, name, args, options)
    if not is_durable(app, name):
        if admission is not None:
            raise _has_no_row(app, name, "capacity")
        if options.get("transaction") is not None and not getattr(known_tasks(app).get(name), "sidejob", False):
            return _send_in(app, send, name, args, options)
        return send(name, *args, **options)
    return _send_durable(app, send, name, args, options, call)


def _send_again(
    app: Celery,
    model: composing.Composed,
    args: Any,
    kwargs: Any,
    *,
    result_cls: Any,
    task_id: str | None = None,
    **_: Any,
) -> Any:
    """Send a durable task with a message that is copied from one of Celery's; return its result."""
    message = model.message(task_id, args, kwargs)
    keeping.keep(app.sidejob.runtime, message)
    if model.subscribes:
        _subscribe_quietly(app, partial(app.backend.on_task_call, None, message.task_id))
    return model.result(result_cls, message.task_id)


def _has_no_row(app: Celery, name: str, option: str) -> InvalidValueError:
    """Return the error of a call that needs a row, for a task whose messages have no rows."""
    instead = "make it so with durable=True or sidejob_durable_tasks"
    if getattr(known_tasks(app).get(name), "sidejob", False):
        instead = "call enqueue(), or its apply_async()"
    return InvalidValueError(f"A message of {name} has no row, and {option}= needs one: {instead}.")


def _send_unique(
    app: Celery, send: Callable[..., Any], call: Call, name: str, args: Any, options: dict[str, Any]
) -> Any:
    """Send a durable task that has its unique key until it is done, or return the result of the task that has the key.

    Before a further try another task may have got the key, or the task that has it may have begun or ended: so each try
    judges anew.
    """
    if not is_durable(app, name):
        raise _has_no_row(app, name, "unique")
    unique, replaces = call.unique, None
    assert unique is not None
    while True:
        try:
            return _send_durable(app, send, name, args, dict(options), call._replace(replaces=replaces))
        except KeyHeldError as held:
            if not is_replaced(unique, held):
                return app.AsyncResult(held.task_id)
            if options.get("transaction") is not None:
                raise IllegalMoveError(
                    f"Task {held.task_id} has the unique key {unique.key!r}, and on_duplicate='replace' cannot be part "
                    "of transaction=: it would lock that task until your commit. Call it before or after."
                ) from None
            replaces = held.task_id


def _send_durable(
    app: Celery, send: Callable[..., Any], name: str, args: Any, options: dict[str, Any], call: Call
) -> Any:
    check_call(name, options)
    together, noted, lazy, asked = call.together, call.noted, None, dict(options)
    subscriptions: list[Callable[[], Any]] = [] if together is None else together.subscriptions
    if len(args) == CALLS_BY_TASKS and call.unique is None and composing.may_compose(app, send, options):
        noted = []
    if len(args) <= PRODUCER_INDEX and not any(options.get(name) for name in ("producer", "publisher", "connection")):
        lazy = options["producer"] = LazyProducer(app)
    result_backend.ask_by(app.backend, _on_task_call)
    try:
        with making(call._replace(noted=noted, subscriptions=subscriptions)):
            result = send(name, *args, **options)
    finally:
        if lazy is not None:
            lazy.close()
    if together is None:
        for subscribe in subscriptions:
            _subscribe_quietly(app, subscribe)
    if noted and together is None:
        composing.remember(app, name, asked, noted[-1], *args)
    return result


def _subscribe_quietly(app: Celery, subscribe: Callable[[], Any]) -> None:
    """Ask the backend, unless the broker seems unreachable; a caller that waits for the result asks again."""
    if not app.sidejob.runtime.broker.ready:
        return
    try:
        subscribe()
    except Exception as error:
        logger.warning("The result backend does not answer; the task is kept all the same: %s", error)


def _on_task_call(backend: Any, ask: Callable[..., Any], producer: Any, task_id: str) -> Any:
    """Postpone the question that Celery asks the backend for a call: `Call.subscriptions` collects it."""
    subscriptions = present_call().subscriptions
    if subscriptions is None:
        return ask(producer, task_id)
    if isinstance(backend, RPCBackend):  # its queue must exist before the answer comes
        _subscribe_quietly(backend.app, partial(ask, producer, task_id))
    else:
        subscriptions.append(partial(ask, producer, task_id))
    return {}


def _send_in(app: Celery, send: Callable[..., Any], name: str, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Send a plain task by Celery's `send`, with its message in the transaction among its options; return its result.

    The broker must be the store: the message is a row there.

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
    from ...transport.postgres.rows import LENT, Lent  # this needs kombu 5.7, as this broker does

    borrowed = runtime.connections.borrow(options["transaction"])
    own = {option: value for option, value in options.items() if option not in ("transaction", "publisher")}
    lent = Lent(borrowed)
    with (
        native.within(LENT, lent),
        borrowed.atomic(),
        app.producer_pool.acquire(block=True) as producer,
        producer.batch(),
    ):
        result = send(name, *args, **{**own, "producer": producer, "retry": False})
    borrowed.after_commit(partial(do_after_commit, partial(runtime.publisher.ring_queues, list(lent.queues))))
    return result


class LazyProducer:
    """Stands for a producer of Celery's pool while one task is sent; `close` gives a taken producer back.

    A message that is kept needs none. Taking a producer from the pool and giving it back costs a tenth of a call.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self.taken: Any = None
        self.connection = LazyConnection(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.take(), name)

    def take(self) -> Any:
        """Return the producer; the first use takes it from the pool."""
        if self.taken is None:
            timeout = self._app.conf.get("broker_pool_acquire_timeout")  # Celery 5.5 does not have this setting
            self.taken = self._app.producer_pool.acquire(block=True, timeout=timeout)
        return self.taken

    def close(self) -> None:
        """Give the producer back, if it was taken."""
        taken, self.taken = self.taken, None
        if taken is not None:
            taken.release()


class LazyConnection:
    """Stands for the producer's connection, which Celery asks for its errors around each message that it sends."""

    def __init__(self, producer: LazyProducer) -> None:
        self._producer = producer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer.take().connection, name)

    def _reraise_as_library_errors(self, *_: Any, **__: Any) -> LazyConnection:
        return self

    def __enter__(self) -> None:
        """Ask nothing of a connection that may never exist."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and (taken := self._producer.taken) is not None:
            with taken.connection._reraise_as_library_errors():
                raise error


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
    if getattr(known_tasks(app).get(first.task), "sidejob", False):
        raise InvalidValueError(f"{what} is of {first.task}, whose calls are jobs: use enqueue_many().")
    if not is_durable(app, first.task):
        raise InvalidValueError(
            f"{what} is of {first.task}, which is not durable: make it so with durable=True or sidejob_durable_tasks."
        )
    if "transaction" in item.options:
        raise InvalidValueError(f"{what} has a transaction of its own: give transaction= to send_many().")
    if item._app is None:
        item = item.clone()
        item._app = app
    return item
