"""The tables of the schema: their columns, and the rights of the run-time role; a test compares the migrations.

Workers check both when they start, and so notice objects that are missing after a partial restore or by mistake. The
owner makes and migrates the schema; the role that runs jobs need not be able to change it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TextIO

from psycopg import sql

from ...model.columns import COLUMNS
from ..statement import Reader, Statement, columns

_ALL = "SELECT INSERT UPDATE DELETE"


@dataclass(frozen=True, slots=True)
class Table:
    """A table: the names of its columns, and the rights on it that workers and clients need."""

    columns: str
    rights: str = _ALL


TABLES = {
    "alembic_version": Table("version_num", "SELECT"),
    "meta": Table("key value", "SELECT"),
    "registry": Table("task queue options seen_at"),
    "workers": Table("id ident revision broker locked started_at beat_at suspect_at suspect_by dead_at"),
    "served": Table("worker_id queues tasks skew_s stood_at stood", "SELECT INSERT UPDATE"),
    "counters": Table("name label value", "SELECT INSERT UPDATE"),
    "tallies": Table("day queue task step measure bucket number total_us squares_us"),
    "run_samples": Table("taken_at runs failures", "SELECT INSERT DELETE"),
    "leases": Table("name holder expires_at", "SELECT UPDATE"),
    "queues": Table(
        "name ranked ordered run_limit key_limit rate_interval_s rate_burst rate_opens_at paused_at pause_reason "
        "declared"
    ),
    "limit_keys": Table("queue key served_at"),
    "capacity_pools": Table("name capacity declared shards covers refused sampled created_at", "SELECT INSERT UPDATE"),
    "capacity_shards": Table("pool shard capacity used admitted freed", "SELECT INSERT UPDATE"),
    "capacity_samples": Table("pool taken_at admitted freed refused", "SELECT INSERT DELETE"),
    "schedules": Table(
        "name task args kwargs options every_s cron timezone start_at end_at catch_up overlap jitter_s declared "
        "anchor_at plan next_at due_at revision count last_at last_job_id last_task_id paused_at pause_reason trouble"
    ),
    "jobs": Table(
        " ".join(column.name for column in COLUMNS) + " id created_at status run_no unit_no worker_id run_kind "
        "ended_run wakes wakes_taken changes timer_in_run terminate_tree losses retries started ran_at ended_at error "
        "inputs_memo rate_opens_at has_dependents has_steps failed_by"
    ),
    "messages": Table(
        "task_id job_id for_run task queue publication body generation due_at gate expires_at next_check_at "
        "check_interval published_at suspected_at declined_at locked_by locked_at locked_pid on_lost max_losses losses "
        "last_loss doom priority unique_key rank limit_key pool pool_weight pool_rank pool_runs pool_shard"
    ),
    "duplicates": Table("task_id call tried kept_until"),
    "timers": Table("id job_id due_at ask accepted", "SELECT INSERT DELETE"),
    "dependencies": Table("job_id depends_on on_failure state"),
    "batches": Table("id name calls created_at closed_at ended_at"),
    "batch_members": Table("id batch_id job_id task_id outcome", "SELECT INSERT UPDATE"),
    "progress": Table("job_id run_no told_at done total note"),
    "tree_terminations": Table("job_id root itself after"),
    "tree_deletions": Table("job_id", "SELECT INSERT DELETE"),
    "askings": Table("task_id job_id options unique_key opened_at closed_at outcome result stored_at"),
    "dead": Table(
        "id job_id task_id task queue reason error traceback retries died_at payload body given_group failure_group",
        "SELECT INSERT DELETE",
    ),
    "ports": Table("id job_id direction name default_value channels packet_limit received"),
    "subscriptions": Table("id channel job_id port_id", "SELECT INSERT DELETE"),
    "publications": Table("id channel packets newest reached"),
    "port_waiters": Table("port_id job_id run_no needs since woken_at"),
    "packets": Table("id port_id value context options written_at taken_by taken_run limited"),
    "state": Table("job_id key value"),
    "steps": Table("id job_id turn name number kind run_no done tries due_at value error began_at took_s worker"),
    "aliases": Table("name job_id"),
    "tags": Table("tag job_id place", "SELECT INSERT DELETE"),
    "tracked": Table("job_id place", "SELECT INSERT DELETE"),
    "web_tokens": Table("name hash scopes created_at", "SELECT INSERT DELETE"),
    "web_answers": Table("token key request call code answer made_at"),
    "run_history": Table("job_id place run_no worker began_at ended_at how detail"),
    "task_history": Table("id task_id task queue how ended_at lasted_s", "SELECT INSERT DELETE"),
    "job_log": Table("id job_id at what run_no worker detail", "SELECT INSERT DELETE"),
    "results": Table("key state body expires_at"),
    "chords": Table("key size more counted call send_at expires_at"),
    "chord_parts": Table("chord task_id place body", "SELECT INSERT"),
    "broker_queues": Table("name transient unused_s expires_at"),
    "broker_bindings": Table("exchange queue routing_key", "SELECT INSERT DELETE"),
    "broker_consumers": Table("id ident locked silence_s beat_at"),
    "broker_messages": Table(
        "id queue priority due_at holder held_at returns deaths headers properties body task_id generation again"
    ),
    "broker_dead": Table("id queue priority died_at reason headers properties body", "SELECT INSERT DELETE"),
    "broker_broadcasts": Table("id exchange routing_key sent_at headers properties body", "SELECT INSERT DELETE"),
}

TRIGGERS = ("messages_enter_pool", "messages_leave_pool", "messages_pause_in_pool", "messages_rest_in_pool")
"""Triggers that count the slots of capacity pools and the jobs of tags."""

SEQUENCES = ("jobs_id_seq",)
"""Sequences that are read by name; other sequences need no right."""

_NEEDED = [(table, right) for table, declared in TABLES.items() for right in declared.rights.split()]
_NEEDED += [(sequence, "USAGE") for sequence in SEQUENCES]


def write_grants(schema: str, role: str, out: TextIO) -> None:
    """Write the GRANTs that let `role` run workers and clients; the schema's owner runs them after upgrades."""
    grants = [sql.SQL("GRANT USAGE ON SCHEMA {} TO {};").format(sql.Identifier(schema), sql.Identifier(role))]
    grants += [
        sql.SQL("GRANT {} ON {} TO {};").format(
            sql.SQL(", ").join(map(sql.SQL, table.rights.split())), sql.Identifier(schema, name), sql.Identifier(role)
        )
        for name, table in TABLES.items()
    ]
    grants += [
        sql.SQL("GRANT USAGE ON SEQUENCE {} TO {};").format(sql.Identifier(schema, sequence), sql.Identifier(role))
        for sequence in SEQUENCES
    ]
    out.writelines(grant.as_string(None) + "\n" for grant in grants)


_LACKING_RIGHTS = Statement("""
SELECT r.relation, r.privilege FROM unnest(%(relations)s::text[], %(privileges)s::text[]) AS r(relation, privilege)
WHERE NOT CASE WHEN to_regclass(%(schema)s || '.' || r.relation) IS NULL THEN true
  WHEN r.relation LIKE '%%\\_seq' THEN has_sequence_privilege(%(schema)s || '.' || r.relation, r.privilege)
  ELSE has_table_privilege(%(schema)s || '.' || r.relation, r.privilege) END
ORDER BY 1, 2""")


def lacking_rights(executor: Reader, schema: str) -> list[str]:
    """Return the rights on the existing tables that the connection's role lacks, as "UPDATE on jobs"."""
    quoted = sql.Identifier(schema).as_string(None)
    found = executor.run(_LACKING_RIGHTS, **columns(_NEEDED, "relations", "privileges"), schema=quoted)
    return [f"{row.privilege} on {row.relation}" for row in found]


_FOUND = Statement("""
SELECT c.relname AS name, array_agg(a.attname::text) AS columns FROM pg_class c
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE c.relkind IN ('r', 'p') AND c.relnamespace = (SELECT n.oid FROM pg_namespace n WHERE n.nspname = %(schema)s)
GROUP BY c.relname""")


_TRIGGERS_FOUND = Statement("""
SELECT t.tgname AS name FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
WHERE t.tgenabled <> 'D' AND c.relnamespace = (SELECT n.oid FROM pg_namespace n WHERE n.nspname = %(schema)s)""")


def missing(executor: Reader, schema: str) -> list[str]:
    """Return the missing parts of a schema at our revision, as "packets" for a table or "jobs.wakes" for a column.

    A missing or disabled trigger is "trigger messages_leave_pool".
    """
    found = {row.name: row.columns for row in executor.run(_FOUND, schema=schema)}
    lacking: list[str] = []
    for name, table in sorted(TABLES.items()):
        if name in found:
            lacking += [f"{name}.{column}" for column in sorted(set(table.columns.split()).difference(found[name]))]
        else:
            lacking.append(name)
    triggers = {row.name for row in executor.run(_TRIGGERS_FOUND, schema=schema)}
    return [*lacking, *(f"trigger {name}" for name in TRIGGERS if name not in triggers)]
