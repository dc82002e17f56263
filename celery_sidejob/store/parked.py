"""Messages that workers have declined, because they do not know the task or cannot read the message.

A message whose task no worker of its queue knows is **parked**: nothing publishes it at this gate, and no claim takes
it. A worker that comes to know the task releases it. Parking a message and recording what a worker serves exclude each
other (`take_turn`), so neither overlooks what the other has just committed. A transaction that changes both rows of a
job locks the message first. A message that another worker may run is sent again (`send_again`).

A durable task goes to the dead set after `PATIENCE_S`; a job waits. `declined_at` is the beginning of that wait: for a
parked task, for a parked job that is terminated (its termination), and for a message that is sent again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..model.status import Gate
from . import advisory
from .outbox.arming import DUE, OWED, UNCHECKED
from .outbox.kinds import JOBS, TASKS, Kind
from .statement import Autocommit, Reader, Statement, Transaction, first

LOCK_CLASS = 0x53_4A_50_4B - 0x40_00_00_00
"""The first half of the advisory lock's key ("SJPK", made to fit as `workers.LOCK_CLASS` is)."""

SHUTDOWN_WAITS_S = 60.0
"""How long a parked job that is terminated waits for a worker to run its shutdown, in seconds."""
PATIENCE_S = 86_400.0
"""How long a durable task waits for a worker that can run it, before it goes to the dead set, in seconds."""
PATIENCE = f"{PATIENCE_S / 3600:.0f} hours"


def take_turn(executor: Transaction) -> None:
    """Wait until no other transaction parks messages or records served tasks; later reads see its changes."""
    advisory.take(executor, LOCK_CLASS, [advisory.ONE])


IS_PARKED = f"m.gate = {Gate.WORKER}"
"""The condition that a message `m` is parked, as SQL."""
_OWED = {
    kind: f"""m.{kind.key} = %(key)s::{kind.types[0]} AND m.{kind.generation} = %(generation)s::{kind.types[1]}
    AND m.locked_by IS NULL AND m.doom IS NULL AND {owed}"""
    for kind, owed in {JOBS: DUE, TASKS: f"{OWED} AND m.task = %(task)s::text"}.items()
}
"""The condition, as SQL, that the received message `m` may begin; a task's message may come before its `eta`."""
_PATIENCE_ENDS = f"least(now() + make_interval(secs => {PATIENCE_S}), m.expires_at)"
_PARK = {
    kind: Statement(f"""
UPDATE {{messages}} m SET gate = {Gate.WORKER}, published_at = NULL, suspected_at = now(), next_check_at = {until},
  declined_at = {since}
FROM {job}
WHERE {_OWED[kind]} AND j.task = %(task)s::text AND NOT EXISTS (
    SELECT FROM {{served}} s JOIN {{workers}} w ON w.id = s.worker_id
    WHERE w.dead_at IS NULL AND m.queue = ANY(s.queues) AND %(task)s::text = ANY(s.tasks))
RETURNING m.queue, j.status = 'terminating' AS terminating""")
    for kind, job, until, since in (
        (JOBS, "{jobs} j", UNCHECKED, "CASE WHEN j.status = 'terminating' THEN now() END"),
        (TASKS, "(SELECT %(task)s::text AS task, ''::text AS status) j", _PATIENCE_ENDS, "now()"),
    )
}


def park(executor: Transaction, kind: Kind, key: tuple[Any, int], *, task: str) -> Any | None:
    """Park a message whose run is owed now, unless a live worker of its queue knows the task; after `take_turn`.

    Returns (queue, terminating); None if it was not parked: a worker knows the task, the run has begun, or the received
    message is stale.
    """
    return first(executor.run(_PARK[kind], key=key[0], generation=key[1], task=task))


_LONGEST = "make_interval(secs => 6::double precision * %(longest_s)s::double precision)"
_SEND_AGAIN = {
    kind: Statement(f"""
UPDATE {{messages}} m SET published_at = NULL, suspected_at = now(), declined_at = coalesce(m.declined_at, now()),
  next_check_at = now() + least(m.check_interval, {_LONGEST}) / 6::double precision,
  check_interval = least(m.check_interval * 2::double precision, {_LONGEST})
WHERE {_OWED[kind]}
RETURNING extract(epoch FROM m.next_check_at - now())::double precision AS wait_s,
  {given_up} AS given_up""")
    for kind, given_up in {JOBS: "false", TASKS: f"m.declined_at < now() - make_interval(secs => {PATIENCE_S})"}.items()
}


def send_again(executor: Transaction, kind: Kind, key: tuple[Any, int], *, task: str, longest_s: float) -> Any | None:
    """Have the message of a run that is still owed sent again: the worker that got it cannot run it.

    Returns in how many seconds it is sent, and whether it has been declined for too long: (wait_s, given_up). None if
    the run is not owed now. First it is sent after a sixth of the time after which a message counts as missing, then
    after twice as long each time, up to `longest_s`. A mark that this message was published comes too late
    (`publishing.mark_published`).
    """
    return first(executor.run(_SEND_AGAIN[kind], key=key[0], generation=key[1], task=task, longest_s=longest_s))


RELEASED_TOGETHER = 5_000

# Each row is looked up by its key: by the statistics nothing is parked, until a wrong deployment has parked thousands.
_RELEASE = Statement(f"""
WITH page AS MATERIALIZED (
  SELECT m.job_id, m.task_id FROM {{messages}} m
  WHERE {IS_PARKED} AND m.task = ANY(%(tasks)s::text[]) AND m.queue = ANY(%(queues)s::text[])
  UNION ALL
  SELECT m.job_id, m.task_id FROM {{messages}} m CROSS JOIN LATERAL (
    SELECT FROM {{jobs}} x WHERE x.id = m.job_id AND x.task = ANY(%(tasks)s::text[]) OFFSET 0) j
  WHERE {IS_PARKED} AND m.task IS NULL AND m.queue = ANY(%(queues)s::text[])
  LIMIT {RELEASED_TOGETHER}),
held AS MATERIALIZED (
  SELECT found.task_id FROM (SELECT * FROM page ORDER BY job_id, task_id) r CROSS JOIN LATERAL (
    SELECT m.task_id FROM {{messages}} m WHERE m.task_id = r.task_id AND m.gate + 0 = {Gate.WORKER}
    FOR UPDATE OF m) found),
released AS (
  UPDATE {{messages}} m SET gate = {Gate.OPEN}, next_check_at = now()
  WHERE m.task_id = ANY (ARRAY(SELECT task_id FROM held)) RETURNING m.task_id)
SELECT (SELECT count(*) FROM released) AS runs, (SELECT count(*) FROM page) = {RELEASED_TOGETHER} AS goes_on""")


def release(executor: Transaction, *, queues: Iterable[str], tasks: Iterable[str]) -> Any:
    """Let the runs of the next parked messages in these queues with these tasks begin; after `take_turn`.

    Returns how many `runs` these are, and whether there may be more (`goes_on`). The sweeper publishes them.
    """
    return executor.run(_RELEASE, queues=list(queues), tasks=list(tasks))[0]


_RELEASE_ONE = Statement(f"""
UPDATE {{messages}} m SET gate = {Gate.OPEN}, next_check_at = now()
WHERE m.job_id = %(job_id)s::bigint AND {IS_PARKED} RETURNING m.job_id""")


def release_one(executor: Autocommit | Transaction, job_id: int) -> bool:
    """Let a job's run begin if it is parked; returns whether it was."""
    return bool(executor.run(_RELEASE_ONE, job_id=job_id))


_TO_END = Statement(f"""
SELECT m.job_id FROM {{messages}} m JOIN {{jobs}} j ON j.id = m.job_id
WHERE {IS_PARKED} AND m.task IS NULL AND m.declined_at < now() - make_interval(secs => {SHUTDOWN_WAITS_S})
  AND j.status = 'terminating' ORDER BY m.declined_at LIMIT %(limit)s""")


def to_end(executor: Reader, *, limit: int) -> list[int]:
    """Read the parked jobs that were terminated and have waited long enough for their shutdown."""
    return [row.job_id for row in executor.run(_TO_END, limit=limit)]


_COUNT = Statement(f"""
SELECT coalesce(m.task, j.task) AS task, m.queue, count(*) AS runs
FROM {{messages}} m LEFT JOIN {{jobs}} j ON j.id = m.job_id
WHERE ({IS_PARKED} OR m.declined_at IS NOT NULL) AND m.locked_by IS NULL
GROUP BY 1, 2 ORDER BY 3 DESC, 1, 2""")


def count(executor: Reader) -> Sequence[Any]:
    """Count the messages of each (task, queue) that workers have declined, the most first; reads all of them."""
    return executor.run(_COUNT)
