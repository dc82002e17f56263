"""What `sidejob_redact` hides is on no page, in no answer of the API and in no stream, wherever it was put."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import httpx
import pytest

from celery_sidejob import RunningJob
from celery_sidejob.web.api import Operation
from celery_sidejob.web.live import LIVE
from celery_sidejob.web.operations import OPERATIONS
from celery_sidejob.web.pages import READING
from celery_sidejob.web.site import Entry, Site
from celery_sidejob.web.users import SCOPES, Users, all_tokens, make_token
from tests.tools.browsers import ENTRIES, Browser, Program, browser_of, connection_of, serving
from tests.tools.databases import Databases
from tests.tools.in_process import Stage

SECRET = "card-4711-0815"
HIDDEN = "(hidden)"


def without_secret(value: Any) -> Any:
    """A `sidejob_redact` that replaces the secret in any value."""
    return json.loads(json.dumps(value, default=str).replace(SECRET, HIDDEN))


class Charged(Exception):
    """An error whose text has the secret, as its traceback does."""


def charge(job: RunningJob, card: str, pin: str = "") -> None:
    job.set({"card": card})
    job.log("charged", card=card)
    job.step("reserve", lambda: {"card": card})
    job.progress(1, 2, f"charging {card}")
    raise Charged(f"no money on {card}")


def refuse(job: RunningJob, card: str) -> None:
    job.step("refuse", _raise, card)


def _raise(card: str) -> None:
    raise Charged(f"no money on {card}")


def keep(job: RunningJob) -> None:
    job.step("reserve", lambda: [SECRET])
    job.suspend()


def send(card: str) -> None:
    pass


@dataclass
class Planted:
    """Rows that have the secret everywhere, and who looks at them."""

    stage: Stage
    site: Site
    paths: dict[str, list[str]]
    """Examples of the paths of pages and operations that have parameters."""


@pytest.fixture(scope="module")
def planted(databases: Databases, database_template: str) -> Iterator[Planted]:
    with databases.fresh(template=database_template) as name:
        stage = Stage(databases.url_of(name), sidejob_redact=without_secret)
        ports = {"inports": {"orders": {"default": SECRET, "channels": ["/orders"]}}, "outports": ["bills"]}
        first = stage.task(charge, name="stage.charge", inports=["*"], outports=["*"])
        second = stage.task(refuse, name="stage.refuse", inports=["*"], outports=["*"])
        third = stage.task(keep, name="stage.keep", inports=["*"], outports=["*"])
        durable = stage.app.task(durable=True, name="stage.send", shared=False)(send)
        named: dict[str, Any] = {
            "state": {"pin": SECRET},
            "tags": [SECRET],
            "unique": f"key {SECRET}",
            "aliases": [f"alias {SECRET}"],
        }
        waiting = stage.sidejob.enqueue(first, (SECRET,), {"pin": SECRET}, countdown=3600, **named, **ports)
        waiting.input("orders").write({"card": SECRET})
        waiting.output("bills").write([SECRET])
        stage.sidejob.publish("/orders", SECRET)
        waiting.enqueue(third, child_name="below")
        jobs = [waiting, stage.sidejob.enqueue(first, (SECRET,)), stage.sidejob.enqueue(second, (SECRET,)),
                stage.sidejob.enqueue(third)]  # fmt: skip
        for job in jobs[1:]:
            hold = stage.claim(job)
            assert hold is not None
            stage.perform(hold)
        with stage.sidejob.batch("import 7", on_complete=durable.s(SECRET)):
            stage.sidejob.enqueue(first, (SECRET,), countdown=3600)
            waits = durable.apply_async((SECRET,), countdown=3600)
        stage.sidejob.schedule("nightly", first, (SECRET,), {"pin": SECRET}, every=timedelta(hours=6))
        stage.sidejob.schedule("hourly", durable, (SECRET,), every=timedelta(hours=1))
        running = stage.sidejob.enqueue(third, (), state={"pin": SECRET})
        stage.claim(running)
        jobs.append(running)
        ids = [str(job.id) for job in jobs]
        dead = [str(entry.id) for entry in stage.sidejob.dead.list()]
        assert len(dead) == 2
        site = Site(stage.sidejob, Users(ENTRIES), None)
        yield Planted(stage, site, {"jobs": ids, "tasks": [waits.id], "dead": dead})
        stage.close()


def examples(planted: Planted, path: str) -> list[str]:
    """The paths of a route, for each row that it may be of."""
    if "{" not in path:
        return [path]
    some = planted.paths.get(path.split("/")[1], [])
    path = path.replace("{task_id}", "{id}")
    return [
        path.format(id=one, direction=direction, name=name)
        for one in some
        for direction, name in ((("in", "orders"), ("out", "bills")) if "{direction}" in path else (("", ""),))
    ]


def looks(planted: Planted, browser: Browser, entry: Entry) -> list[httpx.Response]:
    query = {"/find": {"which": planted.paths["tasks"][0]}, "/batches/named": {"name": "import 7"}}
    return [browser.get(path, params=query.get(path)) for path in examples(planted, entry.path)]


@pytest.mark.few(1000)
@pytest.mark.parametrize("entry", READING, ids=lambda entry: entry.path)
def test_no_page_shows_it(planted: Planted, entry: Entry) -> None:
    with browser_of(planted.site) as browser:
        browser.log_in("ann")
        found = looks(planted, browser, entry)
    assert any(each.status_code < 400 for each in found)
    for each in found:
        assert SECRET not in each.text, each.url
        assert SECRET not in str(each.headers), each.url


@pytest.mark.parametrize(
    "path", ["/jobs?text=card", "/tasks?text=card", f"/jobs?text={SECRET}", f"/tasks?text={SECRET}"]
)
def test_it_is_not_found_by_its_text(planted: Planted, path: str) -> None:
    with browser_of(planted.site) as browser:
        browser.log_in("ann")
        shown = browser.text(path)
    for one in (*planted.paths["jobs"], *planted.paths["tasks"]):
        assert f'/{one}"' not in shown


READS = [operation for operation in OPERATIONS if operation.method == "GET"]
WRITES: dict[str, dict[str, Any]] = {
    "/jobs/{id}/run": {}, "/jobs/{id}": {"priority": 3}, "/jobs/{id}/state": {"set": {"a": SECRET}},
    "/jobs/{id}/ports/{direction}/{name}": {"value": SECRET},
}  # fmt: skip
"""Operations that answer with what they have changed."""


@pytest.mark.few(1000)
@pytest.mark.parametrize("operation", READS, ids=lambda operation: operation.path)
def test_no_answer_of_the_api_has_it(planted: Planted, program: Program, operation: Operation) -> None:
    found = [program.ask("GET", path) for path in examples(planted, operation.path)]
    assert any(each.status_code == 200 for each in found), [each.text for each in found]
    assert [each.text for each in found if SECRET in each.text] == []


@pytest.mark.parametrize("path", WRITES)
def test_no_answer_to_a_change_has_it(planted: Planted, program: Program, path: str) -> None:
    operation = next(one for one in OPERATIONS if one.path == path and one.method in ("POST", "PATCH"))
    for each in examples(planted, path):
        found = program.ask(operation.method, each, WRITES[path])
        assert SECRET not in found.text, each


def test_no_stream_has_it(planted: Planted) -> None:
    live = [entry for entry in READING if entry.price]
    with serving(planted.site) as address, connection_of("ron", address) as client:
        for entry in live:
            path = examples(planted, LIVE + entry.path if "{" not in entry.path else entry.path)[0]
            path = path if path.startswith(LIVE) else LIVE + path
            with client.stream("GET", path, params={"name": "import 7", "seen": "x"}) as answer:
                lines = answer.iter_lines()
                seen = ""
                while "event: changed" not in seen:
                    seen += next(lines) + "\n"
            assert SECRET not in seen + str(answer.headers)


@pytest.fixture
def program(planted: Planted) -> Iterator[Program]:
    """A program that may do everything."""
    name = f"all {threading.get_ident()} {len(all_tokens(planted.stage.runtime))}"
    with browser_of(planted.site) as browser:
        yield Program(browser, make_token(planted.stage.runtime, name, SCOPES))
