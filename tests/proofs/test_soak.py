"""The judge of a soak finds what was broken, and the same seed draws the same faults."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from proofs.soak.figures import GIVEN_UP, rescue_times
from proofs.soak.judge import Account, judge
from proofs.soak.load import KINDS, LISTENERS, PLACES, ROOT
from proofs.trial.faults import FAULTS, Happening, Loss
from proofs.trial.schedule import Schedule


def asked(kind: str, key: int, *, promised: bool = True, **more: Any) -> list[dict[str, Any]]:
    """What a client notes of one ask."""
    lines = [{"event": "asking", "kind": kind, "key": key, **more}]
    return lines + [{"event": "promised", "kind": kind, "key": key, "at": 0.0, **more}] * promised


LINES = [
    *asked("single", 1), *asked("bulk", 2), *asked("news", 3), *asked("order", 4), *asked("tree", 5),
    *asked("fell", 6, root=5), *asked("failing", 7, job=70), *asked("given up", 8), *asked("bulk", 9, promised=False),
]  # fmt: skip
ENTRIES = [
    *[(10 + place, what, value) for kind, key in (("single", 1), ("bulk", 2), ("order", 4), ("tree", 5))
      for place, (what, value) in enumerate(KINDS[kind].wanted(key))],
    *[(listener, "news", 3) for listener in range(LISTENERS)],
    *[(50 + place, "shut", 5 * PLACES + place) for place in (0, 1, ROOT)],
]  # fmt: skip
GOOD = Account(
    lines=LINES, ledger=ENTRIES, orders={4}, jobs=[(10, "soak.enter", "completed"), (70, "soak.failing", "failed")],
    dead=[(70, "soak.failing", "failed", "Flaw")],
)  # fmt: skip


def without(*entries: tuple[str, int]) -> Account:
    """The good account less some entries."""
    return replace(GOOD, ledger=[entry for entry in ENTRIES if entry[1:] not in entries])


def test_a_good_account_is_found_good() -> None:
    verdict = judge(GOOD)
    assert verdict.wrong == []
    assert vars(verdict.kinds["bulk"]) == {"asked": 2, "promised": 1, "unknown": 1, "done": 1}


@pytest.mark.parametrize(
    ("account", "complaint"),
    [
        (without(("single", 1)), "promised and lost (1): single 1 lacks"),
        (without(("bulk", 200)), "promised and lost (1): bulk 2 lacks"),
        (replace(GOOD, ledger=ENTRIES[:-4] + ENTRIES[-3:]), "promised and lost (1): news 3 lacks"),
        (replace(GOOD, ledger=[*ENTRIES, (60, "bulk", 900)]), "half done (1): bulk 9 lacks"),
        (replace(GOOD, ledger=[*ENTRIES, ENTRIES[0]]), "entered twice (1): (10, 'single', 1) 2 times"),
        (replace(GOOD, ledger=[*ENTRIES, (60, "single", 1)]), "entered though nobody asked, or by more jobs"),
        (replace(GOOD, ledger=[*ENTRIES, (60, "order", 8)]), "entered though nobody asked, or by more jobs"),
        (without(("order", 4)), "a borrowed transaction was committed without its job or its packet (1): 4 lacks"),
        (replace(GOOD, orders=set()), "a job or a packet of a borrowed transaction that was not committed (1): 4"),
        (without(("shut", 5 * PLACES + ROOT)), "terminated and not shut down (1): 5"),
        (without(("shut", 5 * PLACES)), "terminated and its children not shut down (1): 5"),
        (replace(GOOD, jobs=[(10, "soak.enter", "suspended")]), "rests as it must not (1): job 10 of soak.enter"),
        (replace(GOOD, dead=[]), "failed and not in the dead set (1): 70"),
        (replace(GOOD, dead=[*GOOD.dead, (9, "soak.enter", "lost", "")]), "in the dead set and should not be (1)"),
        (
            replace(GOOD, lines=[*LINES, {"event": "surprise", "kind": "note", "key": 1, "traceback": "KeyError"}]),
            "a call raised what no outage explains (1): note 1: KeyError",
        ),
    ],
)  # fmt: skip
def test_what_is_broken_is_found(account: Account, complaint: str) -> None:
    assert [wrong for wrong in judge(account).wrong if wrong.startswith(complaint)]


def drawn(seed: int, count: int, *, own_broker: bool = True) -> list[str | None]:
    """The faults that a seed draws, one at a time."""
    broker = SimpleNamespace(server=object() if own_broker else None)
    scenery: Any = SimpleNamespace(dice=random.Random(seed), ground=SimpleNamespace(broker=broker))
    schedule = Schedule(scenery, say=print)
    return [schedule._draw() for _ in range(count)]


def test_a_seed_draws_the_same_faults_and_leaves_none_out() -> None:
    cards = sum(fault.cards for fault in FAULTS.values())
    assert drawn(7, 100) == drawn(7, 100) != drawn(8, 100)
    assert set(drawn(7, cards)) == set(FAULTS)
    assert set(FAULTS) - set(drawn(7, 200, own_broker=False)) == {"broker killed", "broker stopped"}


def test_a_rescue_belongs_to_the_last_fault_of_its_process() -> None:
    killed, stopped, net = Happening("killed", 10, 10), Happening("stopped", 20, 30), Happening("net", 24, 25)
    losses = [Loss(10, frozenset({1}), killed), Loss(20, frozenset({2}), stopped, until=30)]
    freed = [(12.0, 1, True), (26.0, 2, True), (99.0, 2, True), (26.0, 2, False), (12.0, None, True)]
    times = rescue_times(freed, losses, [killed, stopped, net])
    assert {name: (of["n"], of["most"]) for name, of in times.items()} == {
        "killed": (1, 2.0),
        "stopped, beside other faults": (1, 6.0),
        GIVEN_UP: (2, 0.0),
    }
