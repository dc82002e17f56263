"""What the life of jobs promises, in memory: the plain model with which the store is compared.

Jobs have labels, given by whoever makes them. Time stands still until it is moved. A client's call is done at once, a
run's unit when it is committed: `Unit` keeps it until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from tests.twins.real import Refused

ASKABLE = ("queued", "running", "suspended", "completed")
ENDING = ("terminating", "terminated")
MAX_LOSSES = 2
MAX_RETRIES = 3
STEP_S = 500
"""All times are multiples of this, so that what a walk itself takes does not count."""

Label = int
Change = tuple[Any, ...]
"""The name of a call, and its arguments."""


@dataclass
class Timer:
    """An ask for later, or, unless `accepted`, one that was only noted by a transaction of its caller's."""

    number: int
    at: int
    ask: str
    accepted: bool


@dataclass
class Node:
    """A job."""

    parent: Label | None = None
    name: str | None = None
    aliases: set[str] = field(default_factory=set)
    status: str = "queued"
    run: str | None = None
    """The kind of the run in progress."""
    run_no: int = 0
    owed: int | None = None
    """When the next run, or the shutdown, may begin; None if a timer must ask first, or nothing is owed."""
    asked: bool = False
    """Whether it was asked to run since its last run began, or, while it is terminating, since its termination."""
    timer_in_run: bool = False
    """Whether a timer was accepted since its run began."""
    timers: list[Timer] = field(default_factory=list)
    tree: bool = False
    """Whether its termination is one of the whole tree."""
    losses: int = 0
    retries: int = 0
    has_ended: bool = False
    dead: str | None = None
    """Why it is in the dead set."""


@dataclass(frozen=True)
class Hold:
    """A run that was begun, and what it has seen by then."""

    label: Label
    run_no: int
    kind: str
    parent: Label | None
    came_late: bool
    children: dict[str, tuple[Label, str]]


class World:
    """Jobs, as clients, runs and the passing of time change them."""

    def __init__(self) -> None:
        self.jobs: dict[Label, Node] = {}
        self.now = 0
        self.committed = False
        """Whether the last call had a transaction, which its process may have survived or not."""
        self.survives = True
        """Whether the process that makes a call does what follows its commit; else that is left to the sweeper."""
        self.trees: dict[Label, bool] = {}
        """Where a recursive termination has not come yet: below these jobs, or (True) at them as well."""
        self.named_in_vain: dict[Label, set[str]] = {}
        """In a unit's view: the aliases that it gives to jobs that are not there, which its commit will refuse."""
        self.seen_by_all: set[Label] = set()
        """In a transaction of the caller's own: the jobs that were there before it."""
        self._numbers = 0

    # -- looking -------------------------------------------------------------------------------------------------

    def job(self, label: Label) -> Node:
        if label not in self.jobs:
            raise Refused("JobNotFoundError")
        return self.jobs[label]

    def children(self, label: Label) -> dict[str, Label]:
        return {str(node.name): child for child, node in self.jobs.items() if node.parent == label}

    def below(self, label: Label) -> list[Label]:
        """A job and everything below it."""
        return [label] + [one for child in sorted(self.children(label).values()) for one in self.below(child)]

    def above(self, label: Label) -> list[Label]:
        """A job and everything above it, the root last; in a unit's view a parent need not be there."""
        parent = self.jobs[label].parent if label in self.jobs else None
        return [label] + ([] if parent is None else self.above(parent))

    def owner(self, alias: str) -> Label | None:
        names = [(label, node.aliases) for label, node in self.jobs.items()]
        return next((label for label, found in [*names, *self.named_in_vain.items()] if alias in found), None)

    def aliases(self, label: Label) -> set[str]:
        return self.jobs[label].aliases if label in self.jobs else self.named_in_vain.setdefault(label, set())

    def can_begin(self, label: Label) -> bool:
        node = self.jobs.get(label)
        return node is not None and node.run is None and node.owed is not None and node.owed <= self.now

    def is_current(self, hold: Hold) -> bool:
        node = self.jobs.get(hold.label)
        return node is not None and node.run is not None and node.run_no == hold.run_no

    # -- what clients do -----------------------------------------------------------------------------------------

    def enqueue(
        self, label: Label, parent: Label | None, name: str | None, aliases: Sequence[str], countdown: int
    ) -> Label:
        if parent is not None:
            self.job(parent)
        self.make(label, parent, name, aliases, countdown)
        self.committed = True
        return label

    def run(self, label: Label, parent: bool, force: bool, countdown: int) -> Label | None:
        asked = self.job(label).parent if parent else label
        if asked is None:
            return None
        self.committed = True
        self.job(label)
        may = force or self.jobs[asked].status in ASKABLE
        self.follow(self.ask_now_or_later(asked, force, countdown))
        return asked if may else None

    def terminate(self, label: Label, recursive: bool) -> None:
        self.job(label)
        self.committed = True
        self.follow(self.end_lives([label], recursive))

    def adopt(self, parent: Label, child: Label, name: str) -> None:
        self.job(min(parent, child))
        self.job(max(parent, child))
        self.set_parent(parent, child, name)
        self.committed = True

    def disown(self, parent: Label, child: Label | str) -> None:
        if not isinstance(child, str):
            self.job(child)
        self.job(parent)
        self.free(parent, child)
        self.committed = True

    def add_alias(self, label: Label, alias: str) -> None:
        self.job(label)
        self.name(label, alias)
        self.committed = True

    def remove_alias(self, label: Label, alias: str) -> None:
        self.job(label)
        self.unname(label, alias)
        self.committed = True

    def delete(self, label: Label) -> bool:
        self.job(label)
        tree = [self.jobs[one] for one in self.below(label)]
        may = all(node.status == "terminated" and not node.timers for node in tree)
        for one in self.below(label) if may else ():
            del self.jobs[one]
        self.committed = True
        return may

    def show(self, label: Label) -> Any:
        """Return what a handle tells of a job."""
        node = self.job(label)
        children = {name: (child, self.jobs[child].status) for name, child in self.children(label).items()}
        terminated = all(self.jobs[one].status == "terminated" for one in self.below(label))
        return (node.status, node.parent, children, sorted(node.aliases)), terminated, [label] * len(node.aliases)

    def retry_dead(self, label: Label) -> Label | None:
        """Take a job out of the dead set."""
        node = self.jobs.get(label)
        return None if node is None or node.dead is None else self.run(label, False, True, 0)

    def lend(self, calls: Sequence[Change], meanwhile: Change | None, commits: bool) -> list[Any]:
        """Calls in a transaction of the caller's own, of whose commit nobody is told."""
        mine, noted = deepcopy(self), list[tuple[Label, Timer]]()
        mine.seen_by_all = set(self.jobs)
        found: list[Any] = []
        made: dict[Label, Node] = {}
        for name, *given in calls:
            try:
                found.append(getattr(mine, f"_lend_{name}")(noted, *given))
            except Refused as refused:
                found.append(f"raised {refused}")
            else:
                if name == "enqueue":
                    made[given[0]] = mine.jobs[given[0]]
        self._numbers = mine._numbers
        if meanwhile is not None:
            try:
                found.append(getattr(self, meanwhile[0])(*meanwhile[1:]))
            except Refused as refused:
                found.append(f"raised {refused}")
        if commits:
            self.jobs.update(made)
            for label, timer in noted:
                self.jobs[label].timers.append(timer)
                self.jobs[label].timers.sort(key=lambda timer: timer.number)
        self.committed = False
        return found

    def _lend_enqueue(self, noted: list[Any], label: Label, parent: Label, name: str, *given: Any) -> Label:
        self.job(parent)
        if name in self.children(parent):  # looked at first: an error of Postgres would spoil the transaction
            raise Refused("ChildNameTakenError")
        return self.enqueue(label, parent, name, *given)

    def _lend_run(self, noted: list[Any], label: Label, parent: bool, force: bool, countdown: int) -> Label | None:
        if parent and label not in self.seen_by_all:  # a handle reads outside of the transaction
            raise Refused("JobNotFoundError")
        asked = self.job(label).parent if parent else label
        if asked is None or (countdown and not force and self.job(asked).status not in ASKABLE):
            return None
        self.job(asked)
        noted.append((asked, self._timer(countdown, "force" if force else "run", accepted=False)))
        return asked

    def _lend_terminate(self, noted: list[Any], label: Label, recursive: bool) -> None:
        self.job(label)
        noted.append((label, self._timer(0, "terminate_tree" if recursive else "terminate", accepted=False)))

    # -- families ------------------------------------------------------------------------------------------------

    def make(
        self, label: Label, parent: Label | None, name: str | None, aliases: Sequence[str], countdown: int, *,
        own: Label | None = None,
    ) -> None:  # fmt: skip
        """Make a job; `own` is the job whose run makes it."""
        if parent is not None and parent != own and self.jobs[parent].status in ENDING:
            raise Refused("IllegalMoveError")
        if parent is not None and name in self.children(parent):
            raise Refused("ChildNameTakenError")
        for alias in aliases:
            if self.owner(alias) is not None:
                raise Refused("AliasTakenError")
        self.jobs[label] = node = Node(parent, name, set(aliases))
        if countdown:
            node.timers.append(self._timer(countdown, "run", accepted=True))
        else:
            node.owed = self.now

    def set_parent(self, parent: Label, child: Label, name: str) -> None:
        if self.jobs[child].parent is not None:
            raise Refused("HasParentError")
        if self.jobs[parent].status in ENDING:
            raise Refused("IllegalMoveError")
        if child in self.above(parent):
            raise Refused("CycleError")
        if name in self.children(parent):
            raise Refused("ChildNameTakenError")
        self.jobs[child].parent, self.jobs[child].name = parent, name

    def free(self, parent: Label, child: Label | str) -> None:
        found = self.children(parent).get(child) if isinstance(child, str) else child
        if found is None or self.jobs[found].parent != parent:
            raise Refused("NotAChildError")
        self.jobs[found].parent = self.jobs[found].name = None

    def name(self, label: Label, alias: str) -> None:
        if self.owner(alias) not in (None, label):
            raise Refused("AliasTakenError")
        self.jobs[label].aliases.add(alias)

    def unname(self, label: Label, alias: str) -> None:
        if alias not in self.jobs[label].aliases:
            raise Refused("InvalidAliasError")
        self.jobs[label].aliases.remove(alias)

    # -- asking --------------------------------------------------------------------------------------------------

    def ask_now_or_later(self, label: Label, force: bool, countdown: int) -> list[Label]:
        """Ask a job, if that may be; return the jobs for which something was noted."""
        node, noted = self.jobs[label], list[Label]()
        if force and not countdown:
            noted = self.apply_due(label)  # an earlier termination that was only noted must not win
        if not (force or node.status in ASKABLE):
            return noted
        if force:
            self.split(label)
        if countdown:
            self._accept(node, self._timer(countdown, "force" if force else "run", accepted=True))
        else:
            self.ask(label, force=force)
        return noted

    def ask(self, label: Label, *, force: bool = False) -> None:
        """Have a job run that may be asked."""
        node = self.jobs[label]
        node.asked = True
        if node.status in ("failed", "terminated"):
            node.losses = 0
        if node.status != "terminating":
            node.status = "queued"
        if force:
            node.dead = None
        if node.run is None and (node.owed is None or force):
            node.owed = self.now if node.owed is None else min(node.owed, self.now)

    def end_lives(self, labels: Sequence[Label], recursive: bool) -> list[Label]:
        """Have jobs be terminated; return the jobs for which something was noted."""
        noted: list[Label] = []
        for label in labels:
            if not recursive:
                noted += self.apply_due(label)  # one of the tree that was only noted is not forgotten
            for one in self.below(label) if recursive else [label]:
                self.terminate_one(one, tree=recursive)
        return noted

    def terminate_one(self, label: Label, *, tree: bool, before: int | None = None) -> None:
        """Make a job terminating, and forget its timers that were set before."""
        node = self.jobs[label]
        node.timers = [timer for timer in node.timers if before is not None and timer.number > before]
        if node.status == "terminated":
            return
        node.tree = tree or (node.status == "terminating" and node.tree)
        if node.status == "failed":
            node.losses = 0
        node.status, node.asked, node.timer_in_run, node.dead = "terminating", False, False, None
        if node.run is None:
            node.owed = self.now

    def apply_due(self, label: Label) -> list[Label]:
        """Apply what is due for a job and what was noted, in order; return the jobs for which something is noted."""
        node, noted = self.jobs[label], list[Label]()
        taken = [timer for timer in node.timers if timer.at <= self.now or not timer.accepted]
        node.timers = [timer for timer in node.timers if timer not in taken]
        for timer in taken:
            if timer.at > self.now:
                if timer.ask == "force" or node.status in ASKABLE:
                    self._accept(node, timer)
            elif timer.ask.startswith("terminate"):
                if timer.ask == "terminate_tree":
                    self.trees.setdefault(label, False)
                self.terminate_one(label, tree=timer.ask == "terminate_tree", before=timer.number)
            elif timer.ask == "force" or node.status in ASKABLE or (timer.accepted and node.status == "failed"):
                self.ask(label, force=timer.ask == "force" or node.status == "failed")
        return noted

    def note(self, labels: Iterable[Label], ask: str, wait: int = 0) -> list[Label]:
        """Note an ask of each job, for whoever applies it."""
        noted = sorted(labels)
        for label in noted:
            self.jobs[label].timers.append(self._timer(wait, ask, accepted=False))
        return noted

    def follow(self, noted: Iterable[Label]) -> None:
        """Apply what a transaction has noted, unless its process has died."""
        waiting = sorted(set(noted), reverse=True)
        while waiting and self.survives:
            waiting += self.apply_due(waiting.pop())
        self.turn_pages()

    def hand_down(self, label: Label) -> set[Label]:
        """Return the children to which the recursive termination of their parent has not come."""
        children = [(child, self.jobs[child]) for child in self.children(label).values()]
        return {child for child, node in children if not (node.tree and node.status in ENDING)}

    def turn_pages(self) -> None:
        """Go on with recursive terminations, as those who asked for them do, or else the sweeper."""
        while self.trees:
            label, itself = self.trees.popitem()
            for one in self.below(label) if label in self.jobs else ():
                if one != label or itself:
                    self.terminate_one(one, tree=True)

    def split(self, label: Label) -> None:
        """Have what is left of a termination not come to a job, but to its children."""
        if self.trees.pop(label, None) is not None:
            self.trees.update(dict.fromkeys(self.children(label).values(), True))

    def _accept(self, node: Node, timer: Timer) -> None:
        timer.accepted = True
        node.timers = sorted([*node.timers, timer], key=lambda timer: timer.number)
        if node.status in ("failed", "terminated"):
            node.losses = 0
        if node.run is None and node.status != "terminating":
            node.status = "queued"
        node.timer_in_run = node.timer_in_run or node.run is not None
        if timer.ask == "force":
            node.dead = None

    def _timer(self, wait: int, ask: str, *, accepted: bool) -> Timer:
        self._numbers += 1
        return Timer(self._numbers, self.now + wait, ask, accepted)

    # -- time ----------------------------------------------------------------------------------------------------

    def pass_time(self, seconds: int) -> None:
        self.now += seconds

    def sweep(self) -> None:
        """Apply what is due or noted, job by job: first where the oldest was asked."""
        due = {
            label: min([timer.number for timer in node.timers if self._is_due(timer)], default=None)
            for label, node in self.jobs.items()
        }
        for label in sorted((one for one in due if due[one] is not None), key=lambda one: due[one] or 0):
            self.follow([label])

    def _is_due(self, timer: Timer) -> bool:
        return timer.at <= self.now or not timer.accepted

    def next_at(self) -> int | None:
        """When the next thing happens by itself, if anything does."""
        times = [timer.at for node in self.jobs.values() for timer in node.timers]
        times += [node.owed for node in self.jobs.values() if node.owed is not None and node.run is None]
        return max(min(times), self.now) if times else None

    # -- runs ----------------------------------------------------------------------------------------------------

    def claim(self, label: Label, for_run: int) -> Hold | None:
        """Begin the run that a delivery announces, if it is owed now."""
        node = self.jobs[label]
        if for_run != node.run_no + 1 or not self.can_begin(label):
            return None
        node.run, node.run_no, node.owed, node.timer_in_run = "shutdown", node.run_no + 1, None, False
        came_late = False
        if node.status == "queued":
            parent = None if node.parent is None else self.jobs[node.parent]
            came_late = not node.has_ended and parent is not None and parent.tree and parent.status in ENDING
            node.run, node.status, node.asked = "run", "running", False
            ended = min([timer.number for timer in node.timers if timer.ask.startswith("terminate")], default=None)
            node.timers = [
                timer
                for timer in node.timers
                if timer.at > self.now
                or timer.ask.startswith("terminate")
                or (ended is not None and timer.number > ended)
            ]
        children = {name: (child, self.jobs[child].status) for name, child in self.children(label).items()}
        return Hold(label, node.run_no, node.run, node.parent, came_late, children)

    def lose(self, hold: Hold, *, is_loss: bool = True) -> bool:
        """Take a run from its worker; False if it is not the job's current one."""
        if not self.is_current(hold):
            return False
        node = self.jobs[hold.label]
        if not is_loss or node.losses + 1 < MAX_LOSSES:
            node.run, node.timer_in_run, node.owed = None, False, self.now
            node.losses += is_loss
            node.status = node.status if node.status == "terminating" else "queued"
            return True
        noted = self.apply_due(hold.label)
        was_terminating = node.status == "terminating"
        revived = was_terminating and self._is_revived(node)
        node.losses = 0 if revived else node.losses + 1
        node.asked = node.asked and was_terminating
        node.status = ("queued" if revived else "terminated") if was_terminating else "failed"
        node.run, node.timer_in_run, node.retries, node.has_ended = None, False, 0, True
        node.owed = self.now if revived and node.asked else None
        if node.parent is not None:
            noted += self.note([node.parent], "run")
        if node.status == "terminated":
            self._drop_runs(node)
        if not revived:
            node.dead = "shutdown lost" if was_terminating else "lost"
        if was_terminating and node.tree:
            self.trees.update(dict.fromkeys(self.hand_down(hold.label), True))
        self.follow(noted)
        return True

    def terminate_late(self, hold: Hold) -> None:
        """End the run of a job that became a child of one while that was terminated with all below it."""
        self.end_lives([hold.label], True)
        self.lose(hold, is_loss=False)

    def end(self, hold: Hold, how: str, retry_in: int = 0) -> None:
        """End a run, whose last unit is applied."""
        node = self.jobs[hold.label]
        retried = how == "retried"
        node.losses, node.has_ended = 0, True
        node.retries = node.retries + 1 if retried else 0
        if node.run == "shutdown":
            node.status = "queued" if self._is_revived(node) else "terminated"
        elif node.status != "terminating":
            waits = node.timer_in_run and node.timers
            node.status = "queued" if node.asked or retried or waits else how
        node.run, node.timer_in_run, node.owed = None, False, None
        if node.status == "terminating":
            node.owed = self.now
        elif node.status == "queued" and (node.asked or retried):
            node.owed = self.now + retry_in
        if node.status == "terminated":
            self._drop_runs(node)
        if node.status == "failed":
            node.dead = "failed"
        if node.parent is not None and self.jobs[node.parent].status in ASKABLE and not retried:
            self.ask(node.parent)

    @staticmethod
    def _is_revived(node: Node) -> bool:
        return node.asked or any(timer.ask == "force" for timer in node.timers)

    @staticmethod
    def _drop_runs(node: Node) -> None:
        node.timers = [timer for timer in node.timers if timer.ask != "run"]


class Unit:
    """What a run will write, and the world as it will leave it."""

    def __init__(self, world: World, hold: Hold) -> None:
        self._world = world
        self._hold = hold
        self.changes: list[Change] = []
        self.children: dict[str, tuple[Label, str]] | None = hold.children if hold.kind == "run" else None
        """Its job's children as of the claim, until the first commit."""

    # -- looking -------------------------------------------------------------------------------------------------

    def view(self) -> World:
        """The families as the unit will leave them; nothing here is judged that is judged at the commit."""
        seen = deepcopy(self._world)
        for name, *given in self.changes:
            match name, given:
                case "enqueue", (label, parent, child_name, aliases, _):
                    seen.jobs[label] = Node(parent, child_name, set(aliases))
                case "adopt", (parent, child, child_name) if child in seen.jobs:
                    seen.jobs[child].parent, seen.jobs[child].name = parent, child_name
                case "disown", (_, child) if child in seen.jobs:
                    seen.jobs[child].parent = seen.jobs[child].name = None
                case "add_alias", (label, alias):
                    seen.aliases(label).add(alias)
                case "remove_alias", (label, alias):
                    seen.aliases(label).discard(alias)
        return seen

    # -- what the body asks --------------------------------------------------------------------------------------

    def do(self, name: str, *given: Any) -> Any:
        """Have the unit do it, or raise Refused: what the body can be told, it is told at the call."""
        seen = self.view()
        match name, given:
            case "enqueue", (label, parent, child_name, aliases, _):
                if parent is not None:
                    seen.job(parent)
                    if child_name in seen.children(parent):
                        raise Refused("ChildNameTakenError")
                if any(seen.owner(alias) is not None for alias in aliases):
                    raise Refused("AliasTakenError")
                found = label
            case "adopt", (parent, child, child_name):
                if child_name in seen.children(parent):
                    raise Refused("ChildNameTakenError")
                if seen.job(child).parent is not None:
                    raise Refused("HasParentError")
                if parent == child or (parent in seen.jobs and child in seen.above(parent)):
                    raise Refused("CycleError")
                found = None
            case "disown", (parent, child):
                if isinstance(child, str):
                    child = self._child(seen, parent, child)
                elif seen.job(child).parent != parent:
                    raise Refused("NotAChildError")
                found, given = None, (parent, child)
            case "run", (label, of_parent, *_):
                found = seen.job(label).parent if of_parent else label
                if found is None:
                    return None
            case "add_alias", (label, alias):
                if seen.owner(alias) not in (None, label):
                    raise Refused("AliasTakenError")
                found = None
            case "remove_alias", (label, alias):
                if not seen.aliases(label):
                    seen.job(label)
                if alias not in seen.aliases(label):
                    raise Refused("InvalidAliasError")
                found = None
            case _:
                found = None
        self.changes.append((name, *given))
        return found

    def look(self, label: Label) -> Any:
        """Return what the body sees of a job."""
        seen = self.view()
        node = seen.job(label)
        if any(name == "adopt" and given[0] == label and given[1] not in seen.jobs for name, *given in self.changes):
            raise Refused("JobNotFoundError")
        children = {name: (child, seen.jobs[child].status) for name, child in seen.children(label).items()}
        if label == self._hold.label and self.children is not None:
            gone = {change[2] for change in self.changes if change[0] == "disown" and change[1] == label}
            kept = {name: child for name, child in self.children.items() if child[0] not in gone}
            children = {**kept, **{name: children[name] for name in self._gained(label) if name in children}}
        return node.status, node.parent, children, sorted(node.aliases)

    def _gained(self, label: Label) -> set[str]:
        """The names of children that the unit gives a job."""
        found = {change[3] for change in self.changes if change[0] == "enqueue" and change[2] == label}
        return found | {change[3] for change in self.changes if change[0] == "adopt" and change[1] == label}

    def _child(self, seen: World, parent: Label, name: str) -> Label:
        """The child of this name, as the body sees it."""
        found = seen.children(parent).get(name)
        if parent == self._hold.label and self.children is not None and name not in self._gained(parent):
            gone = {change[2] for change in self.changes if change[0] == "disown" and change[1] == parent}
            found = self.children.get(name, (None, ""))[0]
            found = None if found in gone else found
        if found is None:
            seen.job(parent)
            raise Refused("NotAChildError")
        return found

    # -- committing ----------------------------------------------------------------------------------------------

    def commit(self, *, lent: bool = False) -> list[Label]:
        """Apply the unit, or raise Refused and nothing is changed; return the jobs for which something was noted.

        In a transaction of the body's own (`lent`) all asks are noted, and no job moves to another parent.
        """
        if lent and any(change[0] in ("adopt", "disown") for change in self.changes):
            raise Refused("IllegalMoveError")
        before = deepcopy(self._world.__dict__)
        try:
            noted = self._apply(lent)
        except Refused:
            self._world.__dict__ = before
            raise
        self._world.jobs[self._hold.label].losses = 0
        self.changes, self.children = [], None
        return noted

    def _apply(self, lent: bool) -> list[Label]:
        world, own = self._world, self._hold.label
        new = [change[1] for change in self.changes if change[0] == "enqueue"]
        for label in self._named():
            if label not in new:
                world.job(label)
        reached = self._reached()
        asks: list[Change] = []
        for part in self._parts():
            for name, *given in part:
                if name == "enqueue":
                    world.make(*given, own=own)
            for name, *given in part:
                match name, given:
                    case "adopt", (parent, child, child_name):
                        world.set_parent(parent, child, child_name)
                    case "disown", (parent, child):
                        world.free(parent, child)
                    case "add_alias", (label, alias):
                        world.name(label, alias)
                    case "remove_alias", (label, alias):
                        world.unname(label, alias)
                    case "run", (label, True, *how):  # its parent as it is at this point
                        asks.append(("run", world.jobs[label].parent, *how))
                    case "run", (label, False, *how):
                        asks.append(("run", label, *how))
                    case "terminate", _:
                        asks.append((name, *given))
        noted: list[Label] = []
        for name, *given in asks:
            match name, given:
                case "run", (None, *_):
                    pass
                case _, (label, *how) if lent:
                    noted += self._note(name, label, *how, is_new=label in new and world.jobs[label].owed is not None)
                case "run", (label, force, countdown):
                    noted += world.ask_now_or_later(label, force, countdown)
                case "terminate", (label, False):
                    noted += world.end_lives([label], False)
                case "terminate", (label, True):
                    below = world.below(label)
                    world.trees.update({one: True for one in below if one not in {*reached, *new}})
                    for one in below:
                        if one in {*reached, *new}:
                            world.terminate_one(one, tree=True)
        return noted

    def _note(self, name: str, label: Label, how: bool, countdown: int = 0, *, is_new: bool) -> list[Label]:
        """Note what is asked of a job; its first run, which is owed already, is not asked for."""
        if name == "terminate":
            return self._world.note([label], "terminate_tree" if how else "terminate")
        if countdown and not how and self._world.jobs[label].status not in ASKABLE:
            return []
        if not countdown and not how and is_new:
            return []
        return self._world.note([label], "force" if how else "run", countdown)

    def _parts(self) -> Iterator[list[Change]]:
        """The changes, cut where a new job may have a name that was taken until then."""
        part: list[Change] = []
        for change in self.changes:
            if change[0] == "enqueue" and any(one[0] in ("disown", "remove_alias") for one in part):
                yield part
                part = []
            part.append(change)
        yield part

    def _named(self) -> Iterator[Label]:
        """The jobs that must be there."""
        for name, *given in self.changes:
            match name, given:
                case "enqueue", (_, parent, *_):
                    if parent is not None:
                        yield parent
                case (("adopt" | "disown"), (parent, child, *_)):
                    yield from (parent, child)
                case _, (label, *_):
                    yield label

    def _reached(self) -> set[Label]:
        """The jobs that are locked: a termination of a tree ends those at once, and the others right afterwards."""
        world = self._world
        found = {label for label in self._named() if label in world.jobs} | {self._hold.label}
        for name, *given in self.changes:
            if name == "terminate" and given[1] and given[0] in world.jobs:
                found |= set(world.below(given[0]))
            elif name == "adopt" and given[0] in world.jobs:
                found |= set(world.above(given[0]))
        return found
