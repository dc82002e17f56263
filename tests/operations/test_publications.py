"""A publication reaches each port once and in order: page by page, whoever delivers, and whoever dies or has locks."""

from __future__ import annotations

import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from celery_sidejob import Job, RunningJob, StoreUnavailableError
from celery_sidejob.operations.changes import follow_up, mailboxes
from celery_sidejob.services.sweep import asks as duty
from celery_sidejob.services.sweep.asks import Publications
from celery_sidejob.services.sweep.sweep import Sweep
from celery_sidejob.store.connection.own_executor import OwnExecutor
from celery_sidejob.store.statement import Statement
from tests.operations.publisher import CHANNEL
from tests.tools.crash_points import Arm, lost
from tests.tools.in_process import Stage
from tests.tools.pgbouncer import direct
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes

MANY = 25


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_up, "PAGE", 10)
    monkeypatch.setattr(mailboxes, "FEW", 0)


@pytest.fixture(params=[100, 0], ids=["in the publisher's commit", "after it"])
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailboxes, "FEW", request.param)


@pytest.fixture
def subscribers(stage: Stage) -> list[Job]:
    """Completed jobs, with a port each that subscribes to the channel."""
    made = subscribed(stage, MANY)
    stage.drain()
    return made


def subscribed(stage: Stage, count: int, *channels: str) -> list[Job]:
    ports = {"in1": {"channels": list(channels or [CHANNEL])}}
    return stage.sidejob.enqueue_many([{"task": stage.idle, "inports": ports}] * count)


def sweep(stage: Stage) -> int:
    """Sweep until nothing is left of publications, and return how many pages that took."""
    swept = Publications(Sweep(stage.runtime))
    pages = 0
    while report := swept.run_once():
        pages += report["publications"]
        assert pages < 1000, "this does not come to an end"
    return pages


def arrived(job: Job) -> list[Any]:
    return [packet.value for packet in job.input("in1").peek(1000)]


def wakes(stage: Stage) -> set[int]:
    return {count for (count,) in stage.sql("SELECT wakes FROM jobs JOIN ports ON job_id = jobs.id")}


@contextmanager
def interrupted() -> Iterator[None]:
    """What happens to a publisher that dies in the block."""
    with pytest.raises(KeyboardInterrupt):
        yield


def die() -> None:
    raise KeyboardInterrupt


# -- pages ---------------------------------------------------------------------------------------------------------


def test_messages_of_several_channels_arrive_in_the_order_in_which_a_unit_came_to_the_channels(stage: Stage) -> None:
    channels = [f"/news/{number}" for number in (3, 9, 1, 7, 5, 2, 8)]
    (job,) = subscribed(stage, 1, "/news")

    def body(job: RunningJob) -> None:
        for channel in channels:
            stage.sidejob.publish(channel, channel)

    stage.run(stage.job(body))

    assert arrived(job) == channels


@pytest.mark.usefixtures("small_pages")
def test_each_page_is_a_transaction_of_the_same_few_statements(
    stage: Stage, subscribers: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: Counter[Statement] = Counter()
    run = OwnExecutor.run

    def counting(executor: OwnExecutor, statement: Statement, /, **parameters: Any) -> Any:
        if threading.current_thread() is threading.main_thread():  # those in the background have their own
            ran[statement] += 1
        return run(executor, statement, **parameters)

    stage.runtime.connections.write_behind_now()  # or a slow machine does it in between
    before = wakes(stage)
    monkeypatch.setattr(OwnExecutor, "run", counting)
    assert stage.sidejob.publish(CHANNEL, "x") == MANY
    monkeypatch.undo()

    assert set(ran.values()) <= {1, 3}, "once for the publication, or once for each of the three pages"
    assert len(ran) <= 7
    assert [arrived(job) for job in subscribers] == [["x"]] * MANY
    assert wakes(stage) == {count + 1 for count in before}, "each job is woken once"
    assert stage.sidejob.count_jobs() == {"queued": MANY}
    assert stage.sql("SELECT * FROM publications") == []


@pytest.mark.usefixtures("small_pages")
def test_as_many_subscribers_as_fit_are_one_page(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_up, "PAGES", 1)
    subscribed(stage, 10)
    assert stage.sidejob.publish(CHANNEL, "x") == 10
    assert sweep(stage) == 0


@pytest.mark.usefixtures("small_pages")
def test_a_job_whose_ports_and_levels_are_more_than_a_page_is_woken_once(stage: Stage) -> None:
    ports = {f"in{n}": {"channels": ["/a", "/a/b"]} for n in range(8)}
    first, second = stage.sidejob.enqueue_many([{"task": stage.idle, "inports": ports}] * 2)
    stage.drain()
    assert stage.sidejob.publish("/a/b", "x") == 16
    assert wakes(stage) == {1}
    assert [arrived(job) for job in (first, second)] == [["x", "x"]] * 2
    assert stage.drain() == 2


@pytest.mark.usefixtures("few")
def test_the_messages_of_a_unit_are_one_publication_for_each_channel_and_keep_their_order(stage: Stage) -> None:
    (reader,) = subscribed(stage, 1, "/a", "/b")
    (other,) = subscribed(stage, 1, "/b")

    def body(job: RunningJob) -> None:
        for n in (1, 2, 3):
            assert stage.sidejob.publish("/a", n) == 1
            assert stage.sidejob.publish("/b", -n) == 2
        assert (stage.sidejob.publish("/nobody", 1), arrived(reader)) == (0, [])

    stage.drain()
    stage.sql("CREATE TABLE kept AS SELECT 1 AS n LIMIT 0")
    stage.sql("CREATE FUNCTION count_kept() RETURNS trigger LANGUAGE plpgsql AS"
              " $$ BEGIN INSERT INTO sidejob.kept VALUES (1); RETURN NEW; END $$")  # fmt: skip
    stage.sql("CREATE TRIGGER t BEFORE INSERT ON publications FOR EACH ROW EXECUTE FUNCTION count_kept()")
    try:
        stage.inside(body)
        kept = stage.sql("SELECT n FROM kept")
    finally:
        stage.sql("DROP FUNCTION count_kept CASCADE; DROP TABLE kept")
    assert len(kept) == 2
    assert [value for value in arrived(reader) if value > 0] == [1, 2, 3]
    assert [value for value in arrived(reader) if value < 0] == [-1, -2, -3]
    assert arrived(other) == [-1, -2, -3]


@pytest.mark.usefixtures("small_pages")
def test_a_publisher_leaves_what_is_beyond_its_pages_to_the_sweeper(
    stage: Stage, subscribers: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow_up, "PAGES", 1)
    assert stage.sidejob.publish(CHANNEL, "x") == MANY
    assert Counter(map(len, map(arrived, subscribers))) == {1: 10, 0: 15}
    (late,) = subscribed(stage, 1)
    assert sweep(stage) == 2
    assert [arrived(job) for job in subscribers] == [["x"]] * MANY
    assert arrived(late) == [], "it has subscribed after the message was published"


@pytest.mark.usefixtures("small_pages")
def test_the_sweeper_is_fair_to_channels_and_goes_on_where_its_turn_ended(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, at: Arm
) -> None:
    for name, count in (("/long", 45), ("/one", 1), ("/two", 1)):
        subscribed(stage, count, name)
        at("deliver:before-commit", die)
        with interrupted():
            stage.sidejob.publish(name, "x")
    monkeypatch.setattr(duty, "PAGES", 4)
    swept = Publications(Sweep(stage.runtime))
    assert swept.run_once() == {"publications": 4}
    assert stage.sql("SELECT channel FROM publications") == [("/long",)]
    monkeypatch.setattr(duty, "CHANNELS", 1)
    assert swept.run_once() == {"publications": 3}
    assert stage.sql("SELECT channel FROM publications") == []


# -- deaths --------------------------------------------------------------------------------------------------------

POINTS = {
    "publish:before-commit=kill": [],
    "publish:after-commit=kill": [1],
    **{
        f"deliver:{side}-commit=kill@{page}": [1] if page <= 3 else [1, 2]
        for page in range(1, 7) for side in ("before", "after")
    },
}  # fmt: skip
"""Where the publisher is killed, and the messages that it has published by then."""


@pytest.mark.few(5)
@pytest.mark.parametrize(("plan", "messages"), POINTS.items(), ids=POINTS)
def test_a_publisher_that_is_killed_between_two_pages_leaves_each_port_its_messages_once(
    stage: Stage, subscribers: list[Job], processes: Processes, plan: str, messages: list[int]
) -> None:
    publisher = processes.start(
        [sys.executable, "-m", "tests.operations.publisher"],
        env={"DATABASE_URL": direct(stage.database_url), "SIDEJOB_CRASH_POINTS": plan},
    )
    assert publisher.wait(60) == -signal.SIGKILL
    open_transactions = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND xact_start < now()"
    wait_until(lambda: not stage.sql(open_transactions), message="Postgres to notice that the publisher is dead")
    sweep(stage)
    stage.sidejob.poll()
    assert [arrived(job) for job in subscribers] == [messages] * MANY
    assert stage.drain() == (MANY if messages else 0)


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("side", ["before", "after"])
def test_an_answer_that_is_lost_fails_no_publisher(
    stage: Stage, subscribers: list[Job], at: Arm, side: str, caplog: pytest.LogCaptureFixture
) -> None:
    at(f"deliver:{side}-commit", lost)
    assert stage.sidejob.publish(CHANNEL, "x") == MANY
    assert f"Messages on {CHANNEL} are kept, and the sweeper delivers them" in caplog.text
    assert sweep(stage) == (3 if side == "before" else 2)
    assert [arrived(job) for job in subscribers] == [["x"]] * MANY


@pytest.mark.usefixtures("small_pages")
def test_the_sweeper_and_another_publisher_deliver_beside_each_other(
    stage: Stage, subscribers: list[Job], at: Arm
) -> None:
    """Whoever finds the oldest publication in somebody's hands leaves its own to them: it never overtakes."""

    def publish_beside() -> None:
        stage.outside(lambda: stage.sidejob.publish(CHANNEL, 2))
        stage.outside(lambda: sweep(stage))
        assert arrived(subscribers[0]) == []

    at("deliver:before-commit", publish_beside)
    stage.sidejob.publish(CHANNEL, 1)
    assert [arrived(job) for job in subscribers] == [[1, 2]] * MANY
    assert sweep(stage) == 0


# -- others in the way ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("lock", ["FOR NO KEY UPDATE", "FOR KEY SHARE"])
def test_a_publisher_does_not_wait_for_a_job_that_is_locked(stage: Stage, subscribers: list[Job], lock: str) -> None:
    with stage.connect() as other, other.transaction():
        other.execute(f"SELECT FROM jobs WHERE id = %s {lock}", [subscribers[3].id])
        assert stage.sidejob.publish(CHANNEL, "x") == MANY
        assert [arrived(job) for job in subscribers] == [["x"]] * MANY
    stage.sidejob.poll()
    assert stage.sidejob.count_jobs() == {"queued": MANY}
    assert stage.drain() == MANY


LOCKS = {
    "a job": "SELECT FROM jobs WHERE id = %s FOR UPDATE",
    "a port": "SELECT FROM ports WHERE job_id = %s FOR UPDATE",
    "a port that is being removed": "DELETE FROM ports WHERE job_id = %s",
}


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("statement", LOCKS.values(), ids=LOCKS)
@pytest.mark.parametrize("ends", [True, False], ids=["committed", "rolled back"])
def test_nobody_waits_for_a_subscriber_that_may_be_deleted_and_all_others_of_the_turn_are_done(
    stage: Stage, subscribers: list[Job], statement: str, ends: bool
) -> None:
    (elsewhere,) = subscribed(stage, 1, "/other")
    with stage.connect(autocommit=False) as other:
        other.execute(statement, [subscribers[3].id])
        assert stage.sidejob.publish(CHANNEL, "x") == MANY
        assert arrived(subscribers[0]) == []
        stage.sql("INSERT INTO publications (channel, packets, newest)"
                  """ VALUES ('/other', '[{"n": 0, "value": "1"}]', 1000000)""")  # fmt: skip
        assert sweep(stage) == 1
        assert arrived(elsewhere) == [1]
        other.commit() if ends else other.rollback()
    assert sweep(stage) == 1
    removed = ends and statement.startswith("DELETE")
    assert sum(arrived(job) == ["x"] for job in subscribers if not removed or job != subscribers[3]) == MANY - removed


@pytest.mark.usefixtures("small_pages")
def test_a_subscriber_deleted_before_the_delivery_fails_nobody(stage: Stage, subscribers: list[Job], at: Arm) -> None:
    gone = subscribers[-1]

    def delete() -> None:
        gone.terminate()
        stage.run(gone)
        assert gone.delete()

    at("publish:after-commit", lambda: stage.outside(delete))
    assert stage.sidejob.publish(CHANNEL, "x") == MANY
    assert [arrived(job) for job in subscribers[:-1]] == [["x"]] * (MANY - 1)


@pytest.mark.usefixtures("small_pages")
def test_a_job_that_cannot_be_asked_keeps_no_packet_from_the_others(stage: Stage, subscribers: list[Job]) -> None:
    stage.sql("CREATE FUNCTION deny() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'denied'; END $$;"
              f"CREATE TRIGGER t BEFORE UPDATE ON jobs FOR EACH ROW WHEN (OLD.id = {subscribers[3].id})"
              " EXECUTE FUNCTION deny()")  # fmt: skip
    try:
        assert stage.sidejob.publish(CHANNEL, "x") == MANY
        assert sweep(stage) == 3
        stage.sidejob.poll()
    finally:
        stage.sql("DROP FUNCTION deny CASCADE")
    assert [arrived(job) for job in subscribers] == [["x"]] * MANY
    assert stage.sidejob.count_jobs() == {"queued": MANY - 1, "completed": 1}


@pytest.mark.usefixtures("small_pages")
def test_a_channel_that_cannot_be_delivered_is_set_aside(
    stage: Stage, subscribers: list[Job], caplog: pytest.LogCaptureFixture
) -> None:
    (elsewhere,) = subscribed(stage, 1, "/other")
    stage.sql("CREATE FUNCTION deny() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'denied'; END $$;"
              "CREATE TRIGGER t BEFORE INSERT ON packets FOR EACH ROW WHEN (NEW.value::text = '1')"
              " EXECUTE FUNCTION deny()")  # fmt: skip
    try:
        stage.sidejob.publish(CHANNEL, 1)
        stage.sql("INSERT INTO publications (channel, packets, newest)"
                  """ VALUES ('/other', '[{"n": 0, "value": "2"}]', 1000000)""")  # fmt: skip
        assert sweep(stage) == 1
        assert f"Channel {CHANNEL} is set aside for 5 s, its publication failed" in caplog.text
    finally:
        stage.sql("DROP FUNCTION deny CASCADE")
    assert arrived(elsewhere) == [2]
    assert sweep(stage) == 3
    assert arrived(subscribers[0]) == [1]


def test_a_store_that_is_away_ends_the_duty(
    stage: Stage, subscribers: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any, **__: Any) -> bool:
        raise StoreUnavailableError("gone")

    stage.sql("INSERT INTO publications (channel, packets, newest) VALUES (%s, '[]', 1)", CHANNEL)
    monkeypatch.setattr(duty, "deliver_page", away)
    with pytest.raises(StoreUnavailableError, match="gone"):
        sweep(stage)


# -- jobs that do not run --------------------------------------------------------------------------------------------


def test_channels_that_a_terminated_job_gets_count_from_its_revival_on(stage: Stage) -> None:
    job = stage.job(inports={"in1": {}, "*": {"channels": [CHANNEL]}})
    stage.drain()
    job.terminate()
    stage.drain()
    job.input("in1").channels = [CHANNEL]
    assert stage.sidejob.publish(CHANNEL, 1) == 0
    with stage.sidejob.port_options(notify=False):
        job.input("made").write(0)
    job.configure_ports(inports={"in1": {"channels": [CHANNEL]}, "in2": {"channels": [CHANNEL]}})
    assert stage.sidejob.publish(CHANNEL, 2) == 0
    job.run(force=True)
    assert stage.sidejob.publish(CHANNEL, 3) == 2
    assert arrived(job) == [3]


def test_a_failed_job_still_gets_messages_and_reads_them_when_it_is_run_again(stage: Stage) -> None:
    got: list[int] = []

    def body(job: RunningJob) -> None:
        for value in job.for_inputs("in1"):
            if value == 0 and not got:
                raise ValueError(value)
            got.append(value)

    job = stage.job(body, inports={"in1": {"channels": [CHANNEL]}})
    stage.sidejob.publish(CHANNEL, 0)
    with pytest.raises(ValueError, match="0"):
        stage.run(job)
    assert stage.sidejob.publish(CHANNEL, 1) == 1
    assert (job.refresh().status, arrived(job)) == ("failed", [0, 1])
    got.append(-1)
    job.run(force=True)
    stage.drain()
    assert (job.refresh().status, got) == ("completed", [-1, 0, 1])


# -- in whose transaction ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("few", [100, 0])
def test_a_publication_in_the_callers_transaction_shares_its_fate(
    stage: Stage, subscribers: list[Job], monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    """psycopg tells nobody of the commit: the sweeper does what follows it."""
    monkeypatch.setattr(mailboxes, "FEW", few)
    with psycopg.connect(stage.database_url) as connection:
        assert stage.sidejob.publish(CHANNEL, 1, transaction=connection) == MANY
        connection.rollback()
        assert stage.sidejob.publish(CHANNEL, 2, transaction=connection) == MANY
        assert arrived(subscribers[0]) == []
        stage.sidejob.poll()
    assert arrived(subscribers[0]) == ([2] if few else [])
    assert sweep(stage) == (0 if few else 1)
    stage.sidejob.poll()
    assert [arrived(job) for job in subscribers] == [[2]] * MANY
    assert stage.drain() == MANY


def test_nothing_is_kept_for_a_channel_that_nobody_subscribes(stage: Stage) -> None:
    newest = "SELECT last_value, is_called FROM publications_id_seq"
    before = stage.sql(newest)
    assert stage.sidejob.publish("/nobody", 1) == 0
    assert stage.sql(newest) == before


@pytest.mark.usefixtures("few")
def test_two_units_that_publish_to_each_others_ports_do_not_deadlock(
    stage: Stage, aside: Callable[..., Future[Any]]
) -> None:
    first, second = (stage.job(inports={"in1": {"channels": [name]}}) for name in ("/first", "/second"))
    stage.drain()

    def publish(name: str) -> None:
        for n in range(30):
            stage.sidejob.publish(name, n)

    for done in [aside(publish, name) for name in ("/first", "/second", "/first", "/second")]:
        done.result(60)
    sweep(stage)
    for job in (first, second):
        assert Counter(arrived(job)) == dict.fromkeys(range(30), 2)
