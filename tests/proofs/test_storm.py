"""The judge of a storm finds what was broken."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from proofs.storm.audit import Story
from proofs.storm.judge import judge
from proofs.trial.fleet import LEASE_S

BEGUN_AT = datetime(2026, 11, 22, tzinfo=UTC)
KEPT, GONE = {"move": "kept"}, {"move": "gone"}
LOCKED, LOCKED_AGAIN = {"move": "locked", "pid": 1}, {"move": "locked", "pid": 2}
BURIED = [{"move": "gone", "xact": 0}, {"move": "buried", "xact": 0, "reason": "failed"}]
LOST = [{"move": "gone", "xact": 0}, {"move": "buried", "xact": 0, "reason": "lost"}]
TAKEN = {"move": "released", "worker_is_dead": True}
GIVEN_BACK = {"move": "released", "worker_is_dead": False}


def story(task: str, *moves: dict[str, Any], begins: str = "1", ends: str = "1") -> Story:
    """What the store noted of a task, a second apart, and in which processes a body began, and ended at last."""
    nothing = {"generation": 1, "worker": None, "pid": None, "worker_is_dead": None, "reason": None}
    noted = [
        SimpleNamespace(**{**nothing, "id": number, "at": BEGUN_AT + timedelta(seconds=number), "xact": number, **move})
        for number, move in enumerate(moves, start=1)
    ]
    last = BEGUN_AT.timestamp() + len(moves) + 1
    return Story(
        task=f"storm.{task}",
        moves=noted,
        begins=[{"event": "begins", "generation": 1, "pid": int(pid), "at": last} for pid in begins],
        ends=[{"event": "ends", "pid": int(pid), "at": last} for pid in ends],
    )


GOOD = {
    "once": story("once", KEPT, LOCKED, GONE),
    "next": story("again", KEPT, LOCKED, TAKEN, LOCKED_AGAIN, GONE, begins="12", ends="2"),
    "failing": story("failing", KEPT, LOCKED, *BURIED, ends=""),
    "lost": story("once", KEPT, LOCKED, TAKEN, *LOST, ends=""),
    "part": story("once", KEPT, LOCKED, GONE),
    "body": story("total", KEPT, LOCKED, GONE),
}
LINES = [
    {"event": "accepted", "form": "chain", "ids": ["once"], "then": [("once", "next")]},
    {"event": "accepted", "form": "failing", "ids": ["failing"]},
    {"event": "accepted", "form": "link", "ids": ["lost"], "then": [("lost", "never begun")]},
    {"event": "accepted", "form": "chord", "ids": ["part"], "chord": "body"},
    {"event": "accepted", "form": "transaction", "ids": [], "never": ["rolled back"]},
]


def test_good_stories_are_found_good() -> None:
    assert judge(GOOD, LINES).wrong == []


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"part": None}, "accepted, and there never was a row (1): part"),
        ({"rolled back": story("once", KEPT, LOCKED, GONE)}, "rolled back, and there was a row (1): rolled back"),
        ({"once": story("once", KEPT, LOCKED)}, "has not ended once (1): once"),
        ({"once": story("once", KEPT, LOCKED, GONE, *LOST)}, "has not ended once (1): once"),
        ({"once": story("once", KEPT, KEPT, LOCKED, GONE)}, "was kept twice (1): once"),
        ({"next": story("again", KEPT, LOCKED, *LOST)}, "ended as it may not (1): next"),
        ({"once": story("once", KEPT, LOCKED, GONE, ends="")}, "ended well, and no body has (1): once"),
        ({"once": story("once", KEPT, GONE)}, "began without a lock (1): once"),
        ({"next": story("again", KEPT, LOCKED, LOCKED_AGAIN, GONE)}, "was locked while another run held it (1): next"),
        (
            {"next": story("again", KEPT, LOCKED, GIVEN_BACK, LOCKED_AGAIN, GONE)},
            "was given back and went on (1): next",
        ),
        (
            {"once": story("once", KEPT, LOCKED, TAKEN, LOCKED_AGAIN, GONE, begins="12")},
            "was repeated unseen (1): once",
        ),
        ({"next": None}, "what follows was lost (1): chain next after once"),
        ({"body": None}, "what follows was lost (1): chord body after once"),
        (
            {"never begun": story("once", KEPT, LOCKED, GONE)},
            "what follows began though that before it has not ended well (1): link never begun after once",
        ),
    ],
)  # fmt: skip
def test_what_is_broken_is_found(changed: Mapping[str, Story | None], complaint: str) -> None:
    stories = {task_id: told for task_id, told in {**GOOD, **changed}.items() if told is not None}

    found = [" ".join(wrong.split()) for wrong in judge(stories, LINES).wrong]

    assert [wrong for wrong in found if wrong.startswith(complaint)], found


def test_what_a_client_meant_counts_though_it_died_before_it_was_promised_anything() -> None:
    late = story("once", KEPT, BURIED[0], {**BURIED[1], "reason": "expired"}, begins="", ends="")
    stories = {**GOOD, "late": late}

    assert "ended as it may not (1)" in judge(stories, LINES).wrong[0]
    assert judge(stories, [*LINES, {"event": "meant", "ids": ["late"], "outcome": "expired"}]).wrong == []


@pytest.mark.parametrize(("tried_s", "is_good"), [(LEASE_S + 1, True), (LEASE_S - 1, False)])
def test_what_could_not_be_sent_for_a_lease_may_fail(tried_s: float, is_good: bool) -> None:
    fell_silent = story("replaced", KEPT, LOCKED, *BURIED, ends="")
    fell_silent.begins[0]["at"] = fell_silent.moves[-1].at.timestamp() - tried_s  # type: ignore[index]

    assert (judge({**GOOD, "late": fell_silent}, LINES).wrong == []) is is_good


def test_a_call_that_raises_what_no_outage_explains_is_found() -> None:
    surprise = {"event": "surprise", "form": "delay", "traceback": "KeyError"}

    (wrong,) = judge(GOOD, [*LINES, surprise]).wrong

    assert wrong.split("\n  ") == ["a call raised what no outage explains (1):", "delay: KeyError"]


def test_a_part_that_was_called_lost_and_went_on_has_failed_its_chord_all_the_same() -> None:
    doomed = {"move": "doomed", "reason": "lost"}
    stories = {**GOOD, "part": story("once", KEPT, LOCKED, TAKEN, doomed, GONE)}
    del stories["body"]

    assert judge(stories, LINES).wrong == []
