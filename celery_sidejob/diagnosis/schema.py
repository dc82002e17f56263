"""The schema of a store, and the rights of its user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..model.errors import SideJobError, StoreUnavailableError
from ..model.finding import Finding, error, warning, well
from ..model.printable import first_of
from ..operations.runtime import Runtime
from ..store import health, meta, workers
from ..store.errors import UPGRADE, LacksRights
from ..store.schema import schema_check, tables
from ..store.statement import Transaction

GRANT = "As the schema's owner: celery -A <app> sidejob db grants <user> | psql -v ON_ERROR_STOP=1 <database>"
UNFIT: tuple[tuple[type[SideJobError], str, str], ...] = (
    (
        schema_check.NotUpgraded, "Workers refuse to start, and calls fail.", UPGRADE,
    ),
    (
        LacksRights, "Workers refuse to start, and calls that need the right fail.", GRANT,
    ),
    (
        schema_check.NotOurs,
        ("Workers refuse to start. A client is not checked: it puts jobs into a store whose workers do not know "
         "the tasks, or use another broker."),
        ("Set sidejob_schema to a name of its own and upgrade, or correct the app's name or broker_url. Only if the "
         "app or broker has moved: stop all workers, then celery -A <app> sidejob db reassign."),
    ),
    (
        schema_check.Damaged, "Workers refuse to start, and calls that need the missing parts fail.",
        ("Stop workers and clients and restore the whole schema from a backup, all of its tables from the same moment. "
         "If you need nothing in it: drop the schema, then celery -A <app> sidejob db upgrade."),
    ),
    (
        schema_check.TooNew, "Workers refuse to start. A client is not checked: its calls may fail.",
        "Upgrade the package celery-sidejob here.",
    ),
    (
        StoreUnavailableError, "The schema could not be checked.",
        "Check whether Postgres is up, and run doctor again.",
    ),
    (SideJobError, "Workers refuse to start.", "See what the message says."),
)  # fmt: skip
"""The meaning and the remedy of each schema error; the first match counts."""


def schema(runtime: Runtime, owner: Mapping[str, str], *, role: str, within_s: float | None) -> Iterator[Finding]:
    """Check whether workers would accept the schema; the remedy for a missing right names `role`."""
    name, connections = runtime.settings.schema, runtime.connections
    try:
        with health.looking(connections), connections.talking(within_s=within_s):
            schema_check.check(connections, name, owner=owner)  # as workers check it
            revision, head = schema_check.current(connections, name), meta.REVISION
    except SideJobError as failure:
        _, meaning, remedy = next(entry for entry in UNFIT if isinstance(failure, entry[0]))
        yield error("schema", str(failure), meaning=meaning, remedy=remedy.replace("<user>", role))
        return
    if revision == head:
        yield well("schema", f"{name!r} is at revision {revision}")
    else:
        yield warning(
            "schema",
            f"{name!r} is at revision {revision}, this version's own is {head}",
            meaning="It works, but newer features are missing, and the next version may refuse it.",
            remedy=f"When all workers have this version, {schema_check.REMEDY}; if the schema is the newer one, "
            "upgrade here.",
        )


def rights(executor: Transaction, runtime: Runtime) -> Iterator[Finding]:
    """Check for missing rights on tables and sequences."""
    workers.list_all(executor, runtime.settings)  # raises SchemaError if there are no tables
    missing = tables.lacking_rights(executor, runtime.settings.schema)
    if missing:
        role = health.server(executor).role
        yield error(
            "rights",
            f"{role} lacks {first_of(missing)}",
            meaning="Calls, claims or commits that need these rights fail.",
            remedy=GRANT.replace("<user>", role),
        )
    else:
        yield well("rights", "all that is needed on tables and sequences")
