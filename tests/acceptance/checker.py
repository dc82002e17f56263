"""What must be true of a store: at every instant, and once everything is quiet.

`violations` may be asked at any time, also while workers run; `unfinished` names what is still going on; `wait_quiet`
waits for its end and says what did not come to rest.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import psycopg

from tests.tools.databases import SCHEMA
from tests.tools.in_process import RULES
from tests.tools.pgbouncer import direct

ALWAYS: Mapping[str, str] = {
    **RULES,
    "a run in progress is of a worker that is known": """
        SELECT id FROM jobs j
        WHERE unit_no IS NOT NULL AND NOT EXISTS (SELECT FROM workers w WHERE w.id = j.worker_id)""",
    "a terminated job has nothing below it that was made later": """
        SELECT c.id FROM jobs c JOIN jobs p ON p.id = c.parent_id
        WHERE p.status = 'terminated' AND c.created_at > p.ended_at""",
    "a packet is taken for a run that there was": """
        SELECT p.id FROM packets p LEFT JOIN jobs t ON t.id = p.taken_by
        WHERE p.taken_by IS NOT NULL AND t.id IS NOT NULL AND t.run_no < p.taken_run""",
}
"""True of every committed state."""

AT_REST: Mapping[str, str] = {
    "no packet stays taken by a run that is over": """
        SELECT p.id FROM packets p JOIN jobs t ON t.id = p.taken_by
        WHERE t.unit_no IS NULL OR t.run_no <> p.taken_run""",
    "no result waits for the backend": "SELECT task_id FROM askings WHERE closed_at IS NOT NULL AND stored_at IS NULL",
    "no asking of a job that completed, failed or was terminated is open": """
        SELECT a.task_id FROM askings a JOIN jobs j ON j.id = a.job_id
        WHERE a.closed_at IS NULL AND j.status IN ('completed', 'failed', 'terminated')""",
    "no message is left": "SELECT task_id FROM messages",
    "no timer is left": "SELECT id FROM timers WHERE due_at < now()",
    "no worker that is dead is still known": "SELECT id FROM workers WHERE dead_at < now() - interval '10 s'",
}
"""True once nothing is queued, running or terminating, and the sweeper has had its turn."""

UNFINISHED: Mapping[str, str] = {
    "jobs": "SELECT id, task, status, run_no, unit_no, worker_id, losses FROM jobs"
    " WHERE status IN ('queued', 'running', 'terminating')",
    "messages": "SELECT task_id, job_id, for_run, next_check_at::text, published_at::text, locked_by FROM messages",
    "due timers": "SELECT id, job_id, due_at::text, ask FROM timers WHERE due_at < now()",
    "unsent results": "SELECT task_id, job_id, outcome FROM askings WHERE closed_at IS NOT NULL AND stored_at IS NULL",
}


class NotQuietError(AssertionError):
    """Something did not come to rest in time."""


def violations(url: str, *, at_rest: bool = False, schema: str = SCHEMA) -> list[str]:
    """Return the rules that are broken, each with the ids of up to five rows; none if all is well."""
    found = []
    with _connect(url, schema) as connection:
        # One snapshot: between two statements a correct store may move from one good state to another.
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        for rule, statement in {**ALWAYS, **(AT_REST if at_rest else {})}.items():
            ids = [row[0] for row in connection.execute(statement).fetchall()]
            if ids:
                found.append(f"{rule}: not so for {ids[:5]}{' …' if len(ids) > 5 else ''}")
        connection.execute("COMMIT")
    return found


def unfinished(url: str, *, schema: str = SCHEMA) -> dict[str, list[tuple[Any, ...]]]:
    """Return the rows of what is still going on, {kind: rows}; empty when everything is quiet."""
    with _connect(url, schema) as connection:
        found = {kind: connection.execute(statement).fetchall() for kind, statement in UNFINISHED.items()}
    return {kind: rows for kind, rows in found.items() if rows}


def wait_quiet(url: str, timeout: float, *, schema: str = SCHEMA) -> float:
    """Return after how many seconds everything was quiet; NotQuietError with what was not after `timeout`.

    Meanwhile the rules that always hold are looked at again and again.
    """
    begun = time.monotonic()
    while True:
        broken = violations(url, schema=schema)
        assert broken == [], broken
        left = unfinished(url, schema=schema)
        waited = time.monotonic() - begun
        if not left:
            return waited
        if waited > timeout:
            raise NotQuietError(f"not quiet within {timeout:g} s: {left}")
        time.sleep(0.05)


def _connect(url: str, schema: str) -> psycopg.Connection[Any]:
    return psycopg.connect(direct(url), autocommit=True, options=f"-c search_path={schema}")
