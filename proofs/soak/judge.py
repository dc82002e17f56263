"""What must have come of everything that was promised, whatever died meanwhile."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg

from proofs.soak.load import KINDS, LEAVES, PLACES, ROOT, Effect
from tests.acceptance import checker
from tests.tools.databases import Eye

RESTING: Mapping[str, set[str]] = {
    "soak.reader": {"suspended"},
    "soak.clerk": {"suspended"},
    "soak.tree": {"suspended", "terminated"},
    "soak.leaf": {"suspended", "terminated"},
    "soak.failing": {"failed"},
    "acceptance.adder": {"terminated"},
}
"""How the jobs of a task may rest in the end; of every other task only as completed."""
SHOWN = 8
"""Examples of each complaint."""


@dataclass(frozen=True)
class Account:
    """What clients noted, and what is in the store at the end."""

    lines: list[dict[str, Any]]
    ledger: list[tuple[int, str, int]]
    """(job, what, value)"""
    orders: set[int]
    jobs: list[tuple[int, str, str]]
    """(id, task, status) of the jobs that are still there."""
    dead: list[tuple[int, str, str, str]]
    """(job, task, reason, error)"""


@dataclass
class Tally:
    """One kind of load in figures."""

    asked: int = 0
    promised: int = 0
    unknown: int = 0
    """Asked, and the answer was lost or the client killed."""
    done: int = 0
    """Of all that were asked, those whose effects are all there."""


@dataclass
class Verdict:
    """What is wrong, in words, and figures by kind."""

    wrong: list[str] = field(default_factory=list)
    kinds: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))

    def complain(self, what: str, cases: Iterable[Any]) -> None:
        """Add a complaint, if there is any case of it."""
        found = list(cases)
        if found:
            shown = "; ".join(str(case) for case in found[:SHOWN])
            self.wrong.append(f"{what} ({len(found)}): {shown}{' …' if len(found) > SHOWN else ''}")


def look(url: str) -> list[str]:
    """What is wrong just now, while everything is under way."""
    with Eye(url) as eye:
        return checker.violations(eye)


def read(url: str, lines: list[dict[str, Any]]) -> Account:
    """Read what is to be judged."""
    with psycopg.connect(url, autocommit=True) as connection:

        def rows(statement: str) -> list[Any]:
            return connection.execute(statement).fetchall()

        return Account(
            lines=lines,
            ledger=rows("SELECT job, what, value FROM ledger"),
            orders={key for (key,) in rows("SELECT key FROM orders")},
            jobs=rows("SELECT id, task, status FROM sidejob.jobs"),
            dead=rows("SELECT job_id, task, reason, error FROM sidejob.dead"),
        )


def judge(account: Account) -> Verdict:
    """Compare what there is with what was promised."""
    verdict = Verdict()
    found = Counter((what, value) for _, what, value in account.ledger)
    asks = _asks(account.lines, verdict)
    _judge_effects(verdict, asks, found, account.orders)
    _judge_ledger(verdict, asks, account.ledger)
    _judge_terminations(verdict, account.lines, found)
    _judge_rest(verdict, account)
    verdict.complain(
        "a call raised what no outage explains",
        (f"{line['kind']} {line['key']}: {line['traceback']}" for line in account.lines if line["event"] == "surprise"),
    )
    return verdict


def _asks(lines: list[dict[str, Any]], verdict: Verdict) -> dict[int, tuple[str, bool]]:
    """What was asked, by key: its kind, and whether it was promised."""
    asks: dict[int, tuple[str, bool]] = {}
    for line in lines:
        if line["event"] in ("asking", "promised"):
            asks[line["key"]] = (line["kind"], line["event"] == "promised")
    for kind, promised in asks.values():
        tally = verdict.kinds[kind]
        tally.asked += 1
        tally.promised += promised
        tally.unknown += not promised
    return asks


def _judge_effects(
    verdict: Verdict, asks: Mapping[int, tuple[str, bool]], found: Mapping[Effect, int], orders: set[int]
) -> None:
    """Whatever was promised is there, and of what is unknown all or nothing."""
    lost, halves, orphans = [], [], []
    for key, (kind, promised) in asks.items():
        if kind not in KINDS:
            continue
        wanted = KINDS[kind].wanted(key)
        present = sum(found.get(effect, 0) >= count for effect, count in wanted.items())
        verdict.kinds[kind].done += bool(wanted) and present == len(wanted)
        if not KINDS[kind].promised or present == len(wanted):
            continue
        missing = {
            effect: count - found.get(effect, 0) for effect, count in wanted.items() if found.get(effect, 0) < count
        }
        if kind == "order" and key in orders:
            orphans.append(f"{key} lacks {missing}")
        elif promised:
            lost.append(f"{kind} {key} lacks {missing}")
        elif present or any(found.get(effect, 0) for effect in wanted):
            halves.append(f"{kind} {key} lacks {missing}")
    verdict.complain("promised and lost", lost)
    verdict.complain("half done", halves)
    verdict.complain("a borrowed transaction was committed without its job or its packet", orphans)
    given = {key for key, (kind, _) in asks.items() if kind == "order"}
    verdict.complain(
        "a job or a packet of a borrowed transaction that was not committed",
        (key for key in given - orders if any(found.get(effect) for effect in KINDS["order"].wanted(key))),
    )
    promised_orders = {key for key, (kind, promised) in asks.items() if kind == "order" and promised}
    verdict.complain("a committed order is gone", promised_orders - orders)


def _judge_ledger(
    verdict: Verdict, asks: Mapping[int, tuple[str, bool]], ledger: Iterable[tuple[int, str, int]]
) -> None:
    """Nothing is there twice, and nothing that nobody asked for."""
    entries = Counter(ledger)
    verdict.complain("entered twice", (f"{entry} {count} times" for entry, count in entries.items() if count > 1))
    wanted: Counter[Effect] = Counter()
    for key, (kind, _) in asks.items():
        if kind in KINDS:
            wanted += KINDS[kind].wanted(key)
    effects = Counter((what, value) for _, what, value in entries)
    verdict.complain(
        "entered though nobody asked, or by more jobs than were asked",
        (
            f"{effect} {count} times"
            for effect, count in effects.items()
            if effect[0] not in ("shut", "shutdown") and count > wanted.get(effect, 0)
        ),
    )


def _judge_terminations(verdict: Verdict, lines: list[dict[str, Any]], found: Mapping[Effect, int]) -> None:
    """Every tree whose termination was promised was shut down, each of its jobs once."""
    roots = {line["root"] for line in lines if line["event"] == "promised" and line["kind"] == "fell"}
    verdict.complain(
        "terminated and not shut down", (root for root in roots if found.get(("shut", root * PLACES + ROOT), 0) != 1)
    )
    verdict.complain(
        "terminated and its children not shut down",
        (
            root
            for root in roots
            if found.get(("tree", root)) and any(found.get(("shut", root * PLACES + n), 0) != 1 for n in range(LEAVES))
        ),
    )


def _judge_rest(verdict: Verdict, account: Account) -> None:
    """Every job rests as one of its task must, and nothing is in the dead set that should not be."""
    verdict.complain(
        "rests as it must not",
        (
            f"job {job} of {task} is {status}"
            for job, task, status in account.jobs
            if status not in RESTING.get(task, {"completed"})
        ),
    )
    verdict.complain(
        "in the dead set and should not be",
        (
            f"job {job} of {task}, {reason}: {error}"
            for job, task, reason, error in account.dead
            if task != "soak.failing" or reason != "failed"
        ),
    )
    buried = {job for job, *_ in account.dead}
    failing = {line["job"] for line in account.lines if line["event"] == "promised" and line["kind"] == "failing"}
    verdict.complain("failed and not in the dead set", failing - buried)
