"""The error of throwaway servers."""

from __future__ import annotations


class ServerError(RuntimeError):
    """A throwaway server was not found, did not start, or is not running. The message contains the end of its log."""
