"""Jobs that are made by command."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from celery_sidejob import RunningJob
from tests.tools.commands import Command
from tests.tools.in_process import Stage


@pytest.fixture(autouse=True)
def add(stage: Stage) -> None:
    @stage.task(name="stage.add")
    def body(job: RunningJob, a: int, b: int = 0) -> int:
        return a + b


def test_a_job_is_made(stage: Stage, command: Command) -> None:
    said = command("enqueue", "stage.add", "--args", "[1]", "--kwargs", '{"b": 2}')
    (job,) = stage.sidejob.jobs()
    assert said.lines == [f"Made job {job.id} (stage.add) in queue celery."]
    assert (job.task, job.args, job.kwargs) == ("stage.add", [1], {"b": 2})
    assert stage.run(job) == "completed"

    found = command("enqueue", "stage.add", "--args", "[1]", "--json").document
    assert found["made"]
    assert stage.sidejob.get(found["job"]).task_id == found["task_id"]


def test_a_job_is_made_with_options(stage: Stage, command: Command) -> None:
    parent, first = stage.job(aliases=["top"]), stage.job()
    command(
        "enqueue", "stage.idle", "--queue", "maths", "--priority", 7, "--tag", "a", "--tag", "b", "--alias", "it",
        "--unique", "k", "--parent", "top", "--child-name", "part", "--depends-on", first.id, "--created-by", "me",
        "--eta", "2036-05-01T12:00+00:00",
    )  # fmt: skip
    job = stage.sidejob.get("it")
    assert (job.queue, job.info["priority"], job.tags, job.created_by) == ("maths", 7, ["a", "b"], "me")
    assert (job.parent, parent.child("part"), job.dependencies, job.info["unique"]) == (parent, job, [first], "k")
    assert stage.sql("SELECT due_at FROM timers WHERE job_id = %s", job.id) == [(datetime(2036, 5, 1, 12, tzinfo=UTC),)]

    later = command("enqueue", "stage.idle", "--countdown", "2h", "--json").document["job"]
    ((soon,),) = stage.sql("SELECT due_at - now() BETWEEN '119 min' AND '2 h' FROM timers WHERE job_id = %s", later)
    assert soon


def test_no_job_is_made_beside_an_open_one(stage: Stage, command: Command) -> None:
    job = stage.job(unique="k")
    said = command("enqueue", "stage.idle", "--unique", "k")
    assert said.lines == [f"No job was made: job {job.id}, which is queued, has this unique key."]
    assert command("enqueue", "stage.idle", "--unique", "k", "--json").document == {
        "job": job.id, "made": False, "task_id": job.task_id,
    }  # fmt: skip
    assert stage.sidejob.jobs() == [job]


def test_a_misspelt_queue_is_told_of_and_used(stage: Stage, command: Command) -> None:
    stage.job(queue="letters")
    stage.sidejob.queue("letters").configure(limit=3)
    said = command("enqueue", "stage.idle", "--queue", "leters")
    assert said.lines == ["Made job 2 (stage.idle) in queue leters."]
    assert said.err.startswith("Nobody knows a queue 'leters': ")
    assert said.err.endswith(" Did you mean 'letters'?\n")
    assert command("enqueue", "stage.idle", "--queue", "letters").err == ""


def test_what_cannot_be_made_is_one_line(stage: Stage, command: Command) -> None:
    assert "Did you mean 'stage.idle'?" in command("enqueue", "stage.ilde", code=1).err
    assert "stage.add: missing a required argument: 'a'" in command("enqueue", "stage.add", code=1).err

    @stage.app.task(name="mail", durable=True, shared=False)
    def mail() -> None:
        pass

    assert "'mail' is a durable task: decorate it with @sidejob_task" in command("enqueue", "mail", code=1).err
    assert "There is no job 'nobody'" in command(
        "enqueue", "stage.idle", "--parent", "nobody", "--child-name", "a", code=1
    ).err  # fmt: skip
    assert "args[0]: nan is not a JSON value" in command("enqueue", "stage.add", "--args", "[NaN]", code=1).err
    assert stage.sidejob.jobs() == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--args", "5"), "'5' is not a JSON list, such as '[1, \"a\"]'."),
        (("--kwargs", "[]"), "'[]' is not a JSON object, such as '{\"page\": 7}'."),
        (("--args", "ann"), "A text has double quotes: \"ann\". In a shell, type '\"ann\"'."),
        (("--args", "[" * 100_000), "is no JSON value"),
        (("--eta", "soon"), "'soon' is no time such as 2026-11-28 or 2026-11-28T10:30."),
        (("--countdown", "2 days"), "'2 days' is no duration: write 90, 5min, 2h, 3d or 1w, at most 300 years."),
        (("--countdown", "nan"), "'nan' is no duration: "),
        (("--countdown", "-1"), "'-1' is no duration: "),
        (("--countdown", "3000000w"), "at most 300 years."),
        (("--priority", "10"), "10 is not in the range 0<=x<=9."),
        (("--eta", "2036-05-01", "--countdown", "5"), "choose one."),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_a_usage_error(
    stage: Stage, command: Command, words: tuple[str, ...], expected: str
) -> None:
    assert expected in command("enqueue", "stage.idle", *words, code=2).err
    assert stage.sidejob.jobs() == []
