"""Statuses, and what may be done from each. `tests/test_lifecycle_page.py` compares the moves with the page on them."""

from __future__ import annotations

from celery_sidejob.model.status import ASKABLE, FINISHED, MOVES, UNFINISHED, Status


def test_every_status_has_its_moves():
    assert set(MOVES) == {None, *Status}


def test_finished_is_what_wait_waits_for():
    assert {"completed", "failed", "terminated"} == FINISHED


def test_a_run_may_be_asked_for_without_force_from_these():
    assert {"queued", "running", "suspended", "completed"} == ASKABLE


def test_a_status_is_finished_or_not():
    assert {"queued", "running", "suspended", "terminating"} <= set(UNFINISHED)
    assert FINISHED | set(UNFINISHED) == set(Status)


def test_a_status_is_its_word():
    assert str(Status.QUEUED) == "queued" == Status("queued")
