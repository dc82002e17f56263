"""When the ends that a worker writes are due."""

from __future__ import annotations

import pytest

from celery_sidejob.services.heartbeat import run_ends
from celery_sidejob.services.heartbeat.run_ends import Page, QuietEnd, QuietEnds
from celery_sidejob.store.results import Ended, Kept


def end(name: str, *, has_result: bool) -> QuietEnd:
    """The end of a run, with a result under its name or without."""
    return QuietEnd(Ended((name, 1), Kept(name, "SUCCESS", b"1", None) if has_result else None), lambda: None)


def test_a_result_waits_for_no_other_end_unless_some_were_written_just_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_ends, "SOON_S", 3600.0)
    written: list[list[str]] = []

    def write(page: Page) -> None:
        written.append([over.run[0] for over in page.runs])
        page.over = set(written[-1])

    ends = QuietEnds("ends", write, lambda end: None, wait_s=3600.0)
    ends._written_at = -7200.0  # long ago, whenever this machine was started
    ends.add(end("plain", has_result=False))
    assert ends.run_once() == 0
    ends.add(end("busy", has_result=True))
    assert ends.run_once() == 0
    ends.add(end("first", has_result=True), waits=False)
    assert ends.run_once() == 3
    ends.add(end("second", has_result=True), waits=False)
    assert ends.run_once() == 0
    assert ends.write() == 1
    assert written == [["plain", "busy", "first"], ["second"]]
