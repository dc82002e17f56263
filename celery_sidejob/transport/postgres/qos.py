"""The unacknowledged messages of a channel. What is acknowledged is noted here, and carried out by the next fetch."""

from __future__ import annotations

from typing import Any

from kombu.transport import virtual

from .acknowledgements import Removed


class QoS(virtual.QoS):
    """kombu's, whose ends of messages any thread may report: they are only noted."""

    def ack(self, delivery_tag: Any) -> None:
        """Adds to kombu's: the row is removed soon."""
        if _is_row(delivery_tag):
            self.channel.acknowledgements.acknowledge(delivery_tag, "ack")
        super().ack(delivery_tag)

    def reject(self, delivery_tag: Any, requeue: bool = False) -> None:
        """Replaces sending the message again: its row becomes free where it is."""
        if not _is_row(delivery_tag):
            pass
        elif requeue:
            self.channel.acknowledgements.give_back(delivery_tag, begun=True)
        else:
            self.channel.acknowledgements.acknowledge(delivery_tag, "reject")
        super().ack(delivery_tag)

    @property
    def unacknowledged_rows(self) -> list[int]:
        """The messages that are neither acknowledged nor given back, but for those that have no row of the broker."""
        return [tag for tag in self._delivered if _is_row(tag) and not isinstance(tag, Removed)]

    def restore_unacked(self) -> None:
        """Replaces giving back one by one: all rows become free in one statement."""
        self.channel.leave()
        self._delivered.clear()
        self._dirty.clear()


def _is_row(delivery_tag: Any) -> bool:
    """Tell whether a message has a row of its own: a broadcast is everybody's, and goes by itself."""
    return isinstance(delivery_tag, int)
