"""What the commands show of steps, and do with them."""

from __future__ import annotations

import pytest

from celery_sidejob import Job, RunningJob, Status
from tests.tools.commands import Command
from tests.tools.in_process import Stage


@pytest.fixture
def failed(stage: Stage) -> Job:
    """A job that has failed behind two steps, and before a third try of another."""

    def body(job: RunningJob, *_: object) -> None:
        job.step("charge", dict, paid=7)
        job.step("item", str, 1)
        job.step("item", str, 2)
        raise ValueError("no")

    job = stage.job(body)
    with pytest.raises(ValueError, match="no"):
        stage.run(job)
    return job


def test_show_lists_steps(failed: Job, command: Command) -> None:
    said = command("show", failed.id, "--steps")
    [charge] = [line for line in said.lines if line.strip().startswith("charge")]
    assert '{"paid": 7}' in charge
    assert any(line.strip().startswith("item#2") for line in said.lines)
    found = command("show", failed.id, "--steps", "--json").document
    assert [(step["name"], step["number"], step["value"]) for step in found["steps"]] == [
        ("charge", 1, {"paid": 7}), ("item", 1, "1"), ("item", 2, "2"),
    ]  # fmt: skip
    assert "steps" not in command("show", failed.id, "--json").document


def test_the_history_names_all_steps_of_a_job_that_has_completed(stage: Stage, command: Command) -> None:
    names = [f"a step with a rather long name {number}" for number in range(20)]
    job = stage.job(lambda job: [job.step(name, str) for name in [*names, names[0]]] and None)
    assert stage.run(job) == Status.COMPLETED
    job.log("steps", count=1, steps=["no", 1])
    text = " ".join(command("show", job.id, "--history").out.split())
    assert f"21: {', '.join(names)}, {names[0]}#2" in text
    assert '{"count": 1, "steps": ["no", 1]}' in text


def test_show_lists_waits(stage: Stage, command: Command) -> None:
    def body(job: RunningJob) -> None:
        job.step("charge", int, "x", retries=3, backoff=60)

    job = stage.job(body)
    assert stage.run(job) == Status.SUSPENDED
    [line] = [line for line in command("show", job.id, "--steps").lines if line.strip().startswith("charge")]
    assert "tried again at" in line


def test_steps_are_forgotten(failed: Job, command: Command) -> None:
    assert command("steps", "forget", failed.id, "item#2", "nothing").lines == [f"Job {failed.id} forgets item#2."]
    assert [str(step) for step in failed.steps] == ["charge", "item"]
    assert command("steps", "forget", failed.id, "nothing").lines == [f"Job {failed.id} has no such step."]
    assert command("steps", "forget", failed.id, "item#x", code=1).err.startswith("Error: 'item#x' names no step")


def test_a_job_is_forked(stage: Stage, failed: Job, command: Command) -> None:
    made = command("fork", failed.id, "--before", "item", "--queue", "elsewhere", "--json").document
    job = stage.sidejob.get(made["job"])
    assert (made["of"], job.queue, [str(step) for step in job.steps]) == (failed.id, "elsewhere", ["charge"])
    assert command("fork", failed.id, "--before", "ship", code=1).err.startswith(
        f"Error: Job {failed.id} has not finished a step 'ship'; it has finished: charge, item, item#2."
    )
