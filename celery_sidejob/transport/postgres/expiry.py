"""Removal of what nobody uses any more: queues that have expired, and broadcasts that everybody has read."""

from __future__ import annotations

from functools import partial

from ...store.broker import messages, queues
from .link import Run


def remove_expired(run: Run) -> None:
    """Delete queues that nobody has used for so long, with what waits in them, and old broadcasts.

    Any number of processes may do so at once. If we die in between, a queue that has expired is emptied by the next.
    """
    for name in run("read", queues.expired):
        run("purge", partial(messages.purge_later, queue=name))
        while run("purge", partial(messages.purge_page, queue=name)):
            pass
        run("expire", partial(queues.expire, name=name))
    run("forget", queues.forget_broadcasts)
