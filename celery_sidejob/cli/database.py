"""`db`: the schema in the store, its owner, and its users."""

from __future__ import annotations

import sys
from typing import Any

import click
from rich.text import Text

from ..model.errors import SideJobError, StoreUnavailableError
from ..store import meta
from ..store.schema import schema_check
from ..store.schema.tables import write_grants
from .command import Failed, answering, with_sidejob
from .output import Output, printable


@click.group()
def db() -> None:
    """Create, migrate and check the schema in the store."""


@db.command()
@click.option("--sql", is_flag=True, help="Print the SQL instead, for psql; opens no connection.")
@click.option(
    "--from", "since", metavar="REVISION", help="With --sql: upgrade from this revision, not from an empty schema."
)
@with_sidejob
def upgrade(sidejob: Any, output: Output, sql: bool, since: str | None) -> None:
    """Create the schema or upgrade it, and record its app and broker."""
    # Imported here because it needs Alembic and SQLAlchemy, and every `celery` command imports this file.
    from ..store.schema import migrate

    schema = sidejob.settings.schema
    if sql:
        migrate.upgrade_sql(schema, sys.stdout, owner=sidejob.owner, since=since)
        return
    if since is not None:
        raise click.UsageError("--from needs --sql: an upgrade finds its first revision by itself.")
    for store in _stores(sidejob):
        _check_urls(store, output)
        url, setting = store.direct_url()
        before = schema_check.current(url, schema, setting=setting)
        after = migrate.upgrade(url, schema, owner=sidejob.owner, setting=setting)
        if before == after:
            output.show(f"{_schema(store)} is up to date: revision {after}.")
        else:
            was = f"it was at {before}" if before else "it is new"
            output.show(f"{_schema(store)} is now at revision {after}; {was}.")


@db.command()
@answering
def current(sidejob: Any, output: Output) -> None:
    """Show the schema's revision, and the revision that this version needs; also for failover stores."""
    stores = _stores(sidejob)
    ways = [store.direct_url() for store in stores]
    found_at = [schema_check.current(url, sidejob.settings.schema, setting=setting) for url, setting in ways]
    found = {"schema": sidejob.settings.schema, "revision": found_at[0], "head": meta.REVISION}
    lines = [
        f"{_schema(store)} {'does not exist' if revision is None else f'is at revision {revision}'}; "
        f"this version works on revision {meta.REVISION}."
        for store, revision in zip(stores, found_at, strict=True)
    ]
    output.answer({**found, "failover": found_at[1:]} if found_at[1:] else found, Text("\n".join(lines)))


AWAY, BEHIND = 3, 4


@db.command()
@answering
def check(sidejob: Any, output: Output) -> None:
    """Check in each store that the schema exists, fits this version, and belongs to this app and broker.

    It also checks that the user has all rights that workers need. Ends with 0 if workers can start; 3 if the store
    cannot be reached, so that it is worth trying again; 4 if `db upgrade` is needed; 1 if a person must look.
    """
    schema = sidejob.settings.schema
    document = {"schema": schema, "ok": True, "error": None}
    fits: list[str] = []
    for store in _stores(sidejob):
        try:
            sidejob.check_store(store)
        except SideJobError as error:
            output.answer({**document, "ok": False, "error": str(error)}, Text("\n".join(fits)) if fits else None)
            raise Failed(f"{store.where}: {error}" if store.place else error, code=_code(error)) from error
        fits.append(f"{_schema(store)} fits.")
    output.answer(document, Text("\n".join(fits)))


@db.command()
@click.argument("role")
@with_sidejob
def grants(sidejob: Any, output: Output, role: str) -> None:
    """Print the GRANTs that ROLE needs for workers and clients; run them as the schema's owner. Opens no connection."""
    if printable(role) != role:
        raise Failed(f"{role!a} has characters that a terminal does not show; give the role a name without them.")
    write_grants(sidejob.settings.schema, role, sys.stdout)


@db.command()
@click.option("--beside", is_flag=True, help="Let workers of this broker run beside those of the recorded one.")
@with_sidejob
def reassign(sidejob: Any, output: Output, beside: bool) -> None:
    """Record this app and this broker as the schema's owner, after the app or the broker has moved.

    Stop the workers first. Messages that wait are published again.

    With --beside the recorded broker stays, its workers may run, and workers of this broker may run beside them. When
    you have stopped the workers of one broker, run the command without --beside, with the broker that stays.
    """
    from ..store.schema import migrate

    owner = sidejob.owner
    ours = f"the app {owner['app']!r} and the broker {owner['broker']!r}"
    for store in _stores(sidejob):
        _check_urls(store, output)
        url, setting = store.direct_url()
        if beside:
            recorded = migrate.admit(url, store.settings.schema, owner=owner, setting=setting)
            more = f", and workers of {owner['broker']!r} may run beside its own" if recorded != owner["broker"] else ""
            output.show(f"{_schema(store)} belongs to the broker {recorded!r}{more}.")
            continue
        before = migrate.reassign(url, store.settings.schema, owner=owner, setting=setting)
        theirs = f"; before: the app {before.get('app')!r} and the broker {before.get('broker')!r}"
        output.show(f"{_schema(store)} belongs to {ours}{theirs if before != owner else ''}.")


def _code(error: SideJobError) -> int:
    if isinstance(error, StoreUnavailableError):
        return AWAY
    return BEHIND if isinstance(error, schema_check.NotUpgraded) else 1


def _stores(sidejob: Any) -> list[Any]:
    """Return all stores, the primary first."""
    sidejob.settings.require_database_url()
    return list(sidejob.runtime.stores)


def _schema(store: Any) -> str:
    """Return the name of a store's schema, for messages."""
    named = f"Schema {store.settings.schema!r}"
    return f"{named} of store {store.place} of sidejob_failover_urls" if store.place else named


def _check_urls(store: Any, output: Output) -> None:
    """Refuse to change a schema through a URL of another database than that of workers and clients."""
    settings = store.settings
    if settings.direct_url is not None:
        unknown = schema_check.check_urls(settings.require_database_url(), settings.direct_url)
        if unknown is not None:
            output.note(f"Could not check whether sidejob_database_url leads to the same database: {unknown}")
