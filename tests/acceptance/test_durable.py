"""Ordinary durable tasks with real workers: what a call has accepted ends in success or the dead set, once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import celery
import pytest
from celery import Celery, chain, chord, group

from celery_sidejob import StoreUnavailableError
from tests.acceptance.durable_site import (  # noqa: F401 - the fixture `site`
    APP,
    BRIEF_CLAIM,
    PROCESSES,
    SEVERAL,
    TIMEOUT_S,
    Site,
    site_fixture,
)
from tests.tools.apps import make_app
from tests.tools.brokers import APART
from tests.tools.freezing import frozen
from tests.tools.proxy import TcpProxy
from tests.tools.versions import CELERY_5_7
from tests.tools.waiting import wait_until

# -- publishing ------------------------------------------------------------------------------------------------------


def test_a_publisher_that_dies_between_row_and_publication_has_lost_nothing(site: Site) -> None:
    source = f"from {APP} import noted; noted.apply_async((7,), task_id='seven')"
    client = site.processes.start_python(
        source, env={**site.env, "SIDEJOB_CRASH_POINTS": "durable-keep:after-commit=kill"}
    )
    assert client.wait(TIMEOUT_S) == -signal.SIGKILL
    (row,) = site.rows()
    is_sent = site.broker.is_store
    assert (row.task_id, row.task, row.queue, row.published_at is not None, site.queued()) == (
        "seven", f"{APP}.noted", "durable", is_sent, int(is_sent),
    )  # fmt: skip

    site.worker()

    (line,) = site.record.wait_for("ran", timeout=TIMEOUT_S, id="seven")
    assert (line["value"], line["again"]) == (7, not is_sent)
    site.wait_quiet()
    assert site.dead() == []


@pytest.mark.parametrize("point", ["durable-keep:after-commit", "publish:after"])
def test_a_publisher_that_dies_once_its_row_is_kept_has_lost_nothing(site: Site, point: str) -> None:
    """Nor does it wait for Redis to say that it has the message."""
    is_store = site.broker.is_store
    if is_store and point == "publish:after":
        pytest.skip("sidejobpg: has a message with the commit that keeps it")
    source = f"from {APP} import noted; [noted.apply_async((n,), task_id=str(n)) for n in range(3)]"
    client = site.processes.start_python(source, env={**site.env, "SIDEJOB_CRASH_POINTS": f"{point}=kill@2"})
    assert client.wait(TIMEOUT_S) == -signal.SIGKILL
    assert [(row.task_id, row.published_at is None) for row in site.rows()] == [
        ("0", not is_store),
        ("1", not is_store),
    ]
    sent = 2 if is_store or point == "publish:after" else 1
    wait_until(lambda: site.queued() == sent, message="what was sent to arrive")

    site.worker()

    for value in range(2):
        (line,) = site.record.wait_for("ran", timeout=TIMEOUT_S, id=str(value))
        assert line["value"] == value
    site.wait_quiet()
    assert (len(site.record.of("ran")), site.dead()) == (2, [])


@pytest.mark.brokers("redis", only=APART, reason="has a message with the commit that keeps it")
def test_what_its_publisher_sends_after_a_copy_of_it_has_run_does_not_run(site: Site) -> None:
    """The publisher stands still between its commit and the broker, for longer than the sweeper leaves it alone."""
    worker = site.worker()
    client = site.processes.start_python(
        f"from {APP} import step; step.apply_async((1,), task_id='one')",
        env={**site.env, "SIDEJOB_CRASH_POINTS": "durable-keep:after-commit=stop"},
    )
    (line,) = site.record.wait_for("ran", timeout=TIMEOUT_S, id="one")
    assert line["again"], "that of the sweeper"
    site.wait_quiet()

    client.cont()

    assert client.wait(TIMEOUT_S) == 0
    assert site.call("step", 2).get(timeout=TIMEOUT_S) == 2, "which comes after it"
    assert worker.log().count("[one] received") == 2
    assert len(site.record.of("ran", id="one")) == 1


def test_a_row_that_is_not_known_to_be_kept_is_told_of(site: Site) -> None:
    """Its task id is taken, or the answer is lost and it is there all the same."""
    source = f"""
from celery_sidejob import InvalidValueError
from {APP} import noted
noted.apply_async((0,), task_id="0")
try:
    noted.apply_async((1,), task_id="0")
except InvalidValueError:
    noted.apply_async((2,), task_id="2")
"""
    client = site.processes.start_python(
        source, env={**site.env, "SIDEJOB_CRASH_POINTS": "durable-keep:after-commit=lost@3"}
    )
    assert client.wait(TIMEOUT_S) == 0, client.log_tail()
    assert [row.task_id for row in site.rows()] == ["0", "2"]

    site.worker()

    site.wait_quiet()
    assert sorted(line["value"] for line in site.record.of("ran")) == [0, 2]


def test_an_emptied_broker_loses_no_durable_task(site: Site) -> None:
    results = [site.call("noted", number) for number in range(20)]
    wait_until(lambda: all(row.published_at for row in site.rows()), message="all to be marked as published")

    site.empty_broker()
    site.worker(concurrency=2)

    site.wait_quiet()
    assert [len(site.ran(result)) for result in results] == [1] * 20
    assert sorted(result.get(timeout=TIMEOUT_S) for result in results) == list(range(20))


def test_the_broker_being_down_does_not_fail_the_call(site: Site) -> None:
    away = make_app(
        "away",
        broker=None,
        result_backend="redis://127.0.0.1:1/0",
        broker_url=site.broker.away.url,
        task_default_queue="durable",
        sidejob_durable_tasks=["*"],
        sidejob_database_url=site.database_url,
    )
    results = [away.send_task(f"{APP}.noted", (number,)) for number in range(3)]
    away.sidejob.close()
    away.close()
    assert [row.published_at for row in site.rows()] == [None] * 3

    site.worker()

    site.wait_quiet()
    assert [len(site.ran(result)) for result in results] == [1] * 3


@pytest.mark.brokers("redis", only=APART, reason="is the store: tests/transport/postgres makes copies of references")
def test_a_copy_of_what_was_finished_does_not_run(site: Site) -> None:
    result = site.call("noted", 1)
    put = site.broker.take("durable")
    put()
    worker = site.worker()
    site.wait_quiet()

    put()
    site.call("noted", 2).get(timeout=TIMEOUT_S)

    assert len(site.ran(result)) == 1
    assert worker.alive


@pytest.mark.brokers("redis", only=APART, reason="is the store: tests/transport/postgres makes copies of references")
@SEVERAL
@pytest.mark.parametrize("task", ["holder", "repeatable"])
def test_a_copy_of_what_runs_does_not_run(site: Site, task: str) -> None:
    result = site.call(task, 1)
    put = site.broker.take("durable")
    put()
    site.worker(concurrency=2)
    site.holding(result)

    put()
    site.call("noted", 2).get(timeout=TIMEOUT_S)

    assert len(site.record.of("holding", id=result.id)) == 1
    site.go(result)
    assert result.get(timeout=TIMEOUT_S) == 1
    site.wait_quiet()
    assert len(site.ran(result)) == 1


def test_without_a_store_the_call_fails_or_publishes_as_is_set(site: Site) -> None:
    nowhere = "postgresql://nobody@127.0.0.1:1/nothing"
    strict = site.client(sidejob_database_url=nowhere)
    with pytest.raises(StoreUnavailableError):
        strict.send_task(f"{APP}.noted", (1,))
    assert site.queued() == 0

    loose = site.client(sidejob_database_url=nowhere, sidejob_on_store_down="publish")
    result = loose.send_task(f"{APP}.noted", (1,))
    assert (site.queued(), site.rows()) == (1, [])
    site.worker()
    assert result.get(timeout=TIMEOUT_S) == 1
    site.wait_quiet()
    assert len(site.ran(result)) == 1


def test_a_message_of_a_client_without_the_package_is_adopted(site: Site) -> None:
    stranger = Celery("stranger", set_as_current=False)
    stranger.conf.update(**site.broker.configuration, task_default_queue="durable")
    first = site.worker()
    result = stranger.send_task(f"{APP}.repeatable", (7,), compression="zlib", priority=3)
    site.holding(result)
    (row,) = site.rows()
    assert (row.task_id, row.task, row.generation) == (result.id, f"{APP}.repeatable", 1)
    site.worker()

    first.kill_group()

    site.holding(result, count=2)
    site.go(result)
    assert result.get(timeout=TIMEOUT_S) == 7
    site.wait_quiet()
    assert (len(site.ran(result)), site.dead()) == (1, [])
    stranger.close()


# -- runs that are cut off -------------------------------------------------------------------------------------------


@SEVERAL
def test_a_killed_worker_s_repeatable_tasks_run_again_and_the_others_are_dead(site: Site) -> None:
    first = site.worker(concurrency=2)
    repeated, once = site.call("repeatable", 1), site.call("holder", 2)
    site.holding(repeated)
    site.holding(once)
    site.worker()

    first.kill_group()

    site.holding(repeated, count=2)
    site.go(repeated)
    site.wait_quiet()
    (entry,) = site.dead()
    assert (entry.task_id, entry.reason, entry.job_id) == (once.id, "lost", None)
    assert repeated.get(timeout=TIMEOUT_S) == 1
    assert len(site.record.of("holding", id=once.id)) == 1
    with pytest.raises(Exception, match=r"worker gone: .* The run was lost, and its task must not be repeated"):
        once.get(timeout=TIMEOUT_S)


@SEVERAL
def test_a_unique_task_keeps_its_key_through_the_death_of_its_worker_until_it_is_done(site: Site) -> None:
    first = site.worker(concurrency=2)
    repeated = site.call("repeatable", 1, unique="repeated")
    once = site.call("holder", 2, unique="once")
    for result in (repeated, once):
        site.holding(result)

    first.kill_group()

    assert site.call("repeatable", 3, unique="repeated").id == repeated.id
    site.worker()
    site.holding(repeated, count=2)
    assert site.call("repeatable", 3, unique="repeated").id == repeated.id
    site.go(repeated)
    site.wait_quiet()
    for key, result in (("repeated", repeated), ("once", once)):
        assert site.call("noted", 4, unique=key).id != result.id


@PROCESSES
def test_a_killed_pool_process_counts_once(site: Site) -> None:
    worker = site.worker()
    repeated = site.call("suicide", 1)
    assert repeated.get(timeout=TIMEOUT_S) == "alive"
    once = site.call("holder")
    assert len(site.ran(repeated)) == 2
    os.kill(site.holding(once)["pid"], signal.SIGKILL)

    site.wait_quiet()
    assert [(entry.task_id, entry.reason) for entry in site.dead()] == [(once.id, "lost")]
    assert once.state == "FAILURE"
    assert worker.alive
    told = {what: [line["id"] for line in site.record.of(what)] for what in ("lost", "recovered", "buried")}
    assert told == {"lost": [repeated.id, once.id], "recovered": [repeated.id], "buried": [once.id]}


@PROCESSES
def test_a_task_that_kills_its_process_too_often_is_dead(site: Site) -> None:
    site.worker(env={"SIDEJOB_MAX_LOSSES": "2"})
    result = site.call("suicide", 99)

    site.wait_quiet()
    (entry,) = site.dead()
    assert (entry.reason, len(site.ran(result))) == ("lost", 2)
    assert "2 runs were lost" in entry.error


@pytest.mark.pools("prefork", "threads", "asyncio", "awaited", "gevent", reason="hears nothing while it runs a body")
def test_a_cold_stop_gives_back_what_may_be_repeated(site: Site) -> None:
    first = site.worker()
    result = site.call("repeatable", 5)
    site.holding(result)
    site.worker()

    first.send_signal(signal.SIGQUIT)

    site.holding(result, count=2)
    site.go(result)
    site.wait_quiet()
    assert site.dead() == []
    assert result.get(timeout=TIMEOUT_S) == 5


# -- workers that are silent for longer than their lease --------------------------------------------------------------


def test_what_a_silent_worker_ends_well_after_all_leaves_the_dead_set(site: Site) -> None:
    first = site.worker()
    result = site.call("holder", 1, link=site.s("plus", 1))
    site.holding(result)
    watching = site.worker(queues="elsewhere")
    with frozen(first.pid):
        wait_until(site.dead, timeout=TIMEOUT_S, message="it to be in the dead set")
        assert [entry.reason for entry in site.dead()] == ["lost"]

    site.go(result)

    site.wait_quiet()
    site.record.wait_for("ran", timeout=TIMEOUT_S, task=f"{APP}.plus")
    assert site.dead() == []
    assert (result.state, result.result, len(site.ran(result))) == ("SUCCESS", 1, 1)
    first.wait_for_log("ended well", TIMEOUT_S)
    site.record.wait_for("recovered", timeout=TIMEOUT_S, id=result.id)
    assert watching.alive


@pytest.mark.parametrize("reason", ["revoked", "expired"])
def test_what_a_silent_worker_ends_well_leaves_the_dead_set_whatever_it_was_buried_as(site: Site, reason: str) -> None:
    """With a task that would run again: nobody begins with it any more, because of what was found since."""
    first = site.worker()
    result = site.call("repeatable", 1, link=site.s("plus", 1))
    site.holding(result)
    watching = site.worker(queues="elsewhere")
    if reason == "revoked":
        result.revoke()
    else:
        site.sql("UPDATE messages SET expires_at = now() WHERE task_id = %s", result.id)
    with frozen(first.pid):
        wait_until(site.dead, timeout=TIMEOUT_S, message="it to be in the dead set")
        assert [entry.reason for entry in site.dead()] == [reason]

    site.go(result)

    first.wait_for_log("ended well", TIMEOUT_S)
    site.record.wait_for("ran", timeout=TIMEOUT_S, task=f"{APP}.plus")
    site.wait_quiet()
    assert site.dead() == []
    assert (result.state, result.result, len(site.ran(result))) == ("SUCCESS", 1, 1)
    assert watching.alive


def test_what_a_silent_worker_ends_well_before_another_begins_with_it_does_not_run_again(site: Site) -> None:
    first = site.worker()
    result = site.call("repeatable", 1, link=site.s("plus", 1))
    site.holding(result)
    site.worker(queues="elsewhere")
    with frozen(first.pid):
        wait_until(lambda: site.sql("SELECT 1 FROM messages WHERE locked_by IS NULL"), timeout=TIMEOUT_S)
        site.go(result)

    site.wait_quiet()
    site.worker()
    site.record.wait_for("ran", timeout=TIMEOUT_S, task=f"{APP}.plus")
    site.wait_quiet()
    assert (site.dead(), len(site.ran(result))) == ([], 1)
    assert len(site.record.of("holding", id=result.id)) == 1


def test_what_a_silent_worker_ends_after_another_has_begun_with_it_counts_once(site: Site) -> None:
    first = site.worker()
    result = site.call("repeatable", 1, link=site.s("plus", 1))
    site.holding(result)
    site.worker()
    with frozen(first.pid):
        site.holding(result, count=2)

    site.go(result)

    first.wait_for_log("was taken from this run", TIMEOUT_S)
    site.record.wait_for("ran", timeout=TIMEOUT_S, task=f"{APP}.plus")
    site.wait_quiet()
    assert (site.dead(), len(site.ran(result))) == ([], 2)
    assert len(site.record.of("ran", task=f"{APP}.plus")) == 1


@SEVERAL
def test_what_a_silent_worker_had_received_is_begun_soon_after_it_goes_on(site: Site) -> None:
    first = site.worker(env={"SIDEJOB_LOST_AFTER": "600"})
    waiting = site.call("noted", 2, countdown=3)  # a worker keeps what is due soon, also while its pool is busy
    first.wait_for_log(f"{waiting.id}] received", TIMEOUT_S)
    running = site.call("holder", 1)
    site.holding(running)
    site.worker(queues="elsewhere", env={"SIDEJOB_LOST_AFTER": "600"})
    with frozen(first.pid):
        wait_until(site.dead, timeout=TIMEOUT_S, message="the first to be called lost")

    site.go(running)

    assert waiting.get(timeout=TIMEOUT_S) == 2
    site.wait_quiet()
    wait_until(lambda: not site.dead(), timeout=TIMEOUT_S, message="the first to take itself back")
    assert len(site.ran(waiting)) == 1


# -- how tasks end ---------------------------------------------------------------------------------------------------


@pytest.mark.pools("prefork", "threads", "asyncio", "awaited", "gevent", reason="hears nothing while it runs a body")
@pytest.mark.parametrize(("long", "short"), [("holder", "noted"), ("repeatable", "step")])
def test_a_revoked_task_does_not_run_and_a_running_one_is_ended(site: Site, long: str, short: str) -> None:
    worker = site.worker()
    running = site.call(long)
    site.holding(running)
    waiting = site.call(short, 1)
    site.app.control.revoke(waiting.id)
    worker.wait_for_log(waiting.id, TIMEOUT_S)
    site.app.control.revoke(running.id, terminate=True, signal="SIGKILL")
    wait_until(lambda: running.id in {entry.task_id for entry in site.dead()}, timeout=TIMEOUT_S)
    site.go(running)  # a body in a thread cannot be ended

    site.wait_quiet()
    assert {(entry.task_id, entry.reason) for entry in site.dead()} == {
        (running.id, "revoked"), (waiting.id, "revoked"),
    }  # fmt: skip
    assert site.ran(waiting) == []


def test_an_expired_task_is_dead_wherever_it_expired(site: Site) -> None:
    in_store = site.call("noted", 1, expires=0.1)
    if not site.broker.is_store:  # where a row and its message are not apart
        site.broker.take("durable")
    in_broker = site.call("noted", 2, expires=0.1)

    site.worker()

    site.wait_quiet()
    assert {(entry.task_id, entry.reason) for entry in site.dead()} == {
        (in_broker.id, "expired"), (in_store.id, "expired"),
    }  # fmt: skip
    assert (in_store.state, site.ran(in_store)) == ("REVOKED", [])


# -- canvas ----------------------------------------------------------------------------------------------------------


def test_chains_groups_chords_callbacks_and_what_replaces_a_task(site: Site) -> None:
    site.worker(concurrency=2)
    plus = lambda *args: site.s("plus", *args)  # noqa: E731

    results = {
        "chain": (chain(plus(1), plus(), plus()).apply_async(), 4),
        "link": (site.call("plus", 1, link=plus()), 2),
        "chord": (chord([plus(1), plus(2)])(plus()), 6),
        "replaced": (site.call("replaced", 5), 6),
        "group": (group(plus(number) for number in range(3)).apply_async(), [1, 2, 3]),
        "nested": (site.call("nesting", 1), None),
    }

    for name, (result, wanted) in results.items():
        assert wanted is None or result.get(timeout=TIMEOUT_S) == wanted, name
    nested = results["nested"][0].get(timeout=TIMEOUT_S)
    site.record.wait_for("ran", id=nested, timeout=TIMEOUT_S)
    site.wait_quiet()
    assert site.dead() == []
    assert len(site.record.of("ran")) == 3 + 2 + 3 + 2 + 3 + 2


# -- crash points ----------------------------------------------------------------------------------------------------

RUNS_AFTER_A_DEATH = {
    "durable-begin:before-commit": 1,  # nobody holds it: struck twice, then published again
    "durable-begin:after-commit": 1,  # locked, so it counts as begun; the body was not
    "durable-end:before": 2,  # the result is stored, and what follows is not published
    "durable-end:before-commit": 2,
    "durable-end:after-commit": 1,  # what follows is a row
    "durable-end:after": 1,
}


SENDS_AGAIN = {"durable-end:before", "durable-end:before-commit"}
"""Where Celery before 5.7 does not say that it sends what follows a task, so that this is kept before the task ends."""


@pytest.mark.parametrize(
    "point",
    [pytest.param(point, marks=[CELERY_5_7] if point in SENDS_AGAIN else []) for point in RUNS_AFTER_A_DEATH],
)
def test_a_process_dies_in_each_gap_of_a_run(site: Site, point: str) -> None:
    """What may be repeated runs again and ends well; what follows it runs once.

    Its process locks the row, which is as one that has come back from a death.
    """
    (first, last) = (site.s("step", 1), site.s("noted_late"))
    result = chain(first, last).apply_async()
    site.sql("UPDATE messages SET on_lost = 'requeue'")
    worker = site.worker_with_a_crash(point)
    site.wait_for_crash()
    site.outlive(worker)

    assert result.get(timeout=TIMEOUT_S) == 1
    site.wait_quiet()
    assert len(site.record.of("ran", task=f"{APP}.step")) == RUNS_AFTER_A_DEATH[point]
    assert len(site.ran(result)) == 1
    assert site.dead() == []


@pytest.mark.parametrize("point", ["durable-begin:after-commit", "durable-end:before-commit"])
def test_what_must_not_be_repeated_is_done_or_dead(site: Site, point: str) -> None:
    worker = site.worker_with_a_crash(point)
    result = site.call("noted", 1)

    site.wait_for_crash()
    if point == "durable-end:before-commit":  # the worker writes such an end, and not the process of the run
        worker.wait(TIMEOUT_S)
        site.worker()
    else:
        site.outlive(worker)
    site.wait_quiet()
    if point == "durable-end:before-commit":
        assert (result.get(timeout=TIMEOUT_S), site.dead()) == (1, []), "it had ended, and nothing follows it"
    else:
        assert [entry.reason for entry in site.dead()] == ["lost"]
        assert site.ran(result) == []


@pytest.mark.few(2)
@pytest.mark.parametrize("point", ["durable-begin:before-commit", "durable-begin:after-commit"])
@pytest.mark.parametrize("pool", ["solo", "threads"])
def test_a_worker_dies_around_a_lock_of_its_own_process(site: Site, tmp_path: Path, pool: str, point: str) -> None:
    env = {"SIDEJOB_CRASH_POINTS": f"{point}=kill@2", "SIDEJOB_CRASH_ONCE": str(tmp_path / "once")}
    worker = site.worker(env=env, pool=pool)
    first = site.call("noted", 1)
    assert first.get(timeout=TIMEOUT_S) == 1
    result = site.call("noted", 2)

    worker.wait(TIMEOUT_S)
    site.worker()

    site.wait_quiet()
    if point == "durable-begin:before-commit":
        assert (result.get(timeout=TIMEOUT_S), site.dead()) == (2, [])
        assert len(site.ran(result)) == 1
    else:
        assert ([entry.reason for entry in site.dead()], site.ran(result)) == (["lost"], [])


@pytest.mark.parametrize("point", ["durable-begin:after-commit", "durable-end:after-commit"])
@pytest.mark.parametrize("pool", ["solo", "threads"])
def test_a_lost_answer_to_a_lock_or_an_end_repeats_nothing(site: Site, tmp_path: Path, pool: str, point: str) -> None:
    env = {"SIDEJOB_CRASH_POINTS": f"{point}=lost@2", "SIDEJOB_CRASH_ONCE": str(tmp_path / "once")}
    worker = site.worker(env=env, pool=pool)
    results = [site.call("noted", 0)]
    site.wait_quiet()  # so that not all ends are one statement
    results += [site.call("noted", number) for number in range(1, 4)]

    assert [result.get(timeout=TIMEOUT_S) for result in results] == [0, 1, 2, 3]
    wait_until((tmp_path / "once").exists, timeout=TIMEOUT_S)
    site.wait_quiet()
    assert ([len(site.ran(result)) for result in results], site.dead()) == ([1] * 4, [])
    assert worker.alive


COUNTS, PUBLISHES = "on_chord_part_return", "_chord_claim_extend_script"


@pytest.mark.parametrize(("task", "where"), [("once", COUNTS), ("once", PUBLISHES), ("repeatable", PUBLISHES)])
def test_a_part_of_a_chord_dies_before_it_is_counted_or_publishes_the_body(site: Site, task: str, where: str) -> None:
    worker = site.worker(env=BRIEF_CLAIM)
    other = site.s("noted", 2)
    result = chord([other, site.s(f"uncounted_{task}", 1, where)])(site.s("plus"))
    site.outlive(worker)

    assert result.get(timeout=TIMEOUT_S) == 4
    site.wait_quiet()
    assert len(site.ran(result)) == 1
    assert site.dead() == []


@pytest.mark.few(3)
@pytest.mark.parametrize("point", ["durable-end:before", "durable-end:before-commit", "durable-end:after"])
@pytest.mark.parametrize("task", ["step", "noted"])
def test_the_last_part_of_a_chord_dies_around_its_end(site: Site, task: str, point: str) -> None:
    """The backend has been told of it by then, and only that process knows of the body."""
    worker = site.worker_with_a_crash(point, **BRIEF_CLAIM)
    result = chord([site.s(task, 1)])(site.s("plus"))
    site.wait_for_crash()
    site.outlive(worker)

    assert result.get(timeout=TIMEOUT_S) == 2
    site.wait_quiet()
    assert (len(site.ran(result)), site.dead()) == (1, [])
    if point != "durable-end:after" and celery.VERSION[:2] >= (5, 7):  # else what the backend has of it expires
        wait_until(lambda: joining(site, result) == [".c"], timeout=TIMEOUT_S, message="the chord to be forgotten")


@pytest.mark.few(0)
@CELERY_5_7  # before, the body is kept while the backend counts, or the chord fails
@PROCESSES
@pytest.mark.parametrize("task", ["holder", "repeatable"])
def test_the_last_part_of_a_chord_dies_while_the_store_is_away(site: Site, task: str) -> None:
    with TcpProxy.to(site.database_url) as proxy:
        store = {"SIDEJOB_DATABASE_URL": proxy.url_for(site.database_url), "SIDEJOB_LEASE": "5"}
        site.worker(env={**store, **BRIEF_CLAIM})
        result = chord([site.s("noted", 2), site.s(task, 1)])(site.s("plus"))
        last = result.parent.children[1]
        pid = site.holding(last)["pid"]
        result.parent.children[0].get(timeout=TIMEOUT_S)
        wait_until(lambda: len(site.rows()) == 1, timeout=TIMEOUT_S, message="the other part to have ended")
        proxy.refuse()
        site.go(last)
        wait_until(lambda: ".c" in joining(site, result), timeout=TIMEOUT_S, message="both parts to be counted")

        os.kill(pid, signal.SIGKILL)
        proxy.pass_through()

        if task == "repeatable":
            site.holding(last, count=2)
        assert result.get(timeout=TIMEOUT_S) == 4
        site.wait_quiet()
    assert (len(site.ran(result)), site.dead()) == (1, [])


@CELERY_5_7  # before, such a chord fails
@pytest.mark.parametrize("task", ["holder", "repeatable"])
def test_a_chord_ends_with_the_store_away_for_longer_than_a_lease(site: Site, task: str) -> None:
    """Its last part is called lost, or not, and both who ends it late and who finds it lost may publish the body."""
    with TcpProxy.to(site.database_url) as proxy:
        worker = site.worker(env={"SIDEJOB_DATABASE_URL": proxy.url_for(site.database_url), **BRIEF_CLAIM})
        result = chord([site.s(task, 1)])(site.s("plus").set(ignore_result=True))
        (last,) = result.parent.children
        site.holding(last)
        proxy.refuse()
        site.go(last)
        worker.wait_for_log("could not be written", TIMEOUT_S)
        proxy.pass_through()

        site.wait_quiet()
        assert site.record.wait_for("ran", id=result.id, timeout=TIMEOUT_S)[-1]["value"] == [1]
        wait_until(lambda: joining(site, result) == [".c"], timeout=TIMEOUT_S, message="the chord to be forgotten")
    assert (len(site.ran(result)), site.dead()) == (1, [])


@pytest.mark.pools("prefork", reason="has no soft time limits")
@pytest.mark.parametrize("task", ["holder", "repeatable"])
@pytest.mark.parametrize("value", [1, "fail"])
def test_a_soft_time_limit_that_strikes_after_the_body_does_not_change_its_end(
    site: Site, task: str, value: Any
) -> None:
    """It is raised in the middle of our own statement, which waits for somebody who has locked the row."""
    worker = site.worker(concurrency=1)
    result = site.call(task, value, soft_time_limit=2, link=site.s("plus"))
    site.holding(result)

    with site.locked(result):
        site.go(result)
        worker.wait_for_log("Soft time limit", TIMEOUT_S)

    site.wait_quiet()
    assert len(site.ran(result)) == 1
    assert site.record.of("lost") == []
    if value == "fail":
        assert [(entry.task_id, entry.reason) for entry in site.dead()] == [(result.id, "failed")]
    else:
        assert (result.get(timeout=TIMEOUT_S), site.dead()) == (1, [])
        assert len(site.record.of("ran", task=f"{APP}.plus")) == 1
    after = site.call("noted", 2)
    assert after.get(timeout=TIMEOUT_S) == 2
    assert site.ran(after)[0]["pid"] == site.ran(result)[0]["pid"], "its process goes on"


@pytest.mark.pools("prefork", reason="has no soft time limits")
@pytest.mark.parametrize("task", ["holder", "repeatable"])
def test_a_soft_time_limit_that_strikes_before_the_body_has_it_begin_later(site: Site, task: str) -> None:
    """The message of the first is acknowledged early, that of the second is not; both are sent again."""
    result = site.call(task, 1, soft_time_limit=1)
    site.go(result)
    with site.locked(result):
        worker = site.worker(concurrency=1)
        worker.wait_for_log("its time limit struck while it waited for its lock", TIMEOUT_S)

    assert result.get(timeout=TIMEOUT_S) == 1
    site.wait_quiet()
    assert (len(site.ran(result)), site.record.of("lost"), site.dead()) == (1, [], [])


def joining(site: Site, result: Any) -> list[str]:
    """What the result backend has of a chord that it has not forgotten."""
    backend = site.app.backend
    there = {end: backend.client.exists(backend.get_key_for_group(result.parent.id, end)) for end in (".j", ".s", ".c")}
    return [end for end, exists in there.items() if exists]


@pytest.mark.parametrize("point", ["durable-move:before-commit", "durable-move:after-commit"])
def test_a_process_dies_around_a_retry(site: Site, point: str) -> None:
    worker = site.worker_with_a_crash(point)
    result = site.call("retrying", 1)

    site.wait_for_crash()
    site.outlive(worker)
    site.wait_quiet()
    if point == "durable-move:before-commit":
        assert [entry.reason for entry in site.dead()] == ["lost"]
    else:
        assert (result.get(timeout=TIMEOUT_S), site.dead()) == (1, [])


@pytest.mark.few(3)
@pytest.mark.parametrize("point", [f"durable-{name}:after-commit" for name in ("begin", "end", "keep", "move", "bury")])
def test_an_answer_is_lost(site: Site, point: str) -> None:
    site.worker_with_a_crash(point, "lost")
    results = [site.call("nesting", 1), site.call("retrying", 1), site.call("failing")]

    site.wait_for_crash()
    site.wait_quiet()
    assert [len(site.ran(result)) for result in results] == [1, 2, 1]
    assert len(site.record.of("ran", task=f"{APP}.noted")) == 1
    assert [(entry.task_id, entry.reason) for entry in site.dead()] == [(results[2].id, "failed")]


POOLS = {
    "solo": {"pool": "solo"},
    "threads": {"pool": "threads"},
    "gevent": {"pool": "gevent"},
    "spawn": {"env": {"START_METHOD": "spawn"}},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("pool", POOLS)
def test_other_pools(site: Site, pool: str) -> None:
    first = site.worker(concurrency=2, **POOLS[pool])
    good = [site.call("plus", number, link=site.s("plus", 1)) for number in range(5)]
    bad = site.call("failing")
    again, nesting, by_name = site.call("retrying", 2), site.call("nesting", 1), site.call("named.by_its_name", 3)
    assert [result.get(timeout=TIMEOUT_S) for result in good] == [1, 2, 3, 4, 5]
    assert (again.get(timeout=TIMEOUT_S), by_name.get(timeout=TIMEOUT_S)) == (2, 3)
    site.record.wait_for("ran", timeout=TIMEOUT_S, id=nesting.get(timeout=TIMEOUT_S))
    site.wait_quiet()
    assert [entry.task_id for entry in site.dead()] == [bad.id]

    held = site.call("repeatable", 1)
    site.holding(held)
    site.worker()
    first.kill_group()
    site.holding(held, count=2)
    site.go(held)
    site.wait_quiet()
    assert len(site.dead()) == 1


ENDS = {"ignore": 1, "reject": 2, "retry": 2, "fail": 1, "heartbeat": 1}
"""How often a task runs that ends so."""


@pytest.mark.parametrize("pool", ["prefork", "solo", "gevent"])
def test_each_way_to_end_of_what_may_be_repeated(site: Site, pool: str) -> None:
    worker = site.worker(pool=pool)
    many = [site.call("step", number) for number in range(50)]
    ends = {how: site.call("ending", how) for how in ENDS}
    linked = site.call("step", 7, link=site.s("plus"))

    assert [result.get(timeout=TIMEOUT_S) for result in (*many, linked)] == [*range(50), 7]
    assert [ends[how].get(timeout=TIMEOUT_S) for how in ("retry", "heartbeat")] == ["retry", [True, True]]
    site.wait_quiet()
    assert [(entry.task_id, entry.reason) for entry in site.dead()] == [(ends["fail"].id, "failed")]
    assert {how: len(site.ran(result)) for how, result in ends.items()} == ENDS
    assert [len(site.ran(result)) for result in many] == [1] * 50
    assert len(site.record.of("ran", task=f"{APP}.plus")) == 1
    assert worker.alive
    assert "does not count" not in worker.log()


@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_a_stop_writes_all_ends_of_what_may_be_repeated(site: Site, pool: str) -> None:
    """Also where a process of the pool has run as many tasks as it may. What was not written would run again."""
    worker = site.worker(env={"SIDEJOB_LOST_AFTER": "600"}, pool=pool, concurrency=1, extra=["--max-tasks-per-child=3"])
    results = [site.call("step", number) for number in range(4)]
    assert [result.get(timeout=TIMEOUT_S) for result in results] == [0, 1, 2, 3]

    worker.terminate()

    assert worker.wait(TIMEOUT_S) == 0
    assert (site.rows(), site.dead()) == ([], [])
    assert [len(site.ran(result)) for result in results] == [1] * 4


@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_a_body_that_leaves_is_lost_at_once(site: Site, pool: str) -> None:
    worker = site.worker(pool=pool, env={"SIDEJOB_LEASE": "600"})
    repeated, once = site.call("leaver", 1), site.call("leaver_once")

    assert repeated.get(timeout=TIMEOUT_S) == "stayed"
    site.wait_quiet()
    assert [(entry.task_id, entry.reason) for entry in site.dead()] == [(once.id, "lost")]
    assert (len(site.ran(repeated)), len(site.ran(once))) == (2, 1)
    assert worker.alive


@pytest.mark.parametrize("terminate", [False, True])
def test_what_is_revoked_while_it_waits_for_a_thread_does_not_run(site: Site, terminate: bool) -> None:
    site.app.sidejob.poll()  # the first look at a fresh broker sends copies, which the worker would fetch instead
    worker = site.worker(pool="threads")
    running, waiting = site.call("holder"), site.call("noted")
    site.holding(running)

    site.app.control.revoke(waiting.id, terminate=terminate)
    worker.wait_for_log(waiting.id, TIMEOUT_S)
    site.go(running)

    site.wait_quiet()
    assert [(entry.task_id, entry.reason) for entry in site.dead()] == [(waiting.id, "revoked")]
    assert (waiting.state, site.ran(waiting)) == ("REVOKED", [])


def test_what_is_terminated_in_a_thread_stays_revoked_and_nothing_follows(site: Site) -> None:
    worker = site.worker(pool="threads")
    last = (site.s("holder") | site.s("noted")).apply_async()
    running = last.parent
    site.holding(running)

    site.app.control.revoke(running.id, terminate=True)
    wait_until(lambda: [entry.task_id for entry in site.dead()] == [running.id], timeout=TIMEOUT_S)
    site.go(running)

    worker.wait_for_log(f"Task {running.id} was taken from this run", TIMEOUT_S)
    site.wait_quiet()
    assert [(entry.task_id, entry.reason) for entry in site.dead()] == [(running.id, "revoked")]
    assert site.ran(last) == []


# -- later, and from beat --------------------------------------------------------------------------------------------


def test_a_retry_and_a_call_far_ahead_wait_in_the_store(site: Site) -> None:
    site.worker(env={"SIDEJOB_TIMER_HORIZON": "1"})
    near = site.client(sidejob_database_url=site.database_url, sidejob_timer_horizon=1)
    called = near.send_task(f"{APP}.noted", ("later",), countdown=8)
    retried = site.call("patiently")
    site.record.wait_for("ran", timeout=TIMEOUT_S, id=retried.id)

    wait_until(lambda: {row.generation for row in site.rows()} == {1, 2}, timeout=TIMEOUT_S)
    waiting = {row.task_id: row.published_at for row in site.rows()}
    assert (waiting.keys(), site.queued()) == ({called.id, retried.id}, 0)
    assert site.broker.is_store or not any(waiting.values())
    assert retried.get(timeout=TIMEOUT_S) == 1
    assert called.get(timeout=TIMEOUT_S) == "later"
    site.wait_quiet()


def test_what_beat_sends_is_kept_when_beat_is_killed(site: Site) -> None:
    beat = site.processes.start_beat(APP, env=site.env)
    wait_until(lambda: len(site.rows()) >= 2, timeout=TIMEOUT_S)
    beat.kill_group()
    ids = {row.task_id for row in site.rows() if row.task.endswith(".noted")}
    site.empty_broker()

    site.worker()

    site.wait_quiet()
    assert {line["id"] for line in site.record.of("ran") if line["value"] == "beat"} == ids
    assert site.dead() == []
