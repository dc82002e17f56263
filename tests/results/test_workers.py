"""Plain Celery apps with broker and results in one Postgres, on real workers: what users of Celery rely on."""

from __future__ import annotations

import math
from typing import Any

import pytest
from celery import Celery, chain, chord, group, states

from celery_sidejob import embedded
from celery_sidejob.store.schema.migrate import upgrade
from tests.results.conftest import Make, Rows
from tests.tools.brokers import in_postgres
from tests.tools.recorder import Record
from tests.tools.versions import KOMBU_5_7
from tests.tools.waiting import patient
from tests.tools.workers import Processes

pytestmark = KOMBU_5_7

TIMEOUT_S = patient(15)
POOLS = ["prefork", "solo", "threads", "gevent"]


@pytest.mark.few(2)
@pytest.mark.parametrize("pool", POOLS)
def test_calls_canvas_and_errors(app: Celery, start: Any, pool: str) -> None:
    start(pool)
    add, total = app.signature("add"), app.signature("total")
    results = [
        (add.clone((1, 2)).delay(), 3),
        (chain(add.clone((1, 2)), add.clone((3,)), add.clone((4,)))(), 10),
        (group(add.clone((number, 1)) for number in range(5))(), [1, 2, 3, 4, 5]),
        (chord([add.clone((number, number)) for number in range(5)])(total), 20),
    ]
    for result, expected in results:
        assert result.get(timeout=TIMEOUT_S) == expected
    failed = app.send_task("odd", ("error",))
    with pytest.raises(Exception, match=r"OddError\(1, "):
        failed.get(timeout=TIMEOUT_S)
    assert "OddError" in failed.traceback
    parent = app.send_task("parent", (3,))
    assert parent.get(timeout=TIMEOUT_S) == 3
    assert [child.get(timeout=TIMEOUT_S) for child in parent.children] == [0, 2, 4]


def test_odd_values_and_large_ones(app: Celery, start: Any) -> None:
    start()
    odd = app.send_task("odd", ("value",)).get(timeout=TIMEOUT_S)
    assert (odd["nul"], odd["lone"], math.isnan(odd["nan"])) == ("\0", "\ud800", True)
    text = app.send_task("odd", ("text",))
    with pytest.raises(ValueError, match="\0 and \ud800"):
        text.get(timeout=TIMEOUT_S)
    assert app.send_task("large", (1_000_000,)).get(timeout=TIMEOUT_S) == "x" * 1_000_000


def test_an_error_that_cannot_be_pickled_is_shown(make: Make, start: Any) -> None:
    settings = {"result_serializer": "pickle", "accept_content": ["json", "pickle"]}
    start(settings=settings)
    failed = make(**settings).send_task("odd", ("error",))
    with pytest.raises(Exception, match="OddError"):
        failed.get(timeout=TIMEOUT_S)
    assert failed.state == states.FAILURE


def test_states_of_the_user_s_own_are_told(app: Celery, start: Any, record: Record) -> None:
    start(settings={"task_track_started": True})
    seen: list[Any] = []

    def on_message(meta: Any) -> None:
        seen.append(meta["status"])
        if meta["status"] == "PROGRESS":
            record.note(f"seen {meta['result']['step']}")

    assert app.send_task("told", (3,)).get(timeout=TIMEOUT_S, on_message=on_message) == 3
    assert [status for status in seen if status != states.STARTED] == ["PROGRESS"] * 3 + [states.SUCCESS]


def test_ignored_results_are_not_kept(app: Celery, start: Any, rows: Rows) -> None:
    start("solo")
    app.send_task("add", (1, 2), ignore_result=True)
    assert app.send_task("add", (1, 2)).get(timeout=TIMEOUT_S) == 3
    assert len(rows.keys) == 1


def test_a_revoked_task_and_one_of_no_name(app: Celery, start: Any) -> None:
    worker = start("solo")
    app.control.revoke("revoked")
    worker.wait_for_log("revoked", TIMEOUT_S)
    revoked = app.send_task("add", (1, 2), task_id="revoked")
    with pytest.raises(Exception, match="revoked"):
        revoked.get(timeout=TIMEOUT_S)
    assert revoked.state == states.REVOKED
    unknown = app.send_task("nobody.knows")
    with pytest.raises(Exception, match=r"nobody\.knows"):
        unknown.get(timeout=TIMEOUT_S)


def test_a_result_survives_the_worker_that_has_told_of_it(app: Celery, start: Any) -> None:
    worker = start()
    result = app.send_task("add", (1, 2))
    assert result.get(timeout=TIMEOUT_S) == 3
    worker.kill_group()
    assert app.AsyncResult(result.id).get(timeout=TIMEOUT_S) == 3


def test_results_are_kept_and_got_over_a_restart_of_postgres(
    processes: Processes, own_postgres: embedded.Postgres, record: Record
) -> None:
    upgrade(own_postgres.url)
    url = in_postgres(own_postgres.url)
    worker = processes.start_worker("tests.results.results_app", env={"BROKER_URL": url, **record.env})
    with Celery("client", broker=url, backend=url, set_as_current=False) as client:
        result = client.send_task("held", ("one",))
        record.wait_for("begun one", timeout=TIMEOUT_S)
        own_postgres.restart()
        record.note("end one")
        assert result.get(timeout=TIMEOUT_S) == "one"
        assert worker.alive
