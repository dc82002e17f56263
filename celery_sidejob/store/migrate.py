"""The schema's migrations: bringing it up to date, and telling whether it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

import psycopg
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, text
from sqlalchemy.engine import URL, Connection, make_url
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

from ..model.errors import SchemaError, StoreUnavailableError

UPGRADE_LOCK = 0x53_4A_55_50
LOCK_TIMEOUT_S = 5


def upgrade(url: str, schema: str = "sidejob", *, owner: Mapping[str, str] | None = None) -> str:
    """Create the schema if it is missing, migrate it to this version, record whose it is, and return its revision."""
    with _connect(url) as connection, connection.begin():
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": UPGRADE_LOCK})
        if _current(connection, schema) is not None:
            _check_owner(connection, schema, owner)
        connection.execute(text(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s'"))
        connection.execute(text(f'CREATE SCHEMA IF NOT EXISTS "{schema}"'))
        config = _config(schema)
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        for key, value in (owner or {}).items():
            connection.execute(
                text(f'INSERT INTO "{schema}".meta (key, value) VALUES (:key, :value) ON CONFLICT DO NOTHING'),
                {"key": key, "value": value},
            )
    return head()


def upgrade_sql(schema: str, out: TextIO) -> None:
    """Write the SQL that `upgrade` would run on an empty database."""
    out.write(f'CREATE SCHEMA IF NOT EXISTS "{schema}";\n\n')
    config = _config(schema)
    config.output_buffer = out
    command.upgrade(config, "head", sql=True)


def head() -> str:
    """Return the revision this version works on."""
    revision = ScriptDirectory.from_config(_config("sidejob")).get_current_head()
    assert revision is not None
    return revision


def current(url: str, schema: str = "sidejob") -> str | None:
    """Return the schema's revision, None if it was never migrated."""
    with _connect(url) as connection:
        return _current(connection, schema)


def check(url: str, schema: str = "sidejob", *, owner: Mapping[str, str] | None = None) -> None:
    """Raise SchemaError if the schema is missing, too old, too new, or another app's or broker's."""
    with _connect(url) as connection:
        revision = _current(connection, schema)
        if revision is None:
            raise SchemaError(f"Schema {schema!r} does not exist: run `celery -A <app> sidejob db upgrade`.")
        known = {script.revision for script in ScriptDirectory.from_config(_config(schema)).walk_revisions()}
        if revision not in known:
            raise SchemaError(
                f"Schema {schema!r} is at revision {revision}, which this version of celery_sidejob does not know: "
                "upgrade the package."
            )
        if revision != head():
            raise SchemaError(
                f"Schema {schema!r} is at revision {revision}, this version needs {head()}: run "
                "`celery -A <app> sidejob db upgrade`."
            )
        _check_owner(connection, schema, owner)


def _check_owner(connection: Connection, schema: str, owner: Mapping[str, str] | None) -> None:
    recorded: dict[str, str] = dict(connection.execute(text(f'SELECT key, value FROM "{schema}".meta')).tuples().all())
    for key, value in (owner or {}).items():
        if recorded.get(key, value) != value:
            raise SchemaError(
                f"Schema {schema!r} belongs to the {key} {recorded[key]!r}, not to {value!r}. One schema serves one "
                f"app and one broker: set sidejob_schema to another name, or correct the {key}."
            )


def _current(connection: Connection, schema: str) -> str | None:
    context = MigrationContext.configure(connection, opts={"version_table_schema": schema})
    revision: str | None = context.get_current_revision()
    return revision


def _connect(url: str) -> Connection:
    parsed = make_url(url)
    target = URL.create("postgresql+psycopg", parsed.username, parsed.password, parsed.host, parsed.port,
                        parsed.database, parsed.query)  # fmt: skip
    try:
        return create_engine(target, poolclass=NullPool).connect()
    except (OperationalError, psycopg.OperationalError) as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise StoreUnavailableError(f"Cannot connect to the store: {reason}.") from error


def _config(schema: str) -> Config:
    package = Path(__file__).parent.parent
    scripts = package / "alembic"  # in a wheel; an editable install has them beside the package
    config = Config()
    config.set_main_option("script_location", str(scripts if scripts.is_dir() else package.parent / "alembic"))
    config.attributes["schema"] = schema
    return config
