"""A store itself: its server, its schema, the rights of its user, and its tables. And how a check looks at a store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..model.errors import SchemaError, SideJobError, StoreUnavailableError
from ..model.finding import Finding, check, error, graded, warning, well
from ..model.printable import counted, first_of
from ..operations.runtime import Runtime
from ..store import health, meta, workers
from ..store.broker.messages import COUNTED
from ..store.errors import UPGRADE, LacksRights
from ..store.outbox.references import count
from ..store.schema import schema_check, tables
from ..store.statement import Transaction

OLDEST_SERVER = 130000
NOTHING_RUNS = "Nothing can be asked, and no run begins."
PINNED_S = (300.0, 3600.0)
"""Seconds for which a transaction may hold back vacuum: longer is a warning, then an error."""
SKEW_S = 2.0
"""How far clocks may differ: `expires` of tasks depends on them, and so do the times in logs."""
HELD_S = (60.0, 600.0)
"""Seconds for which a transaction may have locked our rows: longer is a warning, then an error."""
DEAD_ROWS = 20_000
"""Autovacuum usually keeps dead rows below this number, or below the number of live rows."""
FINISHED = 100_000
"""The number of finished jobs, which nothing will remove, from which on there is a warning."""
IN_POSTGRES = "postgres "
"""The beginning of a broker's name if it is `sidejobpg://`."""
CHILDREN = 10_000
"""The number of children of one job from which on there is a warning: they stay as long as the job."""
GRANT = "As the schema's owner: celery -A <app> sidejob db grants <user> | psql -v ON_ERROR_STOP=1 <database>"
UNFIT: tuple[tuple[type[SideJobError], str, str], ...] = (
    (schema_check.NotUpgraded, "Workers refuse to start, and calls fail.", UPGRADE),
    (LacksRights, "Workers refuse to start, and calls that need the right fail.", GRANT),
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
    (StoreUnavailableError, "The schema could not be checked.", "Check whether Postgres is up, and run doctor again."),
    (SideJobError, "Workers refuse to start.", "See what the message says."),
)  # fmt: skip
"""The meaning and the remedy of each schema error; the first match counts."""

Check = Callable[[Transaction, Runtime], Iterable[Finding]]


def look(runtime: Runtime, *checks: Check, within_s: float | None) -> Iterator[Finding]:
    """Yield the findings of each check, or the finding that it failed; raises SchemaError if tables are missing."""
    for each in checks:
        try:
            yield from findings_of(each, runtime, within_s=within_s)
        except SchemaError:
            raise
        except SideJobError as failure:
            yield error(str(failure), meaning="This check failed.", remedy="See what the message says.", check="store")


def findings_of(of: Check, runtime: Runtime, *, within_s: float | None) -> list[Finding]:
    """Return the findings of one check; raises one of our errors if it failed."""
    connections = runtime.connections
    with health.looking(connections), connections.talking(within_s=within_s):
        return connections.transact("doctor", lambda executor: list(of(executor, runtime)))


# -- the server: its version, its durability, its clock, and the transactions that block its vacuum --------------------


@check("store")
def server(executor: Transaction, runtime: Runtime) -> Iterator[Finding]:
    """Check the version and the durability of the server, and the clock of this machine."""
    before = time.time()
    row = health.server(executor)
    here = (before + time.time()) / 2
    if row.number < OLDEST_SERVER:
        yield error(
            f"Postgres {row.version}",
            meaning="This package needs Postgres 13 or newer.",
            remedy="Upgrade the server.",
        )
    elif row.standby:
        yield error(
            f"Postgres {row.version} is a standby: it cannot be written to.",
            meaning=NOTHING_RUNS,
            remedy="Point sidejob_database_url at the primary.",
        )
    else:
        yield well(f"Postgres {row.version}, as {row.role}")
    yield from _durability(row)
    yield from difference("this machine", row.clock - here)


@check("durability")
def _durability(row: Any) -> Iterator[Finding]:
    if row.fsync == "off" or row.synchronous_commit == "off":
        setting = "fsync" if row.fsync == "off" else "synchronous_commit"
        yield warning(
            f"{setting} is off",
            remedy=f"Set {setting} to on.",
            meaning="A crash of the database server loses confirmed commits: jobs, packets and wakes.",
        )
    else:
        yield well(f"fsync is on, synchronous_commit is {row.synchronous_commit}")


@check("horizon")
def horizon(executor: Transaction, runtime: Runtime) -> Iterator[Finding]:
    """Check for transactions and slots that keep vacuum from removing dead rows."""
    held = [row for row in health.horizon(executor) if row.since_s is None or row.since_s > PINNED_S[0]]
    if not held:
        yield well(
            "no old transaction blocks vacuum"
            if health.server(executor).sees_all
            else "no old transaction of this user's; others cannot be seen without the role pg_read_all_stats",
        )
        return
    shown = first_of(
        (
            f"{row.kind} {row.who}, {counted(row.xids, 'transaction', 'transactions')} old"
            + (f", for {row.since_s:.0f} s" if row.since_s else "")
            for row in held
        ),
        separator="; ",
    )
    yield graded(max(row.since_s or 0.0 for row in held), PINNED_S)(
        shown,
        meaning="Vacuum cannot remove any row that died since then. The tables of jobs and "
        "messages grow, and everything becomes slower.",
        remedy="End the transaction (pg_terminate_backend), commit or roll back the prepared one, or drop the "
        "unused slot; set idle_in_transaction_session_timeout.",
    )


@check("locks", "no open transaction has locked rows for long")
def locks(executor: Transaction, runtime: Runtime) -> Iterator[Finding]:
    """Check for open transactions with locked rows for which calls and runs may wait."""
    held = [row for row in health.lockers(executor, runtime.settings.schema) if row.since_s > HELD_S[0]]
    if not held:
        return
    yield graded(max(row.since_s for row in held), HELD_S)(
        first_of((f"{row.who} has locked rows of {row.what} for {row.since_s:.0f} s" for row in held), separator="; "),
        meaning="Calls that need these rows fail after some seconds. Runs that need them cannot end, and begin again.",
        remedy="Let its program commit or roll back. If that program is frozen or gone, end the session with "
        "pg_terminate_backend(pid).",
    )


@check("clock")
def difference(whose: str, skew_s: float) -> Iterator[Finding]:
    """Grade the difference between the clock of a machine or a worker and the database's."""
    if abs(skew_s) > SKEW_S:
        side = "behind" if skew_s > 0 else "ahead of"
        yield warning(
            f"the clock of {whose} is {abs(skew_s):.1f} s {side} the database's",
            meaning="Each eta= or expires= that is computed there is off by that much, and so are the times in its "
            "logs. Leases and timers are not: they use only the database's clock.",
            remedy="Let NTP or chrony set both clocks.",
        )
    else:
        yield well(f"the clock of {whose} differs from the database's by {abs(skew_s):.2f} s")


# -- the schema, and the rights of its user ----------------------------------------------------------------------------


@check("schema")
def schema(runtime: Runtime, owner: Mapping[str, str], *, role: str, within_s: float | None) -> Iterator[Finding]:
    """Check whether workers would accept the schema; the remedy for a missing right names `role`."""
    name, connections = runtime.settings.schema, runtime.connections
    try:
        with health.looking(connections), connections.talking(within_s=within_s):
            schema_check.check(connections, name, owner=owner)  # as workers check it
            revision, head = schema_check.current(connections, name), meta.REVISION
    except SideJobError as failure:
        _, meaning, remedy = next(entry for entry in UNFIT if isinstance(failure, entry[0]))
        yield error(str(failure), meaning=meaning, remedy=remedy.replace("<user>", role))
        return
    if revision == head:
        yield well(f"{name!r} is at revision {revision}")
    else:
        yield warning(
            f"{name!r} is at revision {revision}, this version's own is {head}",
            meaning="It works, but newer features are missing, and the next version may refuse it.",
            remedy=f"When all workers have this version, {schema_check.REMEDY}; if the schema is the newer one, "
            "upgrade here.",
        )


@check("rights", "all that is needed on tables and sequences")
def rights(executor: Transaction, runtime: Runtime) -> Iterator[Finding]:
    """Check for missing rights on tables and sequences."""
    workers.list_all(executor, runtime.settings)  # raises SchemaError if there are no tables
    missing = tables.lacking_rights(executor, runtime.settings.schema)
    if missing:
        role = health.server(executor).role
        yield error(
            f"{role} lacks {first_of(missing)}",
            meaning="Calls, claims or commits that need these rights fail.",
            remedy=GRANT.replace("<user>", role),
        )


# -- the tables: rows that pile up, rows that contradict each other, and rows that vacuum has not removed --------------


@check("retention", "no finished jobs pile up")
def retention(executor: Transaction, runtime: Runtime) -> Iterator[Finding]:
    """Check for finished jobs that nothing removes, and for very large families."""
    finished = health.finished(executor) if runtime.settings.retention is None else 0
    if finished >= FINISHED:
        yield warning(
            f"about {finished} finished jobs are kept for ever",
            meaning="Nothing removes them, so the tables, backups and every VACUUM grow with them.",
            remedy="Set sidejob_retention, or retention= of their tasks.",
        )
    families = health.families(executor, least=CHILDREN)
    if families:
        shown = first_of(f"job {row.parent_id} has about {row.children}" for row in families)
        yield warning(
            f"very many children: {shown}",
            meaning="Finished children are kept as long as their "
            "parent, unless their own task has a retention. A run that asks for job.children reads them all.",
            remedy="Give the children's task a retention=, or make them without a parent.",
        )


@check("references")
def references(executor: Transaction, runtime: Runtime) -> Iterator[Finding]:
    """Check for references that remain from before a change of the broker; most brokers never have any."""
    if runtime.connections.is_broker or not (left := count(executor)):
        return
    known = workers.list_all(executor, runtime.settings)
    if any((row.broker or "").startswith(IN_POSTGRES) for row in known if row.dead_at is None):
        return
    at_least = "at least " if left == COUNTED else ""
    yield warning(
        f"{at_least}{counted(left, 'reference', 'references')} of jobs and durable tasks in the "
        "queues of sidejobpg://, and no worker has that broker",
        meaning="A change of the broker has left them there, or the workers of sidejobpg:// are down. The work is "
        "in the store: db reassign has it sent to the new broker, and then these rows only take up space.",
        remedy="If the broker has changed for good: celery -A <app> sidejob db reassign, unless that was done; "
        f"then DELETE FROM {schema_check.quoted(runtime.settings.schema)}.broker_messages WHERE task_id IS NOT NULL. "
        "Otherwise start workers of sidejobpg://.",
    )


@check("vacuum", "keeps up with dead rows")
def vacuum(executor: Transaction, runtime: Runtime) -> Iterator[Finding]:
    """Check whether vacuum keeps up."""
    if health.server(executor).autovacuum == "off":
        yield error(
            "autovacuum is off",
            remedy="Set autovacuum = on.",
            meaning="Every run leaves dead rows behind, so claims and sweeps become slower and slower.",
        )
        return
    late = [row for row in health.tables(executor, runtime.settings.schema) if row.dead > max(DEAD_ROWS, row.live)]
    if not late:
        return
    shown = first_of(
        f"{row.name} has {counted(row.dead, 'dead row', 'dead rows')} for {counted(row.live, 'live one', 'live ones')}"
        for row in late
    )
    yield warning(
        shown,
        meaning="Vacuum does not keep up, or cannot remove them (see horizon). Claims and sweeps read past them "
        "and become slower.",
        remedy="Fix the horizon first; then VACUUM the table, and give autovacuum more (cost limit, workers).",
    )


@check("rules")
def rules(executor: Transaction, runtime: Runtime, *, thorough: bool) -> Iterator[Finding]:
    """Check for rows that contradict each other."""
    broken, of_all = health.broken_rules(executor, every_job=thorough)
    for row in broken:
        yield error(
            f"{row.rule}: {row.rows}, first job {row.id}",
            meaning="The rows contradict each other. This "
            "must never happen: it is a bug in this package, or rows were changed by hand.",
            remedy="job.run(force=True) gets such a job going again; please report it, with the log.",
        )
    if not broken:
        which = "all messages" if of_all else "all messages of a sample"
        yield well("all rows agree" if thorough else f"{which} agree with their jobs")
