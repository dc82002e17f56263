"""A warm stop waits for the pool in `WorkController.stop`, where a cold stop may cut it off."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from celery.exceptions import WorkerTerminate
from celery.platforms import EX_OK
from celery.worker import WorkController

from celery_sidejob.hooks.patches import celery_worker


def test_what_cuts_off_a_warm_stop_is_told_and_goes_on(make_worker: Any) -> None:
    assert list(inspect.signature(WorkController.stop).parameters) == ["self", "in_sighandler", "exitcode"]
    worker = make_worker()
    told: list[Any] = []
    celery_worker.tell_of_cut_off(worker, told.append)

    def cut_off() -> None:
        raise WorkerTerminate(EX_OK)

    worker.pool.stop = cut_off  # as the handler of SIGQUIT does while the pool waits for its bodies
    with pytest.raises(WorkerTerminate):
        worker.run()

    assert told == [worker]


def test_a_warm_stop_that_nothing_cuts_off_is_not_told_of(make_worker: Any) -> None:
    worker = make_worker()
    told: list[Any] = []
    celery_worker.tell_of_cut_off(worker, told.append)

    worker.run()

    assert told == []
