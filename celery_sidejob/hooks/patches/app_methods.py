"""Replaces methods of one `Celery` and of its `AMQP`: how it connects, shows its settings, makes and calls tasks.

And of all chords: how they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any

from celery import Celery
from celery.app.amqp import AMQP
from celery.canvas import _chord
from kombu.utils.imports import symbol_by_name

from ...model.errors import SettingsError
from ..configuration import masked, masked_text
from ..task_options import is_durable
from . import above, wrap


def resolve_urls(app: Celery, resolve: Callable[[Celery, Any], tuple[Any, Mapping[str, Any]]]) -> None:
    """Make the app connect to the URL and transport options that `resolve` returns for a URL; reads no configuration.

    Replaces `Celery._connection` of one app; read in Celery 5.5.0 and 5.7.0.

    ``app.connection()``, `connection_for_read` and `connection_for_write` end in ``_connection(url, …)``, and with them
    workers, beat, remote control, the pools of producers and monitors. Ours replaces a bare `sidejobpg://` by the
    store's own URL. If a later Celery connects in another way, the transport gets the bare URL, and refuses it.
    """
    wrap(app, "_connection", partial(_connect, app, resolve))


def _connect(
    app: Celery,
    resolve: Callable[[Celery, Any], tuple[Any, Mapping[str, Any]]],
    connect: Callable[..., Any],
    url: Any,
    *args: Any,
    transport_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    resolved, found = resolve(app, url)
    return connect(resolved, *args, transport_options={**found, **(transport_options or {})}, **options)


def mask_report(app: Celery) -> None:
    """Make the app's report show no password.

    Replaces `Celery.bugreport` of one app; read in Celery 5.5.0 and 5.7.0.

    `celery report` prints what ``app.bugreport()`` returns: a text with all settings, and passwords in those whose
    names Celery does not know. Ours masks the text. If a later Celery reports in another way, these passwords are shown
    again.
    """
    wrap(app, "bugreport", lambda report: masked_text(report()))


def mask_settings(app: Celery) -> None:
    """Make the app's configuration show no password, even when it is loaded anew; reads no configuration.

    Replaces `Settings.table` of an app's configuration; read in Celery 5.5.0 and 5.7.0.

    `inspect conf`, and all other code that prints the configuration, uses ``app.conf.table(with_defaults, censored)``:
    Celery masks a setting by its name, and of several URLs the first. Ours masks by the value. Each load of the
    configuration makes another object, and its `setattr` would make a setting, so the method goes into the instance's
    `__dict__`. If a later Celery shows settings in another way, these passwords are shown again.
    """
    app.on_after_configure.connect(partial(_mask, app), weak=False, dispatch_uid="celery_sidejob.masking")
    _mask(app)


def _mask(app: Celery, **_: Any) -> None:
    conf = app._conf
    if conf is not None and "table" not in conf.__dict__:
        conf.__dict__["table"] = partial(_table, conf.table)


def _table(table: Callable[..., Mapping[str, Any]], with_defaults: bool = False, censored: bool = True) -> Any:
    shown = table(with_defaults, False)  # Celery masks broker_url by taking it apart, and shows the wrong parts
    return {key: masked(value, key) for key, value in shown.items()} if censored else shown


def make_task(app: Celery, function: Callable[..., Any], **options: Any) -> Any:
    """Make a task of a function now: `app.task` may be overridden by a project, and may postpone it."""
    return app._task_from_fun(function, **options)


def tell_of_tasks(app: Celery, *, made: Callable[[Any], Any], completed: Callable[[], None]) -> None:
    """Replace each new task by the result of `made`, and call `completed` whenever the app must be complete.

    Replaces `finalize`, `_task_from_fun` and `register_task` of one `Celery`; read in Celery 5.5.0 and 5.7.0.

    Every task of an app is made by one of the latter two, most of them while the app is finalized. The signal for the
    end of that, `on_after_finalize`, only logs the errors of a receiver, but wrong options of a task must be refused.
    So ours checks all tasks after `finalize`, and each task that is made later. If a later Celery makes tasks in
    another way, these are not durable whatever their options, and their options are not checked.
    """

    def finalize(before: Callable[..., None], auto: bool = False) -> None:
        try:
            before(auto=auto)
            completed()
        except SettingsError:
            app.__dict__.pop("tasks", None)  # present if some code has read the tasks while the app was finalized
            raise

    def make_and_tell(before: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return made(before(*args, **options))

    wrap(app, "finalize", finalize)
    wrap(app, "_task_from_fun", make_and_tell)
    wrap(app, "register_task", make_and_tell)


def send_by(app: Celery, send: Callable[..., Any]) -> None:
    """Send tasks by ``send(app, Celery's own, name, ...)``; reads no configuration.

    Replaces `Celery.send_task` of one app; read in Celery 5.5.0 and 5.7.0.

    `delay`, `apply_async`, canvas, retries and beat end in this method. It asks the result backend before it sends, and
    takes a producer from the app's pool for each message; the message itself is kept further down (`DurableAMQP`).
    Ours checks the call of a durable task, asks the backend afterwards, and gives it a producer that is taken when it
    is used: the sixth of its arguments after the name. If a later Celery calls tasks in another way, durable ones are
    still kept; but their options are not checked, and a call waits for an unreachable backend.
    """
    wrap(app, "send_task", partial(send, app))


def send_messages_by(app: Celery, amqp: type[DurableAMQP]) -> None:
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
    """Celery's AMQP, with a sender that gives messages of durable tasks to a special producer.

    Replaces `AMQP._create_task_sender` and `AMQP.as_task_v2` of one app; read in Celery 5.5.0 and 5.7.0.

    The class itself is an official extension point (`app.amqp_cls`), but its private method is not. It returns the
    function ``send_task_message(producer, name, message, queue=..., **options)``, in which all ways to call a task end,
    after the receivers of `before_task_publish`. Ours gives that function a producer which keeps the message of a
    durable task instead of sending it. `as_task_v2` makes the message of a call and its event; ours redacts the event.
    If a later Celery sends by another function, messages of durable tasks are sent without being kept.
    """

    producer_of_durable: Callable[..., Any]
    """Makes that producer from Celery's producer, the app, the task's name and its queue."""

    def as_task_v2(self, task_id: Any, name: str, *args: Any, **options: Any) -> Any:
        """Make a message; the event of a durable task's call shows its arguments redacted."""
        made = super().as_task_v2(task_id, name, *args, **options)
        if made.sent_event and is_durable(self.app, name):  # a job's event says nothing of its arguments
            hide = self.app.sidejob.settings.redacted
            made.sent_event.update({key: hide(made.sent_event[key]) for key in ("args", "kwargs")})
        return made

    def _create_task_sender(self) -> Any:
        send = super()._create_task_sender()
        app = self.app

        def send_task_message(producer: Any, name: str, message: Any, **options: Any) -> Any:
            if not is_durable(app, name):
                return send(producer, name, message, **options)
            own = self.producer_of_durable(producer, app, name, options.get("queue"))
            return send(own, name, message, **options)

        return send_task_message


def lend_transactions(calling: Callable[..., AbstractContextManager[None]]) -> None:
    """Make all chords call their tasks within ``calling(transaction=...)``. A second call has no effect.

    Chords of an app without SideJob are as they were.

    Replaces `_chord.apply_async`, of all chords of this process; read in Celery 5.5.0 and 5.7.0.

    Celery copies the options of such a call for the chord's body, and a transaction cannot be copied. Ours takes the
    transaction out of the options, and sent tasks find it in `hooks/tasks/present.py`. A group with a
    follow-up is called by this method too. If a later Celery calls chords in another way, a chord with a transaction
    fails with TypeError before anything is sent.
    """
    before = _chord.apply_async
    if hasattr(before, "_keeps_transaction"):
        return

    @wraps(before)
    def apply(self: Any, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        if options.get("transaction") is None or getattr(self.app, "sidejob", None) is None:
            return before(self, args, kwargs, *more, **options)
        with calling(transaction=options.pop("transaction")):
            return before(self, args, kwargs, *more, **options)

    apply._keeps_transaction = True  # type: ignore[attr-defined]
    _chord.apply_async = apply
