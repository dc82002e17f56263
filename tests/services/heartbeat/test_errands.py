"""Errands: one after the other, and none waits for rows that somebody's transaction has locked for another."""

from __future__ import annotations

import pytest

from celery_sidejob.model.errors import StoreUnavailableError
from celery_sidejob.services.heartbeat.worker import Errands
from celery_sidejob.store.errors import RowsLocked


def test_an_errand_whose_rows_are_locked_waits_behind_the_others() -> None:
    errands, done, locked = Errands(), [], {1, 3}

    def errand(number: int) -> None:
        if number in locked:
            raise RowsLocked("locked")
        done.append(number)

    for number in range(5):
        errands.soon(lambda number=number: errand(number))
    with pytest.raises(RowsLocked):
        errands.run_once()
    assert done == [0, 2, 4]
    locked.clear()
    assert errands.run_once() == 2
    assert (sorted(done), errands.waiting) == ([0, 1, 2, 3, 4], False)


def test_errands_stay_in_line_while_the_store_is_away() -> None:
    errands, tried = Errands(), []

    def errand(number: int) -> None:
        tried.append(number)
        raise StoreUnavailableError("away")

    for number in range(2):
        errands.soon(lambda number=number: errand(number))
    with pytest.raises(StoreUnavailableError):
        errands.run_once()
    assert tried == [0]
