"""The Hypothesis machine that does the same with a graph of jobs in the store and in the model, and compares them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from celery_sidejob.operations.hold import Hold as RealHold
from tests.graph import script as scripts
from tests.graph.calls import (
    MOST,
    OWN,
    Some,
    Terminated,
    asks,
    clients,
    dying,
    lent,
    makes_a_job,
    names,
    scripts_of_runs,
    some,
)
from tests.graph.model import MAX_LOSSES, STEP_S, Change, Hold, Label, World
from tests.graph.real import Real
from tests.graph.script import WELL, Script
from tests.twins.machine import NEW, Counted, Twins, same

RESTING = ("suspended", "completed", "failed", "terminated")


@dataclass(frozen=True)
class Run:
    """A run in progress, here and there."""

    model: Hold
    real: RealHold


class Graph(Twins):
    """Jobs and their families, clients, and workers that die."""

    real: Real
    world: World
    act = staticmethod(scripts.do)

    @staticmethod
    def shown(world: World) -> dict[Label, tuple[Any, ...]]:
        """Return each job with what it is owed."""
        world.turn_pages()
        found = {}
        for label, node in world.jobs.items():
            timers = [[timer.ask, timer.accepted, max(0, timer.at - world.now) // STEP_S] for timer in node.timers]
            owed = None if node.owed is None else max(0, node.owed - world.now) // STEP_S
            found[label] = (
                node.status, node.parent, node.name, node.run, node.run_no, node.run is not None and node.asked,
                node.tree and node.status in ("terminating", "terminated"), node.losses, node.retries,
                sorted(node.aliases), [] if node.dead is None else [node.dead], timers, owed,
            )  # fmt: skip
        return found

    @initialize()
    def begin(self) -> None:
        self.world = World()
        self.real.begin()
        self.runs: list[Run] = []
        self.dead: list[Run] = []
        """Runs whose process has died, and nobody has noticed."""
        self.zombies: list[Run] = []
        """Runs that were taken from their workers, which live."""
        for parent in (None, 1, 2, None, 4):
            self.do(("enqueue", self.numbered(NEW), parent, None if parent is None else "x", (), 0))

    # -- clients -------------------------------------------------------------------------------------------------

    @rule(call=clients | clients | dying)
    def client(self, call: Change) -> None:
        self._call(call)

    @rule(first=clients, second=clients)
    def two_clients(self, first: Change, second: Change) -> None:
        first, second = self._of(first), self._of(second)
        if first is None or second is None:
            return
        entry = self.world.jobs.get(first[1]) if first[0] == "retry_dead" else None
        # Who has found the entry asks its job, also if another client has taken it out of the dead set meanwhile.
        forced = ("run", first[1], False, True, 0) if entry is not None and entry.dead is not None else None
        self.meet(first, second, looked=forced)

    @rule(
        calls=st.lists(lent, min_size=1, max_size=3),
        meanwhile=st.none() | asks,
        commits=st.sampled_from([True, True, False]),
    )
    def lend(self, calls: list[Change], meanwhile: Change | None, commits: bool) -> None:
        made = [call for call in map(self._of, calls) if call is not None]
        self.do(("lend", made, None if meanwhile is None else self._of(meanwhile), commits))

    @rule(parent=some, name=names, force=st.booleans())
    def make_a_child_across_a_termination(self, parent: Some, name: str, force: bool) -> None:
        """The child is late: it is not there when the tree is terminated."""
        child = self._of(("enqueue", NEW, parent, name, (), 0))
        if child is not None:
            self.do(("lend", [child], ("terminate", child[2], True), True))
            if force:
                self.do(("run", child[2], False, True, 0))

    @rule(job=some, recursive=st.booleans())
    def terminate_and_shut_down(self, job: Some, recursive: bool) -> None:
        label = self._label(job)
        if label in self.world.jobs:
            self._call(("terminate", job, recursive))
            for one in reversed(self.world.below(label)):
                self._work(one, Script())
            self._call(("delete", job))

    @rule()
    def sweep(self) -> None:
        self.do(("sweep",))

    @rule(steps=st.integers(1, 4))
    def pass_time(self, steps: int) -> None:
        self.do(("pass_time", steps * STEP_S))

    # -- workers -------------------------------------------------------------------------------------------------

    @rule(place=st.integers(0, MOST), script=scripts_of_runs)
    def work(self, place: int, script: Script) -> None:
        owed = [label for label in self.world.jobs if self.world.can_begin(label)]
        if owed:
            self._work(owed[place % len(owed)], script)

    @rule(place=st.integers(0, MOST), script=scripts_of_runs)
    def work_after_an_ask(self, place: int, script: Script) -> None:
        resting = [label for label, node in self.world.jobs.items() if node.status in RESTING]
        if resting:
            label = resting[place % len(resting)]
            self.do(("run", label, False, True, 0))
            self._work(label, script)

    @rule(
        place=st.integers(0, MOST),
        ahead=st.sampled_from([0, 1, 1, 1, 1, 2]),
        when=st.sampled_from([""] * 8 + ["lost before", "lost after"]),
    )
    def deliver(self, place: int, ahead: int, when: str) -> None:
        """A message comes, which may be stale; its run goes on in a later rule."""
        labels = sorted(self.world.jobs, key=lambda label: not self.world.can_begin(label))
        if labels:
            self._claim(labels[place % min(len(labels), 4)], ahead, when)

    @precondition(lambda self: self.runs)
    @rule(place=st.integers(0, MOST), script=scripts_of_runs)
    def go_on(self, place: int, script: Script) -> None:
        self._perform(self.runs.pop(place % len(self.runs)), script)

    @precondition(lambda self: self.runs)
    @rule(place=st.integers(0, MOST))
    def give_back(self, place: int) -> None:
        run = self.runs.pop(place % len(self.runs))
        self.world.lose(run.model, is_loss=False)
        self.real.give_back(run.real)
        self.zombies.append(run)
        Counted.operations += 1

    @precondition(lambda self: self.runs or self.dead)
    @rule(place=st.integers(0, MOST), when=st.sampled_from(["", "", "before", "after"]))
    def rescue(self, place: int, when: str) -> None:
        self._rescue((self.dead + self.runs)[place % len(self.dead + self.runs)], when)

    @rule(place=st.integers(0, MOST))
    def lose_all_runs(self, place: int) -> None:
        """The last of them is one too many."""
        owed = [label for label in self.world.jobs if self.world.can_begin(label)]
        for _ in range(MAX_LOSSES if owed else 0):
            label = owed[place % len(owed)]
            if self.world.can_begin(label):
                self._claim(label, 1, "")
                self._rescue(self.runs[-1], "")

    @precondition(lambda self: self.zombies)
    @rule(place=st.integers(0, MOST), script=scripts_of_runs)
    def go_on_as_a_zombie(self, place: int, script: Script) -> None:
        """What a run does that was taken from its worker is nothing."""
        run = self.zombies.pop(place % len(self.zombies))
        ends = {"checkpoint": WELL, "block": "commit"}
        alone = tuple((*step[:-1], ends.get(step[0], step[-1])) for step in script.steps if step[0] != "meanwhile")
        made = self._of_run(run.model.label, replace(script, steps=alone, at_end=WELL))
        self.real.perform(run.real, made)
        assert self.real.is_refused(run.real), (run, self.real.stage.ignored)
        Counted.operations += 1 + len(alone)

    @rule()
    def come_to_rest(self) -> None:
        """Faults stop, and all that is owed is done."""
        for run in [*self.dead, *self.runs]:
            if run in self.runs:
                self.runs.remove(run)
                self._perform(run, Script())
            else:
                self._rescue(run, "")
        for _ in range(1000):
            self.do(("sweep",))
            owed = [label for label in self.world.jobs if self.world.can_begin(label)]
            for label in owed:
                self._work(label, Script())
            at = self.world.next_at()
            if at is None:
                break
            if not owed:
                self.do(("pass_time", at - self.world.now))
        self.the_store_is_as_the_model_says()
        waiting = {label: node for label, node in self.world.jobs.items() if node.status not in RESTING or node.timers}
        assert not waiting, f"these are owed something, and nothing will do it: {waiting}"

    def teardown(self) -> None:
        if hasattr(self, "world") and self.real.look() == self.shown(self.world):
            self.come_to_rest()
        super().teardown()

    # ------------------------------------------------------------------------------------------------------------

    def _call(self, call: Change) -> None:
        made = self._of(call)
        if made is not None:
            self.do(made)

    def _claim(self, label: Label, ahead: int, when: str) -> None:
        for_run = self.world.jobs[label].run_no + ahead
        model, real = self.world.claim(label, for_run), self.real.claim(label, for_run, when)
        same(real is not None, model is not None)
        if model is not None and real is not None:
            self.runs.append(Run(model, real))
        Counted.operations += 1

    def _work(self, label: Label, script: Script) -> None:
        if self.world.can_begin(label):
            self._claim(label, 1, "")
            self._perform(self.runs.pop(), script)

    def _perform(self, run: Run, script: Script) -> None:
        script = self._of_run(run.model.label, script)
        expected = scripts.play(self.world, run.model, script)
        found = self.real.perform(run.real, script)
        if expected.how == "died" and self.world.is_current(run.model):
            self.dead.append(run)
        same(found, expected)
        Counted.operations += 1 + len(script.steps)

    def _rescue(self, run: Run, when: str) -> None:
        found = self.real.rescue(run.real, when)
        if when == "before":
            same(found, "died")
            return
        self.world.survives = when != "after"
        taken = self.world.lose(run.model)
        self.world.survives = True
        same(found, "died" if when == "after" else taken)
        if run in self.runs:
            self.runs.remove(run)
            self.zombies.append(run)
        else:
            self.dead.remove(run)
        Counted.operations += 1

    # -- filling in ----------------------------------------------------------------------------------------------

    def _label(self, given: Some, others: tuple[Label, ...] = ()) -> Label:
        found = [*sorted(self.world.jobs), *others]
        if given.place == MOST or not found:
            return max((label for label in range(self.number + 1) if label not in found), default=0)
        if isinstance(given, Terminated):
            found = [label for label, node in self.world.jobs.items() if node.status == "terminated"] or found
        return found[given.place % len(found)]

    def _of(self, call: Change, own: Label | None = None, others: tuple[Label, ...] = ()) -> Any:
        """The call with its jobs in their places; None if there are jobs enough."""
        if makes_a_job(call) and len(self.world.jobs) + len(others) >= MOST:
            return None
        return self._filled(call, own, others)

    def _filled(self, given: Any, own: Label | None, others: tuple[Label, ...]) -> Any:
        if isinstance(given, tuple):
            return tuple(self._filled(part, own, others) for part in given)
        if isinstance(given, Some):
            return self._label(given, others)
        return own if given == OWN else self.numbered(given)

    def _of_run(self, own: Label, script: Script) -> Script:
        """The script with its jobs in their places; a later step may name a job that an earlier one makes."""
        others: tuple[Label, ...] = ()
        made = []
        for step in script.steps:
            filled = self._of(step, own, others)
            if filled is not None:
                made.append(filled)
                others += (filled[1],) if filled[0] == "enqueue" else ()
        at_end = self._of(script.at_end, own, others) or WELL
        return replace(script, steps=tuple(made), at_end=at_end)
