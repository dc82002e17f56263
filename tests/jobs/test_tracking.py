"""Tracked jobs: they are listed, and who listens is told of their changes, and of no other job's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_sidejob import Job, RunningJob, job_status_changed
from celery_sidejob.announcements.announcer import Announcer
from celery_sidejob.store import jobs
from tests.tools.commands import ask
from tests.tools.in_process import Stage


def nothing(job: RunningJob) -> None:
    """A body that does nothing."""


def test_info_has_the_tags_and_whether_the_job_is_tracked(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        assert job.children["part"].info["tags"] == ["c"]
        made = job.enqueue(stage.idle, child_name="new", tags=["d"])
        assert (made.info["tags"], made.info["tracked"]) == (["d"], False)
        made.tag("e").track()
        job.track()
        assert (made.info["tags"], made.info["tracked"], job.info["tracked"]) == (["d", "e"], True, True)

    parent = stage.job(body, tags=["b", "a"])
    child = stage.sidejob.enqueue(stage.idle, parent=parent, child_name="part", tags=["c"])
    stage.run(parent)

    for job, tags, is_tracked in ((parent, ["b", "a"], True), (child, ["c"], False)):
        assert (job.refresh().info["tags"], job.info["tracked"]) == (tags, is_tracked)
    found = ask(stage.app, "jobs", "--json").document
    assert {job["id"]: job["tags"] for job in found}.items() >= {parent.id: ["b", "a"], child.id: ["c"]}.items()


class Followed:
    """What was announced on the channel of tracked jobs."""

    def __init__(self, stage: Stage, subscription: Iterator[object]) -> None:
        self.stage = stage
        self._subscription = subscription

    def next(self, count: int) -> list[dict[str, object]]:
        """The next so many messages."""
        return [next(self._subscription).message for _ in range(count)]  # type: ignore[attr-defined]

    def until(self, wanted: dict[str, object]) -> None:
        """Pass over messages up to this one; TimeoutError if it does not come."""
        while self.next(1) != [wanted]:
            pass


@pytest.fixture
def followed(stage: Stage) -> Iterator[Followed]:
    with stage.sidejob.subscribe("/sidejob/tracked", timeout=20) as subscription:
        yield Followed(stage, subscription)


def test_tracked_jobs_are_listed_in_the_order_in_which_they_were_tracked(stage: Stage) -> None:
    first, second, other = stage.job(), stage.job(), stage.job()
    second.track().track()
    first.track()

    assert stage.sidejob.tracked() == [second, first]
    assert stage.sidejob.tracked(limit=1) == [first]
    assert [job.tracked for job in (first, second, other)] == [True, True, False]
    second.untrack().untrack()
    assert stage.sidejob.tracked() == [first]


def test_a_job_that_is_deleted_is_tracked_no_more(stage: Stage) -> None:
    job = stage.job().track()
    job.terminate(without_shutdown=True)
    assert job.delete()

    assert stage.sidejob.tracked() == []
    assert stage.sql("SELECT count(*) FROM tracked") == [(0,)]


def test_a_run_tracks_with_its_commit(stage: Stage) -> None:
    seen: list[object] = []

    def body(job: RunningJob) -> None:
        job.track()
        seen.extend([job.tracked, stage.sidejob.tracked()])

    job = stage.inside(body)

    assert seen == [True, []]
    assert stage.sidejob.tracked() == [job]


def test_the_changes_of_tracked_jobs_are_announced_and_those_of_others_are_not(
    stage: Stage, followed: Followed
) -> None:
    def fail(job: RunningJob) -> None:
        raise ValueError("no")

    job, other = stage.job(nothing), stage.job(nothing)
    failing = stage.job(fail).track()
    job.track()
    stage.run(other)
    stage.run(job)
    with pytest.raises(ValueError, match="no"):
        stage.run(failing)

    (entry,) = stage.sidejob.dead
    messages: list[dict[str, object]] = []
    while not messages or "dead" not in messages[-1]:
        messages += followed.next(1)
    # That they were made may be told after they were tracked.
    assert [message for message in messages if message.get("status") != "queued"] == [
        {"job": failing.id, "tracked": True},
        {"job": job.id, "tracked": True},
        {"job": job.id, "status": "running", "change": 1, "run": 1},
        {"job": job.id, "status": "completed", "change": 3, "run": 1},
        {"job": failing.id, "status": "running", "change": 1, "run": 1},
        {"job": failing.id, "status": "failed", "change": 3, "run": 1},
        {"job": failing.id, "dead": entry.id, "reason": "failed"},
    ]


def test_each_change_of_a_status_has_a_greater_number_whatever_makes_it(stage: Stage) -> None:
    told: list[tuple[str, int]] = []

    def note(after: str, change: int, **_: object) -> None:
        told.append((after, change))

    job_status_changed.connect(note, weak=False)
    try:
        job = stage.job(nothing)
        stage.run(job)
        job.run(countdown=60)
        job.cancel_timer(job.timers[0])
        job.run()
        stage.run(job)
        job.terminate()
        stage.drain()
    finally:
        job_status_changed.disconnect(note)
    assert [after for after, _ in told] == [
        "queued", "running", "completed", "queued", "completed", "queued", "running", "completed", "terminating",
        "terminated",
    ]  # fmt: skip
    numbers = [change for _, change in told]
    assert numbers == sorted(set(numbers))


def test_a_loss_and_a_deletion_are_announced(stage: Stage, followed: Followed) -> None:
    lost, worker = stage.job(nothing).track(), stage.new_worker()
    assert stage.claim(lost, worker_id=worker)
    stage.declare_dead(worker)
    stage.sidejob.poll()
    followed.until({"job": lost.id, "lost": True, "run": 1})
    lost.terminate(without_shutdown=True)
    assert lost.delete()
    followed.until({"job": lost.id, "deleted": True})


def test_nobody_asks_who_is_tracked_while_nobody_listens(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(jobs, "tracked_ids", lambda executor: frozenset(asked.append(executor) or ()))
    job = stage.job(nothing).track()

    stage.run(job)
    announcer = stage.runtime.announcer
    assert isinstance(announcer, Announcer)
    announcer.flush(10)

    assert asked == []


def test_the_commands_track(stage: Stage) -> None:
    job = stage.job()

    assert ask(stage.app, "track", job.id).lines == [f"Job {job.id} is tracked."]
    assert [row["id"] for row in ask(stage.app, "tracked", "--json").document] == [job.id]
    assert any(str(job.id) in line for line in ask(stage.app, "tracked").lines)
    assert "tracked yes" in ask(stage.app, "show", job.id).lines
    assert ask(stage.app, "untrack", job.id, "--json").document == {"id": job.id, "tracked": False}
    assert ask(stage.app, "tracked").lines == ["No job is tracked."]


def test_a_handle_knows_whether_its_job_is_tracked(stage: Stage) -> None:
    job = stage.job()
    job.track()

    assert Job(job.id, runtime=stage.runtime).tracked
