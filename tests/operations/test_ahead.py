"""A lock that is sent before its run begins is the run's, or is given back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest

from celery_sidejob.model.durable import Address, digest_of
from celery_sidejob.operations import durable_locks
from celery_sidejob.operations.durable_runs import Run
from celery_sidejob.store import workers
from tests.tools.apps import make_app
from tests.tools.contents import content_of
from tests.tools.crash_points import Arm, lost
from tests.tools.pgbouncer import direct

POLICY: dict[str, Any] = {"pid": os.getpid(), "on_lost": "dead", "max_losses": 3}


class Shop:
    """An app that has called a task, and a worker that is to run it."""

    def __init__(self, database_url: str, redis_url: str) -> None:
        self.database_url = database_url
        self.app = make_app(
            "ahead", broker=redis_url, sidejob_database_url=database_url, sidejob_durable_tasks=["ahead.*"]
        )
        self.runtime = self.app.sidejob.runtime
        self.app.send_task("ahead.one", task_id="one")
        self.worker_id = workers.register(self.runtime.connections, f"test:{os.urandom(6).hex()}")
        self.run = Run(("one", 1), "ahead.one", self.worker_id, self.runtime, content_of(self.runtime, "one"))

    def ahead(self, **address: Any) -> durable_locks.Ahead | None:
        """Send the lock."""
        return durable_locks.begin_ahead(
            self.runtime, ("one", 1), self.run.content, Address(**address), worker_id=self.worker_id, **POLICY
        )

    def begin(self, ahead: durable_locks.Ahead | None) -> bool:
        """Begin the run."""
        return durable_locks.begin(self.runtime, self.run, is_here=False, ahead=ahead, **POLICY)

    def holder(self) -> int | None:
        """Who holds the row."""
        with closing(psycopg.connect(direct(self.database_url))) as looking:
            return looking.execute("SELECT locked_by FROM sidejob.messages WHERE task_id = 'one'").fetchone()[0]


@pytest.fixture
def shop(database_url: str, redis_url: str) -> Iterator[Shop]:
    made = Shop(database_url, redis_url)
    yield made
    made.app.sidejob.close()
    made.app.close()


@pytest.mark.parametrize("answer", ["heard", "lost"])
def test_the_run_has_what_was_locked_ahead_of_it(shop: Shop, at: Arm, answer: str) -> None:
    if answer == "lost":
        at("durable-begin:after-commit", lost)
    ahead = shop.ahead()
    assert ahead is not None

    assert shop.begin(ahead)
    durable_locks.begin_not(shop.runtime, ("one", 1), ahead)

    assert shop.holder() == shop.worker_id, "the run has taken it"
    assert not shop.begin(shop.ahead()), "a copy"


def test_what_does_not_begin_after_all_is_given_back(shop: Shop) -> None:
    ahead = shop.ahead()
    assert ahead is not None

    assert durable_locks.begin_not(shop.runtime, ("one", 1), ahead)

    assert shop.holder() is None
    assert shop.begin(None)


def test_of_a_lock_that_may_stay_the_worker_is_told(shop: Shop, at: Arm) -> None:
    """Else it would be taken to run what it has never begun, and that to be lost with it."""
    at("durable-begin:after-commit", lost)
    ahead = shop.ahead()
    assert ahead is not None

    assert not durable_locks.begin_not(shop.runtime, ("one", 1), ahead)


def test_the_lock_of_a_copy_that_does_not_begin_frees_nothing(shop: Shop) -> None:
    assert shop.begin(None)
    ahead = shop.ahead()
    assert ahead is not None

    durable_locks.begin_not(shop.runtime, ("one", 1), ahead)

    assert shop.holder() == shop.worker_id


def test_what_may_have_a_copy_is_not_locked_ahead(shop: Shop) -> None:
    assert shop.ahead(call="c1", unconfirmed=True) is None
    assert shop.ahead(store="3fa9c2d1") is None
    assert shop.holder() is None


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("forged", [{"task": "ahead.other"}, {"digest": digest_of(b"other")}], ids=["task", "body"])
def test_what_is_not_what_its_row_has_locks_nothing(shop: Shop, forged: dict[str, str], ahead: bool) -> None:
    true, shop.run.content = shop.run.content, shop.run.content._replace(**forged)
    assert not shop.begin(shop.ahead() if ahead else None)
    assert shop.holder() is None

    shop.run.content = true
    assert shop.begin(shop.ahead() if ahead else None)
    assert shop.holder() == shop.worker_id
