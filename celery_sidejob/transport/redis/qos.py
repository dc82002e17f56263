"""The unacknowledged messages of a channel; a delivery tag names its fetch, so it is valid for one delivery."""

from __future__ import annotations

from typing import Any

from kombu.transport import redis, virtual

from .connections import unless_full


class QoS(redis.QoS):
    """kombu's QoS, with a record for each consumer instead of one hash for the whole broker.

    Messages of kombu's own workers in that hash are restored as before (`restore_visible`): during a migration the last
    of these workers may be killed.
    """

    def can_consume(self) -> bool:
        """Adds to kombu's: kombu calls it first, even while no more messages may be fetched."""
        self.channel.hear()
        self.channel.consumer.check_silence()
        return not self.channel.quarantine.is_on(self) and bool(super().can_consume())

    def append(self, message: Any, delivery_tag: str) -> None:
        """Replaces recording a message in Redis: the fetch has done this."""
        virtual.QoS.append(self, message, delivery_tag)

    def ack(self, delivery_tag: str) -> None:
        """Replaces removing a message regardless of its owner: needs the token of the current delivery."""
        self.channel.finish(delivery_tag, "ack")
        virtual.QoS.ack(self, delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Replaces the same, and the requeue at the tail: the message goes to the head of its list.

        It goes behind messages that came back before, so that several keep their order.
        """
        if requeue:
            self.channel.send_back(delivery_tag)
        else:
            self.channel.finish(delivery_tag, "reject")
        virtual.QoS.ack(self, delivery_tag)

    def restore_visible(self, *args: Any, **options: Any) -> None:
        """Adds to kombu's: a full server refuses its lock, and the messages to restore wait."""
        with unless_full():
            super().restore_visible(*args, **options)

    def restore_unacked(self, client: Any = None) -> None:
        """Replaces giving back one by one, which reverses the order: gives back all of this channel's messages."""
        self.channel.leave()
        self._delivered.clear()
        self._dirty.clear()
