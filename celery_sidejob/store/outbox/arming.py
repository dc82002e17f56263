"""Arming the row of a job: the one place that decides whether a run is owed now. And the end of durable tasks' runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...model.status import Gate
from ..statement import Statement, Transaction
from .references import ARMED, priority_of_job, referred

FIRST_CHECK_S = 2.0
"""How long a fresh row may stay unpublished before the sweeper publishes it."""

OWED = f"m.gate <= {Gate.QUEUE}"
"""The condition that the run of a message `m` is owed once it is due, as SQL."""
DUE = f"m.due_at <= now() AND {OWED}"
"""The condition that the run of a message `m` is owed now, as SQL."""
LATER = f"(m.due_at > now() OR m.gate > {Gate.QUEUE})"
"""The condition that it is not, as SQL."""

UNCHECKED = "'infinity'::timestamptz"
"""The `next_check_at` of a message that nobody has to look for: a run holds it, or it waits at a gate."""

MANAGED = "SELECT FROM {queues} q WHERE q.name = m.queue"
"""The settings of the queue of a message `m`, as SQL: there are none if nobody manages it."""

UNLOCKED = "locked_by = NULL, locked_at = NULL, locked_pid = NULL"
"""Assignments that free a row whose message stays after a run."""

OPENS_AT = "CASE WHEN j.status <> 'terminating' AND NOT j.rate_terminates THEN j.rate_opens_at END"
"""The moment from which its rate lets the next run of a job begin, as SQL; NULL if nothing is to be waited for.

A job that a run beyond its rate terminates waits for nothing, nor does a shutdown.
"""


def armed(
    jobs: str,
    *,
    task_id: str,
    opens_at: str | None,
    cut_short: str | None = "false",
    wait_s: str = "0::double precision",
    losses: str = "0",
    first_check_s: str = f"{FIRST_CHECK_S}",
    slot: str = "NULL::smallint",
    waits: str = "j.status <> 'terminating'",
    blocked: str = "j.blocked",
    anew: str = "false",
) -> str:
    """Return the CTE `armed`: the row of each of these jobs says when its next run is owed.

    Every statement that makes a run owed contains this CTE (a new job, an ask, a termination, the end or the loss of a
    run), and thereby arms the row in the transaction that changes the job. Nothing else arms a row. A job whose run is
    in progress is not armed: the end of that run arms it.

    **When a run is owed is decided here**, by the row's `due_at` and `gate`. It is due now, after a backoff, or once
    the job's rate allows it. A job that waits for others is `blocked`: at this gate the run is not published, and no
    claim takes it. When the last of them has ended, this CTE decides anew. What a queue as a whole forbids (a pause, a
    limit, a rate) is no condition of a row: the claim looks for it (`permits.py`).

    A row of a capacity pool without a slot waits for one, unless it is a shutdown's; the triggers of `messages` admit
    it at the commit if there is room, and otherwise when a slot is freed. A job that has come into another pool leaves
    its slot, which the same triggers free.

    In a managed queue the row gets a `rank`, by which the claim finds the best. A queue that is not managed has no
    settings, and its rows have no rank.

    A job has one row. A row that a run held turns into the row of the next run. A row that is already armed stays
    unchanged; with `cut_short` its time is decided anew. With `anew` it is armed like one that a run held: the job
    was moved. With None for `cut_short` the jobs are new and have no row: looking for one makes the insert of a
    thousand jobs a quarter slower.

    All arguments are SQL. `jobs` stands behind FROM and has the columns id, queue, priority, limit_key, run_no,
    unit_no, blocked, pool, pool_weight and pool_runs of each job as `j`; `opens_at` is `OPENS_AT`, or None where no
    rate can delay the run; `wait_s` is the backoff, `losses` are added to those of the row; `slot` is the shard in
    which a new job was admitted, `waits` tells whether it waits for one, and `blocked` whether it waits for jobs. A row
    that is due now is checked after `first_check_s`. The statement takes the parameter `check_interval_s`. The CTE
    returns (task_id, job_id, for_run); the caller publishes the message after the commit. A row that is not due yet has
    None for task_id and for_run: the sweeper publishes it in time. Where the store is the broker, the statement itself
    publishes all of them.
    """
    owed_at = f"now() + make_interval(secs => {wait_s})"
    if opens_at is not None:
        owed_at = f"greatest({owed_at}, {opens_at})"
    waits = f"j.pool IS NOT NULL AND {slot} IS NULL AND {waits}"
    blocked = f"{blocked} IS TRUE"
    first_check = f"""now() + make_interval(secs => {first_check_s}::double precision)
      /*!+ make_interval(secs => %(check_interval_s)s)*/"""

    def check_of(at: str) -> str:
        # A row that is due before its first check passes for one whose message is under way.
        later = f"{at}/*!+ make_interval(secs => %(check_interval_s)s)*/"
        return f"CASE WHEN {at} > now() THEN {later} ELSE {first_check} END"

    keeps_slot = f"""m.pool = excluded.pool AND m.pool_shard IS NOT NULL
          AND (m.pool_runs IS NOT TRUE OR m.locked_by IS NULL) AND excluded.gate = {Gate.POOL}"""
    turned = f"""
  ON CONFLICT (job_id) DO UPDATE
    SET task_id = excluded.task_id, for_run = excluded.for_run, queue = excluded.queue,
      due_at = excluded.due_at, gate = CASE WHEN {keeps_slot} THEN {Gate.OPEN} ELSE excluded.gate END,
      next_check_at = CASE WHEN {keeps_slot} THEN {check_of("excluded.due_at")} ELSE excluded.next_check_at END,
      check_interval = excluded.check_interval, losses = m.losses + excluded.losses,
      published_at = coalesce(excluded.published_at/*!, CASE WHEN {keeps_slot} THEN now() END*/), suspected_at = NULL,
      rank = excluded.rank, limit_key = excluded.limit_key, pool = excluded.pool, pool_weight = excluded.pool_weight,
      pool_rank = excluded.pool_rank, pool_runs = excluded.pool_runs,
      pool_shard = CASE WHEN m.pool = excluded.pool THEN m.pool_shard END, {UNLOCKED}
      /*!, priority = excluded.priority*/
    WHERE {anew} OR m.locked_by IS NOT NULL OR {cut_short} AND {LATER}"""
    return f"""
armed AS (
  INSERT INTO {{messages}} AS m (task_id, job_id, for_run, queue, due_at, gate, next_check_at, check_interval, losses,
    rank, limit_key, pool, pool_weight, pool_rank, pool_runs, pool_shard/*!, priority, published_at*/)
  SELECT {task_id}, j.id, j.run_no + 1, j.queue, owed.at, owed.gate,
    CASE WHEN owed.gate = {Gate.OPEN} THEN {check_of("owed.at")} ELSE {UNCHECKED} END,
    make_interval(secs => %(check_interval_s)s), {losses},
    (SELECT coalesce(j.priority, 0::smallint) FROM {{queues}} q WHERE q.name = j.queue), j.limit_key,
    j.pool, j.pool_weight, CASE WHEN j.pool IS NOT NULL THEN coalesce(j.priority, 0::smallint) END,
    j.pool_runs, {slot}
    /*!, {priority_of_job("j.priority")}, CASE WHEN owed.gate = {Gate.OPEN} THEN now() END*/
  FROM {jobs} CROSS JOIN LATERAL (
    SELECT {owed_at} AS at, CASE WHEN {blocked} THEN {Gate.JOBS} WHEN {waits} THEN {Gate.POOL} ELSE {Gate.OPEN} END
      AS gate) owed
  WHERE j.unit_no IS NULL{"" if cut_short is None else turned}
  RETURNING m.job_id, CASE WHEN {DUE} THEN m.task_id END AS task_id, CASE WHEN {DUE} THEN m.for_run END AS for_run
    /*!, {ARMED}*/)/*!,{referred("armed")}*/"""


_REARM = Statement(
    "WITH"
    + armed(
        "{jobs} j JOIN {messages} held ON j.id = %(id)s AND held.job_id = j.id",
        task_id="coalesce(%(task_id)s, held.task_id)",
        opens_at=OPENS_AT,
        wait_s="%(wait_s)s::double precision",
        losses="CASE WHEN %(takes)s THEN 1 ELSE 0 END",
    )
    + """
SELECT armed.task_id, armed.for_run, a.options::text AS options
FROM armed LEFT JOIN {askings} a ON a.task_id = armed.task_id"""
)


def rearm(
    executor: Transaction,
    job_id: int,
    *,
    check_interval_s: float,
    task_id: str | None = None,
    wait_s: float = 0,
    takes: bool = False,
) -> Any:
    """Turn the row of a run that is over into the row of the next; the same task id unless one is given.

    Returns (task_id, for_run, options); the first two are None if the next run is not due yet.

    `takes`: another reader took packets that the run had read, or nobody knows whether it had begun. A job's row counts
    that as a loss. As long as the row exists, the job's runs are claimed one by one, and take the packets that they
    read.
    """
    return executor.run(
        _REARM, id=job_id, task_id=task_id, wait_s=float(wait_s), check_interval_s=check_interval_s, takes=takes
    )[0]


class TaskEnd(NamedTuple):
    """The statement that ends runs: it unlocks or removes the rows that the runs hold."""

    statement: Statement
    parameters: Mapping[str, Any]


def end_task_runs(executor: Transaction, end: TaskEnd) -> Sequence[Any]:
    """End runs of durable tasks, and return a row for each run that still had its row.

    No other code ends such runs: the run, its worker and the sweeper call it, so code that belongs to every end goes
    into it. It is a separate function from `end_job_run`. A job's run ends under the job's lock, in a transaction of
    many statements, and the job's new status decides what follows. A single statement ends a durable task's run, or a
    thousand of them.
    """
    return executor.run(end.statement, **end.parameters)
