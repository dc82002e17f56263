"""The list of jobs: what it says of each, and which jobs it chooses."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from celery_sidejob import Job, RunningJob
from tests.tools.commands import Command
from tests.tools.in_process import Stage


def fail(job: RunningJob) -> None:
    raise ValueError("no\nmoney" + "!" * 100)


def failed(stage: Stage, **options: object) -> Job:
    job = stage.job(fail, **options)
    with pytest.raises(ValueError, match="no"):
        stage.run(job)
    return job


def ids(command: Command, *words: object) -> list[int]:
    return [job["id"] for job in command("jobs", "--json", *words).document]


def test_a_failed_job_is_listed_with_its_error(stage: Stage, command: Command) -> None:
    job = failed(stage)
    (line,) = command("jobs").lines[1:]
    assert line.startswith(f"{job.id} failed: ValueError: no\\nmoney!!")
    assert "!… stage.call" in line, "it is cut"
    (found,) = command("jobs", "--json").document
    assert found["error"]["message"] == "no\nmoney" + "!" * 100

    stage.sidejob.dead.retry_all()
    assert command("jobs").lines[1].startswith(f"{job.id} queued stage.call"), "the error is not that of the next run"


def test_how_long_the_last_run_took(stage: Stage, command: Command) -> None:
    job, never = stage.job(), stage.job()
    stage.run(job)
    stage.sql("UPDATE run_history SET ended_at = began_at + interval '90 s' WHERE job_id = %s", job.id)

    def took() -> dict[int, float | None]:
        return {each["id"]: each["lasted_s"] for each in command("jobs", "--json").document}

    assert took() == {job.id: 90.0, never.id: None}
    assert command("jobs", "--oldest-first").lines[1].endswith(" 90.0 s")
    job.run()
    hold = stage.claim(job)
    assert hold is not None
    assert took()[job.id] is None, "the run that goes on is the last one"
    stage.perform(hold)
    lasted = took()[job.id]
    assert lasted is not None
    assert lasted < 90
    stage.sql("UPDATE run_history SET how = 'lost'")
    assert took()[job.id] is None, "nobody knows when it stopped"
    stage.sql("DELETE FROM run_history")
    assert took()[job.id] is None


def test_a_shutdown_is_no_run(stage: Stage, command: Command) -> None:
    job = stage.job()
    stage.run(job)
    stage.sql("UPDATE run_history SET ended_at = began_at + interval '90 s'")
    job.terminate()
    stage.drain()
    (found,) = command("jobs", "--json").document
    assert (found["status"], found["lasted_s"]) == ("terminated", 90.0)


def test_jobs_of_a_time(stage: Stage, command: Command) -> None:
    old, young = stage.job(), stage.job()
    stage.sql("UPDATE jobs SET created_at = now() - interval '3 hours' WHERE id = %s", old.id)
    at = datetime.now() - timedelta(hours=2)

    for since in ("2h", "120min", "7200", "0.05d", at.isoformat(), at.astimezone().isoformat(), f"{at:%Y-%m-%d %H:%M}"):
        assert ids(command, "--since", since) == [young.id], since
    assert ids(command, "--since", "1d") == [young.id, old.id]
    assert ids(command, "--since", "1d", "--older-than", "2h") == [old.id]
    assert ids(command, "--since", "0") == []
    stage.sql("UPDATE jobs SET created_at = now() - interval '6 days' WHERE id = %s", old.id)
    assert ids(command, "--since", "5d") == [young.id]
    assert ids(command, "--since", "1w") == [young.id, old.id]
    for wrong in ("2 fortnights", "yesterday", "-2h", "2026-13-01", "nan", "1" * 20, "9999999999w"):
        assert "Invalid value for '--since'" in command("jobs", "--since", wrong, code=2).err
    said = "'yesterday' is no time such as 2026-11-28 or 2026-11-28T10:30, and no duration such as 2h."
    assert said in command("jobs", "--since", "yesterday", code=2).err


def test_many_young_jobs_are_found_as_few_are(stage: Stage) -> None:
    """Up to a thousand come from an index of their age, more from a walk along all."""
    old = stage.job()
    stage.sql("UPDATE jobs SET created_at = now() - interval '1 day'")
    young = [stage.job()]
    young += stage.sidejob.enqueue_many([{"task": "stage.idle"}] * 998)
    for _ in range(3):
        for newest_first in (False, True):
            found = list(stage.sidejob.iter_jobs(since=3600, newest_first=newest_first, page=700))
            assert found == (young[::-1] if newest_first else young)
        young.append(stage.job())
    assert stage.sidejob.jobs(since=timedelta(days=2), limit=1) == [old]
    assert stage.sidejob.jobs(since=old.refresh().created_at, limit=1) == [old]


def test_jobs_of_their_maker(stage: Stage, command: Command) -> None:
    parent = stage.inside(lambda job: job.enqueue("stage.idle", child_name="a") and None)
    stage.job(created_by="me")
    (child,) = parent.children.values()
    assert ids(command, "--created-by", f"job:{parent.id}") == [child.id]
    assert ids(command, "--created-by", "you") == []


@pytest.mark.parametrize(
    "filters",
    [
        {}, {"status": "failed"}, {"status": ["failed", "queued"]}, {"queue": "q"}, {"queue": "q", "status": "queued"},
        {"tag": "t"}, {"parent": "top"}, {"older_than": 0}, {"since": 3600}, {"status": "running"},
        {"task": "stage.call"}, {"waiting_for": "timer"}, {"batch": "b"}, {"batch": "b", "status": "running"},
    ],
    ids=str,
)  # fmt: skip
def test_each_list_has_both_orders_and_bounds(stage: Stage, filters: dict[str, object]) -> None:
    top = stage.job(aliases=["top"])
    for n in range(3):
        stage.job(queue="q", tags=["t"], parent=top, child_name=f"k{n}")
        stage.job(queue="q", countdown=60)
        failed(stage, tags=["t"])
        stage.claim(running := stage.job(parent=top, child_name=f"r{n}"))
        stage.sidejob.batch("b").add(running)
    oldest = stage.sidejob.jobs(**filters)

    assert len(oldest) >= 3
    assert oldest == sorted(oldest, key=lambda job: job.id)
    assert stage.sidejob.jobs(**filters, newest_first=True) == oldest[::-1]
    assert stage.sidejob.jobs(**filters, newest_first=True, limit=2) == oldest[:-3:-1]
    assert stage.sidejob.jobs(**filters, after=oldest[0], before=oldest[-1]) == oldest[1:-1]
    for newest_first in (False, True):
        walked = list(stage.sidejob.iter_jobs(**filters, newest_first=newest_first, page=1))
        assert walked == (oldest[::-1] if newest_first else oldest)
    assert stage.sidejob.count_jobs(**filters, before=oldest[-1]).keys() <= {"queued", "running", "failed"}
    assert sum(stage.sidejob.count_jobs(**filters, before=oldest[-1]).values()) == len(oldest) - 1
    assert sum(stage.sidejob.count_jobs("task", **filters).values()) == len(oldest)


def test_what_is_no_filter_is_refused(stage: Stage) -> None:
    for call in (stage.sidejob.jobs, stage.sidejob.iter_jobs, stage.sidejob.count_jobs):
        with pytest.raises(TypeError, match="quue"):
            list(call(quue="a"))  # type: ignore[operator]


# -- names that are misspelt -----------------------------------------------------------------------------------------

NO_TASK = (
    "Nobody knows a task {!r}: no job and no waiting task has it, no worker has registered it, and the app has none of "
    "that name.{}\n"
)
NO_QUEUE = "Nobody knows a queue {!r}: nothing is in it, no worker serves it, and the app has none of that name.{}\n"


def test_a_misspelt_task_or_queue_has_the_nearest_suggested(stage: Stage, command: Command) -> None:
    stage.sql("INSERT INTO registry (task, queue, options) VALUES ('shop.order', 'orders', '{}')")

    assert command("jobs", "--task", "shop.ordre").err == NO_TASK.format("shop.ordre", " Did you mean 'shop.order'?")
    assert command("jobs", "--task", "stage.ilde").err == NO_TASK.format("stage.ilde", " Did you mean 'stage.idle'?")
    assert command("jobs", "--queue", "order").err == NO_QUEUE.format("order", " Did you mean 'orders'?")
    assert command("jobs", "--queue", "nowhere", "--json").err == NO_QUEUE.format("nowhere", "")
    assert command("jobs", "--task", "shop.order", "--queue", "orders").err == "", "they exist, and have no job"
    assert command("drain", "--queue", "order", code=2).err == "Error: " + NO_QUEUE.format(
        "order", " Did you mean 'orders'?"
    )


def test_a_name_that_only_jobs_have_is_known(stage: Stage, command: Command) -> None:
    stage.job(queue="there")
    stage.sql("UPDATE jobs SET task = 'gone.task'")
    for words in (("--task", "gone.task"), ("--queue", "there")):
        assert command("jobs", "--status", "failed", *words).err == ""


@pytest.mark.parametrize("verb", ["pause", "resume", "unmanage"])
def test_a_misspelt_queue_of_a_gate(stage: Stage, command: Command, verb: str) -> None:
    """It is legal: a queue may be paused before anything is in it."""
    stage.job(queue="mails")
    stage.sidejob.queue("letters").configure(limit=3)
    assert command(verb, "letter").err == NO_QUEUE.format("letter", " Did you mean 'letters'?")
    assert stage.sidejob.queue("letter").paused == (verb == "pause")
    assert command(verb, "mails").err == ""
    assert command(verb, "letters").err == ""


def test_misspelt_names_in_the_dead_set(stage: Stage, command: Command) -> None:
    failed(stage, queue="mails")
    for verb in ("list", "retry"):
        assert command("dead", verb, "--task", "stage.cal").err == (
            "Nothing matches. Did you mean 'stage.call'? There are: 'stage.call'.\n"
        )
        assert command("dead", verb, "--queue", "mail").err.startswith("Nobody knows a queue 'mail': ")
        assert command("dead", verb, "--queue", "celery").err == ""
    assert command("dead", "list").err == ""
