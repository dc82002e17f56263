"""Celery's remote control, with revocations that are kept in the store before the workers are told.

`app.control.revoke`, `result.revoke()`, groups, `celery control revoke` and monitors all end in `broadcast`. What
workers remember of a revocation is gone when they restart; what the store keeps is not.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from celery import Celery
from celery.app.control import Control
from kombu import Producer
from kombu.utils.functional import maybe_list
from kombu.utils.imports import symbol_by_name

from ..model.errors import StoreUnavailableError
from ..operations import revocation
from . import configuration, rabbitmq

logger = logging.getLogger("celery_sidejob")

KEPT = frozenset({"revoke", "terminate"})
"""The commands that revoke by task id."""

ATTEMPT_S = 3.0
TOLD_FOR_S = 1.0
"""How long what the workers are told is of use, as Celery says it."""


def install(app: Celery) -> None:
    """Have revocations kept, whoever asks for them; reads no configuration."""
    found = app.__dict__.get("control")
    if found is not None:  # it was used before
        found.__class__ = _keeping(type(found))
    elif not (isinstance(app.control_cls, partial) and app.control_cls.func is make):
        app.control_cls = partial(make, app.control_cls)  # a spawned process is sent it: a new class could not be


def make(base: Any, **options: Any) -> Any:
    """Make the app's control: of its own class, which keeps revocations beside."""
    return _keeping(symbol_by_name(base))(**options)


class KeepingControl(Control):
    """Celery's control; a revocation of durable tasks outlives the workers that were told of it."""

    def broadcast(
        self, command: str, arguments: Any = None, destination: Any = None, *args: Any, **options: Any
    ) -> Any:
        """Broadcast a command; a revocation for all workers is kept first.

        Raises StoreUnavailableError where it could not be kept, after the workers were told.
        """
        trouble = None
        if command in KEPT and not destination and not options.get("pattern"):
            given = {**(arguments if isinstance(arguments, Mapping) else {}), **options}
            trouble = self._keep(str(one) for one in maybe_list(given.get("task_id")) or ())
        answer = super().broadcast(command, arguments, destination, *args, **options)
        if trouble is not None:
            raise trouble
        return answer

    def tell_of_revocation(self, task_ids: Iterable[str]) -> None:
        """Tell the workers of a revocation that is kept already; raises what kept it from that, within seconds.

        Celery's own broadcast tries again without end where a broker is silent, and whoever waits has nothing from it.
        """
        arguments = {"task_id": list(task_ids), "terminate": False, "signal": "SIGTERM"}
        family = configuration.broker_family(self.app)
        *others, last = self.app.connection_for_write().alt or [None]
        for node in others:
            try:
                return self._tell_once("revoke", arguments, family, node)
            except Exception as error:  # whatever a transport raises
                logger.warning("One of the brokers could not be told: %s: %s", type(error).__name__, error)
        self._tell_once("revoke", arguments, family, last)

    def _tell_once(self, command: str, arguments: Mapping[str, Any], family: str, node: str | None) -> None:
        """Broadcast in one attempt, on a connection of its own on which nothing waits for longer than `ATTEMPT_S`."""
        options = dict(self.app.conf.broker_transport_options)
        if family == "redis":
            options.update(socket_timeout=ATTEMPT_S, socket_connect_timeout=ATTEMPT_S, retry_on_timeout=False)
        with self.app.connection_for_write(node, transport_options=options, connect_timeout=ATTEMPT_S) as connection:
            transport = connection.transport
            established = transport.establish_connection()
            try:
                if family == "amqp":
                    rabbitmq.bound(established, ATTEMPT_S)
                channel = transport.create_channel(established)
                once = _Once(channel, auto_declare=False)
                self.mailbox(connection)._publish(
                    command, arguments, channel=channel, producer=once, timeout=TOLD_FOR_S
                )
            finally:
                transport.close_connection(established)

    def _keep(self, task_ids: Iterable[str]) -> StoreUnavailableError | None:
        """Keep a revocation, and return why that could not be done, if the caller is to know."""
        sidejob, ids = self.app.sidejob, list(task_ids)
        if not ids or sidejob.settings.database_url is None:
            return None
        found = revocation.revoke_in_all(sidejob.runtime, ids)
        if found.unfit is not None:
            logger.warning(NOT_KEPT_THERE.format(error=found.unfit))
        if found.unavailable is not None:
            refusal = StoreUnavailableError(NOT_KEPT.format(error=found.unavailable))
            if sidejob.settings.on_store_down != "publish":
                return refusal
            logger.warning("%s", refusal)
        return None


class _Once(Producer):
    """Publishes in one attempt, whatever the mailbox asks for."""

    def publish(self, *args: Any, retry: bool = False, **options: Any) -> Any:
        return super().publish(*args, retry=False, **options)


NOT_KEPT = (
    "The revocation was not kept, because the store is away; the workers that run now were told. What they do not "
    "receive before they restart runs: revoke it again when the store is back. ({error})"
)
NOT_KEPT_THERE = "The revocation is known to the workers that run now alone: {error}"


def _keeping(base: type[Control]) -> type[Control]:
    if issubclass(base, KeepingControl):
        return base
    return KeepingControl if base is Control else type(base.__name__, (KeepingControl, base), {})
