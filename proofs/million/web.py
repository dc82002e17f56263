"""What people look at in the web page, and programs by its HTTP API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from celery_sidejob.web.site import Site
from celery_sidejob.web.users import Users, make_token, revoke_token
from tests.tools.browsers import ENTRIES, browser_of
from tests.tools.in_process import Stage


@contextmanager
def web_pages_of(stage: Stage, rows: int) -> Iterator[dict[str, Callable[[], int]]]:
    """Yield what asks for each page, and for each list of the API, by its path; it returns the status of the answer."""
    newest = next(iter(stage.sidejob.dead.list(limit=1))).id
    parent, port = rows + 1, f"/jobs/{rows}/ports/in/a"
    pages = (
        "/", "/workers", "/queues", "/schedules", "/doctor",
        "/jobs", f"/jobs?before={rows}", f"/jobs?after={rows}",
        *(f"/jobs?status={status}" for status in ("queued", "running", "suspended", "completed", "failed",
                                                  "terminating", "terminated")),
        *(f"/jobs?status=queued&queue={queue}" for queue in ("waits", "rare", "nobodys")),
        *(f"/jobs?task={task}" for task in ("broken", "done", "nobodys")), "/jobs?status=failed&task=broken",
        *(f"/jobs?queue={queue}" for queue in ("parents", "rare", "nobodys")),
        *(f"/jobs?waiting_for={reason}" for reason in ("timer", "dependencies", "limit", "room")),
        "/jobs?tag=tag-7", "/jobs?tag=nobodys", "/jobs?unique=nobodys", f"/jobs?parent={parent}",
        "/jobs?created_by=nobody", "/jobs?schedule=nobodys", "/jobs?since=1h", "/jobs?since=1s", "/jobs?older_than=1s",
        "/jobs?older_than=365d",
        "/jobs/7", f"/jobs/{parent}", f"/jobs/{rows}", f"/jobs/{parent}/tree", "/jobs/7/tree", port,
        "/jobs/7/graph", f"/jobs/{parent}/graph", f"/jobs/{rows}/graph", "/batches",
        f"/jobs/{2 * rows + 1000}", f"/jobs/{3 * rows + 5}",
        "/tasks", "/tasks?task=mail", "/tasks?task=nobodys", "/tasks?queue=mail", "/tasks?queue=nobodys",
        *(f"/tasks?status={status}" for status in ("queued", "scheduled", "gated", "running")), "/tasks/task-7",
        "/dead", "/dead?group=Lost", "/dead?group=nobodys", "/dead?task=mail-7", "/dead?task=nobodys",
        "/dead?queue=mail", "/dead?queue=nobodys", "/dead?reason=lost", "/dead?reason=expired",
        "/dead?group=Lost&task=broken", f"/dead/{newest}",
        "/find?which=7", "/find?which=alias-7", "/find?which=task-7", "/find?which=buried-7",
        *(f"/jobs/bulk?verb=run{filters}" for filters in ("", "&status=failed", "&task=broken", "&queue=nobodys",
                                                          "&tag=tag-7", "&status=queued&queue=waits")),
        *(f"/dead/bulk?verb=retry{filters}" for filters in ("", "&group=Lost", "&queue=mail", "&reason=expired")),
    )  # fmt: skip
    operations = (
        "/jobs", "/jobs?task=nobodys", "/jobs?order=oldest&task=nobodys", "/jobs/7", f"/jobs/{parent}/tree", port,
        "/tasks", "/tasks?task=nobodys", "/dead", "/dead?reason=expired", "/dead/groups", "/queues", "/pools",
        "/schedules", "/workers", "/stats", "/findings",
    )  # fmt: skip
    token = make_token(stage.runtime, "million", ["read"])
    try:
        with browser_of(Site(stage.sidejob, Users(ENTRIES), None)) as browser:
            browser.log_in("ann")

            def ask(path: str, headers: dict[str, str]) -> int:
                return browser.get(path, headers=headers).status_code

            by_token = {"authorization": f"Bearer {token}"}
            yield {
                **{path: lambda path=path: ask(path, {}) for path in pages},
                **{f"/api/v1{path}": lambda path=path: ask(f"/api/v1{path}", by_token) for path in operations},
            }  # type: ignore[dict-item]
    finally:
        revoke_token(stage.runtime, "million")
