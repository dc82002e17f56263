"""Commands that act on all jobs, tasks or entries that match."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from celery_sidejob import Job, RunningJob
from celery_sidejob.cli import asking, selection
from celery_sidejob.cli.selection import can_ask
from celery_sidejob.deadset import DeadSet
from celery_sidejob.model.errors import IllegalMoveError, StoreUnavailableError
from celery_sidejob.operations.ledger import burials
from tests.services.sweep.test_task_sweep import Post, post
from tests.tools.commands import Command, ask
from tests.tools.in_process import Stage
from tests.tools.workers import environment

__all__ = ["post"]


def fail(job: RunningJob) -> None:
    raise ValueError("no")


def suspend(job: RunningJob) -> None:
    job.suspend()


def failed(stage: Stage, **options: Any) -> Job:
    job = stage.job(fail, **options)
    with pytest.raises(ValueError, match="no"):
        stage.run(job)
    return job


def statuses(stage: Stage) -> list[str]:
    return [str(job.status) for job in stage.sidejob.jobs()]


# -- run and terminate -----------------------------------------------------------------------------------------------


def test_failed_jobs_are_run_again(stage: Stage, command: Command) -> None:
    for n in range(3):
        failed(stage, tags=["mine"] if n else [])

    assert command("run", "--status", "failed", "--tag", "mine", "--force", "--yes").lines == ["Asked to run: 2 jobs."]
    assert statuses(stage) == ["failed", "queued", "queued"]
    assert command("run", "--task", "stage.call", "--yes").lines == [
        "Asked to run: 2 jobs. Skipped: 1 (failed: --force asks it too)."
    ]
    assert command("run", "--since", "1h", "--countdown", "1h", "--force", "--yes", "--json").document == {
        "matched": 3, "done": 3, "skipped": {},
    }  # fmt: skip


def test_jobs_are_terminated(stage: Stage, command: Command) -> None:
    here, there = stage.job(queue="a"), stage.job(queue="b")
    child = here.enqueue("stage.idle", child_name="part", queue="b")

    assert command("terminate", "--child-of", here.id, "--yes").lines == ["Asked for the shutdown: 1 job."]
    assert (child.refresh().status, there.refresh().status) == ("terminating", "queued")
    stage.drain()
    assert command("terminate", "--queue", "b", "--yes").lines == [
        "Asked for the shutdown: 1 job. Skipped: 1 (terminated already)."
    ]
    assert statuses(stage) == ["completed", "terminating", "terminated"]


def test_several_jobs_are_named(stage: Stage, command: Command) -> None:
    jobs = [stage.job(aliases=[f"job{n}"]) for n in range(3)]
    assert "There is no job 'nobody'" in command("terminate", "job0", "nobody", code=1).err
    assert statuses(stage) == ["queued"] * 3, "nothing is changed unless all are there"

    assert command("terminate", "job0", jobs[1].id, "job1").lines == ["Asked for the shutdown: 2 jobs."]
    assert statuses(stage) == ["terminating", "terminating", "queued"]
    stage.drain()
    said = command("run", *(job.id for job in jobs), code=1)
    assert said.lines == ["Asked to run: 1 job. Skipped: 2 (terminated: --force asks it too)."]
    assert command("terminate", "job0", "--queue", "celery", code=2).err
    assert "--kill is for one job" in command("terminate", "job0", "job1", "--kill", code=2).err


def test_trees_are_terminated_without_their_shutdown(stage: Stage, command: Command) -> None:
    parents = [stage.job(tags=["gone"]) for _ in range(3)]
    children = [parent.enqueue("stage.idle", child_name="part") for parent in parents]
    hold = stage.claim(children[0])
    assert hold is not None

    assert command("terminate", "--tag", "gone", "--recursive", "--without-shutdown", "--yes").lines == [
        "Asked for the shutdown: 2 jobs. Skipped: 1 (a run is in progress, and the shutdown follows it)."
    ]
    assert [str(job.refresh().status) for job in (*parents, *children)] == [
        "terminated", "terminated", "terminated", "terminating", "terminated", "terminated",
    ]  # fmt: skip
    stage.perform(hold)


def test_parents_are_asked(stage: Stage, command: Command) -> None:
    parent = stage.job(suspend)
    stage.run(parent)
    for name in ("a", "b"):
        parent.enqueue("stage.idle", child_name=name)

    assert command("run", "--child-of", parent.id, "--parent", "--yes").lines == ["Asked to run: 2 jobs."]
    assert parent.refresh().status == "queued"
    assert command("run", "--task", "stage.call", "--parent", "--yes").lines == [
        "Asked to run: 0 jobs. Skipped: 1 (no parent)."
    ]


def test_jobs_that_wait_for_something_are_chosen(stage: Stage, command: Command) -> None:
    stage.job()
    later = stage.job(countdown=60)
    command("terminate", "--waiting-for", "timer", "--yes")
    assert [job for job in stage.sidejob.jobs() if job.status == "terminating"] == [later]


@pytest.mark.parametrize("verb", ["run", "terminate"])
def test_a_question_comes_first(stage: Stage, answer: Command, verb: str) -> None:
    for body in (None, None, suspend):
        stage.job(body, queue="q")
    stage.run(stage.sidejob.jobs()[-1])
    before = stage.everything()

    said = answer("n", verb, "--queue", "q")
    assert (said.code, said.out) == (1, "")
    assert said.err.startswith(f"{verb.capitalize()} 3 jobs (2 queued, 1 suspended)? [y/N]: ")
    assert said.err.endswith("Error: Nothing was changed.\n")
    assert stage.everything() == before
    assert answer("y", verb, "--queue", "q", "--json").document["done"] == 3
    assert answer("", verb, "--queue", "nobody").out == "No job matches.\n", "there is nothing to ask"


def test_nothing_is_changed_where_nobody_can_be_asked(stage: Stage, command: Command) -> None:
    stage.job()
    failed(stage)
    before = stage.everything()
    for words, question in (
        (("run", "--task", "stage.call", "--force"), "Run 1 job (1 failed)?"),
        (("terminate", "--since", "1d"), "Terminate 2 jobs (1 failed, 1 queued)?"),
        (("dead", "retry", "--all"), "Retry 1 entry of the dead set?"),
        (("dead", "retry", "--task", "stage.call"), "Retry 1 entry of the dead set?"),
    ):
        said = command(*words, code=1)
        assert said.err == f"Error: Nothing was changed. {question} There is no terminal to ask on: say --yes.\n"
        assert said.out == ""
    assert stage.everything() == before


@pytest.mark.parametrize("verb", ["run", "terminate"])
def test_one_job_or_filters(stage: Stage, command: Command, verb: str) -> None:
    job = stage.job()
    assert "Name a job, or choose jobs by filters" in command(verb, code=2).err
    assert "Name a job, or choose jobs by filters" in command(verb, "--yes", code=2).err
    assert "not both" in command(verb, job.id, "--status", "queued", code=2).err
    assert statuses(stage) == ["queued"]


def test_a_misspelt_name_matches_nothing(stage: Stage, command: Command) -> None:
    said = command("terminate", "--task", "stage.ilde", "--yes")
    assert said.lines == ["No job matches."]
    assert said.err.endswith("Did you mean 'stage.idle'?\n")
    said = command("terminate", "--queue", "clery", "--yes")
    assert said.err.startswith("Nobody knows a queue 'clery': ")


def test_jobs_are_read_in_pages(stage: Stage, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "PAGE", 2)
    pages: list[int] = []
    read = stage.sidejob.jobs
    monkeypatch.setattr(
        stage.sidejob, "jobs", lambda limit=100, **filters: pages.append(limit) or read(limit=limit, **filters)
    )
    for _ in range(5):
        stage.job()

    assert command("terminate", "--status", "queued", "--yes").lines == ["Asked for the shutdown: 5 jobs."]
    assert pages == [1, 2, 2, 2, 2], "the newest job, and pages until one is empty"
    assert statuses(stage) == ["terminating"] * 5


def test_a_job_that_is_made_after_the_count_is_left_alone(
    stage: Stage, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.job()
    monkeypatch.setattr(selection, "confirm_all", lambda *_, **__: stage.job())

    assert command("terminate", "--status", "queued").lines == ["Asked for the shutdown: 1 job."]
    assert statuses(stage) == ["terminating", "queued"]


@pytest.fixture
def trouble(monkeypatch: pytest.MonkeyPatch) -> Callable[[Job, BaseException], None]:
    """Has the run of a job be asked for in vain."""
    run, errors = Job.run, {}

    def raising(job: Job, **options: Any) -> Job | None:
        if job.id in errors:
            raise errors[job.id]
        return run(job, **options)

    monkeypatch.setattr(asking.Job, "run", raising)
    return lambda job, error: errors.update({job.id: error})


def test_the_trouble_of_one_job_is_not_that_of_others(
    stage: Stage, command: Command, trouble: Callable[[Job, BaseException], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "PAGE", 2)
    made = [stage.job() for _ in range(5)]
    trouble(made[0], IllegalMoveError("Job 1 cannot be asked: so."))
    trouble(made[3], IllegalMoveError("Job 4 cannot be asked: so."))

    said = command("run", "--status", "queued", "--yes")
    assert said.lines == ["Asked to run: 3 jobs. Skipped: 2 (IllegalMoveError)."]
    assert said.err == "IllegalMoveError, for example: Job 1 cannot be asked: so.\n"


def test_a_job_that_is_deleted_meanwhile(stage: Stage, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [stage.job() for _ in range(3)]
    run = Job.run

    def deleting(job: Job, **options: Any) -> Job | None:
        stage.sql("DELETE FROM jobs WHERE id = %s", made[1].id)
        return run(job, **options)

    monkeypatch.setattr(asking.Job, "run", deleting)
    assert command("run", "--status", "queued", "--yes", "--json").document == {
        "matched": 3, "done": 2, "skipped": {"deleted meanwhile": 1},
    }  # fmt: skip


def test_a_store_that_goes_away_ends_it_and_what_was_done_is_told(
    stage: Stage, command: Command, trouble: Callable[[Job, BaseException], None]
) -> None:
    made = [stage.job() for _ in range(3)]
    trouble(made[1], StoreUnavailableError("The store does not answer."))

    said = command("run", "--status", "queued", "--yes", code=1)
    assert said.lines == ["Asked to run: 1 job."]
    assert said.err == "Error: The rest was not looked at. The store does not answer.\n"


def test_a_job_that_has_another_status_when_its_turn_comes_is_skipped(
    stage: Stage, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody retries failed jobs while others are terminated: both were read in one page."""
    first, retried, deleted = (failed(stage) for _ in range(3))
    terminate = Job.terminate

    def meanwhile(job: Job, **options: Any) -> Job:
        if job == first:
            retried.run(force=True)
            terminate(deleted)
            while stage.run(deleted) != "terminated":
                pass
            assert deleted.delete()
        return terminate(job, **options)

    monkeypatch.setattr(Job, "terminate", meanwhile)
    assert command("terminate", "--status", "failed", "--yes").lines == [
        "Asked for the shutdown: 1 job. Skipped: 1 (queued meanwhile), 1 (deleted meanwhile)."
    ]
    assert statuses(stage) == ["terminating", "queued"]


def test_ctrl_c_ends_it_and_what_was_done_is_told(
    stage: Stage, command: Command, trouble: Callable[[Job, BaseException], None]
) -> None:
    made = [stage.job() for _ in range(3)]
    trouble(made[2], KeyboardInterrupt())

    assert command("run", "--status", "queued", "--yes", code=130).lines == ["Asked to run: 2 jobs."]


@pytest.mark.parametrize(
    ("trouble", "code", "told"),
    [
        (StoreUnavailableError("It is away."), 1, "Error: The rest was not looked at. It is away.\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_retrying_the_dead_set_ends_with_how_far_it_came(
    stage: Stage, command: Command, monkeypatch: pytest.MonkeyPatch, trouble: BaseException, code: int, told: str
) -> None:
    jobs = [failed(stage) for _ in range(3)]
    force = DeadSet._force

    def fail_at_the_last(dead: DeadSet, job_id: int) -> Job:
        if job_id == jobs[2].id:
            raise trouble
        return force(dead, job_id)

    monkeypatch.setattr(DeadSet, "_force", fail_at_the_last)
    said = command("dead", "retry", "--all", "--yes", code=code)
    assert (said.lines, said.err) == (["2 entries retried."], told)
    assert statuses(stage) == ["queued", "queued", "failed"]


@pytest.mark.parametrize(("trouble", "code"), [(StoreUnavailableError("It is away."), 1), (KeyboardInterrupt(), 130)])
def test_revoking_ends_with_how_far_it_came(
    post: Post, monkeypatch: pytest.MonkeyPatch, trouble: BaseException, code: int
) -> None:
    for task_id in ("a", "b", "c"):
        post.send(task_id)
    revoke = burials.revoke_in_all

    def fail_at_the_last(runtime: Any, task_ids: Sequence[str]) -> Any:
        if list(task_ids) == ["c"]:
            raise trouble
        return revoke(runtime, task_ids)

    monkeypatch.setattr(burials, "revoke_in_all", fail_at_the_last)
    monkeypatch.setattr("celery_sidejob.cli.tasks.PAGE", 1)
    said = ask(post.app, "revoke", "--queue", "post", "--yes")
    assert (said.code, said.lines) == (code, ["Revoked: 2 tasks."])
    assert post.sql("SELECT task_id FROM messages WHERE doom IS NULL") == [("c",)]


def test_a_closed_standard_input_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert not can_ask()


def test_a_question_on_a_real_terminal(stage: Stage) -> None:
    stage.job()
    argv = [sys.executable, "-m", "celery", "-A", "tests.cli.shop", "sidejob", "terminate", "--status", "queued"]
    keyboard, terminal = os.openpty()
    try:
        os.write(keyboard, b"y\n")
        done = subprocess.run(
            argv, stdin=terminal, capture_output=True, text=True, timeout=60, check=False,
            env=environment({"DATABASE_URL": stage.database_url, "BROKER_URL": "memory://"}),
        )  # fmt: skip
    finally:
        os.close(keyboard)
        os.close(terminal)

    assert (done.returncode, done.stdout) == (0, "Asked for the shutdown: 1 job.\n"), done
    assert "Terminate 1 job (1 queued)? [y/N]: " in done.stderr
    assert statuses(stage) == ["terminating"]


# -- the dead set ----------------------------------------------------------------------------------------------------


def test_entries_are_retried_after_a_question(stage: Stage, answer: Command) -> None:
    for _ in range(3):
        failed(stage)
    assert "Retry 2 entries of the dead set? [y/N]: " in answer("n", "dead", "retry", "--all", "--limit", 2).err
    assert len(stage.sidejob.dead) == 3
    assert answer("y", "dead", "retry", "--all", "--limit", 2).lines == ["2 entries retried."]
    assert len(stage.sidejob.dead) == 1
    assert stage.sidejob.dead.count(task="stage.call") == 1
    assert stage.sidejob.dead.count(group="ValueError", queue="nowhere") == 0


def test_an_entry_that_cannot_leave_keeps_no_other_from_it(
    stage: Stage, command: Command, trouble: Callable[[Job, BaseException], None]
) -> None:
    stuck, _ = failed(stage), failed(stage)
    trouble(stuck, IllegalMoveError("Job 1 is being deleted."))
    stage.sql("""
        INSERT INTO dead (task_id, task, queue, reason, error, payload, body)
        SELECT 't' || n % 2, 'mail', 'q', 'lost', 'WorkerLostError: gone', json_build_object(
          'publication', '{"v": 2, "about": "{}"}', 'generation', 1), 'x' FROM generate_series(1, 3) n""")
    told: list[tuple[int | str, str]] = []

    said = command("dead", "retry", "--all", "--yes")
    assert said.lines == ["3 entries retried. Skipped: 2 (IllegalMoveError)."]
    assert "cannot be retried: a task t1 waits or runs already" in said.err, "one error of each kind"
    left = [entry.id for entry in stage.sidejob.dead]
    assert stage.sidejob.dead.retry_all(skipped=lambda entry_id, error: told.append((entry_id, str(error)))) == 0
    assert sorted(entry_id for entry_id, _ in told) == left
    assert any("a task t1 waits or runs already" in error for _, error in told)


# -- durable tasks ---------------------------------------------------------------------------------------------------


def test_tasks_are_revoked_by_name_queue_and_status(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery_sidejob.cli.tasks.PAGE", 2)
    for n in range(5):
        post.send(f"waits-{n}")
    post.send("later", countdown=86400)
    post.send("runs")
    post.begin("runs", post.worker())

    refused = ask(post.app, "revoke", "--queue", "post")
    assert refused.code == 1
    assert "Revoke 7 tasks (5 queued, 1 running, 1 scheduled)? There is no terminal" in refused.err
    assert ask(post.app, "revoke", "--task", "post.letter", "--status", "queued", "--yes").lines == [
        "Revoked: 5 tasks."
    ]
    assert [post.row(f"waits-{n}").doom for n in range(5)] == ["revoked"] * 5
    assert [post.row(task_id).doom for task_id in ("later", "runs")] == [None, None]
    assert ask(post.app, "revoke", "--queue", "post", "--yes", "--json").document == {
        "matched": 2, "done": 2, "running": 1, "skipped": {},
    }  # fmt: skip
    assert ask(post.app, "revoke", "--queue", "post", "--yes").lines == ["No task matches."]
    misspelt = ask(post.app, "revoke", "--task", "post.leter", "--yes")
    assert misspelt.err.startswith("Nobody knows a task 'post.leter': ")
    for words in ((), ("--yes",), ("waits-1", "--queue", "post")):
        assert "Name tasks by their ids, or choose them" in ask(post.app, "revoke", *words).err


def test_a_broker_that_is_away_is_asked_once(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery_sidejob.cli.tasks.PAGE", 1)
    for n in range(3):
        post.send(f"waits-{n}")
    post.app.close()
    post.app.conf.broker_url = post.app.conf.broker_write_url = "redis://127.0.0.1:1/0"

    said = ask(post.app, "revoke", "--queue", "post", "--yes")
    assert (said.code, said.lines) == (0, ["Revoked: 3 tasks."])
    assert said.err.count("the workers could not be told") == 1
