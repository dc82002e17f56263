"""The HTTP API: each operation does what the command does, for a token with its scope."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from celery_sidejob import CapacityPool, Job, RunningJob, SchemaError
from celery_sidejob.operations.ledger import burials
from celery_sidejob.web.api import Operation
from celery_sidejob.web.operations import OPERATIONS
from celery_sidejob.web.users import SCOPES, revoke_token
from tests.tools.browsers import API, Browser, Program
from tests.tools.commands import ask
from tests.tools.in_process import Stage

PAGE = Path(__file__).parents[2] / "docs" / "http_api.md"


def fail(job: RunningJob) -> None:
    raise ValueError("no such order")


def steps(job: RunningJob) -> None:
    job.step("reserve", lambda: 2)
    job.step("charge", lambda: 42)
    job.suspend()


def failed(stage: Stage) -> Job:
    job = stage.job(fail)
    with pytest.raises(ValueError, match="no such order"):
        stage.run(job)
    return job


def filled(path: str, job: Job) -> str:
    return path.format(id=job.id, direction="in", name="a")


def test_only_a_token_with_the_scope_may(stage: Stage, browser: Browser, with_token: Callable[..., Program]) -> None:
    job = stage.job()
    holders = {scope: with_token(scope) for scope in SCOPES}
    browser.log_in("ann")
    stage.runtime.connections.write_behind_now()
    before = stage.everything()
    for operation in OPERATIONS:
        path = filled(operation.path, job)
        for headers in ({}, {"authorization": "Bearer sjt_none"}, {"authorization": "Basic YW5uOng="},
                        {"authorization": "Bearer"}):  # fmt: skip
            found = browser.request(operation.method, API + path, headers=headers)
            assert found.status_code == 401, (path, "a session of the page does not count")
            assert found.headers["www-authenticate"] == "Bearer"
            assert found.headers["content-type"] == "application/problem+json"
        for scope, holder in holders.items():
            if scope != operation.scope:
                found = holder.ask(operation.method, path, {} if operation.method != "GET" else None)
                assert found.status_code == 403, (scope, path)
                assert operation.scope in found.json()["detail"]
    assert stage.everything() == before


def test_a_revoked_token_ends_at_once(stage: Stage, program: Program) -> None:
    assert program.get("/")["app"] == "stage"
    for kind, code in (("Bearer", 200), ("bearer", 200), ("Basic", 401), ("", 401)):
        headers = {"authorization": f"{kind} {program.token}".lstrip()}
        assert program.ask("GET", "/", headers=headers).status_code == code, kind
    assert revoke_token(stage.runtime, "read-write-operate")
    program.get("/", code=401)


def test_the_commands_of_tokens(stage: Stage, browser: Browser) -> None:
    said = ask(stage.app, "web", "token", "add", "ci", "--scope", "read", "--json")
    token = said.document["token"]
    assert Program(browser, token).get("/jobs") == {"items": [], "next": None}
    listed = ask(stage.app, "web", "token", "list")
    assert "ci" in listed.out
    assert token not in listed.out
    assert token not in str(stage.sql("SELECT * FROM web_tokens")), "the store has its hash alone"
    assert ask(stage.app, "web", "token", "add", "ci", "--scope", "read").code == 1
    assert ask(stage.app, "web", "token", "revoke", "ci").code == 0
    assert ask(stage.app, "web", "token", "revoke", "ci").code == 1


def test_making_a_job_and_reading_it(stage: Stage, program: Program) -> None:
    parent = stage.job()
    made = program.post(
        "/jobs", code=201, task="stage.idle", queue="mail", parent=parent.id, child_name="first", tags=["vip"],
        aliases=["order-7"], state={"colour": "red"}, countdown=60, priority=7, inports=["orders"],
    )  # fmt: skip
    job = stage.sidejob.get(made["id"])
    assert (job.queue, job.parent, job.tags, job.state["colour"]) == ("mail", parent, ["vip"], "red")
    assert job.created_by == "token read-write-operate"
    found = program.get("/jobs/order-7")
    assert found["id"] == job.id
    assert found["waiting_for"] == ["timer"]
    assert "orders" in found["inports"]
    assert [node["id"] for node in program.get(f"/jobs/{parent.id}/tree")["items"]] == [parent.id, job.id]


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        ({}, 400, "task"),
        ({"task": "stage.idle", "args": [1]}, 400, "argument"),
        ({"task": "none"}, 404, "none"),
        ({"task": "stage.idle", "colour": "red"}, 400, "colour"),
        ({"task": "stage.idle", "priority": 77}, 400, "priority"),
        ({"task": "stage.idle", "parent": "nobody", "child_name": "a"}, 404, "nobody"),
        ({"task": "stage.idle", "aliases": ["7"]}, 400, "alias"),
        ({"task": "celery.backend_cleanup"}, 400, "sidejob task"),
        ({"task": "stage.idle", "eta": "soon"}, 400, "eta"),
        ({"task": "stage.idle", "state": {"a": "\u0000"}}, 201, None),
    ],
)  # fmt: skip
def test_a_job_that_cannot_be_made(stage: Stage, program: Program, body: Any, code: int, told: str | None) -> None:
    found = program.ask("POST", "/jobs", body)
    assert found.status_code == code, found.text
    if told is not None:
        document = found.json()
        assert told in document["detail"]
        assert {"type", "title", "status", "detail"} <= document.keys()
        assert stage.sidejob.jobs() == []


def test_an_idempotency_key_makes_one_job(stage: Stage, program: Program, with_token: Callable[..., Program]) -> None:
    key, body = {"idempotency-key": "order 7"}, {"task": "stage.idle"}
    first = program.ask("POST", "/jobs", body, headers=key).json()
    assert program.ask("POST", "/jobs", body, headers=key).json()["id"] == first["id"]
    stage.drain()
    assert program.ask("POST", "/jobs", body, headers=key).json()["id"] == first["id"], "after its end too"
    assert program.ask("POST", "/jobs", body, headers={"idempotency-key": "order 8"}).json()["id"] != first["id"]
    other = with_token("write").ask("POST", "/jobs", body, headers=key).json()
    assert other["id"] != first["id"], "each token has keys of its own"


def test_a_job_that_is_there_and_one_without_a_parent(stage: Stage, program: Program) -> None:
    there = program.post("/jobs", code=201, task="stage.idle", unique="order 7")["id"]
    refused = program.post("/jobs", code=409, task="stage.idle", unique="order 7", on_duplicate="refuse")
    assert refused["job"] == there
    assert "has no parent" in program.post(f"/jobs/{there}/run", code=409, parent=True)["detail"]


def test_the_list_by_cursors(stage: Stage, program: Program) -> None:
    jobs = [stage.job(tags=["vip"]).id for _ in range(5)]

    def follow(**query: Any) -> list[int]:
        seen: list[int] = []
        cursor = None
        while True:
            page = program.get("/jobs", limit=2, **query, **({} if cursor is None else {"cursor": cursor}))
            seen += [job["id"] for job in page["items"]]
            cursor = page["next"]
            if cursor is None:
                return seen

    assert follow() == jobs[::-1]
    assert follow(order="oldest", tag="vip") == jobs
    assert follow(status="failed") == []
    for wrong in (
        {"limit": 0},
        {"limit": 201},
        {"order": "up"},
        {"colour": "red"},
        {"cursor": "x"},
        {"status": "none"},
    ):
        program.get("/jobs", code=400, **wrong)


def test_the_verbs_of_a_job(stage: Stage, program: Program) -> None:
    job = stage.job(steps)
    stage.run(job)
    at = f"/jobs/{job.id}"
    assert [step["name"] for step in program.get(f"{at}/steps")["items"]] == ["reserve", "charge"]
    assert program.post(f"{at}/run")["status"] == "queued"
    assert program.post(at, method="PATCH", queue="fast", priority=3, tag=["a"], untag=["b"])["tags"] == ["a"]
    fork = program.post(f"{at}/fork", code=201, before="charge")["id"]
    assert [step.name for step in stage.sidejob.get(fork).steps] == ["reserve"]
    assert (
        program.post(f"{at}/state", method="PATCH", set={"a": 1, "run": 2, "context": 3}, unset=["b"])["id"] == job.id
    )
    assert dict(job.state) == {"a": 1, "run": 2, "context": 3}
    program.post(f"{at}/adopt", job=fork, name="child")
    assert job.child("child") == Job(fork)
    program.post(f"{at}/disown", name="child")
    assert job.child("child") is None
    program.post(at, method="DELETE", code=409)
    assert program.post(f"{at}/terminate", recursive=True)["status"] == "terminating"
    stage.drain()
    program.post(f"{at}/run", code=409)
    assert {entry.detail["by"] for entry in job.history if entry.detail and "by" in entry.detail} == {
        "token read-write-operate"
    }
    assert program.ask("DELETE", at).json() == {"id": job.id, "deleted": True}
    program.get(at, code=404)


def test_packets_channels_and_the_log(stage: Stage, program: Program) -> None:
    job = stage.job(inports={"orders": {"channels": ["/orders"]}, "log": {"channels": ["/sidejob/log"]}})
    at = f"/jobs/{job.id}/ports/in/orders"
    assert program.post(at, value=None, context={"who": "us"}) == {"written": 1}
    assert program.post(at, values=[1, "a", {"__type__": "x"}]) == {"written": 3}
    assert [packet["value"] for packet in program.get(at)["items"]] == [None, 1, "a", {"__type__": "x"}]
    assert program.get(at)["items"][0]["context"] == {"who": "us"}
    assert program.post(f"{at}/take", limit=3) == {"values": [None, 1, "a"]}
    assert program.post("/publish", channel="/orders", message=7) == {"written": 1}
    program.post("/publish", code=400, channel="orders", message=7)
    program.post("/log", entry={"level": "info"})
    assert job.input("orders").read_many(10) == [{"__type__": "x"}, 7]
    assert any(entry.get("level") == "info" for entry in job.input("log").read_many(50))
    program.post(at, code=400)
    program.post(at, code=400, value=1, values=[2])
    program.get(f"/jobs/{job.id}/ports/sideways/orders", code=404)


def test_the_dead_set(stage: Stage, program: Program) -> None:
    jobs = [failed(stage) for _ in range(4)]
    page = program.get("/dead", limit=3)
    assert [entry["job_id"] for entry in page["items"]] == [job.id for job in jobs[:0:-1]]
    last = program.get("/dead", cursor=page["next"])
    assert ([entry["job_id"] for entry in last["items"]], last["next"]) == ([jobs[0].id], None)
    assert program.get("/dead/groups") == {"groups": {"ValueError": 4}, "more": False}
    (first,), (second, *_) = last["items"], page["items"]
    assert "no such order" in program.get(f"/dead/{first['id']}")["traceback"]
    assert program.post(f"/dead/{first['id']}/retry")["job"] == jobs[0].id
    assert program.ask("DELETE", f"/dead/{second['id']}").json() == {"deleted": True}
    assert program.post("/dead/retry", group="KeyError") == {"retried": 0}
    assert program.post("/dead/retry", group="ValueError", limit=1) == {"retried": 1}
    assert len(stage.sidejob.dead) == 1
    program.get(f"/dead/{first['id']}", code=404)


def test_what_runs_them(stage: Stage, program: Program) -> None:
    CapacityPool("printers", 4).apply_async(stage.idle)
    stage.sidejob.schedule("nightly", stage.idle, every=timedelta(hours=6))
    send = stage.app.task(durable=True, name="stage.send", shared=False)(send_mail)
    result = send.apply_async(("ann",), countdown=3600)
    program.post("/queues/mail/pause", reason="on fire")
    assert stage.sidejob.queue("mail").pause_reason == "on fire (token read-write-operate)"
    program.post("/queues/mail/resume")
    assert program.post("/queues/mail", method="PATCH", limit=3, rate="600/m") == {
        "name": "mail",
        "limit": 3,
        "rate": "600/m",
    }
    assert program.post("/queues/mail", method="PATCH", limit=None) == {"name": "mail", "limit": None}
    gate = next(one["gate"] for one in program.get("/queues")["items"] if one["name"] == "mail")
    assert (gate["limit"], gate["rate"], gate["paused_at"]) == (None, "600/m", None)
    program.post("/pools/printers", method="PATCH", limit=9)
    assert program.get("/pools")["items"][0]["limit"] == 9
    assert program.post("/schedules/nightly/pause")["paused_at"] is not None
    assert program.post("/schedules/nightly/resume")["paused_at"] is None
    assert program.post("/schedules/nightly/run")["job"] is not None
    program.post("/schedules/none/run", code=404)
    assert program.get("/schedules")["items"][0]["count"] == 1
    assert [task["task_id"] for task in program.get("/tasks", status="scheduled")["items"]] == [result.id]
    assert program.get(f"/tasks/{result.id}")["task"] == "stage.send"
    assert program.get("/stats")["queues"]
    assert program.get("/workers")["items"]
    assert {"check", "level"} <= program.get("/findings")["items"][0].keys()


def send_mail(to: str) -> None:
    pass


def test_a_durable_task_is_revoked(stage: Stage, program: Program) -> None:
    send = stage.app.task(durable=True, name="stage.send", shared=False)(send_mail)
    task_id = send.apply_async(("ann",), countdown=3600).id
    assert program.post(f"/tasks/{task_id}/revoke") == {"task_id": task_id, "running": False, "told": True}
    assert program.get(f"/tasks/{task_id}")["revoked"]
    program.post(f"/tasks/{task_id}/revoke", code=404, terminate=True)
    program.post("/tasks/none/revoke", code=404)


def test_a_store_that_keeps_no_revocation_is_named(
    stage: Stage, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task may be there, so nobody says that it is nowhere."""
    unfit = burials.Revoked(unfit=SchemaError("Store 1 has no schema."))
    monkeypatch.setattr(burials, "revoke_in_all", lambda runtime, task_ids: unfit)
    assert program.post("/tasks/none/revoke", code=409)["detail"] == "Store 1 has no schema."


def test_a_name_may_have_a_slash(stage: Stage, program: Program) -> None:
    send = stage.app.task(durable=True, name="stage.send", shared=False)(send_mail)
    send.apply_async(("ann",), countdown=3600, task_id="import/7")
    assert program.get("/tasks/import%2F7")["task_id"] == "import/7"
    assert program.post("/tasks/import%2F7/revoke")["task_id"] == "import/7"
    assert program.post("/queues/mail%2Fslow/pause", reason="rest")["name"] == "mail/slow"
    assert stage.sidejob.queue("mail/slow").paused
    assert program.post("/queues/a%0A%2Fb/pause", reason="rest")["name"] == "a\n/b"


@pytest.mark.parametrize(
    ("method", "path", "code"), [("GET", "/nothing", 404), ("GET", "/a%0Ab", 404), ("DELETE", "/jobs", 405)]
)
def test_what_is_no_operation_is_a_problem_too(program: Program, method: str, path: str, code: int) -> None:
    found = program.ask(method, path)
    assert found.status_code == code
    assert found.headers["content-type"] == "application/problem+json"
    assert found.headers.get("allow") == ("GET, HEAD, POST" if code == 405 else None)


def test_a_body_of_which_nothing_is_needed_may_be_left_out(stage: Stage, program: Program) -> None:
    job = stage.job()
    assert program.ask("POST", f"/jobs/{job.id}/terminate").status_code == 200
    assert program.ask("POST", "/jobs").status_code == 400


def test_a_change_that_is_refused_changes_nothing(stage: Stage, program: Program) -> None:
    job = stage.job(state={"page": 1})
    before = stage.everything()
    program.post(f"/jobs/{job.id}", code=400, method="PATCH", priority=7, queue="slow", tag=[""])
    program.post(f"/jobs/{job.id}", code=400, method="PATCH", priority=7, untag=["x" * 5000])
    program.post(f"/jobs/{job.id}/state", code=400, method="PATCH", set={"page": 2}, unset=["x" * 5000])
    assert stage.everything() == before


def test_the_history_names_the_token_that_has_changed_a_job(stage: Stage, program: Program) -> None:
    job = stage.job(inports=["orders"])
    at = f"/jobs/{job.id}"
    program.post(f"{at}/state", method="PATCH", set={"colour": "red"}, unset=["size"])
    program.post(f"{at}/ports/in/orders", values=[1, 2])
    program.post(f"{at}/ports/in/orders/take")
    program.post(f"{at}/state", method="PATCH", code=400, set={"colour": "x" * 1_010_000})
    program.post(f"{at}/adopt", code=404, job="none", name="child")
    by = {"by": "token read-write-operate"}
    assert [(entry.what, entry.detail) for entry in job.history if entry.what != "made"] == [
        ("state changed", {**by, "set": ["colour"], "unset": ["size"]}),
        ("packet written", {**by, "port": "in orders", "packets": 2}),
        ("packets read", {**by, "port": "in orders"}),
    ]


def test_blanks_are_no_empty_body(program: Program) -> None:
    """Those that Python strips are no JSON either."""
    for content in (b" ", b"\x0b", b"\x0c", b"\n"):
        found = program.ask("POST", "/queues/q/pause", content=content, headers={"content-type": "application/json"})
        assert found.status_code == 400, content
        assert program.ask("POST", "/queues/q/pause", content=content).status_code == 415, content
    assert program.ask("POST", "/queues/q/pause", content=b"").status_code == 200


def test_what_is_not_understood(stage: Stage, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    for content, kind, code in ((b"{", "application/json", 400), (b"{}", "text/plain", 415),
                                (b"[" * 100_000, "application/json", 400), (b"\xff", "application/json", 400),
                                (b'{"task": NaN}', "application/json", 400),
                                (b'{"task": "' + b"x" * 2_000_000 + b'"}', "application/json", 413)):  # fmt: skip
        found = program.ask("POST", "/jobs", content=content, headers={"content-type": kind})
        assert found.status_code == code, (content[:20], found.text[:200])
        assert found.headers["content-type"] == "application/problem+json"

    def broken(*given: object) -> None:
        raise RuntimeError("the card number 4711")

    monkeypatch.setattr(type(stage.sidejob), "workers", broken)
    found = program.ask("GET", "/workers")
    assert found.status_code == 500
    assert "4711" not in found.text


def test_the_document_describes_each_operation(program: Program) -> None:
    document = program.get("/openapi.json")
    assert document["openapi"] == "3.1.0"
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(operation.method, operation.path) for operation in OPERATIONS}
    names = [one["operationId"] for methods in document["paths"].values() for one in methods.values()]
    assert len(names) == len(set(names))
    for reference in re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)):
        assert reference in document["components"]["schemas"]


def row(operation: Operation) -> str:
    """The row of an operation in the table of the page."""
    names = ", ".join(f"`{name}`" for kind in (operation.body, operation.query) for name in kind.__struct_fields__)
    summary = str(operation.do.__doc__).split("\n")[0].rstrip(".")
    return f"| `{operation.method} {operation.path}` | {operation.scope} | {summary} | {names} |"


def test_the_page_lists_each_operation() -> None:
    table = "\n".join(["| operation | scope | | given |", "|---|---|---|---|", *map(row, OPERATIONS)])
    assert table in PAGE.read_text(), f"docs/http_api.md must have:\n{table}"


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
BRANCHES = LEAVES | st.lists(LEAVES, max_size=3) | st.dictionaries(st.text(), LEAVES, max_size=3)
JSON = BRANCHES | st.lists(BRANCHES, max_size=3) | st.dictionaries(st.text(), BRANCHES, max_size=3)


PARTS = st.sampled_from(["1", "in", "orders", "x" * 300, "é", "0", "9" * 30, "\u202e"])


@pytest.mark.few(0)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_input_is_an_error_of_ours(stage: Stage, program: Program, data: st.DataObject) -> None:
    """Whatever an operation is given, it is done or refused with a problem document, and never fails."""
    if not stage.sidejob.jobs(limit=1):
        stage.job()
    for operation in OPERATIONS:
        path = re.sub(r"\{\w+\}", lambda _: data.draw(PARTS), operation.path)
        names = operation.body.__struct_fields__
        body = data.draw(st.dictionaries(st.sampled_from([*names, "other"]), JSON, max_size=4))
        wanted = operation.query.__struct_fields__
        query = data.draw(st.dictionaries(st.sampled_from([*wanted, "other"]), st.text(max_size=20), max_size=3))
        found = program.ask(operation.method, path, None if operation.method == "GET" else body, params=query)
        assert found.status_code < 500, (operation.method, path, body, query, found.text)
        if found.status_code >= 400:
            assert found.headers["content-type"] in ("application/problem+json", "text/html; charset=utf-8")
