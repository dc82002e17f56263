"""Replaces `Settings.table` of an app's configuration; read in Celery 5.5.0 and 5.7.0.

`inspect conf`, and whatever else prints the configuration, takes ``app.conf.table(with_defaults, censored)``: Celery
masks a setting by its name, and of several URLs the first. Ours masks by the value. The configuration is another object
each time that it is loaded, and its `setattr` would make a setting, so the method goes into the instance's `__dict__`.
If a later Celery shows settings in another way, these passwords are shown again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from celery import Celery

from ..masking import masked


def install(app: Celery) -> None:
    """Have the app's configuration show no password, also when it is loaded anew; reads no configuration."""
    app.on_after_configure.connect(partial(_mask, app), weak=False, dispatch_uid="celery_sidejob.masking")
    _mask(app)


def _mask(app: Celery, **_: Any) -> None:
    conf = app._conf
    if conf is not None and "table" not in conf.__dict__:
        conf.__dict__["table"] = partial(_table, conf.table)


def _table(table: Callable[..., Mapping[str, Any]], with_defaults: bool = False, censored: bool = True) -> Any:
    shown = table(with_defaults, False)  # Celery masks broker_url by taking it apart, and shows the wrong parts
    return {key: masked(value, key) for key, value in shown.items()} if censored else shown
