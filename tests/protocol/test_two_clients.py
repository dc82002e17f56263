"""Two clients change the same job at once: what both have set is there, and nothing that was written is lost.

A transaction looks before it locks. These tests have another client commit in between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from celery_sidejob import NO_DATA, Job, PortNotFoundError, RunningJob
from celery_sidejob.operations import lock_set
from tests.tools.between import Between, between_look_and_lock
from tests.tools.in_process import Stage
from tests.tools.waiting import wait_until

Change = Callable[[Job], Any]
Meet = Callable[[Job, Change, Change], Any]
"""Has a change of a job made by one side, and by another client when the first has looked and has not locked."""

PORTS = {"inports": {"a": {"default": 1, "channels": ["/old"]}, "*": {"default": 0}}, "outports": ["*"]}
GONE = "has no input port"


@pytest.fixture
def job(stage: Stage) -> Job:
    """A job that waits for its run, of a task without ports."""

    @stage.task(name="without.ports")
    def without_ports(job: RunningJob) -> None:
        pass

    return without_ports.enqueue(**PORTS)  # type: ignore[no-any-return]


@pytest.fixture
def between(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Between:
    """Has a call done by another client between the next transaction's look and its lock."""
    return between_look_and_lock(monkeypatch, stage.outside)


@pytest.fixture(params=["client", "run"])
def meet(request: pytest.FixtureRequest, stage: Stage, between: Between) -> Meet:
    """The first side is a client, or a run whose unit is committed."""

    def clients(job: Job, change: Change, other: Change) -> None:
        between(lambda: other(job))
        change(job)

    def run_and_client(job: Job, change: Change, other: Change) -> None:
        def body(running: RunningJob) -> None:
            change(Job(job.id, runtime=stage.runtime))
            between(lambda: other(job))

        stage.inside(body)

    return clients if request.param == "client" else run_and_client


def write(value: Any) -> Change:
    return lambda job: job.input("any").write(value)


def default(name: str, value: Any) -> Change:
    return lambda job: setattr(job.input(name), "default", value)


def no_default(name: str) -> Change:
    return lambda job: delattr(job.input(name), "default")


def channels(name: str, *names: str) -> Change:
    return lambda job: setattr(job.input(name), "channels", names)


def ports(**given: Any) -> Change:
    return lambda job: job.configure_ports(**given)


# -- ports -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "other", "expected"),
    [
        ("a", channels("a", "/new"), default("a", 2), (2, ["/new"], [])),
        ("a", default("a", 2), channels("a", "/new"), (2, ["/new"], [])),
        ("a", channels("a", "/new"), no_default("a"), (NO_DATA, ["/new"], [])),
        ("a", no_default("a"), channels("a", "/new"), (NO_DATA, ["/new"], [])),
        ("any", write(1), channels("any", "/new"), (0, ["/new"], [1])),
        ("any", write(1), default("any", 2), (2, [], [1])),
        ("any", write(1), write(2), (0, [], [2, 1])),
        ("any", default("any", 2), channels("any", "/new"), (2, ["/new"], [])),
        ("any", channels("any", "/new"), default("any", 2), (2, ["/new"], [])),
        ("any", default("any", 2), write(1), (2, [], [1])),
        ("any", channels("any", "/new"), write(1), (0, ["/new"], [1])),
        ("any", write(1), ports(inports={"*": {"default": 5}}), (5, [], [1])),
    ],
)
def test_a_port_keeps_what_both_have_set(
    stage: Stage, job: Job, meet: Meet, name: str, change: Change, other: Change, expected: Any
) -> None:
    meet(job, change, other)
    port = job.input(name)
    assert (port.default, port.channels, [packet.value for packet in port.peek()]) == expected
    subscribed = stage.sql("SELECT channel FROM subscriptions s JOIN ports p ON p.id = port_id WHERE name = %s", name)
    assert [channel for (channel,) in subscribed] == port.channels


CHANGES = [write(1), default("any", 2), channels("any", "/new")]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("known", [True, False], ids=["known", "by_its_pattern"])
def test_a_port_that_is_taken_away_meanwhile_refuses(job: Job, meet: Meet, change: Change, known: bool) -> None:
    if known:
        job.configure_ports(inports=["any"])
    with pytest.raises(PortNotFoundError, match=GONE):
        meet(job, change, ports(inports=["b"]))
    assert [port.name for port in job.inports] == ["b"]


def anew(job: Job) -> None:
    """Take the port away, and give it again."""
    job.configure_ports()
    job.configure_ports(inports=["any"])


@pytest.mark.parametrize(
    ("change", "expected"), [*zip(CHANGES, [(NO_DATA, [], [1]), (2, [], []), (NO_DATA, ["/new"], [])], strict=True)]
)
def test_a_port_that_is_made_anew_meanwhile_takes_the_change(
    job: Job, meet: Meet, change: Change, expected: Any
) -> None:
    job.configure_ports(inports=["any"])
    meet(job, change, anew)
    port = job.input("any")
    assert (port.default, port.channels, [packet.value for packet in port.peek()]) == expected


@pytest.mark.parametrize("name", ["known", "any"])
def test_what_is_written_goes_to_the_channels_that_the_port_has_by_then(
    stage: Stage, job: Job, meet: Meet, name: str
) -> None:
    job.configure_ports(outports=["known", "*"])
    subscriber = stage.job(inports={"i": {"channels": ["/sums"]}})
    meet(job, lambda job: job.output(name).write(1), lambda job: setattr(job.output(name), "channels", ["/sums"]))
    assert [packet.value for packet in subscriber.input("i").peek()] == [1]


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (ports(inports=["b"]), None),
        (anew, (NO_DATA, [], [1])),
        (lambda job: None, (NO_DATA, [], [1])),
    ],
)
def test_a_borrowed_transaction_writes_into_the_port_or_is_refused(
    stage: Stage, job: Job, monkeypatch: pytest.MonkeyPatch, other: Change, expected: Any
) -> None:
    job.configure_ports(inports=["any"])
    real, calls = lock_set.jobs.find, [other]

    def find(*given: Any) -> Any:
        if calls:
            stage.outside(lambda: calls.pop()(job))
        return real(*given)

    port = job.input("any")
    monkeypatch.setattr(lock_set.jobs, "find", find)
    with stage.connect(autocommit=False) as own:
        if expected is None:
            with pytest.raises(PortNotFoundError, match=GONE):
                port.write(1, transaction=own)
            assert own.execute("SELECT 1").fetchone() == (1,)
        else:
            port.write(1, transaction=own)
    assert calls == []
    if expected is not None:
        assert [packet.value for packet in job.input("any").peek()] == [1]


def test_a_unit_makes_of_a_port_what_it_asked_last(stage: Stage, job: Job) -> None:
    seen: list[Any] = []

    def body(running: RunningJob) -> None:
        job.input("a").default = 5
        job.configure_ports(inports={"a": {"default": 6}, "*": {"default": 0}})
        job.input("any").channels = ["/new"]
        seen.extend((job.input("a").default, job.input("any").default))

    stage.inside(body)
    assert seen == [job.input("a").default, job.input("any").default] == [6, 0]


def test_a_port_that_goes_while_a_borrowed_transaction_waits_for_it_refuses(stage: Stage, job: Job) -> None:
    job.configure_ports(inports=["any"])
    with stage.connect(autocommit=False) as remover, stage.connect(autocommit=False) as own:
        remover.execute("DELETE FROM ports")
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND pid = %s"

        def remove() -> None:
            wait_until(lambda: stage.sql(waits, own.info.backend_pid) == [(1,)])
            remover.commit()

        removing = threading.Thread(target=remove)
        removing.start()
        with pytest.raises(PortNotFoundError, match=GONE):
            job.input("any").write(1, transaction=own)
        removing.join()
        assert own.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.parametrize("remade", [True, False])
def test_a_handle_finds_a_port_that_was_made_anew_and_tells_of_one_that_went(job: Job, remade: bool) -> None:
    job.configure_ports(inports=["any"])
    port = job.input("any")
    asked: list[Callable[[], Any]] = [lambda: len(port), lambda: port.peek()[0].value, port.read]
    for ask in asked:
        if remade:
            anew(job)
            job.input("any").write(1)
            assert ask() == 1
        else:
            job.configure_ports()
            with pytest.raises(PortNotFoundError, match=GONE):
                ask()
            job.configure_ports(inports=["any"])


def test_a_unit_writes_to_the_ports_that_it_has_left(stage: Stage, job: Job) -> None:
    other = stage.job(inports=["b"])

    def body(running: RunningJob) -> None:
        taken_away, b = job.input("any"), other.input("b")
        job.configure_ports(inports=["c"])
        b.write(1)
        job.input("c").write(2)
        if running.run_no == 1:
            running.run()
            running.checkpoint()
        else:
            taken_away.write(3)

    writing = stage.job(body)
    stage.run(writing)
    assert [packet.value for packet in [*other.input("b").peek(), *job.input("c").peek()]] == [1, 2]
    job.configure_ports(inports=["*"])
    with pytest.raises(PortNotFoundError, match=GONE):
        stage.run(writing)


# -- state and names ---------------------------------------------------------------------------------------------------


def test_keys_of_the_state_and_names_are_set_one_by_one(job: Job, meet: Meet) -> None:
    job.set(a=1, b=1, c=1)
    meet(job, lambda job: job.set(a=2), lambda job: job.set(b=2))
    meet(job, lambda job: job.unset("a"), lambda job: job.unset("c").set(d=2))
    meet(job, lambda job: job.add_alias("first"), lambda job: job.add_alias("second"))
    meet(job, lambda job: job.remove_alias("first"), lambda job: job.add_alias("third"))
    assert (job.state, job.aliases) == ({"b": 2, "d": 2}, ["second", "third"])


# -- families ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def family(stage: Stage) -> Job:
    """A job with a child, both at rest, and another that may be adopted."""
    parent = stage.job()
    parent.enqueue("stage.idle", child_name="first")
    stage.drain()
    return parent


def test_a_child_that_comes_before_a_tree_is_locked_is_terminated_with_all_that_it_makes(
    stage: Stage, family: Job, meet: Meet
) -> None:
    late = stage.job()
    meet(family, lambda job: job.terminate(recursive=True), lambda job: job.adopt(late, "late"))
    assert stage.sql("SELECT count(*) FROM jobs WHERE terminate_tree AND status = 'terminating'") == [(3,)]


def test_a_child_that_leaves_before_a_tree_is_locked_is_let_live(stage: Stage, family: Job, meet: Meet) -> None:
    first = family.children["first"]
    meet(family, lambda job: job.terminate(recursive=True), lambda job: job.disown("first"))
    assert (family.refresh().status, first.refresh().status) == ("terminating", "completed")


def test_a_tree_that_is_adopted_in_the_unit_that_terminates_it_goes_with_all_that_it_makes(
    stage: Stage, family: Job
) -> None:
    above = stage.job()

    def body(running: RunningJob) -> None:
        above.adopt(family, "late")
        above.terminate(recursive=True)

    stage.inside(body)
    trees = "SELECT count(*) FROM jobs WHERE terminate_tree AND status = 'terminating'"
    assert stage.sql(trees) == [(3,)]


def test_a_child_that_leaves_before_its_parents_tree_is_locked_is_not_deleted(
    stage: Stage, family: Job, between: Between
) -> None:
    first = family.children["first"]
    family.terminate(recursive=True)
    stage.drain()
    between(lambda: family.disown("first"))
    assert family.delete()
    assert first.exists


def test_an_adoption_locks_the_ancestors_that_the_parent_has_by_then(
    stage: Stage, family: Job, between: Between, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, above = stage.job(), stage.job()
    locked: list[set[int]] = []
    real = lock_set.jobs.lock_exclusively

    def lock_exclusively(executor: Any, ids: Any) -> Any:
        locked.append(set(ids))
        return real(executor, ids)

    monkeypatch.setattr(lock_set.jobs, "lock_exclusively", lock_exclusively)
    between(lambda: above.adopt(family, "below"))
    first = family.children["first"]
    first.adopt(child, "late")
    assert locked[-1] == {above.id, family.id, first.id, child.id}
