"""Two more reasons in the dead set, three indexes, and plans that one large job does not spoil.

The reasons are `unsendable` and `poisoned`. Two indexes find entries of the dead set by task id and by task; the third
finds timers that are only noted for a job, also for later: a noted timer counts from its commit on.

Postgres measures how many rows a job or a port has on average. One with a million rows makes Postgres read whole tables
for the children, packets or timers of any other, also where a deletion checks a foreign key. So Postgres is told that
there are few. That holds from the next ANALYZE of a table on, which autovacuum does.

It only adds, and it only allows more. Code of revision 0005 shows a reason as the text that it is, and leaves a timer
that is noted for later until it is due. Each step may be repeated; existing rows are checked in a transaction of their
own, so that nobody waits for the check.

Revision ID: 0006
Revises: 0005
"""

from __future__ import annotations

from alembic import context, op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

REASONS = """
ALTER TABLE {s}.dead
  DROP CONSTRAINT dead_reason_check,
  ADD CONSTRAINT dead_reason_check CHECK (reason IN (
    'failed', 'lost', 'revoked', 'shutdown lost', 'expired', 'unsendable', 'poisoned')) NOT VALID
"""

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

INDEXES = {
    "dead_task_id_idx": "dead (task_id)",
    "dead_task_idx": "dead (task, id)",
    "timers_noted_idx": "timers (id) WHERE NOT accepted",
}


def upgrade() -> None:
    schema = '"' + context.config.attributes["schema"].replace('"', '""') + '"'
    op.execute(REASONS.replace("{s}", schema))
    for table, column in FEW.items():
        op.execute(f"ALTER TABLE {schema}.{table} ALTER COLUMN {column} SET (n_distinct = -0.5)")
    validate = f"ALTER TABLE {schema}.dead VALIDATE CONSTRAINT dead_reason_check"
    if context.config.attributes["fresh"]:
        op.execute(validate)
        for name, rows in INDEXES.items():
            op.execute(f"CREATE INDEX {name} ON {schema}.{rows}")
        return
    with op.get_context().autocommit_block():
        op.execute(validate)
        for name, rows in INDEXES.items():
            # A build that failed leaves an invalid index, and IF NOT EXISTS would take it for a good one.
            op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {schema}.{name}")
            op.execute(f"CREATE INDEX CONCURRENTLY {name} ON {schema}.{rows}")
