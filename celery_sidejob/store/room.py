"""Room on ports that have a limit, and rows of `port_waiters`: the jobs whose runs wait for room.

A run that waits for room and a reader that makes room both lock the rows of the ports first, and read in a later
statement. So the reader sees the run that found a port full, or the run sees the room. No row changes without that
lock. A job that was woken keeps its row, and room, until it has used the room or passed it on. Packets tell their
reader whether their port has a limit (`packets.limited`): readers of other ports do nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import advisory
from .statement import Reader, Statement, Transaction, first

LOCK_CLASS = 0x53_4A_52_4D - 0x40_00_00_00
"""The first half of the advisory lock's key ("SJRM", made to fit as `workers.LOCK_CLASS` is)."""

_COUNT = Statement("""
SELECT port_id, (SELECT count(*) FROM {packets} k WHERE k.port_id = p.port_id) AS used
FROM unnest(%(ids)s::bigint[]) AS p(port_id)""")


def used(executor: Reader, port_ids: Iterable[int]) -> dict[int, int]:
    """Count all packets of ports, {port id: packets}, including packets that a run has taken and not consumed."""
    return {row.port_id: row.used for row in executor.run(_COUNT, ids=list(port_ids))}


_LOCK = Statement("""
SELECT p.id, p.packet_limit FROM {ports} p JOIN {jobs} j ON j.id = p.job_id
WHERE p.id = ANY(%(ids)s::bigint[]) ORDER BY p.id FOR NO KEY UPDATE OF p FOR KEY SHARE OF j""")


def lock(executor: Transaction, port_ids: Iterable[int]) -> dict[int, int | None]:
    """Lock ports and return their limits, {port id: limit}; a port that is gone is missing.

    Their jobs are not deleted until this transaction has ended.
    """
    return {row.id: row.packet_limit for row in executor.run(_LOCK, ids=sorted(set(port_ids)))}


_LOCK_ALL = Statement("SELECT id FROM {ports} WHERE job_id = %(job_id)s ORDER BY id FOR NO KEY UPDATE")


def lock_all(executor: Transaction, job_id: int) -> None:
    """Lock all ports of a job."""
    executor.run(_LOCK_ALL, job_id=job_id)


_MARK = Statement("""
UPDATE {packets} SET limited = true WHERE port_id = ANY(%(ids)s::bigint[]) AND limited IS NULL""")


def mark(executor: Transaction, port_ids: Iterable[int]) -> None:
    """Mark the packets that were on the locked ports before their limit, so that they tell their reader of it."""
    executor.run(_MARK, ids=list(port_ids))


_WAIT = Statement("""
WITH touched AS (UPDATE {ports} SET packet_limit = packet_limit WHERE id = ANY(%(port_ids)s::bigint[]))
INSERT INTO {port_waiters} (port_id, job_id, run_no, needs)
SELECT w.port_id, %(job_id)s, %(run_no)s, w.needs
FROM unnest(%(port_ids)s::bigint[], %(needs)s::int[]) AS w(port_id, needs)
ON CONFLICT (port_id, job_id) DO UPDATE
  SET run_no = excluded.run_no, needs = excluded.needs, since = excluded.since, woken_at = NULL""")


def wait(executor: Transaction, job_id: int, *, run_no: int, needs: Mapping[int, int]) -> None:
    """Make the job of a run that now ends wait until the locked ports have room, {port id: packets needed}.

    One transaction at a time gets past this, so that `circle` sees all waiting jobs. The ports' rows get a new version:
    a reader in a borrowed transaction that sees an older state of the store (REPEATABLE READ) would overlook the
    waiting jobs, and Postgres refuses to lock such a port for it.
    """
    advisory.take(executor, LOCK_CLASS, [advisory.ONE])
    executor.run(_WAIT, job_id=job_id, run_no=run_no, port_ids=list(needs), needs=list(needs.values()))


WAITS = "waiter.id = w.job_id AND waiter.run_no = w.run_no AND waiter.unit_no IS NULL AND w.woken_at IS NULL"
"""Whether the job `waiter` still waits by its row `w`: it was not woken, and no run of it has begun since."""

KEPT_S = 10
"""Seconds for which room is kept for a woken job. Its run may be delayed, lost or long, and other jobs wait."""

_OVER = f"""(w.woken_at < now() - interval '{KEPT_S} s' OR NOT EXISTS (
    SELECT FROM {{jobs}} j WHERE j.id = w.job_id AND (j.run_no = w.run_no OR j.unit_no = 0)))"""
"""Whether a row `w` keeps no room: it was woken long ago, a run has committed a unit or ended, or its job is gone."""

_CIRCLE = Statement(f"""
WITH RECURSIVE waits AS (
  SELECT w.job_id, w.port_id, o.job_id AS owner_id, o.direction, o.name,
    CASE o.direction WHEN 'in' THEN o.job_id ELSE j.parent_id END AS reader_id
  FROM {{port_waiters}} w JOIN {{ports}} o ON o.id = w.port_id JOIN {{jobs}} j ON j.id = o.job_id
  WHERE w.job_id = %(job_id)s AND w.run_no = %(run_no)s
  UNION
  SELECT w.job_id, w.port_id, o.job_id, o.direction, o.name,
    CASE o.direction WHEN 'in' THEN o.job_id ELSE j.parent_id END
  FROM waits before
  JOIN {{port_waiters}} w ON w.job_id = before.reader_id
  JOIN {{jobs}} waiter ON {WAITS} AND waiter.status = 'suspended'
  JOIN {{ports}} o ON o.id = w.port_id JOIN {{jobs}} j ON j.id = o.job_id)
SELECT job_id, owner_id, direction, name FROM waits WHERE reader_id = %(job_id)s LIMIT 1""")


def circle(executor: Transaction, job_id: int, *, run_no: int) -> Any | None:
    """Return a port that only this job reads and for whose room another job waits, if this job waits for that job.

    This job may wait for it through further jobs. Returns (job_id, owner_id, direction, name), the waiting job and the
    port; None if some job may make room.
    """
    return first(executor.run(_CIRCLE, job_id=job_id, run_no=run_no))


_WAITING = Statement(f"""
SELECT w.job_id AS waiter_id, w.needs, o.job_id, o.direction, o.name AS port, o.packet_limit AS "limit",
  (SELECT count(*) FROM {{packets}} k WHERE k.port_id = o.id) AS packets
FROM (
  SELECT mine.* FROM {{port_waiters}} mine WHERE mine.job_id = %(job_id)s::bigint
  UNION
  SELECT there.* FROM {{ports}} own JOIN {{port_waiters}} there ON there.port_id = own.id
  WHERE own.job_id = %(job_id)s::bigint) w
JOIN {{jobs}} waiter ON {WAITS} AND waiter.status = 'suspended'
JOIN {{ports}} o ON o.id = w.port_id
ORDER BY w.job_id, o.id LIMIT %(limit)s""")


def waiting(executor: Reader, job_id: int, *, limit: int) -> Sequence[Any]:
    """Return the jobs that wait for room on this job's ports, and the ports for whose room this job waits; for people.

    One row for each: the waiting job (`waiter_id`), the port (`job_id`, `direction`, `port`) with its `limit` and
    `packets`, and the room that is needed. All packets of such a port are counted.
    """
    return executor.run(_WAITING, job_id=job_id, limit=limit)


_UNREAD = Statement(f"""
SELECT o.job_id, o.direction, o.name AS port, reader.id AS reader_id, reader.status, count(*) AS jobs,
  min(w.job_id) AS waiter_id
FROM (SELECT port_id, job_id, run_no, woken_at FROM {{port_waiters}} LIMIT %(looked_at)s) w
CROSS JOIN LATERAL (SELECT FROM {{jobs}} waiter WHERE {WAITS} AND waiter.status = 'suspended' LIMIT 1) still
CROSS JOIN LATERAL (SELECT p.job_id, p.direction, p.name FROM {{ports}} p WHERE p.id = w.port_id LIMIT 1) o
CROSS JOIN LATERAL (SELECT j.parent_id FROM {{jobs}} j WHERE j.id = o.job_id LIMIT 1) owner
CROSS JOIN LATERAL (
  SELECT j.id, j.status FROM {{jobs}} j WHERE j.id = CASE o.direction WHEN 'in' THEN o.job_id ELSE owner.parent_id END
  LIMIT 1) reader
WHERE reader.status IN ('failed', 'terminated')
GROUP BY 1, 2, 3, 4, 5 ORDER BY jobs DESC, waiter_id""")


def unread(executor: Reader, *, looked_at: int = 5_000) -> Sequence[Any]:
    """Return full ports for whose room jobs wait, and whose reader has failed or is terminated; for people.

    One row for each port (`job_id`, `direction`, `port`) with its reader (`reader_id`, `status`), how many `jobs` wait
    for it, and the first of them (`waiter_id`). Reads `looked_at` waiting jobs; LIMIT 1 makes Postgres find each by its
    key, because a join would read all jobs.
    """
    return executor.run(_UNREAD, looked_at=looked_at)


_FREED = Statement(f"""
WITH over AS (
  DELETE FROM {{port_waiters}} w WHERE w.port_id = ANY(%(ids)s::bigint[]) AND {_OVER}),
room AS (
  SELECT p.id, p.packet_limit - (SELECT count(*) FROM {{packets}} k WHERE k.port_id = p.id) - (
    SELECT coalesce(sum(w.needs), 0) FROM {{port_waiters}} w
    WHERE w.port_id = p.id AND w.woken_at IS NOT NULL AND NOT {_OVER}) AS packets
  FROM {{ports}} p WHERE p.id = ANY(%(ids)s::bigint[]) AND EXISTS (
    SELECT FROM {{port_waiters}} w WHERE w.port_id = p.id)),
line AS (
  SELECT w.port_id, w.job_id, w.needs <= room.packets AND sum(w.needs) FILTER (WHERE w.needs <= room.packets)
    OVER (PARTITION BY w.port_id ORDER BY w.since, w.job_id) <= room.packets AS fits
  FROM room JOIN {{port_waiters}} w ON w.port_id = room.id JOIN {{jobs}} waiter ON {WAITS}),
woken AS (
  UPDATE {{port_waiters}} w SET woken_at = now() FROM line
  WHERE line.fits AND w.port_id = line.port_id AND w.job_id = line.job_id
  RETURNING w.job_id)
SELECT woken.job_id, EXISTS (SELECT FROM line WHERE NOT line.fits) AS others
FROM (SELECT) one LEFT JOIN woken ON true""")


def freed(executor: Transaction, port_ids: Iterable[int]) -> set[int]:
    """Wake as many jobs as the locked ports have room for, the longest waiting first; returns the jobs, to be asked.

    The room is kept for them until they have used it or passed it on. A job that needs more room waits on.

    A job that waits on needs the room of a packet that is counted now. This packet must tell its reader of the limit,
    even if it was written before the port had a limit, and committed after the waiting run marked such packets.
    """
    ids = list(port_ids)
    found = executor.run(_FREED, ids=ids)
    if found[0].others:
        mark(executor, ids)  # as `wait` does for readers of such packets, which do not look for waiting jobs
        found = [*found, *executor.run(_FREED, ids=ids)]
    return {row.job_id for row in found if row.job_id is not None}


_WAITED_FOR = Statement("SELECT port_id FROM {port_waiters} WHERE job_id = %(job_id)s")


def waited_for(executor: Reader, job_id: int) -> set[int]:
    """Return the ports for whose room a job has waited, or still waits."""
    return {row.port_id for row in executor.run(_WAITED_FOR, job_id=job_id)}


_KEPT_TOO_LONG = Statement(f"""
SELECT job_id FROM {{port_waiters}} WHERE woken_at < now() - interval '{KEPT_S} s' ORDER BY woken_at LIMIT %(limit)s""")


def kept_too_long(executor: Reader, *, limit: int) -> set[int]:
    """Return jobs that were woken `KEPT_S` ago and have not used the room, or have died before they passed it on."""
    return {row.job_id for row in executor.run(_KEPT_TOO_LONG, limit=limit)}


_CONFIGURED = Statement(f"""
DELETE FROM {{port_waiters}} w USING {{ports}} p WHERE p.job_id = %(job_id)s AND w.port_id = p.id
RETURNING w.job_id, EXISTS (SELECT FROM {{jobs}} waiter WHERE {WAITS}) AS still_waits""")


def configured(executor: Transaction, job_id: int) -> set[int]:
    """Return the jobs that wait for room on a job's ports, which get other limits or are removed; they check again."""
    return {row.job_id for row in executor.run(_CONFIGURED, job_id=job_id) if row.still_waits}


def limited(rows: Sequence[Any]) -> set[int]:
    """Return the ports with a limit from which these packets came."""
    return {row.port_id for row in rows if row.limited}
