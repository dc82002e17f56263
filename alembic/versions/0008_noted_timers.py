"""An index of what is only noted for a job, also for later: it counts from its commit on, and is looked for.

Code of revision 0007 leaves what is noted for later until it is due.

Revision ID: 0008
Revises: 0007
"""

from __future__ import annotations

from alembic import context, op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    schema = '"' + context.config.attributes["schema"].replace('"', '""') + '"'
    index = f"timers_noted_idx ON {schema}.timers (id) WHERE NOT accepted"
    if context.config.attributes["fresh"]:
        op.execute(f"CREATE INDEX {index}")
        return
    with op.get_context().autocommit_block():
        op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {schema}.timers_noted_idx")
        op.execute(f"CREATE INDEX CONCURRENTLY {index}")
