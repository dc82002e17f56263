"""Turns a store's URL into libpq's parameters."""

from __future__ import annotations

import re
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from ...model.errors import SettingsError
from ..errors import first_line

_SCHEME = re.compile(r"^postgres(ql)?(\+\w+)?://")


def connection_parameters(url: str, *, setting: str = "sidejob_database_url") -> dict[str, Any]:
    """Return libpq's parameters for a `postgresql://` URL, also for one in SQLAlchemy's spelling.

    Half-open connections are noticed within about ten seconds (keep-alives and `tcp_user_timeout`), not hours.
    """
    plain = _SCHEME.sub("postgresql://", url)
    try:
        given = conninfo_to_dict(plain)
    except psycopg.ProgrammingError as error:
        reason = first_line(error).replace(plain, "…")
        raise SettingsError(f"{setting} cannot be read: {reason}") from None
    return {
        "application_name": "celery_sidejob",
        "connect_timeout": "5",
        "keepalives_idle": "5",
        "keepalives_interval": "2",
        "keepalives_count": "3",
        "tcp_user_timeout": "10000",
        **given,
    }
