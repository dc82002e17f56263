"""A worker knows what it runs, however often it was told of it."""

from __future__ import annotations

import pytest

from celery_sidejob.services.heartbeat import deliveries
from celery_sidejob.services.heartbeat.deliveries import Deliveries

KEY = (1, 1)


def test_a_second_delivery_that_ends_at_once_does_not_end_the_run() -> None:
    """The broker had two copies of one message: the run that the first began goes on."""
    runs = Deliveries()
    running = runs.received(KEY)
    runs.accepted(running, 11)
    stale = runs.received(KEY)
    runs.accepted(stale, 12)

    runs.over(stale)
    stale.over_at = -deliveries.GRACE_S  # long ago
    runs.sweep()

    assert runs.knows(KEY)
    assert runs.busy() == {11}
    assert runs.of_process(12) == []
    assert runs.of_process(11) == [KEY]
    assert not runs.knows(KEY)


def test_what_is_over_is_known_for_a_while() -> None:
    """Its end may still be on its way to the store."""
    runs = Deliveries()
    delivery = runs.received(KEY)
    runs.over(delivery)
    assert runs.knows(KEY)

    delivery.over_at = -deliveries.GRACE_S
    assert not runs.knows(KEY)


def test_all_deliveries_of_a_run_that_the_worker_stopped_are_over() -> None:
    runs = Deliveries()
    for pid in (11, 12):
        runs.accepted(runs.received(KEY, lease_s=1.0), pid)
    runs.stopped(KEY)
    assert (runs.busy(), runs.own_leases(), runs.clear()) == (set(), {}, [])


def test_a_run_is_over_for_its_body_once_all_its_deliveries_are_or_the_worker_was_declared_dead() -> None:
    runs = Deliveries()
    assert not runs.is_over(KEY), "one that is not known here runs by other means"
    first, second = runs.received(KEY), runs.received(KEY)
    runs.over(second)
    assert not runs.is_over(KEY)
    runs.over(first)
    assert runs.is_over(KEY)

    other = (KEY[0] + 1, 1)
    runs.received(other)
    runs.clear()
    assert runs.is_over(other)


def test_what_waits_is_returned_until_a_process_has_it() -> None:
    runs = Deliveries()
    waiting, running, ended = (runs.received((number, 1)) for number in (1, 2, 3))
    runs.accepted(running, 11)
    runs.over(ended)

    assert runs.waiting(for_s=60, every_s=0) == []
    assert runs.waiting(for_s=0, every_s=60) == [waiting.key]
    assert runs.waiting(for_s=0, every_s=60) == [], "it was vouched for just now"
    assert runs.waiting(for_s=0, every_s=0) == [waiting.key]
    runs.accepted(waiting, 12)
    assert runs.waiting(for_s=0, every_s=0) == []


def test_what_waited_is_forgotten_with_the_connection_unless_a_process_has_it_after_all() -> None:
    """It was on its way to a process of the pool: its run must not be taken for a stray and begun again."""
    runs = Deliveries()
    dropped, on_its_way = runs.received((1, 1)), runs.received((2, 1))

    runs.disconnected()

    assert runs.waiting(for_s=0, every_s=0) == []
    assert not runs.knows(dropped.key)
    runs.accepted(on_its_way, 11)
    assert runs.knows(on_its_way.key)
    assert runs.of_process(11) == [on_its_way.key]


def test_a_hold_is_given_back_once() -> None:
    """The same worker may claim the run again, under the same number: that is another hold."""
    runs = Deliveries()
    delivery = runs.received(KEY)
    delivery.held = "held"
    assert runs.disconnected() == ["held"]
    assert runs.let_go(delivery) is None


class Request:
    """Stands for Celery's."""


def test_a_request_that_celery_dropped_waits_no_longer() -> None:
    runs = Deliveries()
    request = Request()
    runs.received(KEY, request=request)
    assert runs.waiting(for_s=0, every_s=0) == [KEY]

    del request

    assert runs.waiting(for_s=0, every_s=0) == []


def left(runs: Deliveries[tuple[int, int]], pid: int) -> None:
    """A delivery to a process, for which the store did not answer."""
    delivery = runs.received(KEY)
    runs.accepted(delivery, pid)
    runs.idle(delivery)
    runs.left(delivery)
    runs.over(delivery)


def test_a_process_that_did_not_begin_a_run_is_known_until_it_begins_it() -> None:
    runs = Deliveries()
    left(runs, 11)
    left(runs, 12)
    assert [runs.is_left(KEY, pid) for pid in (11, 12, 13)] == [True, True, False]

    copy = runs.received(KEY)
    runs.accepted(copy, 11)
    assert not runs.is_left(KEY, 11), "it may begin it now"
    runs.idle(copy)
    runs.over(copy)
    assert runs.is_left(KEY, 11), "it did not"

    runs.accepted(begun := runs.received(KEY), 11)
    runs.over(begun)
    assert not runs.is_left(KEY, 11), "it ran it"
    runs.accepted(runs.received(KEY), 12)
    runs.of_process(12)
    assert not runs.is_left(KEY, 12), "it may have died in it"


def test_what_was_forgotten_here_is_returned_once() -> None:
    runs = Deliveries()
    assert runs.missed() == []
    left(runs, 11)
    left(runs, 12)
    assert (runs.missed(), runs.missed()) == ([KEY], [])


def test_a_run_that_was_not_begun_is_forgotten_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Deliveries()
    left(runs, 11)
    runs.sweep()
    assert runs.is_left(KEY, 11)
    monkeypatch.setattr(deliveries, "LEFT_S", 0.0)
    runs.sweep()
    assert not runs.is_left(KEY, 11)


def test_a_delivery_that_ran_nothing_has_not_begun_the_run() -> None:
    """Otherwise the run, which the worker holds and nobody executes, would count as lost."""
    runs = Deliveries[tuple[int, int]]()
    runs.accepted(copy := runs.received(KEY), 11)
    assert runs.begun() == {KEY}
    runs.idle(copy)
    runs.over(copy)
    assert runs.begun() == set()
