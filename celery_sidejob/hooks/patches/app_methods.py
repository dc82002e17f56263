"""Replaces methods of one `Celery`: how it connects, shows its settings, and makes and calls tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from celery import Celery

from ...model.errors import SettingsError
from ..masking import masked, masked_text
from .wrapping import wrap


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
    takes a producer from the app's pool for each message; the message itself is kept further down (`task_sender.py`).
    Ours checks the call of a durable task, asks the backend afterwards, and gives it a producer that is taken when it
    is used: the sixth of its arguments after the name. If a later Celery calls tasks in another way, durable ones are
    still kept; but their options are not checked, and a call waits for an unreachable backend.
    """
    wrap(app, "send_task", partial(send, app))
