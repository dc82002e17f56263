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
    monkeypatch.setattr(run_ends, "WITH_OTHERS_S", 3600.0)
    written: list[list[str]] = []

    def write(page: Page) -> None:
        written.append([over.run[0] for over in page.runs])
        page.over = set(written[-1])

    ends = QuietEnds("ends", write, lambda end: None)
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


def test_the_loop_is_rung_only_for_an_end_that_is_due_before_it_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ring takes Python's lock from the thread that runs the worker: it would cost more than the end itself."""
    rings: list[str] = []
    ends = QuietEnds("ends", lambda page: None, lambda end: None)
    monkeypatch.setattr(ends._bell, "ring", lambda: rings.append("ring"))
    monkeypatch.setattr(ends._bell, "wait", lambda timeout: add("while it waits", waits=True))

    def add(name: str, *, waits: bool) -> None:
        ends.add(end(name, has_result=False), waits=waits)

    add("while it works", waits=True)
    assert rings == []
    ends.wait_s()  # until that is due
    assert rings == []
    monkeypatch.setattr(ends._bell, "wait", lambda timeout: add("at once", waits=False))
    ends.wait_s()
    assert rings == ["ring"]
    add("while it works again", waits=False)
    assert rings == ["ring"]
