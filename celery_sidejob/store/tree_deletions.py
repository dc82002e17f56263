"""Rows of `tree_deletions`: the roots of large trees that are being deleted, a part in each transaction."""

from __future__ import annotations

from collections.abc import Iterable

from .statement import Autocommit, Reader, Statement, Transaction

_BEGIN = Statement("INSERT INTO {tree_deletions} (job_id) VALUES (%(id)s) ON CONFLICT (job_id) DO NOTHING")


def begin(executor: Transaction, job_id: int) -> None:
    """Begin to delete a job with all jobs below it; the job is locked exclusively. The row is deleted with the job."""
    executor.run(_BEGIN, id=job_id)


_AMONG = Statement("SELECT job_id FROM {tree_deletions} WHERE job_id = ANY(%(ids)s::bigint[])")


def among(executor: Reader, ids: Iterable[int]) -> set[int]:
    """Read which of these jobs are roots of trees that are being deleted."""
    return {row.job_id for row in executor.run(_AMONG, ids=list(ids))}


_ROOTS = Statement("SELECT job_id FROM {tree_deletions} WHERE job_id > %(after)s ORDER BY job_id LIMIT %(limit)s")


def roots(executor: Autocommit, *, after: int, limit: int) -> list[int]:
    """Read the next roots of trees that are being deleted, in the order of their ids."""
    return [row.job_id for row in executor.run(_ROOTS, after=after, limit=limit)]
