"""A call of the HTTP API that is sent again with its Idempotency-Key."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx
import pytest

from celery_sidejob import CapacityPool, InvalidValueError, Job, Port, RunningJob
from celery_sidejob.store import web_tokens
from celery_sidejob.web.operations import OPERATIONS
from celery_sidejob.web.site import Site
from celery_sidejob.web.users import SCOPES, Users, make_token, revoke_token
from tests.tools.browsers import ENTRIES, Program, browser_of
from tests.tools.crash_points import Arm, lost
from tests.tools.in_process import Stage


def again(program: Program, method: str, path: str, body: Any = None, key: str = "k") -> tuple[Any, Any]:
    """Send a call twice; return both answers."""
    first, second = (program.ask(method, path, body, headers={"idempotency-key": key}) for _ in range(2))
    return first, second


def test_each_operation_that_does_something_takes_a_key(program: Program) -> None:
    document = program.get("/openapi.json")
    takes = {
        (method.upper(), path)
        for path, methods in document["paths"].items() for method, described in methods.items()
        if any(parameter["name"] == "Idempotency-Key" for parameter in described["parameters"])
    }  # fmt: skip
    assert takes == {(one.method, one.path) for one in OPERATIONS if one.method in ("POST", "PATCH")}


def test_a_job_is_made_once(stage: Stage, program: Program, with_token: Callable[..., Program]) -> None:
    first, second = again(program, "POST", "/jobs", {"task": "stage.idle"})
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.json() == second.json()
    assert "idempotency-replayed" not in first.headers
    assert second.headers["idempotency-replayed"] == "true"
    assert [job.id for job in stage.sidejob.jobs()] == [first.json()["id"]]
    assert again(program, "POST", "/jobs", {"task": "stage.idle"}, key="other")[0].json()["id"] != first.json()["id"]
    other = with_token("write").ask("POST", "/jobs", {"task": "stage.idle"}, headers={"idempotency-key": "k"})
    assert other.json()["id"] != first.json()["id"], "each token has keys of its own"


def test_a_new_token_with_the_name_of_a_revoked_one_has_keys_of_its_own(
    stage: Stage, with_token: Callable[..., Program]
) -> None:
    job = stage.job(inports=["a"])
    job.input("a").write("for the first")
    take, key = f"/jobs/{job.id}/ports/in/a/take", {"idempotency-key": "k"}
    first = with_token("write")
    assert first.ask("POST", take, {}, headers=key).json() == {"values": ["for the first"]}
    assert revoke_token(stage.runtime, "write")
    assert with_token("write").ask("POST", take, {}, headers=key).json() == {"values": []}


def test_packets_are_written_and_read_once(stage: Stage, program: Program) -> None:
    job = stage.job(inports=["orders"])
    at = f"/jobs/{job.id}/ports/in/orders"
    again(program, "POST", at, {"values": [1, 2, 3]})
    assert len(job.input("orders")) == 3
    taken = again(program, "POST", f"{at}/take", {"limit": 2}, key="take")
    assert [found.json() for found in taken] == [{"values": [1, 2]}] * 2
    assert len(job.input("orders")) == 1
    published = stage.job(inports={"a": {"channels": ["/c"]}})
    again(program, "POST", "/publish", {"channel": "/c", "message": 7}, key="publish")
    assert len(published.input("a")) == 1


def test_jobs_are_run_forked_and_changed_once(stage: Stage, program: Program) -> None:
    job = stage.job()
    stage.run(job)
    again(program, "POST", f"/jobs/{job.id}/run", {})
    again(program, "PATCH", f"/jobs/{job.id}", {"tag": ["vip"]}, key="tag")
    assert [entry.what for entry in job.history if entry.detail and "by" in entry.detail][-2:] == [
        "asked to run", "tags changed",
    ]  # fmt: skip
    forks = again(program, "POST", f"/jobs/{job.id}/fork", {}, key="fork")
    assert forks[0].json()["id"] == forks[1].json()["id"]


def test_another_call_with_the_key_is_refused(stage: Stage, program: Program) -> None:
    key = {"idempotency-key": "k"}
    assert program.ask("POST", "/jobs", {"task": "stage.idle"}, headers=key).status_code == 201
    for path, body in (("/jobs", {"task": "stage.call"}), ("/log", {"entry": "a"})):
        assert program.ask("POST", path, body, headers=key).status_code == 422
    assert len(stage.sidejob.jobs()) == 1
    for wrong in ("", "x" * 256):
        found = program.ask("POST", "/log", {"entry": "a"}, headers={"idempotency-key": wrong})
        assert found.status_code == 400, wrong


def test_a_refused_call_may_be_corrected_with_its_key(stage: Stage, program: Program) -> None:
    key = {"idempotency-key": "k"}
    assert program.ask("POST", "/jobs", {"task": "none"}, headers=key).status_code == 404
    holder = stage.job(unique="u")
    wanted = {"task": "stage.idle", "unique": "u", "on_duplicate": "refuse"}
    assert program.ask("POST", "/jobs", wanted, headers=key).status_code == 409
    full = stage.task(stage._idle, name="stage.full", capacity=CapacityPool("one", 1))
    full.delay()
    assert program.ask("POST", "/jobs", {"task": full.name}, headers=key).status_code == 429
    holder.terminate(without_shutdown=True)
    holder.delete()
    job = stage.job()
    job.terminate(without_shutdown=True)
    assert program.ask("POST", f"/jobs/{job.id}/run", {}, headers=key).status_code == 409
    assert program.ask("POST", f"/jobs/{job.id}/run", {"force": True}, headers=key).status_code == 200


def test_a_call_that_was_refused_after_it_has_written_is_not_done_again(
    stage: Stage, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = stage.job(inports=["a"])
    write = Port.write_many

    def refused_behind(port: Port, values: Any) -> None:
        write(port, values)
        raise InvalidValueError("the second half is refused")

    monkeypatch.setattr(Port, "write_many", refused_behind)
    first, second = again(program, "POST", f"/jobs/{job.id}/ports/in/a", {"value": 1})
    assert (first.status_code, second.status_code) == (400, 400)
    assert "idempotency-replayed" in second.headers
    assert second.headers["content-type"] == first.headers["content-type"] == "application/problem+json"
    assert len(job.input("a")) == 1


def test_what_cannot_be_written_into_the_history_is_done_all_the_same(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(database_url, sidejob_max_value_bytes=30)
    with closing(stage), browser_of(Site(stage.sidejob, Users(ENTRIES), None)) as browser:
        program = Program(browser, make_token(stage.runtime, "t", SCOPES))
        job = stage.job(inports=["a"])
        first, second = again(program, "POST", f"/jobs/{job.id}/ports/in/a", {"value": 1})
        assert (first.status_code, second.status_code) == (200, 200)
        assert len(job.input("a")) == 1
    assert f"The history of job {job.id} lacks 'packet written' by token t: " in caplog.text


def test_a_long_list_is_cut_in_the_history(stage: Stage, program: Program) -> None:
    job = stage.job()
    keys = [f"{number:03}" for number in range(100)]
    assert program.ask("PATCH", f"/jobs/{job.id}/state", {"set": dict.fromkeys(keys, 1)}).status_code == 200
    (entry,) = [entry for entry in job.history if entry.what == "state changed"]
    assert entry.detail["set"] == [*keys[:20], "and 80 more"]


def test_a_call_that_has_nothing_to_write_has_a_key(stage: Stage, program: Program) -> None:
    body = {"task": "stage.idle", "unique": "u", "on_duplicate": "return"}
    there = program.ask("POST", "/jobs", body).json()
    first, second = again(program, "POST", "/jobs", body)
    assert first.json()["id"] == second.json()["id"] == there["id"]
    stage.sidejob.get(there["id"]).terminate(without_shutdown=True)
    stage.sidejob.get(there["id"]).delete()
    assert program.ask("POST", "/jobs", body, headers={"idempotency-key": "k"}).json()["id"] == there["id"]
    assert len(stage.sidejob.jobs()) == 0


def test_a_queue_that_was_paused_already_is_not_paused_again_by_a_repeated_call(stage: Stage, program: Program) -> None:
    queue = stage.sidejob.queue("q")
    queue.pause("by hand")
    key = {"idempotency-key": "k"}
    assert program.ask("POST", "/queues/q/pause", {}, headers=key).status_code == 200
    queue.resume()
    assert program.ask("POST", "/queues/q/pause", {}, headers=key).json() == {"name": "q", "paused": True}
    assert not queue.paused


@pytest.mark.parametrize(("verb", "behind"), [("pause", "rank"), ("resume", "let_in")])
def test_a_queue_is_paused_and_resumed_in_one_transaction_with_the_key(
    stage: Stage, program: Program, monkeypatch: pytest.MonkeyPatch, verb: str, behind: str
) -> None:
    queue, key = stage.sidejob.queue("q"), {"idempotency-key": "k"}
    queue.configure(limit=1)
    if verb == "resume":
        queue.pause("by hand")

    def dies(*args: Any) -> None:
        raise RuntimeError("behind the commit")

    with monkeypatch.context() as patched:
        patched.setattr(f"celery_sidejob.operations.gates.queues.{behind}", dies)
        assert program.ask("POST", f"/queues/q/{verb}", {}, headers=key).status_code == 500
    assert queue.paused == (verb == "pause")
    queue.resume() if verb == "pause" else queue.pause("by hand")
    assert program.ask("POST", f"/queues/q/{verb}", {}, headers=key).status_code == 409
    assert queue.paused == (verb == "resume"), "what was done since stays"


def test_a_call_whose_process_dies_before_its_commit_is_done_when_it_is_sent_again(
    stage: Stage, program: Program, at: Arm
) -> None:
    job = stage.job(inports=["a"])
    at("write:before-commit", lost)
    found = [
        program.ask("POST", f"/jobs/{job.id}/ports/in/a", {"value": 1}, headers={"idempotency-key": "k"}).status_code
        for _ in range(2)
    ]
    assert found == [503, 200]
    assert len(job.input("a")) == 1


def test_a_call_whose_answer_is_lost_is_not_done_again(stage: Stage, program: Program, at: Arm) -> None:
    job = stage.job(inports=["a"])
    at("write:after-commit", lost)
    first, second = again(program, "POST", f"/jobs/{job.id}/ports/in/a", {"value": 1})
    assert first.status_code == 503
    assert second.status_code == 409
    assert "its answer is lost" in second.json()["detail"]
    assert len(job.input("a")) == 1, "nobody could tell without the key"


def test_an_answer_that_is_too_long_is_not_kept(
    stage: Stage, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_sidejob.web.api.LONGEST_ANSWER", 10)
    first, second = again(program, "POST", "/jobs", {"task": "stage.idle"})
    assert (first.status_code, second.status_code) == (201, 409)
    assert [job.id for job in stage.sidejob.jobs()] == [first.json()["id"]]


def test_of_many_calls_at_once_one_is_done(stage: Stage, program: Program) -> None:
    job = stage.job(inports=["a"])
    found: list[httpx.Response] = []

    def call() -> None:
        found.append(program.ask("POST", f"/jobs/{job.id}/ports/in/a", {"value": 1}, headers={"idempotency-key": "k"}))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(job.input("a")) == 1
    assert {answer.status_code for answer in found} <= {200, 409}
    assert sum(answer.status_code == 200 and "idempotency-replayed" not in answer.headers for answer in found) == 1


def test_packets_are_taken_once_by_many_calls_at_once(stage: Stage, program: Program) -> None:
    job = stage.job(inports=["orders"])
    job.input("orders").write_many(range(8))

    def take(key: str) -> httpx.Response:
        at = f"/jobs/{job.id}/ports/in/orders/take"
        return program.ask("POST", at, {"limit": 1}, headers={"idempotency-key": key})

    for number in range(8):
        with ThreadPoolExecutor(4) as threads:
            answers = [called.result() for called in [threads.submit(take, f"k{number}") for _ in range(4)]]
        assert {found.status_code for found in answers} <= {200, 409}
        taken = {found.text for found in answers if found.status_code == 200}
        assert taken == {f'{{"values": [{number}]}}'}, "the oldest, which no repeated call has locked"
    assert len(job.input("orders")) == 0


def test_a_repeated_call_locks_nothing_while_it_waits(
    stage: Stage, program: Program, aside: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = stage.job(inports=["orders"])
    job.input("orders").write_many(range(2))
    note_call, repeated, free = web_tokens.note_call, list[Any](), list[int]()

    def take() -> httpx.Response:
        at = f"/jobs/{job.id}/ports/in/orders/take"
        return program.ask("POST", at, {"limit": 1}, headers={"idempotency-key": "k"})

    def beside_the_repeated_one(*args: Any, **given: Any) -> bool:
        if not repeated:
            repeated.append(aside(take))
            stage.wait_for_waiters()
            free.extend(*stage.sql("SELECT count(*) FROM (SELECT FROM packets FOR UPDATE SKIP LOCKED) f"))
        return note_call(*args, **given)

    monkeypatch.setattr(web_tokens, "note_call", beside_the_repeated_one)
    assert take().json() == {"values": [0]}
    assert repeated[0].result().status_code in (200, 409)
    assert free == [1], "the packet that the first call has not taken"


@pytest.mark.parametrize("path", ["/dead/retry", "/dead/{id}/retry", "/tasks/{task_id}/revoke"])
def test_a_call_that_finds_nothing_left_to_do_gets_the_answer_of_the_one_that_did_it(
    stage: Stage, program: Program, aside: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def fails(job: RunningJob) -> None:
        raise ValueError("once")

    def send() -> None:
        pass

    with pytest.raises(ValueError, match="once"):
        stage.inside(fails)
    (entry,) = stage.sidejob.dead
    task_id = stage.app.task(send, name="stage.send", durable=True, shared=False).delay().id
    path = path.format(id=entry.id, task_id=task_id)
    firsts: list[httpx.Response] = []

    def call() -> httpx.Response:
        return program.ask("POST", path, {}, headers={"idempotency-key": "k"})

    def tell_late(visit: Any, what: str) -> None:
        if not firsts:
            monkeypatch.undo()
            firsts.append(aside(call).result())

    monkeypatch.setattr("celery_sidejob.web.verbs.tell", tell_late)
    monkeypatch.setattr("celery_sidejob.web.operations.tell", tell_late)
    late = call()
    assert (late.status_code, late.json()) == (200, firsts[0].json())
    assert "idempotency-replayed" in late.headers


def test_two_names_that_a_url_writes_alike_are_two_calls(stage: Stage, program: Program) -> None:
    key = {"idempotency-key": "k"}
    assert program.ask("POST", "/queues/ab/pause", {"reason": "a"}, headers=key).status_code == 200
    assert program.ask("POST", "/queues/a%0Ab/pause", {"reason": "a"}, headers=key).status_code == 422


def test_keys_are_forgotten_after_a_day(stage: Stage, program: Program) -> None:
    first = again(program, "POST", "/jobs", {"task": "stage.idle"})[0].json()
    stage.sql("UPDATE web_answers SET made_at = made_at - interval '25 hours'")
    stage.sql("INSERT INTO web_answers SELECT 't', n::text, 'r', 'c', NULL, NULL, now() - interval '2 days' "
              "FROM generate_series(1, 50) n")  # fmt: skip
    assert again(program, "POST", "/jobs", {"task": "stage.idle"})[0].json() != first
    assert stage.sql("SELECT count(*) FROM web_answers") == [(1,)]


@pytest.mark.parametrize("action", ["run", "terminate"])
def test_a_refused_action_leaves_no_line_in_the_history(stage: Stage, program: Program, action: str) -> None:
    job = stage.job()
    job.terminate(without_shutdown=True)
    before = Job(job.id, runtime=stage.runtime).history
    found = program.ask("POST", f"/jobs/{job.id}/{action}", {})
    if found.status_code == 409:
        assert job.history == before
    else:
        assert job.history[-1].what == "asked to terminate"
