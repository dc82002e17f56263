"""Parents, children, aliases."""

from __future__ import annotations

import pytest

from celery_sidejob import (
    AliasTakenError,
    ChildNameTakenError,
    CycleError,
    HasParentError,
    IllegalMoveError,
    InvalidAliasError,
    InvalidValueError,
    JobNotFoundError,
    NotAChildError,
    RunningJob,
)
from tests.tools.between import between_look_and_lock
from tests.tools.in_process import Stage


def test_children_have_names_unique_below_their_parent(stage: Stage) -> None:
    parent = stage.job()
    second = parent.enqueue(stage.idle, child_name="b")
    first = stage.sidejob.enqueue(stage.idle, parent=parent.id, child_name="a")

    assert list(parent.children.items()) == [("b", second), ("a", first)]
    assert (parent.child("a"), parent.child("c"), first.parent, first.info["child_name"]) == (first, None, parent, "a")
    with pytest.raises(ChildNameTakenError, match="'a'"):
        parent.enqueue(stage.idle, child_name="a")
    assert first.enqueue(stage.idle, child_name="a").parent == first
    with pytest.raises(InvalidValueError, match="together"):
        stage.sidejob.enqueue(stage.idle, parent=parent)
    with pytest.raises(InvalidValueError, match="together"):
        stage.sidejob.enqueue(stage.idle, child_name="x")
    with pytest.raises(JobNotFoundError):
        stage.sidejob.enqueue(stage.idle, parent=10**9, child_name="x")


def test_the_end_of_a_child_asks_its_parent(stage: Stage) -> None:
    parent = stage.inside(lambda job: None)
    child = stage.idle.enqueue(parent=parent, child_name="kid", countdown=3600)
    assert parent.refresh().status == "completed"
    child.run()
    assert stage.run(child) == "completed"
    assert parent.refresh().status == "queued"
    assert parent.info["asked_again"]


def test_a_failed_parent_is_not_woken(stage: Stage) -> None:
    parent = stage.job(lambda job: 1 / 0)
    child = stage.idle.enqueue(parent=parent, child_name="kid")
    with pytest.raises(ZeroDivisionError):
        stage.run(parent)
    stage.run(child)
    assert parent.refresh().status == "failed"


def test_adopt_and_disown(stage: Stage) -> None:
    parent, other, job = stage.job(), stage.job(), stage.job()
    parent.adopt(job, "kid")

    assert (job.refresh().parent, parent.children) == (parent, {"kid": job})
    with pytest.raises(HasParentError, match=f"child of job {parent.id}"):
        other.adopt(job, "kid")
    with pytest.raises(ChildNameTakenError):
        parent.adopt(other, "kid")
    parent.disown("kid")
    assert (job.refresh().parent, parent.children) == (None, {})
    other.adopt(job, "kid")
    other.disown(job)
    for gone in ("kid", job):
        with pytest.raises(NotAChildError):
            other.disown(gone)


def test_a_child_that_is_deleted_while_it_is_disowned_by_its_name_is_no_child(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = stage.job()
    child = parent.enqueue(stage.idle, child_name="kid")
    child.terminate()
    stage.drain()
    between_look_and_lock(monkeypatch, stage.outside)(child.delete)
    with pytest.raises(NotAChildError, match="'kid'"):
        parent.disown("kid")
    assert not child.exists


def test_nobody_becomes_his_own_ancestor(stage: Stage) -> None:
    root = stage.job()
    middle = root.enqueue(stage.idle, child_name="a")
    leaf = middle.enqueue(stage.idle, child_name="a")

    lines = {root: [root], middle: [root, middle], leaf: [root, middle, leaf]}
    for below, line in lines.items():
        circle = " > ".join(str(job.id) for job in [*line, root])
        with pytest.raises(CycleError, match=f"would be {circle}, each the parent"):
            below.adopt(root, "up")


def test_a_long_circle_is_named_by_its_ends(stage: Stage) -> None:
    line = [stage.job()]
    for _ in range(20):
        line.append(line[-1].enqueue(stage.idle, child_name="a"))
    ids = [str(job.id) for job in line]
    named = " > ".join([*ids[:5], "…", *ids[-5:], ids[0]])
    with pytest.raises(CycleError, match=f"would be {named}, each"):
        line[-1].adopt(line[0], "up")


def test_a_unit_is_told_of_a_circle_at_the_call(stage: Stage) -> None:
    old = stage.job()
    below_old = old.enqueue(stage.idle, child_name="below")

    def body(job: RunningJob) -> None:
        new = below_old.enqueue(stage.idle, child_name="new")
        for below in (old, below_old, new):
            with pytest.raises(CycleError):
                below.adopt(old, "up")
        below_old.disown("new")
        new.adopt(old, "turned")
        with pytest.raises(CycleError, match=f"{new.id} > {old.id} > {below_old.id} > {new.id}"):
            below_old.adopt(new, "up")

    stage.inside(body)
    assert (old.refresh().parent, below_old.refresh().parent) == (below_old.children.get("x") or old.parent, old)


def test_a_job_that_ends_takes_no_more_children(stage: Stage) -> None:
    job, other = stage.job(), stage.job()
    job.terminate()
    with pytest.raises(IllegalMoveError, match="takes no more children"):
        job.enqueue(stage.idle, child_name="kid")
    with pytest.raises(IllegalMoveError, match="takes no more children"):
        job.adopt(other, "kid")


def test_a_unit_sees_its_own_family(stage: Stage) -> None:
    old = stage.job()
    mover = stage.job()

    def body(job: RunningJob) -> None:
        new = stage.sidejob.enqueue(stage.idle)
        job.adopt(new, "new")
        job.adopt(old, "old")
        assert (job.children, new.parent, old.parent) == ({"new": new, "old": old}, job, job)
        with pytest.raises(ChildNameTakenError):
            job.adopt(mover, "new")
        with pytest.raises(HasParentError):
            mover.adopt(old, "x")
        job.disown("old")
        assert (job.children, old.parent) == ({"new": new}, None)
        new.adopt(old, "grandchild")
        assert (new.children, old.parent) == ({"grandchild": old}, new)
        with pytest.raises(NotAChildError):
            job.disown("old")

    job = stage.inside(body)
    new = job.child("new")
    assert new is not None
    assert new.children == {"grandchild": old}
    assert old.refresh().parent == new


def test_a_child_can_move_to_another_parent_in_one_unit(stage: Stage) -> None:
    one, two = stage.job(), stage.job()
    kid = one.enqueue(stage.idle, child_name="kid")

    def body(job: RunningJob) -> None:
        one.disown("kid")
        two.adopt(kid, "kid")
        kid.output("o").write("for the new parent")

    stage.inside(body)
    assert (one.children, two.children) == ({}, {"kid": kid})


def test_a_unit_gives_a_new_child_the_name_of_one_that_it_has_disowned(stage: Stage) -> None:
    old = stage.job()

    def body(job: RunningJob) -> None:
        job.adopt(old, "kid")
        job.checkpoint()
        for _ in range(2):
            job.disown("kid")
            job.enqueue(stage.idle, child_name="kid").enqueue(stage.idle, child_name="grandchild")

    job = stage.inside(body)
    kid = job.child("kid")
    assert kid is not None
    assert (kid != old, list(kid.children), old.refresh().parent) == (True, ["grandchild"], None)


def test_a_run_asked_of_the_parent_is_that_of_the_parent_at_the_time(stage: Stage) -> None:
    """Although the unit gives its job another parent, or none, before it is committed."""
    first, second = stage.inside(lambda job: None), stage.inside(lambda job: None)
    child = first.enqueue(stage.idle, child_name="kid")
    stage.run(child)
    stage.drain()

    def body(job: RunningJob) -> None:
        assert child.run(parent=True) == first
        first.disown(child)
        assert child.run(parent=True) is None
        second.adopt(child, "kid")

    stage.inside(body)
    assert (first.refresh().status, second.refresh().status) == ("queued", "completed")


def test_aliases_are_unique_everywhere(stage: Stage) -> None:
    job, other = stage.job(aliases=["b", "b"]), stage.job()
    job.add_alias("a")
    job.add_alias("a")

    assert job.aliases == ["a", "b"]
    assert stage.sidejob.get("a") == job
    with pytest.raises(AliasTakenError, match=f"belongs to job {job.id}"):
        other.add_alias("a")
    with pytest.raises(AliasTakenError):
        stage.job(aliases=["new", "a"])
    assert stage.sidejob.find("new") is None
    with pytest.raises(InvalidAliasError, match="no alias"):
        other.remove_alias("a")
    job.remove_alias("a")
    other.add_alias("a")
    assert (job.aliases, other.aliases) == (["b"], ["a"])
    assert stage.sidejob.get("a") == other


def test_a_unit_sees_its_own_aliases(stage: Stage) -> None:
    other = stage.job(aliases=["taken"])

    def body(job: RunningJob) -> None:
        for refused in (lambda: job.add_alias("taken"), lambda: stage.job(aliases=["taken"])):
            with pytest.raises(AliasTakenError):
                refused()
        with pytest.raises(InvalidAliasError):
            job.remove_alias("taken")
        other.remove_alias("taken")
        job.add_alias("taken")
        assert (stage.sidejob.find("taken"), job.aliases, other.aliases) == (job, ["taken"], [])

    job = stage.inside(body)
    assert (job.aliases, other.aliases) == (["taken"], [])


def test_a_unit_sees_an_alias_that_it_has_taken_away_and_given_again(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        for _ in range(2):
            job.remove_alias("again")
            assert job.aliases == []
            job.add_alias("again")
            assert job.aliases == ["again"]

    job = stage.inside(body, aliases=["again"])
    assert job.aliases == ["again"]


def test_a_unit_gives_a_new_job_an_alias_that_it_has_taken_from_another(stage: Stage) -> None:
    other = stage.job(aliases=["free"])

    def body(job: RunningJob) -> None:
        other.remove_alias("free")
        stage.job(aliases=["free"])

    stage.inside(body)
    assert other.aliases == []
    assert stage.sidejob.get("free") != other


def test_a_parent_runs_once_for_all_children_that_end_before_it_begins_and_once_for_those_that_end_meanwhile(
    stage: Stage,
) -> None:
    runs: list[int] = []

    def body(job: RunningJob) -> None:
        runs.append(job.run_no)
        if job.run_no == 2:
            stage.outside(lambda: [stage.run(child) for child in children[20:]])

    parent = stage.job(body)
    stage.drain()
    children = [stage.job(parent=parent, child_name=f"child{number}") for number in range(40)]
    for child in children[:20]:
        stage.run(child)

    stage.run(parent)
    assert stage.drain() == 1
    assert runs == [1, 2, 3]
