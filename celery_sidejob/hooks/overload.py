"""The error of a call that a full capacity pool refuses: ours and kombu's at once."""

from __future__ import annotations

from kombu.exceptions import OperationalError

from ..model import errors


class Overloaded(errors.Overloaded, OperationalError):
    """A capacity pool is full, and nothing was written: `pool`, its `limit`, `used` slots, and `retry_after` seconds.

    Code that expects a broker to refuse messages can catch it by kombu's name.
    """
