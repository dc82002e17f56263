"""What the run-time role may do: the rights that workers and clients need in the schema, and no others.

The schema is made and migrated by its owner; who runs jobs need not be able to change it.
"""

from __future__ import annotations

from typing import TextIO

from psycopg import sql

from .statement import Statement, Transaction

TABLES: dict[str, tuple[str, ...]] = {
    "alembic_version": ("SELECT",),
    "meta": ("SELECT",),
    "registry": ("SELECT", "INSERT", "UPDATE", "DELETE"),
    "workers": ("SELECT", "INSERT", "UPDATE", "DELETE"),
    "leases": ("SELECT", "UPDATE"),
    "counters": ("SELECT", "INSERT", "UPDATE"),
    "served_queues": ("SELECT", "INSERT", "UPDATE", "DELETE"),
    "served_tasks": ("SELECT", "INSERT", "UPDATE"),
    "jobs": ("SELECT", "INSERT", "UPDATE", "DELETE"),
    "messages": ("SELECT", "INSERT", "UPDATE", "DELETE"),
    "twins": ("SELECT", "INSERT", "UPDATE", "DELETE"),
    "timers": ("SELECT", "INSERT", "DELETE"),
    "askings": ("SELECT", "INSERT", "UPDATE", "DELETE"),
    "dead": ("SELECT", "INSERT", "DELETE"),
    "ports": ("SELECT", "INSERT", "UPDATE", "DELETE"),
    "subscriptions": ("SELECT", "INSERT", "DELETE"),
    "packets": ("SELECT", "INSERT", "UPDATE", "DELETE"),
    "state": ("SELECT", "INSERT", "UPDATE", "DELETE"),
    "aliases": ("SELECT", "INSERT", "UPDATE", "DELETE"),
}
"""The rights in each table."""

SEQUENCES = ("jobs_id_seq",)
"""Sequences from which numbers are drawn by name; those of other columns need no right."""


def write_grants(schema: str, role: str, out: TextIO) -> None:
    """Write the GRANTs by which `role` may run workers and clients; who owns the schema runs them, after upgrades."""
    grants = [sql.SQL("GRANT USAGE ON SCHEMA {} TO {};").format(sql.Identifier(schema), sql.Identifier(role))]
    grants += [
        sql.SQL("GRANT {} ON {} TO {};").format(
            sql.SQL(", ").join(map(sql.SQL, rights)), sql.Identifier(schema, table), sql.Identifier(role)
        )
        for table, rights in TABLES.items()
    ]
    grants += [
        sql.SQL("GRANT USAGE ON SEQUENCE {} TO {};").format(sql.Identifier(schema, sequence), sql.Identifier(role))
        for sequence in SEQUENCES
    ]
    out.writelines(grant.as_string(None) + "\n" for grant in grants)


_MISSING = Statement("""
SELECT r.relation, r.privilege FROM unnest(%(relations)s::text[], %(privileges)s::text[]) AS r(relation, privilege)
WHERE NOT CASE WHEN to_regclass(%(schema)s || '.' || r.relation) IS NULL THEN true
  WHEN r.relation LIKE '%%\\_seq' THEN has_sequence_privilege(%(schema)s || '.' || r.relation, r.privilege)
  ELSE has_table_privilege(%(schema)s || '.' || r.relation, r.privilege) END
ORDER BY 1, 2""")


def missing(executor: Transaction, schema: str) -> list[str]:
    """Tell which rights the connection's role lacks, as "UPDATE on jobs"."""
    needed = [(table, right) for table, rights in TABLES.items() for right in rights]
    needed += [(sequence, "USAGE") for sequence in SEQUENCES]
    found = executor.run(
        _MISSING, relations=[relation for relation, _ in needed], privileges=[right for _, right in needed],
        schema=sql.Identifier(schema).as_string(None),
    )  # fmt: skip
    return [f"{row.privilege} on {row.relation}" for row in found]
