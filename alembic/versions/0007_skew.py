"""The dead set is found by task id and by task, and one job with a million rows does not slow down all others.

Postgres measures how many rows a job or a port has on average. One with a million makes it read whole tables for
the children, packets or timers of any other, also where a foreign key is checked for a deletion. So it is told that
there are few. That holds from the next ANALYZE of a table on, which autovacuum does.

It only adds. Code of revision 0006 runs on it. Each step may be repeated.

Revision ID: 0007
Revises: 0006
"""

from __future__ import annotations

from alembic import context, op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

FEW = {
    "jobs": "parent_id",
    "askings": "job_id",
    "timers": "job_id",
    "dead": "job_id",
    "ports": "job_id",
    "subscriptions": "port_id",
    "packets": "port_id",
    "state": "job_id",
    "aliases": "job_id",
}
"""Columns that have another value in every second row, as far as plans are concerned."""

INDEXES = {"dead_task_id_idx": "dead (task_id)", "dead_task_idx": "dead (task, id)"}


def upgrade() -> None:
    schema = '"' + context.config.attributes["schema"].replace('"', '""') + '"'
    for table, column in FEW.items():
        op.execute(f"ALTER TABLE {schema}.{table} ALTER COLUMN {column} SET (n_distinct = -0.5)")
    if context.config.attributes["fresh"]:
        for name, columns in INDEXES.items():
            op.execute(f"CREATE INDEX {name} ON {schema}.{columns}")
        return
    with op.get_context().autocommit_block():
        for name, columns in INDEXES.items():
            # What a build that failed has left is no index, and IF NOT EXISTS would take it for one.
            op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {schema}.{name}")
            op.execute(f"CREATE INDEX CONCURRENTLY {name} ON {schema}.{columns}")
