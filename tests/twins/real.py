"""The side of the store: what a client does there by its name, and crashes at named instants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import psycopg
import pytest

from celery_sidejob import SideJobError
from celery_sidejob.model.crash_points import Died
from celery_sidejob.operations.hold import Hold
from celery_sidejob.operations.runs import recovery
from tests.tools.between import between_look_and_lock
from tests.tools.crash_points import arming
from tests.tools.in_process import EMPTY, Stage


class Refused(Exception):
    """A call raised this error of the package, and did nothing."""


def crash() -> None:
    """Die here: nothing of the package may do anything more for this run, or for this call."""
    raise Died


class RealTwin:
    """Does with the store what a model does in memory. Its methods are the calls of clients."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    @contextmanager
    def armed(self) -> Iterator[Self]:
        """Within the block crashes and calls in between can be had."""
        with pytest.MonkeyPatch.context() as patch, arming() as self.at:
            self.between = between_look_and_lock(patch, self.stage.outside)
            yield self

    def look(self) -> Any:
        """Return what is to be seen of the store."""
        raise NotImplementedError

    def empty(self) -> None:
        """Leave nothing of an earlier walk."""
        self.stage.sql(EMPTY)

    def do(self, name: str, *given: Any, **options: Any) -> Any:
        """Do one of the calls by its name; raises Refused for an error of the package."""
        try:
            return getattr(self, name)(*given, **options)
        except SideJobError as error:
            raise Refused(type(error).__name__) from error

    @contextmanager
    def transaction(self, commits: bool) -> Iterator[psycopg.Connection[Any]]:
        """A transaction of the caller's own, of whose commit nobody is told."""
        with self.stage.connect(autocommit=False) as connection:
            yield connection
            if not commits:
                connection.rollback()

    def lose(self, hold: Hold) -> bool:
        """Declare a run's worker dead, and rescue the run, if it is still its job's current one."""
        self.stage.declare_dead(hold.worker_id)
        # A connection that the body had open may hold the job for a moment more.
        return recovery.rescue(self.stage.runtime, hold.job_id, run_no=hold.run_no, worker_id=hold.worker_id, wait=True)
