"""`heartbeat()`: renewing the lease of whatever runs here, from anywhere in a body's calls."""

from __future__ import annotations

from ..model.errors import LeaseLostError
from ..open_unit import active


def heartbeat(strict: bool = False) -> bool:
    """Renew the lease of the run in progress here, and tell whether it is still the job's current one.

    Outside of runs nothing happens and the answer is True. With `strict` a lost lease raises LeaseLostError.
    """
    unit = active()
    if unit is None or unit.job is None:
        return True
    try:
        unit.job.heartbeat()
    except LeaseLostError:
        if strict:
            raise
        return False
    return True
