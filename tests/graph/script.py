"""What a client does, and what a run does as a list of steps: in the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from tests.graph.model import MAX_RETRIES, Change, Hold, Label, Unit, World
from tests.twins.machine import outcome
from tests.twins.real import Refused

WELL = ("",)
"""A commit at which nothing happens. Else it is where the process dies (`before`, `after`), where its answer is lost
(`lost before`, `lost after`), or where another client does something between its look and its lock (`beside`, call)."""


@dataclass(frozen=True)
class Script:
    """Steps, and the end: `return`, `suspend`, `fail`, or `retry` after some seconds."""

    steps: tuple[Change, ...] = ()
    end: str = "return"
    wait: int = 0
    at_end: Change = WELL


@dataclass
class Played:
    """What was seen: the outcome of each step, and how the run ended."""

    seen: list[Any] = field(default_factory=list)
    how: str = "ended"


class Died(Exception):
    """The process of the run is dead."""


def do(world: World, name: str, *given: Any) -> Any:
    """Do in the model what a client does, as `Real.do` does."""
    world.committed = False
    if name != "dying":
        return getattr(world, name)(*given)
    when, call = given
    tried = deepcopy(world)
    tried.survives = False
    found = do(tried, *call)
    if tried.committed and when in ("before", "lost before"):
        tried = world
    world.__dict__ = {**tried.__dict__, "survives": True}
    if not tried.committed and tried is not world:
        return found
    match when, call[0]:
        case "lost before", _:
            raise Refused("StoreDown")
        case "lost after", "enqueue":
            return found
        case "lost after", _:
            raise Refused("OutcomeUnknown")
    return "died"


def play(world: World, hold: Hold, script: Script) -> Played:
    """Do a run in the model, as `Real.perform` does."""
    played = Played()
    try:
        _play(world, hold, script, played)
    except Died:
        played.how = "died"
    return played


def _play(world: World, hold: Hold, script: Script, played: Played) -> None:
    if hold.came_late:
        world.terminate_late(hold)
        return
    run = _Run(world, hold, played)
    for name, *given in script.steps:
        match name:
            case "meanwhile":
                played.seen.append(outcome(do, world, *given[0]))
            case "checkpoint":
                played.seen.append(outcome(run.checkpoint, given[0]))
            case "look":
                played.seen.append(outcome(run.unit.look, given[0]))
            case "block":
                played.seen.append(outcome(run.block, *given))
            case _:
                played.seen.append(outcome(run.do, name, *given))
    (run.end if hold.kind == "run" else run.end_shutdown)(script)


class _Run:
    def __init__(self, world: World, hold: Hold, played: Played) -> None:
        self.world = world
        self.hold = hold
        self.played = played
        self.unit = Unit(world, hold)
        self._undone = False
        """Whether its last block was rolled back, and it has asked nothing since: so it may not end."""

    def do(self, name: str, *given: Any) -> Any:
        asked = len(self.unit.changes)
        found = self.unit.do(name, *given)
        self._undone = self._undone and len(self.unit.changes) == asked
        return found

    def checkpoint(self, at: Change) -> None:
        self._undone = False
        self._beside(at)
        self._transact(at, self.unit.commit)

    def block(self, calls: Sequence[Change], how: str) -> list[Any]:
        """Calls in a block of `job.unit()`, whose transaction is committed or not."""
        before, seen = list(self.unit.changes), list[Any]()
        for name, *given in calls:
            seen.append(outcome(self.do, name, *given))
        if how == "crash in it":
            raise Died
        as_it_was = deepcopy(self.world.__dict__), self.unit.children
        try:
            self.unit.commit(lent=True)
        except Refused:
            self.unit.changes, self._undone = before, False
            raise
        if how in ("crash before", "roll back"):
            self.world.__dict__, self.unit.children = as_it_was
        if how.startswith("crash"):
            raise Died
        self._undone = how == "roll back"
        if self._undone:
            self.unit.changes = before
        else:
            self.world.sweep()
        return seen

    def end(self, script: Script) -> None:
        node, label = self.world.jobs[self.hold.label], self.hold.label
        at = script.at_end
        if self._undone and script.end in ("return", "suspend"):
            self.played.how = "UnitNotCommittedError"
        elif script.end in ("return", "suspend"):
            how = "completed" if script.end == "return" else "suspended"
            if not self.unit.changes and self.hold.parent is None:  # one statement, which needs no lock
                if node.parent is None and node.status == "running" and not node.timer_in_run:
                    self._transact(at, lambda: self._ended(how, 0))
                    return
                if at[0] == "after":
                    raise Died  # after that statement, which has found that it may not end the run
                at = WELL if at[0].startswith("lost") else at
            try:
                self._beside(at)
                self._transact(at, lambda: [*self.unit.commit(), *self._ended(how, 0)])
            except Refused as refused:
                self.played.how = str(refused)
                at = at if at[0] != "beside" else WELL
            else:
                return
        elif script.end == "retry" and node.retries < MAX_RETRIES:
            self._only_terminations()
            self._beside(at)
            self._transact(
                at,
                lambda: [*self.unit.commit(), *self.world.apply_due(label), *self._ended("retried", script.wait)],
            )
            return
        else:
            self.played.how = "MaxRetriesExceededError" if script.end == "retry" else "ZeroDivisionError"
        self._only_terminations()
        self._beside(at)
        self._transact(at, lambda: [*self.unit.commit(), *self.world.apply_due(label), *self._ended("failed", 0)])

    def end_shutdown(self, script: Script) -> None:
        """End a shutdown: its job is terminated, whatever it raises."""
        at = script.at_end
        if script.end != "return" or self._undone:
            self._only_terminations()
        try:
            looked = self._handed_down()
            self._beside(at)
            self._transact(at, lambda: self._shut_down(looked))
        except Refused:
            self._only_terminations()
            self._transact(at, self._shut_down)

    def _handed_down(self) -> set[Label] | None:
        """Return to which children the termination is handed down; None if it is not one of the tree, so far."""
        own = self.hold.label
        return self.world.hand_down(own) if own in self.world.jobs and self.world.jobs[own].tree else None

    def _shut_down(self, looked: set[Label] | None = None) -> list[Label]:
        """End it; the children were `looked` for before anything was locked, unless it was none of the tree then."""
        changes, later = self.unit.changes, set[Label]()
        if self.world.jobs[self.hold.label].tree:
            later = (self._handed_down() or set()) if looked is None else looked
            made = [change[1] for change in changes if change[0] == "enqueue" and change[2] == self.hold.label]
            self.unit.changes = [*changes, *(("terminate", child, True) for child in made)]
        try:
            noted = [*self.unit.commit(), *self._ended("terminated", 0)]
        except Refused:
            self.unit.changes = changes
            raise
        self.world.trees.update(dict.fromkeys(later, True))
        return noted

    def _only_terminations(self) -> None:
        own = self.hold.label
        self.unit.changes = [change for change in self.unit.changes if change[:2] == ("terminate", own)]

    def _ended(self, how: str, wait: int) -> list[Label]:
        self.world.end(self.hold, how, wait)
        return []

    def _beside(self, at: Change) -> None:
        """Have another client do something before the next lock."""
        if at[0] == "beside":
            self.played.seen.append(outcome(do, self.world, *at[1]))

    def _transact(self, at: Change, work: Callable[[], list[Label]]) -> None:
        if at[0] == "before":
            before = deepcopy(self.world.__dict__)
            work()
            self.world.__dict__ = before
            raise Died
        noted = work()
        if at[0] == "after":
            raise Died
        if at[0] != "lost after":  # without its answer, nobody knows what it has noted
            self.world.follow(noted)
