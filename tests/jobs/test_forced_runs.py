"""`run(force=True)`: in every status exactly one run begins after it, and nothing that was asked before is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from celery_sidejob import Job, RunningJob
from celery_sidejob.model.status import ASKABLE
from celery_sidejob.operations.runs import recovery
from tests.tools.in_process import Stage


@dataclass
class Scene:
    """A job that notes what it does, and how its next body is to end."""

    stage: Stage
    does: Callable[[RunningJob], Any] = lambda job: None
    happened: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        stage = self.stage

        def body(job: RunningJob) -> None:
            self.happened.append("run")
            self.does(job)

        task = stage.task(body, name="stage.forced", shared=False, inports=["a"], max_losses=1)
        task.on_startup(lambda job: self.happened.append("startup"))
        task.on_shutdown(lambda job: self.happened.append("shutdown"))
        self.job: Job = task.enqueue()

    @property
    def status(self) -> str:
        return str(self.job.refresh().status)

    def drain(self) -> list[str]:
        """Run what is due, and return what that did."""
        self.happened.clear()
        self.stage.drain()
        return list(self.happened)


@pytest.fixture
def scene(stage: Stage) -> Scene:
    return Scene(stage)


def body_that(does: Callable[[RunningJob], Any]) -> Callable[[Scene], None]:
    def bring(scene: Scene) -> None:
        scene.does = does
        scene.drain()
        scene.does = lambda job: None

    return bring


def fail(job: RunningJob) -> None:
    raise ZeroDivisionError


def retry(job: RunningJob) -> None:
    raise job.retry(countdown=3600)


def suspend(job: RunningJob) -> None:
    job.suspend()


def complete(scene: Scene) -> None:
    scene.drain()


def wait_for_a_timer(scene: Scene) -> None:
    scene.drain()
    scene.job.run(countdown=3600)


def lose(scene: Scene) -> None:
    hold = scene.stage.claim(scene.job)
    assert hold is not None
    recovery.rescue(scene.stage.runtime, scene.job.id, run_no=hold.run_no, worker_id=hold.worker_id, own=True)


def terminate(scene: Scene) -> None:
    scene.drain()
    scene.job.terminate()


def end(scene: Scene) -> None:
    terminate(scene)
    scene.drain()


@dataclass(frozen=True)
class Case:
    """A way into a status, and what a forced run does from there."""

    bring: Callable[[Scene], None]
    status: str
    then: tuple[str, ...]
    startup: bool = False


AT_REST = {
    "a new job": Case(lambda scene: None, "queued", ("startup", "run")),
    "a retry that waits": Case(body_that(retry), "queued", ("startup", "run")),
    "a timer that waits": Case(wait_for_a_timer, "queued", ("run",)),
    "suspended": Case(body_that(suspend), "suspended", ("run",)),
    "completed": Case(complete, "completed", ("run",)),
    "failed": Case(body_that(fail), "failed", ("startup", "run")),
    "lost too often": Case(lose, "failed", ("startup", "run")),
    "terminating": Case(terminate, "terminating", ("shutdown", "run")),
    "terminated": Case(end, "terminated", ("run",)),
}
"""Jobs without a run in progress."""


@pytest.mark.parametrize("name", AT_REST)
def test_one_run_begins_whatever_the_status(scene: Scene, name: str) -> None:
    case = AT_REST[name]
    case.bring(scene)
    assert scene.status == case.status

    assert scene.job.run(force=True) == scene.job

    assert scene.status == ("terminating" if case.status == "terminating" else "queued")
    assert tuple(scene.drain()) == case.then
    assert scene.status == "completed"
    assert len(scene.stage.sidejob.dead) == 0
    assert scene.drain() == []


@pytest.mark.parametrize("name", AT_REST)
def test_asking_twice_is_asking_once(scene: Scene, name: str) -> None:
    case = AT_REST[name]
    case.bring(scene)
    scene.job.run(force=True)
    scene.job.run(force=True)
    assert tuple(scene.drain()) == case.then


@pytest.mark.parametrize("name", AT_REST)
def test_for_later_it_waits_and_then_begins(scene: Scene, name: str) -> None:
    case = AT_REST[name]
    case.bring(scene)
    scene.job.run(force=True, countdown=60)
    assert [timer.ask for timer in scene.job.timers if timer.ask == "force"] == ["force"]
    before = scene.drain()
    assert before == [kind for kind in case.then if kind == "shutdown" or name == "a new job"]

    scene.stage.sql("UPDATE timers SET due_at = now() WHERE ask = 'force'")

    assert scene.drain()[-1] == "run"
    assert scene.status in ("completed", "queued")  # queued for the timer that was there before
    assert len(scene.stage.sidejob.dead) == 0


@pytest.mark.parametrize("name", AT_REST)
def test_in_a_transaction_it_counts_from_the_commit_and_a_rollback_leaves_nothing(scene: Scene, name: str) -> None:
    case = AT_REST[name]
    case.bring(scene)
    before = scene.stage.everything()
    with scene.stage.connect(autocommit=False) as connection:
        assert scene.job.run(force=True, transaction=connection) == scene.job
        connection.rollback()
    assert scene.stage.everything() == before

    with scene.stage.connect(autocommit=False) as connection:
        scene.job.run(force=True, transaction=connection)

    assert tuple(scene.drain()) == case.then
    assert scene.status == "completed"


@pytest.mark.parametrize("name", AT_REST)
def test_another_run_asks_with_its_commit_or_not_at_all(scene: Scene, name: str) -> None:
    case = AT_REST[name]
    case.bring(scene)

    def asks_and_fails(job: RunningJob) -> None:
        assert scene.job.run(force=True) == scene.job
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        scene.stage.inside(asks_and_fails)
    assert scene.status == case.status

    scene.stage.inside(lambda job: scene.job.run(force=True))
    assert tuple(scene.drain()) == case.then
    assert scene.status == "completed"


@pytest.mark.parametrize("name", [name for name, case in AT_REST.items() if case.status not in ASKABLE])
def test_without_force_these_are_left_alone(scene: Scene, name: str) -> None:
    case = AT_REST[name]
    case.bring(scene)
    before = scene.stage.everything()
    assert scene.job.run() is None
    assert scene.job.run(countdown=60) is None
    assert scene.stage.everything() == before


@pytest.mark.parametrize("name", ["failed", "lost too often", "terminated"])
def test_it_opens_an_asking_of_its_own_and_gives_all_losses_again(scene: Scene, name: str) -> None:
    AT_REST[name].bring(scene)
    before = scene.job.refresh().task_id
    scene.job.run(force=True)
    assert scene.job.refresh().task_id != before
    assert (scene.job.info["losses"], scene.job.info["retries"]) == (0, 0)
    scene.drain()
    assert scene.job.refresh().info["error"] is None


def test_a_retry_that_is_cut_short_keeps_its_asking(scene: Scene) -> None:
    body_that(retry)(scene)
    before = scene.job.refresh().task_id
    scene.job.run(force=True)
    assert scene.drain()[-1] == "run"
    assert scene.job.refresh().task_id == before


# -- during a run ----------------------------------------------------------------------------------------------------


def endings() -> dict[str, tuple[Callable[[RunningJob], Any], str]]:
    return {"completes": (lambda job: None, "completed"), "suspends": (suspend, "suspended"), "fails": (fail, "failed")}


@pytest.mark.parametrize("ending", endings())
@pytest.mark.parametrize("asked", [False, True])
def test_asked_for_during_a_run_it_begins_after_that(scene: Scene, ending: str, asked: bool) -> None:
    """Whatever becomes of the run, and also if a plain run was asked for before."""
    hold = scene.stage.claim(scene.job)
    assert hold is not None
    if asked:
        scene.job.run()
    assert scene.job.run(force=True) == scene.job
    assert scene.status == "queued"
    scene.does = endings()[ending][0]
    scene.stage.perform(hold)
    scene.does = lambda job: None
    assert scene.drain()[-1:] == ["run"]
    assert (scene.status, len(scene.stage.sidejob.dead)) == ("completed", 0)


def test_asked_for_during_a_run_that_is_lost_once_too_often_it_is_kept_in_the_dead_set(scene: Scene) -> None:
    """The job rests as failed, and the entry says that a run was owed: whoever retries it gets that."""
    hold = scene.stage.claim(scene.job)
    assert hold is not None
    scene.job.run(force=True)
    recovery.rescue(scene.stage.runtime, scene.job.id, run_no=hold.run_no, worker_id=hold.worker_id, own=True)
    assert (scene.status, len(scene.stage.sidejob.dead)) == ("failed", 1)
    (entry,) = scene.stage.sidejob.dead
    scene.stage.sidejob.dead.retry(entry.id)
    assert scene.drain()[-1] == "run"


def test_asked_for_after_a_termination_during_a_run_it_begins_after_the_shutdown(scene: Scene) -> None:
    hold = scene.stage.claim(scene.job)
    assert hold is not None
    scene.job.terminate()
    assert scene.job.run(force=True) == scene.job
    assert scene.status == "terminating"
    scene.stage.perform(hold)
    assert scene.drain() == ["shutdown", "run"]
    assert scene.status == "completed"


def test_asked_for_during_the_shutdown_it_begins_after_it(scene: Scene) -> None:
    terminate(scene)
    hold = scene.stage.claim(scene.job)
    assert hold is not None
    scene.job.run(force=True)
    scene.stage.perform(hold)
    assert scene.status == "queued"
    assert scene.drain() == ["run"]


def test_a_termination_that_comes_after_it_wins(scene: Scene) -> None:
    end(scene)
    scene.job.run(force=True)
    scene.job.terminate()
    assert scene.drain() == ["shutdown"]
    assert scene.status == "terminated"


def test_a_run_forces_itself(scene: Scene) -> None:
    scene.does = lambda job: job.run(force=True) if job.run_no == 1 else None
    assert scene.drain() == ["startup", "run", "run"]
    assert scene.status == "completed"


def test_a_run_that_terminates_itself_and_forces_a_run_is_shut_down_and_begins_again(scene: Scene) -> None:
    def body(job: RunningJob) -> None:
        if job.run_no == 1:
            job.terminate()
            job.run(force=True)

    scene.does = body
    assert scene.drain() == ["startup", "run", "shutdown", "run"]
    assert scene.status == "completed"


def test_a_run_that_forces_one_and_terminates_itself_ends(scene: Scene) -> None:
    def body(job: RunningJob) -> None:
        job.run(force=True)
        job.terminate()

    scene.does = body
    assert scene.drain() == ["startup", "run", "shutdown"]
    assert scene.status == "terminated"


# -- of the parent ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", AT_REST)
def test_a_child_forces_its_parent(scene: Scene, name: str) -> None:
    """SJ-086: the child's own status stays."""
    case = AT_REST[name]
    child = scene.stage.job(lambda job: job.suspend())
    scene.job.adopt(child, "child")
    scene.stage.run(child)
    case.bring(scene)

    assert child.run(parent=True, force=True) == scene.job

    assert child.refresh().status == "suspended"
    assert scene.drain()[-1] == "run"
    assert scene.status == "completed"


def test_without_a_parent_there_is_none_to_force(scene: Scene) -> None:
    before = scene.stage.everything()
    assert scene.job.run(parent=True, force=True) is None
    assert scene.stage.everything() == before


def test_a_forced_run_of_a_failed_parent_does_not_come_from_a_childs_end(scene: Scene) -> None:
    """SJ-153: that asks without force."""
    body_that(fail)(scene)
    child = scene.stage.job()
    scene.stage.sql("UPDATE jobs SET parent_id = %s, name = 'child' WHERE id = %s", scene.job.id, child.id)
    assert scene.drain() == []
    assert scene.status == "failed"
