"""What a run does, as a list of steps for each turn: played by the model and by a real run alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from tests.dataflow.model import NONE, Ended, Key, Run, World
from tests.twins.real import Refused

Step = tuple[Any, ...]
"""The name of a method of `Player`, and its arguments."""


class Player(Protocol):
    """Who plays a script."""

    def turns(self, names: Sequence[str], commit_every: int) -> Iterator[Any]: ...
    def write(self, key: Key, values: Sequence[Any]) -> None: ...
    def publish(self, channel: str, value: Any) -> None: ...
    def set_default(self, key: Key, value: Any) -> None: ...
    def read(self, key: Key) -> Any: ...
    def checkpoint(self) -> None: ...
    def crash(self, when: str) -> None: ...
    def fail(self) -> None: ...
    def meanwhile(self, *call: Any) -> None: ...
    def block(self, effect: Any, key: Key | None, how: str) -> None: ...


@dataclass(frozen=True)
class Script:
    """`for_inputs(*names)`, whose first turns do these steps; and where the end crashes, if it does."""

    names: tuple[str, ...]
    commit_every: int
    turns: tuple[tuple[Step, ...], ...]
    end: str = ""
    """"before" or "after" the commit of the end."""

    def play(self, player: Player, seen: list[Any]) -> None:
        """Do the turns, and add what is read to `seen`."""
        steps = iter(self.turns)
        for values in player.turns(self.names, self.commit_every):
            seen.append(values)
            for name, *given in next(steps, ()):
                found = getattr(player, name)(*given)
                if found is not None:
                    seen.append(found)

    def arm_end(self, at: Callable[[str, Callable[[], Any]], None], crash: Callable[[], Any]) -> None:
        """Have the end crash, if it is to; what was armed for an earlier run is not."""
        for when in ("before", "after"):
            at(f"checkpoint:{when}-commit", _nothing)
            at(f"end:{when}-commit", crash if when == self.end else _nothing)


def _nothing() -> None:
    pass


def run(world: World, job: int, script: Script) -> tuple[list[Any], str]:
    """Do a run in the model; return what its body saw, and how it ended, as `Real.run` does."""
    seen: list[Any] = []
    played = ModelRun(world, job)
    how, error = "completed", "ended"
    try:
        try:
            script.play(played, seen)
        except Ended as ended:
            how = ended.how
            if how == "crashed":
                raise
        played.finish()
    except Refused as refused:
        how, error = "failed", str(refused)
    except ZeroDivisionError as raised:
        how, error = "failed", type(raised).__name__
    except Ended:
        played.crash()
        return seen, "crashed"
    if script.end == "before":
        played.crash()
        return seen, "crashed"
    played.end(how)
    return seen, "crashed" if script.end == "after" else error


class ModelRun(Run):
    """What a script does in the model."""

    def __init__(self, world: World, job: int) -> None:
        super().__init__(world, job)
        self._defaults_only = False

    def turns(self, names: Sequence[str], commit_every: int) -> Iterator[Any]:
        """The turns of `for_inputs`."""
        keys: list[Key] = [(self.job, "in", name) for name in names]
        turns = 0
        while any(self.has_packet(key) for key in keys):
            if not all(self.has_packet(key) or self.default(key) is not NONE for key in keys):
                raise Ended("suspended")
            yield [self.read(key) for key in keys]
            self._leave_turn()
            turns += 1
            if turns >= commit_every:
                if not self.unit.empty:
                    self.commit()
                turns = 0
        defaults = [self.default(key) for key in keys]
        memo = self.unit.memo or self.world.jobs[self.job].memo
        now = sorted(zip(names, map(repr, defaults), strict=True))
        if NONE in defaults or memo.get(frozenset(names)) == now:
            return
        self.unit.memo = {**memo, frozenset(names): now}
        self._defaults_only = True
        yield defaults
        self._defaults_only = False
        self._leave_turn()

    def _leave_turn(self) -> None:
        if self.undone == "inputs":
            raise Refused("UnitNotCommittedError")

    def finish(self) -> None:
        """Leave the body."""
        if self.undone is not None:
            raise Refused("UnitNotCommittedError")

    # -- steps ---------------------------------------------------------------------------------------------------

    def write(self, key: Key, values: Sequence[Any]) -> None:
        self.add("write", key, list(values), {"as_default": self._defaults_only})

    def publish(self, channel: str, value: Any) -> None:
        self.add("publish", channel, value)

    def set_default(self, key: Key, value: Any) -> None:
        self.add("default", key, value)

    def checkpoint(self) -> None:
        self.commit()

    def crash(self, when: str = "") -> None:
        """Die at the next commit; without `when` the rest of a death is done here."""
        if when == "":
            super().crash()
            return
        if when == "after":
            self.commit()
        elif self.undone == "inputs":
            raise Refused("UnitNotCommittedError")
        raise Ended("crashed")

    def fail(self) -> None:
        raise ZeroDivisionError

    def meanwhile(self, name: str, *given: Any) -> None:
        with suppress(Refused):
            do(self.world, name, *given)

    def block(self, effect: Any, key: Key | None, how: str) -> None:
        before = self.unit.copy()
        if key is not None:
            self.write(key, [effect])
        if how in ("crash in it", "crash before"):
            raise Ended("crashed")
        if how == "roll back":
            self.roll_back(before)
            return
        self.commit(block=True)
        self.world.effects.append(effect)
        if how == "crash after":
            raise Ended("crashed")


def do(world: World, name: str, *given: Any) -> Any:
    """Do in the model what a client does, as `Real.do` does."""
    try:
        return _do(world, name, *given)
    finally:
        world.deliver()


def _do(world: World, name: str, *given: Any) -> Any:
    context: dict[str, Any] = {}
    match name, given:
        case "write", (key, values, how):
            return world.write(key, values, context, notify=how != "quiet", as_default=how == "default")
        case "write_in_transaction", (key, values, commits):
            world.port(key)
            return world.write(key, values, context) if commits else None
        case "read_in_transaction", (key, commits):
            port = world.port(key)
            if commits or not port.packets:
                return world.read(key)
            return port.packets[0][0]
        case "drain", (key,):
            port = world.port(key)
            values, port.packets = [value for value, _ in port.packets], []
            return values
        case "measure", (key,):
            port = world.port(key)
            return len(port.packets), bool(port.packets) or port.default is not NONE
        case "publish", (channel, value):
            return world.publish(channel, value, context)
        case "connect", (_, []):
            raise Refused("InvalidPortError")
        case "configure", (job, inports, outports):
            for direction, options in (("in", inports), ("out", outports)):
                if options is not None or (inports, outports) == (None, None):
                    world.configure(job, direction, options or {})
            return None
        case "read_many", (key, most):
            port = world.port(key)
            values, port.packets = [value for value, _ in port.packets[:most]], port.packets[most:]
            return values
        case "ask", (job, force):
            return world.ask(job, force=force)
    return getattr(world, name)(*given)
