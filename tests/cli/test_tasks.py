"""Durable tasks that wait or run are shown, and revoked, by command."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest
import redis

from celery_sidejob import CapacityPool
from celery_sidejob.hooks import control
from tests.services.sweep.test_task_sweep import Post, post
from tests.tools.commands import Said, ask
from tests.tools.proxy import TcpProxy

__all__ = ["post"]


def show(post: Post, task_id: str, *words: str, code: int = 0) -> Said:
    said = ask(post.app, "show", task_id, *words)
    assert said.code == code, said
    return said


def test_a_task_that_waits_is_shown(post: Post) -> None:
    post.send("one", expires=600, unique="letter:1")

    said = show(post, "one")

    assert said.lines[0] == "Task one post.letter queued"
    assert {"queue post", "arguments ('one',) {}", "unique key letter:1"} <= set(said.lines)
    assert any(line.startswith("due 20") for line in said.lines)
    assert any(line.startswith("expires 20") for line in said.lines)
    assert any(line.startswith("published 20") for line in said.lines)


def test_a_task_for_later_and_one_that_runs_as_json(post: Post) -> None:
    post.send("later", countdown=86400)
    post.send("runs")
    post.begin("runs", post.worker())

    later, runs = (show(post, task_id, "--json").document for task_id in ("later", "runs"))

    assert (later["status"], later["published_at"], later["running_since"]) == ("scheduled", None, None)
    assert datetime.fromisoformat(later["due_at"]).tzinfo is not None
    assert (runs["status"], runs["retries"], runs["losses"], runs["revoked"]) == ("running", 0, 0, False)
    assert runs["worker"].startswith("test:")
    assert any(line.startswith("in test:") for line in show(post, "runs").lines)


def test_what_is_hidden_is_not_shown(post: Post) -> None:
    post.app.conf.sidejob_redact = lambda text: text.replace("hunter2", "[hidden]")
    post.sidejob._runtime = None  # settings are frozen at their first use
    post.send("hunter2", unique="of hunter2")

    found = show(post, "hunter2", "--json").document
    assert "hunter2" not in found["args"]
    assert found["unique"] == "of [hidden]"


def test_a_job_is_shown_by_the_task_id_of_its_asking(post: Post) -> None:
    @post.sidejob.task(name="post.job")
    def body(job: object) -> None:
        pass

    job = body.enqueue()

    assert show(post, job.task_id).lines[0] == f"Job {job.id} post.job queued"


@pytest.mark.parametrize("verb", ["run", "terminate", "tree"])
def test_what_is_for_jobs_says_what_is_for_a_durable_task(post: Post, verb: str) -> None:
    @post.sidejob.task(name="post.job")
    def body(job: object) -> None:
        pass

    job = body.enqueue()
    post.send("waits")

    said = ask(post.app, verb, "waits")
    assert said.code == 1
    assert "'waits' is a durable task, and no job" in said.err
    assert "`revoke`" in said.err
    assert f"is the task id of an asking of job {job.id}" in ask(post.app, verb, job.task_id).err
    assert "There is no job 'nobody'" in ask(post.app, verb, "nobody").err


def test_what_is_nowhere_is_said_to_be_nowhere(post: Post) -> None:
    said = show(post, "nobody", code=1)

    assert "There is no job 'nobody': it was deleted, or never committed." in said.err
    assert "or is in the dead set" in said.err


def tasks(post: Post, *words: str) -> list[tuple[str, str, str | None]]:
    """The id, the status, and what it waits for, of each task in the list."""
    found = ask(post.app, "tasks", "--json", *words).document
    return [(each["task_id"], each["status"], each["waits_for"]) for each in found]


def test_tasks_are_listed_by_where_they_are(post: Post) -> None:
    assert tasks(post) == []
    for task_id, options in {
        "waits": {}, "first": {}, "runs": {}, "later": {"countdown": 86400}, "revoked": {}, "paused": {"queue": "mail"},
        "limited": {"queue": "web"},
    }.items():  # fmt: skip
        post.send(task_id, **options)
    post.sidejob.queue("mail").pause()
    post.sidejob.queue("web").configure(limit=1)
    post.sql("UPDATE messages SET published_at = NULL, gate = 1, next_check_at = 'infinity' WHERE task_id = 'limited'")
    post.sql("UPDATE messages SET due_at = now() - interval '1 h' WHERE task_id = 'first'")
    post.begin("runs", post.worker())
    ask(post.app, "revoke", "revoked")

    assert tasks(post)[:2] == [("runs", "running", None), ("first", "queued", None)]
    assert tasks(post)[-1] == ("later", "scheduled", None)
    assert sorted(tasks(post, "--status", "gated")) == [("limited", "gated", "limit"), ("paused", "gated", "pause")]
    assert tasks(post, "--queue", "mail", "--status", "queued") == []
    assert {status for _, status, _ in tasks(post, "--status", "running", "--status", "scheduled")} == {
        "running", "scheduled",
    }  # fmt: skip
    said = ask(post.app, "tasks", "--limit", "2")
    assert said.lines[0] == "Task id Status Task Queue Due Runs for"
    assert said.lines[1].startswith("runs running post.letter post 20")
    assert said.lines[1].endswith(" s")
    assert "There may be more" in said.err
    assert "waits for pause" in show(post, "paused").lines
    counted = ask(post.app, "revoke", "--status", "gated", "--yes", "--json").document
    assert (counted["matched"], counted["done"]) == (2, 2)
    assert tasks(post, "--status", "gated") == []


def test_a_task_without_a_slot_of_its_pool_is_gated_and_due_when_it_was_called(post: Post) -> None:
    pool = CapacityPool("letters", 1)
    for task_id in ("one", "two"):
        pool.apply_async(post.app.signature("post.letter", (task_id,)), task_id=task_id, queue="post", on_full="wait")

    assert sorted(tasks(post)) == [("one", "queued", None), ("two", "gated", "pool")]
    due_at = datetime.fromisoformat(show(post, "two", "--json").document["due_at"])
    assert abs((datetime.now(UTC) - due_at).total_seconds()) < 3600


def test_what_has_ended_is_not_listed_unless_the_app_wants_it(post: Post) -> None:
    said = ask(post.app, "tasks", "--finished")

    assert (said.code, said.lines) == (0, ["Task id Status Task Queue Ended Took"])
    assert "set sidejob_task_history to a number" in said.err
    assert ask(post.app, "tasks", "--finished", "--status", "running").code == 2
    for status, where in (("failed", "dead list --reason failed"), ("completed", "tasks --finished")):
        said = ask(post.app, "tasks", "--finished", "--status", status)
        assert (said.code, f"A task that is {status} waits and runs no more: see `{where}`." in said.err) == (2, True)


def test_tasks_are_revoked(post: Post) -> None:
    for task_id in ("waits", "runs", "stays"):
        post.send(task_id)
    post.begin("runs", post.worker())

    said = ask(post.app, "revoke", "waits", "runs")

    assert (said.code, said.lines) == (
        0,
        ["waits does not run.", "runs runs; it goes on, and does not begin again. To end it: --terminate."],
    )
    assert [post.row(task_id).doom for task_id in ("waits", "runs", "stays")] == ["revoked", "revoked", None]
    assert show(post, "waits").lines[0] == "Task waits post.letter revoked"
    assert "revoked yes: it does not begin again" in show(post, "runs").lines
    assert show(post, "runs").lines[0] == "Task runs post.letter running"


def test_the_workers_are_told_too(post: Post) -> None:
    post.send("one")
    with redis.Redis.from_url(post.app.conf.broker_url) as client, client.pubsub() as ear:
        ear.psubscribe("*celery.pidbox*")
        assert ear.get_message(timeout=5)

        assert ask(post.app, "revoke", "one").code == 0

        assert ear.get_message(timeout=5)


def test_an_unknown_one_is_an_error_and_hinders_no_other(post: Post) -> None:
    post.send("one")

    said = ask(post.app, "revoke", "nobody", "one", "--json")

    assert (said.code, said.document) == (1, {"waiting": ["one"], "running": [], "unknown": ["nobody"]})
    assert "No durable task that waits or runs" in said.err
    assert ask(post.app, "revoke").code == 2


def test_a_broker_that_is_silent_is_not_waited_for(post: Post, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Celery's own broadcast would try again without end."""
    monkeypatch.setattr(control, "ATTEMPT_S", 0.5)
    post.send("one")
    post.app.close()
    with TcpProxy.to(redis_url) as proxy:
        proxy.black_hole()
        post.app.conf.broker_url = post.app.conf.broker_write_url = proxy.url_for(redis_url)

        began = time.monotonic()
        said = ask(post.app, "revoke", "one")
        took_s = time.monotonic() - began

    assert (said.code, said.lines) == (0, ["one does not run."])
    assert "the workers could not be told" in said.err
    assert took_s < 10


def test_the_next_broker_is_told_when_the_first_is_away(
    post: Post, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    post.send("one")
    post.app.close()
    post.app.conf.broker_url = post.app.conf.broker_write_url = f"redis://127.0.0.1:1/0;{redis_url}"
    with redis.Redis.from_url(redis_url) as client, client.pubsub() as ear:
        ear.psubscribe("*celery.pidbox*")
        assert ear.get_message(timeout=5)

        said = ask(post.app, "revoke", "one")

        assert ear.get_message(timeout=5)
    assert (said.code, said.err) == (0, "")
    assert "One of the brokers could not be told" in caplog.text


def test_a_broker_that_is_away_does_not_keep_it_from_being_kept(post: Post) -> None:
    post.send("one")
    post.app.close()  # with its connections to the broker that was there
    post.app.conf.broker_url = post.app.conf.broker_write_url = "redis://127.0.0.1:1/0"

    said = ask(post.app, "revoke", "one")

    assert (said.code, said.lines) == (0, ["one does not run."])
    assert "the workers could not be told" in said.err
    assert post.row("one").doom == "revoked"
