"""Ports with a limit: who writes to a full one waits or is refused, and goes on when there is room."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from celery_sidejob import (
    IllegalMoveError,
    InvalidPortError,
    InvalidValueError,
    Job,
    JobNotFoundError,
    PortFullError,
    RunningJob,
    StoreUnavailableError,
)
from celery_sidejob.services.sweep.asks import UnusedRoom
from celery_sidejob.services.sweep.sweep import Sweep
from celery_sidejob.services.sweep.sweeper import Sweeper
from celery_sidejob.store import room
from celery_sidejob.store.connection.own_executor import OwnExecutor
from celery_sidejob.store.statement import Statement
from celery_sidejob.unit import read_ahead
from tests.acceptance.lenders import LENDERS
from tests.tools.crash_points import Arm
from tests.tools.in_process import Stage
from tests.tools.threads import in_thread


def limited(stage: Stage, limit: int = 2, body: Any = None, **options: Any) -> Job:
    """A job with an input port and an output port of this limit; it has run."""
    ports: dict[str, Any] = {"inports": {"in": {"limit": limit}}, "outports": {"out": {"limit": limit}}}
    job = stage.job(body or (lambda job: None), **ports, **options)
    stage.drain()
    return job.refresh()


def quietly(stage: Stage, port: Any, *values: Any) -> None:
    with stage.sidejob.port_options(notify=False):
        port.write_many(values)


def on(port: Any) -> list[Any]:
    return [packet.value for packet in port.peek(1000)]


def handle(stage: Stage, job: Job) -> Job:
    return Job(job.id, runtime=stage.runtime)


# -- clients ----------------------------------------------------------------------------------------------------------


def test_a_client_is_refused_and_told_which_port_is_full(stage: Stage) -> None:
    job = limited(stage)
    job.input("in").write_many([1, 2])
    with pytest.raises(PortFullError, match="limit of 2 packets, and 2 wait there") as refused:
        job.input("in").write(3)
    error = refused.value
    assert (error.job_id, error.direction, error.port, error.limit, error.used) == (job.id, "in", "in", 2, 2)
    assert on(job.input("in")) == [1, 2]
    assert job.input("in").read() == 1
    job.input("in").write(3)
    assert on(job.input("in")) == [2, 3]


def test_many_values_are_written_together_or_not_at_all(stage: Stage) -> None:
    port = limited(stage, 3).input("in")
    port.write_many([1, 2])
    with pytest.raises(PortFullError):
        port.write_many([3, 4])
    with pytest.raises(PortFullError, match="4 at once never fit"):
        port.write_many([3, 4, 5, 6], wait=True)
    assert on(port) == [1, 2]


def test_a_client_waits_as_long_as_it_says(stage: Stage) -> None:
    port = limited(stage, 1).input("in")
    port.write(1)
    with pytest.raises(PortFullError):
        port.write(2, wait=0.05)
    with in_thread(lambda: port.write(2, wait=True)):
        stage_port = port.job.input("in")
        assert stage_port.read() == 1
    assert on(port) == [2]


@pytest.mark.parametrize("wait", ["1", -1, float("nan"), None])
def test_a_wait_that_is_no_time_is_refused(stage: Stage, wait: Any) -> None:
    with pytest.raises(InvalidValueError, match="wait= takes seconds"):
        limited(stage).input("in").write(1, wait=wait)


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "5", 2**31])
def test_a_limit_that_is_no_number_is_refused(stage: Stage, limit: Any) -> None:
    with pytest.raises(InvalidPortError, match="limit is a number of packets"):
        stage.job(inports={"a": {"limit": limit}})


def test_a_wildcard_s_limit_is_that_of_the_ports_it_allows(stage: Stage) -> None:
    job = stage.job(inports={"*": {"limit": 1}})
    job.input("made").write(1)
    with pytest.raises(PortFullError):
        job.input("made").write(2)
    job.input("other").write(1)


def test_connecting_respects_the_limit_and_makes_room(stage: Stage) -> None:
    source, target = limited(stage, 3), limited(stage, 2)
    quietly(stage, source.input("in"), 1, 2, 3)
    with pytest.raises(PortFullError, match="3 at once never fit"):
        source.input("in").connect_to(target.input("in"))
    assert (on(source.input("in")), on(target.input("in"))) == ([1, 2, 3], [])
    assert source.input("in").read() == 1
    assert source.input("in").connect_to(target.input("in")) == [2, 3]
    quietly(stage, source.input("in"), 4)
    with pytest.raises(PortFullError, match="no room for 1 more"):
        source.input("in").connect_to(target.input("in"))


def test_a_publication_comes_to_a_full_port_all_the_same(stage: Stage) -> None:
    job = stage.job(inports={"in": {"limit": 1, "channels": ["/c"]}})
    job.input("in").write(1)
    assert stage.sidejob.publish("/c", 2) == 1
    assert on(job.input("in")) == [1, 2]
    with pytest.raises(PortFullError):
        job.input("in").write(3)


def test_a_write_in_the_callers_transaction_is_refused_there(stage: Stage) -> None:
    port = limited(stage, 1).input("in")
    port.write(1)
    with LENDERS["psycopg"](stage.database_url) as lender:
        with pytest.raises(IllegalMoveError, match="cannot wait"):
            port.write(2, wait=1, transaction=lender.transaction)
        with pytest.raises(PortFullError):
            port.write(2, transaction=lender.transaction)
        assert port.read(transaction=lender.transaction) == 1
        port.write(2, transaction=lender.transaction)
        lender.commit()
    assert on(port) == [2]


# -- runs -------------------------------------------------------------------------------------------------------------


def writer(stage: Stage, target: Job, name: str = "in") -> Job:
    """A job that writes to a port of another what it reads, one packet a turn."""

    def body(job: RunningJob) -> None:
        for value in job.for_inputs("in"):
            handle(stage, target).input(name).write(value)

    job = stage.job(body)
    return job


def waiting(stage: Stage) -> list[int]:
    return [job_id for (job_id,) in stage.sql("SELECT job_id FROM port_waiters WHERE woken_at IS NULL ORDER BY 1")]


def test_a_run_is_suspended_and_begins_again_when_there_is_room(stage: Stage) -> None:
    target = limited(stage, 2)
    job = writer(stage, target)
    quietly(stage, job.input("in"), *range(5))
    with_notice = stage.sidejob.port_options(notify=False)

    stage.run(job)
    assert (job.refresh().status, on(target.input("in")), on(job.input("in"))) == ("suspended", [0, 1], [2, 3, 4])
    assert waiting(stage) == [job.id]
    with with_notice:
        assert target.input("in").read() == 0
    assert (job.refresh().status, waiting(stage)) == ("queued", [])
    stage.run(job)
    assert (job.refresh().status, on(target.input("in")), on(job.input("in"))) == ("suspended", [1, 2], [3, 4])
    assert list(target.input("in")) == [1, 2]
    stage.run(job)
    assert (job.refresh().status, on(target.input("in")), on(job.input("in"))) == ("completed", [3, 4], [])


def test_a_writer_that_is_terminated_does_not_wait_any_more(stage: Stage) -> None:
    target = limited(stage, 1)
    job = writer(stage, target)
    quietly(stage, job.input("in"), 1, 2)
    stage.run(job)
    assert waiting(stage) == [job.id]
    job.terminate()
    stage.drain()
    assert (job.refresh().status, waiting(stage)) == ("terminated", [])


@pytest.mark.parametrize("reads", ["turns", "taken", "connected"])
def test_the_reader_s_commit_wakes_the_writer_and_all_arrives_in_order(stage: Stage, reads: str) -> None:
    got: list[int] = []

    def body(job: RunningJob) -> None:
        if reads == "connected":
            got.extend(job.input("in").connect_to(job.output("sink")))
            return
        for value in job.for_inputs("in"):
            got.append(value)

    target = limited(stage, 3, body)
    job = writer(stage, target)
    quietly(stage, job.input("in"), *range(20))
    stage.drain()
    assert got == list(range(20))
    assert {stage_job.refresh().status for stage_job in (job, target)} == {"completed"}
    assert waiting(stage) == []


def test_a_parent_that_reads_a_child_s_output_wakes_the_child(stage: Stage) -> None:
    got: list[int] = []

    def kid(job: RunningJob) -> None:
        for value in job.for_inputs("in"):
            job.output("out").write(value)

    def parent(job: RunningJob) -> None:
        if not job.children:
            child = job.enqueue(stage.call, (kid_number,), child_name="kid", outports={"out": {"limit": 2}})
            child.input("in").write_many(range(9))
        for child in job.children.values():
            got.extend(child.output("out"))

    stage._bodies[kid_number := 10_000] = kid
    above = stage.job(parent)
    stage.drain()
    assert got == list(range(9))
    assert above.child("kid").status == "completed"


def test_a_unit_is_not_committed_by_half(stage: Stage) -> None:
    target = limited(stage, 1)
    quietly(stage, target.input("in"), 0)

    def body(job: RunningJob) -> None:
        job.set(seen=job.input("a").read())
        job.output("x").write("first")
        try:
            handle(stage, target).input("in").write(1)
            job.checkpoint()
        except Exception as error:  # the suspension is no Exception
            pytest.fail(repr(error))

    job = stage.job(body)
    quietly(stage, job.input("a"), "a")
    stage.run(job)
    assert (job.refresh().status, job.state, on(job.output("x")), on(job.input("a"))) == ("suspended", {}, [], ["a"])
    target.input("in").read()
    stage.run(job)
    assert (job.refresh().status, job.state, on(job.output("x"))) == ("completed", {"seen": "a"}, ["first"])


def test_what_never_fits_fails_the_run(stage: Stage) -> None:
    target = limited(stage, 1)
    with pytest.raises(PortFullError, match="2 at once never fit"):
        stage.inside(lambda job: handle(stage, target).input("in").write_many([1, 2]))
    assert waiting(stage) == []


def test_a_unit_in_the_callers_transaction_waits_too(stage: Stage) -> None:
    target = limited(stage, 1)
    quietly(stage, target.input("in"), 0)

    def body(job: RunningJob) -> None:
        with LENDERS["psycopg"](stage.database_url) as lender:
            with job.unit(transaction=lender.transaction):
                handle(stage, target).input("in").write(1)
            lender.commit()

    job = stage.job(body)
    stage.run(job)
    assert (job.refresh().status, on(target.input("in"))) == ("suspended", [0])
    target.input("in").read()
    stage.run(job)
    assert (job.refresh().status, on(target.input("in"))) == ("completed", [1])


def test_a_shutdown_is_not_held_up(stage: Stage) -> None:
    target = limited(stage, 1)
    quietly(stage, target.input("in"), 0)

    @stage.task(name="says.goodbye")
    def says_goodbye(job: RunningJob) -> None:
        pass

    @says_goodbye.on_shutdown
    def _(job: RunningJob) -> None:
        handle(stage, target).input("in").write("bye")

    job = says_goodbye.enqueue()
    job.terminate()
    stage.drain()
    assert (job.refresh().status, on(target.input("in"))) == ("terminated", [0, "bye"])


def test_a_limit_that_is_raised_or_a_port_that_goes_wakes_who_waits(stage: Stage) -> None:
    target = limited(stage, 1)
    quietly(stage, target.input("in"), 0)
    job = writer(stage, target)
    quietly(stage, job.input("in"), 1, 2)
    stage.run(job)
    assert waiting(stage) == [job.id]
    target.configure_ports(inports={"in": {"limit": 2}})
    assert job.refresh().status == "queued"
    stage.run(job)
    assert (on(target.input("in")), waiting(stage)) == ([0, 1], [job.id])
    target.terminate()
    stage.drain()
    target.delete()
    stage.drain()
    assert job.refresh().status == "failed"


def test_a_limit_on_packets_that_are_there_counts_from_now_on(stage: Stage) -> None:
    target = stage.inside(lambda job: None, inports=["in"])
    quietly(stage, target.input("in"), 0, 1)
    target.configure_ports(inports={"in": {"limit": 2}})
    job = writer(stage, target)
    quietly(stage, job.input("in"), 2)
    stage.run(job)
    assert job.refresh().status == "suspended"
    target.input("in").read()
    stage.drain()
    assert (job.refresh().status, on(target.input("in"))) == ("completed", [1, 2])


# -- circles ----------------------------------------------------------------------------------------------------------


def test_two_full_ports_that_face_each_other_are_reported(stage: Stage) -> None:
    jobs: dict[str, Job] = {}

    def body(me: str, other: str) -> Callable[[RunningJob], None]:
        def run(job: RunningJob) -> None:
            for value in job.for_inputs("in"):
                handle(stage, jobs[other]).input("in").write_many([value, value])

        return run

    for me, other in (("a", "b"), ("b", "a")):
        jobs[me] = stage.job(body(me, other), inports={"in": {"limit": 2}})
        quietly(stage, jobs[me].input("in"), me, me)
    stage.run(jobs["a"])
    assert jobs["a"].refresh().status == "suspended"
    with pytest.raises(PortFullError, match="neither would go on") as reported:
        stage.run(jobs["b"])
    assert (reported.value.job_id, jobs["b"].refresh().status) == (jobs["a"].id, "failed")
    assert f"job {jobs['a'].id} waits" in str(reported.value)
    assert [on(job.input("in")) for job in jobs.values()] == [["a", "a"], ["b", "b"]]
    jobs["b"].input("in").read()
    jobs["b"].input("in").read()
    assert jobs["a"].refresh().status == "queued"
    stage.run(jobs["a"])


def test_a_job_that_fills_its_own_port_is_reported(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        job.input("in").write_many([1, 2])
        job.checkpoint()
        job.input("in").write(3)

    with pytest.raises(PortFullError, match="wait for itself"):
        stage.inside(body, inports={"in": {"limit": 2}})


def left_behind(stage: Stage, job: Job, other: Job) -> None:
    """A row of a job that has waited in its first run for room on a port of another."""
    port = "INSERT INTO ports (job_id, direction, name, packet_limit) VALUES (%s, 'in', 'once', 1) RETURNING id"
    stage.sql(
        "INSERT INTO port_waiters (port_id, job_id, run_no, needs) VALUES (%s, %s, 1, 1)",
        stage.sql(port, other.id)[0][0], job.id,
    )  # fmt: skip


def test_who_waited_once_and_went_on_closes_no_circle(stage: Stage) -> None:
    """A job that was woken otherwise, and is through, leaves its row behind if its process died with the run's end."""
    first, second = limited(stage, 1), limited(stage, 1)
    writes = [second, first]

    def body(job: RunningJob) -> None:
        if writes:
            handle(stage, writes.pop(0)).input("in").write(1)

    quietly(stage, second.input("in"), 0)
    job = stage.job(body, inports={"in": {"limit": 1}})
    stage.run(job)
    assert waiting(stage) == [job.id]
    job.run()
    stage.run(job)
    quietly(stage, job.input("in"), 5)

    def back(running: RunningJob) -> None:
        handle(stage, job).input("in").write(6)

    other = stage.job(back)
    left_behind(stage, job, other)
    stage.run(other)
    assert other.refresh().status == "suspended"


def test_what_a_job_waited_for_once_closes_no_circle_of_its_own(stage: Stage) -> None:
    other, third = limited(stage, 1), limited(stage, 1)
    targets = [other, third]

    def body(job: RunningJob) -> None:
        handle(stage, targets[0]).input("in").write(1)

    job = stage.job(body, inports={"in": {"limit": 1}})
    quietly(stage, other.input("in"), 0)
    assert stage.run(job) == "suspended"
    targets.pop(0)
    job.run()
    assert stage.run(job) == "completed"
    quietly(stage, job.input("in"), 5)
    jobs = [job, other]

    def back(running: RunningJob) -> None:
        handle(stage, jobs[0]).input("in").write(6)

    with stage.sidejob.port_options(notify=False):
        other = stage.job(back, inports={"in": {"limit": 1}})
    left_behind(stage, job, other)
    assert stage.run(other) == "suspended"
    job.run()
    assert stage.run(job) == "suspended"
    assert waiting(stage) == [job.id, other.id]


GOES = {
    "is made": lambda job: job.input("in").read(),
    "is made by another limit": lambda job: job.configure_ports(inports={"in": {"limit": 5}}),
    "goes with its port": lambda job: job.configure_ports(inports=[]),
    "goes with its job": lambda job: job.delete(),
}


@pytest.mark.parametrize("goes", GOES.values(), ids=GOES)
def test_room_that_a_job_waited_for_once_does_not_run_it_again(stage: Stage, goes: Callable[[Job], Any]) -> None:
    """It was asked otherwise and went on; another run would do again what it has done."""
    target, other = limited(stage, 1), limited(stage, 5)
    quietly(stage, target.input("in"), 0)
    targets = [target]

    def body(job: RunningJob) -> None:
        handle(stage, targets[0]).input("in").write(1)

    job = stage.job(body)
    assert stage.run(job) == "suspended"
    targets[0] = other
    job.run()
    assert stage.run(job) == "completed"
    if goes is GOES["goes with its job"]:
        target.terminate()
        stage.drain()
    goes(target)
    stage.drain()
    assert (on(other.input("in")), job.refresh().status) == ([1], "completed")


# -- races and crashes ------------------------------------------------------------------------------------------------


def test_room_that_is_made_before_the_run_waits_lets_it_begin_again_at_once(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = limited(stage, 1)
    quietly(stage, target.input("in"), 0)
    job = writer(stage, target)
    quietly(stage, job.input("in"), 1)
    real = room.lock

    def after_a_read(*given: Any) -> Any:
        monkeypatch.setattr(room, "lock", real)
        stage.outside(lambda: handle(stage, target).input("in").read())
        return real(*given)

    monkeypatch.setattr(room, "lock", after_a_read)
    stage.run(job)
    assert (job.refresh().status, waiting(stage)) == ("queued", [])
    stage.run(job)
    assert (job.refresh().status, on(target.input("in"))) == ("completed", [1])


def test_a_run_waits_for_a_reader_that_has_not_committed(stage: Stage, aside: Any) -> None:
    target = limited(stage, 1)
    quietly(stage, target.input("in"), 0)
    job = writer(stage, target)
    quietly(stage, job.input("in"), 1)
    with LENDERS["psycopg"](stage.database_url) as lender:
        assert target.input("in").read(transaction=lender.transaction) == 0
        running = aside(stage.run, job)
        stage.wait_for_waiters()
        lender.commit()
        assert running.result(20) == "queued"
    stage.drain()
    assert (job.refresh().status, on(target.input("in"))) == ("completed", [1])


def test_a_reader_waits_for_a_run_that_has_seen_no_room(
    stage: Stage, aside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = limited(stage, 1)
    quietly(stage, target.input("in"), 0)
    job = writer(stage, target)
    quietly(stage, job.input("in"), 1)
    real, reading = room.wait, list[Any]()

    def while_a_client_reads(*given: Any, **options: Any) -> None:
        reading.append(aside(lambda: handle(stage, target).input("in").read()))
        stage.wait_for_waiters()
        real(*given, **options)

    monkeypatch.setattr(room, "wait", while_a_client_reads)
    stage.run(job)
    assert reading[0].result(20) == 0
    stage.drain()
    assert (job.refresh().status, on(target.input("in"))) == ("completed", [1])


@pytest.mark.parametrize("ends", ["is forced", "is read by another", "is deleted"])
def test_who_waits_for_a_terminated_reader_goes_on_when_that_is_settled(stage: Stage, ends: str) -> None:
    target = limited(stage, 1, lambda job: [*job.for_inputs("in")])
    quietly(stage, target.input("in"), 0)
    job = writer(stage, target)
    quietly(stage, job.input("in"), 1)
    assert stage.run(job) == "suspended"
    target.terminate()
    stage.drain()
    assert (job.refresh().status, waiting(stage)) == ("suspended", [job.id])
    if ends == "is forced":
        target.run(force=True)
    elif ends == "is read by another":
        assert target.input("in").read() == 0
    else:
        target.delete()
    stage.drain()
    assert job.refresh().status == ("failed" if ends == "is deleted" else "completed")
    if ends == "is deleted":
        assert isinstance(stage.raised[job.id], JobNotFoundError)


def by_a_run(stage: Stage, port: Any) -> Any:
    read: list[Any] = []
    stage.inside(lambda job: read.extend(handle(stage, port.job).input("in").read_many(9)))
    return read


def in_a_transaction(stage: Stage, port: Any) -> Any:
    with LENDERS["psycopg"](stage.database_url) as lender:
        read = port.read_many(9, transaction=lender.transaction)
        lender.commit()
        return read


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda stage, port: port.read(), 0),
        (lambda stage, port: port.read_many(9), [0, 1, 2]),
        (lambda stage, port: list(port), [0, 1, 2]),
        (in_a_transaction, [0, 1, 2]),
        (by_a_run, [0, 1, 2]),
        (lambda stage, port: port.connect_to(stage.job().input("a")), [0, 1, 2]),
    ],
    ids=["one", "many", "all", "in a transaction", "by a run", "moved"],
)
@pytest.mark.parametrize("later", [[2], []], ids=["some", "all"])
def test_packets_that_a_run_is_marking_are_read_in_their_order(
    stage: Stage, aside: Any, monkeypatch: pytest.MonkeyPatch, read: Any, expected: Any, later: list[int]
) -> None:
    """They were on the port before it had a limit, so a run that begins to wait for room marks them."""
    target = stage.inside(lambda job: None, inports=["in"])
    quietly(stage, target.input("in"), *range(3 - len(later)))
    target.configure_ports(inports={"in": {"limit": 3}})
    quietly(stage, target.input("in"), *later)
    job = writer(stage, target)
    quietly(stage, job.input("in"), 3)
    real, reading, looks = room.mark, list[Any](), list[float]()

    def while_somebody_reads(*given: Any) -> None:
        real(*given)
        if not reading:
            with stage.sidejob.port_options(notify=False):
                reading.append(aside(read, stage, handle(stage, target).input("in")))
            stage.wait_until(lambda: bool(looks or stage.waiters()), message="the reader to be held up")

    monkeypatch.setattr(room, "mark", while_somebody_reads)
    monkeypatch.setattr(read_ahead, "time", SimpleNamespace(sleep=looks.append))  # a run looks again and again
    stage.run(job)
    assert reading[0].result(20) == expected
    stage.drain()
    assert job.refresh().status == "completed"


@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
def test_no_default_of_the_isolation_level_hides_who_waits(
    stage: Stage, aside: Any, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    """A role or a database may have another default than Postgres."""
    monkeypatch.setenv("PGOPTIONS", f"-c default_transaction_isolation={level.replace(' ', chr(92) + ' ')}")
    stage.runtime.connections.close()
    test_a_reader_waits_for_a_run_that_has_seen_no_room(stage, aside, monkeypatch)


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_reader_that_looks_at_an_older_state_does_not_overlook_who_waits(stage: Stage, level: str) -> None:
    target = limited(stage, 1)
    quietly(stage, target.input("in"), 0)
    job = writer(stage, target)
    quietly(stage, job.input("in"), 1)
    with psycopg.connect(stage.database_url) as mine:
        mine.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        mine.execute("SELECT count(*) FROM pg_class")
        assert stage.run(job) == "suspended"
        with pytest.raises(psycopg.errors.SerializationFailure):
            target.input("in").read(transaction=mine)
        mine.rollback()
        assert target.input("in").read(transaction=mine) == 0
    stage.drain()
    assert (job.refresh().status, on(target.input("in"))) == ("completed", [1])


@pytest.mark.parametrize("point", ["take:before-commit", "take:after-commit", "mature:before-commit"])
def test_a_reader_that_dies_leaves_nobody_waiting_for_room_that_is_there(stage: Stage, at: Arm, point: str) -> None:
    target = limited(stage, 1)
    quietly(stage, target.input("in"), 0)
    job = writer(stage, target)
    quietly(stage, job.input("in"), 1)
    stage.run(job)

    def die() -> None:
        raise SystemExit

    at(point, die)
    with pytest.raises(SystemExit):
        target.input("in").read()
    if point == "take:before-commit":
        assert (on(target.input("in")), job.refresh().status) == ([0], "suspended")
        assert target.input("in").read() == 0
    stage.drain()  # what was noted is applied by the sweeper
    assert (job.refresh().status, on(target.input("in"))) == ("completed", [1])


def test_packets_written_before_the_limit_and_committed_later_hide_no_room(stage: Stage, aside: Any) -> None:
    target = limited(stage, 5)
    target.configure_ports(inports=["in"])
    with LENDERS["psycopg"](stage.database_url) as lender, stage.sidejob.port_options(notify=False):
        target.input("in").write("late", transaction=lender.transaction)
        target.configure_ports(inports={"in": {"limit": 1}})
        target.input("in").write("first")
        job = writer(stage, target)
        quietly(stage, job.input("in"), "second")
        assert stage.run(job) == "suspended"
        lender.commit()
        assert target.input("in").read(transaction=lender.transaction) == "late"
        reading = aside(lambda: handle(stage, target).input("in").read())
        stage.wait_for_waiters()
        lender.commit()
        assert reading.result(20) == "first"
    stage.drain()
    assert (job.refresh().status, on(target.input("in"))) == ("completed", ["second"])


# -- many writers -----------------------------------------------------------------------------------------------------

MANY = 28


def crowd(stage: Stage, target: Job, count: int = MANY, *, needs: int = 1) -> list[Job]:
    """Jobs that each wait for room on the port of another, to write so many packets in one unit."""

    def body(job: RunningJob) -> None:
        handle(stage, target).input("in").write_many([job.id] * needs)

    jobs = [stage.job(body) for _ in range(count)]
    assert {stage.run(job) for job in jobs} == {"suspended"}
    return jobs


def full(stage: Stage, limit: int) -> Job:
    target = limited(stage, limit)
    quietly(stage, target.input("in"), *[0] * limit)
    return target


def queued(*jobs: Job) -> list[Job]:
    return [job for job in jobs if job.refresh().status == "queued"]


def time_passes(stage: Stage) -> None:
    """Room that is kept was kept for long enough; the sweeper looks."""
    stage.sql("UPDATE port_waiters SET woken_at = woken_at - interval '1 hour'")
    UnusedRoom(Sweep(stage.runtime)).run_once()


def test_one_packet_read_wakes_one_of_many_writers_in_the_order_in_which_they_began_to_wait(stage: Stage) -> None:
    target = full(stage, 4)
    jobs = crowd(stage, target)
    for place, job in enumerate(jobs):
        target.input("in").read()
        assert queued(*jobs) == [job], "those before it have written, those behind it wait"
        assert stage.run(job) == "completed"
        assert waiting(stage) == [other.id for other in jobs[place + 1 :]]
    assert list(target.input("in")) == [job.id for job in jobs[-4:]]


def test_as_many_are_woken_as_fit_and_none_twice_before_they_have_run(stage: Stage) -> None:
    target = full(stage, 6)
    jobs = crowd(stage, target, 4, needs=2)
    target.input("in").read()
    assert queued(*jobs) == [], "there is room for one packet, and each has two"
    target.input("in").read_many(2)
    assert queued(*jobs) == jobs[:1]
    target.input("in").read()
    assert queued(*jobs) == jobs[:2], "room is kept for the first, which has not run"
    stage.drain()
    target.input("in").read_many(6)
    stage.drain()
    runs = stage.sql("SELECT status, run_no FROM jobs WHERE id = ANY(%s)", [job.id for job in jobs])
    assert runs == [("completed", 2)] * 4


def test_who_needs_more_than_there_is_holds_nobody_up(stage: Stage) -> None:
    target = full(stage, 4)
    large, small = *crowd(stage, target, 1, needs=3), *crowd(stage, target, 1)
    target.input("in").read()
    assert queued(large, small) == [small]
    stage.drain()
    assert large.refresh().status == "suspended"
    target.input("in").read_many(4)
    stage.drain()
    assert large.refresh().status == "completed"


def test_one_that_waits_again_for_more_passes_on_what_was_kept_for_it(stage: Stage) -> None:
    target = full(stage, 3)
    needs = [1, 2, 1]
    grows = stage.job(lambda job: handle(stage, target).input("in").write_many([1] * needs.pop(0)))
    assert stage.run(grows) == "suspended"
    (other,) = crowd(stage, target, 1)
    target.input("in").read()
    assert queued(grows, other) == [grows]
    assert stage.run(grows) == "suspended"
    assert queued(grows, other) == [other]
    assert stage.run(other) == "completed"
    target.input("in").read_many(3)
    stage.drain()
    assert grows.refresh().status == "completed"


def elsewhere(stage: Stage, job: Job) -> None:
    stage._bodies[job.args[0]] = lambda job: job.set(wrote="elsewhere")
    stage.drain()


def fails(stage: Stage, job: Job) -> None:
    def body(job: RunningJob) -> None:
        raise ValueError

    stage._bodies[job.args[0]] = body
    stage.drain()


def is_terminated(stage: Stage, job: Job) -> None:
    job.terminate()
    stage.drain()


def is_deleted(stage: Stage, job: Job) -> None:
    is_terminated(stage, job)
    job.delete()


@pytest.mark.parametrize("ends", [elsewhere, fails, is_terminated, is_deleted])
@pytest.mark.parametrize("is_away", [False, True], ids=["at once", "although the store was away"])
def test_room_that_a_woken_writer_does_not_use_goes_to_the_next(
    stage: Stage, at: Arm, ends: Callable[[Stage, Job], None], is_away: bool
) -> None:
    def away() -> None:
        raise StoreUnavailableError("away")

    target = full(stage, 2)
    first, *others = crowd(stage, target, 3)
    if is_away:  # or the process dies, right after the commit of the run's end
        at("pass-on:before-commit", away)
    target.input("in").read()
    assert queued(first, *others) == [first]
    ends(stage, first)
    if is_away:
        assert waiting(stage) == [job.id for job in others]
        time_passes(stage)
        stage.drain()
    assert waiting(stage) == [others[1].id]
    assert [job.refresh().status for job in others] == ["completed", "suspended"]


@pytest.mark.parametrize("dies", [False, True], ids=["before it begins", "in its run"])
def test_room_is_not_kept_for_ever_for_one_that_is_held_up(stage: Stage, dies: bool) -> None:
    target = full(stage, 2)
    first, *others = crowd(stage, target, 3)
    target.input("in").read()
    worker_id = stage.new_worker()
    if dies:
        assert stage.claim(first, worker_id=worker_id)
    for _ in range(2):
        UnusedRoom(Sweep(stage.runtime)).run_once()
        assert queued(*others) == []
    time_passes(stage)
    assert queued(*others) == others[:1]
    assert stage.run(others[0]) == "completed"
    if dies:
        stage.declare_dead(worker_id)
        Sweeper(stage.runtime).run_once()
    target.input("in").read()
    stage.drain()
    target.input("in").read()
    stage.drain()
    assert ({job.refresh().status for job in (first, *others)}, waiting(stage)) == ({"completed"}, [])


def test_a_run_that_has_written_and_goes_on_keeps_no_room(stage: Stage) -> None:
    target = full(stage, 1)
    goes_on: list[Job] = []

    def body(job: RunningJob) -> None:
        handle(stage, target).input("in").write(1)
        job.checkpoint()
        stage.outside(lambda: handle(stage, target).input("in").read())
        goes_on.extend(queued(*others))

    long = stage.job(body)
    assert stage.run(long) == "suspended"
    others = crowd(stage, target, 2)
    target.input("in").read()
    assert stage.run(long) == "completed"
    assert goes_on == others[:1]


# -- off and free -----------------------------------------------------------------------------------------------------


def test_a_port_without_limit_costs_no_statement(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, real = list[str](), OwnExecutor.run
    monkeypatch.setattr(
        OwnExecutor, "run", lambda self, one, **given: sent.append(one.text) or real(self, one, **given)
    )
    target = stage.inside(lambda job: None)
    job = writer(stage, target)
    quietly(stage, job.input("in"), 1, 2)
    stage.run(job)
    target.input("in").read()
    target.input("in").connect_to(job.input("a"))
    assert not {one.text for one in vars(room).values() if isinstance(one, Statement)} & set(sent)
