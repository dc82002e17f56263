"""What must be true of a store: at every instant, and once everything is quiet.

`violations` may be asked at any time, also while workers run; `unfinished` names what is still going on; `wait_quiet`
waits for its end and says what did not come to rest.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from tests.tools.databases import Eye
from tests.tools.in_process import RULES

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


def violations(eye: Eye, *, at_rest: bool = False) -> list[str]:
    """Return the rules that are broken, each with the ids of up to five rows; none if all is well."""
    found = _rows(eye, {**ALWAYS, **(AT_REST if at_rest else {})}, most=6)
    return [f"{rule}: not so for {ids[:5]}{' …' if len(ids) > 5 else ''}" for rule, ids in found.items()]


def unfinished(eye: Eye) -> dict[str, list[str]]:
    """Return the rows of what is still going on, {kind: rows}; empty when everything is quiet."""
    return _rows(eye, UNFINISHED)


def wait_quiet(eye: Eye, timeout: float) -> float:
    """Return after how many seconds everything was quiet; NotQuietError with what was not after `timeout`.

    Meanwhile the rules that always hold are looked at again and again.
    """
    begun = time.monotonic()
    while True:
        broken = violations(eye)
        assert broken == [], broken
        left = unfinished(eye)
        waited = time.monotonic() - begun
        if not left:
            return waited
        if waited > timeout:
            raise NotQuietError(f"not quiet within {timeout:g} s: {left}")
        time.sleep(0.05)


def _rows(eye: Eye, statements: Mapping[str, str], most: int | None = None) -> dict[str, list[str]]:
    """The rows of each statement, from one snapshot: a store may move from one good state to another at any time."""
    limit = "" if most is None else f"LIMIT {most}"
    each = (f"SELECT %s::text, ARRAY(SELECT row::text FROM ({one} {limit}) row)" for one in statements.values())
    return {what: rows for what, rows in eye.rows(" UNION ALL ".join(each), *statements) if rows}
