"""What is written late touches its own row alone, however late that is."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from celery_sidejob import LeaseLostError
from celery_sidejob.model.durable import Death, digest_of
from celery_sidejob.operations import burials, deferred_locks, durable_ends, durable_locks
from celery_sidejob.operations.deferred_locks import LateLocks
from celery_sidejob.operations.durable_runs import Run
from celery_sidejob.store import workers
from tests.tools.apps import make_app
from tests.tools.contents import content_of
from tests.tools.pgbouncer import direct
from tests.tools.waiting import wait_until


class Shop:
    """An app that has called tasks, and a worker that runs them."""

    def __init__(self, database_url: str, redis_url: str) -> None:
        self.looking = psycopg.connect(direct(database_url), autocommit=True)
        self.app = make_app(
            "late", broker=redis_url, sidejob_database_url=database_url, sidejob_durable_tasks=["late.*"]
        )
        self.runtime = self.app.sidejob.runtime
        self.worker_id = self.worker()

    def worker(self) -> int:
        """Another worker."""
        return workers.register(self.runtime.connections, f"test:{os.urandom(6).hex()}")

    def called(self, task_id: str = "one") -> None:
        """Call a task."""
        self.app.send_task("late.one", task_id=task_id)

    def begun(self, task_id: str = "one") -> Run:
        """A run that has begun, without a lock."""
        run = Run((task_id, 1), "late.one", self.worker_id, self.runtime, content_of(self.runtime, task_id))
        assert deferred_locks.of(self.runtime).begin(run, max_losses=3)
        return run

    def begun_long_ago(self, task_id: str = "one") -> Run:
        """One whose age is well above the time that a statement takes."""
        run = self.begun(task_id)
        assert run.late is not None
        run.late.began_at -= 10
        return run

    def copy(self, task_id: str = "one", worker_id: int | None = None) -> Run | None:
        """A run of a copy, which locks at once; None if it was refused."""
        content = content_of(self.runtime, task_id)
        run = Run((task_id, 1), "late.one", worker_id or self.worker(), self.runtime, content)
        begun = durable_locks.begin(self.runtime, run, pid=1, on_lost="requeue", max_losses=3, is_here=False)
        return run if begun else None

    def rows(self) -> dict[str, int | None]:
        """Who holds what."""
        return dict(self.looking.execute("SELECT task_id, locked_by FROM sidejob.messages").fetchall())

    def bury(self, task_id: str = "one") -> None:
        """Have a task revoked that no run has locked."""
        assert burials.fail(self.runtime, (task_id, 1), Death("revoked", "E: revoked"), by="sweeper", worker_id=None)

    def dead(self) -> list[str]:
        """The ids in the dead set."""
        return [row[0] for row in self.looking.execute("SELECT task_id FROM sidejob.dead ORDER BY id")]

    def sql(self, statement: str) -> None:
        """Have something happen to the rows."""
        self.looking.execute(statement)

    @contextmanager
    def without(self, table: str) -> Iterator[None]:
        """Have a table be away for a while."""
        self.sql(f"ALTER TABLE sidejob.{table} RENAME TO away")
        try:
            yield
        finally:
            self.sql(f"ALTER TABLE sidejob.away RENAME TO {table}")

    def flush(self) -> None:
        """Write all there is."""
        deferred_locks.write_now(self.runtime)


@pytest.fixture
def shop(database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    """Nothing is written before the test says so."""
    monkeypatch.setattr(LateLocks, "_thread_wanted", lambda self: None)
    made = Shop(database_url, redis_url)
    yield made
    made.looking.close()
    made.app.sidejob.close()
    made.app.close()


def test_what_runs_is_locked_and_what_has_ended_is_removed(shop: Shop) -> None:
    shop.called("one")
    shop.called("two")
    running, ended = shop.begun("one"), shop.begun("two")
    assert shop.rows() == {"one": None, "two": None}

    deferred_locks.of(shop.runtime).end(ended)
    shop.flush()
    assert shop.rows() == {"one": shop.worker_id}
    assert shop.copy() is None

    deferred_locks.of(shop.runtime).end(running)
    shop.flush()
    assert shop.rows() == {}


def test_what_another_has_is_left_to_it(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    for task_id in ("ends", "goes on", "same worker"):
        shop.called(task_id)
    runs = {task_id: shop.begun(task_id) for task_id in shop.rows()}
    copies = {
        task_id: shop.copy(task_id, shop.worker_id if task_id == "same worker" else None) for task_id in shop.rows()
    }
    before = shop.rows()
    assert None not in before.values()

    deferred_locks.of(shop.runtime).end(runs["ends"])
    deferred_locks.of(shop.runtime).end(runs["same worker"])
    shop.flush()

    assert shop.rows() == before
    assert caplog.text.count("does not count") == 2
    assert not durable_locks.has_lock(shop.runtime, runs["goes on"])
    for run in copies.values():
        assert run is not None
        durable_ends.end(shop.runtime, run)
    assert shop.rows() == {}


@pytest.mark.parametrize("when", ["ended", "runs"])
def test_a_later_call_of_the_same_id_is_not_touched(shop: Shop, when: str) -> None:
    """A copy has ended meanwhile, or the answer to a removal was lost: then the id is free for a new call."""
    shop.called()
    run = shop.begun_long_ago()
    copy = shop.copy()
    assert copy is not None
    durable_ends.end(shop.runtime, copy)
    shop.called()

    if when == "ended":
        deferred_locks.of(shop.runtime).end(run)
    shop.flush()

    assert shop.rows() == {"one": None}
    assert when == "ended" or not durable_locks.has_lock(shop.runtime, run)
    if when == "runs":
        with pytest.raises(Exception, match="was taken from this run"):
            durable_ends.end(shop.runtime, run)
        assert shop.rows() == {"one": None}


@pytest.mark.parametrize("buried", [False, True])
def test_what_was_revoked_before_its_lock_and_ends_well_is_not_dead(shop: Shop, buried: bool) -> None:
    shop.called("ended")
    shop.called("runs")
    ended, runs = shop.begun("ended"), shop.begun("runs")
    shop.sql("UPDATE sidejob.messages SET doom = 'revoked', next_check_at = now()")
    if buried:
        for task_id in ("ended", "runs"):
            shop.bury(task_id)

    deferred_locks.of(shop.runtime).end(ended)
    shop.flush()
    assert not durable_locks.has_lock(shop.runtime, runs), "its heartbeat says so"
    deferred_locks.of(shop.runtime).end(runs)
    shop.flush()

    assert shop.rows() == {}
    assert shop.dead() == []


@pytest.mark.parametrize("which", ["later", "earlier"])
@pytest.mark.parametrize("late", [True, False])
def test_another_call_of_the_same_id_stays_dead(shop: Shop, which: str, late: bool) -> None:
    if which == "earlier":
        shop.called()
        shop.bury()
        shop.sql("UPDATE sidejob.dead SET died_at = died_at - interval '1 minute'")
    shop.called()
    run, copy = shop.begun_long_ago(), shop.copy()
    assert copy is not None
    durable_ends.end(shop.runtime, copy)
    if which == "later":
        shop.called()
        shop.bury()

    if late:
        deferred_locks.of(shop.runtime).end(run)
        shop.flush()
    else:
        with pytest.raises(LeaseLostError):
            durable_ends.end(shop.runtime, run)

    assert shop.dead() == ["one"]


def test_a_worker_that_was_declared_dead_locks_nothing_more(shop: Shop) -> None:
    shop.called("before")
    before = shop.begun("before")
    shop.flush()
    assert shop.rows() == {"before": shop.worker_id}, "it locks as long as it lives"
    shop.called("after")
    after = shop.begun("after")
    shop.sql("UPDATE sidejob.workers SET suspect_at = now(), suspect_by = 'silence', dead_at = now()")

    shop.flush()

    assert shop.rows() == {"before": shop.worker_id, "after": None}
    assert durable_locks.has_lock(shop.runtime, before)
    assert not durable_locks.has_lock(shop.runtime, after)


@pytest.mark.parametrize("is_revoked", [True, False])
def test_what_the_worker_revoked_while_it_ran_stays_dead_however_it_ends(
    shop: Shop, caplog: pytest.LogCaptureFixture, is_revoked: bool
) -> None:
    """A body in a thread goes on when it is revoked. One that was revoked before it began has ended well after all."""
    shop.called()
    run = shop.begun()
    run.is_revoked = is_revoked
    shop.bury()

    deferred_locks.of(shop.runtime).end(run)
    shop.flush()

    assert shop.dead() == (["one"] if is_revoked else [])
    assert "does not count" not in caplog.text


def test_what_cannot_be_written_keeps_nothing_else_from_it(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """A task id with a NUL, say, which the broker gives back as it was, and no row can hold."""
    bad = {task_id: shop.begun(task_id) for task_id in ("bad\0", "worse\0")}
    for task_id in ("ends", "runs"):
        shop.called(task_id)
    good = {task_id: shop.begun(task_id) for task_id in ("ends", "runs")}
    deferred_locks.of(shop.runtime).end(bad["bad\0"])
    deferred_locks.of(shop.runtime).end(good["ends"])

    shop.flush()

    assert shop.rows() == {"runs": shop.worker_id}
    assert sorted(record.getMessage().count("worse") for record in caplog.records) == [0, 1], "one for each"
    assert [durable_locks.has_lock(shop.runtime, run) for run in (good["runs"], bad["worse\0"])] == [True, False]


def test_a_table_that_is_not_there_is_waited_for(shop: Shop) -> None:
    """Who flushes leaves, and has more to do than this."""
    shop.called("ends")
    shop.called("runs")
    deferred_locks.of(shop.runtime).end(shop.begun("ends"))
    shop.begun("runs")
    with shop.without("messages"):
        shop.flush()

    shop.flush()

    assert shop.rows() == {"runs": shop.worker_id}


def test_what_was_removed_is_not_looked_for_again(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    for task_id in ("removed", "buried"):
        shop.called(task_id)
        deferred_locks.of(shop.runtime).end(shop.begun(task_id))
    shop.bury("buried")
    with shop.without("dead"):
        shop.flush()
    assert shop.rows() == {}

    shop.flush()

    assert "does not count" not in caplog.text
    assert shop.dead() == []


def test_this_process_knows_of_a_copy_of_what_it_has_not_written(shop: Shop) -> None:
    shop.called()
    run = shop.begun()
    assert deferred_locks.is_here(shop.runtime, run.key)
    deferred_locks.of(shop.runtime).end(run)
    assert deferred_locks.is_here(shop.runtime, run.key)
    shop.flush()
    assert not deferred_locks.is_here(shop.runtime, run.key)


@pytest.mark.parametrize("forged", [{"task": "late.other"}, {"digest": digest_of(b"other")}], ids=["task", "body"])
@pytest.mark.parametrize("ends", [True, False])
def test_what_is_not_what_its_row_has_is_never_locked_nor_ended(
    shop: Shop, forged: dict[str, str], ends: bool, caplog: pytest.LogCaptureFixture
) -> None:
    shop.called()
    run = shop.begun_long_ago()
    run.content = run.content._replace(**forged)
    if ends:
        deferred_locks.of(shop.runtime).end(run)
    shop.flush()

    assert shop.rows() == {"one": None}
    assert not deferred_locks.of(shop.runtime).has(run.key) or not durable_locks.has_lock(shop.runtime, run)
    assert ("is forged" in caplog.text) == ends
    shop.bury()
    with pytest.raises(LeaseLostError):
        durable_ends.end(shop.runtime, run)
    assert shop.dead() == ["one"], "it is not taken out of the dead set either"


def test_while_a_flush_is_not_answered_nothing_more_begins_without_a_lock(shop: Shop) -> None:
    shop.called("one")
    shop.called("two")
    shop.begun("one")
    run = Run(("two", 1), "late.one", shop.worker_id, shop.runtime, content_of(shop.runtime, "two"))
    with shop.looking.transaction():
        shop.sql("SELECT FROM sidejob.messages FOR UPDATE")
        flush = threading.Thread(target=shop.flush)
        flush.start()
        wait_until(
            lambda: not deferred_locks.of(shop.runtime).begin(run, max_losses=3) or _dropped(run), message="a refusal"
        )
    flush.join(20)
    assert shop.rows()["one"] == shop.worker_id


def _dropped(run: Run) -> bool:
    deferred_locks.of(run.runtime).drop(run)
    return False


def test_one_thread_writes_and_ends_when_nothing_comes(
    database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred_locks, "AT_REST_S", 0.05)
    monkeypatch.setattr(deferred_locks, "LINGER_S", 60.0)
    shop = Shop(database_url, redis_url)
    of_others = set(threading.enumerate())  # those of tests before this one linger

    def threads() -> list[Any]:
        return [thread for thread in threading.enumerate() if "late-locks" in thread.name and thread not in of_others]

    first: list[Any] = []
    for number, rests in enumerate([False, True, True]):
        if rests:  # what comes wakes it
            wait_until(lambda: deferred_locks.of(shop.runtime)._rests, message="the thread to rest")
        if number == 2:
            monkeypatch.setattr(deferred_locks, "LINGER_S", 0.05)  # from its next rest on
        shop.called(str(number))
        deferred_locks.of(shop.runtime).end(shop.begun(str(number)))
        first = first or threads()
        assert len(first) == 1
        assert number == 2 or threads() == first
        wait_until(lambda: not shop.rows(), message="it to be removed")
    wait_until(lambda: not threads(), message="the thread to end")
    assert shop.rows() == {}
    shop.looking.close()
    shop.app.sidejob.close()
    shop.app.close()
