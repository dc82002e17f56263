"""`db upgrade`, `db current`, `db check`: the schema in the store."""

from __future__ import annotations

import sys
from typing import Any

import click
from rich.text import Text

from ..model.errors import SideJobError, StoreUnavailableError
from ..store import migrate
from ..store.grants import write_grants
from .command import Failed, as_json, with_sidejob
from .output import Output


@click.group()
def db() -> None:
    """Create, migrate and check the schema in the store."""


@db.command()
@click.option("--sql", is_flag=True, help="Print the SQL instead, for psql; connects to nothing.")
@click.option(
    "--from", "since", metavar="REVISION", help="With --sql: for a schema at this revision, not an empty one."
)
@with_sidejob
def upgrade(sidejob: Any, output: Output, sql: bool, since: str | None) -> None:
    """Create the schema or bring it up to date, and record whose it is."""
    schema = sidejob.settings.schema
    if sql:
        migrate.upgrade_sql(schema, sys.stdout, owner=sidejob.owner, since=since)
        return
    if since is not None:
        raise click.UsageError("--from is for --sql: an upgrade looks by itself where it begins.")
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


AWAY, BEHIND = 3, 4


@db.command()
@as_json
@with_sidejob
def check(sidejob: Any, output: Output, as_json: bool) -> None:
    """Check that the schema is there, fits this version, and belongs to this app and broker.

    Also that the user has all rights that workers need. Ends with 0 if workers can start; 3 if the store cannot be
    reached, so that it is worth trying again; 4 if `db upgrade` is wanted; 1 if a person must look.
    """
    schema = sidejob.settings.schema
    try:
        migrate.check(sidejob.settings.require_database_url(), schema, owner=sidejob.owner)
    except SideJobError as error:
        if as_json:
            output.json({"schema": schema, "ok": False, "error": str(error)})
        raise Failed(error, code=_code(error)) from error
    if as_json:
        output.json({"schema": schema, "ok": True, "error": None})
    else:
        output.show(Text(f"Schema {schema!r} fits."))


@db.command()
@click.argument("role")
@with_sidejob
def grants(sidejob: Any, output: Output, role: str) -> None:
    """Print the GRANTs by which ROLE may run workers and clients; the schema's owner runs them. Connects to nothing."""
    write_grants(sidejob.settings.schema, role, sys.stdout)


@db.command()
@with_sidejob
def reassign(sidejob: Any, output: Output) -> None:
    """Give the schema to this app and this broker, which has moved on purpose; not while its workers run.

    What waits is published again.
    """
    owner = sidejob.owner
    schema = sidejob.settings.schema
    before = migrate.reassign(_url(sidejob), schema, owner=owner)
    was = f"; before: the app {before.get('app')!r} and the broker {before.get('broker')!r}" if before != owner else ""
    output.show(Text(f"Schema {schema!r} belongs to the app {owner['app']!r} and the broker {owner['broker']!r}{was}."))


def _code(error: SideJobError) -> int:
    match error:
        case StoreUnavailableError():
            return AWAY
        case migrate.NotUpgraded():
            return BEHIND
    return 1


def _url(sidejob: Any) -> str:
    """Return the store's URL, past a proxy that would not keep a session's locks."""
    settings = sidejob.settings
    url: str = settings.require_database_url()
    return settings.direct_url or url
