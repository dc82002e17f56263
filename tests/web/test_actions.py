"""What an operator does: each form of a page does what the command does, and says who did it."""

from __future__ import annotations

import html
import logging
import re
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import pytest

from celery_sidejob import CapacityPool, Job, RunningJob, Status
from celery_sidejob.web.actions import BULK, OPERATING
from celery_sidejob.web.site import Site
from tests.tools.browsers import Browser, browser_of
from tests.tools.crash_points import Arm, lost
from tests.tools.in_process import Stage


def fail(job: RunningJob) -> None:
    raise ValueError("no such order")


def steps(job: RunningJob) -> None:
    job.step("reserve", lambda: 2)
    job.step("charge", lambda: 42)
    job.suspend()


def failed(stage: Stage, **options: Any) -> Job:
    job = stage.job(fail, **options)
    with pytest.raises(ValueError, match="no such order"):
        stage.run(job)
    return job


def who(job: Job) -> list[tuple[str, dict[str, Any]]]:
    """What the history says of those who have acted."""
    return [
        (entry.what, entry.detail)
        for entry in job.history
        if entry.detail and entry.what != "made" and "by" in entry.detail
    ]


def send(to: str) -> None:
    pass


def sent_task(stage: Stage) -> str:
    """The id of a durable task that waits."""
    task = stage.app.task(durable=True, name="stage.send", shared=False)(send)
    return str(task.apply_async(("ann",), countdown=3600).id)


def test_a_reader_and_a_stranger_change_nothing(stage: Stage, reader: Browser, stranger: Browser) -> None:
    job = failed(stage)
    stage.sidejob.schedule("nightly", stage.idle, every=60)
    task_id = sent_task(stage)
    stage.runtime.connections.write_behind_now()
    before = stage.everything()
    for entry in (*OPERATING, *BULK):
        path = entry.path.format(id=job.id, direction="in", name="a", task_id=task_id)
        form = {"name": "nightly", "verb": "run", "value": "1", "tag": "a", "limit": "1", "total": "1", "queue": "a"}
        if entry.method == "GET":
            assert reader.get(f"{path}?verb=run").status_code == 403, path
            continue
        assert reader.submit(path, **form).status_code == 403, path
        assert stranger.post(path, data={**form, "token": reader.token}).status_code == 403, path
    assert stage.everything() == before
    for page in ("/", "/jobs?task=stage.call", f"/jobs/{job.id}", "/dead", "/queues", "/schedules",
                 f"/jobs/{job.id}/ports/in/a", f"/tasks/{task_id}"):  # fmt: skip
        shown = reader.text(page)
        posted = [form for form in re.findall(r"<form [^>]+>", shown) if "post" in form]
        assert posted == ['<form action="/logout" method="post">'], "no button that it refuses"
        assert "/bulk" not in shown


def test_a_form_of_another_session_or_site_does_nothing(
    stage: Stage, site: Site, operator: Browser, reader: Browser
) -> None:
    job = stage.job()
    path, token = f"/jobs/{job.id}/terminate", operator.token
    with browser_of(site) as elsewhere:
        elsewhere.log_in("ann")
        token_of_her_other_session = elsewhere.token
    for given in ("", "0" * 64, reader.token, token_of_her_other_session, token[:-1], token + "0", "é"):
        assert operator.post(path, data={"token": given}).status_code == 403
    for headers in (
        {"origin": "https://evil.example"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ):
        assert operator.post(path, data={"token": token}, headers=headers).status_code == 403
    assert operator.get(path).status_code == 405
    assert job.refresh().status == Status.QUEUED
    assert operator.post(path, data={"token": token}).status_code == 303


def test_running(stage: Stage, operator: Browser) -> None:
    job = stage.job()
    stage.run(job)
    assert operator.submit(f"/jobs/{job.id}/run").headers["location"] == f"/jobs/{job.id}?said=asked"
    assert job.refresh().status == Status.QUEUED
    assert who(job) == [("asked to run", {"by": "ann"})]
    assert "It was asked to run." in operator.text(f"/jobs/{job.id}?said=asked")
    assert "&#34;by&#34;: &#34;ann&#34;" in operator.text(f"/jobs/{job.id}")


def test_a_run_that_must_be_forced(stage: Stage, operator: Browser) -> None:
    job = failed(stage)
    refused = operator.submit(f"/jobs/{job.id}/run")
    assert refused.status_code == 409
    assert "force it to run." in refused.text
    assert who(job) == [], "what was refused is not there"
    assert 'name="force" value="1"' in operator.text(f"/jobs/{job.id}"), "the form forces it"
    assert operator.submit(f"/jobs/{job.id}/run", force="1").status_code == 303
    assert job.refresh().status == Status.QUEUED


def test_a_run_later_and_afresh(stage: Stage, operator: Browser) -> None:
    job = stage.job(steps)
    stage.run(job)
    assert operator.submit(f"/jobs/{job.id}/run", countdown="2h", fresh="on").status_code == 303
    assert job.steps == []
    assert len(job.timers) == 1
    assert operator.submit(f"/jobs/{job.id}/run", countdown="soon").status_code == 400


def test_terminating_and_deleting(stage: Stage, operator: Browser) -> None:
    parent = stage.job()
    child = parent.enqueue(stage.idle, child_name="first")
    assert operator.submit(f"/jobs/{parent.id}/delete").status_code == 409
    assert operator.submit(f"/jobs/{parent.id}/terminate", recursive="on").status_code == 303
    stage.drain()
    assert {job.refresh().status for job in (parent, child)} == {Status.TERMINATED}
    assert operator.submit(f"/jobs/{parent.id}/delete").headers["location"] == "/jobs?said=deleted"
    assert not child.exists


def test_forking(stage: Stage, operator: Browser) -> None:
    job = stage.job(steps)
    stage.run(job)
    found = operator.submit(f"/jobs/{job.id}/fork", before="charge").headers["location"]
    made = stage.sidejob.get(int(found.split("/")[2].split("?")[0]))
    assert [step.name for step in made.steps] == ["reserve"]
    assert who(made) == [("forked", {"by": "ann"})]
    assert operator.submit(f"/jobs/{job.id}/fork", before="none").status_code == 400


def test_priority_queue_and_tags(stage: Stage, operator: Browser) -> None:
    job = stage.job(queue="slow")
    at = f"/jobs/{job.id}"
    assert operator.submit(f"{at}/priority", priority="7").status_code == 303
    assert operator.submit(f"{at}/priority", priority="high").status_code == 400
    assert operator.submit(f"{at}/priority", priority="77").status_code == 400
    assert operator.submit(f"{at}/move", queue="fast").status_code == 303
    assert operator.submit(f"{at}/tag", tag="vip").status_code == 303
    assert operator.submit(f"{at}/tag", tag="late").status_code == 303
    assert operator.submit(f"{at}/tag", tag="vip", remove="1").status_code == 303
    now = job.refresh()
    assert (now.info["priority"], now.queue, now.tags) == (7, "fast", ["late"])
    assert ("asked to move", {"by": "ann", "queue": "fast"}) in who(job)


def test_writing_a_packet(stage: Stage, operator: Browser) -> None:
    job = stage.job()
    path = f"/jobs/{job.id}/ports/in/orders"
    assert operator.submit(path, value='{"number": 7}').headers["location"] == f"{path}?said=written"
    assert job.input("orders").read() == {"number": 7}
    for wrong in ("", "orders", "NaN", '"\\ud800"', "[" * 5000):
        assert operator.submit(path, value=wrong).status_code == 400, wrong
    assert len(job.input("orders")) == 0


def test_the_dead_set(stage: Stage, operator: Browser) -> None:
    first, second = failed(stage), failed(stage)
    entries = {entry.job_id: entry.id for entry in stage.sidejob.dead.list()}
    found = operator.submit(f"/dead/{entries[first.id]}/retry")
    assert found.headers["location"] == f"/jobs/{first.id}?said=retried"
    assert first.refresh().status == Status.QUEUED
    assert who(first) == [("asked to retry", {"by": "ann"})]
    assert operator.submit(f"/dead/{entries[second.id]}/delete").status_code == 303
    assert not second.exists
    assert operator.submit(f"/dead/{entries[second.id]}/retry").status_code == 404


def sent(page: str) -> list[tuple[str, str]]:
    """The hidden fields of a page, as a browser sends them; `html.unescape` would leave out references to controls."""
    fields = re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', page)
    return [
        (name, html.unescape(re.sub(r"&#(\d+);", lambda found: chr(int(found[1])), value))) for name, value in fields
    ]


def follow(browser: Browser, path: str) -> tuple[list[str], str]:
    """Confirm an action on many and go on to its end: what each page said of its progress, and the last page."""
    page, said = browser.text(path), []
    while form := re.search(r'<form method="post" action="([^"]+/bulk)".*?</form>', page, re.DOTALL):
        fields = dict(sent(form[0]))
        page = browser.post(form[1], data=fields).text
        said += re.findall(r"</progress> ([^<]+)</p>", page)
    return said, page


def test_retrying_all_of_a_group_in_batches(
    stage: Stage, operator: Browser, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("celery_sidejob.web.actions.BATCH", 2)
    jobs = [failed(stage) for _ in range(5)]
    assert "Retry: 5 entries" in operator.text("/dead/bulk?verb=retry&group=ValueError")
    assert all(job.refresh().status == Status.FAILED for job in jobs), "it only asks"
    with caplog.at_level(logging.INFO, logger="celery_sidejob"):
        said, page = follow(operator, "/dead/bulk?verb=retry&group=ValueError")
    assert said == ["2 done of 5", "4 done of 5", "5 done of 5"]
    assert "It is done." in page
    assert all(job.refresh().status == Status.QUEUED for job in jobs)
    assert len(stage.sidejob.dead) == 0
    assert sum("Web page: ann: retries entry" in line for line in caplog.messages) == 5


@pytest.mark.parametrize("query", ["", "&group=ValueError"])
def test_entries_that_die_again_are_not_retried_for_ever(
    stage: Stage, operator: Browser, monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    monkeypatch.setattr("celery_sidejob.web.actions.BATCH", 2)
    jobs = [failed(stage) for _ in range(3)]
    retry = type(stage.sidejob.dead).retry

    def retry_and_fail(dead: Any, entry_id: Any) -> Any:
        job = retry(dead, entry_id)
        with pytest.raises(ValueError, match="no such order"):
            stage.run(job)
        return job

    monkeypatch.setattr(type(stage.sidejob.dead), "retry", retry_and_fail)
    said, _ = follow(operator, f"/dead/bulk?verb=retry{query}")
    assert said[-1] == "3 done of 3"
    assert [job.refresh().info["run_no"] for job in jobs] == [2, 2, 2], "each once"


def test_all_jobs_of_a_filter(stage: Stage, operator: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery_sidejob.web.actions.BATCH", 2)
    old = [stage.job(tags=["old"]) for _ in range(3)]
    other = stage.job()
    assert "/jobs/bulk?tag=old&amp;verb=terminate" in operator.text("/jobs?tag=old")
    said, _ = follow(operator, "/jobs/bulk?verb=terminate&tag=old")
    assert said == ["2 done of 3", "3 done of 3"]
    assert who(old[0]) == [("asked to terminate", {"by": "ann"})]
    stage.drain()
    assert [job.refresh().status for job in old] == [Status.TERMINATED] * 3
    assert other.refresh().status == Status.COMPLETED
    said, page = follow(operator, "/jobs/bulk?verb=run&tag=old")
    assert said[-1] == "0 done, 3 skipped of 3"
    assert "terminated: force it to run" in page
    said, _ = follow(operator, "/jobs/bulk?verb=delete&tag=old")
    assert said[-1] == "3 done of 3"
    assert not any(job.exists for job in old)
    assert operator.get("/jobs/bulk?verb=explode&tag=old").status_code == 400
    for wrong in ("-1", "some", "9" * 19):
        assert operator.submit("/jobs/bulk", verb="run", total=wrong).status_code == 400


def test_a_slow_batch_leaves_the_rest_to_the_next_request(
    stage: Stage, operator: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_sidejob.web.actions.BATCH_S", -1)
    jobs = [stage.job(tags=["old"]) for _ in range(3)]
    assert follow(operator, "/jobs/bulk?verb=terminate&tag=old")[0] == ["1 done of 3", "2 done of 3", "3 done of 3"]
    assert [len(who(job)) for job in jobs] == [1, 1, 1], "each once"


def test_an_action_on_many_stops_where_the_store_is_away(stage: Stage, operator: Browser, at: Arm) -> None:
    jobs = [stage.job(tags=["old"]) for _ in range(2)]
    at("terminate:before-commit", lost)
    found = operator.submit("/jobs/bulk", verb="terminate", tag="old", total="2")
    assert found.status_code == 503
    assert "The store does not answer" in found.text
    assert [who(job) for job in jobs] == [[], []]
    assert follow(operator, "/jobs/bulk?verb=terminate&tag=old")[0] == ["2 done of 2"]


def test_queues_and_pools(stage: Stage, operator: Browser) -> None:
    pool = CapacityPool("printers", 4)
    pool.apply_async(stage.idle)
    queue = stage.sidejob.queue("mail")
    assert operator.submit("/queues/pause", name="mail", reason="on fire").status_code == 303
    assert queue.pause_reason == "on fire (ann)"
    assert operator.submit("/queues/resume", name="mail").status_code == 303
    assert not queue.paused
    assert (
        operator.submit("/queues/configure", name="mail", limit="3", limit_per_key="", rate="600/m").status_code == 303
    )
    assert (queue.limit, queue.limit_per_key, queue.rate) == (3, None, "600/m")
    assert operator.submit("/queues/configure", name="mail", rate="often").status_code == 400
    assert operator.submit("/queues/pause", name="").status_code == 400
    assert operator.submit("/pools/resize", name="printers", limit="9").status_code == 303
    assert pool.limit == 9
    assert operator.submit("/pools/resize", name="printers", limit="-1").status_code == 400
    assert operator.submit("/pools/resize", name="none", limit="1").status_code in (400, 404, 409)


def test_schedules(stage: Stage, operator: Browser) -> None:
    schedule = stage.sidejob.schedule("nightly", stage.idle, every=timedelta(hours=6))
    assert operator.submit("/schedules/act", name="nightly", verb="pause", reason="holidays").status_code == 303
    assert schedule.pause_reason == "holidays (ann)"
    assert operator.submit("/schedules/act", name="nightly", verb="resume").status_code == 303
    assert not schedule.paused
    operator.submit("/schedules/act", name="nightly", verb="run")
    assert schedule.count == 1
    assert who(schedule.last) == [("made now", {"by": "ann"})]
    assert operator.submit("/schedules/act", name="nightly", verb="explode").status_code == 400
    assert operator.submit("/schedules/act", name="none", verb="run").status_code == 404


def test_revoking_a_durable_task(stage: Stage, operator: Browser) -> None:
    task_id = sent_task(stage)
    assert f'action="/tasks/{task_id}/revoke"' in operator.text(f"/tasks/{task_id}")
    assert operator.submit(f"/tasks/{task_id}/revoke").headers["location"] == "/tasks?said=revoked"
    assert "/revoke" not in operator.text(f"/tasks/{task_id}"), "it cannot be revoked again"
    assert operator.submit(f"/tasks/{task_id}/revoke").status_code == 404


def test_the_page_of_a_failed_job_retries_it(stage: Stage, operator: Browser) -> None:
    job = failed(stage)
    (action,) = re.findall(r'action="(/dead/[^"]+/retry)"', operator.text(f"/jobs/{job.id}"))
    assert operator.submit(action).headers["location"] == f"/jobs/{job.id}?said=retried"
    assert job.refresh().status == "queued"


def test_each_form_of_a_page_leads_to_an_action(stage: Stage, operator: Browser) -> None:
    resting, dead = stage.job(steps, tags=["vip"]), failed(stage)
    stage.run(resting)
    finished = stage.job()
    finished.terminate(without_shutdown=True)
    stage.sidejob.queue("mail").pause()
    stage.sidejob.schedule("nightly", stage.idle, every=60)
    stage.sidejob.schedule("weekly", stage.idle, every=60).pause()
    CapacityPool("printers", 4).apply_async(stage.idle)
    (entry,) = stage.sidejob.dead.list()
    task_id, seen = sent_task(stage), set()
    for page in (f"/jobs/{resting.id}", f"/jobs/{dead.id}", f"/jobs/{finished.id}", f"/jobs/{resting.id}/ports/in/a",
                 f"/dead/{entry.id}", f"/tasks/{task_id}", "/queues", "/schedules", "/dead/bulk?verb=retry",
                 "/jobs/bulk?verb=run&task=stage.call"):  # fmt: skip
        for form in re.findall(r'<form method="post" action="([^"]+)"', operator.text(page)):
            form = form.replace(task_id, "{task_id}").replace("ports/in/a", "ports/{direction}/{name}")
            seen.add(re.sub(r"/\d+", "/{id}", form))
    assert seen == {entry.path for entry in (*OPERATING, *BULK)}


def test_a_form_has_names_as_they_are(stage: Stage, operator: Browser) -> None:
    name = "q\x01\u202e&<\x9b"
    queue = stage.sidejob.queue(name)
    queue.configure(limit=3)
    stage.job(queue=name, tags=[name])
    tagged = f"/jobs/bulk?verb=terminate&tag={quote(name)}"
    for page in ("/queues", tagged):
        shown = operator.text(page)
        assert name[:3] not in shown, "as text it is harmless"
        given = {value for field, value in sent(shown) if field in ("name", "tag")}
        assert given == {name}, page
    assert follow(operator, tagged)[0] == ["1 done of 1"]


def test_what_a_link_says_is_said_only_in_our_words(operator: Browser) -> None:
    assert "evil" not in operator.text("/jobs?said=evil")
