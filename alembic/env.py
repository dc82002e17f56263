"""Runs the migrations of one schema; `celery -A app sidejob db …` and `celery_sidejob.store.schema.migrate` start it.

What it must know comes in `config.attributes`: the schema, the connection. There is no ini file.
"""

from __future__ import annotations

from alembic import context

schema = context.config.attributes["schema"]
options = {"version_table": "alembic_version", "version_table_schema": schema, "transaction_per_migration": True}

if context.is_offline_mode():
    # "named", because the driver's own parameter style would double each % in the SQL that is written.
    dialect = {"dialect_name": "postgresql", "dialect_opts": {"paramstyle": "named"}}
    context.configure(literal_binds=True, **dialect, **options)
    with context.begin_transaction():
        context.run_migrations()
else:
    context.configure(connection=context.config.attributes["connection"], **options)
    with context.begin_transaction():
        context.run_migrations()
