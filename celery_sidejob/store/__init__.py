"""All the SQL. A function is one statement and one promise; it runs in the transaction of its executor."""

from __future__ import annotations

from ..model.errors import MissingLibraryError


def require_libpq() -> None:
    """Import psycopg; MissingLibraryError if it is not installed, or finds no libpq.

    libpq is no Python package, so pip does not miss it.
    """
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        raise MissingLibraryError(
            f"psycopg cannot be imported ({str(error).partition(chr(10))[0].rstrip('. ')}): it finds no libpq, the "
            'client library of Postgres. Install one with: pip install "celery-sidejob[binary]". Or install the '
            "system's own, which on Debian and Ubuntu is the package libpq5."
        ) from error


require_libpq()  # before any module here imports psycopg: psycopg's own error does not say what to do
