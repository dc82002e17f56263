"""Whether a run of a job is owed now is decided in one text."""

from __future__ import annotations

import re

from celery_sidejob.store.outbox.arming import armed
from tests.tools.statements import statements

INSERTS_A_DOORBELL = re.compile(r"INSERT INTO \{messages\}[^(]*\([^)]*\bjob_id\b")
GATE = "WHERE j.unit_no IS NULL"


def test_every_statement_that_arms_a_job_contains_the_one_text() -> None:
    """So a later condition needs no second place: no other statement writes the row of a run that is owed."""
    arming = {where: one.text for where, one in statements().items() if INSERTS_A_DOORBELL.search(one.text)}

    names = {
        "asks._ASK",
        "asks._TERMINATE",
        "dependencies._FREE",
        "jobs._INSERT",
        "jobs._INSERT_ONE",
        "jobs._MOVE",
        "outbox.arming._REARM",
    }
    assert arming.keys() == names | {f"{name}, in the broker" for name in names}
    assert GATE in armed("jobs j", task_id="'x'", opens_at=None)
    assert all(text.count("armed AS (") == text.count(GATE) == 1 for text in arming.values())
