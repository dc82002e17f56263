"""Postgres goes away and comes back: what each page and each operation of the API says meanwhile, and afterwards."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from celery_sidejob import embedded
from celery_sidejob.web.actions import BULK, OPERATING
from celery_sidejob.web.live import LIVE
from celery_sidejob.web.operations import OPERATIONS
from celery_sidejob.web.pages import READING
from celery_sidejob.web.site import Site
from celery_sidejob.web.users import SCOPES, Users, make_token
from tests.tools.browsers import API, ENTRIES, Browser, browser_of, connection_of, events, live_at, serving
from tests.tools.databases import prepare_template
from tests.tools.freezing import frozen
from tests.tools.in_process import Stage

PAGES = [(entry.method, entry.path) for entry in (*READING, *BULK, *OPERATING)]
CALLS = [(operation.method, API + operation.path) for operation in OPERATIONS]
STREAMS = [("GET", LIVE + entry.path) for entry in READING if entry.price]
DOCTOR = ("GET", "/doctor")
"""It answers without a store: saying what is wrong is what it is for."""
QUERY = {"which": "7", "verb": "delete", "name": "import 7"}
FORM = {
    "verb": "delete",
    "total": "1",
    "priority": "1",
    "queue": "q",
    "tag": "a",
    "value": "1",
    "limit": "3",
    "name": "q",
}
VERBS = {"/schedules/act": {"verb": "pause"}}
PATIENCE_S = 20
"""Far more than an answer takes, also on a busy machine."""


@dataclass
class Outage:
    """What was answered while the store was away, and when it was back."""

    away: dict[tuple[str, str], httpx.Response]
    took_s: dict[tuple[str, str], float]
    back: dict[tuple[str, str], httpx.Response]
    told: list[str]
    """The events of a page that was open all the time."""


@pytest.fixture(scope="module")
def outage() -> Iterator[Outage]:
    """One outage that all tests look at: Postgres is killed, everything is asked, it starts, everything is asked."""
    with embedded.Postgres(durable=False) as server:
        prepare_template(server.url)
        stage = Stage(server.url)
        job, site = stage.job(), Site(stage.sidejob, Users(ENTRIES), None)
        token = make_token(stage.runtime, "all", SCOPES)
        found = Outage({}, {}, {}, [])

        def ask(browser: Browser, form: dict[str, str], method: str, path: str) -> httpx.Response:
            path = path.format(id=job.id, direction="in", name="a", task_id="x")
            if path.startswith(API):
                given = {} if method == "GET" else {"json": {}}
                return browser.request(method, path, headers={"authorization": f"Bearer {token}"}, **given)
            return (
                browser.get(path, params=QUERY)
                if method == "GET"
                else browser.post(path, data=form | VERBS.get(path, {}))
            )

        with serving(site) as address, connection_of("ron", address) as client, browser_of(site) as browser:
            assert browser.log_in("ann").status_code == 303
            form = {**FORM, "token": browser.token}
            with events(client, live_at(client.get("/batches").text)) as told:
                server.kill()
                for method, path in (*PAGES, *CALLS, *STREAMS):
                    began = time.monotonic()
                    found.away[method, path] = ask(browser, form, method, path)
                    found.took_s[method, path] = time.monotonic() - began
                found.told.append(next(told))
                server.start()
                found.told.append(next(told))
            for method, path in (*PAGES, *CALLS):
                found.back[method, path] = ask(browser, form, method, path)
        stage.close()
        yield found


@pytest.mark.few(1000)
@pytest.mark.parametrize("route", [route for route in PAGES if route != DOCTOR], ids=" ".join)
def test_a_page_says_that_the_store_is_away_and_what_to_do(outage: Outage, route: tuple[str, str]) -> None:
    found = outage.away[route]
    assert (found.status_code, outage.took_s[route] < PATIENCE_S) == (503, True)
    assert found.headers["content-type"].startswith("text/html")
    for text in ("The store does not answer", "Is Postgres up, and is sidejob_database_url right?", ">ann</span>"):
        assert text in found.text
    assert "Traceback" not in found.text
    is_form = route[0] == "POST"
    asks_again = re.search(r'<meta http-equiv="refresh" content="(\d+)">', found.text)
    assert (asks_again is None) == is_form == ("see what was done before you send it again" in found.text)
    assert is_form or found.headers["retry-after"] == asks_again[1]  # type: ignore[index]


def test_doctor_says_what_is_wrong_and_what_to_do(outage: Outage) -> None:
    found = outage.away[DOCTOR]
    assert (found.status_code, outage.took_s[DOCTOR] < PATIENCE_S) == (200, True)
    assert "Start Postgres, or correct sidejob_database_url." in found.text


@pytest.mark.few(12)
@pytest.mark.parametrize("route", CALLS, ids=" ".join)
def test_an_operation_answers_with_a_problem_document(outage: Outage, route: tuple[str, str]) -> None:
    found = outage.away[route]
    assert (found.status_code, outage.took_s[route] < PATIENCE_S) == (503, True)
    assert found.headers["content-type"] == "application/problem+json"
    assert found.headers["retry-after"] == "5"
    document = found.json()
    assert (document["title"], document["status"]) == ("StoreUnavailableError", 503)
    assert "Is Postgres up" in document["detail"]


@pytest.mark.parametrize("route", STREAMS, ids=" ".join)
def test_a_stream_is_refused_while_the_store_is_away(outage: Outage, route: tuple[str, str]) -> None:
    assert (outage.away[route].status_code, outage.took_s[route] < PATIENCE_S) == (503, True)


def test_an_open_page_is_told_of_the_outage_and_of_its_end(outage: Outage) -> None:
    assert outage.told == ["trouble", "changed"]


@pytest.mark.few(20)
@pytest.mark.parametrize("route", [*PAGES, *CALLS], ids=" ".join)
def test_everything_works_again_when_the_store_is_back(outage: Outage, route: tuple[str, str]) -> None:
    found = outage.back[route]
    assert found.status_code < 500, found.text
    assert found.status_code < 400 or route[0] != "GET" or "{" in route[1] or route[1] in ("/find", "/batches/named")


def test_a_store_that_is_silent_holds_no_page(own_postgres: embedded.Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections and statements, and answers none: nobody waits longer than the page's patience."""
    for module in ("site", "api"):
        monkeypatch.setattr(f"celery_sidejob.web.{module}.PATIENCE_S", 1.0)
    prepare_template(own_postgres.url)
    stage = Stage(own_postgres.url)
    job, site = stage.job(), Site(stage.sidejob, Users(ENTRIES), None)
    program = {"authorization": f"Bearer {make_token(stage.runtime, 'all', SCOPES)}"}
    with browser_of(site) as browser:
        browser.log_in("ann")
        form = {"token": browser.token, "priority": "7"}
        with frozen(own_postgres.pid):
            began = time.monotonic()
            silent = [
                browser.get("/"),
                browser.post(f"/jobs/{job.id}/priority", data=form),
                browser.post(f"{API}/jobs/{job.id}/run", headers=program, json={"force": True}),
            ]
            took_s = time.monotonic() - began
        assert [one.status_code for one in silent] == [503, 503, 503]
        assert took_s < len(silent) * PATIENCE_S
        assert browser.get(f"/jobs/{job.id}").status_code == 200
        assert browser.get(f"{API}/jobs/{job.id}", headers=program).status_code == 200
    stage.close()
