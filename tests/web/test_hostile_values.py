"""What a user put into a job is text on every page, whatever it is."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest

from celery_sidejob import JobFailed, RunningJob
from tests.tools.browsers import Browser
from tests.tools.in_process import Stage

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>{{7*7}}\x1b[2J\u202e&amp;"


class Tags(HTMLParser):
    """The elements of a page, and the names of their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.scripts: list[dict[str, str | None]] = []
        self.images: list[str | None] = []
        self.handlers: set[str] = set()
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.handlers |= {name for name in given if name.startswith("on") or name == "style"}
        if tag == "script":
            self.scripts.append(given)
        if tag == "img":
            self.images.append(given.get("src"))
        self.links += [value for name, value in attrs if name in ("href", "src", "action") and value is not None]


def harmful(job: RunningJob) -> Any:
    job.step(f"step {EVIL}", lambda: EVIL)
    job.progress(1, 2, EVIL)
    job.output("out").write(EVIL)
    job.log(EVIL, data=EVIL)
    raise JobFailed(EVIL[:200], EVIL)


def test_injection_into_each_field(stage: Stage, reader: Browser) -> None:
    parent = stage.job(queue=f"q{EVIL}")
    job = stage.job(
        harmful, queue=f"q{EVIL}", tags=[EVIL], state={EVIL: EVIL}, created_by=EVIL, unique=EVIL, parent=parent,
        child_name=f"child{EVIL}",
    )  # fmt: skip
    job.input("orders").write(EVIL)
    with pytest.raises(JobFailed):
        stage.run(job)
    stage.sidejob.queue(f"q{EVIL}").pause(EVIL)
    stage.sidejob.schedule(f"schedule {EVIL}", stage.idle, every=60).pause(EVIL)
    (entry,) = stage.sidejob.dead.list()
    pages = ["/", "/jobs", f"/jobs/{job.id}", f"/jobs/{parent.id}", f"/jobs/{parent.id}/tree",
             f"/jobs/{job.id}/ports/in/orders", "/dead", f"/dead/{entry.id}", "/queues", "/schedules",
             "/workers"]  # fmt: skip
    seen = 0
    for path in pages:
        page = reader.text(path)
        tags = Tags(page)
        assert tags.handlers == set(), path
        assert tags.scripts == [{"src": "/static/page.js", "defer": None}], path
        assert tags.images == ["/static/icon.svg"], path
        assert all(link == "#main" or (link[0] == "/" and link[1:2] != "/") for link in tags.links), path
        assert "\x1b" not in page
        assert "\u202e" not in page
        assert ">49<" not in page
        seen += page.count("&lt;script&gt;")
    assert seen >= 20, "the texts are there"


def test_what_is_asked_for_is_text_too(reader: Browser) -> None:
    for path in ("/jobs", "/dead", "/tasks", "/find"):
        for name in ("task", "queue", "tag", "unique", "schedule", "created_by", "group", "status", "since", "which",
                     "older_than", "parent", "before", "reason"):  # fmt: skip
            page = reader.get(path, params={name: EVIL})
            assert page.status_code in (200, 400, 404), (path, name)
            tags = Tags(page.text)
            assert tags.handlers == set()
            assert len(tags.scripts) == 1
            assert "\x1b" not in page.text


def test_huge_and_strange_questions(reader: Browser) -> None:
    for path in (f"/jobs?task={'x' * 20_000}", "/jobs?task=%00", "/jobs?tag=%ed%a0%80", f"/jobs/{'9' * 5000}",
                 "/jobs?before=-1", "/jobs?older_than=1e999", "/jobs?since=99999-01-01", f"/find?which={'x' * 20_000}",
                 "/dead?after=%00", "/tasks/%00", "/dead/1:2:3", "/jobs?parent=%00"):  # fmt: skip
        assert reader.get(path).status_code in (200, 400, 404), path
