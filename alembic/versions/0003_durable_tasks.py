"""Messages of ordinary tasks: the whole message as it was published, who runs it, and what was decided about it.

It only adds. Code of revision 0002 takes such a row for a continuation of a newer format, and leaves it alone. One
transaction, so that a step which was cut off has left nothing.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

from alembic import context, op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

TABLES = """
ALTER TABLE {s}.messages
  ADD COLUMN task text,
  ADD COLUMN body bytea,
  ADD COLUMN generation int,
  ADD COLUMN expires_at timestamptz,
  ADD COLUMN on_lost text,
  ADD COLUMN max_losses int,
  ADD COLUMN losses int NOT NULL DEFAULT 0,
  ADD COLUMN doom text,
  ADD CONSTRAINT messages_body_check
    CHECK ((body IS NULL) = (task IS NULL) AND (body IS NULL) = (generation IS NULL)
      AND (body IS NULL OR publication IS NOT NULL)),
  ADD CONSTRAINT messages_on_lost_check CHECK (on_lost IN ('requeue', 'dead')),
  ADD CONSTRAINT messages_doom_check
    CHECK (doom IS NULL OR (doom IN ('lost', 'expired') AND locked_by IS NULL AND body IS NOT NULL));
ALTER TABLE {s}.dead
  ADD COLUMN body bytea,
  DROP CONSTRAINT dead_reason_check,
  ADD CONSTRAINT dead_reason_check CHECK (reason IN ('failed', 'lost', 'revoked', 'shutdown lost', 'expired'));
"""


def upgrade() -> None:
    schema = '"' + context.config.attributes["schema"].replace('"', '""') + '"'
    for table in TABLES.replace("{s}", schema).split(";\n"):
        if table.strip():
            op.execute(table)
