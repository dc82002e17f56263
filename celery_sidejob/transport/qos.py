"""What a channel has been given and not yet dealt with; a delivery tag says by which fetch, so it is good only once."""

from __future__ import annotations

from typing import Any

from kombu.transport import redis, virtual


class QoS(redis.QoS):
    """kombu's, whose one hash for the whole broker is replaced by a record for each consumer.

    What kombu's own workers hold in that hash is looked after as before (`restore_visible`): during a migration they
    may be killed when no other of their kind is left.
    """

    def can_consume(self) -> bool:
        """Adds to kombu's: it is asked before everything else, and also while no more may be fetched."""
        self.channel.hear()
        self.channel.mind_silence()
        return not self.channel.is_alone() and bool(super().can_consume())

    def append(self, message: Any, delivery_tag: str) -> None:
        """Replaces noting a message in Redis: its fetch has done that already."""
        virtual.QoS.append(self, message, delivery_tag)

    def ack(self, delivery_tag: str) -> None:
        """Replaces removing a message whoever has it now: only with the token of the current delivery."""
        self.channel.finish(delivery_tag, "ack")
        virtual.QoS.ack(self, delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Replaces the same, and putting it back at the end that is served last: it goes to the head of its list.

        Behind those that came back before, so that several that are sent back in their order stay in it.
        """
        if requeue:
            self.channel.send_back(delivery_tag)
        else:
            self.channel.finish(delivery_tag, "reject")
        virtual.QoS.ack(self, delivery_tag)

    def restore_unacked(self, client: Any = None) -> None:
        """Replaces giving back one by one, which turns the order round: all that this channel's consumers hold."""
        self.channel.leave()
        self._delivered.clear()
        self._dirty.clear()
