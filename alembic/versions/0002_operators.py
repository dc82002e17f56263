"""What operators need: workers say which revision they know, what they have counted, and which queues they serve.

What a worker holds is found by an index, and `state` is vacuumed sooner.

It only adds: code that knows revision 0001 alone runs on it, and code of this revision runs on 0001. Each step may be
repeated, because building the index concurrently needs the transaction before it to be committed. Nothing is decided by
counters and served queues: a worker that does not write them does no harm, and one that finds no tables does without.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

from alembic import context, op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

TABLES = """
CREATE TABLE IF NOT EXISTS {s}.counters (
  name text NOT NULL,
  label text NOT NULL DEFAULT '',
  value double precision NOT NULL,
  CONSTRAINT counters_pkey PRIMARY KEY (name, label)
) WITH (fillfactor = 50);

CREATE TABLE IF NOT EXISTS {s}.served_queues (
  worker_id bigint NOT NULL CONSTRAINT served_queues_worker_id_fkey REFERENCES {s}.workers ON DELETE CASCADE,
  queue text NOT NULL,
  skew_s double precision NOT NULL,
  CONSTRAINT served_queues_pkey PRIMARY KEY (worker_id, queue));
"""


def upgrade() -> None:
    schema = '"' + context.config.attributes["schema"].replace('"', '""') + '"'
    for table in TABLES.replace("{s}", schema).split(";\n"):
        if table.strip():
            op.execute(table)
    op.execute(f"ALTER TABLE {schema}.workers ADD COLUMN IF NOT EXISTS revision text")
    op.execute(f"ALTER TABLE {schema}.state SET (autovacuum_vacuum_scale_factor = 0.05)")
    index = f"messages_locked_by_idx ON {schema}.messages (locked_by) WHERE locked_by IS NOT NULL"
    if context.config.attributes["fresh"]:
        op.execute(f"CREATE INDEX {index}")
        return
    with op.get_context().autocommit_block():
        # What a build that failed has left is no index, and IF NOT EXISTS would take it for one.
        op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {schema}.messages_locked_by_idx")
        op.execute(f"CREATE INDEX CONCURRENTLY {index}")
