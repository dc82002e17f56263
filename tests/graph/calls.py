"""What clients and runs may do, drawn by Hypothesis: jobs are named by stand-ins, as none is there yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.graph.model import STEP_S, Change
from tests.graph.script import WELL, Script
from tests.twins.machine import NEW

MOST = 10
"""Jobs beyond which no more are made, lest families are rare."""


@dataclass(frozen=True)
class Some:
    """Stands for one of the jobs there are; the last place for one that was deleted."""

    place: int


@dataclass(frozen=True)
class Terminated(Some):
    """Stands for one that is terminated, if any is."""


OWN = "the job whose run it is"
some = st.builds(Some, st.integers(0, MOST))
terminated = st.builds(Terminated, st.integers(0, MOST))
names = st.sampled_from(["x", "y", "z"])
aliases = st.sampled_from(["a", "b", "c"])
waits = st.sampled_from([0, 0, 0, 2 * STEP_S, 4 * STEP_S])
rarely = st.sampled_from([False, False, True])


def calls(job: Any) -> Any:
    """What may be done in a call, or in a unit."""
    return st.one_of(
        st.tuples(st.just("enqueue"), st.just(NEW), job, names, st.lists(aliases, max_size=1).map(tuple), waits),
        st.tuples(st.just("run"), job, rarely, st.booleans(), waits),
        st.tuples(st.just("run"), job, rarely, st.booleans(), waits),
        st.tuples(st.just("terminate"), job, st.booleans()),
        st.tuples(st.just("adopt"), job, job, names),
        st.tuples(st.just("adopt"), job, job, names),
        st.tuples(st.just("disown"), job, job | names),
        st.tuples(st.just("add_alias"), job, aliases),
        st.tuples(st.just("remove_alias"), job, aliases),
    )


roots = st.tuples(st.just("enqueue"), st.just(NEW), st.none(), st.none(), st.just(()), waits)
deletions = st.tuples(st.just("delete"), terminated)
clients = st.one_of(
    calls(some), calls(some), roots, deletions, st.tuples(st.just("retry_dead"), some), st.tuples(st.just("show"), some)
)
asks = st.one_of(
    st.tuples(st.just("run"), some, rarely, st.booleans(), waits),
    st.tuples(st.just("terminate"), some, st.booleans()),
)
lent = st.one_of(asks, asks, st.tuples(st.just("enqueue"), st.just(NEW), some, names, st.just(()), waits))
dying = st.tuples(
    st.just("dying"), st.sampled_from(["before", "before", "after", "after", "lost before", "lost after"]),
    calls(some) | deletions,
)  # fmt: skip

commits = st.one_of(
    st.just(WELL),
    st.just(WELL),
    st.tuples(st.sampled_from(["before", "after", "before", "after", "lost before", "lost after"])),
    st.tuples(st.just("beside"), clients),
)
of_run = some | st.just(OWN)


def new_child(name: str, *aliases: str) -> Change:
    """The run's job makes a child."""
    return ("enqueue", NEW, OWN, name, aliases, 0)


steps = st.one_of(
    calls(of_run),
    calls(of_run),
    calls(of_run),
    st.builds(new_child, names),
    st.tuples(st.just("look"), of_run),
    st.tuples(st.just("meanwhile"), clients | st.tuples(st.just("terminate"), st.just(OWN), st.booleans())),
    st.tuples(st.just("checkpoint"), commits),
    st.tuples(
        st.just("block"),
        st.lists(calls(of_run), max_size=3).map(tuple),
        st.sampled_from(["commit"] * 4 + ["roll back", "roll back", "crash in it", "crash before", "crash after"]),
    ),
)
given_on = st.one_of(
    st.builds(lambda name: (new_child(name), ("disown", OWN, name), new_child(name)), names),
    st.builds(
        lambda job, name: (("add_alias", job, name), ("remove_alias", job, name), new_child("x", name)), of_run, aliases
    ),
    st.builds(
        lambda job, name: (("adopt", OWN, job, name), ("run", job, True, False, 0), ("disown", OWN, name)), some, names
    ),
)
"""What chance rarely puts together: a name, or a child, that a unit takes from one job and gives to another."""
one_step = steps.map(lambda step: (step,))
parts = st.integers(0, 5).flatmap(lambda number: one_step if number else given_on)
scripts_of_runs = st.builds(
    Script,
    st.lists(parts, max_size=5).map(lambda found: tuple(step for part in found for step in part)),
    st.sampled_from(["return", "return", "return", "suspend", "suspend", "fail", "retry"]),
    st.sampled_from([2 * STEP_S, 4 * STEP_S]),
    commits,
)


def makes_a_job(given: Any) -> bool:
    """Tell whether a job is made by a call, or by one that is a part of it."""
    return given == "enqueue" or (isinstance(given, tuple) and any(map(makes_a_job, given)))
