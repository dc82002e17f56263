"""Rows of `counters`: the totals of the workers' counts. No decision depends on them."""

from __future__ import annotations

from collections.abc import Mapping

from ..model.measures import Total
from .statement import Reader, Statement, Transaction

_ADD = Statement("""
INSERT INTO {counters} (name, label, value)
SELECT r.name, r.label, r.value FROM unnest(%(names)s::text[], %(labels)s::text[], %(amounts)s::double precision[])
  AS r(name, label, value) ORDER BY r.name, r.label
ON CONFLICT (name, label) DO UPDATE SET value = {counters}.value + excluded.value""")


def add(executor: Transaction, amounts: Mapping[Total, float]) -> None:
    """Add to the totals; two processes that add at the same time lock the rows in the same order."""
    names, labels = [name for name, _ in amounts], [label for _, label in amounts]
    executor.run(_ADD, names=names, labels=labels, amounts=[float(amount) for amount in amounts.values()])


_READ = Statement("SELECT name, label, value FROM {counters}")


def read(executor: Reader) -> dict[Total, float]:
    """Read all totals."""
    return {(row.name, row.label): row.value for row in executor.run(_READ)}
