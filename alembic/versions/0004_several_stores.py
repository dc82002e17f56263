"""Several stores for durable tasks: which of them has the copy of a message that counts.

It only adds. One transaction, so that a step which was cut off has left nothing. Code of revision 0003 knows one store
and writes nothing here.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

from alembic import context, op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

TABLES = """
CREATE TABLE {s}.twins (
  task_id text NOT NULL,
  call text NOT NULL,
  tried text[] NOT NULL,
  kept_until timestamptz NOT NULL,
  CONSTRAINT twins_pkey PRIMARY KEY (task_id, call)
) WITH (autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX twins_kept_until_idx ON {s}.twins (kept_until);
"""


def upgrade() -> None:
    schema = '"' + context.config.attributes["schema"].replace('"', '""') + '"'
    for table in TABLES.replace("{s}", schema).split(";\n"):
        if table.strip():
            op.execute(table)
