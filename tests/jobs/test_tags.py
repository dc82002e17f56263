"""Tags of jobs: how they are given and taken, and how jobs are found by them."""

from __future__ import annotations

import random
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

from celery_sidejob import InvalidValueError, Job, JobNotFoundError, RunningJob
from celery_sidejob.store import jobs
from celery_sidejob.store.job_lists import FEW
from tests.tools.commands import ask
from tests.tools.in_process import Stage


def test_tags_have_the_order_in_which_they_were_given(stage: Stage) -> None:
    job = stage.job(tags=["late", "big", "late"])
    assert job.tags == ["late", "big"]

    assert job.tag("more", "big", "a").tags == ["late", "big", "more", "a"]
    assert job.untag("big", "none").tags == ["late", "more", "a"]
    assert job.tag("big").tags == ["late", "more", "a", "big"]
    assert job.tag().untag().tags == ["late", "more", "a", "big"]


def test_jobs_are_found_by_a_tag_in_pages(stage: Stage) -> None:
    made = [stage.job(tags=["odd" if number % 2 else "even", "all"], queue=f"q{number % 3}") for number in range(10)]
    odd = [job for number, job in enumerate(made) if number % 2]

    assert stage.sidejob.jobs(tag="odd") == odd
    assert stage.sidejob.jobs(tag="odd", limit=2, after=odd[1]) == odd[2:4]
    assert list(stage.sidejob.iter_jobs(tag="all", page=3)) == made
    assert stage.sidejob.jobs(tag="none") == []


@pytest.mark.parametrize(
    "filters",
    [{"status": "queued"}, {"queue": "q0"}, {"status": "queued", "queue": "q0"}, {"status": ["queued", "completed"]},
     {"task": "stage.idle"}, {"created_by": "me"}, {"unique": "key"}, {"older_than": 0}],
    ids=str,
)  # fmt: skip
def test_a_tag_goes_with_every_other_filter(stage: Stage, filters: dict[str, Any]) -> None:
    wanted = stage.job(tags=["a"], queue="q0", created_by="me", unique="key")
    stage.job(queue="q0", created_by="me")

    assert stage.sidejob.jobs(tag="a", **filters) == [wanted]
    assert stage.sidejob.jobs(tag="b", **filters) == []


def test_running_and_failed_jobs_and_children_are_found_by_a_tag(stage: Stage) -> None:
    parent = stage.job()
    child, other = (parent.enqueue(stage.idle, child_name=name, tags=tags) for name, tags in (("a", ["x"]), ("b", [])))
    assert stage.claim(child)
    assert stage.claim(other)

    assert stage.sidejob.jobs(tag="x", status="running") == [child]
    assert stage.sidejob.jobs(tag="x", parent=parent) == [child]
    stage.perform(stage.holds[child.id])
    failed = stage.job(lambda job: 1 / 0, tags=["x"])
    with pytest.raises(ZeroDivisionError):
        stage.run(failed)
    assert stage.sidejob.jobs(tag="x", status="failed") == [failed]


def test_a_run_sees_the_tags_that_its_commit_will_give(stage: Stage) -> None:
    seen: list[Any] = []

    def body(job: RunningJob) -> None:
        job.tag("mine")
        new = stage.sidejob.enqueue(stage.idle, tags=["x"]).tag("y").untag("x")
        seen.extend([job.tags, new.tags, stage.sidejob.jobs(tag="mine"), new])

    job = stage.inside(body, tags=["old"])

    assert seen[:3] == [["old", "mine"], ["y"], []]
    assert (job.tags, seen[3].tags) == (["old", "mine"], ["y"])
    assert stage.sidejob.jobs(tag="mine") == [job]


def test_what_a_run_that_raises_has_tagged_is_not_tagged(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        job.tag("mine")
        raise ValueError("no")

    job = stage.job(body)
    with pytest.raises(ValueError, match="no"):
        stage.run(job)

    assert job.tags == []


def test_a_job_of_a_transaction_has_its_tags_with_the_commit(stage: Stage) -> None:
    with stage.connect(autocommit=False) as connection:
        job = stage.job(tags=["a"], transaction=connection)
        assert stage.sidejob.jobs(tag="a") == []
        connection.commit()

    assert stage.sidejob.jobs(tag="a") == [job]
    assert stage.sidejob.tags() == [("a", 1)]


def test_the_most_common_tags_come_first(stage: Stage) -> None:
    for tags in (["a", "b"], ["b"], ["b", "c"], ["c"]):
        stage.job(tags=tags)
    wanted = [("b", 3), ("c", 2), ("a", 1)]

    assert stage.sidejob.tags() == wanted
    assert stage.sidejob.tags(limit=1) == wanted[:1]


def test_a_tag_is_counted_once_for_each_job_that_has_it_whatever_is_done(stage: Stage) -> None:
    """Given twice, taken twice, deleted: the counts are those of the rows."""
    chance = random.Random(7)
    names, jobs = "abcdefgh", [stage.job() for _ in range(8)]
    for _ in range(200):
        job, some = chance.choice(jobs), chance.choices(names, k=chance.randint(1, 3))
        match chance.randint(0, 9):
            case 0 | 1:
                job.terminate(without_shutdown=True)
                assert job.delete()
                jobs[jobs.index(job)] = stage.job(tags=some)
            case 2 | 3 | 4:
                job.untag(*some)
            case _:
                job.tag(*some)
        if chance.random() < 0.1:
            counts = Counter(tag for job in jobs for tag in job.tags)
            limit = chance.randint(1, 9)
            wanted = sorted(counts.items(), key=lambda each: (-each[1], each[0]))[:limit]
            assert stage.sidejob.tags(limit) == wanted

    for job in jobs:
        job.untag(*names)
    assert stage.sidejob.tags() == []


def test_the_tags_of_the_newest_jobs_are_counted(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    for tags in (["a"], ["a"], ["b"], ["b"], ["c"]):
        stage.job(tags=tags)
    monkeypatch.setattr(jobs, "MOST_COUNTED", 4)

    assert stage.sidejob.tags() == [("b", 2), ("a", 1), ("c", 1)]


def test_jobs_are_found_by_their_age(stage: Stage) -> None:
    old, new = stage.job(), stage.job()
    stage.sql("UPDATE jobs SET created_at = now() - interval '2 hours' WHERE id = %s", old.id)

    assert stage.sidejob.jobs(older_than=3600) == [old]
    assert stage.sidejob.jobs(older_than=timedelta(hours=3)) == []
    assert stage.sidejob.jobs(older_than=0) == [old, new]
    assert [row["id"] for row in ask(stage.app, "jobs", "--older-than", 3600, "--json").document] == [old.id]


@pytest.mark.parametrize("old", [FEW, FEW + 1])
def test_all_old_jobs_are_found_by_their_ids_however_many_they_are(stage: Stage, old: int) -> None:
    """Few are found by an index; it has them in another order, as those who make jobs do who take long to commit."""
    stage.sql(
        "INSERT INTO jobs (task, queue, status, created_at) SELECT 't', 'q', CASE n / 2 * 2 WHEN n THEN 'terminated'"
        " ELSE 'completed' END, now() - make_interval(hours => CASE WHEN n <= %s THEN 2 + n ELSE 0 END)"
        " FROM generate_series(1, %s) n",
        old, old + 10,
    )  # fmt: skip
    found = [job.id for job in stage.sidejob.iter_jobs(older_than=3600, page=400)]
    assert found == list(range(1, old + 1))
    assert [job.id for job in stage.sidejob.jobs(older_than=3600, status="terminated", after=5, limit=2)] == [6, 8]
    assert [job.id for job in stage.sidejob.jobs(older_than=3600, after=old - 2)] == [old - 1, old]
    assert stage.sidejob.jobs(older_than=3600, task="other") == []


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda stage: stage.job(tags="a"), "takes a list of tags"),
        (lambda stage: stage.job(tags=5), "takes a list of tags"),
        (lambda stage: stage.job(tags=[5]), "cannot be a tag: it is of type int"),
        (lambda stage: stage.job().tag(["a", "b"]), r"\['a', 'b'\] cannot be a tag: it is of type list"),
        (lambda stage: stage.job().untag(["a"]), "cannot be a tag: it is of type list"),
        (lambda stage: stage.job(tags=[""]), "it is empty"),
        (lambda stage: stage.job().tag("x" * 256), "256 characters"),
        (lambda stage: stage.job().untag("a\0"), "NUL"),
        (lambda stage: stage.sidejob.tags(limit=0), "limit is a number of tags"),
        (lambda stage: stage.sidejob.tracked(limit=0), "limit is a number of jobs"),
        (lambda stage: stage.sidejob.jobs(older_than=-1), "older_than is a timedelta"),
        (lambda stage: stage.sidejob.jobs(tag=5), "cannot be tag="),
    ],
)
def test_what_is_no_tag_is_refused(stage: Stage, call: Any, error: str) -> None:
    with pytest.raises(InvalidValueError, match=error):
        call(stage)


def test_a_job_that_is_gone_has_no_tags_and_gets_none(stage: Stage) -> None:
    gone = Job(10**9, runtime=stage.runtime)
    for call in (lambda: gone.tags, lambda: gone.tag("a"), lambda: gone.untag("a"), lambda: gone.tracked, gone.track):
        with pytest.raises(JobNotFoundError):
            call()


def test_the_commands_show_and_change_tags(stage: Stage) -> None:
    job = stage.job(tags=["a"])

    assert ask(stage.app, "tag", job.id, "b", "c").lines == [f"Job {job.id} has 3 tags: a, b, c."]
    assert ask(stage.app, "untag", job.id, "a", "--json").document == {"id": job.id, "tags": ["b", "c"]}
    assert ask(stage.app, "tags", "--json").document == [{"tag": "b", "jobs": 1}, {"tag": "c", "jobs": 1}]
    assert "1 b" in ask(stage.app, "tags").lines
    assert [row["id"] for row in ask(stage.app, "jobs", "--tag", "b", "--json").document] == [job.id]
    assert "tags b, c" in ask(stage.app, "show", job.id).lines
    job.untag("b", "c")
    assert ask(stage.app, "tags").lines == ["No job has a tag."]
    assert ask(stage.app, "untag", job.id, "x").lines == [f"Job {job.id} has 0 tags."]
