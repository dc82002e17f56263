"""Open pages: what they are told, and what they cost the store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import httpx
import pytest

from celery_sidejob.store.connection.own_executor import OwnExecutor
from celery_sidejob.web.pages import READING
from celery_sidejob.web.site import Site
from celery_sidejob.web.users import Users
from tests.tools.browsers import Browser, connection_of, events, live_at, serving
from tests.tools.in_process import Stage
from tests.tools.waiting import wait_until

LIVE_PAGES = [entry for entry in READING if entry.price]


@pytest.fixture
def client(address: str) -> Iterator[httpx.Client]:
    """Ron's connection to the site."""
    with connection_of("ron", address) as made:
        yield made


def test_an_open_page_is_told_of_changes(stage: Stage, client: httpx.Client) -> None:
    page = client.get("/batches").text
    with events(client, live_at(page)) as told:
        stage.sidejob.batch("import 7")
        assert next(told) == "changed"
        renewed = client.get("/batches", headers={"x-renews": "1"}).text
        assert "import 7" in renewed
        assert live_at(renewed) != live_at(page)
        assert "import+7" not in client.get("/batches?before=1", headers={"x-renews": "1"}).text, "another page"


def test_what_an_operator_has_open_is_shown_to_others_as_they_may_see_it(
    stage: Stage, address: str, client: httpx.Client
) -> None:
    with connection_of("ann", address) as operator:
        with events(operator, live_at(operator.get("/schedules").text)) as told:
            stage.sidejob.schedule("nightly", stage.idle, every=60)
            assert next(told) == "changed"
            renews = {"x-renews": "1"}
            shown = [each.get("/schedules", headers=renews).text for each in (operator, client)]
            assert ["nightly" in page for page in shown] == [True, True]
            assert ["/schedules/act" in page for page in shown] == [True, False]
            assert httpx.get(f"{address}/schedules", headers=renews).status_code == 303


def test_a_page_that_nobody_has_open_is_made_anew(stage: Stage, client: httpx.Client) -> None:
    with events(client, live_at(client.get("/batches").text)) as told:
        stage.sidejob.batch("import 7")
        assert next(told) == "changed"
    stage.sidejob.batch("import 8")
    wait_until(lambda: "import 8" in client.get("/batches", headers={"x-renews": "1"}).text, message="a new page")


def test_so_many_pages_are_live_at_once(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery_sidejob.web.live.MOST", 1)
    with events(client, live_at(client.get("/batches").text)):
        with client.stream("GET", "/live/queues") as refused:
            assert refused.status_code == 503
        assert client.get("/queues").status_code == 200


def test_so_many_pages_are_live_at_once_also_if_they_come_at_once(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_sidejob.web.live.MOST", 1)
    made, both, guarded = [], threading.Barrier(2), Site.guarded

    def together(*given: Any) -> Any:
        shown = guarded(*given)
        made.append(shown)
        if len(made) <= 2:
            both.wait(30)
        return shown

    monkeypatch.setattr(Site, "guarded", together)
    with ExitStack() as stack, ThreadPoolExecutor(2) as threads:
        requests = [client.build_request("GET", path) for path in ("/live/batches", "/live/queues")]
        asked = [threads.submit(client.send, request, stream=True) for request in requests]
        found = [stack.enter_context(closing(each.result())).status_code for each in asked]
    assert sorted(found) == [200, 503]


def test_a_look_at_the_head_of_a_stream_is_answered_at_once_and_holds_nothing(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_sidejob.web.live.MOST", 1)
    path = live_at(client.get("/batches").text)
    for _ in range(3):
        found = client.head(path)
        assert (found.status_code, found.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert client.head("/live/jobs/999999").status_code == 404
    with events(client, path):
        assert client.head(path).status_code == 503


@pytest.mark.parametrize("how", ["outdated", "removed", "unknown to the other site"])
def test_a_stream_ends_with_the_session_of_its_reader(
    stage: Stage, site: Site, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("celery_sidejob.web.live.KNOWN_S", 0.1)
    monkeypatch.setattr("celery_sidejob.web.live.QUIET_S", 0.1)
    known = {"ron": ("ron", "read")}
    if how == "unknown to the other site":
        site = Site(stage.sidejob, Users({}), lambda request: known.get("ron"))
    with serving(site) as address, connection_of("ron", address) as client:
        with events(client, live_at(client.get("/batches").text)) as told:
            stage.sidejob.batch("import 7")
            assert next(told) == "changed", "while it lasts"
            if how == "outdated":
                monkeypatch.setattr("celery_sidejob.web.users.LASTS_S", -1)
            elif how == "removed":
                del site.users._users["ron"]
            else:
                known.clear()
            assert next(told, "over") == "over"
        assert client.get("/live/batches").status_code == 403


def test_what_has_changed_while_the_connection_was_lost_is_made_up_for(stage: Stage, client: httpx.Client) -> None:
    page = client.get("/batches").text
    stage.sidejob.batch("import 7")
    with events(client, live_at(page)) as told:
        assert next(told) == "changed"


def test_the_page_of_a_job_follows_its_runs_and_its_progress(stage: Stage, client: httpx.Client) -> None:
    job = stage.job()
    with events(client, live_at(client.get(f"/jobs/{job.id}").text)) as told:
        hold = stage.claim(job)
        assert hold is not None
        assert next(told) == "changed"
        stage.sql("INSERT INTO progress (job_id, run_no, done, total) VALUES (%s, 1, 2, 4)", job.id)
        assert next(told) == "changed"
        stage.perform(hold)
        assert next(told) == "changed"
    assert "completed" in client.get(f"/jobs/{job.id}").text


def test_many_readers_of_a_page_are_one_look(
    stage: Stage, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []

    def counted(self: OwnExecutor, statement: Any, /, **parameters: Any) -> Any:
        looks.append(statement.text)
        return run(self, statement, **parameters)

    path = live_at(client.get("/batches").text)
    run = OwnExecutor.run
    with ExitStack() as stack:
        told = [stack.enter_context(events(client, path)) for _ in range(20)]
        monkeypatch.setattr(OwnExecutor, "run", counted)
        stage.sql("INSERT INTO batches (name, calls) VALUES ('import 7', '{}')")
        assert [next(each) for each in told] == ["changed"] * 20
        renewed = [client.get("/batches", headers={"x-renews": "1"}).text for _ in told]
    assert all("import 7" in page for page in renewed)
    assert 0 < len(looks) < 20


def test_a_page_that_cannot_be_made_says_so_and_recovers(stage: Stage, client: httpx.Client) -> None:
    with events(client, live_at(client.get("/batches").text)) as told:
        stage.sql("ALTER TABLE batches RENAME TO gone")
        assert next(told) == "trouble"
        stage.sql("ALTER TABLE gone RENAME TO batches")
        assert next(told) == "changed"


def test_what_is_not_there_has_no_events(client: httpx.Client) -> None:
    for path, status in (("/live/jobs/999999", 404), ("/live/jobs/x", 404), ("/live/batches?before=x", 400),
                         ("/live/dead", 404), ("/live/nothing", 404),
                         ("/live/batches/named?name=%00", 400)):  # fmt: skip
        assert client.get(path).status_code == status, path


def paths(stage: Stage) -> dict[str, str]:
    """An example of each live page, by its path."""
    job = stage.job(outports={"orders": {"channels": ["/orders"]}})
    job.enqueue(stage.idle, child_name="child")
    stage.job(depends_on=[job], inports={"orders": {"channels": ["/orders"]}})
    stage.claim(stage.job())
    with stage.sidejob.batch("import 7"):
        stage.job()
    ids = {"/batches/named": "/batches/named?name=import+7"}
    return {entry.path: ids.get(entry.path, entry.path.replace("{id}", str(job.id))) for entry in LIVE_PAGES}


@pytest.mark.parametrize("entry", LIVE_PAGES, ids=lambda entry: entry.path)
def test_a_page_costs_no_more_statements_than_it_says(
    stage: Stage, reader: Browser, monkeypatch: pytest.MonkeyPatch, entry: Any
) -> None:
    path = paths(stage)[entry.path]
    reader.text(path)
    sent: list[str] = []
    for name in ("run", "in_transaction"):
        done = getattr(OwnExecutor, name)

        def counted(self: Any, what: Any, /, *given: Any, done: Any = done, **options: Any) -> Any:
            if not threading.current_thread().name.startswith("AnyIO"):
                pass  # what this process writes behind its jobs
            elif isinstance(what, str):  # a transaction; of several statements, it has BEGIN and COMMIT
                sent.extend([] if options["single"] else ["BEGIN", "COMMIT"])
            else:
                sent.append(what.text)
            return done(self, what, *given, **options)

        monkeypatch.setattr(OwnExecutor, name, counted)
    reader.text(path)
    assert 0 < len(sent) <= entry.price, sent
