"""Deferred writes are made by somebody, once, and in time."""

from __future__ import annotations

import os
import threading
import time
from collections import deque

import pytest

from celery_sidejob.model.errors import StoreUnavailableError
from celery_sidejob.store import write_behind
from celery_sidejob.store.write_behind import WriteBehind
from tests.tools.waiting import wait_until

NEVER_S = 3600.0


class Written(list[list[int]]):
    """Pages that were written, while the store is there."""

    away = False
    tries = 0

    @property
    def things(self) -> list[int]:
        return [thing for page in self for thing in page]

    def __call__(self, page: list[int]) -> None:
        self.tries += 1
        if self.away:
            raise StoreUnavailableError("away")
        self.append(page)


def test_a_thread_writes_what_nobody_has_carried_along() -> None:
    written = Written()
    made = WriteBehind("things", written, within_s=0.05)
    made.add([1, 2])
    made.add([3])

    wait_until(lambda: written.things == [1, 2, 3], message="all to be written")

    made.add([4])
    wait_until(lambda: written.things == [1, 2, 3, 4], message="what comes later to be written too")


def test_what_is_carried_along_is_written_by_nobody_else() -> None:
    written = Written()
    made = WriteBehind("things", written, within_s=NEVER_S)
    made.add([1, 2, 3])

    taken = made.take(2)
    assert [thing for _, thing in taken] == [1, 2]
    made.give_back(taken[1:])
    made.write_now()

    assert written == [[2, 3]]
    made.write_now()
    assert written == [[2, 3]]


def test_who_asks_for_more_writes_what_is_late() -> None:
    written = Written()
    made = WriteBehind("things", written, within_s=NEVER_S)
    made.add([1])
    made.write_if_late()
    assert written == []

    made._waiting[0] = (time.monotonic() - NEVER_S, 1)
    made.write_if_late()
    assert written == [[1]]


@pytest.mark.parametrize(("added", "pages"), [(0, 1), (1, 1), (write_behind.PAGE, 1), (write_behind.PAGE + 1, 2)])
def test_who_asks_for_more_writes_no_more_pages_than_it_adds(
    monkeypatch: pytest.MonkeyPatch, added: int, pages: int
) -> None:
    written = Written()
    made = WriteBehind("things", written, within_s=NEVER_S)
    made.add(range(write_behind.PAGE * 4))
    late = time.monotonic() + NEVER_S
    monkeypatch.setattr(write_behind.time, "monotonic", lambda: late)
    made.write_if_late(added)
    assert [len(page) for page in written] == [write_behind.PAGE] * pages


def test_who_asks_for_more_writes_one_page_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    written = Written()
    made = WriteBehind("things", written, within_s=NEVER_S)
    made.add(range(write_behind.PAGE + 1))
    late = time.monotonic() + NEVER_S
    monkeypatch.setattr(write_behind.time, "monotonic", lambda: late)
    made.write_if_late()
    assert [len(page) for page in written] == [write_behind.PAGE]
    made.write_if_late()
    assert [len(page) for page in written] == [write_behind.PAGE, 1]


class Contended(deque[tuple[float, int]]):
    """What waits, of which another publisher takes all as soon as anybody has looked at it without the lock."""

    made: WriteBehind[int]

    def __bool__(self) -> bool:
        found = len(self) > 0
        other = threading.Thread(target=self._take)
        other.start()
        other.join()
        return found

    def _take(self) -> None:
        if self.made._lock.acquire(blocking=False):
            self.clear()
            self.made._lock.release()


def test_who_asks_for_more_may_find_that_another_has_taken_it() -> None:
    """Its caller would think that it had failed, and call again what is kept."""
    written = Written()
    made = WriteBehind("things", written, within_s=NEVER_S)
    made._waiting = waiting = Contended([(time.monotonic() - NEVER_S, 1)])
    waiting.made = made

    made.write_if_late()

    assert written == [[1]]


def test_all_is_written_at_the_end_though_one_of_them_raises(caplog: pytest.LogCaptureFixture) -> None:
    def fail(things: list[int]) -> None:
        raise RuntimeError("broken")

    written = Written()
    for name, write in (("first", fail), ("things", written), ("last", fail)):
        made = WriteBehind(name, write, within_s=NEVER_S)
        made.add([1])

    write_behind.write_all_now()

    assert written == [[1]]
    assert len(caplog.records) == 2


def test_pages_are_bounded() -> None:
    written = Written()
    made = WriteBehind("things", written, within_s=NEVER_S)
    made.add(range(write_behind.PAGE + 1))

    made.write_now()

    assert [len(page) for page in written] == [write_behind.PAGE, 1]


def test_while_the_store_is_away_it_waits_as_long_as_it_may() -> None:
    patient, hasty = Written(), Written()
    patient.away = hasty.away = True
    keeping = WriteBehind("things", patient, within_s=0.01, patience_s=NEVER_S)
    keeping.add([1])
    dropping = WriteBehind("things", hasty, within_s=0.01)
    dropping.add([1])
    wait_until(lambda: patient.tries > 1 and hasty.tries > 0, message="both to try")
    wait_until(lambda: not dropping._waiting, message="the hasty one to drop it")

    patient.away = hasty.away = False

    wait_until(lambda: patient == [[1]], message="the patient one to write")
    dropping.write_now()
    assert hasty == []


def test_a_forked_process_leaves_to_its_parent_what_is_the_parent_s() -> None:
    written = Written()
    made = WriteBehind("things", written, within_s=NEVER_S)
    made.add([1])
    pid = os.fork()
    if pid == 0:
        made.forget()
        made.write_now()
        os._exit(len(written))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    made.write_now()
    assert written == [[1]]
