"""What SideJob's ports do, and ours do as well, where no other test tells it; by the SJ numbers of the parity page."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import psycopg
import pytest

from celery_sidejob import InvalidChannelError, InvalidPortError, Job, PortNotFoundError, RunningJob
from tests.tools.in_process import Stage


@pytest.fixture
def resting(stage: Stage) -> Job:
    """A completed job with any port."""
    return stage.inside(lambda job: None)


# -- for_inputs ------------------------------------------------------------------------------------------------------


def test_the_memo_of_defaults_is_for_the_set_of_ports_whatever_their_order(stage: Stage) -> None:
    """SJ-208: the ports and their defaults decide, and another set of ports has a turn of its own."""
    turns: list[Any] = []

    def body(job: RunningJob) -> None:
        for names in permutations(["a", "b", "c"]):
            turns.extend(job.for_inputs(*names))
        turns.extend(job.for_inputs("b", "a"))

    job = stage.job(body, inports={name: {"default": name} for name in "abc"})
    stage.run(job)
    assert turns == [("a", "b", "c"), ("b", "a")]
    job.run()
    stage.run(job)
    assert len(turns) == 2
    job.input("c").default = "z"
    job.run()
    stage.run(job)
    assert turns[2:] == [("a", "b", "z")]


def test_defaults_that_change_places_are_other_defaults(stage: Stage) -> None:
    """SJ-208: a memo of values without their ports would not see it."""
    turns: list[Any] = []
    job = stage.job(
        lambda job: turns.extend(job.for_inputs("a", "b")), inports={"a": {"default": 1}, "b": {"default": 2}}
    )
    stage.run(job)
    job.input("a").default, job.input("b").default = 2, 1
    job.run()
    stage.run(job)
    assert turns == [(1, 2), (2, 1)]


def test_a_turn_of_defaults_that_raises_is_tried_again(stage: Stage) -> None:
    """SJ-208: the memo is committed with the turn, and not before it."""
    turns: list[Any] = []

    def body(job: RunningJob) -> None:
        for value in job.for_inputs("a"):
            turns.append(value)
            if len(turns) == 1:
                raise ValueError("once")

    job = stage.job(body, inports={"a": {"default": 1}})
    with pytest.raises(ValueError, match="once"):
        stage.run(job)
    assert job.refresh().status == "failed"
    job.run(force=True)
    assert stage.run(job) == "completed"
    assert turns == [1, 1]


def test_with_some_defaults_and_no_data_there_is_no_turn_and_no_suspension(stage: Stage) -> None:
    """SJ-205."""
    turns: list[Any] = []
    job = stage.job(lambda job: turns.extend(job.for_inputs("a", "b")), inports={"a": {"default": 1}, "b": {}})
    assert stage.run(job) == "completed"
    assert turns == []


def test_a_null_default_is_a_default_and_data_goes_before_it(stage: Stage) -> None:
    """SJ-206."""
    turns: list[Any] = []
    job = stage.job(lambda job: turns.extend(job.for_inputs("a", "b")), inports={"a": {"default": None}, "b": {}})
    job.input("b").write_many([1, 2])
    job.input("a").write(0)
    assert stage.run(job) == "completed"
    assert turns == [(0, 1), (None, 2)]


def test_after_the_data_the_defaults_have_their_turn_in_the_same_run(stage: Stage) -> None:
    """SJ-209."""
    turns: list[Any] = []
    job = stage.job(
        lambda job: turns.extend(job.for_inputs("a", "b")), inports={"a": {"default": 1}, "b": {"default": 2}}
    )
    job.input("a").write(10)
    stage.run(job)
    assert turns == [(10, 2), (1, 2)]


def test_in_a_turn_of_defaults_writes_become_defaults_and_messages_stay_messages(stage: Stage) -> None:
    """SJ-210, SJ-273: a default is no packet, so it is not published, and what is published is a packet."""
    listener = stage.sidejob.enqueue(
        stage.idle, inports={"news": {"channels": ["/news"]}, "sums": {"channels": ["/sums"]}, "a": {}}
    )

    def body(job: RunningJob) -> None:
        for value in job.for_inputs("a"):
            job.output("sum").write(value)
            listener.input("a").write(value)
            stage.sidejob.publish("/news", value)

    job = stage.job(body, inports={"a": {"default": 1}}, outports={"sum": {"channels": ["/sums"]}})
    stage.drain()
    assert (job.output("sum").default, len(job.output("sum"))) == (1, 0)
    assert (listener.input("a").default, len(listener.input("a"))) == (1, 0)
    assert (list(listener.input("news")), len(listener.input("sums"))) == ([1], 0)


# -- configuring -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["a client", "a run"])
def test_configuring_one_direction_leaves_the_other_alone(stage: Stage, how: str) -> None:
    """SJ-250, SJ-252, SJ-255: `inports=` and `outports=` are two things."""

    @stage.task(name="ported", inports=["own"], outports={"own": {"default": 1}})
    def ported(job: RunningJob) -> None:
        pass

    job = ported.enqueue(inports=["a"], outports={"x": {"channels": ["/x"]}})
    job.input("a").write(1)
    job.output("x").write(2)
    job.output("own").default = 5

    def configure(**ports: Any) -> tuple[list[str], list[str]]:
        seen: list[tuple[list[str], list[str]]] = []

        def work(_: Any = None) -> None:
            same = stage.sidejob.get(job.id)
            same.configure_ports(**ports)
            seen.append(([port.name for port in same.inports], [port.name for port in same.outports]))

        if how == "a run":
            stage.inside(work)
        else:
            work()
        assert seen == [([port.name for port in job.inports], [port.name for port in job.outports])]
        return seen[0]

    assert configure(inports=["b"]) == (["b", "own"], ["own", "x"])
    with pytest.raises(PortNotFoundError):
        len(job.input("a"))
    assert (len(job.output("x")), job.output("x").channels, job.output("own").default) == (1, ["/x"], 5)
    job.input("b").write(3)
    assert configure(outports=["y"]) == (["b", "own"], ["own", "y"])
    assert (len(job.input("b")), job.output("own").default) == (1, 1)
    assert configure(outports=[]) == (["b", "own"], ["own"])
    assert configure() == (["own"], ["own"])


def test_what_a_run_writes_to_the_other_direction_before_it_configures_is_kept(stage: Stage) -> None:
    seen: list[Any] = []

    def body(job: RunningJob) -> None:
        job.output("x").write(1)
        seen.append(job.input("a").read())
        job.configure_ports(inports=["new"])
        seen.extend([len(job.output("x")), len(job.output("y"))])
        job.input("new").write(2)

    job = stage.job(body, inports=["a"], outports=["x", "y"])
    job.input("a").write(0)
    job.output("y").write(9)
    stage.run(job)
    assert seen == [0, 1, 1]
    assert (list(job.output("x")), list(job.output("y")), [port.name for port in job.inports]) == ([1], [9], ["new"])


def test_the_given_ports_are_not_changed_and_a_bad_name_configures_nothing(stage: Stage, resting: Job) -> None:
    """SJ-251, and SJ-242: names are checked when ports are configured."""
    given = {"a": {"default": [1]}}
    resting.configure_ports(inports=given)
    resting.input("a").default = [2]
    assert given == {"a": {"default": [1]}}
    for bad in ("a.b", "", "a\nb", "ä"):
        with pytest.raises(InvalidPortError, match="is not a port's name"):
            resting.configure_ports(inports=["b", bad])
        with pytest.raises(InvalidPortError, match="is not a port's name"):
            resting.input(bad)
    assert [port.name for port in resting.inports] == ["a"]


def test_another_default_leaves_the_data(stage: Stage, resting: Job) -> None:
    """SJ-253."""
    resting.configure_ports(inports={"a": {"default": 1}})
    resting.input("a").write(7)
    resting.configure_ports(inports={"a": {"default": 2}})
    assert [resting.input("a").read(), resting.input("a").read()] == [7, 2]


def test_a_lookup_makes_no_port_and_a_name_may_be_of_both_directions(stage: Stage) -> None:
    """SJ-243, SJ-244, SJ-245: only a use that changes something makes a port of `"*"`."""
    job = stage.sidejob.enqueue(stage.idle, inports=["*", "a"], outports=["a"])
    assert (len(job.input("x")), job.input("x").has_data, job.input("x").peek()) == (0, False, [])
    assert [port.name for port in job.inports] == ["a"]
    assert job.input("a") != job.output("a")
    assert job.input("a") != job.input("A")
    job.input("a").write(1)
    assert (len(job.input("a")), len(job.output("a"))) == (1, 0)


@pytest.mark.parametrize("how", ["a client", "a run"])
def test_a_port_that_a_wildcard_makes_has_its_channels(stage: Stage, how: str) -> None:
    """SJ-243, SJ-126: the pattern itself takes no message, and breaks no publication."""
    listener = stage.sidejob.enqueue(
        stage.idle, inports={"*": {"channels": ["/news"]}, "sums": {"channels": ["/sums"]}}
    )
    writer = stage.sidejob.enqueue(stage.idle, outports={"*": {"channels": ["/sums"]}})
    stage.drain()
    assert stage.sidejob.publish("/news", 0) == 0

    def use(_: Any = None) -> None:
        listener.input("a").write(1)
        listener.input("b").default = 2
        writer.output("x").write(3)
        assert (listener.input("b").channels, writer.output("x").channels) == (["/news"], ["/sums"])

    if how == "a run":
        stage.inside(use)
    else:
        use()
    assert stage.sidejob.publish("/news", 4) == 2
    assert (list(listener.input("a")), list(listener.input("b")), list(listener.input("sums"))) == ([1, 4], [4], [3])
    listener.input("c").channels = ["/other"]
    assert (listener.input("c").channels, stage.sidejob.publish("/news", 5)) == (["/other"], 2)


# -- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["input", "output"])
def test_no_channels_are_a_list_without_names_in_both_directions(stage: Stage, direction: str) -> None:
    """SJ-282."""
    port: Any = getattr(stage.job(), direction)("a")
    port.channels = ["/a"]
    for wrong in (None, "/b"):
        with pytest.raises(InvalidChannelError, match="takes a list of channel names"):
            port.channels = wrong
    assert port.channels == ["/a"]
    port.channels = []
    assert port.channels == []


@pytest.mark.parametrize("value", [None, False, 0, ""])
def test_a_false_value_is_data(resting: Job, value: Any) -> None:
    """SJ-261, SJ-266, SJ-267."""
    port = resting.input("a")
    port.write(value)
    assert port.has_data
    assert port.read() == value
    port.default = value
    assert (port.has_data, port.has_default, port.read()) == (True, True, value)


def test_packets_of_a_terminated_job_stay_and_are_read_after_a_forced_run_or_go_with_it(stage: Stage) -> None:
    """SJ-270: whoever writes wakes nobody and gets no error; the packets end with the job."""
    seen: list[Any] = []
    job = stage.job(lambda job: seen.extend(job.input("a")))
    stage.drain()
    job.terminate()
    stage.drain()
    assert job.refresh().status == "terminated"

    job.input("a").write(1)
    stage.drain()
    assert (job.refresh().status, len(job.input("a")), seen) == ("terminated", 1, [])
    job.run(force=True)
    stage.drain()
    assert seen == [1]
    job.terminate()
    stage.drain()
    job.input("a").write(3)
    assert job.refresh().delete()
    assert stage.sql("SELECT count(*) FROM packets") == [(0,)]


# -- channels --------------------------------------------------------------------------------------------------------


def test_what_is_written_to_a_subscribed_port_is_not_published(stage: Stage) -> None:
    """SJ-272, SJ-281: the channels of an input port are subscriptions, and those of an output port are none."""
    first, second = (stage.sidejob.enqueue(stage.idle, inports={"a": {"channels": ["/a"]}}) for _ in range(2))
    writer = stage.sidejob.enqueue(stage.idle, outports={"a": {"channels": ["/a"]}})
    first.input("a").write(1)
    assert (len(first.input("a")), len(second.input("a"))) == (1, 0)
    assert stage.sidejob.publish("/a", 2) == 2
    assert (len(first.input("a")), len(second.input("a")), len(writer.output("a"))) == (2, 1, 0)


def test_four_summing_jobs_wired_by_channels_give_fourteen(stage: Stage) -> None:
    """SJ-133: a source, two jobs that read the same channel, and a job that adds up both their sums."""

    def summing(job: RunningJob) -> None:
        added = sum(job.input("numbers"))
        if added:
            job.set(total=job.get("total", 0) + added)
            job.output("sum").write(added)

    def summer(reads: list[str], writes: list[str]) -> Job:
        return stage.job(summing, inports={"numbers": {"channels": reads}}, outports={"sum": {"channels": writes}})

    source = summer([], ["/numbers"])
    summer(["/numbers"], ["/sums/left"])
    summer(["/numbers"], ["/sums/right"])
    sink = summer(["/sums"], [])
    source.input("numbers").write_many([1, 2, 4])
    stage.drain()
    assert sink.get("total") == 14


@pytest.mark.parametrize("how", ["now", "later", "in a transaction"])
def test_a_terminated_job_subscribes_to_nothing_until_a_forced_run(stage: Stage, how: str) -> None:
    """SJ-121, SJ-270: its ports would fill for ever."""
    job = stage.job(lambda job: None, inports={"a": {"channels": ["/news", "/"]}, "b": {"channels": ["/news"]}})
    other = stage.sidejob.enqueue(stage.idle, inports={"a": {"channels": ["/news"]}})
    stage.drain()
    assert stage.sidejob.publish("/news", 1) == 3
    job.terminate()
    assert stage.sidejob.publish("/news", 2) == 3, "its shutdown may read them"
    stage.drain()
    assert job.refresh().status == "terminated"
    assert stage.sidejob.publish("/news", 3) == 1
    assert (job.input("a").channels, list(other.input("a"))) == (["/news", "/"], [1, 2, 3])

    if how == "in a transaction":
        with psycopg.connect(stage.database_url) as mine:
            job.run(force=True, transaction=mine)
        stage.drain()
    else:
        job.run(force=True, countdown=600 if how == "later" else None)
    assert stage.sidejob.publish("/news", 4) == 3
    assert [packet.value for packet in job.input("a").peek()] == [1, 1, 2, 2, 4, 4]
    assert list(job.input("b")) == [1, 2, 4]


# -- groups and contexts ---------------------------------------------------------------------------------------------


def test_port_options_are_inherited_overridden_and_gone_after_an_error(stage: Stage, resting: Job) -> None:
    """SJ-308, SJ-309, SJ-312."""
    port, options = resting.input("a"), stage.sidejob.port_options

    def fails() -> None:
        with options(log=False, notify=False):
            with options(log=True):
                port.write("inner")
            port.write("outer")
            raise ValueError("out")

    with pytest.raises(ValueError, match="out"):
        fails()
    assert resting.refresh().status == "completed"
    port.write("after")
    found = [port.read_packet() for _ in range(3)]
    assert [packet.value for packet in found if packet] == ["inner", "outer", "after"]
    assert [packet.options.get("log", True) for packet in found if packet] == [True, False, True]
    assert resting.refresh().status == "queued"


def test_a_context_is_gone_after_an_error_and_nested_ones_unwind(stage: Stage, resting: Job) -> None:
    """SJ-129, SJ-310, SJ-312."""
    port, context = resting.input("a"), stage.sidejob.context

    def fails() -> None:
        with context(a=1, c=4):
            with context(b=2, a=3):
                port.write(1)
            port.write(2)
            raise ValueError("out")

    with pytest.raises(ValueError, match="out"):
        fails()
    port.write(3)
    found = [port.read_packet() for _ in range(3)]
    assert [packet.context for packet in found if packet] == [{"a": 3, "b": 2, "c": 4}, {"a": 1, "c": 4}, {}]
