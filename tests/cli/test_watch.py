"""A job that is followed by command until it is finished."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event

import pytest

from celery_sidejob import Job, RunningJob
from celery_sidejob.cli import jobs
from tests.tools.commands import Said, ask
from tests.tools.in_process import Stage
from tests.tools.threads import in_thread
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes


@contextmanager
def watching(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, object]]]:
    """Each look at the job is kept; the test goes on after it."""
    seen: list[dict[str, object]] = []
    views = jobs.JobViews
    read = views.standing

    def standing(self: object, job: Job) -> dict[str, object]:
        seen.append(read(self, job))  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr("celery_sidejob.cli.command.LOOK_S", 0.01)
    monkeypatch.setattr(views, "standing", standing)
    yield seen


def test_a_job_is_followed_to_its_end(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Said] = []
    goes_on = Event()

    def work(job: RunningJob) -> None:
        job.progress(3, 4, "pages")
        assert goes_on.wait(30)

    job = stage.job(work)
    with watching(stage, monkeypatch) as seen, in_thread(lambda: said.append(ask(stage.app, "watch", job.id))):
        wait_until(lambda: seen, message="the first look")
        with in_thread(lambda: stage.run(job)):
            wait_until(  # a look reads the status before the progress, so one with a progress may be of a queued job
                lambda: seen[-1]["progress"] and seen[-1]["status"] == "running",
                message="the progress of the running job to be seen",
            )
            goes_on.set()

    (followed,) = said
    assert followed.code == 0
    told = [line.partition(" ")[2] for line in followed.lines]
    assert told[0].startswith("queued")
    assert "running 3 of 4: pages" in told
    assert told[-1] == "completed 3 of 4: pages"
    assert len(followed.lines) == len(set(followed.lines)), "each change once"


def test_what_a_job_waits_for_is_told(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Said] = []
    job = stage.job(countdown=60)
    with watching(stage, monkeypatch) as seen, in_thread(lambda: said.append(ask(stage.app, "watch", job.id))):
        wait_until(lambda: seen, message="the first look")
        stage.sql("DELETE FROM jobs WHERE id = %s", job.id)
    assert said[0].lines[0].partition(" ")[2] == "queued: waits for timer"


def fail(job: RunningJob) -> None:
    raise ValueError("no\nmoney")


@pytest.mark.parametrize("for_program", [False, True])
def test_the_code_tells_how_it_ended(stage: Stage, for_program: bool) -> None:
    done, failed, ended = stage.job(), stage.job(fail), stage.job()
    stage.run(done)
    with pytest.raises(ValueError, match="no"):
        stage.run(failed)
    ended.terminate()
    stage.drain()
    more = ["--json"] if for_program else []

    assert ask(stage.app, "watch", done.id, *more).code == 0
    said = ask(stage.app, "watch", failed.id, *more)
    assert (said.code, said.err) == (1, f"Error: Job {failed.id} is failed: ValueError: no money\n")
    assert ask(stage.app, "watch", ended.id, *more).err == f"Error: Job {ended.id} is terminated.\n"
    if for_program:
        assert said.document["status"] == "failed"
        assert said.document["error"]["message"] == "no\nmoney"
    assert ask(stage.app, "watch", 4711, *more).code == 1


def test_a_job_that_is_deleted_meanwhile(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Said] = []
    job = stage.job()
    with watching(stage, monkeypatch) as seen, in_thread(lambda: said.append(ask(stage.app, "watch", job.id))):
        wait_until(lambda: seen, message="the first look")
        stage.sql("DELETE FROM jobs WHERE id = %s", job.id)
    assert (said[0].code, said[0].err) == (
        1, f"Error: There is no job {job.id}: it was deleted, or never committed.\n",
    )  # fmt: skip


def test_ctrl_c_ends_it_quietly(processes: Processes, stage: Stage) -> None:
    job = stage.job()
    argv = [sys.executable, "-m", "celery", "-A", "tests.cli.shop", "sidejob", "watch", str(job.id)]
    watched = processes.start(argv, env={"DATABASE_URL": stage.database_url, "BROKER_URL": "memory://"})
    wait_until(lambda: "queued" in watched.log(), message="the job's status")
    os.kill(watched.pid, signal.SIGINT)

    assert watched.wait(30) == 130
    assert "Traceback" not in watched.log()
    assert "Abort" not in watched.log()
