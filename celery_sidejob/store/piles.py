"""Rows that have piled up: estimates, from Postgres' own statistics and from a sample of the tables' pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import estimates
from .statement import Reader, Statement

_FINISHED = Statement(f"""
SELECT count(*) AS jobs FROM {{jobs}} j {estimates.SAMPLE}
WHERE j.status IN ('completed', 'terminated') AND j.retention_s IS NULL AND j.retention_keep IS NULL""")


def finished(executor: Reader) -> int:
    """Estimate how many jobs are finished and have no retention of their own task."""
    share = estimates.share(executor, "jobs", sampled=estimates.COUNTING_PAGES)
    return share.whole(executor.run(_FINISHED, percent=share.percent)[0].jobs)


_FAMILIES = Statement("""
SELECT f.parent_id, round(f.share * c.reltuples)::bigint AS children
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_stats s ON s.schemaname = n.nspname AND s.tablename = c.relname AND s.attname = 'parent_id'
  CROSS JOIN LATERAL unnest(s.most_common_vals::text::bigint[], s.most_common_freqs) AS f(parent_id, share)
WHERE c.oid = '{jobs}'::regclass AND f.share * c.reltuples >= %(least)s::real
  AND EXISTS (SELECT FROM {jobs} j WHERE j.id = f.parent_id) ORDER BY 2 DESC""")


def families(executor: Reader, *, least: int) -> Sequence[Any]:
    """Estimate which jobs have this many children, (parent_id, children), the largest families first.

    As of the last ANALYZE of the table.
    """
    return executor.run(_FAMILIES, least=least)
