"""The settings that our statements need in a session, whatever defaults its server, its database or its role has.

Without a proxy in between, our session is set up once. Behind a proxy that pools transactions nothing may be set for a
session, because other clients get it next. There each transaction has its own settings, and a single statement becomes
a transaction, but only if the defaults would change the meaning of a statement.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..statement import Reader, Statement

MEANING = {
    "default_transaction_isolation": "read committed",
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "bytea_output": "hex",
    "extra_float_digits": "1",
    "standard_conforming_strings": "on",
    "array_nulls": "on",
    "transform_null_equals": "off",
    "quote_all_identifiers": "off",
    "row_security": "on",
    "session_replication_role": "origin",
    "exit_on_error": "off",
}
"""The settings that change the result of a statement. A value fits if it begins with the value here."""

COMFORT = {
    "timezone": "UTC",
    "search_path": "pg_catalog, pg_temp",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "transaction_timeout": "0",
}
"""The settings that change no result, because statements name every schema and times have their offset."""

NEEDED = MEANING | COMFORT

_LOOK = Statement("""
SELECT pg_backend_pid() AS pid, ARRAY(
  SELECT n.name FROM unnest(%(names)s::text[], %(values)s::text[]) AS n(name, value)
  WHERE NOT starts_with(current_setting(n.name, true), n.value)) AS others""")


def look(executor: Reader) -> tuple[int, Sequence[str]]:
    """Return the process that serves this session, and the names of the settings with another value."""
    (found,) = executor.run(_LOOK, names=list(NEEDED), values=list(NEEDED.values()))
    return found.pid, found.others


def setting(names: Sequence[str], *, local: bool) -> list[str]:
    """Return the commands that change these settings: for the session, or with `local` for the transaction."""
    return [f"SET {'LOCAL ' if local else ''}{name} = {_quoted(NEEDED[name])}" for name in names]


def _quoted(value: str) -> str:
    return ", ".join(f"'{part}'" for part in value.split(", "))
