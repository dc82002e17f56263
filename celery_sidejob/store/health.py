"""The questions of `doctor` to Postgres: rights, vacuum, clocks, and rules between rows that no CHECK can express."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg

from ..model.errors import StoreUnavailableError
from . import stats
from .advisory import holds_job
from .connection.connections import Connections
from .errors import first_line
from .statement import Reader, Statement
from .stats import Share


@contextmanager
def looking(connections: Connections) -> Iterator[None]:
    """Raise any error of Postgres within the block as one of ours, and release the connections.

    `doctor` runs when anything may be wrong: a broken index, or a limit of the role that ends a BEGIN halfway.
    """
    try:
        yield
    except psycopg.Error as error:
        connections.close()
        raise StoreUnavailableError(f"The store cannot be looked at: {first_line(error)}") from error


_SERVER = Statement("""
SELECT current_setting('server_version') AS version, current_setting('server_version_num')::int AS number,
  current_setting('fsync') AS fsync, current_setting('synchronous_commit') AS synchronous_commit,
  current_setting('autovacuum') AS autovacuum, pg_is_in_recovery() AS standby, current_user::text AS role,
  pg_has_role(current_user, 'pg_read_all_stats', 'usage') AS sees_all,
  pg_backend_pid() AS pid, extract(epoch FROM clock_timestamp())::double precision AS clock""")


def server(executor: Reader) -> Any:
    """Read the server's properties, its clock, and our role there."""
    return executor.run(_SERVER)[0]


_DATABASE = Statement("""
SELECT pg_postmaster_start_time() AS started_at, d.oid AS database
FROM pg_database d WHERE d.datname = current_database()""")


def database(executor: Reader) -> Any:
    """Read the identity of this database, which no other has, whatever URL leads there."""
    return executor.run(_DATABASE)[0]


_TABLES = Statement("""
SELECT relname AS name, n_live_tup AS live, n_dead_tup AS dead
FROM pg_stat_user_tables WHERE schemaname = %(schema)s ORDER BY n_dead_tup DESC, relname""")


def tables(executor: Reader, schema: str) -> Sequence[Any]:
    """Read the numbers of live and of dead rows of each table, those with the most dead rows first."""
    return executor.run(_TABLES, schema=schema)


_HORIZON = Statement("""
SELECT h.kind, h.who, h.xids, h.since_s FROM (
  SELECT 'transaction' AS kind,
    'pid ' || pid::text || ' (' || coalesce(nullif(application_name, ''), usename::text) || ', ' || state || ')' AS who,
    age(backend_xmin) AS xids, extract(epoch FROM clock_timestamp() - xact_start)::double precision AS since_s
  FROM pg_stat_activity WHERE backend_xmin IS NOT NULL AND datname = current_database() AND pid <> pg_backend_pid()
  UNION ALL
  SELECT 'prepared transaction', gid || ' of ' || owner::text, age(transaction),
    extract(epoch FROM clock_timestamp() - prepared)::double precision
  FROM pg_prepared_xacts WHERE database = current_database()
  UNION ALL
  SELECT 'replication slot', slot_name::text, age(xmin), NULL FROM pg_replication_slots WHERE xmin IS NOT NULL) h
ORDER BY h.xids DESC""")


def horizon(executor: Reader) -> Sequence[Any]:
    """Read the sessions and slots that keep vacuum from removing dead rows, the oldest first."""
    return executor.run(_HORIZON)


_LOCKERS = Statement(f"""
SELECT 'pid ' || h.pid::text || coalesce(
    ' (' || coalesce(nullif(a.application_name, ''), a.usename::text) || ', ' || a.state || ')', '') AS who,
  h.what, coalesce(extract(epoch FROM clock_timestamp() - a.xact_start)::double precision, h.dead_s) AS since_s
FROM (
  SELECT l.pid, string_agg(DISTINCT c.relname::text, ', ') AS what, 0::double precision AS dead_s
  FROM pg_locks l JOIN pg_class c ON c.oid = l.relation JOIN pg_namespace n ON n.oid = c.relnamespace
  WHERE n.nspname = %(schema)s AND c.relkind = 'r' AND l.mode <> 'AccessShareLock' AND l.pid <> pg_backend_pid()
  GROUP BY l.pid
  UNION ALL
  SELECT l.pid, 'job ' || m.job_id::text || ' of a dead worker', extract(epoch FROM now() - w.dead_at)::double precision
  FROM {{workers}} w JOIN {{messages}} m ON m.locked_by = w.id JOIN pg_locks l ON {holds_job("m.job_id")}
  WHERE w.dead_at IS NOT NULL) h
LEFT JOIN pg_stat_activity a ON a.pid = h.pid ORDER BY 3 DESC, 1, 2""")


def lockers(executor: Reader, schema: str) -> Sequence[Any]:
    """Read which open transactions have locked rows of a schema: (who, what, since_s); some times may be unknown."""
    return executor.run(_LOCKERS, schema=schema)


_HOLDING_DEAD = Statement("""
SELECT w.ident, extract(epoch FROM now() - w.dead_at)::double precision AS dead_s,
  (SELECT count(m.job_id) FROM {messages} m WHERE m.locked_by = w.id) AS runs
FROM {workers} w WHERE w.dead_at IS NOT NULL ORDER BY w.id""")


def dead_workers(executor: Reader) -> Sequence[Any]:
    """Read dead workers and the number of runs that each still holds."""
    return executor.run(_HOLDING_DEAD)


_OF_MESSAGES = Statement("""
SELECT broken.rule, count(*) AS rows, min(broken.job_id) AS id FROM (
  SELECT m.job_id, (
    SELECT CASE
      WHEN j.unit_no IS NOT NULL AND m.locked_by IS DISTINCT FROM j.worker_id
        THEN 'a run in progress whose message another worker holds, or nobody'
      WHEN j.status IN ('suspended', 'completed', 'failed', 'terminated') THEN 'a job at rest with a message'
      WHEN j.unit_no IS NULL AND m.for_run <> j.run_no + 1 THEN 'a message for another run than the next'
    END FROM {jobs} j WHERE j.id = m.job_id) AS rule
  FROM {messages} m TABLESAMPLE SYSTEM (%(percent)s) WHERE m.job_id IS NOT NULL) broken
WHERE broken.rule IS NOT NULL GROUP BY broken.rule""")
"""Reads only each message's own job: a join would read all jobs, nearly all of which are finished."""
_OF_JOBS = Statement("""
SELECT 'a run in progress without a message' AS rule, count(*) AS rows, min(j.id) AS id FROM {jobs} j
WHERE j.unit_no IS NOT NULL AND NOT EXISTS (SELECT FROM {messages} m WHERE m.job_id = j.id)
UNION ALL
SELECT 'a queued job with neither message nor timer', count(*), min(j.id) FROM {jobs} j
WHERE j.status = 'queued' AND j.unit_no IS NULL
  AND NOT EXISTS (SELECT FROM {messages} m WHERE m.job_id = j.id)
  AND NOT EXISTS (SELECT FROM {timers} t WHERE t.job_id = j.id)
UNION ALL
SELECT 'a terminating job without a message', count(*), min(j.id) FROM {jobs} j
WHERE j.status = 'terminating' AND j.unit_no IS NULL
  AND NOT EXISTS (SELECT FROM {messages} m WHERE m.job_id = j.id)
UNION ALL
SELECT 'a failed job without an entry in the dead set', count(*), min(j.id) FROM {jobs} j
WHERE j.status = 'failed' AND NOT EXISTS (SELECT FROM {dead} d WHERE d.job_id = j.id)""")


def broken_rules(executor: Reader, *, every_job: bool) -> tuple[list[Any], bool]:
    """Read the rules between rows that are broken, (rule, rows, id), and whether all messages were read, or a sample.

    A message that breaks several rules counts for the first rule. A sample represents very many messages. With
    `every_job` all messages and all jobs are read, which takes three seconds for a million of each.
    """
    share = Share(100.0) if every_job else stats.share_joined(executor, "messages")
    found = [*executor.run(_OF_MESSAGES, percent=share.percent), *(executor.run(_OF_JOBS) if every_job else ())]
    return [row for row in found if row.rows], share.is_all


_FINISHED = Statement(f"""
SELECT count(*) AS jobs FROM {{jobs}} j {stats.SAMPLE}
WHERE j.status IN ('completed', 'terminated') AND j.retention_s IS NULL AND j.retention_keep IS NULL""")


def finished(executor: Reader) -> int:
    """Estimate how many jobs are finished and have no retention of their own task."""
    looked_at = stats.share(executor, "jobs", sampled=stats.COUNTING_PAGES)
    return looked_at.whole(executor.run(_FINISHED, percent=looked_at.percent)[0].jobs)


_FAMILIES = Statement("""
SELECT f.parent_id, round(f.share * c.reltuples)::bigint AS children
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_stats s ON s.schemaname = n.nspname AND s.tablename = c.relname AND s.attname = 'parent_id'
  CROSS JOIN LATERAL unnest(s.most_common_vals::text::bigint[], s.most_common_freqs) AS f(parent_id, share)
WHERE c.oid = '{jobs}'::regclass AND f.share * c.reltuples >= %(least)s::real
  AND EXISTS (SELECT FROM {jobs} j WHERE j.id = f.parent_id) ORDER BY 2 DESC""")


def families(executor: Reader, *, least: int) -> Sequence[Any]:
    """Estimate which jobs have this many children, (parent_id, children), the largest families first.

    The figures are those of the last ANALYZE of the table.
    """
    return executor.run(_FAMILIES, least=least)
