"""Whether psycopg can be imported. It needs libpq, which is no Python package, so pip does not miss it."""

from __future__ import annotations

from .errors import MissingLibraryError


def require() -> None:
    """Import psycopg; MissingLibraryError if it is not installed, or finds no libpq."""
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        raise MissingLibraryError(
            f"psycopg cannot be imported ({str(error).partition(chr(10))[0].rstrip('. ')}): it finds no libpq, the "
            'client library of Postgres. Install one with: pip install "celery-sidejob[binary]". Or install the '
            "system's own, which on Debian and Ubuntu is the package libpq5."
        ) from error
