"""Reads the store without the package, to see what became of each lost run. Do not copy this: use the package."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg import sql

from celery_sidejob.store.connection.opening import connection_parameters


@dataclass(frozen=True)
class Run:
    """A job's latest run, when it began, and when its message was last published; None for never."""

    number: int
    began_at: datetime | None
    announced_at: datetime | None


class Store:
    """Reads the tables of one schema."""

    def __init__(self, database_url: str, schema: str) -> None:
        self._connection = connect(database_url)
        self._connection.execute(sql.SQL("SET search_path TO {}").format(sql.Identifier(schema)))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def now(self) -> datetime:
        """Return the store's time, which is what `ran_at` is in."""
        row = self._connection.execute("SELECT clock_timestamp()").fetchone()
        assert row is not None
        found: datetime = row[0]
        return found

    def age_s(self) -> float:
        """Return how long ago Postgres was started."""
        row = self._connection.execute(
            "SELECT extract(epoch FROM clock_timestamp() - pg_postmaster_start_time())::float8"
        ).fetchone()
        assert row is not None
        return float(row[0])

    def sweeper(self) -> int | None:
        """Return the process id of the worker that sweeps, None if no worker does."""
        row = self._connection.execute(
            "SELECT split_part(w.ident, ':', 2)::int FROM leases l JOIN workers w ON w.id = l.holder"
        ).fetchone()
        return int(row[0]) if row else None

    def workers(self) -> set[int]:
        """Return the process ids of the workers that are known and not declared dead."""
        rows = self._connection.execute("SELECT split_part(ident, ':', 2)::int FROM workers WHERE dead_at IS NULL")
        return {pid for (pid,) in rows}

    def held_by(self, pid: int) -> dict[int, int]:
        """Return the runs in progress in a worker, {job id: run number}."""
        rows = self._connection.execute(
            "SELECT j.id, j.run_no FROM jobs j JOIN workers w ON w.id = j.worker_id"
            " WHERE split_part(w.ident, ':', 2) = %s::text",
            [pid],
        )
        return dict(rows.fetchall())

    def runs(self, job_ids: Iterable[int]) -> dict[int, Run]:
        """Return the latest run of each of these jobs."""
        rows = self._connection.execute(
            "SELECT j.id, j.run_no, j.ran_at, m.published_at FROM jobs j LEFT JOIN messages m ON m.job_id = j.id"
            " WHERE j.id = ANY(%s)",
            [list(job_ids)],
        )
        return {job_id: Run(*found) for job_id, *found in rows}


def connect(database_url: str) -> psycopg.Connection[tuple[Any, ...]]:
    """Return a connection that commits each statement; SettingsError for a URL that cannot be read."""
    return psycopg.connect(**connection_parameters(database_url), autocommit=True)
