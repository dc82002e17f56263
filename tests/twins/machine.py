"""A Hypothesis machine whose rules act on the store and on its model alike, and which compares them after each rule."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine, invariant

from tests.twins.real import Refused

NEW = "a new value"
"""Stands for a value, which the machine replaces by a number of its own: so no two are alike."""


class Counted:
    """How many operations machines have done: calls, and in runs what their turns did, and their ends."""

    operations = 0


class Twins(RuleBasedStateMachine):
    """The store and its model. A machine says how a client's call acts on the model, and what is to be seen of it."""

    real: Any
    """A `RealTwin`, set by whoever runs the machine."""
    world: Any
    """The model, made by the machine's first rule."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    @staticmethod
    def act(world: Any, *call: Any) -> Any:
        """Do in the model what a client does; raises Refused as `RealTwin.do` does."""
        raise NotImplementedError

    @staticmethod
    def shown(world: Any) -> Any:
        """Return what is to be seen of the model, as `RealTwin.look` tells it of the store."""
        raise NotImplementedError

    @invariant()
    def the_store_is_as_the_model_says(self) -> None:
        if hasattr(self, "world"):
            same(self.real.look(), self.shown(self.world))

    def teardown(self) -> None:
        assert self.real.stage.broken_rules() == []

    # ------------------------------------------------------------------------------------------------------------

    def do(self, call: Any) -> None:
        """Have a client make a call."""
        same(outcome(self.real.do, *call), outcome(self.act, self.world, *call))
        Counted.operations += 1

    def meet(self, first: Any, second: Any, *, looked: Any = None) -> None:
        """Have the second call be made when the first has looked, and has not locked anything: as if one by one.

        `looked`: what the first call is to the model if it is done second, with what it has seen before.
        """
        done: list[Any] = []
        self.real.between(lambda: done.append(outcome(self.real.do, *second)))
        found = outcome(self.real.do, *first)
        self.real.between(lambda: None)  # some calls lock nothing
        store = self.real.look()
        orders = []
        for order in ([second, looked or first], [first, second]) if done else ([first],):
            world = deepcopy(self.world)
            outcomes = [outcome(self.act, world, *call) for call in order]
            orders.append((outcomes[::-1] if order[0] is first and done else outcomes, self.shown(world)))
            if orders[-1] == ([*done, found], store):
                self.world = world
                break
        else:
            raise AssertionError(f"{([*done, found], store)!r} is none of {orders!r}")
        Counted.operations += 2

    def numbered(self, given: Any) -> Any:
        """Return the same with a number for each new value."""
        if isinstance(given, tuple | list):
            return type(given)(self.numbered(part) for part in given)
        if given != NEW:
            return given
        self.number += 1
        return self.number


def outcome(call: Callable[..., Any], *given: Any) -> Any:
    """Return what a call returns, or that it was refused."""
    try:
        return call(*given)
    except Refused as error:
        return f"raised {error}"


def same(found: Any, expected: Any) -> None:
    """Raise AssertionError unless they are the same."""
    assert found == expected, f"{found!r} is not {expected!r}"
