"""Two more reasons in the dead set: `unsendable`, and `poisoned`.

It only allows more. Code of revision 0005 shows a reason as the text that it is. Each step may be repeated; the rows
that are there are looked at in a transaction of its own, so that nobody waits for that.

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


def upgrade() -> None:
    schema = '"' + context.config.attributes["schema"].replace('"', '""') + '"'
    op.execute(REASONS.replace("{s}", schema))
    validate = f"ALTER TABLE {schema}.dead VALIDATE CONSTRAINT dead_reason_check"
    if context.config.attributes["fresh"]:
        op.execute(validate)
        return
    with op.get_context().autocommit_block():
        op.execute(validate)
