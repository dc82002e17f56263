"""The Hypothesis machine that does the same with the store and with the model, and compares them after each rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from tests.dataflow import script as scripts
from tests.dataflow.model import NONE, Key, World
from tests.dataflow.real import Real
from tests.dataflow.script import Script
from tests.twins.machine import NEW, Counted, Twins, same

PARENTS = (None, 0, None)
"""Of three jobs the second is a child of the first."""
INS, OUTS = ("a", "b", "c"), ("o", "p")
CHANNELS = ("/all", "/all/x", "/all/x/y", "/all/z")
"""Not all there are: reads and writes are logged on one below `/`."""

jobs = st.sampled_from(range(len(PARENTS)))
in_keys = st.tuples(jobs, st.just("in"), st.sampled_from(INS))
out_keys = st.tuples(jobs, st.just("out"), st.sampled_from(OUTS))
keys = st.one_of(in_keys, in_keys, out_keys)
channel_lists = st.lists(st.sampled_from(CHANNELS), unique=True, max_size=2)
defaults = st.sampled_from([NONE, None, False, "d", [1]])
options = st.fixed_dictionaries(
    {}, optional={"default": defaults.filter(lambda value: value is not NONE), "channels": channel_lists}
)


def ports(*names: str) -> Any:
    """Options of some of these ports, and perhaps of a pattern."""
    pattern = st.fixed_dictionaries({}, optional={"*": st.sampled_from([{}, {"default": "any"}])})
    named = st.dictionaries(st.sampled_from(names), options, max_size=len(names))
    return st.builds(lambda first, second: first | second, named, pattern)


values = st.lists(st.just(NEW), min_size=1, max_size=3)
PORT = "a port"
"""Stands for the port that a rule is about: two clients mostly meet there."""
changes = st.one_of(
    st.tuples(st.just("write"), st.just(PORT), values, st.sampled_from(["plain", "plain", "quiet", "default"])),
    st.tuples(st.just("set_default"), st.just(PORT), defaults),
    st.tuples(st.just("set_channels"), st.just(PORT), channel_lists),
    st.tuples(st.just("configure"), jobs, st.none() | ports("a", "b", "c"), st.none() | ports("o", "p")),
    st.tuples(st.just("publish"), st.sampled_from(CHANNELS), st.just(NEW)),
    st.tuples(st.just("connect"), st.just(PORT), st.lists(keys, min_size=1, max_size=2, unique=True)),
)
"""What two clients may do at once."""
looks = st.one_of(
    st.tuples(st.just("read"), keys),
    st.tuples(st.just("read_in_transaction"), keys, st.booleans()),
    st.tuples(st.just("read_many"), keys, st.integers(1, 4)),
    st.tuples(st.just("drain"), keys),
    st.tuples(st.just("measure"), keys),
    st.tuples(st.just("write_in_transaction"), keys, values, st.booleans()),
    st.tuples(st.just("ask"), jobs, st.booleans()),
)
blocks = st.tuples(
    st.just("block"),
    st.just(NEW),
    st.none() | keys,
    st.sampled_from(
        ["commit", "commit", "commit", "roll back", "roll back", "crash in it", "crash before", "crash after"]
    ),
)


OWN = -1
"""Stands for the job whose run it is."""
steps = st.one_of(
    st.tuples(st.just("write"), keys, values),
    st.tuples(st.just("write"), keys, values),
    st.tuples(st.just("publish"), st.sampled_from(CHANNELS), st.just(NEW)),
    st.tuples(st.just("set_default"), keys, defaults.filter(lambda value: value is not NONE)),
    st.tuples(st.just("read"), st.sampled_from([(OWN, "in", "c"), (OWN, "in", "a"), (OWN, "child", "o")])),
    st.tuples(st.just("checkpoint")),
    st.tuples(st.just("crash"), st.sampled_from(["before", "after"])),
    st.tuples(st.just("fail")),
    st.tuples(st.just("meanwhile"), st.just("write"), keys, values, st.sampled_from(["plain", "quiet"])),
    blocks,
    blocks,
    blocks,
)
scripts_of_runs = st.builds(
    Script,
    st.sampled_from([("a",), ("a",), ("a", "b"), ("b", "a")]),
    st.sampled_from([1, 1, 2]),
    st.lists(st.lists(steps, min_size=1, max_size=3).map(tuple), min_size=1, max_size=4).map(tuple),
    st.sampled_from(["", "", "", "", "before", "after"]),
)


class Dataflow(Twins):
    """Three jobs, their clients and their runs."""

    real: Real
    act = staticmethod(scripts.do)

    @staticmethod
    def shown(world: World) -> tuple[list[Any], list[Any]]:
        """Return jobs with their ports, and effects."""
        seen = [
            (
                node.status,
                {
                    key: ([] if port.default is NONE else [port.default], port.channels, port.packets)
                    for key, port in node.ports.items()
                },
            )
            for node in world.jobs
        ]
        return seen, world.effects

    @initialize()
    def begin(self) -> None:
        self.world = World(PARENTS)
        self.real.begin(PARENTS)

    @rule(port=keys, call=changes | looks)
    def client(self, port: Key, call: Any) -> None:
        self.do(self._at(port, call))

    @rule(port=keys, first=changes, second=changes)
    def two_clients(self, port: Key, first: Any, second: Any) -> None:
        self.meet(self._at(port, first), self._at(port, second))

    @rule(job=jobs, script=scripts_of_runs, waiting=st.integers(1, 4))
    def run_with_packets(self, job: int, script: Script, waiting: int) -> None:
        for name in script.names:
            if ("in", name) in self.world.jobs[job].ports:
                self.do(self.numbered(("write", (job, "in", name), [NEW] * waiting, "plain")))
        self._run(job, script)

    @rule(job=jobs, script=scripts_of_runs, default=defaults)
    def run_with_defaults(self, job: int, script: Script, default: Any) -> None:
        """Nothing waits, so the body has one turn, or none if it had it before with these defaults."""
        for name in script.names:
            if ("in", name) in self.world.jobs[job].ports:
                self.do(("drain", (job, "in", name)))
                self.do(("set_default", (job, "in", name), default))
        self._run(job, script)
        self.the_store_is_as_the_model_says()
        self._run(job, script)

    def _run(self, job: int, script: Script) -> None:
        """A run of the job, which is asked for if it has to be."""
        if self.world.jobs[job].status != "queued":
            self.do(("ask", job, True))
        script = replace(script, turns=self.numbered(_of(job, script.turns)))
        expected = scripts.run(self.world, job, script)
        found = self.real.run(job, script)
        same(found, expected)
        Counted.operations += 2 + len(found[0]) + sum(map(len, script.turns[: len(found[0])]))

    def _at(self, port: Key, call: Any) -> Any:
        """The call with its port and its values in their places."""
        if call[0] == "connect":
            call = (*call[:2], [target for target in call[2] if target != port])
        return self.numbered(tuple(port if part == PORT else part for part in call))


def _of(job: int, given: Any) -> Any:
    """The same with the job that does it, and its child, in their places."""
    if not isinstance(given, tuple):
        return given
    if given[:1] == (OWN,):
        return (1 if job == 0 else job, "out", given[2]) if given[1] == "child" else (job, *given[1:])
    return tuple(_of(job, part) for part in given)
