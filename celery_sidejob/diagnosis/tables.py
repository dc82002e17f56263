"""The tables: rows that pile up, rows that contradict each other, and rows that vacuum has not removed."""

from __future__ import annotations

from collections.abc import Iterator

from ..model.finding import Finding, error, warning, well
from ..model.printable import counted, first_of
from ..operations.runtime import Runtime
from ..store import health, workers
from ..store.broker.messages import COUNTED
from ..store.outbox.references import count
from ..store.schema import schema_check
from ..store.statement import Transaction

DEAD_ROWS = 20_000
"""Autovacuum usually keeps dead rows below this number, or below the number of live rows."""
FINISHED = 100_000
"""The number of finished jobs, which nothing will remove, from which on there is a warning."""
IN_POSTGRES = "postgres "
"""The beginning of a broker's name if it is `sidejobpg://`."""
CHILDREN = 10_000
"""The number of children of one job from which on there is a warning: they stay as long as the job."""


def retention(executor: Transaction, runtime: Runtime) -> Iterator[Finding]:
    """Check for finished jobs that nothing removes, and for very large families."""
    finished = health.finished(executor) if runtime.settings.retention is None else 0
    if finished >= FINISHED:
        yield warning(
            "retention",
            f"about {finished} finished jobs are kept for ever",
            meaning="Nothing removes them, so the tables, backups and every VACUUM grow with them.",
            remedy="Set sidejob_retention, or retention= of their tasks.",
        )
    families = health.families(executor, least=CHILDREN)
    if families:
        shown = first_of(f"job {row.parent_id} has about {row.children}" for row in families)
        yield warning(
            "retention",
            f"very many children: {shown}",
            meaning="Finished children are kept as long as their "
            "parent, unless their own task has a retention. A run that asks for job.children reads them all.",
            remedy="Give the children's task a retention=, or make them without a parent.",
        )
    if finished < FINISHED and not families:
        yield well("retention", "no finished jobs pile up")


def references(executor: Transaction, runtime: Runtime) -> Iterator[Finding]:
    """Check for references that remain from before a change of the broker; most brokers never have any."""
    if runtime.connections.is_broker or not (left := count(executor)):
        return
    known = workers.list_all(executor, runtime.settings)
    if any((row.broker or "").startswith(IN_POSTGRES) for row in known if row.dead_at is None):
        return
    at_least = "at least " if left == COUNTED else ""
    yield warning(
        "references",
        f"{at_least}{counted(left, 'reference', 'references')} of jobs and durable tasks in the "
        "queues of sidejobpg://, and no worker has that broker",
        meaning="A change of the broker has left them there, or the workers of sidejobpg:// are down. The work is "
        "in the store: db reassign has it sent to the new broker, and then these rows only take up space.",
        remedy="If the broker has changed for good: celery -A <app> sidejob db reassign, unless that was done; "
        f"then DELETE FROM {schema_check.quoted(runtime.settings.schema)}.broker_messages WHERE task_id IS NOT NULL. "
        "Otherwise start workers of sidejobpg://.",
    )


def vacuum(executor: Transaction, runtime: Runtime) -> Iterator[Finding]:
    """Check whether vacuum keeps up."""
    if health.server(executor).autovacuum == "off":
        yield error(
            "vacuum",
            "autovacuum is off",
            remedy="Set autovacuum = on.",
            meaning="Every run leaves dead rows behind, so claims and sweeps become slower and slower.",
        )
        return
    late = [row for row in health.tables(executor, runtime.settings.schema) if row.dead > max(DEAD_ROWS, row.live)]
    if not late:
        yield well("vacuum", "keeps up with dead rows")
        return
    shown = first_of(
        f"{row.name} has {counted(row.dead, 'dead row', 'dead rows')} for {counted(row.live, 'live one', 'live ones')}"
        for row in late
    )
    yield warning(
        "vacuum",
        shown,
        meaning="Vacuum does not keep up, or cannot remove them (see horizon). Claims and sweeps read past them "
        "and become slower.",
        remedy="Fix the horizon first; then VACUUM the table, and give autovacuum more (cost limit, workers).",
    )


def rules(executor: Transaction, runtime: Runtime, *, thorough: bool) -> Iterator[Finding]:
    """Check for rows that contradict each other."""
    broken, of_all = health.broken_rules(executor, every_job=thorough)
    for row in broken:
        yield error(
            "rules",
            f"{row.rule}: {row.rows}, first job {row.id}",
            meaning="The rows contradict each other. This "
            "must never happen: it is a bug in this package, or rows were changed by hand.",
            remedy="job.run(force=True) gets such a job going again; please report it, with the log.",
        )
    if not broken:
        which = "all messages" if of_all else "all messages of a sample"
        yield well("rules", "all rows agree" if thorough else f"{which} agree with their jobs")
