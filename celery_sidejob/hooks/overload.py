"""The error of a call that a full capacity pool refuses: ours and kombu's at once."""

from __future__ import annotations

from kombu.exceptions import OperationalError

from ..model import errors


class Overloaded(errors.Overloaded, OperationalError):
    """A capacity pool is full, and nothing was written: `pool`, its `limit`, what is `used`, and `retry_after` seconds.

    Code that is prepared for a broker that takes no message catches it by kombu's name.
    """
