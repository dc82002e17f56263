"""Lists of very many rows: a page looks through some of them, says how far, and leads on; counts are bounded."""

from __future__ import annotations

import re
from typing import Any

import pytest

from celery_sidejob.store import dead, job_lists, packets, waiting
from celery_sidejob.web.site import Site
from celery_sidejob.web.users import Users
from tests.tools.browsers import ENTRIES, Browser, browser_of
from tests.tools.in_process import Stage

MANY = job_lists.LOOKED + 500
assert max(dead.LOOKED, waiting.LOOKED, packets.COUNTED) < MANY
OTHERS = f"INSERT INTO jobs (task, queue, status) SELECT 'other', 'q', 'completed' FROM generate_series(1, {MANY})"


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages have no time: each looks once."""
    for module in ("inspection.jobs", "inspection.tasks", "inspection.dead"):
        monkeypatch.setattr(f"celery_sidejob.{module}.LOOK_S", -1)


def follow(browser: Browser, page: str, rel: str = "next") -> list[str]:
    """The texts of a list's pages, from one to the last."""
    shown = []
    while True:
        shown.append(browser.text(page))
        onward = re.search(rf'rel="{rel}" href="([^"]+)"', shown[-1])
        if onward is None:
            return shown
        page = onward[1].replace("&amp;", "&")


@pytest.mark.few(1)
@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("filters", ["task=stage.idle", "status=queued&queue=stage", "text=4711"])
def test_a_search_through_many_jobs_says_how_far_it_looked(stage: Stage, reader: Browser, filters: str) -> None:
    job = stage.job()
    stage.sql("UPDATE jobs SET args = '[4711]', queue = 'stage', created_at = now() - interval '1 day'")
    stage.sql(
        f"INSERT INTO jobs (task, queue, status) SELECT 'other', 'q', 'completed' FROM generate_series(1, {MANY})"
    )
    if "queue=" in filters:  # a short queue is read as a whole
        stage.sql(f"""INSERT INTO messages (task_id, job_id, for_run, queue, check_interval)
            SELECT id::text, id, 1, 'stage', '1 h' FROM jobs WHERE id > {job.id}""")
    first, last = follow(reader, f"/jobs?{filters}")
    assert "No job matches so far." in first
    assert f"Looked through the jobs as far as {job.id + MANY - job_lists.LOOKED + 1}." in first
    assert f'href="/jobs/{job.id}"' in last
    assert "Looked through" not in last
    stage.sql(f"DELETE FROM messages WHERE job_id > {job.id}")


@pytest.mark.few(0)
@pytest.mark.usefixtures("hurried")
def test_what_an_index_finds_is_found_at_once(stage: Stage, reader: Browser) -> None:
    job = stage.job(tags=["vip"], aliases=["order-7"], unique="key")
    stage.sql(
        f"INSERT INTO jobs (task, queue, status) SELECT 'other', 'q', 'completed' FROM generate_series(1, {MANY})"
    )
    for filters in ("tag=vip", "alias=order-7", "unique=key", f"status=queued&queue={job.queue}"):
        (shown,) = follow(reader, f"/jobs?{filters}")
        assert f'href="/jobs/{job.id}"' in shown, filters
    assert "No job matches." in reader.text("/jobs?alias=none")
    assert "No job matches." in reader.text("/jobs?alias=order-7&status=failed")


@pytest.mark.usefixtures("hurried")
def test_a_search_through_many_entries_of_the_dead_set(stage: Stage, reader: Browser) -> None:
    stage.sql("INSERT INTO dead (task, queue, reason, payload, error) VALUES ('a', 'q', 'lost', '{}', 'E: rare')")
    stage.sql(f"""INSERT INTO dead (task, queue, reason, payload, error)
        SELECT 'a', 'q', 'failed', '{{}}', 'E: ' || n FROM generate_series(1, {MANY}) n""")
    for filters in ("reason=lost", "reason=lost&task=a", "reason=lost&group=E"):
        first, last = follow(reader, f"/dead?{filters}")
        assert "No entry matches so far." in first
        assert "E: rare" in last
    assert "among the newest 10,000 entries" in first
    assert f"E: {MANY}" in reader.text("/dead"), "the newest first"


def send_mail(*given: object) -> None:
    pass


def keep(stage: Stage, *arguments: object, **options: Any) -> str:
    """Call a durable task, and return its id."""
    task = stage.app.task(durable=True, name="stage.send", shared=False)(send_mail)
    return str(task.apply_async(arguments, **options).id)


@pytest.mark.few(0)
@pytest.mark.usefixtures("hurried")
def test_a_search_through_many_durable_tasks(stage: Stage, reader: Browser) -> None:
    rare = keep(stage, 4711, task_id="zz", countdown=60)
    stage.sql(f"""INSERT INTO messages (task_id, task, generation, queue, body, publication, check_interval)
        SELECT 'a' || n, 'other', 1, 'q', '', '{{}}', '1 h' FROM generate_series(1, {MANY}) n""")
    for filters in ("task=stage.send", "text=4711"):
        first, last = follow(reader, f"/tasks?{filters}")
        assert "that matches, so far." in first
        assert f'href="/tasks/{rare}"' in last
    pages = follow(reader, "/tasks?task=other")[:2]
    shown = [set(re.findall(r'href="/tasks/(a\d+)"', page)) for page in pages]
    assert [len(ids) for ids in shown] == [50, 50]
    assert not shown[0] & shown[1]


def test_text_that_is_redacted_finds_nothing(stage: Stage) -> None:
    hiding = Stage(stage.database_url, sidejob_redact=lambda value: "***" if "4711" in str(value) else value)
    job = stage.job()
    stage.sql("""UPDATE jobs SET args = '[4711, "Zoe"]', kwargs = '{"order":"A/7 \\u00e9"}'""")
    secret, plain = keep(stage, 4711, countdown=60), keep(stage, "plain 'x'", countdown=60)
    with browser_of(Site(hiding.sidejob, Users(ENTRIES), None)) as browser:
        browser.log_in("ron")
        for text, is_found in {"4711": False, "A/7": True, '"order":"A/7': True, "A/7 é": True, "a/7": False}.items():
            shown = browser.get("/jobs", params={"text": text}).text
            assert (f'href="/jobs/{job.id}"' in shown) == is_found, text
        assert secret not in browser.text("/tasks?text=4711")
        assert plain in browser.text("/tasks?text=plain")
    hiding.close()


def test_a_port_with_very_many_packets(stage: Stage, reader: Browser) -> None:
    job = stage.job(inports=["a"])
    job.input("a").write(0)
    stage.sql(f"INSERT INTO packets (port_id, value) SELECT id, '1' FROM ports, generate_series(1, {MANY})")
    assert "more than 10,000 packets" in reader.text(f"/jobs/{job.id}/ports/in/a")


def test_an_action_on_more_than_were_counted(stage: Stage, operator: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"COUNTED": 2, "COUNT_S": -1, "BATCH": 3}.items():
        monkeypatch.setattr(f"celery_sidejob.web.actions.{name}", value)
    jobs = [stage.job(tags=["old"]) for _ in range(7)]
    shown = operator.text("/jobs/bulk?verb=terminate&tag=old")
    assert "2 or more jobs" in shown
    said = []
    while form := re.search(r'<form method="post" action="/jobs/bulk".*?</form>', shown, re.DOTALL):
        fields = dict(re.findall(r'name="(\w+)" value="([^"]*)"', form[0]))
        late = stage.job(tags=["old"])
        shown = operator.post("/jobs/bulk", data=fields).text
        said += re.findall(r"([\d,]+ done[^<]*)", shown)
    assert said == ["3 done of 3 or more", "6 done of 6 or more", "7 done of 7 or more"]
    assert {job.refresh().status for job in jobs} == {"terminating"}
    assert late.refresh().status == "queued", "it was made since"
