"""What a sweep does about messages of ordinary durable tasks; in this process, against a real broker."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import psycopg
import pytest
import redis

from celery_sidejob import LeaseLostError, task_buried
from celery_sidejob.model.durable import Death, Message, Terms
from celery_sidejob.model.loss import Loss, LossKind
from celery_sidejob.operations.ledger import burials, durable_ends, durable_runs
from celery_sidejob.operations.ledger.durable_runs import Run
from celery_sidejob.services.heartbeat import deliveries, held_runs
from celery_sidejob.services.heartbeat.held_runs import HeldTasks
from celery_sidejob.services.heartbeat.worker import Worker
from celery_sidejob.services.sweep import due
from celery_sidejob.services.sweep.due import PER_QUEUE
from celery_sidejob.services.sweep.sweeper import PollReport
from celery_sidejob.store import workers
from celery_sidejob.store.outbox import holds, publishing
from celery_sidejob.store.outbox.arming import end_task_runs
from celery_sidejob.store.outbox.burials import poison
from celery_sidejob.store.outbox.kinds import TASKS
from tests.tools.apps import make_app
from tests.tools.contents import content_of
from tests.tools.databases import SCHEMA
from tests.tools.pgbouncer import direct
from tests.tools.waiting import wait_until

MAX_LOSSES = 3


class Post:
    """An app with one durable task, a store and a broker that nobody listens to."""

    def __init__(self, database_url: str, redis_url: str) -> None:
        self.app = make_app(
            "post",
            broker=redis_url,
            sidejob_database_url=database_url,
            sidejob_durable_tasks=["post.*"],
            sidejob_lease=4,
            sidejob_heartbeat_interval=1,
        )
        self.sidejob = self.app.sidejob
        self.runtime = self.sidejob.runtime
        self._looking = psycopg.connect(
            direct(database_url), autocommit=True, options=f"-c search_path={SCHEMA}",
            row_factory=psycopg.rows.namedtuple_row,
        )  # fmt: skip
        self._broker = redis.Redis.from_url(redis_url)
        self.sidejob.poll()  # its first look at a new broker takes it for an emptied one

    def close(self) -> None:
        """Close what is open."""
        self._looking.close()
        self._broker.close()
        self.sidejob.close()
        self.app.close()

    def send(self, task_id: str, queue: str = "post", **options: Any) -> None:
        """Call a task, and write at once that it was published, which is put off for a second."""
        self.app.send_task("post.letter", (task_id,), task_id=task_id, queue=queue, **options)
        self.runtime.connections.write_behind_now()

    def sql(self, statement: str, *parameters: Any) -> list[Any]:
        """Run SQL in our schema."""
        cursor = self._looking.execute(statement, parameters or None)
        return cursor.fetchall() if cursor.description else []

    def row(self, task_id: str) -> Any:
        """The row of a task."""
        return self.sql(
            "SELECT published_at, suspected_at, check_interval, next_check_at > now() AS later, locked_by, losses, doom"
            " FROM messages WHERE task_id = %s",
            task_id,
        )[0]

    def poll(self) -> PollReport:
        """Sweep once, when all that is kept is due to be looked at."""
        self.sql("UPDATE messages SET next_check_at = now() WHERE locked_by IS NULL")
        return self.sidejob.poll()

    def sent(self, queue: str = "post") -> list[str]:
        """The task ids of the messages in a queue, the oldest first."""
        return [json.loads(text)["headers"]["id"] for text in reversed(self._broker.lrange(queue, 0, -1))]

    def empty(self) -> None:
        """Empty the queues, without the broker seeming to be emptied."""
        self._broker.delete("post", "other")

    def empty_all(self) -> None:
        """Empty the broker."""
        self._broker.flushdb()

    def many(self, count: int, queue: str = "post", *, doom: str | None = None) -> None:
        """Copy the message "one" so many times, published and due; in one statement."""
        self.sql(
            "INSERT INTO messages (task_id, task, queue, publication, body, generation, published_at, next_check_at,"
            " check_interval, doom) SELECT %s || n, task, %s, replace(publication, task_id, %s || n), body, 1,"
            " CASE WHEN %s::text IS NULL THEN now() END, now() - interval '1 hour', check_interval, %s"
            " FROM messages, generate_series(1, %s) n WHERE task_id = 'one'",
            queue, queue, queue, doom, doom, count,
        )  # fmt: skip

    def worker(self) -> int:
        """Enter a worker, and return its identity."""
        return workers.register(self.runtime.connections, f"test:{os.urandom(6).hex()}")

    def begin(self, task_id: str, worker_id: int, *, generation: int = 1, on_lost: str = "requeue") -> Run | None:
        """Begin the run of a message, as a worker does that was given it."""
        content = content_of(self.runtime, task_id, generation)
        run = Run((task_id, generation), "post.letter", worker_id, self.runtime, content)
        terms = Terms(os.getpid(), on_lost, MAX_LOSSES)
        return run if durable_runs.begin(self.runtime, run, terms=terms, is_here=False) else None

    def declare_dead(self, worker_id: int) -> None:
        """Declare a worker dead, as the sweeper does when it was suspected and silent for long enough."""
        self.sql(
            "UPDATE workers SET suspect_at = now(), suspect_by = 'silence', dead_at = now() WHERE id = %s", worker_id
        )


@pytest.fixture
def post(database_url: str, redis_url: str) -> Iterator[Post]:
    """An app of this test's own."""
    made = Post(database_url, redis_url)
    yield made
    made.close()


# -- what no run has begun -------------------------------------------------------------------------------------------


def test_what_is_not_heard_of_is_struck_twice_then_published_again(post: Post) -> None:
    post.send("one")
    assert (post.row("one").suspected_at, post.row("one").later) == (None, True)
    assert not post.sidejob.poll(), "nobody looks before its time"

    post.empty()
    report = post.poll()
    struck = post.row("one")
    assert (report.missing, report.published, report.tasks_buried) == (0, 0, 0)
    assert (struck.suspected_at is not None, struck.later, post.sent()) == (True, True, [])
    assert not post.sidejob.poll(), "nor before the second look"

    report = post.poll()
    again = post.row("one")
    assert (report.missing, report.published) == (1, 1)
    assert (again.suspected_at, again.check_interval, post.sent()) == (None, 2 * struck.check_interval, ["one"])
    assert len(post.sidejob.dead) == 0


def test_what_begins_is_missing_no_longer(post: Post) -> None:
    post.send("one")
    post.empty()
    post.poll()
    worker_id = post.worker()

    run = post.begin("one", worker_id)
    assert run is not None
    assert post.row("one").suspected_at is None
    assert not post.poll(), "what runs is not looked for"

    durable_runs.put_back(post.runtime, run)
    assert (post.poll().missing, post.row("one").suspected_at is not None) == (0, True), "the first strike once more"


def test_what_is_just_being_published_when_the_broker_was_emptied_is_left_to_its_publisher(post: Post) -> None:
    """A copy could be there before it, and have run by then. If it went the way of the others, it is not marked."""
    post.send("marked")
    post.app.send_task("post.letter", ("kept",), task_id="kept", queue="post")
    assert (post.row("kept").published_at, post.row("kept").later) == (None, True)
    post.empty_all()

    report = post.sidejob.poll()

    assert (report.broker_emptied, report.published, post.sent()) == (True, 1, ["marked"])
    post.runtime.connections.write_behind_now()
    assert (post.row("kept").published_at, post.row("kept").later) == (None, True)
    assert (post.poll().published, post.sent()) == (1, ["marked", "kept"])


def test_no_queue_is_too_long_and_none_keeps_back_another(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older system stopped at 500 jobs in a queue, 500 retries or 500 dead ones, and read all of them."""
    post.send("one")
    post.many(PER_QUEUE * 4 + 99)
    post.send("last", "other")
    post.empty()
    post.sql("UPDATE messages SET suspected_at = now(), next_check_at = least(next_check_at, now())")
    post.sql(
        "INSERT INTO dead (task_id, task, queue, reason, payload)"
        " SELECT 'd' || n, 'post.letter', 'post', 'lost', '{}' FROM generate_series(1, 600) n"
    )

    monkeypatch.setattr(due, "PAGES", 1)
    report = post.sidejob.poll()

    assert post.sent("other") == ["last"], "the youngest of all, in a queue of its own"
    assert (report.published, len(post.sent())) == (PER_QUEUE + 1, PER_QUEUE), "a page of the long queue"
    taken, turns = post.sent(), 1
    while post.sql("SELECT 1 FROM messages WHERE published_at IS NULL OR next_check_at < now()"):
        post.empty()  # as workers that take them: while there are enough, no more copies are sent
        post.sidejob.poll()
        taken += post.sent()
        turns += 1
    assert (len(taken), turns < 10) == (PER_QUEUE * 4 + 100, True)
    assert len(set(taken)) == len(taken)


def test_a_row_of_a_newer_format_is_left_to_newer_workers_and_stops_no_other(post: Post) -> None:
    for task_id in ("bad", "good", "late"):
        post.send(task_id)
    post.empty()
    post.sql("UPDATE messages SET publication = %s WHERE task_id = 'bad'", '{"v": 99}')
    post.sql("UPDATE messages SET published_at = NULL")

    report = post.poll()

    assert set(post.sent()) >= {"good", "late"}
    assert report.published >= 2
    assert post.row("bad").later, "it is tried again, later"
    assert post.row("good").published_at is not None


def test_a_task_that_no_module_here_has_is_published_again(post: Post) -> None:
    post.app.send_task("post.of_another_team", task_id="one", queue="post")
    post.runtime.connections.write_behind_now()
    post.empty()
    post.poll()

    assert post.poll().published == 1
    assert post.sent() == ["one"]


def test_a_row_that_cannot_be_buried_stops_no_other(post: Post, caplog: pytest.LogCaptureFixture) -> None:
    for task_id in ("bad", "good"):
        post.send(task_id)
    post.sql("UPDATE messages SET doom = 'lost', published_at = NULL")
    post.sql("""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'refused'; END $$;
        CREATE TRIGGER refuse BEFORE INSERT ON dead FOR EACH ROW WHEN (new.task_id = 'bad')
          EXECUTE FUNCTION refuse()""")

    assert post.poll().tasks_buried == 1

    assert [entry.task_id for entry in post.sidejob.dead] == ["good"]
    assert "Task bad is doomed, and could not be buried; it is tried again" in caplog.text
    post.sql("DROP TRIGGER refuse ON dead")
    assert post.poll().tasks_buried == 1
    assert [entry.task_id for entry in post.sidejob.dead] == ["good", "bad"]


def test_any_number_of_pollers_do_each_thing_once(post: Post, database_url: str) -> None:
    others = [Post(database_url, post.app.conf.broker_url) for _ in range(3)]
    post.send("one")
    post.many(200)  # a page of the sweeper's
    post.many(120, "doomed", doom="lost")
    post.sql("UPDATE messages SET suspected_at = now() WHERE queue = 'post'")
    post.sql("DELETE FROM messages WHERE task_id = 'one'")
    post.empty()
    told: list[str] = []

    def tell(task_id: str, **_: Any) -> None:
        told.append(task_id)

    task_buried.connect(tell)
    try:
        start = threading.Barrier(len(others))

        def poll(one: Post) -> None:
            start.wait()
            one.sidejob.poll()

        threads = [threading.Thread(target=poll, args=(other,)) for other in others]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # A poller may have counted what another had just published for messages that wait, and have put off as many.
        # When all are due again, the oldest of them are too many: they are suspected, and then published.
        wait_until(lambda: post.poll() is not None and len(set(post.sent())) == 200, message="the messages")
        while post.sidejob.poll():  # burials that were reserved while another wanted them are done by now
            pass
    finally:
        task_buried.disconnect(tell)
        for other in others:
            other.close()

    assert len(post.sent()) == len(set(post.sent())) == 200
    assert len(told) == len(set(told)) == len(post.sidejob.dead) == 120


# -- what runs -------------------------------------------------------------------------------------------------------


def test_a_run_is_lost_with_its_worker_and_never_by_its_length(post: Post) -> None:
    post.send("one")
    worker_id = post.worker()
    assert post.begin("one", worker_id)
    post.sql("UPDATE messages SET locked_at = now() - interval '1 day'")
    assert not post.poll()

    post.sql("UPDATE workers SET beat_at = now() - interval '1 hour' WHERE id = %s", worker_id)
    assert post.poll().declared_dead == 0, "silent, which is a suspicion"
    post.sql("UPDATE workers SET suspect_at = now() - interval '1 hour' WHERE id = %s", worker_id)
    wait_until(lambda: post.poll().tasks_taken or post.row("one").locked_by is None, message="the run to be taken")

    row = post.row("one")
    assert (row.locked_by, row.losses, row.doom) == (None, 1, None)


def test_a_row_that_somebody_changes_keeps_back_no_other_run_of_a_dead_worker(post: Post, database_url: str) -> None:
    worker_id = post.worker()
    for task_id in ("changed", "lost"):
        post.send(task_id)
        assert post.begin(task_id, worker_id) is not None
    post.declare_dead(worker_id)
    with psycopg.connect(direct(database_url), options=f"-c search_path={SCHEMA}") as other:
        other.execute("SELECT 1 FROM messages WHERE task_id = 'changed' FOR UPDATE")
        taken = post.runtime.connections.transact(
            "take", lambda executor: end_task_runs(executor, holds.take_from_the_dead()), single=True, within_s=10.0
        )
        other.rollback()

    assert [row.task_id for row in taken] == ["lost"]
    assert durable_runs.take_from_the_dead(post.runtime) == 1


def test_a_revoked_task_that_also_kills_its_workers_stays_revoked(post: Post) -> None:
    post.send("one")
    post.sql("UPDATE messages SET doom = 'revoked'")

    found = post.runtime.connections.transact("poison", lambda executor: poison(executor, ("one", 1)), single=True)

    assert (found.doomed, found.is_kept, post.row("one").doom) == (False, True, "revoked")


def test_nobody_vouches_for_a_doomed_task(post: Post) -> None:
    """Otherwise a worker that has fetched it would put its burial off for as long as it waits there."""
    post.send("one")
    vouch = partial(publishing.vouch, post.runtime.connections, TASKS, [("one", 1)], wait_s=3600.0)
    assert vouch() == 1
    post.sql("UPDATE messages SET doom = 'revoked', next_check_at = now()")
    assert vouch() == 0
    assert not post.row("one").later


def test_the_last_loss_that_a_task_may_have_is_its_doom(post: Post) -> None:
    post.send("one")
    for number in range(1, MAX_LOSSES + 1):
        worker_id = post.worker()
        assert post.begin("one", worker_id) is not None
        post.declare_dead(worker_id)
        assert durable_runs.take_from_the_dead(post.runtime) == 1
        doom = "lost" if number == MAX_LOSSES else None
        assert (post.row("one").losses, post.row("one").doom) == (number, doom)


def buried(post: Post) -> str:
    """Have the doomed task entered in the dead set, and return its error."""
    post.poll()
    [entry] = wait_until(lambda: list(post.sidejob.dead), message="the entry")
    assert entry.reason == "lost"
    return entry.error


def test_a_task_that_may_be_repeated_is_not_said_to_be_another(post: Post) -> None:
    post.send("one")
    worker_id = post.worker()
    assert post.begin("one", worker_id) is not None
    post.sql("UPDATE messages SET max_losses = 1")
    post.declare_dead(worker_id)
    assert durable_runs.take_from_the_dead(post.runtime) == 1

    error = buried(post)
    assert error.startswith("WorkerLostError: worker silent for 0 seconds: ")
    assert error.endswith("The run was lost, the only one that max_losses allows.")


@pytest.mark.parametrize("by_another", [False, True])
def test_a_worker_that_stops_is_not_said_to_have_died(post: Post, by_another: bool) -> None:
    """Its task must not be repeated, though nothing was lost; neither may it show an older loss."""
    post.send("one")
    worker_id = post.worker()
    assert post.begin("one", worker_id) is not None
    durable_runs.give_back(post.runtime, ["one"], worker_id=worker_id, loss=Loss(LossKind.DROPPED, "web:1:a"))
    assert post.begin("one", worker_id, on_lost="dead") is not None
    if by_another:
        post.sql("UPDATE workers SET dead_at = now() WHERE id = %s", worker_id)
        assert durable_runs.take_from_the_dead(post.runtime) == 1
    else:
        stopped = Loss(LossKind.STOPPED, "test:1")
        assert durable_runs.give_back(post.runtime, ["one"], worker_id=worker_id, loss=stopped) == 1

    assert post.row("one").losses == 1
    assert re.search(r": worker stopped before the run ended \(worker test:\w+\)\. .*`dead retry`", buried(post))


def test_a_stop_is_no_loss_of_a_task_that_may_be_repeated(post: Post) -> None:
    post.send("one")
    worker_id = post.worker()
    assert post.begin("one", worker_id) is not None
    stopped = Loss(LossKind.STOPPED, "test:1")
    assert durable_runs.give_back(post.runtime, ["one"], worker_id=worker_id, loss=stopped) == 1
    assert post.sql("SELECT losses, last_loss, doom FROM messages") == [(0, None, None)]


def test_a_retry_forgets_losses_and_why(post: Post) -> None:
    post.send("one")
    worker_id = post.worker()
    assert post.begin("one", worker_id) is not None
    durable_runs.give_back(post.runtime, ["one"], worker_id=worker_id, loss=Loss(LossKind.DROPPED, "web:1:a"))
    run = post.begin("one", worker_id)
    assert run is not None
    durable_ends.go_on(post.runtime, run, a_message("one"))
    assert post.sql("SELECT losses, last_loss FROM messages") == [(0, None)]


def test_one_loss_of_a_task_that_must_not_be_repeated_is_its_doom(post: Post) -> None:
    post.send("one")
    worker_id = post.worker()
    assert post.begin("one", worker_id, on_lost="dead")
    post.declare_dead(worker_id)
    assert durable_runs.take_from_the_dead(post.runtime) == 1

    assert post.poll().tasks_buried == 1
    [entry] = post.sidejob.dead
    assert (entry.reason, entry.losses) == ("lost", 1)
    assert "The run was lost, and its task must not be repeated without a check." in entry.error


def test_a_run_that_is_given_back_without_a_loss_leaves_the_last_loss(post: Post) -> None:
    post.send("one")
    first, second = post.worker(), post.worker()
    assert post.begin("one", first)
    post.declare_dead(first)
    assert durable_runs.take_from_the_dead(post.runtime) == 1
    assert post.begin("one", second)

    stopped = Loss(LossKind.STOPPED, "test:1")
    assert durable_runs.give_back(post.runtime, ["one"], worker_id=second, loss=stopped) == 1

    assert post.sql("SELECT losses, last_loss->>'kind' AS kind FROM messages") == [(1, "silent")]


def test_a_locked_row_is_nobody_else_s(post: Post) -> None:
    post.send("one")
    first, second = post.worker(), post.worker()

    assert post.begin("one", first) is not None
    assert post.begin("one", second) is None
    assert post.begin("one", first) is None, "nor again its own"
    assert post.begin("one", second, generation=2) is None
    assert post.begin("never kept", second) is None
    assert post.row("one").locked_by == first


def test_what_was_taken_from_a_run_changes_no_more_by_it(post: Post) -> None:
    post.send("one")
    first, second = post.worker(), post.worker()
    run = post.begin("one", first)
    assert run is not None
    with durable_runs.in_body(run):
        durable_runs.check_hold()
    post.declare_dead(first)
    post.poll()
    assert post.begin("one", first) is None, "it is dead"
    other = post.begin("one", second)
    assert other is not None
    run.follows.append(Message("next", "post.letter", "post", "{}", b"[]"))

    for act in (
        lambda: durable_ends.end(post.runtime, run),
        lambda: durable_ends.go_on(post.runtime, run, a_message("one")),
    ):
        with pytest.raises(LeaseLostError, match="was taken from this run"):
            act()
    with durable_runs.in_body(run), pytest.raises(LeaseLostError, match="was taken from this run"):
        durable_runs.check_hold()
    durable_runs.put_back(post.runtime, run)
    late = Death("failed", "ValueError: late")
    assert not burials.fail(post.runtime, run.key, late, by="run", worker_id=first)
    assert not burials.fail(post.runtime, run.key, late, by="sweeper", worker_id=first), "it runs"
    assert not durable_runs.give_back(post.runtime, ["one"], worker_id=first, loss=Loss())

    assert post.sql("SELECT task_id, locked_by FROM messages") == [("one", second)]
    assert len(post.sidejob.dead) == 0
    durable_ends.end(post.runtime, other)
    assert post.sql("SELECT 1 FROM messages") == []


@pytest.mark.parametrize("planned", [False, True])
def test_a_lock_that_came_too_late_is_no_run_that_was_lost(
    post: Post, planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store did not answer in time, and locked the row when nobody waited for it any more."""
    monkeypatch.setattr(held_runs, "GRACE_S", 0.0)
    monkeypatch.setattr(deliveries, "GRACE_S", 0.0)
    worker_id = post.worker()
    worker = Worker(post.runtime)
    worker.worker_id = worker_id
    held = HeldTasks(worker)
    for task_id in ("late", "late too", "begun"):
        post.send(task_id)
        delivery = held.runs.received((task_id, 1))
        held.runs.accepted(delivery, os.getpid())
        if task_id != "begun":
            held.runs.idle(delivery)
            held.runs.left(delivery)
        held.runs.over(delivery)
        if task_id != "late too":
            assert post.begin(task_id, worker_id, on_lost="dead")
    post.empty()

    if planned:
        held.leave()
    else:
        monkeypatch.setattr(held, "_strays_at", float("-inf"))
        held.run_once()
        worker.disconnect()

    assert [post.row(task_id)[-3:] for task_id in ("late", "begun")] == [
        (None, 0, None),
        (None, int(not planned), "lost"),
    ]
    report = post.sidejob.poll()
    assert (set(post.sent()), report.tasks_buried) == ({"late", "late too"}, 1)
    assert [entry.task_id for entry in post.sidejob.dead] == ["begun"]


def test_a_task_that_its_worker_holds_and_does_not_run_is_given_back_after_a_while(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(post.runtime)
    worker.worker_id = post.worker()
    held = HeldTasks(worker)
    post.send("one")
    assert post.begin("one", worker.worker_id)

    def look() -> tuple[Any, ...]:
        monkeypatch.setattr(held, "_strays_at", float("-inf"))
        held.run_once()
        return post.row("one").locked_by, post.row("one").losses

    assert look() == (worker.worker_id, 0), "a run that locked it just now may be about to begin"
    post.sql("UPDATE messages SET locked_at = now() - interval '1 hour'")
    assert look() == (None, 1)
    worker.disconnect()
    assert post.sql("SELECT last_loss->>'kind' AS kind FROM messages") == [("dropped",)]


def a_message(task_id: str) -> Message:
    """Some message of a task."""
    return Message(task_id, "post.letter", "post", '{"v": 2, "about": "{}"}', b"[]")
