"""A revocation of an ordinary durable task is kept: its row may be doomed as revoked, also while a run holds it.

And workers say which tasks they know, by which nothing is decided. It only allows more, and adds. Code of revision
0004 never runs what is doomed, for whatever reason, and does not bury it either: that waits for a newer sweeper. Each
step may be repeated; the rows that are there are looked at in a transaction of its own, so that nobody waits for that.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

from alembic import context, op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

DOOM = """
ALTER TABLE {s}.messages
  DROP CONSTRAINT messages_doom_check,
  ADD CONSTRAINT messages_doom_check CHECK (doom IS NULL OR (body IS NOT NULL
    AND (doom = 'revoked' OR (doom IN ('lost', 'expired') AND locked_by IS NULL)))) NOT VALID
"""

TASKS = """
CREATE TABLE IF NOT EXISTS {s}.served_tasks (
  worker_id bigint NOT NULL CONSTRAINT served_tasks_pkey PRIMARY KEY
    CONSTRAINT served_tasks_worker_id_fkey REFERENCES {s}.workers ON DELETE CASCADE,
  tasks text[] NOT NULL)
"""


def upgrade() -> None:
    schema = '"' + context.config.attributes["schema"].replace('"', '""') + '"'
    op.execute(TASKS.replace("{s}", schema))
    op.execute(DOOM.replace("{s}", schema))
    validate = f"ALTER TABLE {schema}.messages VALIDATE CONSTRAINT messages_doom_check"
    if context.config.attributes["fresh"]:
        op.execute(validate)
        return
    with op.get_context().autocommit_block():
        op.execute(validate)
