"""The logger of the package. The error of a single row recurs at each try: it gets one traceback in the log."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("celery_sidejob")

MOST = 1000
"""How many errors this process remembers."""

_logged: set[tuple[str, object, type]] = set()


def log_row_error(row: object, text: str, *args: object) -> None:
    """Log the error of a row: the first time with its traceback, then in one line."""
    error = sys.exc_info()[1]
    known = (text, row, type(error))
    if known in _logged:
        logger.error(text, *args)
        return
    if len(_logged) >= MOST:
        _logged.clear()
    _logged.add(known)
    logger.exception(text, *args)
