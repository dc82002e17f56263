"""Trees of jobs that are deleted by command."""

from __future__ import annotations

import pytest

from celery_sidejob import Job
from tests.tools.commands import Command
from tests.tools.in_process import Stage


@pytest.fixture
def tree(stage: Stage) -> Job:
    """A job with two children, all terminated."""
    root = stage.job(aliases=["root"])
    for name in ("a", "b"):
        root.enqueue("stage.idle", child_name=name)
    root.terminate(recursive=True)
    stage.drain()
    assert root.terminated
    return root


def test_a_tree_is_deleted_after_a_question(stage: Stage, tree: Job, answer: Command) -> None:
    said = answer("n", "delete", "root")
    assert (said.code, said.out) == (1, "")
    assert said.err.startswith(f"Delete job {tree.id} (stage.idle) and 2 jobs below it for good? [y/N]: ")
    assert said.err.endswith("Error: Nothing was changed.\n")
    assert tree.exists

    said = answer("y", "delete", "root", "--json")
    assert said.document == {"job": tree.id, "deleted": True, "reason": None}
    assert stage.sidejob.jobs() == []


def test_nothing_is_deleted_where_nobody_can_be_asked(stage: Stage, tree: Job, command: Command) -> None:
    assert command("delete", "root", code=1).err == (
        f"Error: Nothing was changed. Delete job {tree.id} (stage.idle) and 2 jobs below it for good? There is no "
        "terminal to ask on: say --yes.\n"
    )
    assert len(stage.sidejob.jobs()) == 3
    assert command("delete", "root", "--yes").lines == [f"Deleted job {tree.id} (stage.idle) and 2 jobs below it."]
    assert stage.sidejob.jobs() == []


def test_why_nothing_is_deleted(stage: Stage, tree: Job, command: Command) -> None:
    child = tree.children["b"]
    child.run(force=True)
    said = command("delete", "root", "--yes", code=1)
    assert said.err == (
        f"Error: Job {tree.id} was not deleted: job {child.id} below it is queued, and a job is deleted with "
        "everything below it, when all of it is terminated. Ask for that: `celery -A <app> sidejob terminate "
        f"--recursive {tree.id}`.\n"
    )
    found = command("delete", child.id, "--yes", "--json", code=1).document
    assert (found["job"], found["deleted"]) == (child.id, False)
    assert f"Job {child.id} was not deleted: it is queued, and" in found["reason"]
    assert len(stage.sidejob.jobs()) == 3


def test_a_job_that_is_asked_to_run_while_the_question_waits(
    stage: Stage, tree: Job, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_sidejob.cli.asking.confirm", lambda *_, **__: tree.run(force=True))
    assert "it is queued" in command("delete", "root", code=1).err
    assert tree.exists
