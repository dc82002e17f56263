"""No job becomes its own ancestor, whoever adopts whom at the same instant.

An adoption locks the child and all ancestors of its parent. Two adoptions that would close a circle together therefore
meet at a job that both lock, and the second sees what the first has done.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import psycopg
import pytest

from celery_sidejob import CycleError, Job, SideJobError
from celery_sidejob.operations import lock_set
from tests.tools.crash_points import Arm, lost
from tests.tools.databases import SCHEMA
from tests.tools.in_process import Stage

ABOVE = """
    WITH RECURSIVE up AS (
      SELECT id, parent_id AS above, 1 AS levels FROM jobs WHERE parent_id IS NOT NULL
      UNION ALL SELECT up.id, j.parent_id, levels + 1 FROM up JOIN jobs j ON j.id = up.above
      WHERE j.parent_id IS NOT NULL AND levels < 1000)
    SELECT DISTINCT id FROM up WHERE above = id"""


def together(calls: Sequence[Callable[[], Any]]) -> list[BaseException | None]:
    """Have each call made by a client of its own, all at once, and return what each of them raised."""
    raised: list[BaseException | None] = [None] * len(calls)
    begin = threading.Barrier(len(calls))

    def client(number: int) -> None:
        begin.wait()
        try:
            calls[number]()
        except BaseException as error:
            raised[number] = error

    threads = [threading.Thread(target=client, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def by_client(stage: Stage, parent: Job, child: Job) -> None:
    """A client adopts."""
    parent.adopt(child, f"c{child.id}")


def by_run(stage: Stage, parent: Job, child: Job) -> None:
    """A run adopts, and makes the parent a child at the same time."""

    def body(job: Any) -> None:
        parent.adopt(child, f"c{child.id}")
        parent.enqueue(stage.idle, child_name=f"new{job.id}")

    stage.inside(body)


@pytest.mark.parametrize("ring", [2, 3, 5])
def test_a_ring_of_adoptions_at_once_lacks_one(stage: Stage, ring: int) -> None:
    """Each adoption is legal by itself, and each touches another parent and another child."""
    for number in range(24 // ring):
        roots = [stage.job() for _ in range(ring)]
        ends = [root.enqueue(stage.idle, child_name="a").enqueue(stage.idle, child_name="b") for root in roots]
        ways = [by_client, by_run] if number % 2 else [by_client]
        raised = together([partial(ways[n % len(ways)], stage, ends[n], roots[(n + 1) % ring]) for n in range(ring)])
        refused = [error for error in raised if error is not None]
        assert [type(error) for error in refused] == [CycleError], refused
        assert str(refused[0]).count(" > ") == min(3 * ring, 11), "each link of the ring has three jobs; ten are named"
        assert stage.sql(ABOVE) == []
        assert sum(root.refresh().parent is not None for root in roots) == ring - 1


def test_an_ancestor_that_is_adopted_while_the_ancestors_are_read_is_locked_too(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the adoption would judge by a line above its parent that others may still lengthen."""
    above, parent, child = (stage.job() for _ in range(3))
    real = lock_set.trees.ancestors
    calls = [lambda: above.adopt(parent, "below")]

    def then_adopted(*given: Any) -> Any:
        found = real(*given)
        if calls and given[1] == parent.id:
            stage.outside(calls.pop())
        return found

    locked: list[set[int]] = []
    lock = lock_set.jobs.lock_exclusively
    monkeypatch.setattr(lock_set.trees, "ancestors", then_adopted)
    monkeypatch.setattr(
        lock_set.jobs, "lock_exclusively", lambda executor, ids: locked.append(set(ids)) or lock(executor, ids)
    )
    parent.adopt(child, "late")
    assert locked[-1] == {above.id, parent.id, child.id}


def test_whatever_clients_and_runs_do_at_once_the_graph_is_a_forest(stage: Stage, at: Arm) -> None:
    """Adoptions, moves in a unit, disownings and new children, in the callers' transactions too; answers are lost."""
    dice = random.Random(4)
    roots = [stage.job() for _ in range(4)]
    leaves = [root.enqueue(stage.idle, child_name="a").enqueue(stage.idle, child_name="b") for root in roots]

    def adopt(one: Job, other: Job) -> None:
        by_client(stage, one, other)

    def move(one: Job, other: Job) -> None:
        def body(job: Any) -> None:
            parent = stage.sidejob.get(other.id).parent
            if parent is not None:
                parent.disown(other)
            one.adopt(other, f"c{other.id}")

        stage.inside(body)

    def disown(one: Job, other: Job) -> None:
        parent = other.refresh().parent
        if parent is not None:
            parent.disown(other)

    def beget(one: Job, other: Job) -> None:
        with psycopg.connect(stage.database_url, options=f"-c search_path={SCHEMA}") as connection:
            new = one.enqueue(stage.idle, child_name=f"new{random.random()}", transaction=connection)
        with suppress(SideJobError):
            new.adopt(other, f"c{other.id}")

    answers = {"refused": 0, "circles": 0, "done": 0}
    for number in range(40):
        if number % 5 == 0:
            at(dice.choice(["adopt:before-commit", "adopt:after-commit", "checkpoint:after-commit"]), lost)
        calls = []
        for act in dice.choices([adopt, move, disown, beget], weights=[4, 2, 1, 1], k=4):
            one, other = dice.sample(range(4), 2)
            calls.append(partial(act, leaves[one], roots[other]))
        for error in together(calls):
            assert error is None or isinstance(error, SideJobError), error
            answers["circles"] += isinstance(error, CycleError)
            answers["refused" if error else "done"] += 1
        assert stage.sql(ABOVE) == []
    stage.drain()
    assert min(answers.values()) > 0, answers
