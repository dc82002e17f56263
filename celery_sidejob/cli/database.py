"""`db upgrade`, `db current`, `db check`: the schema in the store."""

from __future__ import annotations

import sys
from typing import Any

import click
from rich.text import Text

from ..model.errors import SchemaError
from ..store import migrate
from .command import as_json, with_sidejob
from .output import Output


@click.group()
def db() -> None:
    """Create, migrate and check the schema in the store."""


@db.command()
@click.option("--sql", is_flag=True, help="Print the SQL for an empty database instead; connects to nothing.")
@with_sidejob
def upgrade(sidejob: Any, output: Output, sql: bool) -> None:
    """Create the schema or bring it up to date, and record whose it is."""
    schema = sidejob.settings.schema
    if sql:
        migrate.upgrade_sql(schema, sys.stdout, owner=sidejob.owner)
        return
    url = _url(sidejob)
    before = migrate.current(url, schema)
    after = migrate.upgrade(url, schema, owner=sidejob.owner)
    if before == after:
        output.show(Text(f"Schema {schema!r} is up to date: revision {after}."))
    else:
        output.show(
            Text(f"Schema {schema!r} is now at revision {after}; {f'it was at {before}' if before else 'it is new'}.")
        )


@db.command()
@as_json
@with_sidejob
def current(sidejob: Any, output: Output, as_json: bool) -> None:
    """Show the revision the schema is at, and the one this version works on."""
    schema = sidejob.settings.schema
    found = {"schema": schema, "revision": migrate.current(_url(sidejob), schema), "head": migrate.head()}
    if as_json:
        output.json(found)
    elif found["revision"] is None:
        output.show(Text(f"Schema {schema!r} does not exist; this version works on revision {found['head']}."))
    else:
        output.show(Text(f"Schema {schema!r} is at revision {found['revision']}; "
                         f"this version works on {found['head']}."))  # fmt: skip


@db.command()
@as_json
@with_sidejob
def check(sidejob: Any, output: Output, as_json: bool) -> None:
    """Check that the schema is there, fits this version, and belongs to this app and broker."""
    schema = sidejob.settings.schema
    try:
        migrate.check(_url(sidejob), schema, owner=sidejob.owner)
    except SchemaError as error:
        if as_json:
            output.json({"schema": schema, "ok": False, "error": str(error)})
        raise
    if as_json:
        output.json({"schema": schema, "ok": True, "error": None})
    else:
        output.show(Text(f"Schema {schema!r} fits."))


def _url(sidejob: Any) -> str:
    """Return the store's URL, past a proxy that would not keep a session's locks."""
    settings = sidejob.settings
    url: str = settings.require_database_url()
    return settings.direct_url or url
