"""Errors of single rows, which return at each try: the log has the traceback of each once."""

from __future__ import annotations

import sys
from logging import Logger

MOST = 1000
"""How many errors this process remembers."""

_logged: set[tuple[str, object, type]] = set()


def log_row_error(logger: Logger, row: object, text: str, *args: object) -> None:
    """Log the error of a row that is being handled: first with its traceback, then in one line."""
    error = sys.exc_info()[1]
    known = (text, row, type(error))
    if known in _logged:
        logger.error(text, *args)
        return
    if len(_logged) >= MOST:
        _logged.clear()
    _logged.add(known)
    logger.exception(text, *args)
