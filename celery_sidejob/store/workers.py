"""Rows of `workers` and `leases`: the live workers, and the sweeper. Deadlines are by the database's clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..model.loss import LossKind
from ..model.native import new_process_name
from ..model.settings import Settings
from . import meta
from .connection.connections import Connections
from .statement import Autocommit, Reader, Statement, Transaction, first

LOCK_CLASS = 0x53_4A_4F_42 - 0x40_00_00_00
"""The first half of our advisory locks' keys ("SJOB", made to fit a signed 32-bit integer)."""


def _lock_of(worker_id: str) -> str:
    """Return the key of a worker's liveness lock, as SQL: the arguments of Postgres' functions for advisory locks."""
    return f"{LOCK_CLASS}, (hashtext(%(schema)s) # {worker_id}::int)"


_REGISTER = Statement("""
INSERT INTO {workers} (ident, revision, broker) VALUES (%(ident)s, %(revision)s, %(broker)s) RETURNING id""")


def register(executor: Transaction, ident: str, *, broker: str | None = None) -> int:
    """Register a process, with the revision that its code knows; return the identity under which it claims runs.

    `broker` is the broker from which it takes messages; None for a process that takes none.
    """
    return int(executor.run(_REGISTER, ident=ident, revision=meta.REVISION, broker=broker)[0].id)


@contextmanager
def as_worker(connections: Connections) -> Iterator[int]:
    """Register this process as a worker for the block, and yield the identity under which it claims runs."""
    worker_id = connections.transact("register", lambda executor: register(executor, new_process_name()))
    try:
        yield worker_id
    finally:
        leave(connections, worker_id)


_LIVE = Statement("""
SELECT ident FROM {workers} WHERE dead_at IS NULL AND (%(broker)s::text IS NULL OR broker <> %(broker)s)
  AND (%(revision)s::text IS NULL OR revision < %(revision)s) ORDER BY id""")


def live(executor: Reader, *, not_of: str | None = None, before: str | None = None) -> list[str]:
    """Read the workers that are registered and not declared dead.

    Optionally only those that take messages from another broker (`not_of`), or whose code knows no revision from
    `before` on.
    """
    return [row.ident for row in executor.run(_LIVE, broker=not_of, revision=before)]


_TAKE_LOCK = Statement(f"SELECT pg_try_advisory_lock({_lock_of('%(id)s')}) AS taken")
_ANNOUNCE_LOCK = Statement("UPDATE {workers} SET locked = %(locked)s WHERE id = %(id)s")


def take_lock(executor: Transaction, worker_id: int, schema: str) -> bool:
    """Take the liveness lock, for as long as this connection lives."""
    return bool(executor.run(_TAKE_LOCK, schema=schema, id=worker_id)[0].taken)


_SEEN = Statement(f"SELECT NOT pg_try_advisory_xact_lock({_lock_of('%(id)s')}) AS seen")


def lock_is_seen(executor: Transaction, worker_id: int, schema: str) -> bool:
    """Tell whether the liveness lock, held on another connection, is visible from this executor's."""
    return bool(executor.run(_SEEN, schema=schema, id=worker_id)[0].seen)


def announce_lock(executor: Transaction, worker_id: int, locked: bool) -> None:
    """Record whether a free lock of this worker is proof of its death."""
    executor.run(_ANNOUNCE_LOCK, id=worker_id, locked=locked)


_BEAT = Statement(f"""
UPDATE {{workers}} w SET beat_at = now(), suspect_at = NULL, suspect_by = NULL
FROM (SELECT set_config('synchronous_commit', 'off', true)) AS soon
WHERE w.id = %(id)s AND w.dead_at IS NULL
RETURNING (
  SELECT l.holder IS NULL OR l.holder = w.id OR l.expires_at < now() OR h.dead_at IS NOT NULL
    OR h.locked AND pg_try_advisory_xact_lock({_lock_of("h.id")})
    OR w.id IN (SELECT d.id FROM {{workers}} d WHERE d.dead_at IS NULL AND d.id <> l.holder
      ORDER BY d.id DESC LIMIT 1)
  FROM {{leases}} l LEFT JOIN {{workers}} h ON h.id = l.holder
  WHERE l.name = 'sweeper') AS watches, ARRAY(SELECT q.name FROM {{queues}} q) AS managed""")


def beat(executor: Transaction, worker_id: int, *, schema: str) -> Any | None:
    """Renew the worker's life, and read (watches, managed queues); None if it was declared dead, for good.

    `watches`: this worker should try to sweep now, and again and again until its next beat: nobody sweeps, or it is the
    newest, the sweeper's deputy. The sweeper too: it may not know that it is the sweeper, if the answer to its try was
    lost.

    Commits without waiting for the disk. If a crash of Postgres loses a beat, another beat follows before any worker is
    declared dead.
    """
    return first(executor.run(_BEAT, id=worker_id, schema=schema))


_LEAVE = Statement("""
UPDATE {workers} SET dead_at = now(), suspect_at = NULL, suspect_by = NULL WHERE id = %(id)s AND dead_at IS NULL""")


def leave(connections: Autocommit, worker_id: int) -> None:
    """Declare this worker gone: a worker that stopped as planned claims nothing any more.

    Unlike a worker that another declared dead, it was never a suspect.
    """
    connections.run(_LEAVE, id=worker_id)


_FORGET = Statement("""
DELETE FROM {workers} w WHERE w.dead_at IS NOT NULL
  AND NOT EXISTS (SELECT FROM {messages} m WHERE m.locked_by = w.id) RETURNING w.id""")


def forget_dead(connections: Autocommit) -> int:
    """Remove dead workers that hold no runs any more; reads the whole of `messages` if there is a dead worker."""
    return len(connections.run(_FORGET))


LOSS_KIND = (
    f"CASE w.suspect_by WHEN 'lock' THEN '{LossKind.DISCONNECTED}' WHEN 'silence' THEN '{LossKind.SILENT}' "
    f"ELSE '{LossKind.UNKNOWN}' END"
)
"""Why runs of a dead worker `w` were lost, as SQL."""
SILENT_S = "round(extract(epoch FROM coalesce(w.dead_at, now()) - w.beat_at)::numeric, 1)::double precision"
"""Seconds for which a worker `w` sent no heartbeat until it was declared dead, as SQL."""

_LIVENESS = Statement(f"""
SELECT w.id, w.beat_at, w.suspect_at, w.suspect_by, w.dead_at,
  CASE WHEN w.locked AND w.dead_at IS NULL
    THEN pg_try_advisory_xact_lock({_lock_of("w.id")}) ELSE false END AS lock_free,
  w.beat_at < now() - make_interval(secs => %(silence_s)s) AS silent,
  now() - pg_postmaster_start_time() < interval '10 s' AS restarted
FROM {{workers}} w ORDER BY w.id""")


def liveness(connections: Autocommit, *, schema: str, silence_s: float) -> Sequence[Any]:
    """Read the state of every worker: whether its lock is free, and whether it is silent, suspected or dead."""
    return connections.run(_LIVENESS, schema=schema, silence_s=silence_s)


_SUSPECT = Statement("""
UPDATE {workers} SET suspect_at = clock_timestamp(), suspect_by = %(by)s
WHERE id = %(id)s AND beat_at = %(seen)s AND suspect_at IS NULL AND dead_at IS NULL RETURNING id""")


def suspect(connections: Autocommit, worker_id: int, *, by: str, seen: Any) -> bool:
    """Suspect a worker whose last beat is still `seen`; its next beat clears the suspicion."""
    return bool(connections.run(_SUSPECT, id=worker_id, by=by, seen=seen))


_DECLARE_DEAD = Statement("""
UPDATE {workers} SET dead_at = now()
WHERE id = %(id)s AND dead_at IS NULL AND beat_at < suspect_at
  AND suspect_at < now() - make_interval(secs =>
    CASE suspect_by WHEN 'lock' THEN %(lock_grace_s)s::double precision ELSE %(silence_s)s::double precision END)
RETURNING id""")


def declare_dead(connections: Autocommit, worker_id: int, *, lock_grace_s: float, silence_s: float) -> bool:
    """Declare a suspected worker dead if it has not beaten since, irrevocably; only then may its runs be rescued."""
    return bool(connections.run(_DECLARE_DEAD, id=worker_id, lock_grace_s=lock_grace_s, silence_s=silence_s))


_HOLD_LEASE = Statement(f"""
UPDATE {{leases}} SET holder = %(worker_id)s, expires_at = now() + make_interval(secs => %(lease_s)s)
FROM (SELECT set_config('synchronous_commit', 'off', true)) AS soon
WHERE name = 'sweeper' AND (holder = %(worker_id)s OR expires_at < now() OR holder IS NULL
  OR EXISTS (SELECT FROM {{workers}} w WHERE w.id = holder AND (w.dead_at IS NOT NULL OR w.locked
       AND pg_try_advisory_xact_lock({_lock_of("w.id")}))))
RETURNING EXISTS (SELECT FROM {{schedules}} s WHERE s.due_at IS NOT NULL) AS has_schedules,
  EXISTS (SELECT FROM {{batches}} b WHERE b.ended_at IS NULL) AS has_batches""")


def hold_sweeper_lease(executor: Transaction, worker_id: int, *, schema: str, lease_s: float) -> Any | None:
    """Become or stay the only sweeper of the schema: (has_schedules, has_batches), None if another worker is.

    A sweeper whose liveness lock is free is replaced at once: two sweepers at a time are wasteful, never wrong.
    `has_schedules`: some schedule has a time to come; `has_batches`: some batch has not ended.
    """
    return first(executor.run(_HOLD_LEASE, worker_id=worker_id, schema=schema, lease_s=lease_s))


_DROP_LEASE = Statement(
    "UPDATE {leases} SET holder = NULL, expires_at = now() WHERE name = 'sweeper' AND holder = %(id)s"
)


def drop_sweeper_lease(connections: Autocommit, worker_id: int) -> None:
    """Let another worker sweep at once."""
    connections.run(_DROP_LEASE, id=worker_id)


_LIST = Statement(f"""
SELECT w.id, w.ident, w.broker, w.locked, w.started_at, w.beat_at, w.suspect_at, w.dead_at,
  CASE WHEN w.dead_at IS NULL AND (
      w.beat_at < now() - make_interval(secs => %(silence_s)s)
      OR w.locked AND w.beat_at < now() - make_interval(secs => %(missed_s)s) AND NOT EXISTS (
        SELECT FROM pg_locks l
        WHERE l.locktype = 'advisory' AND l.classid = {LOCK_CLASS}::oid AND l.objsubid = 2 AND l.granted
          AND l.objid = (hashtext(%(schema)s) # w.id::int)::oid
          AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())))
    THEN extract(epoch FROM now() - w.beat_at)::double precision END AS silent_s
FROM {{workers}} w ORDER BY w.id""")


def list_all(executor: Reader, settings: Settings) -> Sequence[Any]:
    """Read every known worker, with the seconds for which it has been silent (`silent_s`), or None.

    Only for observers: no decision follows from it, and unlike `liveness` it tries no lock. A worker is
    silent after half a lease without a beat, as for the sweeper, or if its lock is free and a beat is missed.
    """
    return executor.run(
        _LIST,
        silence_s=settings.lease / 2,
        missed_s=settings.heartbeat_interval + settings.lock_grace,
        schema=settings.schema,
    )


_PRESENT = Statement("""
SELECT w.id, w.ident, w.started_at, w.beat_at, coalesce(s.queues, ARRAY[]::text[]) AS queues
FROM {workers} w LEFT JOIN {served} s ON s.worker_id = w.id WHERE w.dead_at IS NULL ORDER BY w.id""")
_RUNNING = Statement("""
SELECT w.id AS worker_id, m.job_id, m.task_id, m.locked_at AS began_at,
  coalesce(m.task, (SELECT j.task FROM {jobs} j WHERE j.id = m.job_id)) AS task,
  extract(epoch FROM now() - m.locked_at)::double precision AS lasts_s
FROM unnest(%(ids)s::bigint[]) AS w(id) CROSS JOIN LATERAL (
  SELECT m.job_id, m.task_id, m.task, m.locked_at FROM {messages} m WHERE m.locked_by = w.id
  ORDER BY m.locked_by, m.locked_at LIMIT %(limit)s) m
ORDER BY w.id, m.locked_at""")
MOST_RUNNING = 1000
"""The most runs of a worker that are shown."""


def present(executor: Reader) -> Sequence[Any]:
    """Read the workers that were not declared dead and have not stopped, with the queues that they serve."""
    return executor.run(_PRESENT)


def running(executor: Reader, ids: Sequence[int]) -> Sequence[Any]:
    """Read the runs of workers: (worker_id, job_id, task_id, began_at, task, lasts_s), each worker's oldest first."""
    return executor.run(_RUNNING, ids=list(ids), limit=MOST_RUNNING)


def silent(executor: Reader, settings: Settings) -> list[int]:
    """Read the workers that are silent by the rule of `list_all`."""
    return [row.id for row in list_all(executor, settings) if row.silent_s is not None]
