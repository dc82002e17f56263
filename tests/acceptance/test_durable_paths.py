"""Each way a durable task can be called, and each way it can end; all with one worker, which outlives them."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from celery import Celery, chain, chord, group

from tests.acceptance.durable_site import APP, PROCESSES, SEVERAL, TIMEOUT_S
from tests.acceptance.durable_site import Site as OneTest
from tests.acceptance.shared_site import Place
from tests.tools.brokers import APART
from tests.tools.pgbouncer import direct
from tests.tools.versions import CELERY_5_7
from tests.tools.waiting import wait_until
from tests.tools.workers import WorkerProcess


class Site(OneTest):
    """The same for all tests of the module; each looks at tasks of its own."""

    process: WorkerProcess

    def __init__(self, place: Place) -> None:
        super().__init__(place.database_url, place.broker, place.record, place.processes)
        self.process = self.worker(concurrency=2)

    def stranger(self) -> Celery:
        """A client that knows nothing of this package."""
        app = Celery("stranger", set_as_current=False)
        app.conf.update(**self.broker.configuration, task_default_queue="durable")
        self._clients.append(app)
        return app

    def over(self, *results: Any) -> None:
        """Wait until these tasks are kept no longer."""
        for result in results:
            wait_until(
                lambda result=result: not self.sql("SELECT 1 FROM messages WHERE task_id = %s", result.id),
                timeout=TIMEOUT_S, message=f"{result} to be over",
            )  # fmt: skip

    def entry(self, result: Any) -> Any:
        """The entry of a task in the dead set, once it is over; there is one, and it was told of once."""
        self.over(result)
        (entry,) = [one for one in self.app.sidejob.dead if one.task_id == result.id]
        self.record.wait_for("buried", id=result.id, timeout=TIMEOUT_S)
        assert [(line["entry"], line["reason"]) for line in self.record.of("buried", id=result.id)] == [
            (entry.id, entry.reason)
        ]
        return entry

    def nothing_died(self, *results: Any) -> None:
        """These tasks are over, and none of them is in the dead set."""
        self.over(*results)
        assert {entry.task_id for entry in self.dead()} & {result.id for result in results} == set()


@pytest.fixture(scope="module")
def site(shared_place: Place) -> Iterator[Site]:
    """A store, a broker, a record and a worker."""
    made = Site(shared_place)
    yield made
    assert made.process.alive
    made.close()


# -- while it runs ---------------------------------------------------------------------------------------------------


def test_a_run_holds_its_row_and_a_poll_leaves_it_alone(site: Site) -> None:
    result = site.call("holder", 1)
    pid = site.holding(result)["pid"]

    held = """
        SELECT m.locked_pid, w.ident, m.next_check_at = 'infinity' AS rests, m.suspected_at,
          now() - m.locked_at < interval '1 min' AS just_now
        FROM messages m JOIN workers w ON w.id = m.locked_by WHERE m.task_id = %s"""
    (row,) = site.sql(held, result.id)
    host, parent, nonce = row.ident.rsplit(":", 2)
    assert (row.locked_pid, host, int(parent), len(nonce) > 3) == (pid, socket.gethostname(), site.process.pid, True)
    assert (row.rests, row.suspected_at, row.just_now) == (True, None, True)
    site.sql("UPDATE messages SET locked_at = now() - interval '1 day' WHERE task_id = %s", result.id)
    for _ in range(2):
        site.app.sidejob.poll()
    assert site.sql(held, result.id)[0].locked_pid == pid, "however long it takes"
    assert site.sql("SELECT 1 FROM messages WHERE task_id = %s", result.id)

    site.go(result)
    assert result.get(timeout=TIMEOUT_S) == 1
    site.nothing_died(result)
    assert len(site.ran(result)) == 1


def test_a_chord_in_a_transaction_runs_once_that_is_committed(site: Site) -> None:
    with psycopg.connect(direct(site.database_url)) as transaction:
        parts = [site.s("noted", 1), site.s("noted", 2)]
        result = chord(parts, site.s("plus")).apply_async(transaction=transaction)
        assert site.call("noted", 3).get(timeout=TIMEOUT_S) == 3
        assert [site.ran(part) for part in result.parent] == [[], []]

    assert result.get(timeout=TIMEOUT_S) == 4
    site.nothing_died(result, *result.parent)


@SEVERAL
def test_what_runs_inside_a_run_is_not_another(site: Site) -> None:
    result = site.call("inline")
    site.holding(result)
    wait_until(
        lambda: [row.task_id for row in site.rows()] == [result.id], timeout=TIMEOUT_S,
        message="what it called back to be over, and nothing else to be kept",
    )  # fmt: skip

    site.go(result)
    assert result.get(timeout=TIMEOUT_S) == [2, 3, 4, True]
    site.nothing_died(result)


@SEVERAL
def test_a_body_is_told_whether_its_run_still_counts(site: Site) -> None:
    kept, taken = site.call("beating"), site.call("beating")
    for result in (kept, taken):
        (line,) = site.record.wait_for("beat", id=result.id, timeout=TIMEOUT_S)
        assert (line["held"], line["in_a_thread"], line["stopping"]) == (True, [True], False)

    site.sql(
        "UPDATE messages SET locked_by = NULL, locked_at = NULL, locked_pid = NULL, published_at = NULL,"
        " doom = 'lost', next_check_at = 'infinity' WHERE task_id = %s", taken.id
    )  # fmt: skip
    site.go(kept, taken)

    assert (kept.get(timeout=TIMEOUT_S), taken.get(timeout=TIMEOUT_S)) == (True, False)
    assert "was taken from this run" in site.record.of("refused", id=taken.id)[0]["error"]
    assert site.record.of("refused", id=kept.id) == []
    site.nothing_died(kept, taken)  # what ended well takes itself back from being lost


# -- how it is called ------------------------------------------------------------------------------------------------


def test_ways_to_call(site: Site) -> None:
    stranger = site.stranger()
    at = datetime.now(UTC) + timedelta(seconds=1)
    results = {
        "by name": site.app.send_task(f"{APP}.noted", (1,)),
        "in time to come": site.call("noted", 2, countdown=1),
        "at a time": site.call("noted", 3, eta=at),
        "not expired": site.call("noted", 4, expires=60),
        "by a task that is not durable": stranger.send_task(f"{APP}.calling", (5,)),
        "of any serializer": site.call("noted", 6, serializer="yaml", compression="zlib"),
        "without a result": site.call("noted", 7, ignore_result=True),
        "late": site.call("noted_late", 8),
    }

    five = results["by a task that is not durable"]
    (line,) = site.record.wait_for("ran", id=five.get(timeout=TIMEOUT_S), timeout=TIMEOUT_S)
    assert line["value"] == 5
    site.nothing_died(*results.values())
    lines = {name: site.ran(result) for name, result in results.items()}
    assert [len(found) for found in lines.values()] == [1] * len(results)
    assert lines["at a time"][0]["at"] >= at.timestamp()
    assert lines["in time to come"][0]["at"] - lines["by name"][0]["at"] > 0.5
    assert results["of any serializer"].get(timeout=TIMEOUT_S) == 6
    assert (results["without a result"].state, results["late"].state) == ("PENDING", "SUCCESS")


def test_a_canvas_of_everything(site: Site) -> None:
    plus = lambda *args: site.s("plus", *args)  # noqa: E731

    results = {
        "replaced within a chain": (chain(site.s("replaced", 1), plus()).apply_async(), 3),
        "replaced by a group": (site.call("replaced_by_many", 1, 2, 3), [2, 3, 4]),
        "replaced by a task that is not durable": (site.call("replaced_by_plain", 7), 7),
        "a chord in a chain": (chain(plus(1), group(plus(), plus()), plus()).apply_async(), 7),
        "a chord of retried ones": (chord([site.s("retrying", 1), site.s("again", 1)])(plus()), 3),
        "a link of a chain": (chain(plus(1), plus()).apply_async(link=plus()), 3),
    }

    for name, (result, wanted) in results.items():
        assert result.get(timeout=TIMEOUT_S) == wanted, name
    site.nothing_died(*[result for result, _ in results.values()])


def test_autoretry_goes_on_in_the_row_until_it_is_used_up(site: Site) -> None:
    good, bad = site.call("again", 1), site.call("again", 9)

    assert good.get(timeout=TIMEOUT_S) == 1
    entry = site.entry(bad)
    assert (entry.reason, entry.error, entry.retries) == ("failed", "ValueError: not yet", 1)
    assert [[line["retries"] for line in site.ran(result)] for result in (good, bad)] == [[0, 1]] * 2


def test_a_body_names_the_group_of_its_failure(site: Site) -> None:
    result = site.call("out_of_stock")

    entry = site.entry(result)

    assert (entry.group, entry.error) == ("no stock", "JobFailed: Shelf 7 is empty.")
    assert site.app.sidejob.dead.list(group="no stock")[0].task_id == result.id


# -- how it ends -----------------------------------------------------------------------------------------------------


@pytest.mark.pools("prefork", reason="is Celery's apply_target, which calls all that is no Exception a lost worker")
@CELERY_5_7  # before, Celery stores nothing of it
def test_a_body_that_raises_no_exception_of_the_ordinary_kind(site: Site) -> None:
    left, raised = site.call("leaving", "exit"), site.call("leaving", "raise")

    entries = [site.entry(result) for result in (left, raised)]
    assert [(entry.reason, entry.error.partition(":")[0], entry.losses) for entry in entries] == [
        ("lost", "WorkerLostError", 1), ("failed", "OutOfTheOrdinary", 0),
    ]  # fmt: skip
    assert [len(site.ran(result)) for result in (left, raised)] == [1, 1]
    assert [len(site.record.of("lost", id=result.id)) for result in (left, raised)] == [1, 0]
    assert (left.state, raised.state) == ("FAILURE", "FAILURE")


def test_a_body_that_no_worker_may_decode_for_a_day_is_dead_and_is_so_again(site: Site) -> None:
    def let_a_day_pass() -> None:
        a_day_ago = (
            "UPDATE messages SET declined_at = now() - interval '25 h', next_check_at = now() "
            "WHERE task_id = %s AND declined_at IS NOT NULL RETURNING task_id"
        )
        wait_until(lambda: site.sql(a_day_ago, result.id), timeout=TIMEOUT_S, message="it to be declined")

    result = site.call("noted", {1, 2}, serializer="pickle")
    let_a_day_pass()

    entry = site.entry(result)

    assert (entry.reason, entry.error.partition(":")[0]) == ("failed", "ContentDisallowed")
    assert result.state == "FAILURE"
    site.app.sidejob.dead.retry(entry.id)
    let_a_day_pass()
    site.over(result)
    (again,) = [one for one in site.app.sidejob.dead if one.task_id == result.id]
    assert (again.error, [death["error"] for death in again.history]) == (entry.error, ["ContentDisallowed"])
    assert site.ran(result) == []


@PROCESSES
def test_who_waits_is_told_that_a_run_was_lost(site: Site) -> None:
    errback = site.s("errback")
    alone = site.call("holder", link_error=errback)
    whole = chord([site.s("holder"), site.s("plus", 1)])(site.s("plus").on_error(errback))
    part = whole.parent.results[0]
    for result in (alone, part):
        os.kill(site.holding(result)["pid"], signal.SIGKILL)

    assert (site.entry(alone).reason, site.entry(part).reason) == ("lost", "lost")
    with pytest.raises(Exception, match="The run was lost, and its task must not be repeated"):
        alone.get(timeout=TIMEOUT_S)
    with pytest.raises(Exception, match="The run was lost, and its task must not be repeated"):
        whole.get(timeout=TIMEOUT_S)
    site.record.wait_for("errback", of=alone.id, timeout=TIMEOUT_S)
    site.record.wait_for("errback", of=whole.id, timeout=TIMEOUT_S)
    assert site.ran(whole) == []


@CELERY_5_7  # before, Celery stores a failure all the same
def test_a_failure_whose_result_nobody_wants(site: Site) -> None:
    result = site.call("failing", ignore_result=True, link_error=site.s("errback"))

    assert site.entry(result).reason == "failed"
    site.record.wait_for("errback", of=result.id, timeout=TIMEOUT_S)
    assert result.state == "PENDING"


def test_nothing_that_is_redacted_is_shown_or_logged(site: Site) -> None:
    result = site.call("telling", "hunter2")

    entry = site.entry(result)

    assert "hunter2" in site.dead()[-1].error, "it is kept"
    discreet = site.client(
        sidejob_database_url=site.database_url, sidejob_redact=lambda value: value.replace("hunter2", "[hidden]")
    ).sidejob.dead.get(entry.id)
    assert discreet.error == "ValueError: cannot use [hidden]"
    assert discreet.arguments == "('[hidden]',) {}"
    assert "[hidden]" in discreet.traceback
    assert "hunter2" not in discreet.traceback
    site.process.wait_for_log("cannot use [hidden]", TIMEOUT_S)
    assert "hunter2" not in site.process.log()


@pytest.mark.brokers("redis", only=APART, reason="has a message with the commit that keeps it")
def test_a_publisher_that_dies_before_its_mark_makes_a_copy_that_does_not_run(site: Site) -> None:
    source = f"from {APP} import noted; noted.apply_async((7,), task_id='unmarked')"
    client = site.processes.start_python(source, env={**site.env, "SIDEJOB_CRASH_POINTS": "publish:after=kill"})

    assert client.wait(TIMEOUT_S) == -signal.SIGKILL
    site.record.wait_for("ran", id="unmarked", timeout=TIMEOUT_S)
    site.over(site.app.AsyncResult("unmarked"))
    for number in range(2):  # the copy came before these
        site.call("noted", number).get(timeout=TIMEOUT_S)
    assert len(site.record.of("ran", id="unmarked")) == 1


def test_a_client_that_knows_nothing_of_this_may_retry_and_call_by_chain(site: Site) -> None:
    stranger = site.stranger()
    again = stranger.send_task(f"{APP}.again", (1,), headers={"mine": 1})
    many = chain(stranger.signature(f"{APP}.plus", (1,)), stranger.signature(f"{APP}.plus")).apply_async()

    assert again.get(timeout=TIMEOUT_S) == 1
    assert many.get(timeout=TIMEOUT_S) == 3
    site.nothing_died(again, many)
    assert [(line["retries"], line["headers"]) for line in site.ran(again)] == [(0, {"mine": 1}), (1, {"mine": 1})]


def test_a_task_that_is_durable_for_its_publisher_alone(site: Site) -> None:
    """A worker that would not end its row would run it again and again."""
    good, bad = site.call("plain", 1), site.call("plain_failing")

    assert site.entry(bad).error == "ValueError: for good"
    site.nothing_died(good)
    assert [len(site.ran(result)) for result in (good, bad)] == [1, 1]
    site.process.wait_for_log(f"{APP}.plain is durable for who called it, and not in this worker", TIMEOUT_S)


# -- each way to end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["noted", "noted_late", "named.by_its_name"])
def test_a_task_leaves_nothing_behind(site: Site, task: str) -> None:
    result = site.call(task, 3)

    assert result.get(timeout=TIMEOUT_S) == 3
    site.nothing_died(result)
    assert len(site.ran(result)) == 1


def test_a_failure_is_in_the_dead_set_with_its_traceback(site: Site) -> None:
    result = site.call("failing", link_error=site.s("errback"))

    entry = site.entry(result)
    assert (entry.reason, entry.error) == ("failed", "ValueError: for good")
    assert "raise ValueError" in entry.traceback
    assert len(site.ran(result)) == 1
    assert result.state == "FAILURE"
    site.record.wait_for("errback", of=result.id, timeout=TIMEOUT_S)


def test_a_retry_moves_the_row(site: Site) -> None:
    good, bad = site.call("retrying", 2), site.call("retrying", 9)

    assert good.get(timeout=TIMEOUT_S) == 2
    site.nothing_died(good)
    assert [line["retries"] for line in site.ran(good)] == [0, 1, 2]
    assert (site.entry(bad).retries, len(site.ran(bad))) == (2, 3)


@pytest.mark.parametrize(
    ("task", "kind"),
    [
        pytest.param(
            "slow", "TimeLimitExceeded", marks=pytest.mark.pools("prefork", "gevent", reason="has no time limits")
        ),
        pytest.param(
            "softly", "SoftTimeLimitExceeded", marks=pytest.mark.pools("prefork", reason="has no soft time limits")
        ),
    ],
)
def test_a_time_limit_is_a_failure_and_no_loss(site: Site, task: str, kind: str) -> None:
    result = site.call(task)

    entry = site.entry(result)
    assert (entry.reason, entry.error.partition(":")[0].partition("(")[0]) == ("failed", kind)
    assert len(site.ran(result)) == 1


def test_ignored_and_rejected_tasks(site: Site) -> None:
    ignored, dropped, again = site.call("ignoring"), site.call("rejecting", False), site.call("rejecting", True)

    assert again.get(timeout=TIMEOUT_S) == "taken"
    site.nothing_died(ignored, again)
    assert site.entry(dropped).reason == "failed"
    assert [len(site.ran(one)) for one in (ignored, dropped, again)] == [1, 1, 2]


def test_a_task_that_stays_unknown_is_dead(site: Site) -> None:
    result = site.app.send_task(f"{APP}.nobody_knows_it")
    parked = "SELECT 1 FROM messages WHERE task_id = %s AND gate = 3"
    wait_until(lambda: site.sql(parked, result.id), message="it to be parked")
    assert result.state == "PENDING"
    site.sql("UPDATE messages SET next_check_at = now() WHERE task_id = %s", result.id)

    entry = site.entry(result)
    assert result.state == "FAILURE"
    assert (entry.reason, entry.error.partition(":")[0]) == ("failed", "NotRegistered")


@PROCESSES
def test_a_retried_entry_of_the_dead_set_runs(site: Site) -> None:
    result = site.call("holder", 4)
    os.kill(site.holding(result)["pid"], signal.SIGKILL)

    site.app.sidejob.dead.retry(site.entry(result).id)

    site.holding(result, count=2)
    site.go(result)
    site.nothing_died(result)
    assert len(site.ran(result, value=4)) == 1
