"""Ports, channels, and the values that go through them; `for_inputs`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest

from celery_sidejob import NO_DATA, InvalidValueError, Job, PortNotFoundError, RunningJob
from celery_sidejob.store import packets
from celery_sidejob.unit.open_unit import within
from celery_sidejob.unit.read_ahead import READ_AHEAD
from tests.tools.in_process import Stage

VALUES: list[Any] = [
    None, False, True, 0, -1, 2**100, 0.1, "", "a\0b", "\u20ac", [], {}, [None, [1]], {"b": 1, "a": {"c": None}},
    {"__type__": "datetime", "__value__": "no"}, datetime(2026, 1, 2, 3, 4, 5, 678, UTC), date(2026, 1, 2),
    Decimal("1.10"), UUID(int=7),
]  # fmt: skip


@pytest.fixture
def resting(stage: Stage) -> Job:
    """A completed job with any port."""
    return stage.inside(lambda job: None)


# -- outside of runs -------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_equal_and_in_order(stage: Stage, resting: Job) -> None:
    port = resting.input("a")
    for value in VALUES:
        port.write(value)

    assert len(port) == len(VALUES)
    assert [packet.value for packet in port.peek()] == VALUES
    read = [port.read() for _ in VALUES]
    assert read == VALUES
    assert [type(value) for value in read] == [type(value) for value in VALUES]
    assert list(read[13]) == ["b", "a"]
    assert port.read() is NO_DATA
    assert (len(port), port.has_data, port.peek()) == (0, False, [])


def test_write_many_is_one_transaction_in_order(stage: Stage, resting: Job) -> None:
    port = resting.output("x")
    port.write_many(iter([3, 1, 2]))
    port.write_many([])
    with pytest.raises(InvalidValueError):
        port.write_many([4, float("nan")])

    assert list(port) == [3, 1, 2]
    assert list(port) == []


def test_reading_a_packet_tells_its_context_options_and_time(stage: Stage, resting: Job) -> None:
    port = resting.input("a")
    with stage.sidejob.context(user="ann", n=1), stage.sidejob.context(n=2), stage.sidejob.port_options(log=False):
        port.write("x")
    port.write("y")

    first, second = port.read_packet(), port.read_packet()
    assert first is not None
    assert second is not None
    assert (first.value, first.context, first.options) == ("x", {"user": "ann", "n": 2}, {"log": False})
    assert (second.value, second.context, second.options) == ("y", {}, {})
    assert first.written_at is not None
    assert second.written_at is not None
    assert first.written_at <= second.written_at
    assert port.read_packet() is None


def test_a_default_is_read_any_number_of_times_and_wakes_nobody(stage: Stage, resting: Job) -> None:
    port = resting.input("a")
    assert (port.default, port.has_default, port.has_data) == (NO_DATA, False, False)
    port.default = None

    assert (port.default, port.has_default, port.has_data, len(port)) == (None, True, True, 0)
    assert [port.read(), port.read()] == [None, None]
    assert port.read_packet() is None
    assert list(port) == []
    assert resting.refresh().status == "completed", "a default wakes nobody"
    port.write(1)
    assert [port.read(), port.read()] == [1, None]
    port.default = {"a": 1}
    assert resting.input("a").default == {"a": 1}
    del port.default
    assert (port.read(), port.has_default) == (NO_DATA, False)
    port.default = 5
    port.default = NO_DATA
    assert not port.has_default


def test_a_write_asks_the_reader_to_run(stage: Stage) -> None:
    parent = stage.inside(lambda job: None)
    child = stage.idle.enqueue(parent=parent, child_name="kid")
    stage.drain()
    alone = stage.inside(lambda job: None)

    child.output("x").write(1)
    assert (parent.refresh().status, child.refresh().status) == ("queued", "completed")
    stage.drain()
    child.input("x").write(1)
    assert (parent.refresh().status, child.refresh().status) == ("completed", "queued")
    alone.output("x").write(1)
    assert alone.refresh().status == "completed"
    stage.drain()


def test_notify_false_asks_nobody_and_set_default_writes_the_default(stage: Stage, resting: Job) -> None:
    port = resting.input("a")
    with stage.sidejob.port_options(notify=False):
        port.write(1)
        with stage.sidejob.port_options(set_default=True):  # what is not given is inherited
            port.write_many([2, 3])
    assert (resting.refresh().status, len(port), port.default) == ("completed", 1, 3)
    with stage.sidejob.port_options(set_default=True):
        port.write(4)
    assert (resting.refresh().status, len(port), port.default) == ("queued", 1, 4)


def test_a_write_to_a_job_that_may_not_run_stays(stage: Stage) -> None:
    job = stage.job(lambda job: 1 / 0 if not job.input("a").read() else None)
    stage.drain()
    job.input("a").write(True)

    assert job.refresh().status == "failed"
    assert len(job.input("a")) == 1
    job.run(force=True)
    stage.drain()
    assert job.refresh().status == "completed"


def test_ports_are_the_tasks_own_and_the_jobs(stage: Stage) -> None:
    @stage.task(name="ported", inports={"a": {"default": 1}, "b": None}, outports=["c"])
    def ported(job: RunningJob) -> None:
        pass

    job = ported.enqueue(inports={"a": {"default": 2}, "d": {"channels": ["/d"]}}, outports=["e"])
    assert [port.name for port in job.inports] == ["a", "b", "d"]
    assert [port.name for port in job.outports] == ["c", "e"]
    assert (job.input("a").default, job.input("d").channels) == (2, ["/d"])
    assert job.input("a") == job.input("a") != job.input("b")
    assert len({job.input("a"), job.input("a"), job.output("c")}) == 2
    assert job.input("a").job == job
    unknown = job.input("c")
    for use in (lambda: unknown.write(1), unknown.read, unknown.peek, lambda: len(unknown), lambda: unknown.default):
        with pytest.raises(PortNotFoundError, match="it has: a, b, d"):
            use()

    job.input("b").write(1)
    job.configure_ports(inports=["z"])
    assert [port.name for port in job.inports] == ["a", "b", "z"]
    assert [port.name for port in job.outports] == ["c", "e"]
    assert (job.input("a").default, len(job.input("b"))) == (1, 1)


def test_a_wildcard_allows_further_ports_with_its_default(stage: Stage) -> None:
    job = stage.sidejob.enqueue(stage.idle, inports={"*": {"default": 0}}, outports=["only"])
    assert job.inports == []
    assert job.input("new").read() == 0
    job.input("new").write(5)
    assert [port.name for port in job.inports] == ["new"]
    assert [job.input("new").read(), job.input("new").read()] == [5, 0]
    job.input("new2").channels = ["/x"]
    assert (job.input("new2").default, job.input("new2").channels) == (0, ["/x"])


# -- channels --------------------------------------------------------------------------------------------------------


def test_publish_reaches_a_port_once_for_each_level_to_which_it_subscribes(stage: Stage) -> None:
    def subscriber(*channels: str) -> Job:
        return stage.sidejob.enqueue(stage.idle, inports={"in1": {"channels": list(channels)}})

    here, above, both, root = subscriber("/a/b"), subscriber("/a"), subscriber("/a", "/a/b"), subscriber("/")
    subscriber("/a/bc")
    stage.drain()

    assert stage.sidejob.publish("/a/b", {"n": 1}) == 4
    assert stage.sidejob.count_jobs() == {"queued": 4, "completed": 1}
    for job, copies in ((here, 1), (above, 1), (both, 2), (root, 1)):
        packets = job.input("in1").peek()
        assert [(packet.value, packet.context) for packet in packets] == [({"n": 1}, {"channel": "/a/b"})] * copies
    assert stage.sidejob.publish("/nobody/here", 1) == 1  # the root's
    here.input("in1").channels = []
    assert here.input("in1").channels == []
    assert stage.sidejob.publish("/a/b", 2) == 3


def test_an_outport_with_channels_publishes_what_is_written(stage: Stage) -> None:
    reader = stage.sidejob.enqueue(stage.idle, inports={"in1": {"channels": ["/sums"]}})
    writer = stage.sidejob.enqueue(stage.idle, outports={"sum": {"channels": ["/sums"]}})
    stage.drain()
    with stage.sidejob.context(k=1):
        writer.output("sum").write_many([1, 2])

    packets = reader.input("in1").peek()
    assert [(packet.value, packet.context) for packet in packets] == [
        (1, {"k": 1, "channel": "/sums"}), (2, {"k": 1, "channel": "/sums"}),
    ]  # fmt: skip
    assert len(writer.output("sum")) == 2
    assert reader.refresh().status == "queued"


def test_a_wide_publish_reaches_everybody(stage: Stage) -> None:
    made = stage.sidejob.enqueue_many(
        {"task": "stage.idle", "inports": {"in1": {"channels": ["/wide"]}}} for _ in range(100)
    )
    stage.drain()

    assert stage.sidejob.publish("/wide", "x") == 100
    assert stage.sidejob.count_jobs() == {"queued": 100}
    stage.drain()
    assert {job.input("in1").read() for job in made} == {"x"}


def test_a_job_publishes_on_its_own_channel(stage: Stage, resting: Job) -> None:
    listener = stage.sidejob.enqueue(stage.idle, inports={"in1": {"channels": [f"/sidejob/job/{resting.id}"]}})
    resting.publish("hello")
    assert listener.input("in1").read() == "hello"


def test_a_unit_that_subscribes_and_publishes_reads_its_own_writes(stage: Stage) -> None:
    outside = stage.sidejob.enqueue(stage.idle, inports={"in1": {"channels": ["/late"]}})

    def body(job: RunningJob) -> None:
        job.enqueue(stage.idle, child_name="kid", inports={"in1": {"channels": ["/news"]}})
        job.output("o").channels = ["/late"]
        job.output("o").write("from the new channel")
        stage.sidejob.publish("/news", "for the new child")

    job = stage.inside(body)
    kid = job.child("kid")
    assert kid is not None
    assert kid.input("in1").read() == "for the new child"
    assert outside.input("in1").read() == "from the new channel"


def test_setting_channels_in_a_unit_keeps_the_new_ports_default(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        kid = job.enqueue(stage.idle, child_name="kid", inports={"a": {"default": 7}})
        kid.input("a").channels = ["/x"]

    kid = stage.inside(body).child("kid")
    assert kid is not None
    assert (kid.input("a").default, kid.input("a").channels) == (7, ["/x"])


def test_ports_configured_in_a_unit_can_be_used_in_it(stage: Stage) -> None:
    other = stage.job(inports=["old"])

    def body(job: RunningJob) -> None:
        other.configure_ports(inports={"fresh": {"default": 1}})
        other.input("fresh").write(2)
        assert [other.input("fresh").read_packet().value, other.input("fresh").read()] == [2, 1]  # type: ignore[union-attr]
        other.input("fresh").write(3)

    stage.inside(body)
    assert list(other.input("fresh")) == [3]


# -- inside of runs --------------------------------------------------------------------------------------------------


def test_what_a_run_read_is_gone_with_its_commit_and_back_after_a_failure(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        port = job.input("a")
        assert (len(port), port.has_data) == (3, True)
        first = port.read()
        assert (len(port), [packet.value for packet in port.peek()]) == (2, [2, 3])
        assert first == 1
        if job.run_no == 1:
            raise RuntimeError
        assert list(port) == [2, 3]
        assert (len(port), port.has_data, port.read()) == (0, False, NO_DATA)

    job = stage.job(body)
    with stage.sidejob.port_options(notify=False):
        job.input("a").write_many([1, 2, 3])
    with pytest.raises(RuntimeError):
        stage.run(job)
    assert [packet.value for packet in job.input("a").peek()] == [1, 2, 3]
    job.run(force=True)
    assert stage.run(job) == "completed"
    assert stage.row_counts()["packets"] == 0


def test_a_run_reads_what_came_while_it_ran(stage: Stage) -> None:
    def body(job: RunningJob) -> list[Any]:
        assert job.input("a").read() is NO_DATA
        stage.sql("INSERT INTO packets (port_id, value) SELECT id, '1' FROM ports WHERE name = 'a'")
        assert job.input("a").read() == 1
        return []

    stage.inside(body, inports=["a"])


def test_a_run_reads_its_childrens_outputs(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        kid = job.child("kid")
        assert kid is not None
        port = kid.output("o")
        assert (len(port), port.peek(1)[0].value) == (2, "x")
        assert port.read() == "x"
        assert len(port) == 1
        job.set(read=[*job.get("read", []), "x", *port])

    parent = stage.job(body)
    kid = stage.idle.enqueue(parent=parent, child_name="kid")
    with stage.sidejob.port_options(notify=False):
        kid.output("o").write_many(["x", "y"])
    stage.run(parent)
    assert parent.state == {"read": ["x", "x", "y"][1:]}
    assert len(kid.output("o")) == 0


def test_what_a_failed_run_took_of_others_ports_is_free_again(stage: Stage) -> None:
    other = stage.inside(lambda job: None)
    with stage.sidejob.port_options(notify=False):
        other.output("o").write_many([1, 2])
    with pytest.raises(ZeroDivisionError):
        stage.inside(lambda job: [*other.output("o"), 1 / 0])

    assert list(other.output("o")) == [1, 2]


def test_packets_of_a_run_tell_which_job_wrote_them(stage: Stage, resting: Job) -> None:
    job = stage.inside(lambda job: resting.input("a").write(1))
    packet = resting.input("a").read_packet()
    assert packet is not None
    assert packet.context == {"job": job.id}


# -- for_inputs ------------------------------------------------------------------------------------------------------


def adder(job: RunningJob) -> None:
    """Write the sum of each pair."""
    for a, b in job.for_inputs("a", "b"):
        job.output("sum").write(a + b)


def test_for_inputs_takes_one_value_of_each_port_per_turn(stage: Stage) -> None:
    job = stage.job(adder, outports=["sum"], inports=["a", "b"])
    with stage.sidejob.port_options(notify=False):
        job.input("a").write_many([1, 2, 3])
        job.input("b").write_many([10, 20, 30])
    assert stage.run(job) == "completed"
    assert list(job.output("sum")) == [11, 22, 33]


def test_a_turn_has_the_values_in_the_order_of_the_names_and_the_oldest_first(stage: Stage) -> None:
    turns: list[Any] = []
    job = stage.job(lambda job: turns.extend(job.for_inputs("b", "a")))
    with stage.sidejob.port_options(notify=False):
        job.input("a").write_many([1, 2])
        job.input("b").write_many([10, 20])
    assert stage.run(job) == "completed"
    assert turns == [(10, 1), (20, 2)]


def test_for_inputs_suspends_when_some_have_data_and_goes_on_later(stage: Stage) -> None:
    job = stage.job(adder)
    assert stage.run(job) == "completed"  # nothing at all to do
    job.input("a").write_many([1, 2])
    assert stage.run(job) == "suspended"
    job.input("b").write(10)
    assert stage.run(job) == "suspended"
    assert (list(job.output("sum")), len(job.input("a"))) == ([11], 1)
    job.input("b").write(20)
    assert stage.run(job) == "completed"
    assert list(job.output("sum")) == [22]


def test_for_inputs_of_one_port_yields_values_and_of_none_nothing(stage: Stage) -> None:
    seen: list[Any] = []
    job = stage.job(lambda job: [seen.extend(job.for_inputs("a")), seen.extend(job.for_inputs())])
    with stage.sidejob.port_options(notify=False):
        job.input("a").write_many([None, False])
    stage.run(job)
    assert seen == [None, False]


def test_a_default_stands_in_while_another_port_has_data(stage: Stage) -> None:
    job = stage.job(adder, inports={"a": None, "b": {"default": 100}})
    with stage.sidejob.port_options(notify=False):
        job.input("a").write_many([1, 2, 3])
        job.input("b").write(10)
    assert stage.run(job) == "completed"
    assert list(job.output("sum")) == [11, 102, 103]


def test_with_only_defaults_there_is_one_turn_and_its_writes_become_defaults(stage: Stage) -> None:
    turns: list[Any] = []

    def body(job: RunningJob) -> None:
        for _ in range(2):
            for a, b in job.for_inputs("a", "b"):
                turns.append((a, b))
                job.output("sum").write(a + b)

    job = stage.job(body, inports={"a": {"default": 1}, "b": {"default": 2}})
    stage.run(job)
    assert turns == [(1, 2)]
    assert (len(job.output("sum")), job.output("sum").default) == (0, 3)
    job.run()
    stage.run(job)
    assert turns == [(1, 2)]
    job.input("a").default = 5
    job.run()
    stage.run(job)
    assert turns == [(1, 2), (5, 2)]
    assert job.output("sum").default == 7
    job.input("a").write(10)
    stage.run(job)
    assert turns[2:] == [(10, 2)]
    assert list(job.output("sum")) == [12]


def test_the_default_of_a_wildcard_counts_in_for_inputs(stage: Stage) -> None:
    seen: list[Any] = []
    job = stage.job(lambda job: seen.extend(job.for_inputs("x", "y")), inports={"*": {"default": 0}})
    stage.run(job)
    assert seen == [(0, 0)]
    job.input("x").write(1)
    stage.run(job)
    assert seen == [(0, 0), (1, 0)]


def units_of(stage: Stage, job: Job) -> list[int]:
    """Have each commit's number of packets left behind noted by the database itself."""
    stage.sql("CREATE TABLE IF NOT EXISTS public.units (job_id bigint, n serial)")
    stage.sql("""
        CREATE OR REPLACE FUNCTION public.note_unit() RETURNS trigger LANGUAGE plpgsql AS
        $$BEGIN INSERT INTO public.units (job_id) VALUES (new.id); RETURN new; END$$""")
    stage.sql("""
        CREATE OR REPLACE TRIGGER note_unit AFTER UPDATE ON jobs FOR EACH ROW
        WHEN (new.unit_no > old.unit_no) EXECUTE FUNCTION public.note_unit()""")
    stage.sql("DELETE FROM public.units")
    try:
        stage.run(job)
        return [n for (n,) in stage.sql("SELECT n FROM public.units WHERE job_id = %s ORDER BY n", job.id)]
    finally:
        stage.sql("DROP TRIGGER note_unit ON jobs")
        stage.sql("DROP TABLE public.units")


@pytest.mark.parametrize(
    ("options", "commits"),
    [({}, 10), ({"commit_every": 4}, 2), ({"commit_every": 100}, 0), ({"commit_every": 100, "commit_within": 0}, 10)],
)
def test_commit_every_and_commit_within_bound_a_unit(stage: Stage, options: dict[str, Any], commits: int) -> None:
    job = stage.job(lambda job: [job.output("o").write(value) for value in job.for_inputs("a", **options)])
    with stage.sidejob.port_options(notify=False):
        job.input("a").write_many(range(10))

    assert len(units_of(stage, job)) == commits  # the rest goes with the end
    assert list(job.output("o")) == list(range(10))


def test_a_failing_turn_takes_back_its_own_unit_only(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        for value in job.for_inputs("a", commit_every=2):
            job.output("o").write(value)
            if value == 3 and job.run_no == 1:
                raise RuntimeError

    job = stage.job(body)
    with stage.sidejob.port_options(notify=False):
        job.input("a").write_many(range(6))
    with pytest.raises(RuntimeError):
        stage.run(job)
    assert [packet.value for packet in job.output("o").peek()] == [0, 1]
    assert [packet.value for packet in job.input("a").peek()] == [2, 3, 4, 5]
    job.run(force=True)
    stage.run(job)
    assert list(job.output("o")) == list(range(6))


def test_inputs_that_another_reader_took_are_not_processed_twice(stage: Stage) -> None:
    """The run had looked ahead; its commit is refused and the run begins again with what is left."""
    seen: list[Any] = []

    def body(job: RunningJob) -> None:
        for value in job.for_inputs("a", commit_every=10):
            seen.append(value)
            if len(seen) == 1:
                stage.sql("DELETE FROM packets WHERE value::text = '2'")  # as a client's read does
            job.output("o").write(value)

    job = stage.job(body)
    with stage.sidejob.port_options(notify=False):
        job.input("a").write_many([1, 2, 3])
    assert stage.run(job) == "queued"
    assert stage.run(job) == "completed"
    assert seen == [1, 2, 3, 1, 3]
    assert list(job.output("o")) == [1, 3]
    assert job.info["losses"] == 0


@pytest.mark.parametrize("turn", ["a turn", "a block"])
def test_a_client_that_reads_on_makes_a_run_begin_again_once(stage: Stage, turn: str) -> None:
    """After the first refusal the run takes its packets before it goes on with them, and the client has others."""

    def read() -> None:
        value = stage.sidejob.get(job.id).input("a").read()
        if value is not NO_DATA:
            elsewhere.append(value)

    def body(job: RunningJob) -> None:
        for value in job.for_inputs("a"):
            stage.outside(read)
            if turn == "a turn":
                job.output("o").write(value)
                continue
            with stage.connect(autocommit=False) as connection:
                with job.unit(transaction=connection):
                    job.output("o").write(value)

    elsewhere: list[int] = []
    job = stage.job(body)
    with stage.sidejob.port_options(notify=False):
        job.input("a").write_many(range(250))
    assert stage.run(job) == "queued"
    assert stage.run(job) == "completed"
    processed = list(job.output("o"))
    assert processed == sorted(processed)
    assert sorted(processed + elsewhere) == list(range(250))
    assert elsewhere[0] == 0, "what the first run had only looked at"
    assert len(processed) > 100
    job.run()
    job.input("a").write_many([1, 2])
    assert stage.run(job) == "queued", "a job that has rested looks first again"


@pytest.mark.parametrize("direction", ["in", "out"])
def test_packets_that_a_run_has_taken_are_counted_and_shown_to_it(stage: Stage, direction: str) -> None:
    """Also those of its own ports: an output port, or an input port that another reader has read."""

    def body(job: RunningJob) -> None:
        port = job.input("p") if direction == "in" else job.output("p")
        if direction == "in" and job.run_no == 1:
            port.read()
            stage.sql("DELETE FROM packets WHERE value::text = '0'")  # as a client's read does
            return
        reading = iter(port)
        first = next(reading)
        seen.append((first, len(port), [packet.value for packet in port.peek()]))

    seen: list[Any] = []
    job = stage.job(body)
    with stage.sidejob.port_options(notify=False):
        (job.input("p") if direction == "in" else job.output("p")).write_many(range(4))
    if direction == "in":
        assert stage.run(job) == "queued"
    assert stage.run(job) == "completed"
    assert seen == ([(1, 2, [2, 3])] if direction == "in" else [(0, 3, [1, 2, 3])])
    assert [packet.value for packet in (job.input("p") if direction == "in" else job.output("p")).peek()] == seen[0][2]


@pytest.mark.parametrize("how", ["by its first use", "by configure_ports"])
def test_a_port_that_a_run_has_made_is_known_to_it_after_its_commit(stage: Stage, how: str) -> None:
    def body(job: RunningJob) -> None:
        if how == "by configure_ports":
            job.configure_ports(inports={"new": {}, "*": {}})
        job.input("new").write(1)
        job.checkpoint()
        seen.append(job.input("new").read())

    seen: list[Any] = []
    stage.run(stage.job(body))
    assert seen == [1]


@pytest.mark.parametrize(
    "make",
    [
        lambda job: job.configure_ports(inports={"new": {}, "*": {}}),
        lambda job: setattr(job.input("new"), "default", 0),
        lambda job: setattr(job.input("new"), "channels", ["/news"]),
    ],
    ids=["configure_ports", "default", "channels"],
)
def test_what_others_write_to_a_port_that_a_run_has_made_is_there_for_it(
    stage: Stage, make: Callable[[RunningJob], None]
) -> None:
    def body(job: RunningJob) -> None:
        assert len(job.input("new")) == 0
        make(job)
        job.checkpoint()
        with within(None):
            stage.sidejob.get(job.id).input("new").write(1)
        seen.append(job.input("new").read())

    seen: list[Any] = []
    stage.run(stage.job(body))
    assert seen == [1]


def test_a_pipeline_of_jobs_moves_everything_in_order(stage: Stage) -> None:
    def forward(job: RunningJob) -> None:
        for value in job.for_inputs("a", commit_every=7):
            for follower in job.children.values():
                follower.input("a").write(value)
            job.output("o").write(value)

    first = stage.job(forward)
    jobs = [first]
    for n in range(3):
        number = 1000 + n
        stage._bodies[number] = forward
        jobs.append(stage.call.enqueue((number,), parent=jobs[-1], child_name="next"))
    first.input("a").write_many(range(100))
    stage.drain()

    assert all(later.id > earlier.id for earlier, later in pairwise(jobs))
    assert all(list(job.output("o")) == list(range(100)) for job in jobs)


def test_commit_every_is_checked(stage: Stage) -> None:
    with pytest.raises(InvalidValueError, match="commit_every"):
        stage.inside(lambda job: list(job.for_inputs("a", commit_every=0)))


def test_a_long_queue_is_read_in_pages(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    job = stage.job(lambda job: job.set(total=sum(job.for_inputs("a", commit_every=50))))
    job.input("a").write_many(range(1000))
    pages: list[int] = []
    read_ahead = packets.read_ahead

    def counted(*args: Any, **options: Any) -> Any:
        rows = read_ahead(*args, **options)
        pages.append(sum(row.id is not None for row in rows))
        return rows

    monkeypatch.setattr(packets, "read_ahead", counted)
    assert stage.run(job) == "completed"
    assert pages[: 1000 // READ_AHEAD] == [READ_AHEAD] * (1000 // READ_AHEAD)
    assert sum(pages) == 1000
    assert job.state == {"total": sum(range(1000))}


def test_a_long_unit_reads_longer_pages(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look passes over what the unit has read, so their number must not grow with it."""
    job = stage.job(lambda job: job.set(total=sum(job.for_inputs("a", commit_every=1000))))
    job.input("a").write_many(range(1000))
    limits: list[int] = []
    read_ahead = packets.read_ahead

    def noted(*args: Any, **options: Any) -> Any:
        limits.append(options["limit"])
        return read_ahead(*args, **options)

    monkeypatch.setattr(packets, "read_ahead", noted)
    assert stage.run(job) == "completed"
    assert limits[:5] == [READ_AHEAD, READ_AHEAD, 2 * READ_AHEAD, 4 * READ_AHEAD, 8 * READ_AHEAD]
    assert job.state == {"total": sum(range(1000))}
