"""Rows of `run_samples`: how many runs and failures there were until then, noted once a minute and kept for a day.

Runs in a time are the difference of two samples. The statistics themselves (`tallies`) are kept by day.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..model.statistics import Measure
from .statement import Autocommit, Reader, Statement
from .tallies import EVER

EVERY_S = 60.0
KEPT_H = 25
"""The hours for which samples are kept: a day, and an hour before it from which its first runs are counted."""

_TOTALS = """
    SELECT coalesce(sum(t.number) FILTER (WHERE t.measure = %(run)s), 0)::bigint AS runs,
      coalesce(sum(t.number) FILTER (WHERE t.measure = %(failure)s), 0)::bigint AS failures
    FROM {tallies} t
    WHERE t.day = %(ever)s::date AND t.step = '' AND t.measure = ANY(ARRAY[%(run)s, %(failure)s]::text[])"""
_PARAMETERS = {"ever": EVER, "run": str(Measure.RUN), "failure": str(Measure.FAILURE)}

_TAKE = Statement(f"""
WITH gone AS (DELETE FROM {{run_samples}} WHERE taken_at < now() - interval '{KEPT_H} h')
INSERT INTO {{run_samples}} (taken_at, runs, failures)
SELECT now(), totals.runs, totals.failures
FROM (SELECT WHERE NOT EXISTS (
    SELECT FROM {{run_samples}} s WHERE s.taken_at > now() - interval '{EVERY_S - 5} s')) due
  CROSS JOIN LATERAL ({_TOTALS}) totals
ON CONFLICT DO NOTHING RETURNING taken_at""")


def take(connections: Autocommit) -> int:
    """Take a sample, unless the last one is less than a minute old, and remove old ones; returns the number taken."""
    return len(connections.run(_TAKE, **_PARAMETERS))


_READ = Statement(f"""
SELECT s.taken_at, s.runs, s.failures FROM {{run_samples}} s
UNION ALL SELECT now(), totals.runs, totals.failures FROM ({_TOTALS}) totals
ORDER BY 1""")


def read(executor: Reader) -> Sequence[Any]:
    """Read (taken_at, runs, failures) of each sample, oldest first, and of this moment."""
    return executor.run(_READ, **_PARAMETERS)
