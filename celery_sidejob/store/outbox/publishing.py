"""A row on its way into the broker: reserved by a sweeper, given up again, or marked as published."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...model.status import Gate
from ..statement import Autocommit, Frequent, Statement, Transaction
from .arming import DUE
from .kinds import BY_TASK_ID, JOBS, KINDS, SOON, TASKS, Kind, free, parameters

LONGEST_CHECK_S = 6 * 3600.0
RESERVE_S = 10.0
"""Seconds that a sweeper has to publish a page of messages that it reserved, before another sweeper may."""

_MARK = {
    kind: Frequent(
        free(
            kind.given,
            f"""{kind.is_given} AND m.published_at IS NULL AND m.locked_by IS NULL AND m.doom IS NULL
      AND m.suspected_at IS NULL AND m.gate = {Gate.OPEN} AND m.next_check_at + interval '0 s' > now()
      AND (%(again)s::boolean OR m.on_lost IS NULL)""",
            of_row=f"m.task_id, {SOON}",
        )
        + """
UPDATE {messages} m SET published_at = now(), next_check_at = greatest(m.due_at, now()) + m.check_interval
FROM free WHERE m.task_id = free.task_id""",
    )
    for kind in KINDS
}


def mark_published(
    executor: Transaction, kind: Kind, published: Iterable[tuple[str | int, int]], *, again: bool = True
) -> None:
    """Mark the rows whose messages the broker has; a later generation is not touched.

    A mark that is lost in a crash of Postgres costs one more publication, so the commit does not wait for the disk.
    Four kinds of rows are not marked. One is already missing: the process that had received its message died before
    this mark was written, and the message must be sent again. One waits at the gate of its managed queue by now: its
    message has come and gone. One is due to be published, as it is when it was let in at that gate: it would not be.
    One was begun and lost by a run meanwhile (a lock sets `on_lost`): the mark is for the message that this run had. It
    is marked if the sweeper published it `again`.
    """
    executor.run(_MARK[kind], **parameters(published), again=again)


def _reserve(condition: str, *, missing: str, fate: str, columns: str) -> Statement:
    return Statement(
        free(
            BY_TASK_ID,
            f"m.task_id = r.task_id AND m.locked_by IS NULL AND m.next_check_at <= now() AND {condition}",
            columns=f"found.task_id, {missing} AS missing, {fate} AS fate",
            of_row="m.task_id, m.suspected_at, m.declined_at, m.doom, m.expires_at, m.published_at, m.gate",
        )
        + f"""
UPDATE {{messages}} m SET
  next_check_at = now() + make_interval(secs => CASE free.fate WHEN 'strike'
    THEN %(strike_s)s::double precision ELSE {RESERVE_S}::double precision END),
  suspected_at = CASE free.fate WHEN 'strike' THEN now() END,
  published_at = CASE free.fate WHEN 'strike' THEN m.published_at END,
  doom = CASE free.fate WHEN 'expired' THEN 'expired' ELSE m.doom END,
  check_interval = CASE WHEN free.fate = 'publish' AND free.missing
    THEN least(m.check_interval * 2::double precision, make_interval(secs => {LONGEST_CHECK_S}))
    ELSE m.check_interval END
FROM free WHERE m.task_id = free.task_id
RETURNING free.fate, free.missing, m.task_id, m.queue, {columns}"""
    )


# A missing job is published again at once, because the claim drops a copy; a durable task is struck twice. A job is
# never published before its backoff has ended. A durable task is published a moment before its eta, to give a worker
# time to fetch it. If it is due for a check while it is parked, no worker has known it for too long.
_RESERVE = {
    JOBS: _reserve(
        DUE,
        missing="found.published_at IS NOT NULL",
        fate="'publish'",
        columns="""m.job_id, m.for_run, m.publication,
  (SELECT j.task FROM {jobs} j WHERE j.id = m.job_id) AS task,
  (SELECT j.priority FROM {jobs} j WHERE j.id = m.job_id) AS priority,
  (SELECT a.options::text FROM {askings} a WHERE a.task_id = m.task_id) AS options""",
    ),
    TASKS: _reserve(
        "m.body IS NOT NULL",
        missing="(found.suspected_at IS NOT NULL AND found.declined_at IS NULL)",
        fate=f"""CASE WHEN found.doom IS NOT NULL THEN found.doom WHEN found.expires_at < now() THEN 'expired'
      WHEN found.gate = {Gate.WORKER} THEN 'unknown'
      WHEN found.published_at IS NOT NULL AND found.suspected_at IS NULL THEN 'strike' ELSE 'publish' END""",
        columns="""m.task, m.generation, m.expires_at, m.losses, m.last_loss::text AS last_loss, m.on_lost,
  CASE WHEN free.fate <> 'strike' THEN m.publication END AS publication,
  CASE WHEN free.fate <> 'strike' THEN m.body END AS body""",
    ),
}


def reserve(executor: Transaction, kind: Kind, task_ids: Sequence[str], *, strike_s: float = 0.0) -> Sequence[Any]:
    """Judge due rows, and reserve those to be published or buried for `RESERVE_S` seconds.

    No row lock is held while they are published or buried. If this process dies meanwhile, the next sweeper takes them.
    The message of a durable task that was published and then silent is struck twice: the first check only suspects it,
    and it is checked again after `strike_s` seconds.
    """
    return executor.run(_RESERVE[kind], task_ids=list(task_ids), strike_s=strike_s)


_GIVE_UP = Statement("""
UPDATE {messages} SET next_check_at = now() + make_interval(secs => %(wait_s)s)
WHERE task_id = ANY(%(task_ids)s::text[]) AND published_at IS NULL AND locked_by IS NULL""")


def give_up(connections: Autocommit, task_ids: Iterable[str], *, wait_s: float) -> None:
    """Have reserved rows that were neither published nor buried checked again in `wait_s` seconds."""
    connections.run(_GIVE_UP, task_ids=list(task_ids), wait_s=wait_s)
