"""What must have come of every durable task, whatever died meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from proofs.storm.audit import Story
from proofs.trial.fleet import LEASE_S

REPEATABLE = {"again", "total", "stubborn", "replaced", "ticked"}
"""Tasks that are never lost: another run follows."""
MAY_END = {
    **{key: {"success", "lost"} for key in ("once", "late", "unwatched", "retrying", "nesting", "told")},
    **{key: {"success"} for key in REPEATABLE},
    "failing": {"failed", "lost"},
}
"""How a task may end, beside what was done to it."""
GOES_ON = {"retrying", "stubborn", "replaced"}
"""Tasks that go on as another message. Where the store has not taken that for a lease they fail, as in Celery."""
SHOWN = 8

Line = Mapping[str, Any]


class Verdict:
    """What is wrong, in words."""

    def __init__(self) -> None:
        self.wrong: list[str] = []

    def complain(self, what: str, cases: Iterable[Any]) -> None:
        """Add a complaint, if there is any case of it."""
        found = [str(case) for case in cases]
        if found:
            self.wrong.append("\n  ".join([f"{what} ({len(found)}):", *found[:SHOWN]]))


def judge(stories: Mapping[str, Story], lines: Sequence[Line]) -> Verdict:
    """Compare what became of each task with what was promised."""
    verdict = Verdict()
    accepted = [line for line in lines if line["event"] == "accepted"]
    _judge_ends(verdict, stories, accepted, [line for line in lines if line["event"] == "meant"])
    _judge_starts(verdict, stories)
    _judge_what_follows(verdict, stories, accepted)
    verdict.complain(
        "a call raised what no outage explains",
        (f"{line['form']}: {line['traceback']}" for line in lines if line["event"] == "surprise"),
    )
    return verdict


def _judge_ends(
    verdict: Verdict, stories: Mapping[str, Story], accepted: Sequence[Line], meant: Sequence[Line]
) -> None:
    """Each task that was accepted, and each of which there was a row, has ended once, as it may."""
    promised = [task_id for line in accepted for task_id in line["ids"]]
    verdict.complain("accepted, and there never was a row", (one for one in promised if one not in stories))
    verdict.complain(
        "rolled back, and there was a row",
        (one for line in accepted for one in line.get("never", ()) if one in stories),
    )
    verdict.complain(
        "has not ended once", (f"{one} {story}" for one, story in stories.items() if len(story.outcomes) != 1)
    )
    verdict.complain("was kept twice", (f"{one} {story}" for one, story in stories.items() if story.lives > 1))
    done_to = {one: {line["outcome"]} for line in meant for one in line["ids"]}
    verdict.complain(
        "ended as it may not",
        (
            f"{one} {story}" for one, story in stories.items()
            if not set(story.outcomes) <= MAY_END[_name(story)] | done_to.get(one, set()) | _may_fail(story)
        ),
    )  # fmt: skip
    verdict.complain(
        "ended well, and no body has",
        (f"{one} {story}" for one, story in stories.items() if story.succeeded and not story.ends),
    )


def _judge_starts(verdict: Verdict, stories: Mapping[str, Story]) -> None:
    """Each beginning has a lock of its own; before each further one the last was released, or its worker was dead."""
    unlocked, held, repeated, went_on = [], [], [], []
    for one, story in stories.items():
        locks = story.of("locked")
        if any(Counter(_runs(story)) - Counter((lock.generation, lock.pid) for lock in locks)):
            unlocked.append(f"{one} {story}")
        for before, after in pairwise(locks):
            between = [move for move in story.of("released", "went on") if before.id < move.id < after.id]
            if not between:
                held.append(f"{one} {story}")
            elif between[0].move == "released" and not between[0].worker_is_dead:
                ended = [line for line in story.ends if line["pid"] == before.pid != after.pid]
                if any(line["at"] > after.at.timestamp() for line in ended):
                    went_on.append(f"{one} {story}")
        if _name(story) not in REPEATABLE and max(Counter(run[0] for run in _runs(story)).values(), default=0) > 1:
            repeated.append(f"{one} {story}")
    verdict.complain("began without a lock", unlocked)
    verdict.complain("was locked while another run held it", held)
    verdict.complain("was given back and went on", went_on)
    verdict.complain("was repeated unseen", repeated)


def _judge_what_follows(verdict: Verdict, stories: Mapping[str, Story], accepted: Sequence[Line]) -> None:
    """What follows a task has ended once if that has ended well, and never began otherwise."""
    lost, unasked = [], []
    for line in accepted:
        pairs = [([before], after) for before, after in line.get("then", ())]
        if "chord" in line:
            pairs = [(line["ids"], line["chord"])]
        for before, after in pairs:
            stories_before = [stories[one] for one in before if one in stories]
            well = len(stories_before) == len(before) and all(story.succeeded for story in stories_before)
            # A part that was called lost has failed its chord, whatever came of it later.
            if well and after not in stories and not (
                "chord" in line and any(story.ended_after_it_was_called_lost for story in stories_before)
            ):  # fmt: skip
                lost.append(f"{line['form']} {after} after " + " and ".join(f"{s}" for s in stories_before))
            if not well and after in stories:
                unasked.append(f"{line['form']} {after} after " + " and ".join(f"{s}" for s in stories_before))
    verdict.complain("what follows was lost", lost)
    verdict.complain("what follows began though that before it has not ended well", unasked)


def _may_fail(story: Story) -> set[str]:
    if _name(story) not in GOES_ON or not story.begins:
        return set()
    tried_s = (move.at.timestamp() - story.begins[-1]["at"] for move in story.of("buried"))
    return {"failed"} if any(seconds >= LEASE_S for seconds in tried_s) else set()


def _runs(story: Story) -> list[tuple[int, int]]:
    return [(line["generation"], line["pid"]) for line in story.begins]


def _name(story: Story) -> str:
    return story.task.rpartition(".")[2]
