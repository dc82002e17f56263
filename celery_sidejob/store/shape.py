"""Which tables and columns each revision of the schema has, to notice what a partial restore or a person left out.

The migrations are the schema; a test holds this against them.
"""

from __future__ import annotations

from ..model.columns import COLUMNS
from .statement import Statement, Transaction

ADDED: dict[str, dict[str, str]] = {
    "0001": {
        "aliases": "name job_id",
        "askings": "task_id job_id options opened_at closed_at outcome result stored_at",
        "dead": "id job_id task_id task queue reason error traceback retries died_at payload",
        "jobs": " ".join(column.name for column in COLUMNS) + " id created_at status run_no unit_no worker_id run_kind "
        "ended_run wakes wakes_taken nudges timer_in_run terminate_tree losses retries started ran_at ended_at error "
        "inputs_memo",
        "leases": "name holder expires_at",
        "messages": "task_id job_id for_run queue publication due_at next_check_at check_interval published_at "
        "suspected_at locked_by locked_at locked_pid",
        "meta": "key value",
        "packets": "id port_id value context options written_at taken_by taken_run",
        "ports": "id job_id direction name default_value channels",
        "registry": "task queue options seen_at",
        "state": "job_id key value",
        "subscriptions": "channel port_id",
        "timers": "id job_id due_at ask accepted",
        "workers": "id ident locked started_at beat_at suspect_at suspect_by dead_at",
    },
    "0002": {"counters": "name label value", "served_queues": "worker_id queue skew_s", "workers": "revision"},
    "0003": {"dead": "body", "messages": "task body generation expires_at on_lost max_losses losses doom"},
    "0004": {"twins": "task_id call tried kept_until"},
    "0005": {"served_tasks": "worker_id tasks"},
    "0006": {},
}
"""What came with each revision: the columns of new and of older tables."""

_MISSING = Statement("""
SELECT r.relation, bool_and(c.oid IS NULL) AS whole,
  array_agg(r.attribute ORDER BY r.attribute) FILTER (WHERE a.attname IS NULL) AS attributes
FROM unnest(%(relations)s::text[], %(attributes)s::text[]) AS r(relation, attribute)
LEFT JOIN pg_class c ON c.relname = r.relation AND c.relkind IN ('r', 'p')
  AND c.relnamespace = (SELECT n.oid FROM pg_namespace n WHERE n.nspname = %(schema)s)
LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = r.attribute AND NOT a.attisdropped
GROUP BY r.relation HAVING bool_or(a.attname IS NULL) ORDER BY r.relation""")


def columns(revision: str) -> list[tuple[str, str]]:
    """Return what a schema at this revision has, as (table, column)."""
    return [
        (table, column)
        for since, tables in ADDED.items() if since <= revision
        for table, names in tables.items()
        for column in names.split()
    ]  # fmt: skip


def missing(executor: Transaction, schema: str, revision: str) -> list[str]:
    """Tell what a schema at this revision lacks, as "packets" for a whole table or "jobs.wakes" for a column."""
    expected = columns(revision)
    rows = executor.run(
        _MISSING, relations=[table for table, _ in expected], attributes=[column for _, column in expected],
        schema=schema,
    )  # fmt: skip
    lacking: list[str] = []
    for row in rows:
        lacking += [row.relation] if row.whole else [f"{row.relation}.{name}" for name in row.attributes]
    return lacking
