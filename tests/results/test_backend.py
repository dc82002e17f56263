"""What Celery promises of a result backend, of the one in Postgres."""

from __future__ import annotations

import math
import pickle
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery, group, states
from celery.app.task import Context
from celery.beat import Scheduler
from celery.exceptions import BackendGetMetaError, BackendStoreError
from celery.result import AsyncResult, GroupResult

from celery_sidejob import ResultTooLargeError, SettingsError, StoreUnavailableError
from celery_sidejob.diagnosis import workers
from celery_sidejob.results import backend as module
from tests.results.conftest import Make, Rows
from tests.tools.apps import make_app
from tests.tools.brokers import in_postgres
from tests.tools.pgbouncer import direct
from tests.tools.proxy import TcpProxy
from tests.tools.versions import CELERY_5_7
from tests.tools.waiting import patient, wait_until

pytestmark = pytest.mark.pooled_too


@CELERY_5_7  # before, there was no `exists()`
def test_each_state_is_kept_with_all_that_belongs_to_it(app: Celery) -> None:
    request = Context({"id": "t", "group": "g", "parent_id": "p"})
    request.children.append(AsyncResult("child", app=app))
    result = app.AsyncResult("t")
    assert (result.state, result.result, result.exists()) == (states.PENDING, None, False)
    told = [(states.STARTED, {"pid": 1}), ("PROGRESS", {"done": 1}), (states.RETRY, ValueError("again"))]
    for state, value in told:
        app.backend.store_result("t", value, state, traceback="line 1")
        assert (result.state, repr(result.info), result.traceback) == (state, repr(value), "line 1")
    app.backend.mark_as_done("t", [1, 2], request)
    assert (result.get(), result.state, result.children) == ([1, 2], states.SUCCESS, [AsyncResult("child", app=app)])
    meta = app.backend.get_task_meta("t", cache=False)
    assert (meta["group_id"], meta["parent_id"], meta["task_id"]) == ("g", "p", "t")
    assert meta["date_done"]


def test_a_failure_is_raised_and_a_success_is_not_replaced(app: Celery) -> None:
    app.backend.mark_as_failure("f", KeyError("missing"), traceback="Traceback: here")
    with pytest.raises(KeyError, match="missing"):
        app.AsyncResult("f").get()
    assert app.AsyncResult("f").traceback == "Traceback: here"
    app.backend.mark_as_done("f", 1)
    app.backend.mark_as_failure("f", KeyError("of a second run"))
    assert app.AsyncResult("f").get() == 1


@pytest.mark.parametrize("result", [states.SUCCESS, states.FAILURE, states.REVOKED])
@pytest.mark.parametrize("late", [states.STARTED, states.RETRY, "HALF"])
def test_a_state_that_comes_late_is_in_place_of_no_result(app: Celery, result: str, late: str) -> None:
    """The process of a run that is to be tried again was slow, and its next try was not."""
    app.backend.store_result("t", 1 if result == states.SUCCESS else ValueError("no"), result)
    app.backend.store_result("t", ValueError("not yet") if late == states.RETRY else {"done": 0.5}, late)
    assert app.AsyncResult("t").state == result


def test_a_result_is_forgotten(app: Celery, rows: Rows) -> None:
    app.backend.mark_as_done("t", 1)
    result = app.AsyncResult("t")
    assert result.get() == 1
    result.forget()
    assert (app.AsyncResult("t").state, rows.keys) == (states.PENDING, [])
    app.backend.mark_as_done("a", 1)
    app.backend.mark_as_done("b", 2)
    GroupResult("g", [app.AsyncResult("a"), app.AsyncResult("b")], app=app).forget()
    assert rows.keys == []


def test_groups_are_saved_restored_and_deleted(app: Celery) -> None:
    saved = GroupResult("g", [app.AsyncResult("a"), GroupResult("h", [app.AsyncResult("b")], app=app)], app=app)
    app.backend.mark_as_done("g", "the result of a task with the same id")
    saved.save()
    assert GroupResult.restore("g", app=app) == saved
    assert GroupResult.restore("other", app=app) is None
    saved.delete()
    assert GroupResult.restore("g", app=app) is None
    assert app.AsyncResult("g").get() == "the result of a task with the same id"


@pytest.mark.parametrize(
    ("settings", "lives_s"),
    [
        ({}, 86400),
        ({"result_expires": timedelta(hours=1)}, 3600),
        ({"result_expires": 60.5}, 60.5),
        ({"result_expires": None}, None),
        ({"result_expires": 0}, None),
        ({"result_expires": 1e300}, 1e9),
    ],
)
def test_results_expire_as_configured(make: Make, rows: Rows, settings: dict[str, Any], lives_s: float | None) -> None:
    app = make(**settings)
    app.backend.mark_as_done("t", 1)
    GroupResult("g", [app.AsyncResult("t")], app=app).save()
    for (left_s,) in rows.all("SELECT extract(epoch FROM expires_at - now())::float8 FROM results"):
        assert left_s == (None if lives_s is None else pytest.approx(lives_s, abs=30))


def test_failures_may_expire_apart(make: Make, rows: Rows) -> None:
    app = make(result_failure_expires=60)
    app.backend.mark_as_failure("f", ValueError())
    app.backend.mark_as_done("t", 1)
    found = rows.all("SELECT key, extract(epoch FROM expires_at - now())::float8 FROM results ORDER BY key")
    assert dict(found) == {"task:f": pytest.approx(60, abs=30), "task:t": pytest.approx(86400, abs=30)}


def test_a_result_that_is_too_large_expires_as_a_failure(
    make: Make, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 5_000)
    make(result_failure_expires=60).backend.mark_as_done("t", "x" * 10_000)
    found = rows.all("SELECT extract(epoch FROM expires_at - now())::float8 FROM results")
    assert found == [(pytest.approx(60, abs=30),)]


def test_what_has_expired_is_gone_and_may_be_written_again(app: Celery, rows: Rows) -> None:
    app.backend.mark_as_done("t", 1)
    rows.run("UPDATE results SET expires_at = now()")
    assert app.AsyncResult("t").state == states.PENDING
    app.backend.mark_as_done("t", 2)
    assert app.AsyncResult("t").get() == 2


def test_beat_s_cleanup_removes_what_has_expired(app: Celery, rows: Rows) -> None:
    for number in range(7):
        app.backend.mark_as_done(str(number), number)
    rows.run("UPDATE results SET expires_at = now() WHERE key < 'task:5'")
    rows.run("INSERT INTO results SELECT 'task:old' || n, 'SUCCESS', '', now() FROM generate_series(1, 2500) n")
    app.tasks["celery.backend_cleanup"]()
    assert rows.keys == ["task:5", "task:6"]
    scheduler = Scheduler(app, lazy=True)
    scheduler.install_default_entries(scheduler.schedule)
    assert "celery.backend_cleanup" in scheduler.schedule, "beat calls it"


def test_extended_results_have_the_call(make: Make) -> None:
    app = make(result_extended=True)
    request = Context(
        {"id": "t", "task": "add", "args": [1], "kwargs": {"b": 2}, "hostname": "w@h", "retries": 3,
         "delivery_info": {"routing_key": "q"}}
    )  # fmt: skip
    app.backend.mark_as_done("t", 1, request)
    found = app.AsyncResult("t")
    assert (found.name, found.args, found.kwargs, found.worker, found.retries, found.queue) == (
        "add", [1], {"b": 2}, "w@h", 3, "q",
    )  # fmt: skip


@pytest.mark.parametrize("compression", [None, "gzip", "bzip2"])
@pytest.mark.parametrize("serializer", ["json", "pickle", "yaml"])
def test_serializers_and_compression(make: Make, serializer: str, compression: str | None) -> None:
    if serializer == "yaml":
        pytest.importorskip("yaml")
    app = make(
        result_serializer=serializer, result_accept_content=["json", "pickle", "yaml"], result_compression=compression
    )
    value = {"text": "ü" * 1000, "list": [1, 2.5, None, True]}
    app.backend.mark_as_done("t", value)
    app.backend.mark_as_failure("f", ValueError("ü", 1))
    assert app.AsyncResult("t").get() == value
    with pytest.raises(ValueError, match="ü"):
        app.AsyncResult("f").get()


def test_values_that_are_hard_to_keep(app: Celery) -> None:
    app.backend.mark_as_done("t", {"nul": "\0", "lone": "\ud800", "nan": math.nan, "large": "x" * 1_000_000})
    found = app.AsyncResult("t").get()
    assert (found["nul"], found["lone"], len(found["large"])) == ("\0", "\ud800", 1_000_000)
    assert math.isnan(found["nan"])
    app.backend.mark_as_failure("f", ValueError("\0", "\ud800", object()), traceback="\0 \ud800")
    with pytest.raises(ValueError, match="ud800"):
        app.AsyncResult("f").get()
    app.backend.mark_as_done("id with \0", 1)
    assert app.AsyncResult("id with \0").get() == 1


def test_a_result_that_is_too_large_says_so(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 5_000)
    app.backend.mark_as_done("t", "x" * 4_000)
    assert len(app.AsyncResult("t").get()) == 4_000
    app.backend.mark_as_done("large", "x" * 10_000)
    with pytest.raises(ResultTooLargeError, match=r"of task large, which has ended with SUCCESS, takes 10\d+ bytes"):
        app.AsyncResult("large").get()
    app.backend.mark_as_failure("failed", ValueError("x" * 10_000), traceback="x" * 10_000)
    with pytest.raises(ResultTooLargeError, match="has ended with FAILURE"):
        app.AsyncResult("failed").get()


def test_a_backend_is_pickled_with_its_app_s_results(app: Celery) -> None:
    app.backend.mark_as_done("t", 1)
    app.set_current()
    try:
        assert pickle.loads(pickle.dumps(app.backend)).get_result("t") == 1
    finally:
        Celery("other").set_current()


def test_a_url_shows_no_password(make: Make) -> None:
    backend = make(result_backend="sidejobpg://user:secret@host/db?sslpassword=secret").backend
    assert "secret" not in backend.as_uri()
    assert backend.as_uri(include_password=True).count("secret") == 2


def test_the_store_is_meant_by_the_url_alone(database_url: str) -> None:
    with make_app(backend="x", result_backend="sidejobpg://", sidejob_database_url=database_url) as app:
        app.backend.mark_as_done("t", 1)
        assert (app.AsyncResult("t").get(), app.backend.as_uri()) == (1, "sidejobpg://")
        assert app.backend.place.connections is app.sidejob.runtime.connections


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("sidejobpg://", {}, r"this app has none: call SideJob\(app\)"),
        ("sidejobpg://user:a/b@host/db", {}, "its form is not clear"),
        ("sidejobpg://host/db", {"schema": 1}, r"\['schema'\] is a text, not 1"),
        ("sidejobpg://host:port/db", {}, "its form is not clear"),
    ],
)
def test_a_url_or_an_option_that_cannot_be_read(make: Make, url: str, options: Any, message: str) -> None:
    app = make(result_backend=url, result_backend_transport_options=options)
    with pytest.raises(SettingsError, match=message):
        app.backend.mark_as_done("t", 1)


def test_a_result_waits_for_a_postgres_that_is_away(
    make: Make, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with TcpProxy.to(database_url) as proxy:
        app = make(result_backend=in_postgres(proxy.url_for(database_url)))
        app.backend.mark_as_done("before", 1)
        proxy.refuse()
        with pytest.raises(StoreUnavailableError):
            app.AsyncResult("before").state  # noqa: B018
        keeping = threading.Thread(target=app.backend.mark_as_done, args=("t", 1))
        keeping.start()
        wait_until(lambda: "The result task:t must wait" in caplog.text, message="a first attempt")
        proxy.pass_through()
        keeping.join()
        assert app.AsyncResult("t").get() == 1


def test_retries_are_those_of_the_settings(make: Make) -> None:
    app = make(
        result_backend="sidejobpg://127.0.0.1:1/none", result_backend_always_retry=True, result_backend_max_retries=2,
        result_backend_base_sleep_between_retries_ms=1,
    )  # fmt: skip
    began = time.monotonic()
    with pytest.raises(BackendGetMetaError):
        app.AsyncResult("t").state  # noqa: B018
    with pytest.raises(BackendStoreError):
        app.backend.mark_as_done("t", 1)
    with pytest.raises(StoreUnavailableError):
        app.AsyncResult("t").get(timeout=patient(10))
    assert time.monotonic() - began < patient(5)


@pytest.mark.few(1)
def test_many_results_are_read_together(app: Celery) -> None:
    ids = [str(number) for number in range(2500)]
    results = group([app.signature("x", task_id=one) for one in ids]).freeze()
    for number, one in enumerate(results.results):
        app.backend.mark_as_done(one.id, number)
    assert results.join_native(timeout=10) == list(range(2500))


@pytest.mark.parametrize("backend", ["sidejobpg://", "cache+memory://"])
def test_doctor_says_where_callers_hear_no_notifications(
    database_url: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SIDEJOB_DIRECT_URL", raising=False)  # of all tests through a proxy
    past = direct(database_url)
    for urls, is_deaf in [({}, past != database_url), ({"sidejob_direct_url": past}, False)]:
        app = make_app("doctor", result_backend=backend, sidejob_database_url=database_url, **urls)
        found = [one.found for one in workers.liveness(app.sidejob.runtime, within_s=10) if one.check == "results"]
        assert bool(found) is (is_deaf and backend == "sidejobpg://")
        app.sidejob.close()
