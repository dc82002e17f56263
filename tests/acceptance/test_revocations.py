"""A revoked durable task does not run, whether a worker heard of the revocation or not, and is told of once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.acceptance.durable_site import PROCESSES, TIMEOUT_S, Site, site_fixture  # noqa: F401 - the fixture `site`
from tests.tools.commands import ask
from tests.tools.monitor import Events
from tests.tools.waiting import wait_until


@pytest.fixture
def events(site: Site) -> Iterator[Events]:
    """What monitors are told."""
    with Events(site.broker_url) as receiving:
        yield receiving


def revocations(site: Site) -> list[str]:
    """The task ids of which receivers of Celery's signal were told in workers."""
    return [line["id"] for line in site.record.of("revoked")]


def test_who_was_not_there_when_it_was_revoked_does_not_run_it(site: Site, events: Events) -> None:
    first = site.worker(extra=("-E",))
    running = site.call("holder")
    site.holding(running)
    waiting, later = site.call("noted", 1), site.call("noted", 2, countdown=3600)
    first.kill()  # and with it its memory
    assert first.wait(TIMEOUT_S)

    waiting.revoke()
    site.app.control.revoke([later.id])
    site.worker(extra=("-E",))

    for result in (waiting, later):
        events.wait_for(result.id, "REVOKED")
    wait_until(lambda: len(site.dead()) == 3, timeout=TIMEOUT_S, message="all to be in the dead set")
    site.wait_quiet()
    assert {(entry.task_id, entry.reason) for entry in site.dead()} == {
        (waiting.id, "revoked"), (later.id, "revoked"), (running.id, "lost"),
    }  # fmt: skip
    assert [waiting.state, later.state] == ["REVOKED"] * 2
    assert [site.ran(waiting), site.ran(later)] == [[], []]
    assert sorted(revocations(site)) == sorted([waiting.id, later.id])
    assert [events.types(result.id).count("task-revoked") for result in (waiting, later)] == [1, 1]


@pytest.mark.pools("prefork", "threads", "asyncio", "awaited", "gevent", reason="hears nothing while it runs a body")
def test_what_waits_behind_a_run_whose_worker_knows_it_to_be_revoked_is_told_of_once(
    site: Site, events: Events
) -> None:
    worker = site.worker(extra=("-E",))
    running = site.call("holder")
    site.holding(running)
    waiting = site.call("noted", 1)

    waiting.revoke()
    worker.wait_for_log("Tasks flagged as revoked", TIMEOUT_S)
    site.go(running)

    assert running.get(timeout=TIMEOUT_S) is None
    events.wait_for(waiting.id, "REVOKED")
    last = site.call("noted", 2)
    assert last.get(timeout=TIMEOUT_S) == 2  # so the worker has dealt with what it had received before
    site.wait_quiet()
    assert [(entry.task_id, entry.reason) for entry in site.dead()] == [(waiting.id, "revoked")]
    assert (waiting.state, site.ran(waiting), revocations(site)) == ("REVOKED", [], [waiting.id])
    assert events.types(waiting.id).count("task-revoked") == 1


def test_what_is_revoked_while_it_runs_goes_on_and_is_not_retried(site: Site) -> None:
    site.worker()
    running = site.call("held_and_retried")
    site.holding(running)
    site.app.control.revoke(running.id)

    site.go(running)

    site.wait_quiet()
    assert [(entry.task_id, entry.reason) for entry in site.dead()] == [(running.id, "revoked")]
    assert (running.state, len(site.ran(running))) == ("REVOKED", 1)


@pytest.mark.pools("prefork", "gevent", reason="cannot stop a body")
def test_a_task_that_hangs_is_killed_by_command_also_once_it_is_revoked(site: Site) -> None:
    site.worker(concurrency=2)
    hangs, other = site.call("held_and_retried"), site.call("holder")
    for running in (hangs, other):
        site.holding(running)
    assert "it goes on" in ask(site.app, "revoke", hangs.id).out

    said = ask(site.app, "revoke", "--terminate", hangs.id)

    assert (said.code, said.lines) == (0, [f"{hangs.id} was running, and is ended."])
    site.go(other)
    site.wait_quiet()
    assert [(entry.task_id, entry.reason) for entry in site.dead()] == [(hangs.id, "revoked")]
    assert len(site.ran(hangs, "holding")) == 1


@PROCESSES
def test_what_is_revoked_while_it_runs_and_lost_does_not_run_again(site: Site) -> None:
    worker = site.worker()
    running = site.call("repeatable")
    pid = site.holding(running)["pid"]
    site.app.control.revoke(running.id)

    worker.kill()
    os.kill(pid, signal.SIGKILL)
    site.worker()

    site.wait_quiet()
    assert [(entry.task_id, entry.reason) for entry in site.dead()] == [(running.id, "revoked")]
    assert len(site.ran(running, "holding")) == 1


def test_a_chord_hears_that_a_part_was_revoked_before_any_worker_was_there(site: Site) -> None:
    from celery import chord

    result = chord([site.s("noted", 1), site.s("noted", 2)], site.s("plus")).apply_async()
    part: Any = result.parent.results[0]
    part.revoke()

    site.worker()

    with pytest.raises(Exception, match="revoked"):
        result.get(timeout=TIMEOUT_S)
    site.wait_quiet()
    assert (part.id, "revoked") in {(entry.task_id, entry.reason) for entry in site.dead()}
