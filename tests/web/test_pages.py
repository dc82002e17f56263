"""What the pages show of real rows."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest

from celery_sidejob import CapacityPool, RunningJob
from celery_sidejob.web.site import Site
from celery_sidejob.web.users import Users
from tests.tools.browsers import ENTRIES, Browser, browser_of
from tests.tools.in_process import Stage

PAGES = ("/", "/jobs", "/tasks", "/dead", "/workers", "/queues", "/schedules", "/doctor")


def fail(job: RunningJob) -> None:
    raise ValueError("no such order")


def pay(job: RunningJob, card: str) -> None:
    pass


def send_mail(to: str) -> None:
    pass


def steps(job: RunningJob) -> Any:
    job.step("reserve", lambda: {"seats": 2})
    job.step("charge", lambda: 42)
    job.sleep("cool down", days=1)


def test_every_page_of_an_empty_store_says_what_to_do(reader: Browser) -> None:
    for page in PAGES:
        shown = reader.text(page)
        assert shown.count("<h1>") >= 1
        assert "Undefined" not in shown
    assert "There are no jobs." in reader.text("/jobs")
    assert "sidejob_schedules" in reader.text("/schedules")


def test_the_overview(stage: Stage, reader: Browser) -> None:
    stage.job(queue="maths")
    failed = stage.job(fail)
    with pytest.raises(ValueError, match="no such order"):
        stage.run(failed)
    shown = reader.text("/")
    assert re.search(r"<b>1</b>\s*<span>in the dead set</span>", shown)
    assert ">maths</a>" in shown
    assert "ValueError" in shown


def test_the_list_of_jobs_and_its_filters(stage: Stage, reader: Browser) -> None:
    plain, tagged = stage.job(queue="a"), stage.job(queue="b", tags=["vip"], countdown=3600)
    links = {job.id: f'href="/jobs/{job.id}"' for job in (plain, tagged)}
    for query, found in {
        "": {plain.id, tagged.id},
        "?queue=a": {plain.id},
        "?tag=vip": {tagged.id},
        "?waiting_for=timer": {tagged.id},
        "?status=queued&task=stage.idle": {plain.id, tagged.id},
        "?status=failed": set(),
        "?since=1h": {plain.id, tagged.id},
        "?older_than=1h": set(),
        f"?before={tagged.id}": {plain.id},
        f"?after={plain.id}": {tagged.id},
    }.items():
        shown = reader.text(f"/jobs{query}")
        assert {job_id for job_id, link in links.items() if link in shown} == found, query
    assert "No job matches." in reader.text("/jobs?queue=none")


def test_the_pages_of_the_list_lead_on(stage: Stage, reader: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery_sidejob.web.pages.PAGE", 2)
    jobs = [stage.job() for _ in range(5)]

    def follow(rel: str, page: str) -> list[str]:
        seen = []
        while True:
            shown = reader.text(page)
            seen += re.findall(r'<td class="n"><a href="/jobs/(\d+)"', shown)
            onward = re.search(rf'rel="{rel}" href="([^"]+)"', shown)
            if onward is None:
                return seen
            page = onward[1].replace("&amp;", "&")

    assert follow("next", "/jobs") == [str(job.id) for job in reversed(jobs)]
    back = follow("prev", f"/jobs?before={jobs[1].id}")
    assert back == [str(jobs[n].id) for n in (0, 2, 1, 4, 3)], "each page shows the newest first"


def test_a_job_with_its_steps_and_runs(stage: Stage, reader: Browser) -> None:
    job = stage.job(steps, tags=["vip"], state={"colour": "red"}, aliases=["order-7"])
    stage.run(job)
    shown = reader.text(f"/jobs/{job.id}")
    for text in ("reserve", "charge", "cool down", "order-7", "vip", "&#34;colour&#34;: &#34;red&#34;", "Run 1: "):
        assert text in shown, text
    assert shown.count('class="bar completed"') >= 2
    assert "its time has not come" in shown


def test_a_failed_job_shows_its_traceback(stage: Stage, reader: Browser) -> None:
    job = stage.job(fail)
    with pytest.raises(ValueError, match="no such order"):
        stage.run(job)
    shown = reader.text(f"/jobs/{job.id}")
    assert "no such order" in shown
    assert "Traceback (most recent call last)" in shown
    (entry,) = stage.sidejob.dead.list()
    assert f'href="/dead/{entry.id}"' in shown
    assert "no such order" in reader.text(f"/dead/{entry.id}")
    assert "no such order" in reader.text("/dead?group=ValueError")
    assert "No entry matches." in reader.text("/dead?group=KeyError")


def test_a_port_and_its_packets(stage: Stage, reader: Browser) -> None:
    job = stage.job()
    job.input("orders").write({"number": 7})
    assert "orders" in reader.text(f"/jobs/{job.id}")
    assert "&#34;number&#34;: 7" in reader.text(f"/jobs/{job.id}/ports/in/orders")
    assert len(job.input("orders")) == 1, "looking reads nothing"
    assert reader.get(f"/jobs/{job.id}/ports/sideways/orders").status_code == 404
    strict = stage.sidejob.enqueue(stage.task(pay, name="stage.pay", inports=["orders"]), ("4711",))
    assert reader.get(f"/jobs/{strict.id}/ports/in/none").status_code == 404


def test_a_tree(stage: Stage, reader: Browser) -> None:
    parent = stage.job()
    child = parent.enqueue(stage.idle, child_name="first")
    shown = reader.text(f"/jobs/{parent.id}/tree")
    assert f'href="/jobs/{child.id}"' in shown
    assert "first" in shown
    assert "The whole tree" in reader.text(f"/jobs/{parent.id}")


def test_finding(stage: Stage, reader: Browser) -> None:
    job = stage.job(aliases=["order-7"])
    for which in (str(job.id), "order-7", job.task_id):
        assert reader.get("/find", params={"which": which}).headers["location"] == f"/jobs/{job.id}"
    assert reader.get("/find", params={"which": "nobody"}).status_code == 404


def test_queues_pools_workers_and_schedules(stage: Stage, reader: Browser) -> None:
    stage.sidejob.queue("mail").pause("the printer is on fire")
    stage.sidejob.queue("mail").configure(limit=3, rate="600/m")
    stage.sidejob.schedule("nightly", stage.idle, every=timedelta(hours=6))
    pool = CapacityPool("printers", 4)
    pool.apply_async(stage.idle)
    running = stage.job(queue="mail2")
    stage.claim(running)
    shown = reader.text("/queues")
    for text in ("the printer is on fire", "at most 3", "600/m", "printers", "1 / 4"):
        assert text in shown, text
    assert "nightly" in reader.text("/schedules")
    assert "every 6 h" in reader.text("/schedules")
    assert f'href="/jobs/{running.id}"' in reader.text("/workers")


def test_a_durable_task(stage: Stage, reader: Browser) -> None:
    send = stage.app.task(durable=True, name="stage.send", shared=False)(send_mail)
    result = send.apply_async(("ann@example.org",), countdown=3600)
    assert result.id in reader.text("/tasks")
    shown = reader.text(f"/tasks/{result.id}")
    assert "ann@example.org" in shown
    assert reader.get("/find", params={"which": result.id}).headers["location"] == f"/tasks/{result.id}"
    assert reader.get("/tasks/none").status_code == 404
    assert reader.get("/tasks?status=none").status_code == 400


def test_arguments_are_redacted(database_url: str) -> None:
    stage = Stage(database_url, sidejob_redact=lambda value: "(hidden)")
    try:
        task = stage.task(pay, name="stage.pay", inports=["orders"])
        job = stage.sidejob.enqueue(task, ("4711",), state={"pin": "1234"})
        job.input("orders").write("4711")
        with browser_of(Site(stage.sidejob, Users(ENTRIES), None)) as browser:
            browser.log_in("ron")
            for page in (f"/jobs/{job.id}", f"/jobs/{job.id}/ports/in/orders"):
                shown = browser.text(page)
                assert "(hidden)" in shown
                assert "4711" not in shown
                assert "1234" not in shown
    finally:
        stage.close()


def test_what_is_not_there(reader: Browser) -> None:
    for path in ("/jobs/999999", "/jobs/x", "/jobs/1%0a", "/dead/999", "/nothing", "/jobs/9999999999999999999999"):
        assert reader.get(path).status_code == 404, path
    for path in ("/jobs?before=x", "/jobs?since=soon", "/jobs?status=none", "/dead?reason=none", "/dead/x",
                 "/jobs?waiting_for=godot"):  # fmt: skip
        assert reader.get(path).status_code == 400, path


def test_a_link_with_blanks_in_a_name_leads_to_it(stage: Stage, reader: Browser) -> None:
    job, other = stage.job(tags=[" vip"]), stage.job(tags=["vip"])
    shown = reader.text("/jobs?tag=%20vip")
    assert f'href="/jobs/{job.id}"' in shown
    assert f'href="/jobs/{other.id}"' not in shown


def test_a_task_whose_id_has_a_slash_is_found(stage: Stage, operator: Browser) -> None:
    send = stage.app.task(durable=True, name="stage.send", shared=False)(send_mail)
    send.apply_async(("ann",), countdown=3600, task_id="import/7")
    found = operator.get("/find?which=import/7")
    assert found.headers["location"] == "/tasks/import%2F7"
    assert "import/7" in operator.text("/tasks/import%2F7")
    assert operator.submit("/tasks/import%2F7/revoke").status_code == 303
