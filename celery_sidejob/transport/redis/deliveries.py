"""Deliveries of one channel: each fetched text becomes kombu's message, for the consumer of its queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from kombu.log import get_logger
from kombu.utils.json import loads

from ..decoding import NotAMessageError, made
from ..quarantine import SUSPECT, Quarantine, is_for_later, returns
from .fetching import Taken
from .records import parted

logger = get_logger(__name__)


class Deliveries:
    """Delivers for one channel."""

    def __init__(self, channel: Any, quarantine: Quarantine) -> None:
        self._channel = channel
        self._quarantine = quarantine

    def deliver(self, taken: Sequence[Taken]) -> bool:
        """Deliver messages in their order; undeliverable messages return to their places in the lists."""
        channel = self._channel
        delivered = False
        left: list[str] = []
        with channel.renewing_if_struck():
            rest = deque(self._decoded(taken))
        try:
            while rest:
                payload, one = rest[0]
                if one.tag is not None and one.queue not in channel.connection._callbacks:  # cancelled meanwhile
                    left.append(one.tag)
                else:
                    delivered |= self._hand_over(payload, one)
                rest.popleft()
        finally:
            left += [one.tag for _, one in rest if one.tag is not None and one.tag not in channel.qos._delivered]
            if left:
                consumer, _ = parted(left[0])
                with channel.renewing_if_struck():
                    channel.records.give_back(consumer, [parted(tag)[1] for tag in left])
        return delivered

    def message_of(self, taken: Iterable[Taken]) -> Any:
        """Return the first valid message of these, for `basic_get`; None if there is none."""
        for payload, one in self._decoded(taken):
            try:
                return self._channel.Message(payload, channel=self._channel)
            except NotAMessageError as error:
                self._bury(one, error)
        return None

    def _hand_over(self, payload: Any, one: Taken) -> bool:
        properties = payload["properties"]
        is_suspect = SUSPECT in properties and not is_for_later(payload.get("headers") or {})
        if is_suspect and one.tag is not None:  # its worker died with it, or left
            self._quarantine.begin(one.tag, returns(properties))
        try:
            self._channel.connection._deliver(payload, one.queue)
        except NotAMessageError as error:
            self._bury(one, error)
            return False
        return True

    def _decoded(self, taken: Iterable[Taken]) -> Iterator[tuple[Any, Taken]]:
        """Decode messages; bury those that are invalid."""
        for one in taken:
            try:
                payload = made(partial(_payload_of, one))
            except NotAMessageError as error:
                self._bury(one, error)
            else:
                yield payload, one

    def _bury(self, one: Taken, error: NotAMessageError) -> None:
        logger.error("Queue %r had %.200r: %s", one.queue, one.text, error.reason)
        if one.tag is not None:
            self._channel.records.bury(*parted(one.tag), error.reason)


def _payload_of(one: Taken) -> Any:
    """Return a message's text with this delivery's tag instead of its permanent tag."""
    payload = loads(one.text.decode())
    own_tag = payload["properties"]["delivery_tag"]
    payload["properties"]["delivery_tag"] = one.tag or own_tag
    return payload
