"""The start and the end of a process of a worker's pool."""

from __future__ import annotations

from typing import Any

from billiard import current_process
from celery import signals

from ...store.connection.turns import share_one
from ...store.write_behind import write_all_now


def install() -> None:
    """Have processes of pools do it; twice does no harm."""
    signals.worker_process_init.connect(_share_one_connection, weak=False)
    signals.worker_process_shutdown.connect(_write_what_was_put_off, weak=False)


def _share_one_connection(**_: Any) -> None:
    """All threads of the process take turns: what follows the commit of a lent transaction is done by one of its own.

    The signal is sent in the worker's own process too, by pools that have no others.
    """
    if current_process().name != "MainProcess":
        share_one()


def _write_what_was_put_off(**_: Any) -> None:
    """It ends without what Python does at an end."""
    write_all_now()
