"""Where the store is Celery's broker as well: the references to rows of `messages` that wait in the broker's queues.

A message is not sent there beside its row. The transaction that keeps or arms the row also puts a reference to it into
the row's queue, a row of `broker_messages` with `task_id` and `generation`; a worker that fetches the reference gets
the message that the row has. So no row waits without a reference, and none is missing when a process dies. A reference
is a copy of a message like any other, and harmless: of a generation that is over it leads to nothing.

A row has a `priority` if its message goes to the row's own queue. Other messages go where an exchange leads them, and
are published like those for any broker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...model.durable import Message
from ...model.status import Gate
from ..broker.messages import COUNTED
from ..statement import Reader, Statement, Transaction, arrays
from .kinds import JOBS, free, parameters

KEPT = "queue, priority, due_at, published_at, task_id AS refers_to, generation AS its_generation"
ARMED = "m.queue, m.priority, m.due_at, m.published_at, m.task_id AS refers_to, m.for_run AS its_generation"
"""What the CTE that wrote rows of tasks, or of jobs, returns for `referred`."""


def referred(written: str, *, again: str = "false") -> str:
    """Return the CTE that puts references to the rows of the CTE `written` into their queues.

    A row whose time has not come has its reference wait for it. A row that is not published gets none. `again`: whether
    a row may have had another reference for the same generation, as SQL.
    """
    return f"""
referred AS (
  INSERT INTO {{broker_messages}} (queue, priority, due_at, task_id, generation, again)
  SELECT w.queue, w.priority, CASE WHEN w.due_at > now() THEN w.due_at END, w.refers_to, w.its_generation, {again}
  FROM {written} w WHERE w.priority IS NOT NULL AND w.published_at IS NOT NULL)"""


def withdrawn(rows: str, condition: str = "true") -> str:
    """Return the CTE that takes back the references of rows `m` whose time has not come, and is not to come any more.

    Otherwise they would stay in the queues until then. `rows` stands behind USING.
    """
    return f"""
withdrawn AS (
  DELETE FROM {{broker_messages}} b USING {rows}
  WHERE b.task_id = m.task_id AND b.due_at > now() AND {condition})"""


def priority_of_job(priority: str) -> str:
    """Return the priority of a job's reference, from 0 to 9, as SQL; without one it has the lowest."""
    return f"greatest(0, least(9, coalesce({priority}, 0)))::smallint"


def _send(given: str, condition: str, priority: str, generation: str) -> str:
    return (
        free(
            given,
            f"{condition} AND m.locked_by IS NULL AND m.doom IS NULL AND m.gate = {Gate.OPEN}",
            columns=f"found.task_id, {priority} AS priority",
            of_row="m.task_id, m.job_id",
        )
        + f""",
sent AS (
  UPDATE {{messages}} m
  SET published_at = now(), next_check_at = greatest(m.due_at, now()) + m.check_interval, priority = free.priority
  FROM free WHERE m.task_id = free.task_id
  RETURNING m.job_id, m.queue, m.priority, m.due_at, m.published_at, m.task_id AS refers_to,
    {generation} AS its_generation),"""
        + referred("sent", again="true")
    )


_SEND_TASKS = Statement(
    _send(
        "unnest(%(task_id)s::text[], %(generation)s::int[], %(priority)s::smallint[]) "
        "AS r(task_id, generation, priority)",
        "m.task_id = r.task_id AND m.generation = r.generation",
        "r.priority",
        "m.generation",
    )
    + " SELECT FROM sent"
)
_SEND_JOBS = Statement(
    _send(
        JOBS.given,
        JOBS.is_given,
        f"(SELECT {priority_of_job('j.priority')} FROM {{jobs}} j WHERE j.id = found.job_id)",
        "m.for_run",
    )
    + " SELECT s.job_id FROM sent s"
)


def send_tasks(executor: Transaction, messages: Sequence[Message]) -> None:
    """Put references to kept messages, each with a priority, into their queues: their rows are published then.

    Rows that a run holds, doomed ones, those at a gate and those of later generations stay as they are.
    """
    executor.run(_SEND_TASKS, **arrays(messages, "task_id", "generation", "priority"))


def send_jobs(executor: Transaction, runs: Iterable[tuple[int, int]]) -> set[int]:
    """Put references to the messages of jobs, {(id, run number)}, into their queues; return the ids of those jobs."""
    return {row.job_id for row in executor.run(_SEND_JOBS, **parameters(runs))}


_WAITING = Statement("""
SELECT DISTINCT b.task_id FROM {broker_messages} b WHERE b.task_id = ANY(%(task_ids)s::text[])""")


def waiting(executor: Reader, task_ids: Sequence[str]) -> set[str]:
    """Read which of these rows have a reference in a queue, fetched or not."""
    return {row.task_id for row in executor.run(_WAITING, task_ids=list(task_ids))}


_COUNT = Statement("""
SELECT count(*) AS rows FROM (
  SELECT FROM {broker_messages} b WHERE b.task_id IS NOT NULL LIMIT %(counted)s) AS few""")


def count(executor: Reader) -> int:
    """Count references, fetched or not, up to `COUNTED`."""
    return int(executor.run(_COUNT, counted=COUNTED)[0].rows)
